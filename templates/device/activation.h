// Gated activations in binary32, with no mathematics library.
//
// Accuracy: Exp is within 2 units in the last place where neither its result
// nor 1 / result overflows; outside that range it saturates. NaN propagates.
#ifndef KILN_DEVICE_ACTIVATION_H_
#define KILN_DEVICE_ACTIVATION_H_

#include "device/platform.h"

namespace kd {

// e^v. On the CPU: v = n ln 2 + r with ln 2 in two parts (Cody and Waite), the
// Taylor polynomial on |r| <= ln 2 / 2, then 2^n through the exponent field.
constexpr float kExpHighest = 88.0f;
constexpr float kExpLowest = -87.0f;
constexpr float kExpLog2E = 1.44269504088896341f;
constexpr float kExpRounder = 12582912.0f;  // 1.5 * 2^23
constexpr u32 kExpRounderBits = 0x4B400000u;
constexpr float kExpLn2High = 0.693359375f;
constexpr float kExpLn2Low = -2.12194440e-4f;
constexpr float kExpTerms[6] = {1.0f / 5040, 1.0f / 720, 1.0f / 120,
                                1.0f / 24,   1.0f / 6,   1.0f / 2};

KILN_FN float Exp(float v) {
#if KILN_ON_CUDA
  return expf(v);
#else
  // Comparisons are written so that a NaN falls through unchanged.
  v = v > kExpHighest ? kExpHighest : v;
  v = v < kExpLowest ? kExpLowest : v;
  const float shifted = Fma(v, kExpLog2E, kExpRounder);
  const u32 n = FloatBits(shifted) - kExpRounderBits;
  const float whole = shifted - kExpRounder;
  float r = Fma(whole, -kExpLn2High, v);
  r = Fma(whole, -kExpLn2Low, r);
  float p = kExpTerms[0];
  KILN_UNROLLED
  for (int i = 1; i < 6; ++i) p = Fma(p, r, kExpTerms[i]);
  p = Fma(p, r * r, r);
  return (p + 1.0f) * BitsFloat((n + 127u) << 23);
#endif
}

// 1 / (1 + e^-v). On CUDA two approximate instructions, within 2^-17 of it.
KILN_FN float Sigmoid(float v) {
#if KILN_ON_CUDA
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v * -kExpLog2E));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
  return r;
#else
  return 1.0f / (1.0f + Exp(-v));
#endif
}

// v * Sigmoid(v).
KILN_FN float Silu(float v) { return v * Sigmoid(v); }

}  // namespace kd

#endif  // KILN_DEVICE_ACTIVATION_H_
