#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/linear/op.h"
#include "templates/linear/template_cpu.h"
#include "templates/registry.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::StatusIs;

Problem ProblemFor(int64_t in, int64_t out, uint32_t capacity, bool bias = true,
                   int level = 3) {
  Problem problem;
  problem.geometry.op = Op::kLinear;
  problem.geometry.linear = {
      .in_features = in, .out_features = out, .bits = 4, .bias = bias};
  problem.interval = {1, capacity};
  problem.device = AssumedProfile({.backend = Backend::kCpu, .level = level});
  problem.device.multiprocessors = 4;
  return problem;
}

std::vector<Assignment> AllOf(const Problem& problem) {
  return LinearCpuTemplate()->Enumerate(problem, 100000).points;
}

TEST(LinearCpuTemplateTest, IsTheTemplateOfItsOpAndTarget) {
  EXPECT_EQ(FindTemplate("linear.cpu"), LinearCpuTemplate());
  const Problem problem = ProblemFor(256, 128, 1);
  EXPECT_THAT(TemplatesFor(problem.geometry, Backend::kCpu),
              ElementsAre(LinearCpuTemplate()));
  EXPECT_OK(
      LinearCpuTemplate()->Supports(problem.geometry, problem.device.target));
  EXPECT_THAT(
      LinearCpuTemplate()->Supports(RequestGeometry(), problem.device.target),
      StatusIs(absl::StatusCode::kUnimplemented));
  EXPECT_THAT(
      LinearCpuTemplate()->Supports(problem.geometry,
                                    {.backend = Backend::kCuda, .level = 90}),
      StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("CPU targets")));
}

TEST(LinearCpuTemplateTest, EveryPointLaunchesExactlyWhatThereIsToDo) {
  for (const auto& [in, out] :
       {std::pair<int64_t, int64_t>{640, 384}, {128, 2304}, {4096, 128}}) {
    const Problem problem = ProblemFor(in, out, 33);
    const std::vector<Assignment> points = AllOf(problem);
    ASSERT_GT(points.size(), 50u);
    for (const Assignment& point : points) {
      ASSERT_OK_AND_ASSIGN(const PlanBody body,
                           LinearCpuTemplate()->MakeBody(problem, point));
      SCOPED_TRACE(body.Label());
      ASSERT_EQ(body.steps.size(), 3u);
      const auto tile = static_cast<uint64_t>(point.at("tokens_tile"));
      const auto strip = static_cast<uint64_t>(point.at("channels_tile"));
      for (uint32_t m = 1; m <= 33; ++m) {
        const auto grid = [&](size_t step, size_t dim) {
          return body.steps[step].grid[dim].Evaluate(m);
        };
        const uint64_t tiles = grid(0, 0);
        ASSERT_GE(tiles * tile, m);
        ASSERT_LT((tiles - 1) * tile, m);
        ASSERT_EQ(grid(1, 0), tiles);
        ASSERT_EQ(grid(2, 0), m);
      }
      const auto blocks = [&](size_t step) {
        return body.steps[step].grid[1].Evaluate(1);
      };
      EXPECT_EQ(blocks(0), static_cast<uint64_t>(in + 511) / 512);
      EXPECT_EQ(blocks(1), (static_cast<uint64_t>(out) + strip - 1) / strip);
      EXPECT_EQ(blocks(2), static_cast<uint64_t>(out + 511) / 512);
      // Whole tiles of the capacity, in binary16 and in binary32.
      const uint64_t rows = (33 + tile - 1) / tile * tile;
      ASSERT_EQ(body.arena.slices.size(), 2u);
      EXPECT_EQ(body.arena.slices[0].bytes,
                2 * rows * static_cast<uint64_t>(in));
      EXPECT_EQ(body.arena.slices[1].bytes,
                4 * rows * static_cast<uint64_t>(out));
      EXPECT_EQ(body.cpu_threads, point.at("threads"));
      EXPECT_TRUE(body.deterministic);
    }
  }
}

