#include "templates/fused_moe/template_mx_cuda.h"

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/op_mx.h"
#include "templates/fused_moe/template_mx_qmma.h"
#include "templates/registry.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/mx_arm_checks.h"
#include "tests/templates/plan_parts.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using ::testing::ElementsAre;
using testing::ExpectProgramsOfSteps;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::IsOkAndHolds;
using testing::SliceBytes;
using testing::StatusIs;

DeviceProfile Device(int level = 90) {
  return AssumedProfile(
      {.backend = Backend::kCuda, .level = level, .arch_specific = true});
}

Problem ProblemFor(uint32_t m_min, uint32_t m_max, int level = 90) {
  return testing::MxProblemFor(Device(level), m_min, m_max);
}

Problem DirectFor(uint32_t m_min, uint32_t m_max) {
  return testing::MxDirectFor(Device(), m_min, m_max);
}

ParamSpace SpaceOf(const Problem& problem) {
  return FusedMoeMxCudaTemplate()->Enumerate(problem, 100000);
}

PlanBody BodyOf(const Problem& problem, const Assignment& point) {
  absl::StatusOr<PlanBody> body =
      FusedMoeMxCudaTemplate()->MakeBody(problem, point);
  EXPECT_OK(body.status());
  return body.ok() ? *std::move(body) : PlanBody();
}

TEST(FusedMoeMxCudaTemplateTest, IsOneOfItsFormat) {
  EXPECT_EQ(FindTemplate("fused_moe.mx_cuda"), FusedMoeMxCudaTemplate());
  const RequestGeometry geometry = ProblemFor(1, 1).geometry;
  EXPECT_THAT(TemplatesFor(geometry, Backend::kCuda),
              ElementsAre(FusedMoeMxCudaTemplate(), FusedMoeMxQmmaTemplate()));
}

TEST(FusedMoeMxCudaTemplateTest, ServesItsFormatOnSm80AndLater) {
  const RequestGeometry geometry = ProblemFor(1, 8).geometry;
  for (const int level : {80, 86, 89, 90, 100, 120}) {
    EXPECT_OK(FusedMoeMxCudaTemplate()->Supports(
        geometry, {.backend = Backend::kCuda, .level = level}));
  }
  RequestGeometry exl3 = geometry;
  exl3.weights.format = WeightFormat::kExl3;
  EXPECT_THAT(FusedMoeMxCudaTemplate()->Supports(
                  exl3, {.backend = Backend::kCuda, .level = 90}),
              StatusIs(absl::StatusCode::kUnimplemented));
  for (const Target target :
       {Target{Backend::kCuda, 75, false}, Target{Backend::kCpu, 4, false}}) {
    EXPECT_THAT(FusedMoeMxCudaTemplate()->Supports(geometry, target),
                StatusIs(absl::StatusCode::kUnimplemented,
                         HasSubstr(target.ToString())));
  }
}

TEST(FusedMoeMxCudaTemplateTest, AnIntervalHasTheCandidatesOfItsArmAlone) {
  const struct {
    Interval interval;
    int64_t bits;
    const char* numerics;
    double tolerance;
  } cases[] = {{{1, 1}, 16, "mx.w4a16.fold32.mma.", 2e-3},
               {{5, 8}, 16, "mx.w4a16.fold32.mma.", 2e-3},
               {{9, 32}, 8, "mx.w4a8.fold32.mma.", 1e-2}};

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
  }
}

TEST(FusedMoeMxCudaTemplateTest, TheOtherArmIsNoCandidate) {
  testing::ExpectTheOtherArmIsNoCandidate(*FusedMoeMxCudaTemplate(), Device());
}

TEST(FusedMoeMxCudaTemplateTest,
     AnIntervalOnBothSidesOfTheLimitHasNoCandidate) {
  testing::ExpectNoCandidateOnBothSidesOfALimit(*FusedMoeMxCudaTemplate(),
                                                Device());
}

TEST(FusedMoeMxCudaTemplateTest,
     WithoutARemainderPlansAreThoseOfTheGroupedArm) {
  testing::ExpectPlansOfTheGroupedArm(*FusedMoeMxCudaTemplate(), Device());
}

TEST(FusedMoeMxCudaTemplateTest, ARemainderIsTwoTermsUpToTheLimitAlone) {
  testing::ExpectTwoTermsUpToTheLimitAlone(*FusedMoeMxCudaTemplate(), Device());
}

