// The oracle itself, against an independent dense evaluation and against its
// own contract. The vector files check it too (vectors_test.cc).

#include "templates/fused_moe/reference.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "device/half.h"
#include "gtest/gtest.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using testing::SplitMix64;

constexpr int64_t kH = 256;
constexpr int64_t kI = 128;
constexpr int64_t kE = 3;
constexpr int64_t kTopK = 2;
constexpr int64_t kTokens = 5;

std::vector<uint16_t> Halves(SplitMix64* random, int64_t count, double scale) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  for (uint16_t& value : values) {
    value = kd::f32_to_f16(static_cast<float>(scale * random->Symmetric()));
  }
  return values;
}

struct Inputs {
  explicit Inputs(uint64_t seed) : random(seed) {
    p.tokens = kTokens;
    p.hidden = kH;
    p.intermediate = kI;
    p.experts = kE;
    p.top_k = kTopK;
    p.codebook = Codebook::kMul1;
    p.bits = {.gate = 3, .up = 5, .down = 2};
    p.x_dtype = DType::kF16;
    p.id_dtype = DType::kI32;
    Point();
  }

  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;

  void Point() {
    p.x = x.data();
    p.topk_ids = ids.data();
    p.topk_weights = weights.data();
    p.w_gate = w_gate.data();
    p.w_up = w_up.data();
    p.w_down = w_down.data();
    p.gate_suh = gate_suh.data();
    p.up_suh = up_suh.data();
    p.rotations = rotations.data();
    p.down_svh = down_svh.data();
  }

  std::vector<double> Run(ReferenceMode mode,
                          std::vector<int64_t> rows = {0, 1, 2, 3, 4},
                          int threads = 1) const {
    std::vector<double> out(rows.size() * kH, NAN);
    FusedMoeReferenceRows(p, rows, mode, out.data(), threads);
    return out;
  }

  SplitMix64 random;
  FusedMoeProblem p;
  std::vector<uint16_t> x = Halves(&random, kTokens* kH, 1);
  std::vector<int32_t> ids = {0, 1, 2, 2, 1, -1, -5, kE, 0, 2};
  std::vector<float> weights = {0.5f, 0.25f, 1.f, -2.f, 0.75f,
                                3.f,  1.f,   1.f, .1f,  .9f};
  std::vector<uint16_t> w_gate = random.Words(kE * kH * kI / 16 * 3);
  std::vector<uint16_t> w_up = random.Words(kE * kH * kI / 16 * 5);
  std::vector<uint16_t> w_down = random.Words(kE * kH * kI / 16 * 2);
  std::vector<uint16_t> gate_suh = Halves(&random, kE* kH, 0.1);
  std::vector<uint16_t> up_suh = Halves(&random, kE* kH, 0.1);
  std::vector<uint16_t> rotations = Halves(&random, kE * 3 * kI, 1);
  std::vector<uint16_t> down_svh = Halves(&random, kE* kH, 1);
};

// ---- independent dense evaluation ------------------------------------------

using Matrix = std::vector<double>;  // [k][n]

double Sign(int64_t i, int64_t j) {
  const unsigned both = static_cast<unsigned>(i) & static_cast<unsigned>(j);
  return std::popcount(both) % 2 != 0 ? -1 : 1;
}

// diag(suh) H What H diag(svh) with H as an explicit block matrix.
Matrix Dense(const uint16_t* trellis, int64_t k, int64_t n, int bits,
             Codebook codebook, const uint16_t* suh, const uint16_t* svh) {
  std::vector<uint16_t> decoded(static_cast<size_t>(k * n));
  DecodeTrellisMatrix(trellis, k, n, bits, codebook, decoded.data());
  Matrix left(decoded.size());
  Matrix both(decoded.size());
  for (int64_t a = 0; a < k; ++a) {
    for (int64_t b = 0; b < n; ++b) {
      double sum = 0;
      for (int64_t c = a / 128 * 128; c < a / 128 * 128 + 128; ++c) {
        sum += Sign(a % 128, c % 128) *
               kd::f16_to_f32(decoded[static_cast<size_t>(c * n + b)]);
      }
      left[static_cast<size_t>(a * n + b)] = sum / std::sqrt(128.0);
    }
  }
  for (int64_t a = 0; a < k; ++a) {
    for (int64_t b = 0; b < n; ++b) {
      double sum = 0;
      for (int64_t c = b / 128 * 128; c < b / 128 * 128 + 128; ++c) {
        sum += Sign(b % 128, c % 128) * left[static_cast<size_t>(a * n + c)];
      }
      both[static_cast<size_t>(a * n + b)] = sum / std::sqrt(128.0) *
                                             kd::f16_to_f32(suh[a]) *
                                             kd::f16_to_f32(svh[b]);
    }
  }
  return both;
}

