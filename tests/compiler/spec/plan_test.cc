#include "compiler/spec/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>

#include "tests/compiler/spec/sample_plan.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::SamplePlan;
using ::kiln::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint32_t kMax = 0xFFFFFFFFu;

TEST(LaunchDimTest, RoundsUp) {
  const LaunchDim dim = LaunchDim::Of({.mul = 3, .add = 1, .div = 4});
  EXPECT_EQ(dim.Evaluate(1), 1u);  // 4 / 4
  EXPECT_EQ(dim.Evaluate(2), 2u);  // 7 / 4
  EXPECT_EQ(dim.Evaluate(5), 4u);  // 16 / 4
  EXPECT_EQ(dim.Evaluate(6), 5u);  // 19 / 4
}

TEST(LaunchDimTest, TakesTheSmallerTerm) {
  const LaunchDim dim = {.a = {.mul = 1, .add = 0, .div = 1},
                         .b = {.mul = 0, .add = 10, .div = 1}};
  EXPECT_EQ(dim.Evaluate(9), 9u);
  EXPECT_EQ(dim.Evaluate(10), 10u);
  EXPECT_EQ(dim.Evaluate(11), 10u);
}

TEST(LaunchDimTest, ConstantsIgnoreTheTokens) {
  for (const uint32_t n : {0u, 1u, 7u, kMax}) {
    EXPECT_EQ(LaunchDim::Constant(n).Evaluate(1), n);
    EXPECT_EQ(LaunchDim::Constant(n).Evaluate(kMax), n);
  }
}

TEST(LaunchDimTest, DoesNotOverflowAtTheExtremes) {
  const LaunchDim largest = LaunchDim::Of({kMax, kMax, 1});
  // (2^32-1)^2 + (2^32-1) = 2^64 - 2^32.
  EXPECT_EQ(largest.Evaluate(kMax), ~uint64_t{0} - kMax);
  EXPECT_EQ(LaunchDim::Of({kMax, kMax, kMax}).Evaluate(kMax),
            uint64_t{1} << 32);
  EXPECT_EQ(LaunchDim::Of({kMax, 1, kMax}).Evaluate(kMax), uint64_t{1} << 32);
}

TEST(LaunchDimTest, AgreesWithWiderArithmetic) {
  std::mt19937_64 random(4);
  const auto draw = [&] {
    // Small, large and edge values alike.
    const auto value = static_cast<uint32_t>(random());
    return value >> (random() % 33 == 32 ? 31 : random() % 32);
  };
  for (int i = 0; i < 20000; ++i) {
    const LaunchTerm a{draw(), draw(), std::max(1u, draw())};
    const LaunchTerm b{draw(), draw(), std::max(1u, draw())};
    const uint32_t m = draw();
    __extension__ using Wide = unsigned __int128;
    const auto wide = [m](const LaunchTerm& term) {
      return (Wide{term.mul} * m + term.add + term.div - 1) / term.div;
    };
    const Wide expected = std::min(wide(a), wide(b));
    const LaunchDim dim = {a, b};
    ASSERT_TRUE(Wide{dim.Evaluate(m)} == expected)
        << a.mul << " " << a.add << " " << a.div << " m=" << m;
  }
}

TEST(ArgOffsetsTest, AlignsEachArgumentNaturally) {
  EXPECT_THAT(ArgOffsets({}), ElementsAre());
  EXPECT_THAT(
      ArgOffsets({Arg::U32(1), Arg::Param(0), Arg::Tokens(), Arg::U32(2),
                  Arg::U64(3), Arg::Tokens(), Arg::Arena(0)}),
      ElementsAre(0, 8, 16, 20, 24, 32, 40));
}

TEST(ArenaLayoutTest, AlignsSlicesAndTotal) {
  ArenaLayout arena;
  EXPECT_EQ(arena.Add("a", 1), 0u);
  EXPECT_EQ(arena.Add("b", 256), 1u);
  EXPECT_EQ(arena.Add("c", 257), 2u);
  EXPECT_EQ(arena.Add("empty", 0), 3u);
  EXPECT_THAT(
      arena.slices,
      ElementsAre(ArenaSlice{"a", 0, 1}, ArenaSlice{"b", 256, 256},
                  ArenaSlice{"c", 512, 257}, ArenaSlice{"empty", 1024, 0}));
  EXPECT_EQ(arena.bytes, 1024u);
}

TEST(PlanBodyTest, LabelNamesTemplateAndAxes) {
  EXPECT_EQ(SamplePlan().body.Label(), "fused_moe.cuda{tokens_tile=8,warps=4}");
}

TEST(ValidatePlanTest, AcceptsTheSample) {
  EXPECT_OK(ValidatePlan(SamplePlan()));
}

TEST(ValidatePlanTest, RefusesEachBrokenRule) {
  const struct {
    const char* message;
    std::function<void(Plan*)> apply;
  } cases[] = {
      {"interval 0..17 is empty", [](Plan* p) { p->interval.m_min = 0; }},
      {"interval 18..17 is empty", [](Plan* p) { p->interval.m_min = 18; }},
      {"no steps", [](Plan* p) { p->body.steps.clear(); }},
      {"arena of", [](Plan* p) { p->body.arena.bytes += 1; }},
      {"arena of", [](Plan* p) { p->body.arena.bytes = kArenaBytesMax + 256; }},
      {"arena slice activations",
       [](Plan* p) { p->body.arena.slices[1].offset += 8; }},
      {"arena slice activations",
       [](Plan* p) { p->body.arena.slices[1].offset = 768; }},
      {"arena slice activations",
       [](Plan* p) { p->body.arena.slices[1].bytes += 1; }},
      {"arena slice activations",
       [](Plan* p) { p->body.arena.slices[1].bytes = ~uint64_t{0}; }},
      {"arena slice activations",
       [](Plan* p) { p->body.arena.slices[1].offset = ~uint64_t{255}; }},
      {"step fc uses program 2 of 2",
       [](Plan* p) { p->body.steps[1].program = 2; }},
      {"step fc uses program 1 of 1", [](Plan* p) { p->programs.pop_back(); }},
      {"step fc has no entry", [](Plan* p) { p->body.steps[1].entry = ""; }},
      {"step route divides by 0",
       [](Plan* p) { p->body.steps[0].grid[0].a.div = 0; }},
      {"step route divides by 0",
       [](Plan* p) { p->body.steps[0].grid[2].b.div = 0; }},
      {"step route has an empty block",
       [](Plan* p) { p->body.steps[0].block[2] = 0; }},
      {"argument out of range: 2",
       [](Plan* p) { p->body.steps[0].args[0] = Arg::Param(2); }},
      {"argument out of range: 2",
       [](Plan* p) { p->body.steps[0].args[2] = Arg::Arena(2); }},
      {"argument out of range: 4294967296",
       [](Plan* p) { p->body.steps[0].args[3].value = uint64_t{1} << 32; }},
  };

  for (const auto& c : cases) {
    Plan plan = SamplePlan();
    c.apply(&plan);
    EXPECT_THAT(ValidatePlan(plan),
                StatusIs(absl::StatusCode::kInternal, HasSubstr(c.message)));
  }
}

}  // namespace
}  // namespace kiln
