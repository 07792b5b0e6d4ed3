#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/linear/op.h"
#include "templates/linear/template_cuda.h"
#include "templates/registry.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/plan_parts.h"

namespace kiln {
namespace {

using ::testing::ElementsAre;
using testing::ExpectProgramsOfSteps;
using ::testing::HasSubstr;
using testing::SliceBytes;
using testing::StatusIs;
using testing::StepNamed;

Problem ProblemFor(int64_t in, int64_t out, uint32_t capacity,
                   bool bias = false) {
  Problem problem;
  problem.geometry.op = Op::kLinear;
  problem.geometry.linear = {
      .in_features = in, .out_features = out, .bits = 5, .bias = bias};
  problem.interval = {1, capacity};
  problem.device = AssumedProfile(
      {.backend = Backend::kCuda, .level = 90, .arch_specific = true});
  return problem;
}

std::vector<Assignment> PointsOf(const Problem& problem) {
  return LinearCudaTemplate()->Enumerate(problem, 100000).points;
}

TEST(LinearCudaTemplateTest, ServesLinearOnSm80AndLater) {
  EXPECT_EQ(FindTemplate("linear.cuda"), LinearCudaTemplate());
  const RequestGeometry geometry = ProblemFor(256, 128, 8).geometry;
  for (const int level : {80, 86, 89, 90, 100, 120}) {
    EXPECT_OK(LinearCudaTemplate()->Supports(
        geometry, {.backend = Backend::kCuda, .level = level}));
  }
  for (const Target target :
       {Target{Backend::kCuda, 75, false}, Target{Backend::kCpu, 4, false}}) {
    EXPECT_THAT(LinearCudaTemplate()->Supports(geometry, target),
                StatusIs(absl::StatusCode::kUnimplemented,
                         HasSubstr(target.ToString())));
  }
  EXPECT_FALSE(LinearCudaTemplate()
                   ->Supports(RequestGeometry(),
                              {.backend = Backend::kCuda, .level = 90})
                   .ok())
      << "fused_moe";
}

TEST(LinearCudaTemplateTest, StepsCoverEveryRowAndChannel) {
  for (const auto& [in, out] :
       {std::pair{128, 128}, {640, 384}, {2048, 4096}}) {
    const Problem problem = ProblemFor(in, out, 70);
    const std::vector<Assignment> points = PointsOf(problem);
    ASSERT_FALSE(points.empty());
    for (size_t i = 0; i < points.size(); i += 5) {
      const Assignment& point = points[i];
      ASSERT_OK_AND_ASSIGN(const PlanBody body,
                           LinearCudaTemplate()->MakeBody(problem, point));
      SCOPED_TRACE(absl::StrCat(in, "x", out, " ", body.Label()));
      const auto tile = static_cast<uint64_t>(point.at("tokens_tile"));
      const auto channels = static_cast<uint64_t>(point.at("channels_tile"));
      for (const uint32_t m : {1u, 2u, 3u, 16u, 17u, 69u, 70u}) {
        const auto grid = [&](const char* label, size_t dim) {
          return StepNamed(body, label).grid[dim].Evaluate(m);
        };
        const uint64_t tiles = (m + tile - 1) / tile;
        // No block looks further than one tile behind the last, which lies in
        // the arena.
        const uint64_t blocks = static_cast<uint64_t>(out) / channels;
        ASSERT_GE(grid("product", 0), tiles * blocks);
        ASSERT_LE(grid("product", 0), (tiles + 1) * blocks);
        ASSERT_EQ(grid("product", 1), static_cast<uint64_t>(point.at("split")));
        // Warps of 128 channels, four per block.
        ASSERT_GE(grid("rotate", 0) * 4, m * static_cast<uint64_t>(in / 128));
        ASSERT_GE(grid("rotate", 0) * 128, tiles) << "a thread writes a tile";
        ASSERT_GE(grid("finish", 0) * 4, m * static_cast<uint64_t>(out / 128));
        ASSERT_LE(16 * tiles, SliceBytes(body, "tiles"));
      }
    }
  }
}

TEST(LinearCudaTemplateTest, SlicesHoldOperandAndPartialSumsOfTheCapacity) {
  const Problem problem = ProblemFor(512, 256, 9);
  for (const Assignment& point : PointsOf(problem)) {
    ASSERT_OK_AND_ASSIGN(const PlanBody body,
                         LinearCudaTemplate()->MakeBody(problem, point));
    SCOPED_TRACE(body.Label());
    ASSERT_EQ(SliceBytes(body, "totals"), 16u);
    ASSERT_EQ(SliceBytes(body, "operand"), 9u * 512 * 2);
    ASSERT_EQ(SliceBytes(body, "product"),
              9u * 256 * 4 * static_cast<uint64_t>(point.at("split")));
  }
}

TEST(LinearCudaTemplateTest, ABiasIsOneMoreArgumentOfTheLastStep) {
  for (const bool bias : {false, true}) {
    const Problem problem = ProblemFor(512, 256, 9, bias);
    ASSERT_OK_AND_ASSIGN(
        const Candidate candidate,
        LinearCudaTemplate()->Instantiate(problem, PointsOf(problem).front()));
    const std::vector<Arg>& args = StepNamed(candidate.body, "finish").args;
    ASSERT_EQ(args.size(), bias ? 6u : 5u);
    EXPECT_EQ(args[1], Arg::Param(3)) << "svh";
    if (bias) {
      EXPECT_EQ(args[2], Arg::Param(4));
    }
    EXPECT_EQ(args[args.size() - 3], Arg::Param(bias ? 5 : 4)) << "out";
    EXPECT_TRUE(absl::StrContains(
        candidate.units.front().text,
        bias ? "#define KILN_BIAS 1\n" : "#define KILN_BIAS 0\n"));
  }
}

// With one slice the product kernel rounds to fp16, which the op does not.
TEST(LinearCudaTemplateTest, TheNumericsClassIsTheNumberOfSlices) {
  const Problem problem = ProblemFor(2048, 256, 9);
  std::map<std::string, std::set<int64_t>> splits;
  for (const Assignment& point : PointsOf(problem)) {
    ASSERT_OK_AND_ASSIGN(const PlanBody body,
                         LinearCudaTemplate()->MakeBody(problem, point));
    splits[body.numerics_class].insert(point.at("split"));
  }
  std::set<int64_t> all;
  for (const auto& [name, members] : splits) {
    EXPECT_EQ(members.size(), 1u) << name;
    all.insert(members.begin(), members.end());
  }
  EXPECT_THAT(all, ElementsAre(2, 4, 8, 16));
  EXPECT_EQ(splits.size(), all.size());
}

TEST(LinearCudaTemplateTest, LegalPointsKeepTheRulesOfTheProductKernel) {
  for (const int level : {80, 89, 90, 100, 120}) {
    Problem problem = ProblemFor(2048, 384, 64);
    problem.device =
        AssumedProfile({.backend = Backend::kCuda, .level = level});
    const std::vector<Assignment> points = PointsOf(problem);
    ASSERT_FALSE(points.empty()) << level;
    for (const Assignment& point : points) {
      const int64_t channels = point.at("channels_tile");
      const int64_t warps = point.at("warps");
      const int64_t tile = point.at("tokens_tile");
      const int64_t k_tile = point.at("k_tile");
      ASSERT_EQ(384 % channels, 0);
      ASSERT_GE(channels, 16 * warps);
      ASSERT_LE(channels / 16 / warps * tile / 8 * 4, 128);
      ASSERT_OK_AND_ASSIGN(const PlanBody body,
                           LinearCudaTemplate()->MakeBody(problem, point));
      const Step& step = StepNamed(body, "product");
      ASSERT_EQ(step.dynamic_shared_bytes,
                point.at("stages") *
                    (k_tile * channels * 5 / 8 + tile * (k_tile + 8) * 2));
      ASSERT_LE(step.dynamic_shared_bytes, problem.device.shared_bytes_max);
      ASSERT_EQ(step.block[0], static_cast<uint32_t>(32 * warps));
    }
  }
}

TEST(LinearCudaTemplateTest, StepsNameEntriesOfTheirProgram) {
  const Problem problem = ProblemFor(512, 256, 9);
  ASSERT_OK_AND_ASSIGN(
      const Candidate candidate,
      LinearCudaTemplate()->Instantiate(problem, PointsOf(problem).front()));
  ExpectProgramsOfSteps(candidate);
}

TEST(LinearCudaTemplateTest, CandidatesShareTheProgramAroundTheProduct) {
  const Problem problem = ProblemFor(512, 256, 9);
  std::set<std::string> around;
  std::map<std::string, std::set<std::string>> products;
  for (const Assignment& point : PointsOf(problem)) {
    const std::vector<SourceUnit> units = LinearCudaTemplate()->MakeUnits(
        problem.geometry, problem.device.target, point);
    ASSERT_EQ(units.size(), 2u);
    around.insert(units[0].text);
    Assignment source = point;
    source.erase("split");
    products[units[1].text].insert(AssignmentText(source));
  }
  EXPECT_EQ(around.size(), 1u);
  for (const auto& [text, points] : products) {
    EXPECT_EQ(points.size(), 1u) << "an axis is missing from the prelude";
  }
}

TEST(LinearCudaTemplateTest, RefusesPointsThatBreakARule) {
  const Problem problem = ProblemFor(256, 384, 9);
  Assignment bad = PointsOf(problem).front();
  bad["channels_tile"] = 256;
  EXPECT_THAT(
      LinearCudaTemplate()->MakeBody(problem, bad),
      StatusIs(absl::StatusCode::kInvalidArgument,
               HasSubstr("channels_tile 256 does not divide out_features")));
  bad = PointsOf(problem).front();
  bad["split"] = 4;
  EXPECT_THAT(LinearCudaTemplate()->MakeBody(problem, bad),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("more K slices than blocks")));
  bad["split"] = 1;
  EXPECT_THAT(LinearCudaTemplate()->MakeBody(problem, bad),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("split is 1, must be one of")));
}

}  // namespace
}  // namespace kiln
