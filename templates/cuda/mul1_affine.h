// MUL1 weights before their affine map, for products that apply it to sums: a
// weight is kBiasedScale b + kBiasedOffset with b = 1024 + the sum of the four
// bytes of a hash, which binary16 holds exactly. So the sum of x w over k is
// kBiasedScale times that of x b and kBiasedOffset times that of x, without the
// codebook's rounding of each weight.
//
// CUDA only; no header other than Kiln's own.
#ifndef KILN_TEMPLATES_CUDA_MUL1_AFFINE_H_
#define KILN_TEMPLATES_CUDA_MUL1_AFFINE_H_

#include "device/fragment.h"
#include "device/platform.h"
#include "device/trellis.h"

namespace kd {

constexpr float kBiasedScale = 887.0f / 131072.0f;  // kMul1Scale
constexpr float kBiasedOffset = -10.3828125f;       // kMul1Offset

// b of two hashes: the first in the low half.
KILN_FN u32 BiasedPair(u32 x0, u32 x1) {
  u32 pair;
  asm("prmt.b32 %0, %1, %2, 0x5410;"
      : "=r"(pair)
      : "r"(ByteSum(x0, kMul1Bias)), "r"(ByteSum(x1, kMul1Bias)));
  return pair;
}

// As DecodeFragment, with b in place of the weights.
template <int K>
KILN_FN void DecodeBiased(const SpanBits& bits, u32 a[4]) {
  u32 x[8];
  HashFragment<kCodebookMul1, K, true>(bits, x);
  a[0] = BiasedPair(x[0], x[1]);
  a[1] = BiasedPair(x[4], x[5]);
  a[2] = BiasedPair(x[2], x[3]);
  a[3] = BiasedPair(x[6], x[7]);
}

}  // namespace kd

#endif  // KILN_TEMPLATES_CUDA_MUL1_AFFINE_H_