TEST(LinearCpuTemplateTest, StepsReadTheSlotsOfTheirGeometry) {
  for (const bool bias : {false, true}) {
    const Problem problem = ProblemFor(256, 128, 4, bias);
    ASSERT_OK_AND_ASSIGN(
        const PlanBody body,
        LinearCpuTemplate()->MakeBody(problem, AllOf(problem).front()));
    EXPECT_EQ(body.params, LinearParams(problem.geometry));
    EXPECT_THAT(body.steps[0].args, ElementsAre(Arg::Tokens(), Arg::Param(0),
                                                Arg::Param(2), Arg::Arena(0)));
    EXPECT_THAT(body.steps[1].args,
                ElementsAre(Arg::Param(1), Arg::Arena(0), Arg::Arena(1)));
    if (bias) {
      EXPECT_THAT(body.steps[2].args,
                  ElementsAre(Arg::Arena(1), Arg::Param(3), Arg::Param(4),
                              Arg::Param(5)));
    } else {
      EXPECT_THAT(body.steps[2].args,
                  ElementsAre(Arg::Arena(1), Arg::Param(3), Arg::Param(4)));
    }
  }
}

TEST(LinearCpuTemplateTest, TheSourceHasItsGeometryAndItsHeaders) {
  const Problem problem = ProblemFor(640, 384, 4);
  const Assignment point = {{"channels_tile", 64},
                            {"k_tile", 128},
                            {"threads", 4},
                            {"tokens_tile", 8},
                            {"unroll", 2}};
  const std::vector<SourceUnit> units = LinearCpuTemplate()->MakeUnits(
      problem.geometry, problem.device.target, point);
  ASSERT_EQ(units.size(), 1u);
  for (const char* line :
       {"#define KILN_IN 640\n", "#define KILN_OUT 384\n",
        "#define KILN_CODEBOOK 1\n", "#define KILN_BITS 4\n",
        "#define KILN_X_BF16 1\n", "#define KILN_BIAS 1\n",
        "#define KILN_TOKENS_TILE 8\n", "#define KILN_CHANNELS_TILE 64\n",
        "#define KILN_K_TILE 128\n", "#define KILN_UNROLL 2\n"}) {
    EXPECT_THAT(units[0].text, HasSubstr(line));
  }
  std::set<std::string> headers;
  for (const auto& [name, text] : units[0].headers) {
    EXPECT_TRUE(absl::EndsWith(name, ".h")) << name;
    headers.insert(name);
  }
  EXPECT_TRUE(headers.contains("cpu/trellis_product.h"));
  EXPECT_TRUE(headers.contains("device/cpu_vector.h"));
  // GPU kernels get what they always got.
  for (const auto& [name, text] : DeviceHeaders()) {
    EXPECT_TRUE(absl::StartsWith(name, "device/")) << name;
  }
}

TEST(LinearCpuTemplateTest, RefusesWhatIsNoPoint) {
  const Problem problem = ProblemFor(256, 128, 4);
  Assignment point = AllOf(problem).front();
  point["tokens_tile"] = 3;
  EXPECT_THAT(LinearCpuTemplate()->MakeBody(problem, point),
              StatusIs(absl::StatusCode::kInvalidArgument));
  point = AllOf(problem).front();
  point["warps"] = 4;
  EXPECT_THAT(LinearCpuTemplate()->MakeBody(problem, point),
              StatusIs(absl::StatusCode::kInvalidArgument));
  // 32 channels are one group of AVX-512; two are decoded together.
  const Problem wide = ProblemFor(256, 128, 4, true, 4);
  point = AllOf(wide).front();
  point["channels_tile"] = 32;
  point["unroll"] = 2;
  EXPECT_THAT(LinearCpuTemplate()->MakeBody(wide, point),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("decoded together")));
}

TEST(LinearCpuTemplateTest, LargeCapacitiesPreferLargeTiles) {
  EXPECT_EQ(AllOf(ProblemFor(4096, 4096, 1)).front().at("tokens_tile"), 1);
  EXPECT_EQ(AllOf(ProblemFor(4096, 4096, 512)).front().at("tokens_tile"), 16);
}

}  // namespace
}  // namespace kiln