TEST(FusedMoeMxCudaTemplateTest, TheNumericsClassIsTheOrderOfSums) {
  for (const Problem& problem : {ProblemFor(9, 32), DirectFor(1, 8)}) {
    testing::ExpectClassesAreSplits(*FusedMoeMxCudaTemplate(), problem,
                                    SpaceOf(problem).points);
  }
}

// A tile of T columns has T / 2 rows of two terms.
TEST(FusedMoeMxCudaTemplateTest, TilesOfTwoTermsHaveHalfTheRows) {
  for (const Interval interval : {Interval{1, 1}, Interval{2, 8}}) {
    const Problem problem = DirectFor(interval.m_min, interval.m_max);
    const uint64_t routes = interval.m_max * 4;
    const std::vector<Assignment> points = SpaceOf(problem).points;
    std::set<int64_t> tiles_seen;
    for (const Assignment& point : points) {
      const PlanBody body = BodyOf(problem, point);
      SCOPED_TRACE(body.Label());
      const auto channels = static_cast<uint64_t>(point.at("channels_tile"));
      const int64_t columns = point.at("tokens_tile");
      const auto rows = static_cast<uint32_t>(columns / 2);
      tiles_seen.insert(columns);
      for (uint32_t m = interval.m_min; m <= interval.m_max; ++m) {
        const uint64_t tiles = FusedMoeTilesMax(problem.geometry, rows, m);
        ASSERT_GE(body.steps[1].grid[0].Evaluate(m) * channels,
                  tiles * 2 * 384);
        ASSERT_GE(body.steps[3].grid[0].Evaluate(m) * channels, tiles * 1024);
      }
      EXPECT_EQ(body.steps[0].args.back(), Arg::U32(rows));
      EXPECT_EQ(SliceBytes(body, "tiles"),
                16 * FusedMoeTilesMax(problem.geometry, rows, interval.m_max));
      EXPECT_EQ(SliceBytes(body, "x_values"), 2 * 2 * 1024 * interval.m_max);
      EXPECT_EQ(SliceBytes(body, "x_scales"), 2 * 4 * 32 * interval.m_max);
      EXPECT_EQ(SliceBytes(body, "mid_values"), 2 * 2 * 384 * routes);
      EXPECT_EQ(SliceBytes(body, "mid_scales"), 2 * 4 * 12 * routes);
      // Results are those of rows, whatever their terms.
      const auto s2 = static_cast<uint64_t>(point.at("split_fc2"));
      EXPECT_EQ(SliceBytes(body, "fc2"),
                s2 == 1 ? 2 * 1024 * routes : 4 * 1024 * s2 * routes);
      const int64_t k_tile = point.at("k_tile");
      EXPECT_EQ(body.steps[1].dynamic_shared_bytes,
                point.at("stages") *
                    (k_tile * point.at("channels_tile") * 3 / 8 +
                     point.at("channels_tile") * 4 +
                     columns * ((k_tile + 8) * 2 + k_tile / 32 * 4)));
    }
    // All of them race.
    EXPECT_EQ(tiles_seen, (std::set<int64_t>{8, 16, 32, 48, 64, 96, 128}));
  }
}

TEST(FusedMoeMxCudaTemplateTest, AnIdentityRequestHasNoVectors) {
  // And one for the counts of routes, which are sorted by one block.
  testing::ExpectNoVectors(*FusedMoeMxCudaTemplate(), Device(), 4);
}

// Without H512 every warp of route and combine has 128 channels of its own.
TEST(FusedMoeMxCudaTemplateTest, StepsOfAnIdentityRequestCoverItsChannels) {
  for (const Interval interval : {Interval{1, 8}, Interval{9, 33}}) {
    const Problem problem =
        testing::MxIdentityFor(Device(), interval.m_min, interval.m_max);
    const std::vector<Assignment> points = SpaceOf(problem).points;
    for (size_t i = 0; i < points.size(); i += 5) {
      const PlanBody body = BodyOf(problem, points[i]);
      SCOPED_TRACE(body.Label());
      ASSERT_EQ(640 % points[i].at("channels_tile"), 0);
      for (uint32_t m = interval.m_min; m <= interval.m_max; ++m) {
        ASSERT_EQ(body.steps[0].grid[0].Evaluate(m), 1 + (m * 5 + 31) / 32);
        ASSERT_EQ(body.steps[4].grid[0].Evaluate(m), (m * 5 + 3) / 4);
      }
    }
  }
}

