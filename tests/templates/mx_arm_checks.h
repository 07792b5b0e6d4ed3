// What every template over TrellisMX weights that has all arms is asked of
// them.

#ifndef KILN_TESTS_TEMPLATES_MX_ARM_CHECKS_H_
#define KILN_TESTS_TEMPLATES_MX_ARM_CHECKS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "compiler/spec/kernel_template.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/fused_moe/op_mx.h"
#include "tests/support/status_matchers.h"

namespace kiln::testing {

// A request whose small-M arm goes up to 8 tokens.
inline Problem MxProblemFor(DeviceProfile device, uint32_t m_min,
                            uint32_t m_max) {
  Problem problem;
  RequestGeometry& g = problem.geometry;
  g.hidden = 1024;
  g.intermediate = 384;
  g.experts = 16;
  g.top_k = 4;
  g.weights.format = WeightFormat::kTrellisMx;
  g.weights.bits = {.gate = 3, .up = 3, .down = 3};
  g.recipe = Recipe::kW4A8;
  g.mx = {.limit = "10", .smallm_max_tokens = 8};
  problem.interval = {m_min, m_max};
  problem.device = std::move(device);
  return problem;
}

// The same with the direct arm, up to 8 tokens too.
inline Problem MxDirectFor(DeviceProfile device, uint32_t m_min, uint32_t m_max,
                           Remainder remainder = Remainder::kRp2) {
  Problem problem = MxProblemFor(std::move(device), m_min, m_max);
  problem.geometry.mx = {
      .limit = "10", .direct_max_tokens = 8, .remainder = remainder};
  return problem;
}

inline std::vector<Assignment> AllPoints(const KernelTemplate& from,
                                         const Problem& problem) {
  return from.Enumerate(problem, 100000).points;
}

// The same without a boundary; neither axis is a multiple of 256.
inline Problem MxIdentityFor(DeviceProfile device, uint32_t m_min,
                             uint32_t m_max) {
  Problem problem = MxProblemFor(std::move(device), m_min, m_max);
  problem.geometry.hidden = 640;
  problem.geometry.mx.boundary = MxBoundary::kIdentity;
  return problem;
}

// Of an identity request: no parameter is a vector, and its kernels get null in
// the place of each.
//   wanted: of how many arguments
inline void ExpectNoVectors(const KernelTemplate& from,
                            const DeviceProfile& device, size_t wanted) {
  for (const Interval interval : {Interval{1, 8}, Interval{9, 33}}) {
    const Problem problem =
        MxIdentityFor(device, interval.m_min, interval.m_max);
    const std::vector<Assignment> points = AllPoints(from, problem);
    ASSERT_FALSE(points.empty());
    for (size_t i = 0; i < points.size(); i += 9) {
      ASSERT_OK_AND_ASSIGN(const PlanBody body,
                           from.MakeBody(problem, points[i]));
      std::vector<std::string> names;
      for (const ParamDecl& param : body.params) names.push_back(param.name);
      ASSERT_THAT(names,
                  ::testing::ElementsAre("x", "topk_ids", "topk_weights", "w13",
                                         "w2", "w13_scale", "w2_scale", "out"));
      size_t nulls = 0;
      for (const Step& step : body.steps) {
        for (const Arg& arg : step.args) {
          if (arg == Arg::U64(0)) ++nulls;
          if (arg.kind == ArgKind::kParam) {
            ASSERT_LT(arg.value, names.size());
          }
        }
      }
      ASSERT_EQ(nulls, wanted);
      // A coupled request of the same shape is another program.
      Problem coupled = problem;
      coupled.geometry.mx.boundary = MxBoundary::kCoupled;
      const auto text = [&](const Problem& of) {
        return from.MakeUnits(of.geometry, of.device.target, points[i])
            .front()
            .text;
      };
      ASSERT_THAT(text(problem),
                  ::testing::HasSubstr("#define KILN_COUPLED 0\n"));
      ASSERT_THAT(text(coupled),
                  ::testing::HasSubstr("#define KILN_COUPLED 1\n"));
    }
  }
}

inline void ExpectTheOtherArmIsNoCandidate(const KernelTemplate& from,
                                           const DeviceProfile& device) {
  const Problem problem = MxProblemFor(device, 9, 32);
  Assignment other = AllPoints(from, problem).front();
  other["activation_bits"] = 16;
  EXPECT_THAT(from.MakeBody(problem, other),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       ::testing::HasSubstr(
                           "activation_bits 16: the interval is that of the "
                           "grouped arm, which has 8")));
}

inline void ExpectNoCandidateOnBothSidesOfALimit(const KernelTemplate& from,
                                                 const DeviceProfile& device) {
  const ParamSpace space = from.Enumerate(MxProblemFor(device, 5, 32), 100000);
  EXPECT_THAT(space.points, ::testing::IsEmpty());
  ASSERT_EQ(space.rejects.size(), 1u);
  EXPECT_THAT(space.rejects[0].reason,
              ::testing::HasSubstr("interval 5..32 has tokens on both sides of "
                                   "smallm_max_tokens, 8"));
  const ParamSpace direct = from.Enumerate(MxDirectFor(device, 5, 32), 100000);
  EXPECT_THAT(direct.points, ::testing::IsEmpty());
  ASSERT_EQ(direct.rejects.size(), 1u);
  EXPECT_THAT(direct.rejects[0].reason,
              ::testing::HasSubstr("interval 5..32 has tokens on both sides of "
                                   "direct_max_tokens, 8"));
}

