// What a product of a CPU kernel reads: binary16, or MXFP8.
#ifndef KILN_TEMPLATES_FUSED_MOE_CPU_OPERAND_H_
#define KILN_TEMPLATES_FUSED_MOE_CPU_OPERAND_H_

#include "device/cpu_vector.h"
#include "device/half.h"
#include "device/platform.h"
#include "fused_moe/mx_block.h"

namespace kd {

// A row of operands: values, and with 8 bits one scale for each 32 of them.
//   Bits: 16 (binary16) or 8 (E4M3).
template <int Bits, int L>
struct CpuOperand {
  static_assert(Bits == 8 || Bits == 16, "operands have 8 or 16 bits");
  static constexpr bool kQuantised = Bits == 8;
  static constexpr u32 kBytes = Bits / 8;

  // Rounds `count` values, a multiple of 32, to the row's first ones. 8 bits:
  // to binary16 before anything else.
  KILN_FN static void Store(const float* v, u32 count, u8* values, u8* scales) {
    if constexpr (kQuantised) {
      for (u32 c = 0; c < count; c += kMxBlock) {
        float block[kMxBlock];
        for (u32 i = 0; i < kMxBlock; i += L) {
          kd::Store(block + i, RoundHalves<L>(Load<F32V<L>>(v + c + i)));
        }
        scales[c / kMxBlock] = QuantizeMxBlock(block, values + c);
      }
    } else {
      for (u32 c = 0; c < count; c += L) {
        kd::Store(values + c * kBytes, ToHalves<L>(Load<F32V<L>>(v + c)));
      }
    }
  }

  // 32 channels of a row, from `channel` on, a multiple of 32.
  KILN_FN static void LoadBlock(const u8* values, const u8* scales, u32 channel,
                                float* out) {
    const u8* at = values + static_cast<u64>(channel) * kBytes;
    if constexpr (kQuantised) {
      const float scale = Ue8m0ToFloat(scales[channel / kMxBlock]);
      // A power of two: the products are exact.
      for (u32 i = 0; i < kMxBlock; ++i) out[i] = E4m3ToFloat(at[i]) * scale;
    } else {
      u16 halves[kMxBlock];
      __builtin_memcpy(halves, at, sizeof halves);
      for (u32 i = 0; i < kMxBlock; i += L) {
        kd::Store(out + i, LoadHalves<L>(halves + i));
      }
    }
  }
};

}  // namespace kd

#endif  // KILN_TEMPLATES_FUSED_MOE_CPU_OPERAND_H_