// 32 channels are an atom of a sidecar, and no tile.
TEST(FusedMoeMxCudaTemplateTest, ChannelsThatNoTileDividesHaveNoCandidate) {
  Problem problem = testing::MxIdentityFor(Device(), 9, 33);
  problem.geometry.intermediate = 160;
  const ParamSpace space = SpaceOf(problem);
  EXPECT_THAT(space.points, IsEmpty());
  const auto tiles = [](const auto& reject) {
    return absl::StrContains(reject.reason,
                             "does not divide intermediate 160 and hidden 640");
  };
  EXPECT_EQ(std::count_if(space.rejects.begin(), space.rejects.end(), tiles),
            3);  // each of 64, 128 and 256
}

TEST(FusedMoeMxCudaTemplateTest, StepsCoverEveryRowChannelAndRoute) {
  for (const Interval interval : {Interval{1, 8}, Interval{9, 33}}) {
    const Problem problem = ProblemFor(interval.m_min, interval.m_max);
    const std::vector<Assignment> points = SpaceOf(problem).points;
    for (size_t i = 0; i < points.size(); i += 5) {
      const Assignment& point = points[i];
      const PlanBody body = BodyOf(problem, point);
      SCOPED_TRACE(body.Label());
      const auto channels = static_cast<uint64_t>(point.at("channels_tile"));
      const auto tile = static_cast<uint32_t>(point.at("tokens_tile"));
      ASSERT_EQ(body.steps.size(), 5u);
      for (uint32_t m = interval.m_min; m <= interval.m_max; ++m) {
        const auto grid = [&](size_t step, size_t dim) {
          return body.steps[step].grid[dim].Evaluate(m);
        };
        const uint64_t tiles = FusedMoeTilesMax(problem.geometry, tile, m);
        // A block that sorts, then 32 chunks of 512 channels per block.
        ASSERT_EQ(grid(0, 0), 1 + (m * 2 + 31) / 32);
        ASSERT_GE(grid(1, 0) * channels, tiles * 2 * 384);
        ASSERT_EQ(grid(1, 1), static_cast<uint64_t>(point.at("split_fc1")));
        ASSERT_EQ(grid(2, 0), m * 4 * 3 / 4);  // four 128 blocks each
        ASSERT_GE(grid(3, 0) * channels, tiles * 1024);
        ASSERT_EQ(grid(3, 1), static_cast<uint64_t>(point.at("split_fc2")));
        ASSERT_EQ(grid(4, 0), m * 2);
      }
    }
  }
}

TEST(FusedMoeMxCudaTemplateTest, SlicesHoldWhatTheReadmeLists) {
  for (const Interval interval : {Interval{1, 8}, Interval{9, 33}}) {
    const Problem problem = ProblemFor(interval.m_min, interval.m_max);
    const uint64_t m = interval.m_max;
    const uint64_t routes = m * 4;
    const bool quantised = m > 8;
    for (const Assignment& point : SpaceOf(problem).points) {
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
      ASSERT_EQ(SliceBytes(body, "x_values"), 2 * 1024 * m);
      ASSERT_EQ(SliceBytes(body, "x_scales"), quantised ? 4 * 32 * m : 0);
      ASSERT_EQ(SliceBytes(body, "mid_values"), 2 * 384 * routes);
      ASSERT_EQ(SliceBytes(body, "mid_scales"),
                quantised ? 4 * 12 * routes : 0);
      ASSERT_EQ(SliceBytes(body, "fc1"),
                s1 == 1 ? 2 * 768 * routes : 4 * 768 * s1 * routes);
      ASSERT_EQ(SliceBytes(body, "fc2"),
                s2 == 1 ? 2 * 1024 * routes : 4 * 1024 * s2 * routes);
    }
  }
}

TEST(FusedMoeMxCudaTemplateTest, LegalPointsKeepTheRulesOfTheReadme) {
  for (const int level : {80, 89, 90, 100, 120}) {
    for (const Interval interval : {Interval{1, 8}, Interval{9, 64}}) {
      const Problem problem = ProblemFor(interval.m_min, interval.m_max, level);
      const std::vector<Assignment> points = SpaceOf(problem).points;
      ASSERT_FALSE(points.empty()) << level;
      for (const Assignment& point : points) {
        const int64_t channels = point.at("channels_tile");
        const int64_t warps = point.at("warps");
        const int64_t tile = point.at("tokens_tile");
        const int64_t k_tile = point.at("k_tile");
        ASSERT_EQ(384 % channels, 0);
        ASSERT_EQ(1024 % channels, 0);
        ASSERT_GE(channels, 16 * warps);
        ASSERT_LE(channels / 16 / warps * tile / 8 * 4, 128);
        ASSERT_LE(point.at("split_fc2"), 384 / 128);
        const int64_t row =
            (k_tile + 8) * 2 + (interval.m_min > 8 ? k_tile / 32 * 4 : 0);
        for (const Step& step : BodyOf(problem, point).steps) {
          if (step.label != "fc1" && step.label != "fc2") continue;
          ASSERT_EQ(step.dynamic_shared_bytes,
                    point.at("stages") * (k_tile * channels * 3 / 8 +
                                          channels * 4 + tile * row));
          ASSERT_LE(step.dynamic_shared_bytes, problem.device.shared_bytes_max);
          ASSERT_EQ(step.block[0], static_cast<uint32_t>(32 * warps));
        }
      }
    }
  }
}

