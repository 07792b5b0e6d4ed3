// The oracle itself, against an independent dense evaluation and against its
// own contract. The vector files check it too (vectors_test.cc).

#include "templates/fused_moe/reference.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "device/half.h"
#include "gtest/gtest.h"
#include "templates/formats/mxfp8.h"
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
             TrellisCodebook codebook, const uint16_t* suh,
             const uint16_t* svh) {
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

// ---- coupled layers --------------------------------------------------------

// The transform of v[begin .. begin + size - 1] by its definition.
void Transform(std::vector<double>* v, size_t begin, size_t size) {
  std::vector<double> out(size);
  for (size_t i = 0; i < size; ++i) {
    for (size_t j = 0; j < size; ++j) {
      out[i] += Sign(static_cast<int64_t>(i), static_cast<int64_t>(j)) *
                (*v)[begin + j];
    }
    out[i] /= std::sqrt(static_cast<double>(size));
  }
  std::copy(out.begin(), out.end(),
            v->begin() + static_cast<std::ptrdiff_t>(begin));
}

void Scale(std::vector<double>* v, const uint16_t* factors) {
  for (size_t i = 0; i < v->size(); ++i) {
    (*v)[i] *= kd::f16_to_f32(factors[i]);
  }
}

Matrix Decoded(const uint16_t* words, int64_t k, int64_t n, int bits) {
  std::vector<uint16_t> decoded(static_cast<size_t>(k * n));
  DecodeTrellisMatrix(words, k, n, bits, TrellisCodebook::kSqgE4m3,
                      decoded.data());
  Matrix matrix(decoded.size());
  for (size_t i = 0; i < matrix.size(); ++i) {
    matrix[i] = kd::f16_to_f32(decoded[i]);
  }
  return matrix;
}

struct CoupledInputs {
  static constexpr int64_t kWide = 512;
  static constexpr int64_t kInner = 256;
  static constexpr int64_t kCount = 2;  // experts, tokens and top_k
  static constexpr int64_t kWords = kCount * kWide * kInner / 16 * 2;

  explicit CoupledInputs(bool shared) : shared_scales(shared) {
    for (int64_t e = 0; e < kCount; ++e) {
      for (int64_t i = 0; i < 3 * kInner; ++i) {
        rotations[static_cast<size_t>(6 * e * kInner + 3 * kInner + i)] =
            random.Symmetric() < 0 ? 0xBC00 : 0x3C00;
      }
    }
  }

  CoupledInputs(const CoupledInputs&) = delete;
  CoupledInputs& operator=(const CoupledInputs&) = delete;

  FusedMoeProblem Problem() const {
    FusedMoeProblem p;
    p.tokens = p.experts = p.top_k = kCount;
    p.hidden = kWide;
    p.intermediate = kInner;
    p.codebook = TrellisCodebook::kSqgE4m3;
    p.bits = {.gate = 2, .up = 2, .down = 2};
    p.shared_scales = shared_scales;
    p.x_dtype = DType::kF16;
    p.coupled = true;
    p.activation = MoeActivation::kSitu;
    p.x = x.data();
    p.topk_ids = ids.data();
    p.topk_weights = weights.data();
    p.w_gate = gate.data();
    p.w_up = up.data();
    p.w_down = down.data();
    p.gate_suh = suh.data();
    p.rotations = rotations.data();
    p.down_svh = svh.data();
    return p;
  }

  bool shared_scales;
  SplitMix64 random{77};
  std::vector<uint16_t> x = Halves(&random, kCount* kWide, 1);
  std::vector<int32_t> ids = {0, 1, 1, 1};
  std::vector<float> weights = {0.5f, 0.75f, -0.25f, 1.f};
  std::vector<uint16_t> gate = random.Words(kWords);
  std::vector<uint16_t> up = random.Words(kWords);
  std::vector<uint16_t> down = random.Words(kWords);
  std::vector<uint16_t> suh = Halves(&random, kCount* kWide, 0.2);
  std::vector<uint16_t> svh = Halves(&random, kCount* kWide, 1);
  std::vector<uint16_t> rotations = Halves(&random, kCount * 6 * kInner, 1);
};

// What recipe w4a8 makes of an operand: binary16, then blocks of MXFP8.
void ToMxfp8(std::vector<double>* v) {
  for (size_t c = 0; c < v->size(); c += kMxfp8Block) {
    std::array<float, kMxfp8Block> block;
    std::array<uint8_t, kMxfp8Block> payload;
    uint8_t scale = 0;
    for (size_t i = 0; i < block.size(); ++i) {
      block[i] =
          kd::f16_to_f32(kd::f32_to_f16(static_cast<float>((*v)[c + i])));
    }
    QuantizeMxfp8(block, &scale, payload);
    for (size_t i = 0; i < block.size(); ++i) {
      (*v)[c + i] = Mxfp8Value(scale, payload[i]);
    }
  }
}

// The steps of specification 4.8 for one route, without the router's weight and
// without rounding, except that of `w4a8` to MXFP8. With shared scales what
// follows the sum is left out.
std::vector<double> CoupledRoute(const CoupledInputs& in, int64_t token,
                                 int64_t expert, bool w4a8) {
  constexpr int64_t kWide = CoupledInputs::kWide;
  constexpr int64_t kInner = CoupledInputs::kInner;
  const int64_t row = in.shared_scales ? 0 : expert;
  std::vector<double> x(kWide);
  for (size_t c = 0; c < x.size(); ++c) {
    x[c] = kd::f16_to_f32(in.x[static_cast<size_t>(token) * x.size() + c]);
  }
  Transform(&x, 0, kWide);
  Scale(&x, in.suh.data() + row * kWide);
  for (size_t c = 0; c < kWide; c += 128) Transform(&x, c, 128);
  if (w4a8) ToMxfp8(&x);
  const int64_t words = kWide * kInner / 16 * 2;
  const std::vector<double> slots[] = {
      Times(x, Decoded(in.gate.data() + expert * words, kWide, kInner, 2),
            kInner),
      Times(x, Decoded(in.up.data() + expert * words, kWide, kInner, 2),
            kInner)};
  const uint16_t* rotations = in.rotations.data() + expert * 6 * kInner;
  std::vector<double> a;
  for (size_t b = 0; b < kInner; b += 64) {
    std::vector<double> v(128);
    std::vector<uint16_t> scale(128);
    // 32 channels of a slot, the same of the other, the next 32, and so on.
    const size_t starts[][2] = {{0, b}, {1, b}, {0, b + 32}, {1, b + 32}};
    for (size_t quarter = 0; quarter < 4; ++quarter) {
      const auto [slot, channel] = starts[quarter];
      for (size_t i = 0; i < 32; ++i) {
        v[32 * quarter + i] = slots[slot][channel + i];
        scale[32 * quarter + i] = rotations[slot * kInner + channel + i];
      }
    }
    Transform(&v, 0, 128);
    Scale(&v, scale.data());
    Transform(&v, 0, 128);
    Scale(&v, rotations + 3 * kInner + 2 * b);
    for (size_t i = 0; i < 128; i += 2) {
      const double g = v[i];
      const double u = v[i + 1];
      a.push_back(4 * std::tanh(g / 4) / (1 + std::exp(-g)) * 25 *
                  std::tanh(u / 25));
    }
  }
  Scale(&a, rotations + 5 * kInner);
  for (size_t c = 0; c < kInner; c += 128) Transform(&a, c, 128);
  Scale(&a, rotations + 2 * kInner);
  for (size_t c = 0; c < kInner; c += 128) Transform(&a, c, 128);
  if (w4a8) ToMxfp8(&a);
  std::vector<double> y = Times(
      a, Decoded(in.down.data() + expert * words, kInner, kWide, 2), kWide);
  if (in.shared_scales) return y;
  for (size_t c = 0; c < kWide; c += 128) Transform(&y, c, 128);
  Scale(&y, in.svh.data() + expert * kWide);
  return y;
}

// The layer's output for one token, by the definition.
std::vector<double> CoupledToken(const CoupledInputs& in, int64_t token,
                                 bool w4a8) {
  constexpr size_t kWide = CoupledInputs::kWide;
  std::vector<double> sum(kWide, 0.0);
  for (int64_t j = 0; j < CoupledInputs::kCount; ++j) {
    const auto route = static_cast<size_t>(CoupledInputs::kCount * token + j);
    const std::vector<double> y = CoupledRoute(in, token, in.ids[route], w4a8);
    for (size_t c = 0; c < kWide; ++c) sum[c] += in.weights[route] * y[c];
  }
  if (in.shared_scales) {
    for (size_t c = 0; c < kWide; c += 128) Transform(&sum, c, 128);
    Scale(&sum, in.svh.data());
  }
  Transform(&sum, 0, kWide);
  return sum;
}

double RelativeError(const std::vector<double>& got,
                     const std::vector<double>& wanted) {
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < wanted.size(); ++i) {
    error += std::pow(got[i] - wanted[i], 2);
    norm += wanted[i] * wanted[i];
  }
  EXPECT_GT(norm, 0);
  return std::sqrt(error / norm);
}

