// E4M3 and UE8M0 as bit patterns, and a block of MXFP8: 32 E4M3 numbers with
// one scale 2^(byte - 127). Exact bits throughout; no logarithm.
//
// Source: trellis format specification, section 4.6; prepared-weights
// specification, section A.9.4.
#ifndef KILN_TEMPLATES_FUSED_MOE_MX_BLOCK_H_
#define KILN_TEMPLATES_FUSED_MOE_MX_BLOCK_H_

#include "device/platform.h"

namespace kd {

constexpr u32 kMxBlock = 32;
constexpr u8 kE4m3NanCode = 0x7F;
constexpr u8 kScaleOneByte = 127;  // 2^0
constexpr u8 kScaleNanByte = 255;  // the block is no number
constexpr float kE4m3Largest = 448.0f;
constexpr u32 kE4m3LeastNormalBits = 0x3C800000u;  // 2^-6 as a binary32
// An E4M3 exponent field is a binary32 one less this.
constexpr u32 kE4m3ExponentOffset = 120u;

// Value of an E4M3FN byte; NaN for 0x7F and 0xFF.
KILN_FN float E4m3ToFloat(u8 code) {
  const u32 sign = static_cast<u32>(code & 0x80u) << 24;
  const u32 rest = code & 0x7Fu;
  if (rest == kE4m3NanCode) return BitsFloat(sign | 0x7FC00000u);
  const float magnitude =
      rest < 8 ? static_cast<float>(rest) * 0x1p-9f
               : BitsFloat((rest << 20) + (kE4m3ExponentOffset << 23));
  return BitsFloat(FloatBits(magnitude) | sign);
}

// The number whose addition and subtraction round a magnitude of these bits to
// E4M3: 1.5 * 2^20 times the power of two below it, where subnormals share that
// of the least normal number.
KILN_FN u32 E4m3RounderBits(u32 bits) {
  u32 exponent = bits & 0x7F800000u;
  exponent = exponent > kE4m3LeastNormalBits ? exponent : kE4m3LeastNormalBits;
  return exponent + (20u << 23) + 0x400000u;
}

// Nearest E4M3FN, ties to even, at most 448 in magnitude; the sign of zero
// stays. NaN becomes 0x7F.
KILN_FN u8 FloatToE4m3(float value) {
  const u32 bits = FloatBits(value);
  const u32 sign = (bits >> 24) & 0x80u;
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return kE4m3NanCode;
  float rest = BitsFloat(bits & 0x7FFFFFFFu);
  rest = rest > kE4m3Largest ? kE4m3Largest : rest;
  const float rounder = BitsFloat(E4m3RounderBits(FloatBits(rest)));
  rest = (rest + rounder) - rounder;
  const u32 rounded = FloatBits(rest);
  const u32 code = rounded >= kE4m3LeastNormalBits
                       ? (rounded >> 20) - (kE4m3ExponentOffset << 3)
                       : static_cast<u32>(rest * 512.0f);
  return static_cast<u8>(sign | code);
}

// 2^(byte - 127); NaN for 255.
KILN_FN float Ue8m0ToFloat(u8 byte) {
  if (byte == kScaleNanByte) return BitsFloat(0x7FC00000u);
  // 2^-127 is the one subnormal of the range.
  return BitsFloat(byte == 0 ? 0x00400000u : static_cast<u32>(byte) << 23);
}

// The scale of a block whose largest magnitude is `amax`: the least power of
// two that is not below fl32(amax / 448), from its bits. 127 for 0, 255 for an
// infinity or NaN.
KILN_FN u8 Mxfp8ScaleByte(float amax) {
  if (!(amax < BitsFloat(0x7F800000u))) return kScaleNanByte;
  if (amax == 0.0f) return kScaleOneByte;
  const u32 bits = FloatBits(amax / kE4m3Largest);
  // Normal: the exponent field, one more if there is a fraction. Subnormal:
  // above 2^-127 the least normal power, else 2^-127, the least scale.
  const u32 field = bits >> 23;
  const u32 fraction = bits & 0x7FFFFFu;
  if (field == 0) return fraction > 0x400000u ? 1 : 0;
  return static_cast<u8>(field + (fraction != 0 ? 1u : 0u));
}

// Quantises one block and returns its scale. A block with an infinity or NaN
// becomes all NaN, so that it shows in every result it enters.
KILN_FN u8 QuantizeMxBlock(const float* values, u8* payload) {
  u32 largest = 0;  // magnitudes order as their bits; NaN is above infinity
  for (u32 i = 0; i < kMxBlock; ++i) {
    const u32 bits = FloatBits(values[i]) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  const u8 scale = Mxfp8ScaleByte(BitsFloat(largest));
  if (scale == kScaleNanByte) {
    for (u32 i = 0; i < kMxBlock; ++i) payload[i] = kE4m3NanCode;
    return scale;
  }
  // 1 / scale, exact: scales are at most 2^120.
  const float inverse = BitsFloat((254u - scale) << 23);
  for (u32 i = 0; i < kMxBlock; ++i) {
    payload[i] = FloatToE4m3(values[i] * inverse);
  }
  return scale;
}

}  // namespace kd

#endif  // KILN_TEMPLATES_FUSED_MOE_MX_BLOCK_H_
