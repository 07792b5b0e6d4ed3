// The W4A8 oracle against dense evaluation of the weights that a layer's files
// stand for, which the encoder's inverse transforms give.

#include "templates/formats/npk_reference.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <numeric>
#include <random>

#include "device/half.h"
#include "templates/formats/npk_encode.h"
#include "templates/fused_moe/mx_reference.h"
#include "tests/support/npk_writer.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

constexpr int64_t kTokens = 5;
constexpr int64_t kTopK = 2;

// Both ranks of a layer of random streams, and one call on it.
class Layer {
 public:
  explicit Layer(NpkBoundary boundary, int bits = 3,
                 const std::string& limit = "10") {
    for (int rank = 0; rank < 2; ++rank) {
      NpkMetadata metadata = testing::SmallNpk();
      metadata.boundary = boundary;
      metadata.bits = bits;
      metadata.rank = rank;
      metadata.limit = limit;
      auto tensors =
          testing::RandomNpkTensors(metadata, static_cast<uint64_t>(20 + rank));
      if (boundary == NpkBoundary::kCoupled) {
        const auto first = testing::RandomNpkTensors(metadata, 20);
        for (const NpkTensor which :
             {NpkTensor::kGateUpSuh, NpkTensor::kDownSvh}) {
          tensors[which] = first.at(which);
        }
      }
      files_[rank] = testing::NpkBytes(metadata, tensors);
    }
    for (const std::string& file : files_) {
      absl::StatusOr<NpkSidecar> sidecar = NpkSidecar::Parse(
          {reinterpret_cast<const uint8_t*>(file.data()), file.size()});
      EXPECT_OK(sidecar);
      sidecars_.push_back(*std::move(sidecar));
    }
    for (const NpkSidecar& sidecar : sidecars_) ranks_.push_back(&sidecar);
    EXPECT_OK(CheckNpkRanks(ranks_));
    std::mt19937_64 random(3);
    std::normal_distribution<float> normal(0, 0.1f);
    for (int64_t i = 0; i < kTokens * hidden(); ++i) {
      x_.push_back(
          static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(random)) >> 16));
    }
  }

  int64_t hidden() const { return sidecars_[0].metadata().hidden; }

  const NpkMetadata& metadata() const { return sidecars_[0].metadata(); }

  // Sum of both ranks' outputs for all tokens.
  std::vector<double> Run(ReferenceMode mode) const {
    std::vector<int64_t> rows(kTokens);
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<double> sum(static_cast<size_t>(kTokens * hidden()), 0.0);
    for (const NpkSidecar* rank : ranks_) {
      std::vector<double> part(sum.size());
      NpkReferenceRows(Problem(rank), rows, mode, part.data());
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += part[i];
    }
    return sum;
  }

  NpkProblem Problem(const NpkSidecar* rank) const {
    NpkProblem p;
    p.weights = rank;
    p.tokens = kTokens;
    p.top_k = kTopK;
    p.x = x_.data();
    p.topk_ids = ids.data();
    p.topk_weights = weights.data();
    return p;
  }

  // What the weights compute, without any transform.
  std::vector<double> Dense() const {
    const auto h = static_cast<size_t>(hidden());
    std::vector<double> out(kTokens * h, 0.0);
    for (int64_t e = 0; e < metadata().experts; ++e) {
      const RealExpert w = DecodeNpkExpert(ranks_, e);
      for (size_t route = 0; route < ids.size(); ++route) {
        if (ids[route] != e) continue;
        const size_t token = route / kTopK;
        std::vector<double> x(h);
        for (size_t c = 0; c < h; ++c) {
          x[c] = kd::bf16_to_f32(x_[token * h + c]);
        }
        std::vector<double> middle = Times(w.gate, x);
        const std::vector<double> up = Times(w.up, x);
        const double limit = metadata().LimitValue();
        for (size_t i = 0; i < middle.size(); ++i) {
          const double g = std::min(middle[i], limit);
          middle[i] = g / (1 + std::exp(-g)) * std::clamp(up[i], -limit, limit);
        }
        const std::vector<double> y = Times(w.down, middle);
        for (size_t c = 0; c < h; ++c) {
          out[token * h + c] += static_cast<double>(weights[route]) * y[c];
        }
      }
    }
    return out;
  }

  std::vector<int32_t> ids = {0, 1, 2, 0, -1, 2, 3, -7, 1, 1};
  std::vector<float> weights = {0.5f, 0.25f, 1, -2,     0.75f,
                                3,    1,     1, 0.125f, 0.5f};

 private:
  static std::vector<double> Times(const std::vector<float>& w,
                                   const std::vector<double>& x) {
    std::vector<double> y(w.size() / x.size(), 0.0);
    for (size_t n = 0; n < y.size(); ++n) {
      for (size_t k = 0; k < x.size(); ++k) y[n] += w[n * x.size() + k] * x[k];
    }
    return y;
  }

  std::string files_[2];
  std::vector<NpkSidecar> sidecars_;
  std::vector<const NpkSidecar*> ranks_;
  std::vector<uint16_t> x_;
};

