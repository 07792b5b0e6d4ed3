#include "templates/fused_moe/op.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "compiler/spec/manifest.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kiln {
namespace {

using ::testing::HasSubstr;

RequestGeometry Geometry(int64_t experts, int64_t top_k) {
  RequestGeometry geometry;
  geometry.hidden = 256;
  geometry.intermediate = 384;
  geometry.experts = experts;
  geometry.top_k = top_k;
  geometry.weights.bits = {.gate = 2, .up = 3, .down = 5};
  return geometry;
}

// Tiles that a routing really makes: each expert's routes in tiles of `tile`.
uint64_t TilesOf(const std::vector<uint32_t>& counts, uint32_t tile) {
  uint64_t tiles = 0;
  for (const uint32_t count : counts) tiles += (count + tile - 1) / tile;
  return tiles;
}

TEST(FusedMoeTilesTest, IsAnUpperBoundForEveryRouting) {
  std::mt19937_64 random(5);
  for (const auto& [experts, top_k] :
       {std::pair{1, 1}, {4, 2}, {8, 8}, {64, 8}, {128, 8}, {257, 9}}) {
    const RequestGeometry geometry = Geometry(experts, top_k);
    for (const uint32_t tile : {1u, 2u, 8u, 16u, 128u}) {
      const LaunchDim dim = FusedMoeTiles(geometry, tile, 1);
      for (uint32_t m = 1; m <= 70; m += m < 20 ? 1 : 7) {
        const uint64_t bound = dim.Evaluate(m);
        const auto routes = static_cast<uint32_t>(m * top_k);
        ASSERT_LE(FusedMoeTilesMax(geometry, tile, m), bound);
        for (int round = 0; round < 20; ++round) {
          std::vector<uint32_t> counts(static_cast<size_t>(experts));
          // From all on one expert to uniform; duplicates within a token are
          // legal, and so are inactive routes.
          const uint64_t used = 1 + random() % counts.size();
          const uint32_t active =
              round % 3 == 0 ? routes
                             : static_cast<uint32_t>(random() % (routes + 1));
          for (uint32_t r = 0; r < active; ++r) ++counts[random() % used];
          ASSERT_LE(TilesOf(counts, tile), FusedMoeTilesMax(geometry, tile, m))
              << "E" << experts << " k" << top_k << " tile " << tile << " m "
              << m;
        }
      }
    }
  }
}

// The worst routing: every expert gets one row more than whole tiles.
TEST(FusedMoeTilesTest, IsReachedByTheWorstRouting) {
  const RequestGeometry geometry = Geometry(4, 2);
  // 4 experts with 9 rows each in tiles of 8: 8 tiles from 36 routes.
  EXPECT_EQ(TilesOf({9, 9, 9, 9}, 8), 8u);
  EXPECT_EQ(FusedMoeTilesMax(geometry, 8, 18), 8u);
  EXPECT_EQ(FusedMoeTiles(geometry, 8, 1).Evaluate(18), 8u);
  // One route per expert: as many tiles as routes.
  EXPECT_EQ(FusedMoeTilesMax(geometry, 8, 2), 4u);
  EXPECT_EQ(FusedMoeTiles(geometry, 8, 1).Evaluate(2), 4u);
}

TEST(FusedMoeTilesTest, BlocksMultiplyAndNothingIsLostToRounding) {
  std::mt19937_64 random(9);
  for (int round = 0; round < 2000; ++round) {
    const RequestGeometry geometry =
        Geometry(1 + static_cast<int64_t>(random() % 300),
                 1 + static_cast<int64_t>(random() % 32));
    const uint32_t tile = 1u << random() % 8;
    const auto blocks = static_cast<uint32_t>(1 + random() % 64);
    const auto m = static_cast<uint32_t>(1 + random() % 5000);
    ASSERT_GE(FusedMoeTiles(geometry, tile, blocks).Evaluate(m),
              FusedMoeTilesMax(geometry, tile, m) * blocks);
  }
}

TEST(FusedMoeTilesTest, FitsTheLaunchRuleAtTheLimitsOfAManifest) {
  RequestGeometry geometry = Geometry(kExpertsMax, kTopKMax);
  geometry.hidden = kHiddenMax;
  geometry.intermediate = kIntermediateMax;
  const auto blocks = static_cast<uint32_t>(2 * kIntermediateMax / 64);
  const LaunchDim dim = FusedMoeTiles(geometry, 128, blocks);
  EXPECT_EQ(dim.a.mul, uint64_t{kTopKMax} * blocks);
  // Rounding up after taking tile - 1 off is rounding down.
  EXPECT_EQ(dim.b.add, uint64_t{kExpertsMax} * 127 * blocks - 127)
      << "a constant of the launch rule overflowed";
}

TEST(FusedMoeTilesTest, TheExpectationLiesBelowTheBound) {
  for (const int64_t experts : {4, 64, 256}) {
    const RequestGeometry geometry = Geometry(experts, 4);
    for (const uint32_t tile : {1u, 8u, 64u}) {
      double before = 0;
      for (const uint32_t m : {1u, 4u, 64u, 1024u, 65536u}) {
        const double expected = FusedMoeTilesExpected(geometry, tile, m);
        EXPECT_TRUE(std::isfinite(expected));
        EXPECT_GE(expected, before * 0.999) << "more tokens, fewer tiles";
        EXPECT_LE(expected, 1.05 * static_cast<double>(
                                       FusedMoeTilesMax(geometry, tile, m)))
            << m;
        EXPECT_GE(expected, 0.99 * m * 4 / tile);
        before = expected;
      }
    }
  }
}

TEST(FusedMoeBytesTest, AreTheShapesTimesTheirElements) {
  RequestGeometry geometry = Geometry(6, 3);
  const std::vector<uint64_t> expected = {
      7 * 256 * 2,                               // x
      7 * 3 * 4,                                 // topk_ids
      7 * 3 * 4,                                 // topk_weights
      6 * (256 / 16) * (384 / 16) * 16 * 2 * 2,  // w_gate, K = 2
      6 * (256 / 16) * (384 / 16) * 16 * 3 * 2,  // w_up, K = 3
      6 * (384 / 16) * (256 / 16) * 16 * 5 * 2,  // w_down, K = 5
      6 * 256 * 2,                               // gate_suh
      6 * 256 * 2,                               // up_suh
      6 * 3 * 384 * 2,                           // rotations
      6 * 256 * 2,                               // down_svh
      7 * 256 * 4,                               // out
  };
  EXPECT_EQ(FusedMoeBytes(geometry, 7), expected);
  geometry.id_dtype = DType::kI64;
  geometry.weights.shared_scales = true;
  const std::vector<uint64_t> changed = FusedMoeBytes(geometry, 7);
  EXPECT_EQ(changed[1], 7u * 3 * 8);
  EXPECT_EQ(changed[6], 256u * 2);
  EXPECT_EQ(changed[8], 6u * 3 * 384 * 2) << "rotations are never shared";
  EXPECT_EQ(changed[9], 256u * 2);
}

TEST(FusedMoeBytesTest, DoNotOverflowAtTheLimitsOfAManifest) {
  RequestGeometry geometry = Geometry(kExpertsMax, kTopKMax);
  geometry.hidden = kHiddenMax;
  geometry.intermediate = kIntermediateMax;
  geometry.weights.bits = {.gate = 8, .up = 8, .down = 8};
  EXPECT_EQ(FusedMoeBytes(geometry, 1)[3],
            uint64_t{1024} * 65536 * 262144);  // one byte per weight
}

TEST(FusedMoeParamsTest, AreTheElevenSlotsInOrder) {
  RequestGeometry geometry = Geometry(6, 3);
  geometry.io_dtype = DType::kF16;
  geometry.id_dtype = DType::kI64;
  const std::vector<ParamDecl> params = FusedMoeParams(geometry);
  ASSERT_EQ(params.size(), kFusedMoeParamCount);
  std::vector<std::string> names;
  for (const ParamDecl& param : params) names.push_back(param.name);
  EXPECT_THAT(names,
              ::testing::ElementsAre("x", "topk_ids", "topk_weights", "w_gate",
                                     "w_up", "w_down", "gate_suh", "up_suh",
                                     "rotations", "down_svh", "out"));
  EXPECT_EQ(params[0].dtype, "f16");
  EXPECT_EQ(params[1].dtype, "i64");
  EXPECT_THAT(params[5].shape, HasSubstr("80"));  // 16 K, K = 5
  for (const ParamDecl& param : params) {
    EXPECT_EQ(param.output, param.name == "out") << param.name;
  }
  EXPECT_EQ(FusedMoeArg(FusedMoeParam::kOut), Arg::Param(10));
}

TEST(FusedMoePreludeTest, EveryFieldOfTheGeometryChangesIt) {
  const RequestGeometry base = Geometry(6, 3);
  std::set<std::string> texts = {FusedMoePrelude(base)};
  const auto expect_new = [&texts](const RequestGeometry& geometry,
                                   const char* what) {
    EXPECT_TRUE(texts.insert(FusedMoePrelude(geometry)).second) << what;
  };
  RequestGeometry g = base;
  g.hidden = 512;
  expect_new(g, "hidden");
  g = base;
  g.intermediate = 512;
  expect_new(g, "intermediate");
  g = base;
  g.experts = 7;
  expect_new(g, "experts");
  g = base;
  g.top_k = 4;
  expect_new(g, "top_k");
  for (const Codebook codebook : {Codebook::k3Inst, Codebook::kMul1}) {
    g = base;
    g.weights.codebook = codebook;
    expect_new(g, "codebook");
  }
  g = base;
  g.weights.bits.gate = 8;
  expect_new(g, "bits.gate");
  g = base;
  g.weights.bits.up = 8;
  expect_new(g, "bits.up");
  g = base;
  g.weights.bits.down = 8;
  expect_new(g, "bits.down");
  g = base;
  g.io_dtype = DType::kF16;
  expect_new(g, "io_dtype");
  g = base;
  g.id_dtype = DType::kI64;
  expect_new(g, "id_dtype");
  g = base;
  g.weights.shared_scales = true;
  expect_new(g, "shared_scales");
}

TEST(FusedMoePreludeTest, IsOneDefineOfAnIntegerPerLine) {
  const std::string prelude = FusedMoePrelude(Geometry(6, 3));
  std::vector<std::string> lines = absl::StrSplit(prelude, '\n');
  ASSERT_EQ(lines.back(), "");
  lines.pop_back();
  EXPECT_EQ(lines.size(), 11u);
  for (const std::string& line : lines) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    ASSERT_EQ(words.size(), 3u) << line;
    EXPECT_EQ(words[0], "#define");
    EXPECT_EQ(words[1].rfind("KILN_", 0), 0u) << line;
    EXPECT_TRUE(std::all_of(words[2].begin(), words[2].end(), [](char c) {
      return c >= '0' && c <= '9';
    })) << line;
  }
}

}  // namespace
}  // namespace kiln
