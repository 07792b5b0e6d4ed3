// MXFP8 and long Hadamard transforms in the lanes of a warp.
//
// CUDA only, or under a test's emulator; no header other than Kiln's own.
#ifndef KILN_TEMPLATES_FUSED_MOE_MX_WARP_H_
#define KILN_TEMPLATES_FUSED_MOE_MX_WARP_H_

#include "device/hadamard.h"
#include "device/platform.h"
#include "fused_moe/mx_block.h"

namespace kd {

// ---- quantising ------------------------------------------------------------

// Mxfp8ScaleByte of a magnitude's bits, without a division wherever the result
// is normal. 1 <= m < 2 is the fraction: up to 1.75, m / 7 is above 1/8 and at
// most 1/4, also when it is rounded; beyond, it is above 1/4 and stays so.
KILN_FN u8 ScaleByteOf(u32 bits) {
  constexpr u32 kLeast = 13u << 23;  // 2^-114: far above all that are subnormal
  constexpr u32 kInfinity = 0xFFu << 23;
  if (bits - kLeast < kInfinity - kLeast) {
    return static_cast<u8>(((bits + 0x1FFFFFu) >> 23) - 8u);
  }
  return Mxfp8ScaleByte(BitsFloat(bits));
}

// 1 / the scale, exact: scales are at most 2^120. NaN of a NaN.
KILN_FN float InverseScale(u8 scale) {
  return scale == kScaleNanByte ? Ue8m0ToFloat(scale)
                                : BitsFloat((254u - scale) << 23);
}

// The scale of the block that holds v. A warp holds blocks of 32, a lane kOwn
// neighbours: a block is in 32 / kOwn neighbouring lanes.
template <u32 kOwn>
KILN_FN u8 BlockScale(const float (&v)[kOwn]) {
  // Magnitudes order as their bits; NaN is above infinity.
  u32 largest = 0;
  KILN_UNROLLED
  for (u32 i = 0; i < kOwn; ++i) {
    const u32 bits = FloatBits(v[i]) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  KILN_UNROLLED
  for (u32 mask = 1; mask < kMxBlock / kOwn; mask *= 2) {
    const u32 other = __shfl_xor_sync(0xFFFFFFFFu, largest, mask);
    largest = other > largest ? other : largest;
  }
  return ScaleByteOf(largest);
}

// Gives the codes of the lane's numbers and returns the scale of their block. A
// block with an infinity or NaN becomes all NaN.
template <u32 kOwn>
KILN_FN u8 QuantizeToMxfp8(const float (&v)[kOwn], u8 (&codes)[kOwn]) {
  const u8 scale = BlockScale(v);
  const float inverse = InverseScale(scale);
  KILN_UNROLLED
  for (u32 i = 0; i < kOwn; ++i) codes[i] = FloatToE4m3(v[i] * inverse);
  return scale;
}

// The value of FloatToE4m3(x) where x rounds to 448 at most, or is NaN.
KILN_FN float RoundToE4m3(float x) {
  const u32 bits = FloatBits(x);
  const float rounder = BitsFloat(E4m3RounderBits(bits & 0x7FFFFFFFu));
  const float rounded = (x + rounder) - rounder;
  // The sign of zero stays.
  return BitsFloat((FloatBits(rounded) & 0x7FFFFFFFu) | (bits & 0x80000000u));
}

// As QuantizeToMxfp8, with the value of each code in its place and that of the
// scale.
template <u32 kOwn>
KILN_FN float RoundToMxfp8(float (&v)[kOwn]) {
  const u8 scale = BlockScale(v);
  const float inverse = InverseScale(scale);
  KILN_UNROLLED
  for (u32 i = 0; i < kOwn; ++i) v[i] = RoundToE4m3(v[i] * inverse);
  return Ue8m0ToFloat(scale);
}

// ---- 512 numbers, lane l elements 16l .. 16l + 15 --------------------------

// Strides 16 kFirst, ..., below 16 kEnd: butterflies with other lanes.
template <u32 kFirst, u32 kEnd>
KILN_FN void ButterfliesOfLanes(float (&v)[16], u32 lane) {
  KILN_UNROLLED
  for (u32 mask = kFirst; mask < kEnd; mask *= 2) {
    const float sign = (lane & mask) != 0 ? -1.0f : 1.0f;
    KILN_UNROLLED
    for (u32 i = 0; i < 16; ++i) {
      const float partner = __shfl_xor_sync(0xFFFFFFFFu, v[i], mask);
      v[i] = Fma(v[i], sign, partner);
    }
  }
}

// H128 of each quarter, whose factor 1 / sqrt(128) is given.
KILN_FN void WarpHadamard128Of512(float (&v)[16], u32 lane, float factor) {
  KILN_UNROLLED
  for (u32 i = 0; i < 16; i += 4) Hadamard4(v + i);
  KILN_UNROLLED
  for (u32 i = 0; i < 16; i += 8) {
    KILN_UNROLLED
    for (u32 k = i; k < i + 4; ++k) Butterfly(v[k], v[k + 4]);
  }
  KILN_UNROLLED
  for (u32 i = 0; i < 8; ++i) Butterfly(v[i], v[i + 8]);
  ButterfliesOfLanes<1, 8>(v, lane);
  KILN_UNROLLED
  for (u32 i = 0; i < 16; ++i) v[i] *= factor;
}

// H512 = H4 (x) H128. The factor 1/2 of H4 is exact wherever it comes in.
KILN_FN void WarpHadamard512(float (&v)[16], u32 lane) {
  WarpHadamard128Of512(v, lane, HadamardScale() * 0.5f);
  ButterfliesOfLanes<8, 32>(v, lane);
}

}  // namespace kd

#endif  // KILN_TEMPLATES_FUSED_MOE_MX_WARP_H_
