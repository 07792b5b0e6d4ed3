#include "templates/fused_moe/template_stream.h"

#include <algorithm>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/fused_moe/op.h"
#include "templates/registry.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::testing::HasSubstr;
using testing::StatusIs;

Problem ProblemFor(int64_t hidden, int64_t inter, uint32_t capacity,
                   Codebook codebook = Codebook::kMcg, int level = 90) {
  Problem problem;
  problem.geometry.hidden = hidden;
  problem.geometry.intermediate = inter;
  problem.geometry.experts = 16;
  problem.geometry.top_k = 4;
  problem.geometry.weights.codebook = codebook;
  problem.geometry.weights.bits = {.gate = 3, .up = 5, .down = 4};
  problem.interval = {1, capacity};
  problem.device = AssumedProfile({.backend = Backend::kCuda,
                                   .level = level,
                                   .arch_specific = level >= 90});
  return problem;
}

std::vector<Assignment> AllOf(const Problem& problem) {
  return FusedMoeStreamTemplate()->Enumerate(problem, 100000).points;
}

TEST(FusedMoeStreamTemplateTest, IsRegisteredBehindTheTileTemplate) {
  EXPECT_EQ(FindTemplate("fused_moe.stream"), FusedMoeStreamTemplate());
  const auto templates = TemplatesFor(RequestGeometry(), Backend::kCuda);
  ASSERT_EQ(templates.size(), 3u);
  EXPECT_EQ(templates[1], FusedMoeStreamTemplate());
}

TEST(FusedMoeStreamTemplateTest, ServesSixtyFourTokensAndNoMore) {
  EXPECT_FALSE(AllOf(ProblemFor(512, 256, 64)).empty());
  const ParamSpace space =
      FusedMoeStreamTemplate()->Enumerate(ProblemFor(512, 256, 65), 16);
  EXPECT_TRUE(space.points.empty());
  ASSERT_EQ(space.rejects.size(), 1u);
  EXPECT_THAT(space.rejects[0].reason, HasSubstr("at most 64 tokens"));
}

TEST(FusedMoeStreamTemplateTest, ModesBelongToTheirCodebooks) {
  const auto modes = [](Codebook codebook) {
    std::set<int64_t> found;
    for (const Assignment& point : AllOf(ProblemFor(512, 256, 4, codebook))) {
      found.insert(point.at("sum"));
    }
    return found;
  };
  EXPECT_EQ(modes(Codebook::k3Inst), (std::set<int64_t>{0, 1}));
  EXPECT_EQ(modes(Codebook::kMcg), (std::set<int64_t>{0, 1}));
  EXPECT_EQ(modes(Codebook::kMul1), (std::set<int64_t>{0, 2, 3}));
}

// A short list must not leave out the mode that rounds as the codebook says.
TEST(FusedMoeStreamTemplateTest, EveryModeIsAmongTheFirst) {
  const ParamSpace space = FusedMoeStreamTemplate()->Enumerate(
      ProblemFor(2048, 768, 8, Codebook::kMul1), 3);
  ASSERT_EQ(space.points.size(), 3u);
  std::set<int64_t> modes;
  for (const Assignment& point : space.points) modes.insert(point.at("sum"));
  EXPECT_EQ(modes.size(), 3u);
}

TEST(FusedMoeStreamTemplateTest, StepsCoverEveryChannelAndAllSharesOfK) {
  for (const auto& [hidden, inter] :
       {std::pair{256, 256}, {640, 384}, {2048, 768}, {7168, 256}}) {
    const Problem problem = ProblemFor(hidden, inter, 16);
    const std::vector<Assignment> points = AllOf(problem);
    ASSERT_FALSE(points.empty());
    for (const Assignment& point : points) {
      ASSERT_OK_AND_ASSIGN(const PlanBody body,
                           FusedMoeStreamTemplate()->MakeBody(problem, point));
      SCOPED_TRACE(absl::StrCat(hidden, "x", inter, " ", body.Label()));
      ASSERT_EQ(body.steps.size(), 3u);
      // Blocks of 256 channels, each as often as K is split.
      const auto blocks = [&point](int64_t channels, const char* product) {
        return static_cast<uint64_t>(
            (channels + 255) / 256 /
            point.at(absl::StrCat("columns_", product)) *
            point.at(absl::StrCat("split_", product)));
      };
      for (const uint32_t m : {1u, 2u, 15u, 16u}) {
        ASSERT_EQ(body.steps[0].grid[0].Evaluate(m), 2 * blocks(inter, "fc1"));
        ASSERT_EQ(body.steps[1].grid[0].Evaluate(m), blocks(hidden, "fc2"));
        for (size_t i = 0; i < 2; ++i) {
          // A block looks for further runs: one row of blocks would do.
          ASSERT_GE(body.steps[i].grid[1].Evaluate(m), 1u);
          ASSERT_LE(body.steps[i].grid[1].Evaluate(m), uint64_t{m} * 4);
        }
        ASSERT_EQ(body.steps[2].grid[0].Evaluate(m),
                  uint64_t{m} * static_cast<uint64_t>(hidden) / 128);
      }
      EXPECT_LE(body.steps[0].dynamic_shared_bytes,
                problem.device.shared_bytes_max);
    }
  }
}

