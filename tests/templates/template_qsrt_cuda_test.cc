#include "templates/fused_moe/template_qsrt_cuda.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
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
using testing::SliceBytes;
using testing::StatusIs;

Problem ProblemFor(uint32_t m_min, uint32_t m_max, bool shared = true,
                   int level = 90) {
  Problem problem;
  RequestGeometry& g = problem.geometry;
  g.hidden = 1152;
  g.intermediate = 256;
  g.experts = 16;
  g.top_k = 4;
  g.weights.format = WeightFormat::kQsrt;
  g.weights.shared_scales = shared;
  g.recipe = Recipe::kW4A8;
  g.qsrt = {.pairs = PairKinds::kP24P33, .decode_max_tokens = 8};
  problem.interval = {m_min, m_max};
  problem.device = AssumedProfile(
      {.backend = Backend::kCuda, .level = level, .arch_specific = true});
  return problem;
}

ParamSpace SpaceOf(const Problem& problem) {
  return FusedMoeQsrtCudaTemplate()->Enumerate(problem, 100000);
}

PlanBody BodyOf(const Problem& problem, const Assignment& point) {
  absl::StatusOr<PlanBody> body =
      FusedMoeQsrtCudaTemplate()->MakeBody(problem, point);
  EXPECT_OK(body.status());
  return body.ok() ? *std::move(body) : PlanBody();
}

std::vector<SourceUnit> UnitsOf(const Problem& problem) {
  return FusedMoeQsrtCudaTemplate()->MakeUnits(
      problem.geometry, problem.device.target, SpaceOf(problem).points.front());
}

std::vector<std::string> Labels(const PlanBody& body) {
  std::vector<std::string> labels;
  for (const Step& step : body.steps) labels.push_back(step.label);
  return labels;
}

// The grid of a step for m tokens.
uint64_t Grid(const PlanBody& body, const std::string& label, size_t dim,
              uint32_t m) {
  return testing::StepNamed(body, label).grid[dim].Evaluate(m);
}

// A few of many, the first among them.
std::vector<Assignment> SomeOf(const std::vector<Assignment>& points) {
  std::vector<Assignment> some;
  for (size_t i = 0; i < points.size(); i += 7) some.push_back(points[i]);
  return some;
}

TEST(FusedMoeQsrtCudaTemplateTest, IsTheOneForItsFormat) {
  EXPECT_EQ(FindTemplate("fused_moe.qsrt_cuda"), FusedMoeQsrtCudaTemplate());
  const RequestGeometry geometry = ProblemFor(1, 1).geometry;
  EXPECT_THAT(TemplatesFor(geometry, Backend::kCuda),
              ElementsAre(FusedMoeQsrtCudaTemplate()));
}

TEST(FusedMoeQsrtCudaTemplateTest, ServesItsFormatOnSm80AndLater) {
  const RequestGeometry geometry = ProblemFor(1, 8).geometry;
  for (const int level : {80, 86, 89, 90, 100, 120}) {
    EXPECT_OK(FusedMoeQsrtCudaTemplate()->Supports(
        geometry, {.backend = Backend::kCuda, .level = level}));
  }
  RequestGeometry exl3 = geometry;
  exl3.weights.format = WeightFormat::kExl3;
  EXPECT_THAT(FusedMoeQsrtCudaTemplate()->Supports(
                  exl3, {.backend = Backend::kCuda, .level = 90}),
              StatusIs(absl::StatusCode::kUnimplemented));
  for (const Target target :
       {Target{Backend::kCuda, 75, false}, Target{Backend::kCpu, 4, false}}) {
    EXPECT_THAT(FusedMoeQsrtCudaTemplate()->Supports(geometry, target),
                StatusIs(absl::StatusCode::kUnimplemented,
                         HasSubstr(target.ToString())));
  }
}