TEST(FusedMoeMxCudaTemplateTest, StepsNameEntriesOfTheirProgram) {
  const Problem problem = ProblemFor(9, 32);
  ASSERT_OK_AND_ASSIGN(const Candidate candidate,
                       FusedMoeMxCudaTemplate()->Instantiate(
                           problem, SpaceOf(problem).points.front()));
  ExpectProgramsOfSteps(candidate, {"kiln_mx_count"});
  for (const SourceUnit& unit : candidate.units) {
    EXPECT_THAT(unit.text, HasSubstr("#define KILN_ACTIVATION_BITS 8\n"));
    EXPECT_THAT(unit.text, HasSubstr("#define KILN_BITS 3\n"));
    // 10 as a binary32.
    EXPECT_THAT(unit.text, HasSubstr("#define KILN_LIMIT_BITS 1092616192\n"));
    std::set<std::string> names;
    for (const auto& [name, text] : unit.headers) names.insert(name);
    for (const char* header :
         {"formats/npk_law.h", "fused_moe/mx_block.h",
          "fused_moe/mx_boundary.h", "fused_moe/mx_fragment.h",
          "cuda/grouped.h", "cuda/warp.h", "device/fragment.h"}) {
      EXPECT_EQ(names.count(header), 1u) << header;
    }
  }
}

TEST(FusedMoeMxCudaTemplateTest, BothProductsReadOneRouteMap) {
  for (const Problem& problem : {ProblemFor(9, 32), ProblemFor(1, 8)}) {
    testing::ExpectBothProductsReadOneRouteMap(*FusedMoeMxCudaTemplate(),
                                               problem, {"tiles", "totals"});
  }
}