std::vector<double> Times(const std::vector<double>& x, const Matrix& w,
                          int64_t n) {
  std::vector<double> y(static_cast<size_t>(n), 0.0);
  for (size_t k = 0; k < x.size(); ++k) {
    for (size_t i = 0; i < y.size(); ++i) y[i] += x[k] * w[k * y.size() + i];
  }
  return y;
}

TEST(ReferenceTest, Float64ModeEqualsDenseMatrices) {
  const Inputs in(1);
  const FusedMoeProblem& p = in.p;
  std::vector<double> expected(kTokens * kH, 0.0);
  for (int64_t e = 0; e < kE; ++e) {
    const int64_t weights = kH * kI / 16;
    const uint16_t* rotations = p.rotations + e * 3 * kI;
    const Matrix gate = Dense(p.w_gate + e * weights * 3, kH, kI, 3, p.codebook,
                              p.gate_suh + e * kH, rotations);
    const Matrix up = Dense(p.w_up + e * weights * 5, kH, kI, 5, p.codebook,
                            p.up_suh + e * kH, rotations + kI);
    const Matrix down = Dense(p.w_down + e * weights * 2, kI, kH, 2, p.codebook,
                              rotations + 2 * kI, p.down_svh + e * kH);
    for (int64_t route = 0; route < kTokens * kTopK; ++route) {
      if (in.ids[static_cast<size_t>(route)] != e) continue;
      const int64_t token = route / kTopK;
      std::vector<double> x(kH);
      for (int64_t c = 0; c < kH; ++c) {
        x[static_cast<size_t>(c)] =
            kd::f16_to_f32(in.x[static_cast<size_t>(token * kH + c)]);
      }
      std::vector<double> a = Times(x, gate, kI);
      const std::vector<double> u = Times(x, up, kI);
      for (size_t c = 0; c < a.size(); ++c) {
        a[c] = a[c] / (1 + std::exp(-a[c])) * u[c];
      }
      const std::vector<double> y = Times(a, down, kH);
      for (int64_t c = 0; c < kH; ++c) {
        expected[static_cast<size_t>(token * kH + c)] +=
            in.weights[static_cast<size_t>(route)] * y[static_cast<size_t>(c)];
      }
    }
  }
  const std::vector<double> out = in.Run(ReferenceMode::kFloat64);
  double norm = 0;
  for (const double value : expected) norm += value * value;
  ASSERT_GT(norm, 0);
  const double scale = std::sqrt(norm / static_cast<double>(expected.size()));
  for (size_t i = 0; i < out.size(); ++i) {
    EXPECT_NEAR(out[i], expected[i], 1e-11 * scale) << i;
  }
}

TEST(ReferenceTest, TokenWithoutActiveRouteIsExactlyZero) {
  const Inputs in(2);
  for (const auto mode : {ReferenceMode::kFloat64, ReferenceMode::kStaged}) {
    const std::vector<double> out = in.Run(mode, {3});  // ids -5 and E
    for (const double value : out) EXPECT_EQ(value, 0.0);
  }
}

TEST(ReferenceTest, RowsMayBeSampledInAnyOrderAndRepeated) {
  const Inputs in(3);
  for (const auto mode : {ReferenceMode::kFloat64, ReferenceMode::kStaged}) {
    const std::vector<double> all = in.Run(mode);
    const std::vector<int64_t> rows = {4, 0, 4};
    const std::vector<double> some = in.Run(mode, rows);
    for (size_t r = 0; r < rows.size(); ++r) {
      for (size_t c = 0; c < kH; ++c) {
        ASSERT_EQ(some[r * kH + c], all[static_cast<size_t>(rows[r]) * kH + c]);
      }
    }
  }
}

