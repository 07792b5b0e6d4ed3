// binary16 and bfloat16 as bit patterns: conversion, and the two arithmetic
// operations that trellis decoding needs, each with exactly one rounding
// (to nearest, ties to even).
//
// All forms are bit-identical for every input that is not a NaN, subnormals
// and infinities included. A NaN stays a NaN; its payload is unspecified.
#ifndef KILN_DEVICE_HALF_H_
#define KILN_DEVICE_HALF_H_

#include "device/platform.h"

// KILN_NATIVE_F16: the CPU converts binary16 itself (F16C). Without it a
// compiler would call a support library, which kernels do not have.
#if !KILN_ON_CUDA && defined(__F16C__) && \
    (!defined(__clang__) || __clang_major__ >= 15)
#define KILN_NATIVE_F16 1
#else
#define KILN_NATIVE_F16 0
#endif

namespace kd {

#if !KILN_ON_CUDA
// Integer forms, for CPUs without F16C and as the yardstick of the others.
namespace soft {

KILN_FN float f16_to_f32(u16 bits) {
  const u32 sign = static_cast<u32>(bits & 0x8000u) << 16;
  const u32 rest = bits & 0x7FFFu;
  if (rest < 0x0400u) {
    // Subnormal: put the fraction under 2^-14 and take 2^-14 off again.
    const float value = BitsFloat(0x38800000u | (rest << 13)) - 0x1p-14f;
    return BitsFloat(FloatBits(value) | sign);
  }
  if (rest >= 0x7C00u) {
    const u32 quiet = rest > 0x7C00u ? 0x00400000u : 0u;
    return BitsFloat(sign | 0x7F800000u | (rest << 13) | quiet);
  }
  return BitsFloat(sign | ((rest << 13) + (112u << 23)));
}

KILN_FN u16 f32_to_f16(float value) {
  const u32 bits = FloatBits(value);
  const u32 sign = (bits >> 16) & 0x8000u;
  const u32 rest = bits & 0x7FFFFFFFu;
  u32 half;
  if (rest >= 0x47800000u) {  // 2^16 and above, infinity, NaN
    half = rest > 0x7F800000u ? 0x7E00u : 0x7C00u;
  } else if (rest < 0x38800000u) {
    // Below 2^-14: one addition to 0.5 rounds to a multiple of 2^-24.
    half = FloatBits(BitsFloat(rest) + 0.5f) - 0x3F000000u;
  } else {
    half = (rest - (112u << 23) + 0x0FFFu + ((rest >> 13) & 1u)) >> 13;
  }
  return static_cast<u16>(sign | half);
}

}  // namespace soft
#endif

KILN_FN float f16_to_f32(u16 bits) {
#if KILN_ON_CUDA
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#elif KILN_NATIVE_F16
  return static_cast<float>(__builtin_bit_cast(_Float16, bits));
#else
  return soft::f16_to_f32(bits);
#endif
}

KILN_FN u16 f32_to_f16(float value) {
#if KILN_ON_CUDA
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#elif KILN_NATIVE_F16
  return __builtin_bit_cast(u16, static_cast<_Float16>(value));
#else
  return soft::f32_to_f16(value);
#endif
}

KILN_FN float bf16_to_f32(u16 bits) {
  return BitsFloat(static_cast<u32>(bits) << 16);
}

// Rounds a bfloat16 to binary16; above 65504 it becomes infinity.
KILN_FN u16 bf16_to_f16(u16 bits) { return f32_to_f16(bf16_to_f32(bits)); }

// The nearest binary16, as a float.
KILN_FN float round_f16(float value) { return f16_to_f32(f32_to_f16(value)); }

// a + b. In binary32 the sum of two binary16 values rounds innocuously
// (24 >= 2 * 11 + 2), so the second rounding is the only one that shows.
KILN_FN u16 hadd(u16 a, u16 b) {
#if KILN_ON_CUDA
  u16 sum;
  asm("add.rn.f16 %0, %1, %2;" : "=h"(sum) : "h"(a), "h"(b));
  return sum;
#else
  return f32_to_f16(f16_to_f32(a) + f16_to_f32(b));
#endif
}

// a * b. The product is exact in binary32.
KILN_FN u16 hmul(u16 a, u16 b) {
  return f32_to_f16(f16_to_f32(a) * f16_to_f32(b));
}

// a * b + c, rounded once.
KILN_FN u16 hfma(u16 a, u16 b, u16 c) {
#if KILN_ON_CUDA
  u16 sum;
  asm("fma.rn.f16 %0, %1, %2, %3;" : "=h"(sum) : "h"(a), "h"(b), "h"(c));
  return sum;
#else
  // The product is exact in binary64, and the sum loses only bits that cannot
  // decide a binary16 rounding. Going to binary32 with "round to odd" keeps
  // the last step a single rounding.
  const double sum =
      static_cast<double>(f16_to_f32(a)) * static_cast<double>(f16_to_f32(b)) +
      static_cast<double>(f16_to_f32(c));
  u64 bits = __builtin_bit_cast(u64, sum);
  constexpr u64 kDropped = (1ull << 29) - 1;
  const u64 sticky = (bits & kDropped) != 0 ? 1ull << 29 : 0;
  bits = (bits & ~kDropped) | sticky;
  return f32_to_f16(static_cast<float>(__builtin_bit_cast(double, bits)));
#endif
}

#if KILN_ON_CUDA
// Two binary16 values in one register, the first in the low half.
KILN_FN u32 hadd2(u32 a, u32 b) {
  u32 sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

KILN_FN u32 hfma2(u32 a, u32 b, u32 c) {
  u32 sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
#endif

}  // namespace kd

#endif  // KILN_DEVICE_HALF_H_
