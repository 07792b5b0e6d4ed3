// The oracle of linear against plain loops, and against its own contract.

#include <algorithm>
#include <cmath>
#include <vector>

#include "device/half.h"
#include "gtest/gtest.h"
#include "templates/linear/reference.h"
#include "tests/support/linear_product.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using testing::LinearProduct;
using testing::LinearWeights;
using testing::SplitMix64;
using testing::Sums;

constexpr int64_t kIn = 256;
constexpr int64_t kOut = 384;
constexpr int64_t kTokens = 3;

std::vector<uint16_t> Halves(SplitMix64* random, int64_t count) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) {
    value = kd::f32_to_f16(static_cast<float>(random->Symmetric()));
  }
  return values;
}

LinearWeights RandomWeights(TrellisCodebook codebook, int bits, bool bias) {
  SplitMix64 random(static_cast<uint64_t>(bits));
  LinearWeights weights = {.in = kIn,
                           .out = kOut,
                           .bits = bits,
                           .codebook = codebook,
                           .w = {},
                           .suh = Halves(&random, kIn),
                           .svh = Halves(&random, kOut),
                           .bias = {}};
  weights.w.resize(static_cast<size_t>(kIn * kOut / 16 * bits));
  for (uint16_t& word : weights.w) word = static_cast<uint16_t>(random.Next());
  if (bias) weights.bias = Halves(&random, kOut);
  return weights;
}

struct Call {
  explicit Call(const LinearWeights& weights, DType x_dtype) {
    SplitMix64 random(7);
    for (int64_t i = 0; i < kTokens * kIn; ++i) {
      const float value = static_cast<float>(3 * random.Symmetric());
      const uint16_t bits =
          x_dtype == DType::kF16
              ? kd::f32_to_f16(value)
              : static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
      x.push_back(bits);
      values.push_back(x_dtype == DType::kF16 ? kd::f16_to_f32(bits)
                                              : kd::bf16_to_f32(bits));
    }
    p = {.tokens = kTokens,
         .in_features = weights.in,
         .out_features = weights.out,
         .codebook = weights.codebook,
         .bits = weights.bits,
         .x_dtype = x_dtype,
         .x = x.data(),
         .w = weights.w.data(),
         .suh = weights.suh.data(),
         .svh = weights.svh.data(),
         .bias = weights.bias.empty() ? nullptr : weights.bias.data()};
  }

  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  std::vector<double> Run(ReferenceMode mode,
                          const std::vector<int64_t>& rows = {0, 1, 2},
                          int threads = 1) const {
    std::vector<double> out(rows.size() * kOut, NAN);
    LinearReferenceRows(p, rows, mode, out.data(), threads);
    return out;
  }

  std::vector<float> Row(int64_t token) const {
    return {values.begin() + token * kIn, values.begin() + (token + 1) * kIn};
  }

  std::vector<uint16_t> x;
  std::vector<float> values;
  LinearProblem p;
};

std::vector<double> RowOf(const std::vector<double>& out, int64_t row) {
  return {out.begin() + row * kOut, out.begin() + (row + 1) * kOut};
}

double Largest(const std::vector<double>& values) {
  double largest = 0;
  for (const double v : values) largest = std::max(largest, std::abs(v));
  return largest;
}

struct Case {
  TrellisCodebook codebook;
  int bits;
  bool bias;
  DType x_dtype;
};

const Case kCases[] = {{TrellisCodebook::k3Inst, 1, false, DType::kBf16},
                       {TrellisCodebook::kMcg, 4, true, DType::kBf16},
                       {TrellisCodebook::kMcg, 3, false, DType::kF16},
                       {TrellisCodebook::kMul1, 8, true, DType::kF16}};

TEST(LinearReferenceTest, Float64IsTheDefinition) {
  for (const Case& c : kCases) {
    const LinearWeights weights = RandomWeights(c.codebook, c.bits, c.bias);
    const Call call(weights, c.x_dtype);
    const std::vector<double> out = call.Run(ReferenceMode::kFloat64);
    for (int64_t t = 0; t < kTokens; ++t) {
      const std::vector<double> expected =
          LinearProduct(weights, call.Row(t), Sums::kExact);
      const std::vector<double> found = RowOf(out, t);
      const double largest = Largest(expected);
      ASSERT_GT(largest, 1);
      for (size_t j = 0; j < expected.size(); ++j) {
        EXPECT_NEAR(found[j], expected[j], 1e-12 * largest) << c.bits;
      }
    }
  }
}

// A sum in binary64 that lies between two numbers of binary32 may round to
// either, for its order is open.
TEST(LinearReferenceTest, StagedRoundsWhereTheKernelsDo) {
  for (const Case& c : kCases) {
    const LinearWeights weights = RandomWeights(c.codebook, c.bits, c.bias);
    const Call call(weights, c.x_dtype);
    const std::vector<double> out = call.Run(ReferenceMode::kStaged);
    const std::vector<double> exact = call.Run(ReferenceMode::kFloat64);
    EXPECT_NE(out, exact);
    for (int64_t t = 0; t < kTokens; ++t) {
      const std::vector<double> expected =
          LinearProduct(weights, call.Row(t), Sums::kStaged);
      const std::vector<double> found = RowOf(out, t);
      const double largest = Largest(expected);
      for (size_t j = 0; j < expected.size(); ++j) {
        EXPECT_EQ(found[j], static_cast<float>(found[j]));
        EXPECT_NEAR(found[j], expected[j], 1e-6 * largest) << c.bits;
        EXPECT_NEAR(found[j], RowOf(exact, t)[j], 2e-3 * largest) << c.bits;
      }
    }
  }
}

TEST(LinearReferenceTest, SequentialIsExactToTheBit) {
  for (const Case& c : kCases) {
    const LinearWeights weights = RandomWeights(c.codebook, c.bits, c.bias);
    const Call call(weights, c.x_dtype);
    const std::vector<double> out = call.Run(ReferenceMode::kSequential);
    for (int64_t t = 0; t < kTokens; ++t) {
      EXPECT_EQ(RowOf(out, t),
                LinearProduct(weights, call.Row(t), Sums::kSequential));
    }
  }
}

TEST(LinearReferenceTest, RowsAreThoseAskedForWhateverTheThreads) {
  const LinearWeights weights = RandomWeights(TrellisCodebook::kMcg, 4, true);
  const Call call(weights, DType::kBf16);
  const std::vector<double> all = call.Run(ReferenceMode::kStaged);
  const std::vector<double> some =
      call.Run(ReferenceMode::kStaged, {2, 0, 2}, 3);
  EXPECT_EQ(RowOf(some, 0), RowOf(all, 2));
  EXPECT_EQ(RowOf(some, 1), RowOf(all, 0));
  EXPECT_EQ(RowOf(some, 2), RowOf(all, 2));
}

TEST(LinearReferenceDeathTest, MalformedProblemsPanic) {
  const LinearWeights weights = RandomWeights(TrellisCodebook::kMcg, 4, false);
  Call call(weights, DType::kBf16);
  EXPECT_DEATH(call.Run(ReferenceMode::kStagedW4A8), "");
  EXPECT_DEATH(call.Run(ReferenceMode::kStaged, {3}), "");
  call.p.in_features = 192;
  EXPECT_DEATH(call.Run(ReferenceMode::kStaged), "");
}

}  // namespace
}  // namespace kiln