TEST(ReferenceTest, CoupledLayersFollowTheirDefinition) {
  for (const bool shared : {false, true}) {
    const CoupledInputs in(shared);
    const FusedMoeProblem p = in.Problem();
    for (int64_t token = 0; token < CoupledInputs::kCount; ++token) {
      const auto run = [&](ReferenceMode mode, int threads) {
        std::vector<double> out(CoupledInputs::kWide);
        const std::vector<int64_t> rows = {token};
        FusedMoeReferenceRows(p, rows, mode, out.data(), threads);
        return out;
      };
      const std::vector<double> wanted = CoupledToken(in, token, false);
      EXPECT_LE(RelativeError(run(ReferenceMode::kFloat64, 1), wanted), 1e-12);
      const std::vector<double> staged = run(ReferenceMode::kStaged, 2);
      EXPECT_LE(RelativeError(staged, wanted), 2e-3);
      EXPECT_GE(RelativeError(staged, wanted), 1e-5);
      // Far closer to its own definition than MXFP8 is to binary16.
      const std::vector<double> w4a8 = run(ReferenceMode::kStagedW4A8, 1);
      EXPECT_LE(RelativeError(w4a8, CoupledToken(in, token, true)), 8e-3);
      EXPECT_GE(RelativeError(w4a8, wanted), 2e-2);
    }
  }
}