// Beyond the limit, and without a remainder up to it, candidates are those of a
// request whose every token count has the grouped arm: the same points,
// programs and launches.
inline void ExpectPlansOfTheGroupedArm(const KernelTemplate& from,
                                       const DeviceProfile& device) {
  for (const Problem& problem : {MxDirectFor(device, 9, 32),
                                 MxDirectFor(device, 9, 32, Remainder::kNone),
                                 MxDirectFor(device, 1, 8, Remainder::kNone)}) {
    Problem grouped = problem;
    grouped.geometry.mx = {.limit = "10"};
    const std::vector<Assignment> points = AllPoints(from, problem);
    ASSERT_EQ(points, AllPoints(from, grouped));
    for (size_t i = 0; i < points.size(); i += 7) {
      ASSERT_OK_AND_ASSIGN(const PlanBody body,
                           from.MakeBody(problem, points[i]));
      EXPECT_THAT(from.MakeBody(grouped, points[i]), IsOkAndHolds(body));
      const std::vector<SourceUnit> units =
          from.MakeUnits(problem.geometry, problem.device.target, points[i]);
      const std::vector<SourceUnit> same =
          from.MakeUnits(grouped.geometry, grouped.device.target, points[i]);
      ASSERT_EQ(units.size(), same.size());
      for (size_t u = 0; u < units.size(); ++u) {
        EXPECT_EQ(units[u].text, same[u].text);
      }
    }
  }
}

inline void ExpectTwoTermsUpToTheLimitAlone(const KernelTemplate& from,
                                            const DeviceProfile& device) {
  for (const Interval interval : {Interval{1, 1}, Interval{5, 8}}) {
    const Problem problem = MxDirectFor(device, interval.m_min, interval.m_max);
    EXPECT_THAT(MxArmOf(problem.geometry, interval),
                IsOkAndHolds(MxArm::kDirectRp2));
    const std::vector<Assignment> points = AllPoints(from, problem);
    ASSERT_FALSE(points.empty());
    for (const Assignment& point : points) {
      ASSERT_EQ(point.at("activation_bits"), 8);
      ASSERT_EQ(point.at("activation_terms"), 2);
      ASSERT_OK_AND_ASSIGN(const PlanBody body, from.MakeBody(problem, point));
      ASSERT_TRUE(absl::StartsWith(body.numerics_class, "mx.w4a8rp2.fold32"));
      ASSERT_EQ(body.tolerance, 4e-3);
    }
    for (const SourceUnit& unit : from.MakeUnits(
             problem.geometry, problem.device.target, points.front())) {
      EXPECT_THAT(unit.text,
                  ::testing::HasSubstr("#define KILN_ACTIVATION_TERMS 2\n"));
    }
    Assignment one_term = points.front();
    one_term.erase("activation_terms");
    EXPECT_THAT(
        from.MakeBody(problem, one_term),
        StatusIs(absl::StatusCode::kInvalidArgument,
                 ::testing::HasSubstr("axis activation_terms has no value")));
  }
  const Problem beyond = MxDirectFor(device, 9, 32);
  Assignment two_terms = AllPoints(from, beyond).front();
  EXPECT_EQ(two_terms.count("activation_terms"), 0u);
  two_terms["activation_terms"] = 2;
  EXPECT_THAT(from.MakeBody(beyond, two_terms),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       ::testing::HasSubstr("axes, expected")));
}

// One step sorts the routes, and both products read what it wrote.
inline void ExpectBothProductsReadOneRouteMap(
    const KernelTemplate& from, const Problem& problem,
    const std::vector<const char*>& map) {
  const std::vector<Assignment> points = AllPoints(from, problem);
  ASSERT_FALSE(points.empty());
  for (size_t i = 0; i < points.size(); i += 7) {
    ASSERT_OK_AND_ASSIGN(const PlanBody body,
                         from.MakeBody(problem, points[i]));
    const auto reads = [&body](const Step& step, const char* slice) {
      return std::any_of(step.args.begin(), step.args.end(),
                         [&](const Arg& arg) {
                           return arg.kind == ArgKind::kArena &&
                                  body.arena.slices[arg.value].name == slice;
                         });
    };
    int sorts = 0;
    int products = 0;
    for (const Step& step : body.steps) {
      sorts += step.label == "route" ? 1 : 0;
      const bool product = step.label == "fc1" || step.label == "fc2";
      products += product ? 1 : 0;
      if (!product && step.label != "route") continue;
      for (const char* slice : map) {
        EXPECT_TRUE(reads(step, slice)) << step.label << " " << slice;
      }
    }
    EXPECT_EQ(sorts, 1);
    EXPECT_EQ(products, 2);
  }
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_MX_ARM_CHECKS_H_