TEST(FusedMoeQsrtCudaTemplateTest, FewTokensHaveEightBitsAndMoreHaveSixteen) {
  const struct {
    Interval interval;
    int64_t bits;
    const char* numerics;
    double tolerance;
    const char* dtype;
  } cases[] = {{{1, 1}, 8, "qsrt.w4a8.mma.", 2e-2, "bf16"},
               {{5, 8}, 8, "qsrt.w4a8.mma.", 2e-2, "bf16"},
               {{9, 32}, 16, "qsrt.w4a16.mma.", 2e-3, "f16"}};

  for (const auto& c : cases) {
    const Problem problem = ProblemFor(c.interval.m_min, c.interval.m_max);
    const ParamSpace space = SpaceOf(problem);
    ASSERT_FALSE(space.points.empty());
    for (const Assignment& point : space.points) {
      ASSERT_EQ(point.at("activation_bits"), c.bits);
      const PlanBody body = BodyOf(problem, point);
      ASSERT_TRUE(absl::StartsWith(body.numerics_class, c.numerics))
          << body.numerics_class;
      ASSERT_EQ(body.tolerance, c.tolerance);
    }
    for (const SourceUnit& unit : UnitsOf(problem)) {
      EXPECT_EQ(unit.compute_dtype, c.dtype);
      EXPECT_THAT(unit.text,
                  HasSubstr(absl::StrCat("#define KILN_ACTIVATION_BITS ",
                                         c.bits, "\n")));
    }
  }
}

TEST(FusedMoeQsrtCudaTemplateTest, RecipeW4a16HasSixteenBitsForOneToken) {
  Problem problem = ProblemFor(1, 1);
  problem.geometry.recipe = Recipe::kW4A16;
  problem.geometry.qsrt.decode_max_tokens = 0;
  for (const Assignment& point : SpaceOf(problem).points) {
    ASSERT_EQ(point.at("activation_bits"), 16);
  }
}

TEST(FusedMoeQsrtCudaTemplateTest, TheOtherArmIsNoCandidate) {
  const Problem problem = ProblemFor(9, 32);
  Assignment other = SpaceOf(problem).points.front();
  other["activation_bits"] = 8;
  EXPECT_THAT(FusedMoeQsrtCudaTemplate()->MakeBody(problem, other),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("activation_bits 8: the interval is that of "
                                 "the w4a16 arm, which has 16")));
}

TEST(FusedMoeQsrtCudaTemplateTest,
     AnIntervalOnBothSidesOfTheLimitHasNoCandidate) {
  const ParamSpace space = SpaceOf(ProblemFor(5, 32));
  EXPECT_THAT(space.points, IsEmpty());
  ASSERT_EQ(space.rejects.size(), 1u);
  EXPECT_THAT(space.rejects[0].reason,
              HasSubstr("interval 5..32 has tokens on both sides of "
                        "decode_max_tokens, 8"));
}

TEST(FusedMoeQsrtCudaTemplateTest, TheNumericsClassIsTheOrderOfSums) {
  const Problem problem = ProblemFor(9, 32);
  testing::ExpectClassesAreSplits(*FusedMoeQsrtCudaTemplate(), problem,
                                  SpaceOf(problem).points);
}

