#include "templates/fused_moe/template_qsrt_cpu.h"

#include <algorithm>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/op_qsrt.h"
#include "templates/registry.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/plan_parts.h"

namespace kiln {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::StatusIs;
using testing::StepNamed;

Problem ProblemFor(uint32_t m_min, uint32_t m_max) {
  Problem problem;
  RequestGeometry& g = problem.geometry;
  g.hidden = 1152;
  g.intermediate = 256;
  g.experts = 16;
  g.top_k = 4;
  g.weights.format = WeightFormat::kQsrt;
  g.weights.shared_scales = true;
  g.recipe = Recipe::kW4A8;
  g.qsrt = {.pairs = PairKinds::kP24P33, .decode_max_tokens = 8};
  problem.interval = {m_min, m_max};
  problem.device = AssumedProfile({.backend = Backend::kCpu, .level = 3});
  problem.device.multiprocessors = 4;
  return problem;
}

ParamSpace SpaceOf(const Problem& problem) {
  return FusedMoeQsrtCpuTemplate()->Enumerate(problem, 100000);
}

std::string TextOf(const Problem& problem) {
  return FusedMoeQsrtCpuTemplate()
      ->MakeUnits(problem.geometry, problem.device.target,
                  SpaceOf(problem).points.front())
      .front()
      .text;
}

// Whether a step has a slice of the arena among its arguments.
bool Reads(const PlanBody& body, absl::string_view label,
           absl::string_view slice) {
  const Step& step = StepNamed(body, label);
  return std::any_of(step.args.begin(), step.args.end(), [&](const Arg& arg) {
    return arg.kind == ArgKind::kArena &&
           body.arena.slices[arg.value].name == slice;
  });
}

TEST(FusedMoeQsrtCpuTemplateTest, IsTheOneForItsFormat) {
  EXPECT_EQ(FindTemplate("fused_moe.qsrt_cpu"), FusedMoeQsrtCpuTemplate());
  const RequestGeometry geometry = ProblemFor(1, 1).geometry;
  EXPECT_THAT(TemplatesFor(geometry, Backend::kCpu),
              ElementsAre(FusedMoeQsrtCpuTemplate()));
}

TEST(FusedMoeQsrtCpuTemplateTest, ServesItsFormatOnCpuTargetsOnly) {
  const Problem problem = ProblemFor(1, 8);
  const Target cpu = problem.device.target;
  EXPECT_OK(FusedMoeQsrtCpuTemplate()->Supports(problem.geometry, cpu));
  RequestGeometry exl3 = problem.geometry;
  exl3.weights.format = WeightFormat::kExl3;
  EXPECT_THAT(FusedMoeQsrtCpuTemplate()->Supports(exl3, cpu),
              StatusIs(absl::StatusCode::kUnimplemented));
  EXPECT_THAT(FusedMoeQsrtCpuTemplate()->Supports(
                  problem.geometry, {.backend = Backend::kCuda, .level = 90}),
              StatusIs(absl::StatusCode::kUnimplemented));
}

TEST(FusedMoeQsrtCpuTemplateTest, FewTokensHaveEightBitsAndMoreHaveSixteen) {
  const struct {
    Interval interval;
    int64_t bits;
    const char* numerics;
  } cases[] = {{{1, 1}, 8, "qsrt.w4a8.sequential"},
               {{5, 8}, 8, "qsrt.w4a8.sequential"},
               {{9, 32}, 16, "qsrt.w4a16.sequential"}};

  for (const auto& c : cases) {
    const Problem problem = ProblemFor(c.interval.m_min, c.interval.m_max);
    const ParamSpace space = SpaceOf(problem);
    ASSERT_FALSE(space.points.empty());
    for (const Assignment& point : space.points) {
      EXPECT_EQ(point.at("activation_bits"), c.bits);
      ASSERT_OK_AND_ASSIGN(const PlanBody body,
                           FusedMoeQsrtCpuTemplate()->MakeBody(problem, point));
      EXPECT_EQ(body.numerics_class, c.numerics);
    }
  }
}

TEST(FusedMoeQsrtCpuTemplateTest, RecipeW4a16HasSixteenBitsForOneToken) {
  Problem problem = ProblemFor(1, 1);
  problem.geometry.recipe = Recipe::kW4A16;
  problem.geometry.qsrt.decode_max_tokens = 0;
  EXPECT_EQ(SpaceOf(problem).points.front().at("activation_bits"), 16);
}

TEST(FusedMoeQsrtCpuTemplateTest, TheOtherArmIsNoCandidate) {
  const Problem problem = ProblemFor(9, 32);
  Assignment other = SpaceOf(problem).points.front();
  other["activation_bits"] = 8;
  EXPECT_THAT(FusedMoeQsrtCpuTemplate()->MakeBody(problem, other),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("activation_bits 8: the interval is that of "
                                 "the w4a16 arm, which has 16")));
}

