// linear/cpu.cc against plain loops, bit for bit, and against the float64
// reference, at ragged token counts.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "device/half.h"
#include "gtest/gtest.h"
#include "templates/linear/reference.h"
#include "tests/support/linear_product.h"
#include "tests/templates/linear_variant.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using testing::CpuStep;
using testing::LinearProduct;
using testing::LinearVariant;
using testing::LinearVariants;
using testing::LinearWeights;
using testing::SplitMix64;
using testing::Sums;

struct Problem {
  Problem(const LinearVariant& v, uint32_t m, uint64_t seed) : tokens(m) {
    SplitMix64 random(seed);
    const auto halves = [&random](size_t count, float size) {
      std::vector<uint16_t> made(count);
      for (uint16_t& value : made) {
        value = kd::f32_to_f16(size * static_cast<float>(random.Symmetric()));
      }
      return made;
    };
    weights = {.in = v.in,
               .out = v.out,
               .bits = v.bits,
               .codebook = static_cast<Codebook>(v.codebook),
               .w = random.Words(size_t{v.in} * v.out / 16 *
                                 static_cast<size_t>(v.bits)),
               .suh = halves(v.in, 1),
               .svh = halves(v.out, 0.1f),
               .bias = {}};
    if (v.bias) weights.bias = halves(v.out, 1);
    for (size_t i = 0; i < size_t{m} * v.in; ++i) {
      // Some bfloat16 values that binary16 cannot hold exactly: tiny ones.
      float value = static_cast<float>(3 * random.Symmetric());
      if (random.Next() % 16 == 0) value *= 1e-6f;
      const uint16_t bits =
          v.x_bf16 ? static_cast<uint16_t>(kd::FloatBits(value) >> 16)
                   : kd::f32_to_f16(value);
      x.push_back(bits);
      values.push_back(v.x_bf16 ? kd::bf16_to_f32(bits) : kd::f16_to_f32(bits));
    }
  }

  std::vector<float> Row(size_t token) const {
    const auto in = static_cast<size_t>(weights.in);
    return {values.begin() + static_cast<ptrdiff_t>(token * in),
            values.begin() + static_cast<ptrdiff_t>((token + 1) * in)};
  }

  uint32_t tokens;
  LinearWeights weights;
  std::vector<uint16_t> x;
  std::vector<float> values;  // of x
};

// All blocks of a step, the last first.
void RunStep(const CpuStep& step, const void* args, size_t bytes,
             std::array<uint32_t, 2> grid) {
  ASSERT_EQ(step.args_bytes, bytes);
  for (uint32_t y = grid[1]; y-- > 0;) {
    for (uint32_t x = grid[0]; x-- > 0;) step.run(args, x, y, 0);
  }
}

// The output rows, and one row of NaN behind them that must stay.
//   content: of every byte of the arena before the launch.
std::vector<float> RunPlan(const LinearVariant& v, const Problem& problem,
                           int content) {
  const uint32_t tiles = (problem.tokens + v.tokens_tile - 1) / v.tokens_tile;
  const size_t rows = size_t{tiles} * v.tokens_tile;
  constexpr size_t kGuard = 64;
  std::vector<uint16_t> rotated(rows * v.in + kGuard);
  std::vector<float> sums(rows * v.out + kGuard);
  std::memset(rotated.data(), content, rotated.size() * sizeof(uint16_t));
  std::memset(sums.data(), content, sums.size() * sizeof(float));
  const std::vector<uint16_t> rotated_guard(rotated.end() - kGuard,
                                            rotated.end());
  std::vector<float> out((size_t{problem.tokens} + 1) * v.out, NAN);
  const LinearWeights& w = problem.weights;

  struct {
    uint32_t tokens;
    const void* pointers[3];
  } rotate = {problem.tokens, {problem.x.data(), w.suh.data(), rotated.data()}};

  const void* multiply[] = {w.w.data(), rotated.data(), sums.data()};
  std::vector<const void*> finish = {sums.data(), w.svh.data()};
  if (v.bias) finish.push_back(w.bias.data());
  finish.push_back(out.data());
  RunStep(v.rotate, &rotate, sizeof rotate, {tiles, (v.in + 511) / 512});
  RunStep(v.multiply, multiply, sizeof multiply,
          {tiles, (v.out + v.channels_tile - 1) / v.channels_tile});
  RunStep(v.finish, finish.data(), finish.size() * sizeof(void*),
          {problem.tokens, (v.out + 511) / 512});

  EXPECT_TRUE(std::equal(rotated_guard.begin(), rotated_guard.end(),
                         rotated.end() - kGuard));
  for (size_t i = 0; i < kGuard; ++i) {
    const auto* bytes =
        reinterpret_cast<const unsigned char*>(&sums[sums.size() - 1 - i]);
    EXPECT_TRUE(std::all_of(bytes, bytes + sizeof(float),
                            [&](int byte) { return byte == content; }));
  }
  for (uint32_t c = 0; c < v.out; ++c) {
    EXPECT_TRUE(std::isnan(out[size_t{problem.tokens} * v.out + c]));
  }
  out.resize(size_t{problem.tokens} * v.out);
  return out;
}

