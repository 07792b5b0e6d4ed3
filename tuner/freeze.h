// Freeze: stored plans of a manifest -> one bundle file. What was written is
// reopened through the runtime and compared with what was meant. Where a target
// has its device here, its plans run once on golden inputs and the digests of
// their outputs go into the file (runtime/bundle_format.md, "Golden replay").

#ifndef KILN_TUNER_FREEZE_H_
#define KILN_TUNER_FREEZE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cache/plan_cache.h"
#include "compiler/base/digest.h"
#include "compiler/spec/manifest.h"
#include "tuner/capacity_curve.h"
#include "tuner/prewarm.h"
#include "tuner/qualification.h"

namespace kiln {

// Oldest driver that a CUDA section may be loaded with, as cuDriverGetVersion
// counts: CUDA 12.4 is the first whose driver tells parameter layouts.
inline constexpr uint32_t kDriverVersionMin = 12040;

struct FreezeResult {
  std::string bytes;
  Digest root;
  size_t entries = 0;
  size_t plans = 0;   // in the bundle
  size_t merged = 0;  // intervals that the plan of a larger capacity serves
  size_t predicted = 0;
  size_t unqualified = 0;  // plans of templates without a qualification
  size_t programs = 0;
  size_t golden = 0;  // plans with a digest of golden replay
};

// What a bundle may contain, and what counts as qualified.
struct FreezePolicy {
  bool allow_predicted = false;    // plans that never ran
  bool allow_unqualified = false;  // templates without a qualification
  // Run golden replay for the targets whose device is here. Without it, equal
  // caches give equal bytes on machines with and without the device.
  bool golden = true;
  // Of MergeIntervals; absent: each interval of the manifest keeps its plan.
  std::optional<double> regret_cap = kRegretCap;
  std::vector<QualificationReceipt> receipts = Receipts();
};

// Builds the bundle of every request of the manifest on every target. Adjacent
// intervals that one plan may serve become one (tuner/capacity_curve.h); the
// bundle's intervals leave no gap. Equal caches give equal bytes, and so does
// golden replay on devices that compute alike.
//   Errors: NotFound when an interval has no stored plan, naming it and what to
//   do; FailedPrecondition for predicted plans and for templates without a
//   qualification, unless allowed; DataLoss when a program is damaged; Internal
//   when the file does not read back as it was written, or when a plan that
//   should repeat itself does not.
absl::StatusOr<FreezeResult> Freeze(const Manifest& manifest,
                                    const PrewarmOptions& options,
                                    const FreezePolicy& policy,
                                    PlanCache* cache);

}  // namespace kiln

#endif  // KILN_TUNER_FREEZE_H_
