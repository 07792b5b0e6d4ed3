// MXFP8 in the lanes of a warp.
//
// CUDA only, or under a test's emulator; no header other than Kiln's own.
#ifndef KILN_TEMPLATES_FUSED_MOE_MX_WARP_H_
#define KILN_TEMPLATES_FUSED_MOE_MX_WARP_H_

#include "device/platform.h"
#include "fused_moe/mx_block.h"

namespace kd {

// A warp holds four blocks of 32, lane l elements 4l .. 4l + 3. Gives the codes
// of the lane's four and returns the scale of its block. A block with an
// infinity or NaN becomes all NaN.
KILN_FN u8 QuantizeToMxfp8(const float (&v)[4], u8 (&codes)[4]) {
  // Eight lanes hold a block. Magnitudes order as their bits; NaN is above
  // infinity.
  u32 largest = 0;
  KILN_UNROLLED
  for (u32 i = 0; i < 4; ++i) {
    const u32 bits = FloatBits(v[i]) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  KILN_UNROLLED
  for (u32 mask = 1; mask < 8; mask *= 2) {
    const u32 other = __shfl_xor_sync(0xFFFFFFFFu, largest, mask);
    largest = other > largest ? other : largest;
  }
  const u8 scale = Mxfp8ScaleByte(BitsFloat(largest));
  // 1 / scale, exact: scales are at most 2^120.
  const float inverse = scale == kScaleNanByte
                            ? Ue8m0ToFloat(scale)
                            : BitsFloat((254u - scale) << 23);
  KILN_UNROLLED
  for (u32 i = 0; i < 4; ++i) codes[i] = FloatToE4m3(v[i] * inverse);
  return scale;
}

// The same, with the value of each code in its place and that of the scale.
KILN_FN float RoundToMxfp8(float (&v)[4]) {
  u8 codes[4];
  const u8 scale = QuantizeToMxfp8(v, codes);
  KILN_UNROLLED
  for (u32 i = 0; i < 4; ++i) v[i] = E4m3ToFloat(codes[i]);
  return Ue8m0ToFloat(scale);
}

}  // namespace kd

#endif  // KILN_TEMPLATES_FUSED_MOE_MX_WARP_H_
