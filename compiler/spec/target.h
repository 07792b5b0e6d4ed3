// Target: what code is generated for. A target is matched exactly, never
// "close enough": sm_90a is not sm_90.

#ifndef KILN_COMPILER_SPEC_TARGET_H_
#define KILN_COMPILER_SPEC_TARGET_H_

#include <compare>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kiln {

enum class Backend { kCuda, kCpu };

// "cuda" or "cpu".
absl::string_view BackendName(Backend backend);

struct Target {
  Backend backend = Backend::kCpu;
  // CUDA: compute capability as major * 10 + minor, for example 90.
  // CPU: the x86-64 psABI level, 2 to 4.
  int level = 0;
  // CUDA only: the architecture-specific variant, the trailing "a".
  bool arch_specific = false;

  // "sm_90a", "sm_80", "cpu-x86-64-v3".
  std::string ToString() const;

  auto operator<=>(const Target&) const = default;
};

// Parses the exact spelling that ToString prints. InvalidArgument otherwise.
// "cpu" is not a target; see HostCpuTarget.
absl::StatusOr<Target> ParseTarget(absl::string_view text);

// The best x86-64 psABI level of this processor (System V x86-64 psABI §3.1.1).
// FailedPrecondition below level 2.
absl::StatusOr<Target> HostCpuTarget();

}  // namespace kiln

#endif  // KILN_COMPILER_SPEC_TARGET_H_