// Candidates of one class agree bit for bit: the class names the mode and how K
// is split, and nothing else.
TEST(FusedMoeStreamTemplateTest, TheNumericsClassIsModeAndSplit) {
  const Problem problem = ProblemFor(2048, 768, 9);
  std::set<std::pair<std::string, std::tuple<int64_t, int64_t, int64_t>>> pairs;
  std::set<std::string> classes;
  for (const Assignment& point : AllOf(problem)) {
    ASSERT_OK_AND_ASSIGN(const PlanBody body,
                         FusedMoeStreamTemplate()->MakeBody(problem, point));
    classes.insert(body.numerics_class);
    pairs.insert(
        {body.numerics_class,
         {point.at("sum"), point.at("split_fc1"), point.at("split_fc2")}});
  }
  EXPECT_EQ(classes.size(), pairs.size());
  EXPECT_TRUE(
      std::any_of(classes.begin(), classes.end(), [](const std::string& name) {
        return absl::StrContains(name, ".halves.");
      }));
}

TEST(FusedMoeStreamTemplateTest, SlicesHoldEveryRoute) {
  const Problem problem = ProblemFor(512, 256, 5);
  for (const Assignment& point : AllOf(problem)) {
    ASSERT_OK_AND_ASSIGN(const PlanBody body,
                         FusedMoeStreamTemplate()->MakeBody(problem, point));
    ASSERT_EQ(body.arena.slices.size(), 2u);
    EXPECT_EQ(body.arena.slices[0].bytes,
              8u * 256 * 5 * 4 * static_cast<uint64_t>(point.at("split_fc1")));
    EXPECT_EQ(body.arena.slices[1].bytes,
              4u * 512 * 5 * 4 * static_cast<uint64_t>(point.at("split_fc2")));
  }
}

TEST(FusedMoeStreamTemplateTest, ProgramsOfOneProductServeManyPoints) {
  const Problem problem = ProblemFor(2048, 768, 8);
  std::set<std::string> first, third;
  for (const Assignment& point : AllOf(problem)) {
    const std::vector<SourceUnit> units = FusedMoeStreamTemplate()->MakeUnits(
        problem.geometry, problem.device.target, point);
    ASSERT_EQ(units.size(), 3u);
    EXPECT_EQ(units[0].entries, std::vector<std::string>{"kiln_stream_fc1"});
    EXPECT_EQ(units[1].entries, std::vector<std::string>{"kiln_stream_fc2"});
    EXPECT_EQ(units[2].entries,
              std::vector<std::string>{"kiln_stream_combine"});
    first.insert(units[0].text);
    third.insert(units[2].text);
  }
  EXPECT_EQ(first.size(), 2u * 5 * 2 * 2);  // modes, splits, columns, ctas
  EXPECT_EQ(third.size(), 5u);              // splits of fc2
}

TEST(FusedMoeStreamTemplateTest, BrokenRulesAreNamed) {
  const Problem problem = ProblemFor(512, 256, 4);
  Assignment point = AllOf(problem).front();
  point["sum"] = 2;
  EXPECT_THAT(FusedMoeStreamTemplate()->MakeBody(problem, point),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("bytes2 is made for another codebook")));
  point["sum"] = 0;
  point["split_fc2"] = 4;
  EXPECT_THAT(FusedMoeStreamTemplate()->MakeBody(problem, point),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("more K slices than blocks")));
  point["split_fc2"] = 1;
  point["columns_fc1"] = 2;
  EXPECT_THAT(FusedMoeStreamTemplate()->MakeBody(problem, point),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("columns 2 do not divide")));
  EXPECT_THAT(FusedMoeStreamTemplate()->MakeBody(problem, {{"sum", 0}}),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace kiln