TEST(FusedMoeQsrtCudaTemplateTest, StepsCoverEveryRowChannelAndRoute) {
  for (const bool shared : {true, false}) {
    for (const Interval interval : {Interval{1, 8}, Interval{9, 33}}) {
      const Problem problem =
          ProblemFor(interval.m_min, interval.m_max, shared);
      for (const Assignment& point : SomeOf(SpaceOf(problem).points)) {
        const PlanBody body = BodyOf(problem, point);
        SCOPED_TRACE(body.Label());
        const auto channels = static_cast<uint64_t>(point.at("channels_tile"));
        const auto tile = static_cast<uint32_t>(point.at("tokens_tile"));
        std::vector<std::string> labels = {"route",    "rotate", "fc1",
                                           "activate", "fc2",    "combine"};
        if (shared) labels.erase(labels.begin() + 1);
        if (point.at("codewords") == 1) labels.insert(labels.begin(), "table");
        ASSERT_EQ(Labels(body), labels);
        for (uint32_t m = interval.m_min; m <= interval.m_max; ++m) {
          const uint64_t tiles = FusedMoeTilesMax(problem.geometry, tile, m);
          if (point.at("codewords") == 1) {
            // A thread for each state of K2, K3 and K4.
            ASSERT_EQ(Grid(body, "table", 0, m) * 1024, 65536u);
            ASSERT_EQ(Grid(body, "table", 1, m), 3u);
          }
          // A block that sorts. Rotating: 9 blocks of 128 channels of each
          // token, or of each route, a warp for each; 32 or 4 warps a block.
          ASSERT_EQ(Grid(body, "route", 0, m),
                    1 + (shared ? (m * 9 + 31) / 32 : 0));
          if (!shared) {
            ASSERT_EQ(Grid(body, "rotate", 0, m), m * 4 * 9 / 4);
          }
          ASSERT_GE(Grid(body, "fc1", 0, m) * channels, tiles * 512);
          ASSERT_EQ(Grid(body, "fc1", 1, m),
                    static_cast<uint64_t>(point.at("split_fc1")));
          // Two records of each route.
          ASSERT_EQ(Grid(body, "activate", 0, m), m * 4 * 2 / 4);
          ASSERT_GE(Grid(body, "fc2", 0, m) * channels, tiles * 1152);
          ASSERT_EQ(Grid(body, "fc2", 1, m),
                    static_cast<uint64_t>(point.at("split_fc2")));
          ASSERT_EQ(Grid(body, "combine", 0, m), (m * 9 + 3) / 4);
        }
      }
    }
  }
}

TEST(FusedMoeQsrtCudaTemplateTest, SlicesHoldWhatTheReadmeLists) {
  for (const bool shared : {true, false}) {
    for (const Interval interval : {Interval{1, 8}, Interval{9, 33}}) {
      const Problem problem =
          ProblemFor(interval.m_min, interval.m_max, shared);
      const uint64_t m = interval.m_max;
      const uint64_t routes = m * 4;
      for (const Assignment& point : SomeOf(SpaceOf(problem).points)) {
        const PlanBody body = BodyOf(problem, point);
        SCOPED_TRACE(body.Label());
        const auto tile = static_cast<uint32_t>(point.at("tokens_tile"));
        const auto s1 = static_cast<uint64_t>(point.at("split_fc1"));
        const auto s2 = static_cast<uint64_t>(point.at("split_fc2"));
        ASSERT_EQ(SliceBytes(body, "tiles"),
                  16 * FusedMoeTilesMax(problem.geometry, tile,
                                        static_cast<uint32_t>(m)));
        ASSERT_EQ(SliceBytes(body, "rows"), 8 * routes);
        ASSERT_EQ(SliceBytes(body, "positions"), 4 * routes);
        ASSERT_EQ(SliceBytes(body, "places"), 2 * 4 * 16u);
        const uint64_t operand = 2 * 1152 * (shared ? m : routes);
        ASSERT_EQ(SliceBytes(body, "gate_operand"), operand);
        ASSERT_EQ(SliceBytes(body, "up_operand"), operand);
        ASSERT_EQ(SliceBytes(body, "mid_operand"), 2 * 256 * routes);
        if (point.at("codewords") == 1) {
          ASSERT_EQ(SliceBytes(body, "codewords"), 3 * 65536u);
        }
        ASSERT_EQ(SliceBytes(body, "fc1"),
                  s1 == 1 ? 2 * 512 * routes : 4 * 512 * s1 * routes);
        ASSERT_EQ(SliceBytes(body, "fc2"),
                  s2 == 1 ? 2 * 1152 * routes : 4 * 1152 * s2 * routes);
      }
    }
  }
}