// An operand that is no number must show, whichever bits its neighbours have.
TEST(ReferenceTest, W4A8NeverHidesWhatIsNotFinite) {
  CoupledInputs in(false);
  in.x[3] = 0x7C00;
  const FusedMoeProblem p = in.Problem();
  const std::vector<int64_t> rows = {0, 1};
  std::vector<double> out(2 * CoupledInputs::kWide);
  FusedMoeReferenceRows(p, rows, ReferenceMode::kStagedW4A8, out.data(), 1);
  for (size_t c = 0; c < CoupledInputs::kWide; ++c) {
    EXPECT_TRUE(std::isnan(out[c])) << c;
    EXPECT_TRUE(std::isfinite(out[CoupledInputs::kWide + c])) << c;
  }
}

TEST(ReferenceTest, PartsOfW4A8AddUp) {
  const CoupledInputs in(true);
  const FusedMoeProblem parts[] = {in.Problem(), in.Problem()};
  const std::vector<int64_t> rows = {0, 1};
  std::vector<double> one(2 * CoupledInputs::kWide);
  std::vector<double> two(one.size());
  FusedMoeReferenceRows(parts[0], rows, ReferenceMode::kStagedW4A8, one.data(),
                        1);
  FusedMoeReferenceParts(parts, rows, ReferenceMode::kStagedW4A8, two.data(),
                         1);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_EQ(two[i], 2 * one[i]);
}

TEST(ReferenceTest, ExpertsMayHaveDifferentActivations) {
  Inputs in(11);
  const std::vector<double> silu = in.Run(ReferenceMode::kFloat64);
  in.p.activation = MoeActivation::kSitu;
  const std::vector<double> situ = in.Run(ReferenceMode::kFloat64);
  const MoeActivation own[] = {MoeActivation::kSilu, MoeActivation::kSitu,
                               MoeActivation::kSitu};
  in.p.expert_activation = own;
  const std::vector<double> mixed = in.Run(ReferenceMode::kFloat64);
  // Token 1 uses expert 2 alone; token 4 uses experts 0 and 2.
  for (size_t c = 0; c < kH; ++c) {
    EXPECT_EQ(mixed[kH + c], situ[kH + c]);
    EXPECT_NE(mixed[4 * kH + c], situ[4 * kH + c]);
    EXPECT_NE(mixed[4 * kH + c], silu[4 * kH + c]);
    EXPECT_NE(situ[kH + c], silu[kH + c]);
  }
}

TEST(ReferenceTest, PartsAddUpInBothModes) {
  const Inputs in(12);
  const std::vector<int64_t> rows = {0, 4};
  for (const auto mode : {ReferenceMode::kFloat64, ReferenceMode::kStaged}) {
    const std::vector<double> one = in.Run(mode, rows);
    const FusedMoeProblem parts[] = {in.p, in.p, in.p};
    std::vector<double> three(one.size());
    FusedMoeReferenceParts(parts, rows, mode, three.data(), 2);
    for (size_t i = 0; i < one.size(); ++i) {
      const auto single = static_cast<float>(one[i]);
      EXPECT_EQ(three[i], mode == ReferenceMode::kStaged
                              ? static_cast<double>(single + single + single)
                              : one[i] + one[i] + one[i]);
    }
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

// The modes with rounding boundaries differ in the order of sums alone: where a
// sum is exact, not at all.
TEST(ReferenceTest, SequentialModeIsStagedModeUpToTheOrderOfSums) {
  const Inputs in(7);
  const std::vector<double> exact = in.Run(ReferenceMode::kFloat64);
  const std::vector<double> staged = in.Run(ReferenceMode::kStaged);
  const std::vector<double> sequential = in.Run(ReferenceMode::kSequential);
  double norm = 0;
  double from_exact = 0;
  double from_staged = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    norm += exact[i] * exact[i];
    from_exact += std::pow(sequential[i] - exact[i], 2);
    from_staged += std::pow(sequential[i] - staged[i], 2);
    EXPECT_EQ(sequential[i], static_cast<float>(sequential[i]));
  }
  EXPECT_GT(std::sqrt(from_exact / norm), 2e-4);
  EXPECT_LT(std::sqrt(from_staged / norm), 1e-4);
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
