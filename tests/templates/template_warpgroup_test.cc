#include "templates/fused_moe/template_warpgroup.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/template_cuda.h"
#include "templates/registry.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/plan_parts.h"

namespace kiln {
namespace {

using ::testing::ElementsAre;
using testing::ExpectProgramsOfSteps;
using ::testing::HasSubstr;
using testing::StatusIs;

Problem ProblemFor(uint32_t capacity, int bits = 4) {
  Problem problem;
  problem.geometry.hidden = 2048;
  problem.geometry.intermediate = 768;
  problem.geometry.experts = 128;
  problem.geometry.top_k = 8;
  problem.geometry.weights.codebook = Codebook::kMcg;
  problem.geometry.weights.bits = {.gate = bits, .up = bits, .down = bits};
  problem.interval = {capacity / 2 + 1, capacity};
  problem.device = AssumedProfile(
      {.backend = Backend::kCuda, .level = 90, .arch_specific = true});
  return problem;
}

std::vector<Assignment> AllOf(const Problem& problem) {
  return FusedMoeWarpgroupTemplate()->Enumerate(problem, 100000).points;
}

TEST(FusedMoeWarpgroupTemplateTest, ServesHopperAlone) {
  const RequestGeometry geometry = ProblemFor(1024).geometry;
  const KernelTemplate* warpgroup = FusedMoeWarpgroupTemplate();
  EXPECT_EQ(FindTemplate("fused_moe.warpgroup"), warpgroup);
  EXPECT_OK(warpgroup->Supports(
      geometry,
      {.backend = Backend::kCuda, .level = 90, .arch_specific = true}));
  for (const int level : {80, 89, 100, 120}) {
    EXPECT_THAT(
        warpgroup->Supports(geometry, {.backend = Backend::kCuda,
                                       .level = level,
                                       .arch_specific = level >= 100}),
        StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("sm_90a")));
  }
}

TEST(FusedMoeWarpgroupTemplateTest, NeedsRowsForItsMmas) {
  EXPECT_FALSE(AllOf(ProblemFor(128)).empty());
  const ParamSpace space =
      FusedMoeWarpgroupTemplate()->Enumerate(ProblemFor(127), 16);
  EXPECT_TRUE(space.points.empty());
  ASSERT_EQ(space.rejects.size(), 1u);
  EXPECT_THAT(space.rejects[0].reason,
              HasSubstr("fewer than 8 routes per expert"));
}

// The order in which the device's timings put the tiles, README.md, "Measured".
TEST(FusedMoeWarpgroupTemplateTest, TheFirstPointHasTheMeasuredTile) {
  const auto first = [](uint32_t capacity) {
    return AllOf(ProblemFor(capacity)).front().at("tokens_tile");
  };
  EXPECT_EQ(AllOf(ProblemFor(512)).front().at("ctas"), 2);
  EXPECT_EQ(first(512), 64);
  EXPECT_EQ(first(1024), 96);
  EXPECT_EQ(first(2048), 160);
  EXPECT_EQ(first(3600), 256);
  EXPECT_EQ(first(4096), 288);
}

TEST(FusedMoeWarpgroupTemplateTest, BlocksFitTheMultiprocessor) {
  for (const int bits : {1, 4, 8}) {
    const Problem problem = ProblemFor(4096, bits);
    const std::vector<Assignment> points = AllOf(problem);
    ASSERT_FALSE(points.empty());
    for (const Assignment& point : points) {
      ASSERT_OK_AND_ASSIGN(
          const PlanBody body,
          FusedMoeWarpgroupTemplate()->MakeBody(problem, point));
      SCOPED_TRACE(body.Label());
      for (const Step& step : body.steps) {
        EXPECT_LE(step.dynamic_shared_bytes, problem.device.shared_bytes_max);
        if (step.entry != "kiln_moe_fc1" && step.entry != "kiln_moe_fc2") {
          continue;
        }
        // All blocks are resident at once, or a block would wait for another
        // that has not begun.
        const int64_t ctas = point.at("ctas");
        EXPECT_EQ(step.grid[0].Evaluate(problem.interval.m_min),
                  static_cast<uint64_t>(problem.device.multiprocessors * ctas));
        EXPECT_LE(ctas * (int64_t{step.dynamic_shared_bytes} + 1024),
                  problem.device.shared_bytes_per_sm);
        EXPECT_EQ(step.block[0], 384u);
      }
    }
  }
}

TEST(FusedMoeWarpgroupTemplateTest, AllPointsGiveTheSameBits) {
  const Problem problem = ProblemFor(1024);
  std::set<std::string> classes;
  for (const Assignment& point : AllOf(problem)) {
    ASSERT_OK_AND_ASSIGN(const PlanBody body,
                         FusedMoeWarpgroupTemplate()->MakeBody(problem, point));
    EXPECT_TRUE(body.deterministic);
    classes.insert(body.numerics_class);
  }
  EXPECT_EQ(classes, (std::set<std::string>{"w4a16.f16.wgmma"}));
}

// Its operands lie in another order than those of cuda.cu, so the support
// kernels are a program of their own; steps, arguments and arena are the same.
TEST(FusedMoeWarpgroupTemplateTest, SharesTheStepsOfTheTileTemplate) {
  const Problem problem = ProblemFor(1024);
  ASSERT_OK_AND_ASSIGN(
      const Candidate warpgroup,
      FusedMoeWarpgroupTemplate()->Instantiate(problem, {{"tokens_tile", 64},
                                                         {"ctas", 1},
                                                         {"atomic_sum", 0},
                                                         {"decoded", 0}}));
  ASSERT_OK_AND_ASSIGN(
      const Candidate tile,
      FusedMoeCudaTemplate()->Instantiate(problem, {{"tokens_tile", 64},
                                                    {"channels_tile", 128},
                                                    {"k_tile", 64},
                                                    {"warps", 4},
                                                    {"stages", 3},
                                                    {"split_fc1", 1},
                                                    {"split_fc2", 1},
                                                    {"sum", 0}}));
  ASSERT_EQ(warpgroup.units.size(), 2u);
  EXPECT_NE(warpgroup.units[0].text, tile.units[0].text);
  EXPECT_THAT(warpgroup.units[0].text, HasSubstr("KILN_OPERAND_ORDER 1"));
  EXPECT_EQ(warpgroup.body.arena.bytes, tile.body.arena.bytes);
  ASSERT_EQ(warpgroup.body.steps.size(), tile.body.steps.size());
  for (size_t i = 0; i < tile.body.steps.size(); ++i) {
    const std::vector<Arg>& args = warpgroup.body.steps[i].args;
    const std::vector<Arg>& same = tile.body.steps[i].args;
    ASSERT_EQ(args.size(), same.size());
    for (size_t a = 0; a < args.size(); ++a) {
      EXPECT_EQ(args[a].kind, same[a].kind);
      EXPECT_EQ(args[a].value, same[a].value);
    }
  }
}

TEST(FusedMoeWarpgroupTemplateTest, RefusesTilesThatLeaveNoRegisters) {
  EXPECT_THAT(FusedMoeWarpgroupTemplate()->MakeBody(ProblemFor(1024),
                                                    {{"tokens_tile", 128},
                                                     {"ctas", 2},
                                                     {"atomic_sum", 0},
                                                     {"decoded", 0}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("leaves no registers for a second block")));
}

// Feature rows F2.19 and F2.20: who may have sums without an order, what they
// are called and what they save.
TEST(FusedMoeWarpgroupTemplateTest, AtomicSumsAreForThoseWhoAllowThem) {
  const Assignment point = {
      {"tokens_tile", 256}, {"ctas", 1}, {"atomic_sum", 1}, {"decoded", 0}};
  Problem problem = ProblemFor(4096);
  problem.geometry.weights.shared_scales = true;
  const KernelTemplate* const warpgroup = FusedMoeWarpgroupTemplate();
  EXPECT_THAT(warpgroup->MakeBody(problem, point),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the request is deterministic")));
  for (const Assignment& other : AllOf(problem)) {
    EXPECT_EQ(other.at("atomic_sum"), 0);
  }

  problem.geometry.deterministic = false;
  problem.geometry.weights.shared_scales = false;
  EXPECT_THAT(warpgroup->MakeBody(problem, point),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("needs one table of scales")));

  problem.geometry.weights.shared_scales = true;
  ASSERT_OK_AND_ASSIGN(const PlanBody atomic,
                       warpgroup->MakeBody(problem, point));
  EXPECT_FALSE(atomic.deterministic);
  EXPECT_EQ(atomic.numerics_class, "w4a16.f16.wgmma.atomic_sum");
  Assignment ordered_point = point;
  ordered_point["atomic_sum"] = 0;
  ASSERT_OK_AND_ASSIGN(const PlanBody ordered,
                       warpgroup->MakeBody(problem, ordered_point));
  EXPECT_TRUE(ordered.deterministic);
  // No row of H numbers of 2 bytes for each of 8 routes of a token.
  EXPECT_EQ(ordered.arena.bytes - atomic.arena.bytes,
            uint64_t{4096} * 8 * 2048 * 2);
  // Intervals for few tokens have no such candidates, whatever is allowed.
  problem.interval = {1, 64};
  EXPECT_TRUE(AllOf(problem).empty());
}

TEST(FusedMoeWarpgroupTemplateTest, StepsNameEntriesOfTheirProgram) {
  for (const int atomic_sum : {0, 1}) {
    for (const uint32_t capacity : {1024u, 4096u}) {
      Problem problem = ProblemFor(capacity);
      problem.geometry.weights.shared_scales = atomic_sum != 0;
      problem.geometry.deterministic = false;
      ASSERT_OK_AND_ASSIGN(const Candidate candidate,
                           FusedMoeWarpgroupTemplate()->Instantiate(
                               problem, {{"tokens_tile", 64},
                                         {"ctas", 1},
                                         {"atomic_sum", atomic_sum},
                                         {"decoded", 0}}));
      // One program serves few routes and many.
      ExpectProgramsOfSteps(candidate, {"kiln_moe_count"});
    }
  }
}

// For very many rows an expert's weights are decoded once for all its tiles.
TEST(FusedMoeWarpgroupTemplateTest, WeightsAreDecodedAheadForManyRows) {
  const auto decoded = [](const Assignment& point) {
    return point.at("decoded") != 0;
  };
  const auto any = [&](uint32_t capacity) {
    const std::vector<Assignment> points = AllOf(ProblemFor(capacity));
    return std::any_of(points.begin(), points.end(), decoded);
  };
  EXPECT_FALSE(any(16383));
  EXPECT_TRUE(any(16384));
  const Problem problem = ProblemFor(16384);
  const Assignment ahead = {
      {"tokens_tile", 256}, {"ctas", 1}, {"atomic_sum", 0}, {"decoded", 1}};
  ASSERT_OK_AND_ASSIGN(
      const Candidate candidate,
      FusedMoeWarpgroupTemplate()->Instantiate(problem, ahead));
  ExpectProgramsOfSteps(candidate);
  EXPECT_EQ(candidate.body.numerics_class, "w4a16.f16.wgmma");
  EXPECT_EQ(candidate.body.steps.front().label, "decode");
  Assignment beside = ahead;
  beside["decoded"] = 0;
  ASSERT_OK_AND_ASSIGN(const PlanBody packed,
                       FusedMoeWarpgroupTemplate()->MakeBody(problem, beside));
  EXPECT_EQ(candidate.body.arena.bytes - packed.arena.bytes,
            uint64_t{3} * 128 * 2048 * 768 * 2);
}

// What routing costs is in proportion to the routes where there are many.
TEST(FusedMoeWarpgroupTemplateTest, ManyRoutesAreSortedInTwoLaunches) {
  const auto labels = [](uint32_t capacity) {
    const Problem problem = ProblemFor(capacity);
    std::vector<std::string> names;
    const auto body =
        FusedMoeWarpgroupTemplate()->MakeBody(problem, AllOf(problem).front());
    for (const Step& step : body.value().steps) names.push_back(step.label);
    return names;
  };
  EXPECT_THAT(labels(1024), ElementsAre("route", "rotate", "fc1", "activate",
                                        "fc2", "combine"));
  EXPECT_THAT(labels(1025), ElementsAre("count", "route", "rotate", "fc1",
                                        "activate", "fc2", "combine"));
}

}  // namespace
}  // namespace kiln
