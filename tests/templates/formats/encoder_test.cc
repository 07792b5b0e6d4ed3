// The encoder's parts: tiles against plain search where that is possible, and
// whole matrices against the decoder.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "device/half.h"
#include "device/trellis.h"
#include "templates/formats/encoder_matrix.h"
#include "templates/formats/encoder_tile.h"
#include "templates/fused_moe/reference.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::StatusIs;
using ::testing::HasSubstr;

constexpr Codebook kCodebooks[] = {Codebook::k3Inst, Codebook::kMcg,
                                   Codebook::kMul1};

TileValues GaussianTile(std::mt19937_64* random, double deviation) {
  std::normal_distribution<double> normal(0, deviation);
  TileValues tile;
  for (float& value : tile) value = static_cast<float>(normal(*random));
  return tile;
}

double SquaredError(const TileValues& target, const TileStates& states,
                    const std::vector<float>& alphabet) {
  double sum = 0;
  for (size_t p = 0; p < kTileSize; ++p) {
    const double error = static_cast<double>(target[p]) - alphabet[states[p]];
    sum += error * error;
  }
  return sum;
}

void ExpectRing(const TileStates& states, int bits) {
  for (size_t p = 0; p < kTileSize; ++p) {
    const uint32_t before = states[(p + kTileSize - 1) % kTileSize];
    EXPECT_EQ(states[p] >> bits, (before << bits & 0xFFFF) >> bits) << p;
  }
}

TEST(TileEncoderTest, AllLevelsOfAProcessorGiveTheSameStates) {
  std::vector<EncoderLevel> levels = {EncoderLevel::kPortable};
  for (const EncoderLevel level :
       {EncoderLevel::kAvx2, EncoderLevel::kAvx512}) {
    if (level <= BestEncoderLevel()) levels.push_back(level);
  }
  const std::vector<float> alphabet = CodebookAlphabet(Codebook::kMcg);
  for (int bits = 1; bits <= 8; ++bits) {
    std::mt19937_64 random(static_cast<uint64_t>(bits));
    const TileValues tile = GaussianTile(&random, 1.1);
    TileEncoder first(alphabet, bits, levels[0]);
    const TileStates states = first.Encode(tile);
    ExpectRing(states, bits);
    for (const EncoderLevel level : levels) {
      TileEncoder encoder(alphabet, bits, level);
      EXPECT_EQ(encoder.Encode(tile), states) << bits;
    }
  }
}

// Values that the trellis can give exactly are found again, at every rate: no
// other path has no error.
TEST(TileEncoderTest, FindsAPathWithoutError) {
  const std::vector<float> alphabet = CodebookAlphabet(Codebook::k3Inst);
  std::mt19937_64 random(3);
  for (int bits = 2; bits <= 8; ++bits) {
    std::array<uint32_t, kTileSize> symbols;
    for (uint32_t& symbol : symbols)
      symbol = static_cast<uint32_t>(random() & ((1u << bits) - 1));
    TileValues target;
    TileStates states;
    for (size_t p = 0; p < kTileSize; ++p) {
      uint32_t state = 0;
      for (size_t lag = 16; lag-- > 0;) {
        state = state << bits | symbols[(p + kTileSize - lag) % kTileSize];
      }
      states[p] = static_cast<uint16_t>(state);
      target[p] = alphabet[states[p]];
    }
    TileEncoder encoder(alphabet, bits);
    EXPECT_EQ(SquaredError(target, encoder.Encode(target), alphabet), 0)
        << bits;
  }
}

// With K = 8 a state is two symbols, so the best path through a given seam can
// be found by a plain search over pairs of symbols.
TEST(TileEncoderTest, EqualsAPlainDynamicProgramThroughTheSameSeam) {
  const std::vector<float> alphabet = CodebookAlphabet(Codebook::kMul1);
  std::mt19937_64 random(4);
  const TileValues target = GaussianTile(&random, 0.7);
  TileEncoder encoder(alphabet, 8);
  const TileStates states = encoder.Encode(target);
  const uint32_t seam = states[kTileSize - 1] & 0xFF;
  std::vector<double> cost(256, 1e30);
  cost[seam] = 0;
  for (const float x : target) {
    std::vector<double> next(256, 1e30);
    for (uint32_t before = 0; before < 256; ++before) {
      for (uint32_t symbol = 0; symbol < 256; ++symbol) {
        const double error =
            static_cast<double>(x) - alphabet[before << 8 | symbol];
        next[symbol] = std::min(next[symbol], cost[before] + error * error);
      }
    }
    cost = next;
  }
  EXPECT_NEAR(SquaredError(target, states, alphabet), cost[seam],
              1e-5 * cost[seam]);
}