TEST(FusedMoeQsrtCudaTemplateTest, LegalPointsKeepTheRulesOfTheReadme) {
  for (const int level : {80, 89, 90, 100, 120}) {
    for (const Interval interval : {Interval{1, 8}, Interval{9, 64}}) {
      const Problem problem =
          ProblemFor(interval.m_min, interval.m_max, true, level);
      const std::vector<Assignment> points = SpaceOf(problem).points;
      ASSERT_FALSE(points.empty()) << level;
      for (const Assignment& point : points) {
        const int64_t channels = point.at("channels_tile");
        const int64_t warps = point.at("warps");
        const int64_t tile = point.at("tokens_tile");
        const int64_t k_tile = point.at("k_tile");
        // Of one record, and of the hidden side.
        ASSERT_EQ(128 % channels, 0);
        ASSERT_EQ(1152 % channels, 0);
        ASSERT_GE(channels, 16 * warps);
        ASSERT_LE(channels / 16 / warps * tile / 8 * 4, 128);
        ASSERT_LE(point.at("split_fc1"), 1152 / 128);
        ASSERT_LE(point.at("split_fc2"), 2);
        for (const Step& step : BodyOf(problem, point).steps) {
          if (step.label != "fc1" && step.label != "fc2") continue;
          const bool by_state =
              step.label == "fc1" && point.at("codewords") == 1;
          const int64_t row =
              point.at("operand_codes") == 1 ? 128 + 16 : (k_tile + 8) * 2;
          ASSERT_EQ(
              step.dynamic_shared_bytes,
              (by_state ? 65536 : 8192) +
                  point.at("stages") * (k_tile * channels / 2 + tile * row));
          ASSERT_LE(step.dynamic_shared_bytes, problem.device.shared_bytes_max);
          ASSERT_EQ(step.block[0], static_cast<uint32_t>(32 * warps));
        }
      }
    }
  }
}

TEST(FusedMoeQsrtCudaTemplateTest, SlicesOfFc1AreAtMostItsBlocks) {
  Problem problem = ProblemFor(9, 32);
  problem.geometry.hidden = 256;
  for (const Assignment& point : SpaceOf(problem).points) {
    ASSERT_LE(point.at("split_fc1"), 2);
  }
}

TEST(FusedMoeQsrtCudaTemplateTest, StepsNameEntriesOfTheirProgram) {
  for (const bool shared : {true, false}) {
    const Problem problem = ProblemFor(9, 32, shared);
    ASSERT_OK_AND_ASSIGN(const Candidate candidate,
                         FusedMoeQsrtCudaTemplate()->Instantiate(
                             problem, SpaceOf(problem).points.front()));
    // Of the support program that candidates with the table share.
    testing::ExpectProgramsOfSteps(candidate,
                                   {"kiln_qsrt_count", "kiln_qsrt_table"});
    for (const SourceUnit& unit : candidate.units) {
      EXPECT_THAT(unit.text, HasSubstr("#define KILN_OTHER_LOW 2\n"));
      EXPECT_THAT(unit.text, HasSubstr("#define KILN_OTHER_HIGH 4\n"));
      EXPECT_THAT(unit.text, HasSubstr(absl::StrCat("#define KILN_SHARED_SUH ",
                                                    shared ? 1 : 0, "\n")));
      std::set<std::string> names;
      for (const auto& [name, text] : unit.headers) names.insert(name);
      for (const char* header :
           {"cuda/grouped.h", "cuda/ring.h", "cuda/warp.h", "device/fragment.h",
            "fused_moe/mx_block.h", "fused_moe/mx_warp.h", "fused_moe/situ.h",
            "fused_moe/sqg_fragment.h", "fused_moe/sqg_table.h"}) {
        EXPECT_EQ(names.count(header), 1u) << header;
      }
    }
  }
}