// Routing and the boundary do not depend on the axes: all candidates of an arm
// share that program.
TEST(FusedMoeMxCudaTemplateTest, CandidatesShareTheSupportProgram) {
  const Problem problem = ProblemFor(9, 32);
  std::set<std::string> support;
  std::map<std::string, std::set<std::string>> products;
  for (const Assignment& point : SpaceOf(problem).points) {
    const std::vector<SourceUnit> units = FusedMoeMxCudaTemplate()->MakeUnits(
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

TEST(FusedMoeMxCudaTemplateTest, RefusesPointsThatBreakARule) {
  const Problem problem = ProblemFor(9, 32);
  Assignment bad = SpaceOf(problem).points.front();
  bad["channels_tile"] = 256;  // does not divide 384
  EXPECT_THAT(FusedMoeMxCudaTemplate()->MakeBody(problem, bad),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("channels_tile 256 does not divide")));
  bad = SpaceOf(problem).points.front();
  bad["k_tile"] = 32;
  EXPECT_THAT(FusedMoeMxCudaTemplate()->MakeBody(problem, bad),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("k_tile is 32, must be one of")));
}

// What the README states for one rank's part of a large layer, and which slices
// it is made of.
TEST(FusedMoeMxCudaTemplateTest, ScratchOfTheSmallMArmIsTheStatedFigure) {
  constexpr uint64_t kTokens = 16, kHidden = 4096, kInter = 512, kTopK = 8;
  constexpr uint64_t kRoutes = kTokens * kTopK;
  Problem problem = ProblemFor(1, kTokens);
  problem.geometry.hidden = kHidden;
  problem.geometry.intermediate = kInter;
  problem.geometry.experts = 288;
  problem.geometry.top_k = kTopK;
  problem.geometry.mx.smallm_max_tokens = kTokens;
  const auto bytes = [&](int64_t split_fc1, int64_t split_fc2) {
    for (Assignment point : SpaceOf(problem).points) {
      point["split_fc1"] = split_fc1;
      point["split_fc2"] = split_fc2;
      const PlanBody body = BodyOf(problem, point);
      EXPECT_EQ(SliceBytes(body, "x_values"), 2 * kTokens * kHidden);
      EXPECT_EQ(SliceBytes(body, "mid_values"), 2 * kRoutes * kInter);
      EXPECT_EQ(SliceBytes(body, "x_scales"), 0u);
      EXPECT_EQ(SliceBytes(body, "mid_scales"), 0u);
      return body.arena.bytes;
    }
    ADD_FAILURE() << "no points";
    return uint64_t{0};
  };
  EXPECT_EQ(bytes(1, 1), 1576704u);
  EXPECT_EQ(bytes(8, 4), 12848896u);
  EXPECT_TRUE(absl::StrContains(
      testing::ReadAll(testing::SourcePath("templates/fused_moe/README.md")),
      "1,576,704 bytes without slices to 12,848,896"));
}

// ---- the state law, in all templates ---------------------------------------

// A request of each op and format of weights.
std::vector<RequestGeometry> GeometriesOfEveryFormat() {
  const RequestGeometry mx = ProblemFor(9, 32).geometry;
  RequestGeometry qsrt = mx;
  qsrt.weights = {};
  qsrt.weights.format = WeightFormat::kQsrt;
  qsrt.intermediate = 256;
  qsrt.mx = {};
  qsrt.qsrt.decode_max_tokens = 16;
  RequestGeometry exl3 = mx;
  exl3.weights.format = WeightFormat::kExl3;
  exl3.recipe = Recipe::kW4A16;
  exl3.mx = {};
  RequestGeometry linear = exl3;
  linear.op = Op::kLinear;
  linear.linear = {.in_features = 256, .out_features = 128, .bits = 4};
  return {mx, qsrt, exl3, linear};
}

bool IncludesTheLaw(const SourceUnit& unit) {
  return absl::c_any_of(unit.headers, [](const auto& header) {
    return header.first == "formats/npk_law.h";
  });
}

TEST(StateLawTest, IsPartOfEveryProgramOverTrellisMxAndOfNoOther) {
  std::set<std::string> seen;
  for (const RequestGeometry& geometry : GeometriesOfEveryFormat()) {
    for (const KernelTemplate* from : AllTemplates()) {
      if (from->op() != geometry.op ||
          from->format() != geometry.weights.format) {
        continue;
      }
      for (const Target& target :
           {Target{Backend::kCpu, 3, false}, Target{Backend::kCuda, 90, true},
            Target{Backend::kCuda, 120, true}}) {
        if (target.backend != from->backend() ||
            !from->Supports(geometry, target).ok()) {
          continue;
        }
        for (const Interval& interval : {Interval{9, 16}, Interval{17, 512}}) {
          const ParamSpace space =
              from->Enumerate({geometry, interval, AssumedProfile(target)}, 1);
          if (space.points.empty()) continue;
          for (const SourceUnit& unit :
               from->MakeUnits(geometry, target, space.points.front())) {
            EXPECT_EQ(IncludesTheLaw(unit),
                      geometry.weights.format == WeightFormat::kTrellisMx)
                << from->name() << " " << unit.name;
            seen.emplace(from->name());
          }
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), AllTemplates().size()) << "a template without request";
}

// The numbers of its hash, which the codebook MCG of EXL3 has too: kernels take
// that one's code, with the assertion that they are the same.
TEST(StateLawTest, IsWrittenDownOnce) {
  const std::set<std::string> may[] = {
      {"device/trellis.h", "formats/exl3.h", "formats/npk_law.h"},
      {"device/trellis.h", "formats/npk_law.h"},
      {"device/trellis.h", "formats/npk_law.h"},
      {"formats/npk_law.h"}};
  const char* const words[] = {"cbac1fed", "8fff8fff", "3b603b60", "\"npk1:"};

  std::set<std::string> found[std::size(words)];
  const std::filesystem::path root = testing::SourcePath("templates");
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(root)) {
    const std::string name = entry.path().lexically_relative(root).string();
    if (!entry.is_regular_file() || absl::EndsWith(name, ".md")) continue;
    const std::string text =
        absl::AsciiStrToLower(testing::ReadAll(entry.path()));
    for (size_t i = 0; i < std::size(words); ++i) {
      if (absl::StrContains(text, words[i])) found[i].insert(name);
    }
  }
  for (size_t i = 0; i < std::size(words); ++i) {
    EXPECT_EQ(found[i], may[i]) << words[i];
  }
  for (const char* user :
       {"fused_moe/mx_fragment.h", "fused_moe/mx_vector.h"}) {
    EXPECT_THAT(TemplateText(user),
                HasSubstr("static_assert(kNpkMultiplier == kMcgMultiplier"));
  }
}

}  // namespace
}  // namespace kiln