TEST(FusedMoeQsrtCpuTemplateTest,
     AnIntervalOnBothSidesOfTheLimitHasNoCandidate) {
  const ParamSpace space = SpaceOf(ProblemFor(5, 32));
  EXPECT_THAT(space.points, IsEmpty());
  ASSERT_EQ(space.rejects.size(), 1u);
  EXPECT_THAT(space.rejects[0].reason,
              HasSubstr("interval 5..32 has tokens on both sides of "
                        "decode_max_tokens, 8"));
}

TEST(FusedMoeQsrtCpuTemplateTest, StepsCoverEveryRowChannelAndRoute) {
  for (const bool shared : {true, false}) {
    Problem problem = ProblemFor(1, 8);
    problem.geometry.weights.shared_scales = shared;
    for (const Assignment& point : SpaceOf(problem).points) {
      ASSERT_OK_AND_ASSIGN(const PlanBody body,
                           FusedMoeQsrtCpuTemplate()->MakeBody(problem, point));
      SCOPED_TRACE(body.Label());
      const auto strip = static_cast<uint64_t>(point.at("channels_tile"));
      const auto tile = static_cast<uint32_t>(point.at("tokens_tile"));
      const auto grid = [&](const char* label, size_t dim, uint32_t m) {
        return StepNamed(body, label).grid[dim].Evaluate(m);
      };
      for (uint32_t m = 1; m <= 8; ++m) {
        const uint64_t tiles = FusedMoeTilesMax(problem.geometry, tile, m);
        // Tokens share scales, routes do not.
        ASSERT_EQ(grid("rotate", 0, m), shared ? m : tiles);
        ASSERT_EQ(grid("rotate", 1, m), 3u);
        ASSERT_EQ(grid("fc1", 0, m), tiles);
        ASSERT_EQ(grid("fc1", 1, m), 2u);
        ASSERT_EQ(grid("fc2", 0, m), tiles);
        ASSERT_EQ(grid("fc2", 1, m), (1152 + strip - 1) / strip);
        ASSERT_EQ(grid("combine", 0, m), m);
        ASSERT_EQ(grid("combine", 1, m), 3u);
      }
    }
  }
}

// The table of codewords is that of the launch, and has every rate that an
// expert may have.
TEST(FusedMoeQsrtCpuTemplateTest, ATableIsMadeWhereACandidateReadsIt) {
  Problem problem = ProblemFor(9, 32);
  size_t with_table = 0;
  for (const PairKinds pairs : {PairKinds::kP24P33, PairKinds::kP33P43}) {
    problem.geometry.qsrt.pairs = pairs;
    const uint64_t rates = pairs == PairKinds::kP24P33 ? 3 : 2;
    for (const Assignment& point : SpaceOf(problem).points) {
      ASSERT_OK_AND_ASSIGN(const PlanBody body,
                           FusedMoeQsrtCpuTemplate()->MakeBody(problem, point));
      const bool wanted = point.at("codewords") == 1;
      ASSERT_EQ(Reads(body, "fc1", "codewords"), wanted);
      ASSERT_EQ(Reads(body, "fc2", "codewords"), wanted);
      ASSERT_EQ(body.steps.size(), wanted ? 6u : 5u);
      if (!wanted) continue;
      ++with_table;
      ASSERT_TRUE(Reads(body, "table", "codewords"));
      ASSERT_EQ(StepNamed(body, "table").grid[1].Evaluate(9), rates);
      ASSERT_EQ(body.arena.slices.back().name, "codewords");
      ASSERT_EQ(body.arena.slices.back().bytes, rates * 65536 * 2);
    }
  }
  EXPECT_GT(with_table, 0u);
}

TEST(FusedMoeQsrtCpuTemplateTest, NoWeightsAreDecodedIntoTheArena) {
  testing::ExpectQsrtArenaHoldsNoWeights(*FusedMoeQsrtCpuTemplate(),
                                         ProblemFor(1, 1), 4);
}