TEST(ReferenceTest, ThreadCountDoesNotChangeTheResult) {
  const Inputs in(4);
  EXPECT_EQ(in.Run(ReferenceMode::kStaged, {0, 1, 2, 3, 4}, 1),
            in.Run(ReferenceMode::kStaged, {0, 1, 2, 3, 4}, 5));
}

TEST(ReferenceTest, SixtyFourBitIdsNeverAliasAnExpert) {
  Inputs in(5);
  std::vector<int64_t> wide(in.ids.begin(), in.ids.end());
  in.p.id_dtype = DType::kI64;
  in.p.topk_ids = wide.data();
  const std::vector<double> narrow = Inputs(5).Run(ReferenceMode::kStaged);
  EXPECT_EQ(in.Run(ReferenceMode::kStaged), narrow);
  for (int64_t& id : wide) id += int64_t{1} << 32;
  for (const double value : in.Run(ReferenceMode::kStaged)) {
    EXPECT_EQ(value, 0.0);
  }
}

TEST(ReferenceTest, ExpertMapRenamesAndDropsExperts) {
  Inputs in(6);
  const std::vector<double> plain = in.Run(ReferenceMode::kFloat64);
  // Global id g lives at local expert map[g].
  const std::vector<int32_t> map = {-1, 2, 0, 1, 7};
  in.p.expert_map = map.data();
  in.p.expert_map_size = static_cast<int64_t>(map.size());
  for (int32_t& id : in.ids) {
    if (id == 0) {
      id = 2;
    } else if (id == 1) {
      id = 3;
    } else if (id == 2) {
      id = 1;
    } else {
      id = id < 0 ? 0 : 4;  // mapped to nothing, mapped out of range
    }
  }
  EXPECT_EQ(in.Run(ReferenceMode::kFloat64), plain);
}

TEST(ReferenceTest, SharedScalesEqualIdenticalPerExpertScales) {
  Inputs in(7);
  for (auto* table : {&in.gate_suh, &in.up_suh, &in.down_svh}) {
    for (int64_t e = 1; e < kE; ++e) {
      std::copy_n(table->begin(), kH, table->begin() + e * kH);
    }
  }
  const std::vector<double> copies = in.Run(ReferenceMode::kStaged);
  for (auto* table : {&in.gate_suh, &in.up_suh, &in.down_svh}) {
    table->resize(kH);
    table->shrink_to_fit();
  }
  in.p.shared_scales = true;
  in.Point();
  EXPECT_EQ(in.Run(ReferenceMode::kStaged), copies);
}

TEST(ReferenceTest, OnlyStagedModeRoundsBfloat16ToBinary16) {
  Inputs in(8);
  in.p.x_dtype = DType::kBf16;
  // 2^-20 (1 + 2^-7): exact in bfloat16, between binary16 subnormals.
  std::fill(in.x.begin(), in.x.end(), uint16_t{0x3581});
  const std::vector<double> exact = in.Run(ReferenceMode::kFloat64, {0});
  const std::vector<double> staged = in.Run(ReferenceMode::kStaged, {0});
  std::fill(in.x.begin(), in.x.end(), uint16_t{0x3580});  // 2^-20
  const std::vector<double> exact_low = in.Run(ReferenceMode::kFloat64, {0});
  const std::vector<double> staged_low = in.Run(ReferenceMode::kStaged, {0});
  EXPECT_EQ(staged, staged_low);
  EXPECT_NE(exact, exact_low);
}

TEST(ReferenceTest, StagedModeOverflowsToInfinityAtTheBinary16Boundary) {
  Inputs in(9);
  in.p.x_dtype = DType::kBf16;
  std::fill(in.x.begin(), in.x.end(), uint16_t{0x4780});  // 65536
  bool finite = true;
  for (const double value : in.Run(ReferenceMode::kStaged, {0})) {
    finite &= std::isfinite(value);
  }
  EXPECT_FALSE(finite);
  for (const double value : in.Run(ReferenceMode::kFloat64, {0})) {
    EXPECT_TRUE(std::isfinite(value));
  }
}

}  // namespace
}  // namespace kiln
