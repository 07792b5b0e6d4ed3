#include "templates/fused_moe/template_mx_cpu.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/op_mx.h"
#include "templates/registry.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/mx_arm_checks.h"

namespace kiln {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOkAndHolds;
using testing::StatusIs;

DeviceProfile Device() {
  DeviceProfile device = AssumedProfile({.backend = Backend::kCpu, .level = 3});
  device.multiprocessors = 4;
  return device;
}

Problem ProblemFor(uint32_t m_min, uint32_t m_max) {
  return testing::MxProblemFor(Device(), m_min, m_max);
}

ParamSpace SpaceOf(const Problem& problem) {
  return FusedMoeMxCpuTemplate()->Enumerate(problem, 100000);
}

TEST(FusedMoeMxCpuTemplateTest, IsTheOneForItsFormat) {
  EXPECT_EQ(FindTemplate("fused_moe.mx_cpu"), FusedMoeMxCpuTemplate());
  const RequestGeometry geometry = ProblemFor(1, 1).geometry;
  EXPECT_THAT(TemplatesFor(geometry, Backend::kCpu),
              ElementsAre(FusedMoeMxCpuTemplate()));
}

TEST(FusedMoeMxCpuTemplateTest, ServesItsFormatOnCpuTargetsOnly) {
  const Problem problem = ProblemFor(1, 8);
  const Target cpu = problem.device.target;
  EXPECT_OK(FusedMoeMxCpuTemplate()->Supports(problem.geometry, cpu));
  RequestGeometry exl3 = problem.geometry;
  exl3.weights.format = WeightFormat::kExl3;
  EXPECT_THAT(FusedMoeMxCpuTemplate()->Supports(exl3, cpu),
              StatusIs(absl::StatusCode::kUnimplemented));
  EXPECT_THAT(FusedMoeMxCpuTemplate()->Supports(
                  problem.geometry, {.backend = Backend::kCuda, .level = 90}),
              StatusIs(absl::StatusCode::kUnimplemented));
}

TEST(FusedMoeMxCpuTemplateTest, AnIntervalHasTheCandidatesOfItsArmAlone) {
  const struct {
    Interval interval;
    int64_t bits;
    const char* numerics;
  } cases[] = {{{1, 1}, 16, "mx.w4a16.fold32"},
               {{5, 8}, 16, "mx.w4a16.fold32"},
               {{9, 32}, 8, "mx.w4a8.fold32"}};

  for (const auto& c : cases) {
    const Problem problem = ProblemFor(c.interval.m_min, c.interval.m_max);
    const ParamSpace space = SpaceOf(problem);
    ASSERT_FALSE(space.points.empty());
    for (const Assignment& point : space.points) {
      EXPECT_EQ(point.at("activation_bits"), c.bits);
      ASSERT_OK_AND_ASSIGN(const PlanBody body,
                           FusedMoeMxCpuTemplate()->MakeBody(problem, point));
      EXPECT_EQ(body.numerics_class, c.numerics);
    }
  }
}

TEST(FusedMoeMxCpuTemplateTest, ZeroSendsOneTokenToTheGroupedArm) {
  Problem problem = ProblemFor(1, 1);
  problem.geometry.mx.smallm_max_tokens = 0;
  EXPECT_THAT(MxArmOf(problem.geometry, problem.interval),
              IsOkAndHolds(MxArm::kGrouped));
  EXPECT_EQ(SpaceOf(problem).points.front().at("activation_bits"), 8);
}

TEST(FusedMoeMxCpuTemplateTest, TheOtherArmIsNoCandidate) {
  testing::ExpectTheOtherArmIsNoCandidate(*FusedMoeMxCpuTemplate(), Device());
}

TEST(FusedMoeMxCpuTemplateTest, AnIntervalOnBothSidesOfTheLimitHasNoCandidate) {
  testing::ExpectNoCandidateOnBothSidesOfALimit(*FusedMoeMxCpuTemplate(),
                                                Device());
}

TEST(FusedMoeMxCpuTemplateTest, WithoutARemainderPlansAreThoseOfTheGroupedArm) {
  testing::ExpectPlansOfTheGroupedArm(*FusedMoeMxCpuTemplate(), Device());
}

TEST(FusedMoeMxCpuTemplateTest, ARemainderIsTwoTermsUpToTheLimitAlone) {
  testing::ExpectTwoTermsUpToTheLimitAlone(*FusedMoeMxCpuTemplate(), Device());
}

TEST(FusedMoeMxCpuTemplateTest, AnIdentityRequestHasNoVectors) {
  testing::ExpectNoVectors(*FusedMoeMxCpuTemplate(), Device(), 3);
}

// Without H512 a block of rotate or combine has 128 channels.
TEST(FusedMoeMxCpuTemplateTest, StepsOfAnIdentityRequestCoverItsChannels) {
  const Problem problem = testing::MxIdentityFor(Device(), 9, 33);
  for (const Assignment& point : SpaceOf(problem).points) {
    ASSERT_OK_AND_ASSIGN(const PlanBody body,
                         FusedMoeMxCpuTemplate()->MakeBody(problem, point));
    for (const uint32_t m : {9u, 33u}) {
      for (const size_t step : {1u, 4u}) {
        ASSERT_EQ(body.steps[step].grid[0].Evaluate(m), m);
        ASSERT_EQ(body.steps[step].grid[1].Evaluate(m), 5u);
      }
    }
  }
}

TEST(FusedMoeMxCpuTemplateTest, StepsCoverEveryRowChannelAndRoute) {
  for (const Interval interval : {Interval{1, 8}, Interval{9, 33}}) {
    const Problem problem = ProblemFor(interval.m_min, interval.m_max);
    for (const Assignment& point : SpaceOf(problem).points) {
      ASSERT_OK_AND_ASSIGN(const PlanBody body,
                           FusedMoeMxCpuTemplate()->MakeBody(problem, point));
      SCOPED_TRACE(body.Label());
      const auto strip = static_cast<uint64_t>(point.at("channels_tile"));
      const auto tile = static_cast<uint32_t>(point.at("tokens_tile"));
      const auto grid = [&](size_t step, size_t dim, uint32_t m) {
        return body.steps[step].grid[dim].Evaluate(m);
      };
      for (uint32_t m = interval.m_min; m <= interval.m_max; ++m) {
        const uint64_t tiles = FusedMoeTilesMax(problem.geometry, tile, m);
        ASSERT_EQ(grid(1, 0, m), m);  // rotate
        ASSERT_EQ(grid(1, 1, m), 2u);
        ASSERT_EQ(grid(2, 0, m), tiles);  // fc1
        ASSERT_EQ(grid(2, 1, m), (384 + strip - 1) / strip);
        ASSERT_EQ(grid(3, 0, m), tiles);  // fc2
        ASSERT_EQ(grid(3, 1, m) * strip, 1024u);
        ASSERT_EQ(grid(4, 0, m), m);  // combine
        ASSERT_EQ(grid(4, 1, m), 2u);
      }
    }
  }
}

TEST(FusedMoeMxCpuTemplateTest,
     ScalesOfActivationsHaveAColumnForEach32Channels) {
  for (const Interval interval : {Interval{1, 8}, Interval{9, 33}}) {
    const Problem problem = ProblemFor(interval.m_min, interval.m_max);
    const bool quantised = interval.m_min > 8;
    for (const Assignment& point : SpaceOf(problem).points) {
      ASSERT_OK_AND_ASSIGN(const PlanBody body,
                           FusedMoeMxCpuTemplate()->MakeBody(problem, point));
      const auto tile = static_cast<uint32_t>(point.at("tokens_tile"));
      const uint64_t rows =
          tile * FusedMoeTilesMax(problem.geometry, tile, interval.m_max);
      size_t found = 0;
      for (const ArenaSlice& slice : body.arena.slices) {
        if (slice.name == "x_scales") {
          ++found;
          EXPECT_EQ(slice.bytes, quantised ? interval.m_max * 32u : 0u);
        } else if (slice.name == "mid_scales") {
          ++found;
          EXPECT_EQ(slice.bytes, quantised ? rows * 12 : 0);
        }
      }
      EXPECT_EQ(found, 2u);
    }
  }
}

TEST(FusedMoeMxCpuTemplateTest, BothTermsOfAnActivationHaveNumbersAndScales) {
  const Problem one = testing::MxDirectFor(Device(), 1, 8, Remainder::kNone);
  const Problem two = testing::MxDirectFor(Device(), 1, 8);
  for (Assignment point : SpaceOf(one).points) {
    ASSERT_OK_AND_ASSIGN(const PlanBody single,
                         FusedMoeMxCpuTemplate()->MakeBody(one, point));
    point["activation_terms"] = 2;
    ASSERT_OK_AND_ASSIGN(const PlanBody both,
                         FusedMoeMxCpuTemplate()->MakeBody(two, point));
    ASSERT_EQ(both.arena.slices.size(), single.arena.slices.size());
    size_t doubled = 0;
    for (size_t i = 0; i < both.arena.slices.size(); ++i) {
      const ArenaSlice& slice = both.arena.slices[i];
      const bool is_operand =
          slice.name[0] == 'x' || absl::StartsWith(slice.name, "mid_");
      doubled += is_operand ? 1 : 0;
      EXPECT_EQ(slice.bytes,
                single.arena.slices[i].bytes * (is_operand ? 2 : 1))
          << slice.name;
    }
    EXPECT_EQ(doubled, 4u);
    for (size_t i = 0; i < both.steps.size(); ++i) {
      EXPECT_EQ(both.steps[i].grid, single.steps[i].grid);
    }
  }
}

TEST(FusedMoeMxCpuTemplateTest, BothProductsReadOneRouteMap) {
  for (const Problem& problem : {ProblemFor(9, 32), ProblemFor(1, 8)}) {
    testing::ExpectBothProductsReadOneRouteMap(
        *FusedMoeMxCpuTemplate(), problem, {"tile_expert", "tile_routes"});
  }
}

TEST(FusedMoeMxCpuTemplateTest, AProgramHasTheArmTheLimitAndItsHeaders) {
  const Problem problem = ProblemFor(9, 32);
  const std::vector<SourceUnit> units = FusedMoeMxCpuTemplate()->MakeUnits(
      problem.geometry, problem.device.target, SpaceOf(problem).points.front());
  ASSERT_EQ(units.size(), 1u);
  EXPECT_THAT(units[0].text, HasSubstr("#define KILN_ACTIVATION_BITS 8\n"));
  EXPECT_THAT(units[0].text, HasSubstr("#define KILN_BITS 3\n"));
  // 10 as a binary32.
  EXPECT_THAT(units[0].text, HasSubstr("#define KILN_LIMIT_BITS 1092616192\n"));
  std::set<std::string> names;
  for (const auto& [name, text] : units[0].headers) names.insert(name);
  for (const char* header :
       {"formats/npk_law.h", "fused_moe/mx_block.h", "fused_moe/mx_boundary.h",
        "fused_moe/mx_vector.h", "device/trellis.h"}) {
    EXPECT_EQ(names.count(header), 1u) << header;
  }
}

TEST(MxBytesTest, AreTheShapesTimesTheirElements) {
  const RequestGeometry g = ProblemFor(1, 1).geometry;
  // H 1024, I 384, E 16, k 4, K 3, 7 tokens.
  EXPECT_THAT(MxBytes(g, 7),
              ElementsAre(7 * 1024 * 2, 7 * 4 * 4, 7 * 4 * 4,
                          2 * 16 * 64 * 24 * 48 * 2, 16 * 24 * 64 * 48 * 2,
                          16 * 3 * 8 * 256 * 4, 16 * 4 * 3 * 256 * 4, 1024 * 2,
                          16 * 6 * 384 * 2, 1024 * 2, 7 * 1024 * 4));
  EXPECT_EQ(MxParams(g).size(), kMxParamCount);
}

TEST(MxBytesTest, OfAnIdentityRequestHaveNoVectorsAndWholePanels) {
  const RequestGeometry g = testing::MxIdentityFor(Device(), 1, 1).geometry;
  // H 640, so that rows of w2_scale are three panels of 256.
  EXPECT_THAT(
      MxBytes(g, 7),
      ElementsAre(7 * 640 * 2, 7 * 4 * 4, 7 * 4 * 4, 2 * 16 * 40 * 24 * 48 * 2,
                  16 * 24 * 40 * 48 * 2, 16 * 3 * 5 * 256 * 4,
                  16 * 3 * 3 * 256 * 4, 7 * 640 * 4));
  EXPECT_EQ(MxSlot(g, MxParam::kW2Scale), 6u);
  EXPECT_EQ(MxSlot(g, MxParam::kOut), 7u);
  EXPECT_EQ(MxArg(g, MxParam::kOut), Arg::Param(7));
  EXPECT_EQ(MxArg(g, MxParam::kRotations), Arg::U64(0));
  const std::vector<ParamDecl> params = MxParams(g);
  EXPECT_EQ(params.back().name, "out");
  EXPECT_EQ(params[6].shape, "[experts, 3, intermediate/128, 256]");
}

}  // namespace
}  // namespace kiln