double RelativeError(const std::vector<double>& found,
                     const std::vector<double>& expected) {
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    error += std::pow(found[i] - expected[i], 2);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / norm);
}

TEST(NpkReferenceTest, WithoutRoundingItIsThePlainExpert) {
  for (const NpkBoundary boundary :
       {NpkBoundary::kCoupled, NpkBoundary::kIdentity}) {
    for (const int bits : {2, 5}) {
      const Layer layer(boundary, bits);
      // The dense weights are binary32.
      EXPECT_LT(
          RelativeError(layer.Run(ReferenceMode::kFloat64), layer.Dense()),
          1e-5)
          << bits;
    }
  }
}

// A coupled layer of neutral vectors against an identity layer. Each H128 then
// meets itself, so what is left is a butterfly over the four quarters of 512
// channels, on both sides of the layer, and the order of rows: the boundary
// takes neurons from atoms of gate and up in turn.
TEST(NpkReferenceTest, NeutralVectorsGiveTheIdentityArm) {
  constexpr size_t kHidden = 1024;
  constexpr size_t kInter = 256;
  constexpr size_t kInner = 128;
  constexpr uint16_t kOne = 0x3C00;
  std::mt19937_64 random(11);
  std::normal_distribution<double> normal(0, 0.03);
  const auto matrix = [&] {
    std::vector<double> values(kHidden * kInter);
    for (double& value : values) value = normal(random);
    return values;
  };
  MxExpert::Weights plain;
  plain.gate = matrix();
  plain.up = matrix();
  plain.down = matrix();
  // The butterfly, its own inverse, of channel c: +-1/2 of the channels of the
  // same place in all four quarters.
  const auto mixed = [](const auto& at, size_t c) {
    const size_t base = c / 512 * 512 + c % kInner;
    const size_t quarter = c % 512 / kInner;
    double sum = 0;
    for (size_t q = 0; q < 4; ++q) {
      const bool minus = std::popcount(q & quarter) % 2 == 1;
      sum += (minus ? -0.5 : 0.5) * at(base + q * kInner);
    }
    return sum;
  };
  MxExpert::Weights coupled = plain;
  for (size_t n = 0; n < 2 * kInter; ++n) {
    const std::vector<double>& from = n % 2 == 0 ? plain.gate : plain.up;
    std::vector<double>& to = n / 32 % 2 == 0 ? coupled.gate : coupled.up;
    const size_t row = n / 64 * 32 + n % 32;
    for (size_t c = 0; c < kHidden; ++c) {
      to[row * kHidden + c] =
          mixed([&](size_t k) { return from[n / 2 * kHidden + k]; }, c);
    }
  }
  for (size_t c = 0; c < kHidden; ++c) {
    for (size_t i = 0; i < kInter; ++i) {
      coupled.down[c * kInter + i] =
          mixed([&](size_t k) { return plain.down[k * kInter + i]; }, c);
    }
  }
  coupled.suh.assign(kHidden, kOne);
  coupled.inner.assign(3 * kInter, kOne);
  coupled.signs.assign(3 * kInter, kOne);
  coupled.svh.assign(kHidden, kOne);
  std::vector<double> x(kHidden);
  for (double& value : x)
    value = kd::round_f16(static_cast<float>(30 * normal(random)));
  const auto run = [&](const MxExpert::Weights& weights, ReferenceMode mode) {
    const MxExpert expert(weights, 10, mode);
    std::vector<double> out = expert.Run(x);
    if (!weights.suh.empty()) MxFinish(mode, out);
    return out;
  };
  const auto error = [&](ReferenceMode mode) {
    return RelativeError(run(coupled, mode), run(plain, mode));
  };
  EXPECT_LT(error(ReferenceMode::kFloat64), 1e-13);
  // Of binary16 in front of each product and behind it.
  EXPECT_LT(error(ReferenceMode::kStaged), 1.5e-3);
  // Vectors that are not neutral are another layer.
  coupled.inner[kInter + 5] = 0x4000;
  EXPECT_GT(error(ReferenceMode::kFloat64), 1e-3);
}

TEST(NpkReferenceTest, StagesCostWhatThreeBitsOfActivationsCost) {
  for (const NpkBoundary boundary :
       {NpkBoundary::kCoupled, NpkBoundary::kIdentity}) {
    const Layer layer(boundary, 4);
    const double error = RelativeError(layer.Run(ReferenceMode::kStagedW4A8),
                                       layer.Run(ReferenceMode::kFloat64));
    // Uniform rounding to 3 bits of mantissa is 2.6 % of a value, twice, and
    // passes through the activation.
    EXPECT_GT(error, 0.01);
    EXPECT_LT(error, 0.12);
  }
}

