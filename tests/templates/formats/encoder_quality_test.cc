// The encoder's error on Gaussian numbers, against the table of the prepared-
// weights specification, section A.10.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "templates/formats/encoder_matrix.h"
#include "templates/formats/encoder_tile.h"
#include "templates/formats/mxfp8.h"
#include "templates/formats/npk_law.h"
#include "templates/fused_moe/trellis_codebook.h"

namespace kiln {
namespace {

std::vector<float> NpkAlphabet() {
  std::vector<float> values(kTileStates);
  for (uint32_t s = 0; s < kTileStates; ++s) {
    values[s] = E4m3Value(kd::NpkByte(s));
  }
  return values;
}

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

struct Quality {
  double mse = 0;    // relative to the input's variance
  double error = 0;  // standard error of mse
};

Quality Measure(const std::vector<float>& alphabet, int bits, double ratio,
                int tiles) {
  const double deviation = ratio * AlphabetDeviation(alphabet);
  std::mt19937_64 random(777);
  TileEncoder encoder(alphabet, bits);
  double sum = 0;
  double squares = 0;
  for (int i = 0; i < tiles; ++i) {
    const TileValues tile = GaussianTile(&random, deviation);
    const double mse = SquaredError(tile, encoder.Encode(tile), alphabet) /
                       (deviation * deviation * static_cast<double>(kTileSize));
    sum += mse;
    squares += mse * mse;
  }
  const double mean = sum / tiles;
  return {mean, std::sqrt((squares / tiles - mean * mean) / (tiles - 1))};
}

// Both are means of samples: they differ by less than two standard errors of
// their difference.
void ExpectAgrees(const Quality& found, const Quality& stated,
                  const std::string& what) {
  const double error = std::hypot(found.error, stated.error);
  std::printf("%s: %.6f +- %.6f, stated %.6f +- %.6f\n", what.c_str(),
              found.mse, found.error, stated.mse, stated.error);
  EXPECT_NEAR(found.mse, stated.mse, 2 * error) << what;
}

constexpr int kTiles = 300;

TEST(EncoderQualityTest, NpkMatchesTheTable) {
  const std::vector<float> alphabet = NpkAlphabet();
  EXPECT_NEAR(AlphabetDeviation(alphabet), 2.48774, 1e-5);
  ExpectAgrees(Measure(alphabet, 2, 1.00, kTiles), {.0685, .0007}, "NPK-1 K2");
  ExpectAgrees(Measure(alphabet, 3, .93, kTiles), {.01745, .0002}, "NPK-1 K3");
  ExpectAgrees(Measure(alphabet, 4, .88, kTiles), {.00458, .00005}, "NPK-1 K4");
  ExpectAgrees(Measure(alphabet, 5, .88, kTiles), {.001335, .00002},
               "NPK-1 K5");
}

// The table gives no errors for the other columns: 40 tiles, about 1.5 %.
void ExpectColumn(const std::vector<float>& alphabet,
                  const std::vector<std::pair<double, double>>& ratio_and_mse,
                  int tiles, const std::string& what) {
  for (size_t i = 0; i < ratio_and_mse.size(); ++i) {
    const auto [ratio, mse] = ratio_and_mse[i];
    const int bits = static_cast<int>(i) + 2;
    ExpectAgrees(Measure(alphabet, bits, ratio, tiles), {mse, .015 * mse},
                 absl::StrCat(what, " K", bits));
  }
}

TEST(EncoderQualityTest, McgMatchesTheTable) {
  ExpectColumn(CodebookAlphabet(Codebook::kMcg),
               {{1.0, .0684}, {.93, .0176}, {.88, .00455}, {.82, .00119}},
               kTiles, "MCG");
}

// ---- every column of the table, on more tiles; labelled slow ---------------

constexpr int kFullTiles = 1500;

std::vector<float> GaussianTable() {
  std::mt19937_64 random(1);
  std::normal_distribution<double> normal(0, 2.488);
  std::vector<float> values(kTileStates);
  for (float& value : values) value = static_cast<float>(normal(random));
  return values;
}

std::vector<float> Rounded(std::vector<float> values, float factor) {
  for (float& value : values) {
    value = E4m3Value(E4m3Of(static_cast<double>(factor) * value));
  }
  return values;
}

TEST(EncoderQualityFullTest, Npk) {
  ExpectAgrees(Measure(NpkAlphabet(), 2, 1.00, kFullTiles), {.0685, .0007},
               "NPK-1 K2");
  ExpectAgrees(Measure(NpkAlphabet(), 3, .93, kFullTiles), {.01745, .0002},
               "NPK-1 K3");
  ExpectAgrees(Measure(NpkAlphabet(), 4, .88, kFullTiles), {.00458, .00005},
               "NPK-1 K4");
  ExpectAgrees(Measure(NpkAlphabet(), 5, .88, kFullTiles), {.001335, .00002},
               "NPK-1 K5");
}

TEST(EncoderQualityFullTest, OtherAlphabets) {
  ExpectColumn(CodebookAlphabet(Codebook::kMcg),
               {{1.0, .0684}, {.93, .0176}, {.88, .00455}, {.82, .00119}},
               kFullTiles, "MCG");
  ExpectColumn(GaussianTable(),
               {{1.0, .0687}, {.93, .0176}, {.88, .00448}, {.85, .00117}},
               kFullTiles, "Gaussian table");
  ExpectColumn(Rounded(GaussianTable(), 1),
               {{1.0, .0689}, {.93, .0177}, {.88, .00452}, {.85, .00134}},
               kFullTiles, "Gaussian table in E4M3");
  ExpectColumn(Rounded(CodebookAlphabet(Codebook::kMul1), 2.5f),
               {{1.0, .0688}, {.93, .0176}, {.88, .00456}, {.85, .00132}},
               kFullTiles, "byte sums in E4M3");
}

// A rank map in front of a staircase of E4M3 numbers, at each rate its own.
TEST(EncoderQualityFullTest, StructuredTable) {
  const std::pair<double, double> ratio_and_mse[] = {
      {1.0, .0671}, {.93, .0170}, {.88, .00436}, {.85, .00127}};
  int bits = 2;
  for (const auto& [ratio, mse] : ratio_and_mse) {
    std::vector<float> alphabet(kTileStates);
    for (uint32_t s = 0; s < kTileStates; ++s) {
      alphabet[s] = E4m3Value(SqgE4m3Bytes()[SqgRank(s, bits) >> 4]);
    }
    ExpectAgrees(Measure(alphabet, bits, ratio, kFullTiles), {mse, .015 * mse},
                 absl::StrCat("structured table K", bits));
    ++bits;
  }
}

// The ratio of input to alphabet matters more than the law.
TEST(EncoderQualityFullTest, RatiosAwayFromTheBestAreAsBadAsStated) {
  const std::vector<float> alphabet = NpkAlphabet();
  for (const auto& [ratio, mse] :
       {std::pair{.62, .0061}, {.70, .0053}, {1.06, .0053}, {1.24, .0080}}) {
    EXPECT_NEAR(Measure(alphabet, 4, ratio, kFullTiles).mse, mse, .06 * mse)
        << ratio;
  }
}

}  // namespace
}  // namespace kiln