TEST(TileEncoderTest, PackedWordsDecodeToTheStates) {
  const std::vector<float> alphabet = CodebookAlphabet(Codebook::kMcg);
  for (int bits = 1; bits <= 8; ++bits) {
    std::mt19937_64 random(static_cast<uint64_t>(10 + bits));
    TileEncoder encoder(alphabet, bits);
    const TileStates states = encoder.Encode(GaussianTile(&random, 1));
    std::vector<uint16_t> words(static_cast<size_t>(16 * bits));
    PackTile(states, bits, words);
    std::vector<uint16_t> decoded(kTileSize);
    DecodeTrellisMatrix(words.data(), 16, 16, bits, Codebook::kMcg,
                        decoded.data());
    for (uint32_t p = 0; p < kTileSize; ++p) {
      const uint32_t at = kd::PositionRow(p) * 16 + kd::PositionColumn(p);
      EXPECT_EQ(kd::f16_to_f32(decoded[at]), alphabet[states[p]]) << p;
    }
  }
}

// The words of the specification's table of A.3.
TEST(TileEncoderTest, PackingMatchesThePublishedBytes) {
  struct Row {
    int bits;
    std::function<uint32_t(uint32_t)> symbol;
    std::string bytes;
  };

  const Row rows[] = {
      {4, [](uint32_t i) { return i % 16; }, "67452301efcdab89"},
      {2, [](uint32_t i) { return (7 * i + 3) % 4; }, "e4e4e4e4"},
      {3, [](uint32_t i) { return (7 * i + 3) % 8; },
       "68ac8f688f68ac8fac8f68ac"},
      {5, [](uint32_t i) { return (7 * i + 3) % 32; },
       "998fa31a0b93d8b4829eacf8"},
  };
  for (const Row& row : rows) {
    TileStates states;
    for (uint32_t p = 0; p < kTileSize; ++p) {
      states[p] = static_cast<uint16_t>(row.symbol(p));
    }
    std::vector<uint16_t> words(static_cast<size_t>(16 * row.bits));
    PackTile(states, row.bits, words);
    EXPECT_EQ(ToHex({reinterpret_cast<const char*>(words.data()),
                     row.bytes.size() / 2}),
              row.bytes)
        << row.bits;
  }
}

// ---- matrices --------------------------------------------------------------

// diag(suh) H V H diag(svh) by its definition: sums over the Hadamard matrix.
std::vector<double> Dense(const Exl3Encoding& encoding, size_t in, size_t out,
                          int bits, Codebook codebook) {
  std::vector<uint16_t> halves(in * out);
  DecodeTrellisMatrix(encoding.trellis.data(), static_cast<int64_t>(in),
                      static_cast<int64_t>(out), bits, codebook, halves.data());
  const auto sign = [](size_t i, size_t j) {
    return __builtin_popcountll(i & j & 127) % 2 == 0 ? 1.0 : -1.0;
  };
  std::vector<double> half(in * out, 0.0);
  for (size_t i = 0; i < in; ++i) {
    for (size_t k = i / 128 * 128; k < i / 128 * 128 + 128; ++k) {
      for (size_t n = 0; n < out; ++n) {
        half[i * out + n] += sign(i, k) * kd::f16_to_f32(halves[k * out + n]);
      }
    }
  }
  std::vector<double> dense(in * out, 0.0);
  for (size_t i = 0; i < in; ++i) {
    for (size_t j = 0; j < out; ++j) {
      double sum = 0;
      for (size_t n = j / 128 * 128; n < j / 128 * 128 + 128; ++n) {
        sum += sign(j, n) * half[i * out + n];
      }
      dense[i * out + j] = sum / 128 * kd::f16_to_f32(encoding.suh[i]) *
                           kd::f16_to_f32(encoding.svh[j]);
    }
  }
  return dense;
}

