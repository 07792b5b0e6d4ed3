// The 128-point Hadamard transform in natural (Sylvester) order,
// H[i][j] = (-1)^popcount(i & j), in binary32.
//
// Every form runs its butterflies by ascending stride 1, 2, 4, ..., 64 and
// scales last, so all of them give the same bits.
#ifndef KILN_DEVICE_HADAMARD_H_
#define KILN_DEVICE_HADAMARD_H_

#include "device/platform.h"

namespace kd {

constexpr u32 kHadamardSize = 128;
constexpr u32 kHadamardScaleBits = 0x3DB504F3u;  // 1 / sqrt(128)

KILN_FN float HadamardScale() { return BitsFloat(kHadamardScaleBits); }

// Strides 1 and 2 over four neighbours.
KILN_FN void Hadamard4(float v[4]) {
  const float s0 = v[0] + v[1];
  const float d0 = v[0] - v[1];
  const float s1 = v[2] + v[3];
  const float d1 = v[2] - v[3];
  v[0] = s0 + s1;
  v[1] = d0 + d1;
  v[2] = s0 - s1;
  v[3] = d0 - d1;
}

KILN_FN void Butterfly(float& a, float& b) {
  const float sum = a + b;
  b = a - b;
  a = sum;
}

// In place over v[0..127], without the factor 1 / sqrt(128).
KILN_FN void Hadamard128Unscaled(float* v) {
  for (u32 i = 0; i < kHadamardSize; i += 4) Hadamard4(v + i);
  for (u32 stride = 4; stride < kHadamardSize; stride *= 2) {
    for (u32 base = 0; base < kHadamardSize; base += 2 * stride) {
      for (u32 i = base; i < base + stride; ++i) Butterfly(v[i], v[i + stride]);
    }
  }
}

// In place over v[0..127]; its own inverse up to rounding.
KILN_FN void Hadamard128(float* v) {
  Hadamard128Unscaled(v);
  for (u32 i = 0; i < kHadamardSize; ++i) v[i] *= HadamardScale();
}

#if KILN_ON_CUDA
// One full warp; lane l holds elements 4l .. 4l + 3. Every lane takes part.
KILN_FN void WarpHadamard128Unscaled(float v[4], u32 lane) {
  Hadamard4(v);
  KILN_UNROLLED
  for (u32 mask = 1; mask < 32; mask *= 2) {
    // The product is exact: one instruction instead of two sums and a choice.
    const float sign = (lane & mask) != 0 ? -1.0f : 1.0f;
    KILN_UNROLLED
    for (u32 i = 0; i < 4; ++i) {
      const float partner = __shfl_xor_sync(0xFFFFFFFFu, v[i], mask);
      v[i] = Fma(v[i], sign, partner);
    }
  }
}

KILN_FN void WarpHadamard128(float v[4], u32 lane) {
  WarpHadamard128Unscaled(v, lane);
  KILN_UNROLLED
  for (u32 i = 0; i < 4; ++i) v[i] *= HadamardScale();
}

// Sixteen neighbouring lanes; lane l of them holds elements 8l .. 8l + 7. Every
// lane of the warp takes part.
KILN_FN void HalfWarpHadamard128(float (&v)[8], u32 lane) {
  Hadamard4(v);
  Hadamard4(v + 4);
  KILN_UNROLLED
  for (u32 i = 0; i < 4; ++i) Butterfly(v[i], v[i + 4]);
  KILN_UNROLLED
  for (u32 mask = 1; mask < 16; mask *= 2) {
    const float sign = (lane & mask) != 0 ? -1.0f : 1.0f;
    KILN_UNROLLED
    for (u32 i = 0; i < 8; ++i) {
      const float partner = __shfl_xor_sync(0xFFFFFFFFu, v[i], mask);
      v[i] = Fma(v[i], sign, partner);
    }
  }
  KILN_UNROLLED
  for (u32 i = 0; i < 8; ++i) v[i] *= HadamardScale();
}

// Four neighbouring lanes; lane c holds in v[8j .. 8j + 7] the elements from
// 32j + 8c on. Every lane of the warp takes part.
KILN_FN void QuadHadamard128(float (&v)[32], u32 lane) {
  KILN_UNROLLED
  for (u32 i = 0; i < 32; i += 8) {
    Hadamard4(v + i);
    Hadamard4(v + i + 4);
  }
  KILN_UNROLLED
  for (u32 i = 0; i < 32; i += 8) {
    KILN_UNROLLED
    for (u32 k = i; k < i + 4; ++k) Butterfly(v[k], v[k + 4]);
  }
  KILN_UNROLLED
  for (u32 mask = 1; mask < 4; mask *= 2) {
    const float sign = (lane & mask) != 0 ? -1.0f : 1.0f;
    KILN_UNROLLED
    for (u32 i = 0; i < 32; ++i) {
      const float partner = __shfl_xor_sync(0xFFFFFFFFu, v[i], mask);
      v[i] = Fma(v[i], sign, partner);
    }
  }
  KILN_UNROLLED
  for (u32 i = 0; i < 8; ++i) {
    Butterfly(v[i], v[i + 8]);
    Butterfly(v[i + 16], v[i + 24]);
  }
  KILN_UNROLLED
  for (u32 i = 0; i < 16; ++i) Butterfly(v[i], v[i + 16]);
  KILN_UNROLLED
  for (u32 i = 0; i < 32; ++i) v[i] *= HadamardScale();
}
#endif

}  // namespace kd

#endif  // KILN_DEVICE_HADAMARD_H_
