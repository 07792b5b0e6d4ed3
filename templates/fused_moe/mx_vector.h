// What a CPU kernel does to TrellisMX weights in lanes: the NPK-1 law, and the
// scales of a group of output channels.
#ifndef KILN_TEMPLATES_FUSED_MOE_MX_VECTOR_H_
#define KILN_TEMPLATES_FUSED_MOE_MX_VECTOR_H_

#include "device/cpu_vector.h"
#include "device/platform.h"
#include "formats/npk_law.h"
#include "fused_moe/mx_block.h"

namespace kd {

// The law's hash is that of the MCG codebook; only what follows differs.
static_assert(kNpkMultiplier == kMcgMultiplier,
              "NPK-1 states hash as those of MCG");

// Nearest E4M3 numbers, ties to even, of magnitudes up to 448.
template <int L>
KILN_FN F32V<L> RoundE4m3(F32V<L> v) {
  using I = I32V<L>;
  constexpr i32 kLeast = static_cast<i32>(kE4m3LeastNormalBits);
  const I exponent = __builtin_bit_cast(I, v) & 0x7F800000;
  const I above = exponent > kLeast;
  const I used = (exponent & above) | (kLeast & ~above);
  const F32V<L> rounder =
      __builtin_bit_cast(F32V<L>, used + ((20 << 23) + 0x400000));
  return (v + rounder) - rounder;
}

// The values of L states: NpkByte as numbers, but for the sign of zero.
template <int L>
KILN_FN F32V<L> DecodeNpkLanes(U32V<L> states) {
  const F32V<L> half = DecodeLanes<kCodebookMcg, L>(states);
  return RoundE4m3<L>(half + half);
}

// 2^(byte - 127) of byte `Byte` of each word; no byte is 255.
template <int L>
KILN_FN F32V<L> ScaleLanes(U32V<L> words, u32 byte) {
  const U32V<L> field = (words >> (8 * byte)) & 0xFFu;
  const U32V<L> least = __builtin_bit_cast(U32V<L>, field == 0u) & 0x00400000u;
  return __builtin_bit_cast(F32V<L>, (field << 23) | least);
}

}  // namespace kd

#endif  // KILN_TEMPLATES_FUSED_MOE_MX_VECTOR_H_
