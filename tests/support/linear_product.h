// y = x W + bias by the format's definition (specification 1.7), in plain
// loops: what the reference of linear must give.

#ifndef KILN_TESTS_SUPPORT_LINEAR_PRODUCT_H_
#define KILN_TESTS_SUPPORT_LINEAR_PRODUCT_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "device/hadamard.h"
#include "device/half.h"
#include "templates/fused_moe/trellis_codebook.h"
#include "templates/fused_moe/trellis_matrix.h"

namespace kiln::testing {

struct LinearWeights {
  int64_t in = 0;
  int64_t out = 0;
  int bits = 0;
  TrellisCodebook codebook = TrellisCodebook::kMcg;
  std::vector<uint16_t> w;     // [in/16][out/16][16 bits]
  std::vector<uint16_t> suh;   // [in]
  std::vector<uint16_t> svh;   // [out]
  std::vector<uint16_t> bias;  // [out], or empty
};

enum class Sums { kExact, kStaged, kSequential };

// Every block of 128 by the matrix of signs, or as kernels do in binary32.
inline void TransformBlocks(Sums sums, std::vector<double>* v) {
  for (size_t begin = 0; begin < v->size(); begin += 128) {
    double* block = v->data() + begin;
    if (sums == Sums::kExact) {
      double result[128] = {};
      for (uint32_t j = 0; j < 128; ++j) {
        for (uint32_t i = 0; i < 128; ++i) {
          result[j] += std::popcount(i & j) % 2 == 0 ? block[i] : -block[i];
        }
      }
      for (int j = 0; j < 128; ++j) block[j] = result[j] / std::sqrt(128.0);
      continue;
    }
    float values[128];
    for (int i = 0; i < 128; ++i) values[i] = static_cast<float>(block[i]);
    kd::Hadamard128(values);
    for (int i = 0; i < 128; ++i) block[i] = values[i];
  }
}

// One row. `x` are values of [in] that binary16 or bfloat16 can hold.
inline std::vector<double> LinearProduct(const LinearWeights& weights,
                                         const std::vector<float>& x,
                                         Sums sums) {
  const bool staged = sums != Sums::kExact;
  const auto half = [&](double v) {
    return staged ? kd::round_f16(static_cast<float>(v)) : v;
  };
  const auto single = [&](double v) {
    return staged ? static_cast<float>(v) : v;
  };
  const auto in = static_cast<size_t>(weights.in);
  const auto out = static_cast<size_t>(weights.out);
  std::vector<uint16_t> decoded(in * out);
  DecodeTrellisMatrix(weights.w.data(), weights.in, weights.out, weights.bits,
                      weights.codebook, decoded.data());
  std::vector<double> a(in);
  for (size_t i = 0; i < in; ++i) {
    a[i] = half(half(x[i]) * kd::f16_to_f32(weights.suh[i]));
  }
  TransformBlocks(sums, &a);
  for (double& v : a) v = half(v);
  std::vector<double> y(out);
  for (size_t j = 0; j < out; ++j) {
    float narrow = 0;
    for (size_t i = 0; i < in; ++i) {
      const float w = kd::f16_to_f32(decoded[i * out + j]);
      y[j] += a[i] * w;
      narrow = std::fma(w, static_cast<float>(a[i]), narrow);
    }
    y[j] = sums == Sums::kSequential ? narrow : single(y[j]);
  }
  TransformBlocks(sums, &y);
  for (size_t j = 0; j < out; ++j) {
    y[j] = single(y[j] * kd::f16_to_f32(weights.svh[j]));
    if (!weights.bias.empty()) {
      y[j] = single(y[j] + kd::f16_to_f32(weights.bias[j]));
    }
  }
  return y;
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_LINEAR_PRODUCT_H_