class LinearKernelTest : public ::testing::TestWithParam<LinearVariant> {};

TEST_P(LinearKernelTest, EqualsPlainLoopsBitForBitAtRaggedTokenCounts) {
  const LinearVariant& v = GetParam();
  for (const uint32_t tokens : {1u, 2u, 7u, 17u}) {
    SCOPED_TRACE("m=" + std::to_string(tokens));
    const Problem problem(v, tokens, 100 + tokens);
    const std::vector<float> out = RunPlan(v, problem, 0xFF);
    for (size_t row = 0; row < tokens; ++row) {
      const std::vector<double> expected =
          LinearProduct(problem.weights, problem.Row(row), Sums::kSequential);
      for (size_t c = 0; c < v.out; ++c) {
        ASSERT_EQ(kd::FloatBits(out[row * v.out + c]),
                  kd::FloatBits(static_cast<float>(expected[c])))
            << "row " << row << " column " << c;
      }
    }
  }
}

TEST_P(LinearKernelTest, AgreesWithTheFloat64Reference) {
  const LinearVariant& v = GetParam();
  const Problem problem(v, 5, 7);
  const std::vector<float> out = RunPlan(v, problem, 0xFF);
  const LinearWeights& w = problem.weights;
  const LinearProblem call = {.tokens = 5,
                              .in_features = v.in,
                              .out_features = v.out,
                              .codebook = w.codebook,
                              .bits = v.bits,
                              .x_dtype = v.x_bf16 ? DType::kBf16 : DType::kF16,
                              .x = problem.x.data(),
                              .w = w.w.data(),
                              .suh = w.suh.data(),
                              .svh = w.svh.data(),
                              .bias = v.bias ? w.bias.data() : nullptr};
  const std::vector<int64_t> rows = {0, 1, 2, 3, 4};
  std::vector<double> expected(out.size());
  LinearReferenceRows(call, rows, ReferenceMode::kFloat64, expected.data(), 1);
  for (size_t row = 0; row < rows.size(); ++row) {
    double error = 0;
    double norm = 0;
    for (size_t c = row * v.out; c < (row + 1) * v.out; ++c) {
      error += (out[c] - expected[c]) * (out[c] - expected[c]);
      norm += expected[c] * expected[c];
    }
    EXPECT_LT(std::sqrt(error / norm), 1e-3);
    EXPECT_GT(error, 0);
    EXPECT_GT(norm, 1);
  }
}

TEST_P(LinearKernelTest, ResultDoesNotDependOnWhatTheArenaHeld) {
  const LinearVariant& v = GetParam();
  const Problem problem(v, 9, 5);
  EXPECT_EQ(RunPlan(v, problem, 0x00), RunPlan(v, problem, 0x7F));
}

INSTANTIATE_TEST_SUITE_P(
    Variants, LinearKernelTest, ::testing::ValuesIn(LinearVariants()),
    [](const ::testing::TestParamInfo<LinearVariant>& variant) {
      return variant.param.name;
    });

TEST(LinearVariantsTest, CoverEveryRateAndCodebookAndAllInputForms) {
  std::array<bool, 9> rates = {};
  std::array<bool, 3> codebooks = {};
  std::map<std::pair<bool, bool>, int> forms;
  for (const LinearVariant& v : LinearVariants()) {
    rates[static_cast<size_t>(v.bits)] = true;
    codebooks[static_cast<size_t>(v.codebook)] = true;
    ++forms[{v.x_bf16, v.bias}];
  }
  EXPECT_TRUE(std::all_of(rates.begin() + 1, rates.end(),
                          [](bool covered) { return covered; }));
  EXPECT_TRUE(std::all_of(codebooks.begin(), codebooks.end(),
                          [](bool covered) { return covered; }));
  EXPECT_EQ(forms.size(), 4u);
}

}  // namespace
}  // namespace kiln
