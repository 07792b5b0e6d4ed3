#include "compiler/spec/target.h"

#include <cpuid.h>

#include <algorithm>
#include <array>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "compiler/base/check.h"

namespace kiln {
namespace {

constexpr absl::string_view kCpuPrefix = "cpu-x86-64-v";

// Architectures that the templates are written for and that NVRTC 13 knows.
constexpr std::array<int, 9> kCudaLevels = {80,  86,  87,  89, 90,
                                            100, 103, 120, 121};

absl::Status UnknownTarget(absl::string_view text) {
  return absl::InvalidArgumentError(absl::StrCat(
      "target \"", text,
      "\" is unknown; expected sm_80, sm_86, sm_87, sm_89, sm_90, sm_90a, "
      "sm_100, sm_100a, sm_103, sm_103a, sm_120, sm_120a, sm_121, sm_121a, "
      "cpu-x86-64-v2, cpu-x86-64-v3, cpu-x86-64-v4, or cpu for this machine"));
}

}  // namespace

absl::string_view BackendName(Backend backend) {
  switch (backend) {
    case Backend::kCuda:
      return "cuda";
    case Backend::kCpu:
      return "cpu";
  }
  KILN_UNREACHABLE();
}

std::string Target::ToString() const {
  switch (backend) {
    case Backend::kCuda:
      return absl::StrCat("sm_", level, arch_specific ? "a" : "");
    case Backend::kCpu:
      return absl::StrCat(kCpuPrefix, level);
  }
  KILN_UNREACHABLE();
}

absl::StatusOr<Target> ParseTarget(absl::string_view text) {
  Target target;
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, kCpuPrefix)) {
    target.backend = Backend::kCpu;
    if (!absl::SimpleAtoi(rest, &target.level) || target.level < 2 ||
        target.level > 4) {
      return UnknownTarget(text);
    }
  } else if (absl::ConsumePrefix(&rest, "sm_")) {
    target.backend = Backend::kCuda;
    target.arch_specific = absl::ConsumeSuffix(&rest, "a");
    if (!absl::SimpleAtoi(rest, &target.level) ||
        std::find(kCudaLevels.begin(), kCudaLevels.end(), target.level) ==
            kCudaLevels.end() ||
        (target.arch_specific && target.level < 90)) {
      return UnknownTarget(text);
    }
  } else {
    return UnknownTarget(text);
  }
  // Spellings that a number parser lets through, such as "sm_090".
  if (target.ToString() != text) return UnknownTarget(text);
  return target;
}

absl::StatusOr<Target> HostCpuTarget() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) {
    return absl::FailedPreconditionError("this processor has no CPUID leaf 1");
  }
  const unsigned features = c;
  unsigned b7 = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) b7 = b;
  unsigned c81 = 0;
  if (__get_cpuid(0x80000001, &a, &b, &c, &d)) c81 = c;
  const auto all = [](unsigned value, unsigned mask) {
    return (value & mask) == mask;
  };
  // The operating system must save the wide registers (XCR0), otherwise the
  // instructions fault although CPUID lists them.
  unsigned xcr0 = 0;
  if ((features & bit_OSXSAVE) != 0) {
    unsigned high = 0;
    __asm__("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
  }
  Target target;
  target.backend = Backend::kCpu;
  if (!all(features, bit_CMPXCHG16B | bit_POPCNT | bit_SSE3 | bit_SSE4_1 |
                         bit_SSE4_2 | bit_SSSE3)) {
    return absl::FailedPreconditionError(
        "this processor is below x86-64-v2, the lowest CPU target");
  }
  target.level = 2;
  if (all(xcr0, 0x6) &&
      all(features, bit_AVX | bit_F16C | bit_FMA | bit_MOVBE | bit_OSXSAVE) &&
      all(b7, bit_AVX2 | bit_BMI | bit_BMI2) && (c81 & bit_LZCNT) != 0) {
    target.level = 3;
    if (all(xcr0, 0xE6) && all(b7, bit_AVX512F | bit_AVX512BW | bit_AVX512CD |
                                       bit_AVX512DQ | bit_AVX512VL)) {
      target.level = 4;
    }
  }
  return target;
}

}  // namespace kiln
