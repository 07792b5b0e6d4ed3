#include "templates/fused_moe/template_cpu.h"

#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
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
using ::testing::HasSubstr;
using testing::SliceBytes;
using testing::StatusIs;
using testing::StepNamed;

Problem ProblemFor(int64_t hidden, int64_t inter, uint32_t capacity,
                   int level = 3, int threads = 4) {
  Problem problem;
  problem.geometry.hidden = hidden;
  problem.geometry.intermediate = inter;
  problem.geometry.experts = 16;
  problem.geometry.top_k = 4;
  problem.geometry.weights.bits = {.gate = 4, .up = 4, .down = 4};
  problem.interval = {1, capacity};
  problem.device = AssumedProfile({.backend = Backend::kCpu, .level = level});
  problem.device.multiprocessors = threads;
  return problem;
}

std::vector<Assignment> AllOf(const Problem& problem) {
  return FusedMoeCpuTemplate()->Enumerate(problem, 100000).points;
}

TEST(FusedMoeCpuTemplateTest, IsRegistered) {
  EXPECT_EQ(FindTemplate("fused_moe.cpu"), FusedMoeCpuTemplate());
  EXPECT_THAT(TemplatesFor(RequestGeometry(), Backend::kCpu),
              ElementsAre(FusedMoeCpuTemplate()));
}

TEST(FusedMoeCpuTemplateTest, ServesCpuTargetsOnly) {
  const Problem problem = ProblemFor(256, 128, 8);
  EXPECT_OK(
      FusedMoeCpuTemplate()->Supports(problem.geometry, problem.device.target));
  EXPECT_THAT(FusedMoeCpuTemplate()->Supports(
                  problem.geometry, {.backend = Backend::kCuda, .level = 90}),
              StatusIs(absl::StatusCode::kUnimplemented));
}

TEST(FusedMoeCpuTemplateTest, StepsCoverEveryRowChannelAndRoute) {
  for (const auto& [hidden, inter] :
       {std::pair{128, 128}, {640, 384}, {2048, 768}, {4096, 14336}}) {
    const Problem problem = ProblemFor(hidden, inter, 33);
    for (const Assignment& assignment : AllOf(problem)) {
      ASSERT_OK_AND_ASSIGN(const PlanBody body, FusedMoeCpuTemplate()->MakeBody(
                                                    problem, assignment));
      SCOPED_TRACE(absl::StrCat(hidden, "x", inter, " ", body.Label()));
      const auto strip = static_cast<uint64_t>(assignment.at("channels_tile"));
      const auto tile = static_cast<uint32_t>(assignment.at("tokens_tile"));
      for (uint32_t m = 1; m <= 33; ++m) {
        const uint64_t tiles = FusedMoeTilesMax(problem.geometry, tile, m);
        const auto grid = [&](const char* label, size_t dim) {
          return StepNamed(body, label).grid[dim].Evaluate(m);
        };
        ASSERT_EQ(grid("route", 0) * grid("route", 1) * grid("route", 2), 1u);
        for (const char* label : {"rotate", "fc1", "activate", "fc2"}) {
          ASSERT_GE(grid(label, 0), tiles) << label << " m " << m;
          // A block index past the bound would read tile tables out of range.
          ASSERT_LE(grid(label, 0) * 4, SliceBytes(body, "tile_expert"))
              << label << " m " << m;
        }
        ASSERT_GE(grid("rotate", 1) * 512, static_cast<uint64_t>(hidden));
        ASSERT_GE(grid("fc1", 1) * strip, static_cast<uint64_t>(inter));
        ASSERT_EQ(grid("fc1", 2), 2u);
        ASSERT_GE(grid("activate", 1) * 512, static_cast<uint64_t>(inter));
        ASSERT_GE(grid("fc2", 1) * strip, static_cast<uint64_t>(hidden));
        // No block may start past the last channel: `n_size - column` is
        // unsigned in the kernel.
        ASSERT_LT((grid("fc1", 1) - 1) * strip, static_cast<uint64_t>(inter));
        ASSERT_LT((grid("fc2", 1) - 1) * strip, static_cast<uint64_t>(hidden));
        ASSERT_EQ(grid("combine", 0), m);
      }
    }
  }
}

// The kernel computes the bound of tiles itself, from live m.
TEST(FusedMoeCpuTemplateTest, TheGridMatchesTheKernelsOwnBound) {
  const Problem problem = ProblemFor(256, 128, 64);
  for (const Assignment& assignment : AllOf(problem)) {
    ASSERT_OK_AND_ASSIGN(const PlanBody body,
                         FusedMoeCpuTemplate()->MakeBody(problem, assignment));
    const auto rows = static_cast<uint64_t>(assignment.at("tokens_tile"));
    for (uint64_t m = 1; m <= 64; ++m) {
      // TileBound in cpu.cc.
      const uint64_t routes = m * 4;
      const uint64_t bound =
          std::min(routes, (routes + 16 * (rows - 1)) / rows);
      // Every tile that the grid visits must have an entry that the route step
      // wrote: the grid may round up by one, and then the table may not end.
      const uint64_t grid =
          StepNamed(body, "fc1").grid[0].Evaluate(static_cast<uint32_t>(m));
      EXPECT_EQ(grid, bound) << body.Label() << " m " << m
                             << ": blocks beyond the bound read a table entry "
                                "that nothing wrote";
    }
  }
}