// Whether a step has a slice of the arena among its arguments.
bool Reads(const PlanBody& body, const std::string& label,
           const std::string& slice) {
  for (const Step& step : body.steps) {
    if (step.label != label) continue;
    return std::any_of(step.args.begin(), step.args.end(), [&](const Arg& arg) {
      return arg.kind == ArgKind::kArena &&
             body.arena.slices[arg.value].name == slice;
    });
  }
  return false;
}

TEST(FusedMoeQsrtCudaTemplateTest, NoWeightsAreDecodedIntoTheArena) {
  testing::ExpectQsrtArenaHoldsNoWeights(*FusedMoeQsrtCudaTemplate(),
                                         ProblemFor(1, 1), 128);
}

TEST(FusedMoeQsrtCudaTemplateTest, BothProductsReadOneRouteMap) {
  const Problem problem = ProblemFor(9, 32);
  for (const Assignment& point : SomeOf(SpaceOf(problem).points)) {
    const PlanBody body = BodyOf(problem, point);
    for (const char* slice : {"tiles", "totals", "places"}) {
      for (const char* label : {"route", "fc1", "fc2"}) {
        ASSERT_TRUE(Reads(body, label, slice)) << label << " " << slice;
      }
    }
  }
}

TEST(FusedMoeQsrtCudaTemplateTest, ATableIsMadeWhereACandidateReadsIt) {
  std::map<int64_t, size_t> tables;  // by arm
  for (const Interval interval : {Interval{1, 8}, Interval{9, 32}}) {
    const Problem problem = ProblemFor(interval.m_min, interval.m_max);
    for (const Assignment& point : SpaceOf(problem).points) {
      const bool by_state = point.at("codewords") == 1;
      tables[point.at("activation_bits")] += by_state ? 1 : 0;
      const PlanBody body = BodyOf(problem, point);
      ASSERT_EQ(body.steps.front().label == "table", by_state);
      ASSERT_EQ(Reads(body, "table", "codewords"), by_state);
      ASSERT_EQ(Reads(body, "fc1", "codewords"), by_state);
      ASSERT_FALSE(Reads(body, "fc2", "codewords"));
    }
  }
  EXPECT_GT(tables[8], 0u);
  EXPECT_GT(tables[16], 0u);
  // P33 and P43 have no K2.
  Problem problem = ProblemFor(9, 32);
  problem.geometry.qsrt.pairs = PairKinds::kP33P43;
  for (const Assignment& point : SpaceOf(problem).points) {
    if (point.at("codewords") == 0) continue;
    const PlanBody body = BodyOf(problem, point);
    ASSERT_EQ(Grid(body, "table", 1, 9), 2u);
    ASSERT_EQ(SliceBytes(body, "codewords"), 2 * 65536u);
  }
}

// The cost of the two ways to decode has not been measured: a race of a few has
// both.
TEST(FusedMoeQsrtCudaTemplateTest, AShortPrefixHasBothWaysToDecode) {
  for (const uint32_t m : {8u, 9u, 64u, 4096u}) {
    const ParamSpace all = SpaceOf(ProblemFor(m, m));
    std::set<std::string> points;
    for (const Assignment& point : all.points) {
      points.insert(AssignmentText(point));
    }
    EXPECT_EQ(points.size(), all.legal);
    const ParamSpace few =
        FusedMoeQsrtCudaTemplate()->Enumerate(ProblemFor(m, m), 4);
    ASSERT_EQ(few.points.size(), 4u);
    EXPECT_EQ(few.legal, all.legal);
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(AssignmentText(few.points[i]), AssignmentText(all.points[i]));
      EXPECT_NE(few.points[i].at("codewords"),
                few.points[i ^ 1].at("codewords"));
    }
  }
}

// ---- codes -----------------------------------------------------------------

Problem CodesProblem(const Target& target, bool shared = true) {
  Problem problem = ProblemFor(1, 8, shared);
  problem.device = AssumedProfile(target);
  return problem;
}

