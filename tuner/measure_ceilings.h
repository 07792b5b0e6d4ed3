// MeasureCeilings: what a device can do at best, measured on it.

#ifndef KILN_TUNER_MEASURE_CEILINGS_H_
#define KILN_TUNER_MEASURE_CEILINGS_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/spec/plan.h"
#include "compiler/toolchain_probe.h"
#include "tuner/ceilings.h"
#include "tuner/device.h"

namespace kiln {

struct MeasureOptions {
  int jobs = 1;      // compile workers
  int bits_min = 2;  // of the weights; each codebook is measured for each
  int bits_max = 5;
  // Called with a line for people before each ceiling.
  std::function<void(const std::string&)> progress;
};

// GPU: small kernels with one loop each (tuner/ceilings.cu), through the
// runtime like any plan. CPU: reading with all threads; decoding and
// multiplying from two launches of the fused_moe template, with 1 and with 16
// rows of one expert whose weights stay in the cache, solved for the two.
// The best of a few runs counts; `measured_unix` is left to the caller.
//   Errors: those of the compiler and the device.
absl::StatusOr<Ceilings> MeasureCeilings(Device* device,
                                         const CompilerSetup& setup,
                                         const MeasureOptions& options);

// The programs that MeasureCeilings compiles for a GPU.
std::vector<SourceUnit> CeilingUnits(const MeasureOptions& options);

// ceilings.cu as (name, text); generated.
const std::vector<std::pair<std::string, std::string>>& CeilingKernels();

}  // namespace kiln

#endif  // KILN_TUNER_MEASURE_CEILINGS_H_