TEST(FusedMoeCpuTemplateTest, SlicesHoldWhatTheHeadOfTheSourceLists) {
  const Problem problem = ProblemFor(256, 128, 9);
  for (const Assignment& assignment : AllOf(problem)) {
    ASSERT_OK_AND_ASSIGN(const PlanBody body,
                         FusedMoeCpuTemplate()->MakeBody(problem, assignment));
    const auto t = static_cast<uint64_t>(assignment.at("tokens_tile"));
    const uint64_t n =
        FusedMoeTilesMax(problem.geometry, static_cast<uint32_t>(t), 9);
    EXPECT_EQ(SliceBytes(body, "tile_expert"), 4 * n);
    EXPECT_EQ(SliceBytes(body, "tile_routes"), 4 * n * t);
    EXPECT_EQ(SliceBytes(body, "route_slot"), 4u * 9 * 4);
    EXPECT_EQ(SliceBytes(body, "gate_in"), 2 * n * t * 256);
    EXPECT_EQ(SliceBytes(body, "up_in"), 2 * n * t * 256);
    EXPECT_EQ(SliceBytes(body, "gate_out"), 2 * n * t * 128);
    EXPECT_EQ(SliceBytes(body, "up_out"), 2 * n * t * 128);
    EXPECT_EQ(SliceBytes(body, "down_in"), 2 * n * t * 128);
    EXPECT_EQ(SliceBytes(body, "down_out"), 2 * n * t * 256);
  }
}

TEST(FusedMoeCpuTemplateTest, EveryStepIsAnEntryOfTheOneProgram) {
  const Problem problem = ProblemFor(256, 128, 9);
  const Assignment assignment = AllOf(problem).front();
  ASSERT_OK_AND_ASSIGN(const Candidate candidate,
                       FusedMoeCpuTemplate()->Instantiate(problem, assignment));
  ASSERT_EQ(candidate.units.size(), 1u);
  const SourceUnit& unit = candidate.units[0];
  EXPECT_TRUE(std::is_sorted(unit.entries.begin(), unit.entries.end()));
  std::set<std::string> used;
  for (const Step& step : candidate.body.steps) {
    EXPECT_EQ(step.program, 0u);
    used.insert(step.entry);
  }
  EXPECT_EQ(used,
            std::set<std::string>(unit.entries.begin(), unit.entries.end()));
  EXPECT_EQ(unit.headers, CpuHeaders());
  EXPECT_TRUE(absl::EndsWith(unit.text, TemplateText("fused_moe/cpu.cc")));
}

TEST(FusedMoeCpuTemplateTest, AxesThatDoNotReachTheSourceShareItsProgram) {
  const Problem problem = ProblemFor(256, 128, 9);
  std::map<std::string, std::set<std::string>> by_text;
  for (const Assignment& assignment : AllOf(problem)) {
    Assignment source = assignment;
    source.erase("threads");
    const SourceUnit unit = FusedMoeCpuTemplate()->MakeUnits(
        problem.geometry, problem.device.target, assignment)[0];
    by_text[unit.text].insert(AssignmentText(source));
  }
  for (const auto& [text, sources] : by_text) {
    EXPECT_EQ(sources.size(), 1u) << "an axis is missing from the prelude";
  }
}

TEST(FusedMoeCpuTemplateTest, WideUnitsRuleOutNarrowTiles) {
  const Problem problem = ProblemFor(256, 128, 9, /*level=*/4);
  for (const Assignment& assignment : AllOf(problem)) {
    EXPECT_EQ(assignment.at("channels_tile") % (32 * assignment.at("unroll")),
              0);
  }
  Assignment bad = AllOf(problem).front();
  bad["channels_tile"] = 32;
  bad["unroll"] = 2;
  EXPECT_THAT(FusedMoeCpuTemplate()->MakeBody(problem, bad),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("channels_tile 32")));
}

TEST(FusedMoeCpuTemplateTest, RefusesUnknownAxesAndValues) {
  const Problem problem = ProblemFor(256, 128, 9);
  Assignment bad = AllOf(problem).front();
  bad["tokens_tile"] = 3;
  EXPECT_THAT(FusedMoeCpuTemplate()->MakeBody(problem, bad),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("tokens_tile is 3")));
  bad = AllOf(problem).front();
  bad["colour"] = 1;
  EXPECT_THAT(FusedMoeCpuTemplate()->MakeBody(problem, bad),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(FusedMoeCpuTemplateTest, UsesNoMoreThreadsThanTheMachineHas) {
  for (const int threads : {1, 2, 3, 64}) {
    std::set<int64_t> seen;
    for (const Assignment& assignment :
         AllOf(ProblemFor(256, 128, 9, 3, threads))) {
      seen.insert(assignment.at("threads"));
    }
    EXPECT_TRUE(seen.contains(threads));
    EXPECT_GE(*seen.begin(), 1);
    EXPECT_LE(*seen.rbegin(), threads);
  }
}

}  // namespace
}  // namespace kiln
