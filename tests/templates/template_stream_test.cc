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

TEST(FusedMoeStreamTemplateTest, ServesSixteenTokensAndNoMore) {
  EXPECT_FALSE(AllOf(ProblemFor(512, 256, 16)).empty());
  const ParamSpace space =
      FusedMoeStreamTemplate()->Enumerate(ProblemFor(512, 256, 17), 16);
  EXPECT_TRUE(space.points.empty());
  ASSERT_EQ(space.rejects.size(), 1u);
  EXPECT_THAT(space.rejects[0].reason, HasSubstr("at most 16 tokens"));
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

TEST(FusedMoeStreamTemplateTest, ClustersNeedSm90) {
  for (const int level : {80, 89}) {
    const Problem problem = ProblemFor(512, 256, 4, Codebook::kMcg, level);
    const std::vector<Assignment> points = AllOf(problem);
    ASSERT_FALSE(points.empty());
    for (const Assignment& point : points) {
      EXPECT_EQ(point.at("cluster_fc1"), 1);
      EXPECT_EQ(point.at("cluster_fc2"), 1);
    }
  }
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
      ASSERT_EQ(body.steps.size(), 2u);
      const auto cluster1 = static_cast<uint64_t>(point.at("cluster_fc1"));
      const auto cluster2 = static_cast<uint64_t>(point.at("cluster_fc2"));
      for (const uint32_t m : {1u, 2u, 15u, 16u}) {
        const Step& fc1 = body.steps[0];
        const Step& fc2 = body.steps[1];
        ASSERT_EQ(fc1.grid[0].Evaluate(m) * 128,
                  static_cast<uint64_t>(inter) * cluster1);
        ASSERT_EQ(fc2.grid[0].Evaluate(m) *
                      static_cast<uint64_t>(point.at("channels_fc2")),
                  static_cast<uint64_t>(hidden) * cluster2);
        for (const Step& step : body.steps) {
          // A block looks for further runs: one row of blocks would do.
          ASSERT_GE(step.grid[1].Evaluate(m), 1u);
          ASSERT_LE(step.grid[1].Evaluate(m), uint64_t{m} * 4);
        }
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
  std::set<std::pair<std::string,
                     std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>>>
      pairs;
  std::set<std::string> classes;
  for (const Assignment& point : AllOf(problem)) {
    ASSERT_OK_AND_ASSIGN(const PlanBody body,
                         FusedMoeStreamTemplate()->MakeBody(problem, point));
    classes.insert(body.numerics_class);
    pairs.insert({body.numerics_class,
                  {point.at("sum"), point.at("cluster_fc1"),
                   point.at("warps_fc1") / 8, point.at("cluster_fc2"),
                   point.at("warps_fc2") * 32 / point.at("channels_fc2")}});
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
    ASSERT_EQ(body.arena.slices.size(), 3u);
    EXPECT_EQ(body.arena.slices[0].bytes, 2u * 256 * 5 * 4);
    EXPECT_EQ(body.arena.slices[1].bytes, 4u * 512 * 5 * 4);
    EXPECT_EQ(body.arena.slices[2].bytes, 4u * 5 * (512 / 128));
  }
}

TEST(FusedMoeStreamTemplateTest, ProgramsOfOneProductServeManyPoints) {
  const Problem problem = ProblemFor(2048, 768, 8);
  std::set<std::string> first, second;
  const std::vector<Assignment> points = AllOf(problem);
  for (const Assignment& point : points) {
    const std::vector<SourceUnit> units = FusedMoeStreamTemplate()->MakeUnits(
        problem.geometry, problem.device.target, point);
    ASSERT_EQ(units.size(), 2u);
    EXPECT_EQ(units[0].entries, std::vector<std::string>{"kiln_stream_fc1"});
    EXPECT_EQ(units[1].entries, std::vector<std::string>{"kiln_stream_fc2"});
    first.insert(units[0].text);
    second.insert(units[1].text);
  }
  EXPECT_EQ(first.size(), 2u * 4 * 2);  // modes, clusters, warps
  EXPECT_LT(first.size() + second.size(), points.size());
}

TEST(FusedMoeStreamTemplateTest, BrokenRulesAreNamed) {
  const Problem problem = ProblemFor(512, 256, 4);
  Assignment point = AllOf(problem).front();
  point["sum"] = 2;
  EXPECT_THAT(FusedMoeStreamTemplate()->MakeBody(problem, point),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("bytes2 is made for another codebook")));
  point["sum"] = 0;
  point["cluster_fc2"] = 4;
  EXPECT_THAT(FusedMoeStreamTemplate()->MakeBody(problem, point),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("more K slices than blocks")));
  EXPECT_THAT(FusedMoeStreamTemplate()->MakeBody(problem, {{"sum", 0}}),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

}  // namespace
}  // namespace kiln
