// DeviceProfile: what timings depend on, and the limits that a launch must
// respect. Part of the measure digest, never of the build digest.

#ifndef KILN_COMPILER_SPEC_DEVICE_PROFILE_H_
#define KILN_COMPILER_SPEC_DEVICE_PROFILE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "compiler/base/digest.h"
#include "compiler/spec/target.h"

namespace kiln {

struct DeviceProfile {
  Target target;
  // True when no such device was present: the values are the target's usual
  // ones and nothing can have been measured with them.
  bool assumed = false;

  // Measure identity. Zero or empty where a field does not apply.
  int compute_capability = 0;  // major * 10 + minor; CUDA
  std::string processor;       // CPU: "vendor-family-model-stepping"
  int multiprocessors = 0;     // SMs, or hardware threads of the CPU
  int memory_gib = 0;          // device memory, rounded up to 16 GiB; CUDA
  int64_t l2_bytes = 0;        // L2 of the GPU; last-level cache of the CPU
  std::string mig;             // MIG shape; empty when MIG is off
  int driver_version = 0;      // CUDA: as cuDriverGetVersion, e.g. 13000

  // Limits.
  int64_t shared_bytes_max = 0;     // per block, opt-in
  int64_t shared_bytes_per_sm = 0;  // of one multiprocessor
  int registers_per_sm = 0;
  int threads_per_block_max = 0;

  // Provenance only, never keyed.
  std::string name;        // marketing name
  std::string pci_bus_id;  // "0000:18:00.0"; CUDA
  std::string uuid;        // of the GPU or its slice, 32 hex digits; CUDA

  // The measure identity for people: "NVIDIA H200, sm_90a, 132 SMs, 144 GiB, L2
  // 60 MiB, driver 13000".
  std::string Describe() const;

  // Adds the measure identity.
  void Encode(CanonicalEncoder* encoder) const;
};

// Published limits of a target for machines without the device (CUDA C++
// Programming Guide, table of compute capabilities). `assumed` is set.
DeviceProfile AssumedProfile(const Target& target);

// This machine's processor as a device for `target`.
//   Errors: FailedPrecondition when the processor is below the target's level,
//   naming both.
absl::StatusOr<DeviceProfile> HostCpuProfile(const Target& target);

}  // namespace kiln

#endif  // KILN_COMPILER_SPEC_DEVICE_PROFILE_H_