double SquaredDistance(const std::vector<float>& a,
                       const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

// Weights as models have them: channels of different magnitude, heavy tails.
std::vector<float> UnevenWeights(size_t in, size_t out, double scale,
                                 uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> rows(in);
  std::vector<double> columns(out);
  for (double& row : rows) row = std::exp(0.7 * normal(random));
  for (double& column : columns) column = std::exp(0.5 * normal(random));
  std::vector<float> weights(in * out);
  for (size_t i = 0; i < weights.size(); ++i) {
    double value = normal(random);
    value *= std::abs(value);
    weights[i] =
        static_cast<float>(scale * rows[i / out] * columns[i % out] * value);
  }
  return weights;
}

constexpr size_t kIn = 256;
constexpr size_t kOut = 128;

TEST(Exl3EncoderTest, TheErrorIsTheOneItStatesAndTheAlphabets) {
  // Mean squared error of a Gaussian input, from section A.10 and measured.
  constexpr double kExpected[9] = {0,      .27,    .0687,   .0176, .0046,
                                   .00122, .00033, .000088, .00003};
  const std::vector<float> weights = UnevenWeights(kIn, kOut, 0.02, 1);
  for (const Codebook codebook : kCodebooks) {
    for (const int bits : {2, 4, 5, 8}) {
      if (codebook != Codebook::kMcg && bits != 4) continue;
      SCOPED_TRACE(bits);
      GridEncoder encoder(CodebookAlphabet(codebook), bits, 2);
      ASSERT_OK_AND_ASSIGN(const Exl3Encoding encoding,
                           EncodeExl3(weights, kIn, kOut, 7, &encoder));
      const double error =
          SquaredDistance(weights, Dense(encoding, kIn, kOut, bits, codebook));
      EXPECT_NEAR(error, encoding.squared_error, 1e-6 * error);
      EXPECT_NEAR(error / encoding.energy, kExpected[bits],
                  0.15 * kExpected[bits]);
    }
  }
}

TEST(Exl3EncoderTest, BytesDependOnTheSeedAndNotOnThreads) {
  testing::SplitMix64 random(2);
  std::vector<float> weights(kIn * kOut);
  for (float& weight : weights) {
    weight = static_cast<float>(random.Symmetric());
  }
  const auto encode = [&](uint64_t seed, int threads) {
    GridEncoder encoder(CodebookAlphabet(Codebook::kMcg), 4, threads);
    absl::StatusOr<Exl3Encoding> encoding =
        EncodeExl3(weights, kIn, kOut, seed, &encoder);
    EXPECT_OK(encoding);
    return *std::move(encoding);
  };
  const Exl3Encoding one = encode(1, 1);
  const Exl3Encoding four = encode(1, 4);
  EXPECT_EQ(one.trellis, four.trellis);
  EXPECT_EQ(one.suh, four.suh);
  EXPECT_EQ(one.svh, four.svh);
  EXPECT_EQ(one.squared_error, four.squared_error);
  EXPECT_NE(one.suh, encode(2, 1).suh);
  // Pinned: a file that is made again tomorrow must be the same.
  EXPECT_EQ(testing::Sha256Hex(one.trellis).substr(0, 16), "5be1efcface00953");
}

TEST(Exl3EncoderTest, ZeroChannelsStayZero) {
  std::vector<float> weights = UnevenWeights(kIn, kOut, 1, 3);
  for (size_t i = 0; i < kIn; ++i) weights[i * kOut + 5] = 0;
  for (size_t j = 0; j < kOut; ++j) weights[9 * kOut + j] = 0;
  GridEncoder encoder(CodebookAlphabet(Codebook::kMcg), 3, 2);
  ASSERT_OK_AND_ASSIGN(const Exl3Encoding encoding,
                       EncodeExl3(weights, kIn, kOut, 7, &encoder));
  EXPECT_EQ(encoding.suh[9] & 0x7FFF, 0);
  EXPECT_EQ(encoding.svh[5] & 0x7FFF, 0);
  EXPECT_LT(encoding.squared_error / encoding.energy, 0.02);

  const std::vector<float> zeros(kIn * kOut, 0.0f);
  ASSERT_OK_AND_ASSIGN(const Exl3Encoding nothing,
                       EncodeExl3(zeros, kIn, kOut, 7, &encoder));
  EXPECT_EQ(nothing.squared_error, 0);
  EXPECT_EQ(nothing.energy, 0);
}

TEST(Exl3EncoderTest, SmallAndLargeWeightsKeepTheirPrecision) {
  GridEncoder encoder(CodebookAlphabet(Codebook::kMcg), 4, 2);
  for (const double scale : {1e-6, 1e-4, 1e3}) {
    const std::vector<float> weights = UnevenWeights(kIn, kOut, scale, 4);
    ASSERT_OK_AND_ASSIGN(const Exl3Encoding encoding,
                         EncodeExl3(weights, kIn, kOut, 7, &encoder));
    EXPECT_LT(encoding.squared_error / encoding.energy, 0.0055) << scale;
  }
}

TEST(Exl3EncoderTest, RefusesWhatCannotBeStored) {
  GridEncoder encoder(CodebookAlphabet(Codebook::kMcg), 2, 1);
  std::vector<float> weights = UnevenWeights(kIn, kOut, 1, 5);
  weights[3 * kOut + 4] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(EncodeExl3(weights, kIn, kOut, 7, &encoder),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("input 3 and output 4 is nan, must be "
                                 "finite")));
  for (const double scale : {1e-20, 1e9}) {
    EXPECT_THAT(
        EncodeExl3(UnevenWeights(kIn, kOut, scale, 5), kIn, kOut, 7, &encoder),
        StatusIs(StatusCode::kInvalidArgument,
                 HasSubstr("must be within 2^-14..65504")))
        << scale;
  }
}

}  // namespace
}  // namespace kiln