TEST(FusedMoeQsrtCudaTemplateTest, OtherTensorCoresGetNoCodes) {
  for (const Target target :
       {Target{Backend::kCuda, 80, false}, Target{Backend::kCuda, 86, false},
        Target{Backend::kCuda, 90, true}, Target{Backend::kCuda, 100, true}}) {
    const Problem problem = CodesProblem(target);
    const ParamSpace space = SpaceOf(problem);
    ASSERT_FALSE(space.points.empty());
    for (const Assignment& point : space.points) {
      ASSERT_EQ(point.at("operand_codes"), 0);
    }
    Assignment bad = space.points.front();
    bad["operand_codes"] = 1;
    EXPECT_THAT(FusedMoeQsrtCudaTemplate()->MakeBody(problem, bad),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr(absl::StrCat("the tensor cores of ",
                                                target.ToString(),
                                                " do not multiply E4M3"))));
  }
}

TEST(FusedMoeQsrtCudaTemplateTest, WithCodesAndWithoutCompete) {
  const struct {
    Target target;
    const char* numerics;
    const char* macro;
  } cases[] = {{{Backend::kCuda, 89, false},
                "qsrt.w4a8.qmma.fold32.fc1x",
                "#define KILN_BLOCK_SCALED 0\n"},
               {{Backend::kCuda, 120, false},
                "qsrt.w4a8.qmma.fold32.fc1x",
                "#define KILN_BLOCK_SCALED 0\n"},
               {{Backend::kCuda, 120, true},
                "qsrt.w4a8.qmma.scaled64.fc1x",
                "#define KILN_BLOCK_SCALED 1\n"}};

  for (const auto& c : cases) {
    const Problem problem = CodesProblem(c.target);
    SCOPED_TRACE(c.target.ToString());
    const std::vector<Assignment> few =
        FusedMoeQsrtCudaTemplate()->Enumerate(problem, 6).points;
    ASSERT_EQ(few.size(), 6u);
    // Codes, and numbers by rank and by state, in turn.
    for (size_t first : {0u, 3u}) {
      std::set<std::pair<int64_t, int64_t>> ways;
      for (size_t i = first; i < first + 3; ++i) {
        ways.insert({few[i].at("operand_codes"), few[i].at("codewords")});
      }
      EXPECT_EQ(ways.size(), 3u);
    }
    for (const Assignment& point : SpaceOf(problem).points) {
      const PlanBody body = BodyOf(problem, point);
      if (point.at("operand_codes") == 0) {
        ASSERT_TRUE(absl::StartsWith(body.numerics_class, "qsrt.w4a8.mma."));
        continue;
      }
      SCOPED_TRACE(body.Label());
      ASSERT_TRUE(absl::StartsWith(body.numerics_class, c.numerics))
          << body.numerics_class;
      ASSERT_EQ(body.tolerance, 2e-2);
      ASSERT_EQ(point.at("k_tile"), 128);
      const int64_t strips = point.at("channels_tile") / 16 / point.at("warps");
      ASSERT_LE(strips * (point.at("tokens_tile") / 8 * 4 + 20), 144);
      const std::vector<SourceUnit> units =
          FusedMoeQsrtCudaTemplate()->MakeUnits(problem.geometry, c.target,
                                                point);
      ASSERT_THAT(units[1].text, HasSubstr(c.macro));
      for (const SourceUnit& unit : units) {
        ASSERT_EQ(unit.compute_dtype, "e4m3");
        ASSERT_THAT(unit.text, HasSubstr("#define KILN_OPERAND_CODES 1\n"));
      }
    }
  }
}

TEST(FusedMoeQsrtCudaTemplateTest, ARowOfCodesHasItsScalesBehindIt) {
  for (const bool shared : {true, false}) {
    const Problem problem = CodesProblem({Backend::kCuda, 89, false}, shared);
    for (const Assignment& point : SomeOf(SpaceOf(problem).points)) {
      if (point.at("operand_codes") == 0) continue;
      const PlanBody body = BodyOf(problem, point);
      // 36 scales and 8, in whole pieces of 16 bytes.
      const uint64_t operand = (1152 + 48) * 8 * (shared ? 1 : 4);
      ASSERT_EQ(SliceBytes(body, "gate_operand"), operand);
      ASSERT_EQ(SliceBytes(body, "up_operand"), operand);
      ASSERT_EQ(SliceBytes(body, "mid_operand"), (256 + 16) * 8 * 4u);
    }
  }
}

