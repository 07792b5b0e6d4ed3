#include "templates/fused_moe/template_mx_qmma.h"

#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/op_mx.h"
#include "templates/fused_moe/template_mx_cuda.h"
#include "templates/registry.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/mx_arm_checks.h"
#include "tests/templates/plan_parts.h"

namespace kiln {
namespace {

using testing::ExpectProgramsOfSteps;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::SliceBytes;
using testing::StatusIs;

constexpr Target kFold = {Backend::kCuda, 89, false};
constexpr Target kScaled = {Backend::kCuda, 120, true};

Problem ProblemFor(const Target& target, uint32_t m_min = 9,
                   uint32_t m_max = 33) {
  return testing::MxProblemFor(AssumedProfile(target), m_min, m_max);
}

ParamSpace SpaceOf(const Problem& problem) {
  return FusedMoeMxQmmaTemplate()->Enumerate(problem, 100000);
}

PlanBody BodyOf(const Problem& problem, const Assignment& point) {
  absl::StatusOr<PlanBody> body =
      FusedMoeMxQmmaTemplate()->MakeBody(problem, point);
  EXPECT_OK(body.status());
  return body.ok() ? *std::move(body) : PlanBody();
}

TEST(FusedMoeMxQmmaTemplateTest, ServesItsFormatWhereTensorCoresMultiplyE4m3) {
  EXPECT_EQ(FindTemplate("fused_moe.mx_qmma"), FusedMoeMxQmmaTemplate());
  const RequestGeometry geometry = ProblemFor(kFold).geometry;
  for (const Target& target :
       {kFold, kScaled, Target{Backend::kCuda, 120, false},
        Target{Backend::kCuda, 121, true}}) {
    EXPECT_OK(FusedMoeMxQmmaTemplate()->Supports(geometry, target));
  }
  RequestGeometry exl3 = geometry;
  exl3.weights.format = WeightFormat::kExl3;
  EXPECT_THAT(FusedMoeMxQmmaTemplate()->Supports(exl3, kFold),
              StatusIs(absl::StatusCode::kUnimplemented));
  for (const Target target :
       {Target{Backend::kCuda, 80, false}, Target{Backend::kCuda, 86, false},
        Target{Backend::kCuda, 90, true}, Target{Backend::kCuda, 100, true},
        Target{Backend::kCuda, 103, true}, Target{Backend::kCpu, 4, false}}) {
    EXPECT_THAT(FusedMoeMxQmmaTemplate()->Supports(geometry, target),
                StatusIs(absl::StatusCode::kUnimplemented,
                         HasSubstr(target.ToString())));
  }
}

TEST(FusedMoeMxQmmaTemplateTest, BothProductsReadOneRouteMap) {
  testing::ExpectBothProductsReadOneRouteMap(
      *FusedMoeMxQmmaTemplate(), ProblemFor(kScaled), {"tiles", "totals"});
}

TEST(FusedMoeMxQmmaTemplateTest, ServesArmsOfE4m3WithOneTerm) {
  EXPECT_FALSE(SpaceOf(ProblemFor(kScaled)).points.empty());
  const ParamSpace small = SpaceOf(ProblemFor(kScaled, 5, 8));
  EXPECT_THAT(small.points, IsEmpty());
  ASSERT_EQ(small.rejects.size(), 1u);
  EXPECT_THAT(small.rejects[0].reason,
              HasSubstr("that of the smallm arm; E4M3 products serve W4A8 "
                        "with one term"));
  const ParamSpace both = SpaceOf(ProblemFor(kScaled, 5, 32));
  EXPECT_THAT(both.points, IsEmpty());
  ASSERT_EQ(both.rejects.size(), 1u);
  EXPECT_THAT(both.rejects[0].reason, HasSubstr("has tokens on both sides"));

  const DeviceProfile device = AssumedProfile(kScaled);
  EXPECT_FALSE(SpaceOf(testing::MxDirectFor(device, 5, 8, Remainder::kNone))
                   .points.empty());
  const ParamSpace two_terms = SpaceOf(testing::MxDirectFor(device, 5, 8));
  EXPECT_THAT(two_terms.points, IsEmpty());
  ASSERT_EQ(two_terms.rejects.size(), 1u);
  EXPECT_THAT(two_terms.rejects[0].reason, HasSubstr("with one term"));
}

TEST(FusedMoeMxQmmaTemplateTest, TheNumericsClassIsTheFormAndTheOrderOfSums) {
  for (const auto& [target, name] :
       {std::pair{kFold, "mx.w4a8.qmma.fold32."},
        std::pair{kScaled, "mx.w4a8.qmma.scaled64."},
        std::pair{Target{Backend::kCuda, 120, false},
                  "mx.w4a8.qmma.fold32."}}) {
    const Problem problem = ProblemFor(target);
    const std::vector<Assignment> points = SpaceOf(problem).points;
    testing::ExpectClassesAreSplits(*FusedMoeMxQmmaTemplate(), problem, points);
    const PlanBody body = BodyOf(problem, points.front());
    EXPECT_EQ(body.numerics_class,
              absl::StrCat(name, "fc1x", points.front().at("split_fc1"),
                           ".fc2x", points.front().at("split_fc2")));
    EXPECT_EQ(body.tolerance, 2e-2);
    EXPECT_TRUE(body.deterministic);
    EXPECT_EQ(body.overlapped, target.level >= 90);
  }
}

// Steps and arguments are those of mx_cuda.cu; operands are half as long, and
// have a byte for a scale.
TEST(FusedMoeMxQmmaTemplateTest, SharesTheStepsOfTheOtherTemplate) {
  const Problem problem = ProblemFor(kScaled);
  const uint64_t m = problem.interval.m_max;
  const uint64_t routes = m * 4;
  for (const Assignment& point : SpaceOf(problem).points) {
    const PlanBody body = BodyOf(problem, point);
    SCOPED_TRACE(body.Label());
    Assignment same = point;
    same["activation_bits"] = 8;
    const absl::StatusOr<PlanBody> other =
        FusedMoeMxCudaTemplate()->MakeBody(problem, same);
    if (!other.ok()) continue;  // more shared memory than a block has
    ASSERT_EQ(body.steps.size(), other->steps.size());
    for (size_t i = 0; i < body.steps.size(); ++i) {
      const Step& step = body.steps[i];
      const Step& twin = other->steps[i];
      ASSERT_EQ(step.entry, twin.entry);
      ASSERT_EQ(step.program, twin.program);
      ASSERT_EQ(step.block, twin.block);
      ASSERT_EQ(step.args.size(), twin.args.size());
      for (size_t a = 0; a < step.args.size(); ++a) {
        ASSERT_EQ(step.args[a].kind, twin.args[a].kind);
        ASSERT_EQ(step.args[a].value, twin.args[a].value);
      }
      for (uint32_t tokens : {problem.interval.m_min, problem.interval.m_max}) {
        for (size_t dim = 0; dim < 3; ++dim) {
          ASSERT_EQ(step.grid[dim].Evaluate(tokens),
                    twin.grid[dim].Evaluate(tokens));
        }
      }
    }
    ASSERT_EQ(SliceBytes(body, "x_values"), 1024 * m);
    ASSERT_EQ(SliceBytes(body, "x_scales"), 32 * m);
    ASSERT_EQ(SliceBytes(body, "mid_values"), 384 * routes);
    ASSERT_EQ(SliceBytes(body, "mid_scales"), 12 * routes);
    for (const char* name :
         {"tiles", "totals", "rows", "positions", "fc1", "fc2"}) {
      ASSERT_EQ(SliceBytes(body, name), SliceBytes(*other, name)) << name;
    }
  }
}

TEST(FusedMoeMxQmmaTemplateTest, AnIdentityRequestHasItsCandidatesToo) {
  for (const Target& target : {kFold, kScaled}) {
    const Problem problem =
        testing::MxIdentityFor(AssumedProfile(target), 9, 33);
    const std::vector<Assignment> points = SpaceOf(problem).points;
    ASSERT_FALSE(points.empty());
    const PlanBody body = BodyOf(problem, points.front());
    EXPECT_EQ(body.params.size(), 8u);
    EXPECT_EQ(SliceBytes(body, "x_values"), 640 * 33);
    const std::vector<SourceUnit> units = FusedMoeMxQmmaTemplate()->MakeUnits(
        problem.geometry, target, points.front());
    EXPECT_THAT(units[0].text, HasSubstr("#define KILN_COUPLED 0\n"));
  }
}

TEST(FusedMoeMxQmmaTemplateTest, LegalPointsKeepTheRulesOfTheReadme) {
  for (const Target& target : {kFold, kScaled}) {
    const Problem problem = ProblemFor(target);
    const std::vector<Assignment> points = SpaceOf(problem).points;
    ASSERT_FALSE(points.empty());
    for (const Assignment& point : points) {
      const int64_t channels = point.at("channels_tile");
      const int64_t warps = point.at("warps");
      const int64_t tile = point.at("tokens_tile");
      ASSERT_EQ(384 % channels, 0);
      ASSERT_EQ(1024 % channels, 0);
      ASSERT_GE(channels, 16 * warps);
      ASSERT_LE(channels / 16 / warps * (tile / 8 * 4 + 20), 144);
      ASSERT_LE(point.at("split_fc2"), 384 / 128);
      for (const Step& step : BodyOf(problem, point).steps) {
        if (step.label != "fc1" && step.label != "fc2") continue;
        ASSERT_EQ(step.dynamic_shared_bytes,
                  point.at("stages") * (128 * channels * 3 / 8 + channels * 4 +
                                        tile * (128 + 16)));
        ASSERT_LE(step.dynamic_shared_bytes, problem.device.shared_bytes_max);
        ASSERT_EQ(step.block[0], static_cast<uint32_t>(32 * warps));
      }
    }
  }
}

TEST(FusedMoeMxQmmaTemplateTest, StepsNameEntriesOfTheirProgram) {
  for (const Target& target : {kFold, kScaled}) {
    const Problem problem = ProblemFor(target);
    ASSERT_OK_AND_ASSIGN(const Candidate candidate,
                         FusedMoeMxQmmaTemplate()->Instantiate(
                             problem, SpaceOf(problem).points.front()));
    ExpectProgramsOfSteps(candidate, {"kiln_mx_count"});
    ASSERT_EQ(candidate.units.size(), 2u);
    const SourceUnit& support = candidate.units[0];
    EXPECT_EQ(support.name, "fused_moe/mx_cuda.cu");
    EXPECT_THAT(support.text, HasSubstr("#define KILN_PART 0\n"));
    EXPECT_THAT(support.text, HasSubstr("#define KILN_OPERAND_CODES 1\n"));
    const SourceUnit& products = candidate.units[1];
    EXPECT_EQ(products.name, "fused_moe/mx_qmma.cu");
    EXPECT_EQ(products.compute_dtype, "e4m3");
    EXPECT_THAT(products.text,
                HasSubstr(absl::StrCat("#define KILN_BLOCK_SCALED ",
                                       target == kScaled ? 1 : 0, "\n")));
    EXPECT_THAT(products.text, HasSubstr("#define KILN_BITS 3\n"));
  }
}

TEST(FusedMoeMxQmmaTemplateTest, CandidatesShareTheSupportProgram) {
  const Problem problem = ProblemFor(kFold);
  std::set<std::string> support;
  std::map<std::string, std::set<std::string>> products;
  for (const Assignment& point : SpaceOf(problem).points) {
    const std::vector<SourceUnit> units = FusedMoeMxQmmaTemplate()->MakeUnits(
        problem.geometry, problem.device.target, point);
    support.insert(units.front().text);
    Assignment source = point;
    source.erase("split_fc1");
    source.erase("split_fc2");
    products[units.back().text].insert(AssignmentText(source));
  }
  EXPECT_EQ(support.size(), 1u);
  for (const auto& [text, points] : products) {
    EXPECT_EQ(points.size(), 1u) << "an axis is missing from the prelude";
  }
}

TEST(FusedMoeMxQmmaTemplateTest, RefusesPointsThatBreakARule) {
  const Problem problem = ProblemFor(kScaled);
  const Assignment good = SpaceOf(problem).points.front();
  const auto with = [&](const char* axis, int64_t value) {
    Assignment bad = good;
    bad[axis] = value;
    return FusedMoeMxQmmaTemplate()->MakeBody(problem, bad);
  };
  EXPECT_THAT(with("channels_tile", 256),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("channels_tile 256 does not divide")));
  EXPECT_THAT(with("k_tile", 64),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("k_tile is 64, must be one of")));
  EXPECT_THAT(with("split_fc2", 4),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("more K slices than blocks")));
  Problem wide = problem;
  wide.geometry.intermediate = 512;
  EXPECT_THAT(FusedMoeMxQmmaTemplate()->MakeBody(wide, {{"tokens_tile", 48},
                                                        {"channels_tile", 256},
                                                        {"k_tile", 128},
                                                        {"warps", 4},
                                                        {"stages", 2},
                                                        {"split_fc1", 1},
                                                        {"split_fc2", 1}}),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("176 registers for sums and fragments")));
}

}  // namespace
}  // namespace kiln
