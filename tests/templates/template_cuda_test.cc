#include "templates/fused_moe/template_cuda.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/fused_moe/op.h"
#include "templates/registry.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/plan_parts.h"

namespace kiln {
namespace {

using ::testing::ElementsAre;
using testing::ExpectProgramsOfSteps;
using testing::FindStep;
using ::testing::HasSubstr;
using testing::SliceBytes;
using testing::StatusIs;

Problem ProblemFor(int64_t hidden, int64_t inter, uint32_t capacity,
                   bool shared = false) {
  Problem problem;
  problem.geometry.hidden = hidden;
  problem.geometry.intermediate = inter;
  problem.geometry.experts = 16;
  problem.geometry.top_k = 4;
  problem.geometry.weights.bits = {.gate = 3, .up = 5, .down = 4};
  problem.geometry.weights.shared_scales = shared;
  problem.interval = {1, capacity};
  problem.device = AssumedProfile(
      {.backend = Backend::kCuda, .level = 90, .arch_specific = true});
  return problem;
}

std::vector<Assignment> AllOf(const Problem& problem) {
  return FusedMoeCudaTemplate()->Enumerate(problem, 100000).points;
}

std::vector<std::string> Labels(const PlanBody& body) {
  std::vector<std::string> labels;
  for (const Step& step : body.steps) labels.push_back(step.label);
  return labels;
}

TEST(FusedMoeCudaTemplateTest, IsRegistered) {
  EXPECT_EQ(FindTemplate("fused_moe.cuda"), FusedMoeCudaTemplate());
  EXPECT_EQ(TemplatesFor(RequestGeometry(), Backend::kCuda).front(),
            FusedMoeCudaTemplate())
      << "its first point is the default of every race";
  EXPECT_EQ(FindTemplate("fused_moe.CUDA"), nullptr);
}

TEST(FusedMoeCudaTemplateTest, ServesSm80AndLater) {
  const RequestGeometry geometry = ProblemFor(256, 128, 8).geometry;
  for (const int level : {80, 86, 89, 90, 100, 120}) {
    EXPECT_OK(FusedMoeCudaTemplate()->Supports(
        geometry, {.backend = Backend::kCuda, .level = level}));
  }
  for (const Target target :
       {Target{Backend::kCuda, 75, false}, Target{Backend::kCpu, 4, false}}) {
    EXPECT_THAT(FusedMoeCudaTemplate()->Supports(geometry, target),
                StatusIs(absl::StatusCode::kUnimplemented,
                         HasSubstr(target.ToString())));
  }
}

TEST(FusedMoeCudaTemplateTest, StepsAreThoseOfTheScaleTables) {
  for (const bool shared : {false, true}) {
    const Problem problem = ProblemFor(512, 256, 16, shared);
    ASSERT_OK_AND_ASSIGN(
        const PlanBody body,
        FusedMoeCudaTemplate()->MakeBody(problem, AllOf(problem).front()));
    if (shared) {
      EXPECT_THAT(Labels(body),
                  ElementsAre("route", "fc1", "activate", "fc2", "combine"));
    } else {
      EXPECT_THAT(Labels(body), ElementsAre("route", "rotate", "fc1",
                                            "activate", "fc2", "combine"));
    }
  }
}

TEST(FusedMoeCudaTemplateTest, StepsCoverEveryRowChannelAndRoute) {
  for (const bool shared : {false, true}) {
    for (const auto& [hidden, inter] :
         {std::pair{128, 128}, {640, 384}, {2048, 768}}) {
      Problem problem = ProblemFor(hidden, inter, 70, shared);
      // Few enough for the bound of the blocks that rotate.
      problem.device.multiprocessors = 10;
      const std::vector<Assignment> points = AllOf(problem);
      ASSERT_FALSE(points.empty());
      for (size_t i = 0; i < points.size(); i += 7) {
        const Assignment& point = points[i];
        ASSERT_OK_AND_ASSIGN(const PlanBody body,
                             FusedMoeCudaTemplate()->MakeBody(problem, point));
        SCOPED_TRACE(absl::StrCat(hidden, "x", inter, " ", body.Label()));
        const auto tile = static_cast<uint32_t>(point.at("tokens_tile"));
        const auto channels = static_cast<uint64_t>(point.at("channels_tile"));
        const auto rotating_blocks_max =
            2 * static_cast<uint64_t>(problem.device.multiprocessors);
        for (const uint32_t m : {1u, 2u, 3u, 16u, 17u, 69u, 70u}) {
          const uint64_t tiles = FusedMoeTilesMax(problem.geometry, tile, m);
          const uint64_t rows = uint64_t{m} * 4;
          const auto grid = [&](const char* label, size_t dim) {
            const Step* step = FindStep(body, label);
            EXPECT_NE(step, nullptr) << label;
            return step->grid[dim].Evaluate(m);
          };
          // Warps of 128 channels, four per block.
          const auto warps = [&](const char* label) {
            return grid(label, 0) * 4;
          };
          ASSERT_GE(grid("fc1", 0) * channels,
                    tiles * 2 * static_cast<uint64_t>(inter));
          ASSERT_GE(grid("fc2", 0) * channels,
                    tiles * static_cast<uint64_t>(hidden));
          ASSERT_EQ(grid("fc1", 1),
                    static_cast<uint64_t>(point.at("split_fc1")));
          ASSERT_EQ(grid("fc2", 1),
                    static_cast<uint64_t>(point.at("split_fc2")));
          ASSERT_GE(warps("activate"),
                    rows * static_cast<uint64_t>(inter / 128));
          ASSERT_GE(warps("combine"), m * static_cast<uint64_t>(hidden / 128));
          if (!shared) {
            ASSERT_EQ(grid("route", 0), 1u);
            ASSERT_GE(warps("rotate"),
                      rows * static_cast<uint64_t>(hidden / 128));
          } else {
            // Beyond the block that sorts, 32 warps of a 128 block each, and
            // never more than two blocks for a multiprocessor.
            const uint64_t blocks =
                (m * static_cast<uint64_t>(hidden / 128) + 31) / 32;
            ASSERT_EQ(grid("route", 0) - 1,
                      std::min(blocks, rotating_blocks_max));
          }
        }
      }
    }
  }
}

TEST(FusedMoeCudaTemplateTest, SlicesHoldWhatTheReadmeLists) {
  for (const bool shared : {false, true}) {
    const Problem problem = ProblemFor(512, 256, 9, shared);
    for (const Assignment& point : AllOf(problem)) {
      ASSERT_OK_AND_ASSIGN(const PlanBody body,
                           FusedMoeCudaTemplate()->MakeBody(problem, point));
      SCOPED_TRACE(body.Label());
      const auto tile = static_cast<uint32_t>(point.at("tokens_tile"));
      const auto s1 = static_cast<uint64_t>(point.at("split_fc1"));
      const auto s2 = static_cast<uint64_t>(point.at("split_fc2"));
      const uint64_t rc = 9 * 4;
      ASSERT_EQ(SliceBytes(body, "tiles"),
                16 * FusedMoeTilesMax(problem.geometry, tile, 9));
      ASSERT_EQ(SliceBytes(body, "rows"), 8 * rc);
      ASSERT_EQ(SliceBytes(body, "positions"), 4 * rc);
      ASSERT_EQ(SliceBytes(body, "gate_operand"), 2u * 512 * (shared ? 9 : rc));
      ASSERT_EQ(SliceBytes(body, "up_operand"), 2u * 512 * (shared ? 9 : rc));
      ASSERT_EQ(SliceBytes(body, "fc1"),
                s1 == 1 ? 4 * 256 * rc : 8 * 256 * s1 * rc);
      ASSERT_EQ(SliceBytes(body, "activated"), 2u * 256 * rc);
      ASSERT_EQ(SliceBytes(body, "fc2"),
                s2 == 1 ? 2 * 512 * rc : 4 * 512 * s2 * rc);
    }
  }
}

TEST(FusedMoeCudaTemplateTest, TheNumericsClassIsTheOrderOfSums) {
  const Problem problem = ProblemFor(512, 256, 9);
  testing::ExpectClassesAreSplits(*FusedMoeCudaTemplate(), problem,
                                  AllOf(problem));
}

TEST(FusedMoeCudaTemplateTest, LegalPointsKeepTheRulesOfTheReadme) {
  for (const int level : {80, 89, 90, 100, 120}) {
    Problem problem = ProblemFor(2048, 768, 64);
    problem.device =
        AssumedProfile({.backend = Backend::kCuda, .level = level});
    const std::vector<Assignment> points = AllOf(problem);
    ASSERT_FALSE(points.empty()) << level;
    for (const Assignment& point : points) {
      const int64_t channels = point.at("channels_tile");
      const int64_t warps = point.at("warps");
      const int64_t tile = point.at("tokens_tile");
      ASSERT_EQ(768 % channels, 0);
      ASSERT_EQ(2048 % channels, 0);
      ASSERT_GE(channels, 16 * warps);
      ASSERT_LE(channels / 16 / warps * tile / 8 * 4, 128);
      ASSERT_LE(point.at("split_fc1"), 2048 / 128);
      ASSERT_LE(point.at("split_fc2"), 768 / 128);
      ASSERT_OK_AND_ASSIGN(const PlanBody body,
                           FusedMoeCudaTemplate()->MakeBody(problem, point));
      for (const auto& [label, bits] : {std::pair{"fc1", 5}, {"fc2", 4}}) {
        const Step* step = FindStep(body, label);
        ASSERT_NE(step, nullptr);
        const int64_t k_tile = point.at("k_tile");
        ASSERT_EQ(step->dynamic_shared_bytes,
                  point.at("stages") *
                      (k_tile * channels * bits / 8 + tile * (k_tile + 8) * 2));
        ASSERT_LE(step->dynamic_shared_bytes, problem.device.shared_bytes_max);
        ASSERT_EQ(step->block[0], static_cast<uint32_t>(32 * warps));
      }
    }
  }
}

TEST(FusedMoeCudaTemplateTest, StepsNameEntriesOfTheirProgram) {
  for (const bool shared : {false, true}) {
    const Problem problem = ProblemFor(512, 256, 9, shared);
    const Assignment point = AllOf(problem).front();
    ASSERT_OK_AND_ASSIGN(const Candidate candidate,
                         FusedMoeCudaTemplate()->Instantiate(problem, point));
    ExpectProgramsOfSteps(candidate, {"kiln_moe_count"});
  }
}

// Routing and the elementwise steps do not depend on the axes: all candidates
// of a request share that program.
TEST(FusedMoeCudaTemplateTest, CandidatesShareTheSupportProgram) {
  const Problem problem = ProblemFor(512, 256, 9);
  std::set<std::string> support;
  std::map<std::string, std::set<std::string>> products;
  for (const Assignment& point : AllOf(problem)) {
    const std::vector<SourceUnit> units = FusedMoeCudaTemplate()->MakeUnits(
        problem.geometry, problem.device.target, point);
    support.insert(units.front().text);
    Assignment source = point;
    source.erase("split_fc1");
    source.erase("split_fc2");
    std::string text;
    for (size_t i = 1; i < units.size(); ++i) text += units[i].text;
    products[text].insert(AssignmentText(source));
  }
  EXPECT_EQ(support.size(), 1u);
  for (const auto& [text, points] : products) {
    EXPECT_EQ(points.size(), 1u) << "an axis is missing from the prelude";
  }
}

// The affine map of MUL1 may follow the sum, where tiles have few rows. Which
// warp adds up the operand at a step depends on their number.
TEST(FusedMoeCudaTemplateTest, BiasedSumsAreForMul1AndFewRows) {
  Problem problem = ProblemFor(512, 256, 64);
  problem.geometry.weights.codebook = Codebook::kMul1;
  std::map<int64_t, std::set<int64_t>> rows;  // by sum
  for (const Assignment& point : AllOf(problem)) {
    const int64_t sum = point.at("sum");
    rows[sum].insert(point.at("tokens_tile"));
    ASSERT_OK_AND_ASSIGN(const PlanBody body,
                         FusedMoeCudaTemplate()->MakeBody(problem, point));
    const std::string splits = absl::StrCat(".fc1x", point.at("split_fc1"),
                                            ".fc2x", point.at("split_fc2"));
    ASSERT_EQ(body.numerics_class,
              sum == 0 ? absl::StrCat("w4a16.f16", splits)
                       : absl::StrCat("w4a16.biased.warps", point.at("warps"),
                                      splits));
  }
  EXPECT_THAT(rows[0], ElementsAre(8, 16, 32, 48, 64, 96, 128));
  EXPECT_THAT(rows[3], ElementsAre(8));

  Assignment bad = AllOf(problem).front();
  bad["sum"] = 3;
  bad["tokens_tile"] = 16;
  EXPECT_THAT(FusedMoeCudaTemplate()->MakeBody(problem, bad),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("made for tokens_tile 8, not for 16")));
  bad["tokens_tile"] = 8;
  problem.geometry.weights.codebook = Codebook::kMcg;
  EXPECT_THAT(FusedMoeCudaTemplate()->MakeBody(problem, bad),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("made for mul1, not for mcg")));
}

TEST(FusedMoeCudaTemplateTest, RefusesPointsThatBreakARule) {
  const Problem problem = ProblemFor(512, 384, 9);
  Assignment bad = AllOf(problem).front();
  bad["channels_tile"] = 256;  // does not divide 384
  EXPECT_THAT(FusedMoeCudaTemplate()->MakeBody(problem, bad),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("channels_tile 256 does not divide")));
  bad = AllOf(problem).front();
  bad["warps"] = 3;
  EXPECT_THAT(FusedMoeCudaTemplate()->MakeBody(problem, bad),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("warps is 3, must be one of")));
}

}  // namespace
}  // namespace kiln