TEST(FusedMoeQsrtCudaTemplateTest, CodesBelongToTheArmOfEightBits) {
  Problem problem = ProblemFor(9, 32);
  problem.device = AssumedProfile({Backend::kCuda, 89, false});
  Assignment bad = SpaceOf(problem).points.front();
  ASSERT_EQ(bad.at("operand_codes"), 0);
  bad["operand_codes"] = 1;
  bad["codewords"] = 0;
  EXPECT_THAT(FusedMoeQsrtCudaTemplate()->MakeBody(problem, bad),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("operand_codes 1 is of the w4a8 arm")));
}

// ---- programs --------------------------------------------------------------

TEST(FusedMoeQsrtCudaTemplateTest, AProgramHasTheActivationOfItsRequest) {
  Problem problem = ProblemFor(9, 32);

  const struct {
    Activation activation;
    const char* text;
  } cases[] = {{Activation::kSilu, "#define KILN_ACTIVATION 0\n"},
               {Activation::kSitu, "#define KILN_ACTIVATION 1\n"},
               {Activation::kPerExpert, "#define KILN_ACTIVATION 2\n"}};

  for (const auto& c : cases) {
    problem.geometry.activation = c.activation;
    EXPECT_THAT(UnitsOf(problem).front().text, HasSubstr(c.text));
    const PlanBody body = BodyOf(problem, SpaceOf(problem).points.front());
    // The slot of the numbers is an argument where there is one.
    const Arg slot = QsrtArg(QsrtParam::kActivations);
    size_t users = 0;
    for (const Step& step : body.steps) {
      users += static_cast<size_t>(std::count_if(
          step.args.begin(), step.args.end(), [&](const Arg& arg) {
            return arg.kind == slot.kind && arg.value == slot.value;
          }));
    }
    EXPECT_EQ(users, c.activation == Activation::kPerExpert ? 1u : 0u);
  }
}

// Routing and what surrounds the products do not depend on the axes: all
// candidates of an arm share that program.
TEST(FusedMoeQsrtCudaTemplateTest, CandidatesShareTheSupportProgram) {
  const Problem problem = ProblemFor(9, 32);
  std::set<std::string> support;
  std::map<std::string, std::set<std::string>> products;
  for (const Assignment& point : SpaceOf(problem).points) {
    const std::vector<SourceUnit> units = FusedMoeQsrtCudaTemplate()->MakeUnits(
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

TEST(FusedMoeQsrtCudaTemplateTest, RefusesPointsThatBreakARule) {
  const Problem problem = ProblemFor(9, 32);
  Assignment bad = SpaceOf(problem).points.front();
  bad["channels_tile"] = 256;  // two records
  EXPECT_THAT(FusedMoeQsrtCudaTemplate()->MakeBody(problem, bad),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("channels_tile is 256, must be one of")));
  bad = SpaceOf(ProblemFor(1, 8)).points.front();
  bad["codewords"] = 1;
  bad["operand_codes"] = 1;
  EXPECT_THAT(FusedMoeQsrtCudaTemplate()->MakeBody(ProblemFor(1, 8), bad),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("codewords 1 is a table of numbers")));
  bad = SpaceOf(problem).points.front();
  bad["channels_tile"] = 64;
  bad["warps"] = 8;
  EXPECT_THAT(FusedMoeQsrtCudaTemplate()->MakeBody(problem, bad),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("channels_tile 64 gives 8 warps less than "
                                 "one tile")));
}

}  // namespace
}  // namespace kiln