// One step sorts routes, and both products read what it wrote.
TEST(FusedMoeQsrtCpuTemplateTest, BothProductsReadOneRouteMap) {
  const Problem problem = ProblemFor(9, 32);
  ASSERT_OK_AND_ASSIGN(const PlanBody body,
                       FusedMoeQsrtCpuTemplate()->MakeBody(
                           problem, SpaceOf(problem).points.front()));
  for (const char* slice : {"tile_expert", "tile_routes", "places"}) {
    EXPECT_TRUE(Reads(body, "route", slice)) << slice;
    EXPECT_TRUE(Reads(body, "fc1", slice)) << slice;
    EXPECT_TRUE(Reads(body, "fc2", slice)) << slice;
  }
  EXPECT_EQ(
      std::count_if(body.steps.begin(), body.steps.end(),
                    [](const Step& step) { return step.label == "route"; }),
      1);
}

TEST(FusedMoeQsrtCpuTemplateTest, AProgramHasTheRatesAndTheActivation) {
  Problem problem = ProblemFor(9, 32);
  EXPECT_THAT(TextOf(problem),
              HasSubstr("#define KILN_OTHER_LOW 2\n#define KILN_OTHER_HIGH 4\n"
                        "#define KILN_ACTIVATION 0\n"
                        "#define KILN_SHARED_SUH 1\n"));
  problem.geometry.qsrt.pairs = PairKinds::kP33P43;
  problem.geometry.activation = Activation::kSitu;
  problem.geometry.weights.shared_scales = false;
  EXPECT_THAT(TextOf(problem),
              HasSubstr("#define KILN_OTHER_LOW 4\n#define KILN_OTHER_HIGH 3\n"
                        "#define KILN_ACTIVATION 1\n"
                        "#define KILN_SHARED_SUH 0\n"));
  problem.geometry.activation = Activation::kPerExpert;
  EXPECT_THAT(TextOf(problem), HasSubstr("#define KILN_ACTIVATION 2\n"));
}

TEST(FusedMoeQsrtCpuTemplateTest, OnlyPerExpertActivationsHaveASlot) {
  Problem problem = ProblemFor(9, 32);
  for (const Activation activation : {Activation::kSilu, Activation::kSitu}) {
    problem.geometry.activation = activation;
    EXPECT_EQ(QsrtParams(problem.geometry).size(), kQsrtParamCount);
    EXPECT_EQ(QsrtBytes(problem.geometry, 1).size(), kQsrtParamCount);
  }
  problem.geometry.activation = Activation::kPerExpert;
  EXPECT_EQ(QsrtParams(problem.geometry).back().name, "activations");
  EXPECT_EQ(QsrtBytes(problem.geometry, 1).back(), 16u * 4);
}

TEST(QsrtBytesTest, AreTheShapesTimesTheirElements) {
  RequestGeometry g = ProblemFor(1, 1).geometry;
  // H 1152, I 256, E 16, k 4, 7 tokens; 6 bits for each pair of channels.
  const uint64_t matrix = 16 * 72 * 8 * 16 * 6 * 2;
  EXPECT_THAT(QsrtBytes(g, 7),
              ElementsAre(7 * 1152 * 2, 7 * 4 * 4, 7 * 4 * 4, matrix, matrix,
                          matrix, 16 * 4, 16 * 4, 1152 * 2, 1152 * 2,
                          16 * 3 * 256 * 2, 1152 * 2, 7 * 1152 * 4));
  g.qsrt.pairs = PairKinds::kP33P43;
  g.weights.shared_scales = false;
  EXPECT_EQ(QsrtBytes(g, 7)[static_cast<size_t>(QsrtParam::kWGate)],
            matrix / 6 * 7);
  EXPECT_EQ(QsrtBytes(g, 7)[static_cast<size_t>(QsrtParam::kGateSuh)],
            16u * 1152 * 2);
}

// A caller checks the size of a tensor by its shape; how many words experts of
// P33 and P43 have together is the layer's own, but no fewer than if all were
// P33.
TEST(QsrtParamsTest, WordsHaveAtLeastTheShapeOfP33) {
  RequestGeometry g = ProblemFor(1, 1).geometry;
  const auto shape = [&g] {
    return QsrtParams(g)[static_cast<size_t>(QsrtParam::kWDown)].shape;
  };
  EXPECT_EQ(shape(), "[experts, 48*hidden]");
  g.qsrt.pairs = PairKinds::kP33P43;
  EXPECT_EQ(shape(), "[experts, 48*hidden]");
}

TEST(QsrtRateTest, IsThatOfTheKindsName) {
  EXPECT_EQ(QsrtRate(PairKinds::kP24P33, 0).byte(), 0x33);
  EXPECT_EQ(QsrtRate(PairKinds::kP24P33, 1).byte(), 0x24);
  EXPECT_EQ(QsrtRate(PairKinds::kP33P43, 0).byte(), 0x33);
  EXPECT_EQ(QsrtRate(PairKinds::kP33P43, 1).byte(), 0x43);
}

}  // namespace
}  // namespace kiln
