#include "templates/fused_moe/code_target.h"

#include "absl/strings/str_cat.h"

namespace kiln {
namespace {

// Registers for the sums, and for fragments and scales of each strip. With more
// of them ptxas 13.0 spills for sm_89, sm_120 or sm_120a.
constexpr int64_t kRegistersMax = 144;
constexpr int64_t kStripRegisters = 20;

}  // namespace

bool MultipliesE4m3(const Target& target) {
  return target.backend == Backend::kCuda &&
         (target.level == 89 || target.level / 10 == 12);
}

bool IsBlockScaled(const Target& target) {
  return target.backend == Backend::kCuda && target.level / 10 == 12 &&
         target.arch_specific;
}

absl::string_view CodeSums(const Target& target) {
  return IsBlockScaled(target) ? "scaled64" : "fold32";
}

std::string CodeRegistersRule(int64_t strips, int64_t tokens) {
  const int64_t registers = strips * (tokens / 8 * 4 + kStripRegisters);
  if (registers <= kRegistersMax) return "";
  return absl::StrCat(registers, " registers for sums and fragments, at most ",
                      kRegistersMax, " leave none to spill");
}

}  // namespace kiln