// A second term takes back what the first rounded away, but for its own three
// bits.
TEST(NpkReferenceTest, ARemainderLeavesAFractionOfThatError) {
  for (const NpkBoundary boundary :
       {NpkBoundary::kCoupled, NpkBoundary::kIdentity}) {
    const Layer layer(boundary, 4);
    const auto exact = layer.Run(ReferenceMode::kFloat64);
    const double one_term =
        RelativeError(layer.Run(ReferenceMode::kStagedW4A8), exact);
    for (const ReferenceMode mode :
         {ReferenceMode::kStagedW4A8Rp2, ReferenceMode::kSequentialW4A8Rp2}) {
      const double error = RelativeError(layer.Run(mode), exact);
      EXPECT_GT(error, 5e-4);
      EXPECT_LT(error, one_term / 15);
    }
  }
}

TEST(NpkReferenceTest, TheLimitClamps) {
  const Layer ten(NpkBoundary::kCoupled, 3, "10");
  const Layer none(NpkBoundary::kCoupled, 3, "inf");
  const Layer tight(NpkBoundary::kCoupled, 3, "0.5");
  const auto ten_out = ten.Run(ReferenceMode::kFloat64);
  EXPECT_LT(RelativeError(none.Run(ReferenceMode::kFloat64), none.Dense()),
            1e-5);
  EXPECT_LT(RelativeError(tight.Run(ReferenceMode::kFloat64), tight.Dense()),
            1e-5);
  EXPECT_GT(RelativeError(tight.Run(ReferenceMode::kFloat64), ten_out), 0.1);
}

TEST(NpkReferenceTest, InactiveRoutesGiveNothingAndMapsAreFollowed) {
  Layer layer(NpkBoundary::kCoupled);
  const auto h = static_cast<size_t>(layer.hidden());
  const auto out = layer.Run(ReferenceMode::kStagedW4A8);
  for (size_t c = 0; c < h; ++c) EXPECT_EQ(out[3 * h + c], 0);

  // Global ids through a map to the same experts.
  const std::vector<int32_t> map = {2, -1, 0, 1};
  const std::vector<int32_t> local = layer.ids;
  for (int32_t& id : layer.ids) {
    id = id == 0 ? 2 : id == 1 ? 3 : id == 2 ? 0 : id == 3 ? 1 : id;
  }
  std::vector<int64_t> rows(kTokens);
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<double> mapped(out.size());
  const std::string file = testing::NpkBytes(
      layer.metadata(), testing::RandomNpkTensors(layer.metadata(), 1));
  ASSERT_OK_AND_ASSIGN(
      const NpkSidecar sidecar,
      NpkSidecar::Parse(
          {reinterpret_cast<const uint8_t*>(file.data()), file.size()}));
  NpkProblem problem = layer.Problem(&sidecar);
  problem.expert_map = map.data();
  problem.expert_map_size = 4;
  NpkReferenceRows(problem, rows, ReferenceMode::kStagedW4A8, mapped.data());
  layer.ids = local;
  NpkProblem plain = layer.Problem(&sidecar);
  std::vector<double> expected(out.size());
  NpkReferenceRows(plain, rows, ReferenceMode::kStagedW4A8, expected.data());
  EXPECT_EQ(mapped, expected);
}

TEST(NpkReferenceTest, RowsAreThoseThatWereAskedFor) {
  const Layer layer(NpkBoundary::kCoupled);
  const std::string file = testing::NpkBytes(
      layer.metadata(), testing::RandomNpkTensors(layer.metadata(), 1));
  ASSERT_OK_AND_ASSIGN(
      const NpkSidecar sidecar,
      NpkSidecar::Parse(
          {reinterpret_cast<const uint8_t*>(file.data()), file.size()}));
  const auto h = static_cast<size_t>(layer.hidden());
  std::vector<double> all(5 * h);
  std::vector<double> some(2 * h);
  const std::vector<int64_t> every = {0, 1, 2, 3, 4};
  const std::vector<int64_t> two = {4, 1};
  NpkReferenceRows(layer.Problem(&sidecar), every, ReferenceMode::kStagedW4A8,
                   all.data());
  NpkReferenceRows(layer.Problem(&sidecar), two, ReferenceMode::kStagedW4A8,
                   some.data());
  EXPECT_TRUE(std::equal(some.begin(), some.begin() + static_cast<long>(h),
                         all.begin() + static_cast<long>(4 * h)));
  EXPECT_TRUE(std::equal(some.begin() + static_cast<long>(h), some.end(),
                         all.begin() + static_cast<long>(h)));
}

}  // namespace
}  // namespace kiln
