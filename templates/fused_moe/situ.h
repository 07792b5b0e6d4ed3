// The activation SiTU in binary32, with no mathematics library.
#ifndef KILN_TEMPLATES_FUSED_MOE_SITU_H_
#define KILN_TEMPLATES_FUSED_MOE_SITU_H_

#include "device/activation.h"
#include "device/platform.h"

namespace kd {

constexpr float kTanhSmall = 0.25f;
// Of v^8, v^6, v^4 and v^2 in tanh(v) / v.
constexpr float kTanhTerms[4] = {62.0f / 2835, -17.0f / 315, 2.0f / 15,
                                 -1.0f / 3};

// tanh(v), within 3 units in the last place. NaN propagates.
KILN_FN float Tanh(float v) {
  const u32 sign = FloatBits(v) & 0x80000000u;
  const float size = BitsFloat(FloatBits(v) ^ sign);
  float result;
  if (size < kTanhSmall) {
    const float square = v * v;
    float p = kTanhTerms[0];
    KILN_UNROLLED
    for (int i = 1; i < 4; ++i) p = Fma(p, square, kTanhTerms[i]);
    result = Fma(p * square, size, size);
  } else {
    const float t = Exp(-2.0f * size);
    result = (1.0f - t) / (1.0f + t);
  }
  return BitsFloat(FloatBits(result) | sign);
}

// 4 tanh(gate / 4) sigmoid(gate) 25 tanh(up / 25).
KILN_FN float Situ(float gate, float up) {
  const float limited = 4.0f * Tanh(0.25f * gate);
  return limited * Sigmoid(gate) * (25.0f * Tanh(up / 25.0f));
}

}  // namespace kd

#endif  // KILN_TEMPLATES_FUSED_MOE_SITU_H_
