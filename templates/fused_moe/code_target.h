// Targets whose tensor cores multiply E4M3 codes, and what the host knows of
// products as code_product.h makes them.

#ifndef KILN_TEMPLATES_FUSED_MOE_CODE_TARGET_H_
#define KILN_TEMPLATES_FUSED_MOE_CODE_TARGET_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "compiler/spec/target.h"

namespace kiln {

// Input channels of a stage.
inline constexpr int64_t kCodeDepth = 128;
// Of one row of a stage in shared memory: its codes, and 16 bytes that begin
// with their scales.
inline constexpr int64_t kCodeStageRowBytes = kCodeDepth + 16;

// Whether mma.sync of E4M3 is one instruction: on sm_89, and on sm_120 and its
// family. On others it becomes conversions and MMAs of binary16.
bool MultipliesE4m3(const Target& target);

// Whether that MMA takes the scales of 32 input channels: sm_120a and its
// family. KILN_BLOCK_SCALED of a kernel.
bool IsBlockScaled(const Target& target);

// "fold32", "scaled64": of how many input channels the tensor core makes a sum
// by itself, which is part of a class of numerics.
absl::string_view CodeSums(const Target& target);

// Empty, or why a thread would spill: it holds the sums of `strips` strips of
// 16 output channels and of `tokens` tokens.
std::string CodeRegistersRule(int64_t strips, int64_t tokens);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_CODE_TARGET_H_
