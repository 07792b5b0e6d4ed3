// The eight weights that one lane of a warp decodes from an NPK-1 tile, as the
// A fragment of mma.m16n8k16 or half of that of an mma.m16n8k32 of E4M3 codes:
// device/fragment.h finds the states, this rounds their values to E4M3.
//
// Plain code on the CPU, so tests can hold it against formats/npk_law.h without
// a GPU.
#ifndef KILN_TEMPLATES_FUSED_MOE_MX_FRAGMENT_H_
#define KILN_TEMPLATES_FUSED_MOE_MX_FRAGMENT_H_

#include "device/fragment.h"
#include "device/half.h"
#include "device/platform.h"
#include "formats/npk_law.h"
#include "fused_moe/mx_block.h"

namespace kd {

// The law's hash is that of the MCG codebook, and its value before rounding
// twice that codebook's.
static_assert(kNpkMultiplier == kMcgMultiplier && kNpkMask == kPairMask &&
                  kNpkFlip == kPairFlip,
              "NPK-1 states hash as those of MCG");

constexpr u32 kHalfExponents = 0x7C007C00u;
constexpr u32 kHalfLeastPower = 0x20002000u;    // 2^-7
constexpr u32 kHalfRounder = 0x5A005A00u;       // 192
constexpr u32 kHalfMinusRounder = 0xDA00DA00u;  // -192

// Two binary16 numbers of at most 4 in magnitude, each rounded to half of the
// E4M3 number nearest to its double, ties to even.
//
// For 2^e <= |v| < 2^(e+1), e at least -7, half an E4M3 number is a multiple of
// 2^(e-3): the last place of a binary16 next to 1.5 * 2^(e+7) = 192 * 2^e.
// Below 2^-7 their distance stays that of the subnormals. A zero is +0.
KILN_FN u32 RoundPairToHalfE4m3(u32 pair) {
#if KILN_ON_CUDA
  u32 power;
  asm("max.f16x2 %0, %1, %2;"
      : "=r"(power)
      : "r"(pair & kHalfExponents), "r"(kHalfLeastPower));
  const u32 sum = hfma2(power, kHalfRounder, pair);
  return hfma2(power, kHalfMinusRounder, sum);
#else
  u32 out = 0;
  for (u32 i = 0; i < 2; ++i) {
    const auto value = static_cast<u16>(pair >> (16 * i));
    u32 power = value & (kHalfExponents & 0xFFFFu);
    const u32 least = kHalfLeastPower & 0xFFFFu;
    power = power > least ? power : least;
    const u16 sum = hfma(static_cast<u16>(power),
                         static_cast<u16>(kHalfRounder & 0xFFFFu), value);
    const u16 rounded =
        hfma(static_cast<u16>(power),
             static_cast<u16>(kHalfMinusRounder & 0xFFFFu), sum);
    out |= static_cast<u32>(rounded) << (16 * i);
  }
  return out;
#endif
}

// The lane's A fragment, laid out as DecodeFragment describes it, of half the
// weights: whoever sums doubles the sum, which is exact.
template <int K>
KILN_FN void DecodeHalfNpkFragment(const SpanBits& bits, u32 a[4]) {
  static_assert(K >= kNpkBitsMin && K <= kNpkBitsMax, "NPK-1 has K = 2..5");
  DecodeFragment<kCodebookMcg, K>(bits, a);
  KILN_UNROLLED
  for (u32 i = 0; i < 4; ++i) a[i] = RoundPairToHalfE4m3(a[i]);
}

// The E4M3 codes nearest to twice each of four binary16 numbers of at most 4 in
// magnitude, ties to even, the first in the low byte. A zero keeps its sign.
KILN_FN u32 RoundDoublesToE4m3(u32 low, u32 high) {
#if KILN_ON_CUDA
  u32 codes;
  asm("{\n"
      "  .reg .b16 a, b;\n"
      "  cvt.rn.satfinite.e4m3x2.f16x2 a, %1;\n"
      "  cvt.rn.satfinite.e4m3x2.f16x2 b, %2;\n"
      "  mov.b32 %0, {a, b};\n"
      "}"
      : "=r"(codes)
      : "r"(hadd2(low, low)), "r"(hadd2(high, high)));
  return codes;
#else
  u32 codes = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 pair = i < 2 ? low : high;
    const float value = f16_to_f32(static_cast<u16>(pair >> (16 * (i % 2))));
    codes |= static_cast<u32>(FloatToE4m3(2 * value)) << (8 * i);
  }
  return codes;
#endif
}

// The lane's weights as codes: a[0] channel l/4 and k 2(l%4) + {0, 1, 8, 9},
// a[1] channel l/4 + 8 and the same k. code_row.h says what they are for.
template <int K>
KILN_FN void DecodeNpkCodes(const SpanBits& bits, u32 a[2]) {
  static_assert(K >= kNpkBitsMin && K <= kNpkBitsMax, "NPK-1 has K = 2..5");
  u32 v[4];
  DecodeFragment<kCodebookMcg, K>(bits, v);
  a[0] = RoundDoublesToE4m3(v[0], v[2]);
  a[1] = RoundDoublesToE4m3(v[1], v[3]);
}

}  // namespace kd

#endif  // KILN_TEMPLATES_FUSED_MOE_MX_FRAGMENT_H_
