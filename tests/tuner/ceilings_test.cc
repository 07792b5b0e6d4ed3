#include "tuner/ceilings.h"

#include <cmath>
#include <set>
#include <string>

#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/template_stream.h"
#include "tests/support/status_matchers.h"
#include "tuner/cost_model.h"

namespace kiln {
namespace {

using ::kiln::testing::IsOkAndHolds;
using ::kiln::testing::StatusIs;

// The H200's round numbers.
Ceilings Sample() {
  Ceilings out;
  out.read_bytes_per_s = 4e12;
  out.mma_flops_per_s = 500e12;
  out.decode_weights_per_s = {{{Codebook::kMcg, 3}, 4e12},
                              {{Codebook::kMcg, 4}, 5e12},
                              {{Codebook::kMul1, 4}, 7e12}};
  out.hash_weights_per_s = {{{Codebook::kMcg, 4}, 7e12}};
  out.measured_unix = 1764460800;
  return out;
}

RequestGeometry Qwen() {
  RequestGeometry geometry;
  geometry.hidden = 2048;
  geometry.intermediate = 768;
  geometry.experts = 128;
  geometry.top_k = 8;
  geometry.weights.codebook = Codebook::kMcg;
  geometry.weights.bits = {4, 4, 4};
  return geometry;
}

TEST(CeilingsTest, JsonRoundTrips) {
  EXPECT_THAT(CeilingsFromJson(CeilingsToJson(Sample())),
              IsOkAndHolds(Sample()));
}

TEST(CeilingsTest, RefusesWhatItCouldNotHaveWritten) {
  const std::string good = CeilingsToJson(Sample());
  for (const auto& [find, replace] :
       std::vector<std::pair<std::string, std::string>>{
           {"\"mcg/4\"", "\"mcg/9\""},
           {"\"mcg/4\"", "\"none/4\""},
           {"\"mcg/4\"", "\"mcg\""},
           {"4000000000000.0", "-1.0"},
           {"4000000000000.0", "0"},
           {"4000000000000.0", "\"x\""},
           {"\"hash\"", "\"hush\""},
           {"\"measured_unix\"", "\"when\""}}) {
    const std::string bad = absl::StrReplaceAll(good, {{find, replace}});
    ASSERT_NE(bad, good) << find;
    EXPECT_THAT(CeilingsFromJson(bad), StatusIs(absl::StatusCode::kDataLoss))
        << bad;
  }
  EXPECT_THAT(CeilingsFromJson("["), StatusIs(absl::StatusCode::kDataLoss));
  EXPECT_THAT(CeilingsFromJson("3"), StatusIs(absl::StatusCode::kDataLoss));
}

TEST(CeilingsTest, TheBalanceMovesWithRatiosAndNotWithNoise) {
  const Ceilings sample = Sample();
  EXPECT_EQ(sample.Balance(), "decode 1 mma 21");
  Ceilings faster = sample;
  faster.read_bytes_per_s *= 2;
  faster.mma_flops_per_s *= 2;
  for (auto& [key, rate] : faster.decode_weights_per_s) rate *= 2;
  EXPECT_EQ(faster.Balance(), sample.Balance()) << "the scale is no matter";
  EXPECT_EQ(faster.Rounded(), sample.Rounded());
  Ceilings noisy = sample;
  noisy.read_bytes_per_s *= 1.01;
  EXPECT_EQ(noisy.Balance(), sample.Balance());
  Ceilings other = sample;
  other.read_bytes_per_s /= 2;
  EXPECT_EQ(other.Balance(), "decode 4 mma 24");
  EXPECT_EQ(Ceilings().Balance(), "");
  EXPECT_EQ(Ceilings().Rounded(), Ceilings());
}

TEST(CeilingsTest, AMeasurementWithinAStepKeepsTheBalance) {
  // Decoding lies 1 % below where two steps meet.
  Ceilings before = Sample();
  before.read_bytes_per_s = 5e12 / std::exp2(0.5 / 3) * 1.01;
  before.mma_flops_per_s = 500e12;
  Ceilings now = before;
  now.read_bytes_per_s /= 1.02;
  ASSERT_NE(now.Balance(), before.Balance());
  now.KeepBalanceOf(before);
  EXPECT_EQ(now.Balance(), before.Balance());
  EXPECT_EQ(now.Rounded(), before.Rounded());
  EXPECT_THAT(CeilingsFromJson(CeilingsToJson(now)), IsOkAndHolds(now));
  // What was kept is kept again, and does not wander.
  Ceilings later = before;
  later.read_bytes_per_s /= 1.1;
  later.KeepBalanceOf(now);
  EXPECT_EQ(later.Balance(), before.Balance());
  Ceilings moved = before;
  moved.read_bytes_per_s /= 1.3;
  const std::string balance = moved.Balance();
  moved.KeepBalanceOf(later);
  EXPECT_EQ(moved.Balance(), balance) << "more than a step";
  Ceilings first = Sample();
  first.KeepBalanceOf(Ceilings());
  EXPECT_EQ(first, Sample());
  Ceilings nothing;
  nothing.KeepBalanceOf(Sample());
  EXPECT_EQ(nothing.Balance(), "");
}

TEST(CeilingsTest, ABalanceOfOneHasNoSign) {
  Ceilings above = Sample();
  above.read_bytes_per_s = 5e12 / 1.01;
  Ceilings below = Sample();
  below.read_bytes_per_s = 5e12 * 1.01;
  EXPECT_EQ(above.Balance(), "decode 0 mma 20");
  EXPECT_EQ(below.Balance(), "decode 0 mma 20");
}

TEST(CeilingsTest, RefusesAKeptBalanceThatItCouldNotHaveWritten) {
  Ceilings kept = Sample();
  kept.kept_balance = {.decode = -2, .mma = 21};
  const std::string good = CeilingsToJson(kept);
  EXPECT_THAT(CeilingsFromJson(good), IsOkAndHolds(kept));
  for (const char* bad : {"-2.5", "\"x\"", "1e9", "null"}) {
    EXPECT_THAT(CeilingsFromJson(absl::StrReplaceAll(good, {{"-2.0", bad}})),
                StatusIs(absl::StatusCode::kDataLoss))
        << bad;
  }
}

TEST(CeilingsTest, TheNearestMeasuredRateStandsIn) {
  const Ceilings sample = Sample();
  const auto rate = [&](Codebook codebook, int bits) {
    return DecodeRate(sample.decode_weights_per_s, codebook, bits);
  };
  EXPECT_EQ(rate(Codebook::kMcg, 3), 4e12);
  EXPECT_EQ(rate(Codebook::kMcg, 1), 4e12);
  EXPECT_EQ(rate(Codebook::kMcg, 8), 5e12);
  EXPECT_EQ(rate(Codebook::k3Inst, 4), 0);
}

// One expert's weights of this shape are 4,718,592; numbers by hand.
TEST(FloorTest, CountsBytesDecodeAndMultiplications) {
  const Work work = WorkOf(Qwen(), 4, 29, Sample(), false);
  EXPECT_DOUBLE_EQ(work.weights, 29 * 4718592.0);
  EXPECT_DOUBLE_EQ(
      work.bytes,
      29 * 4718592.0 / 2 + 29 * (3 * 2048 + 3 * 768) * 2.0 + 4 * 2048 * 6.0);
  EXPECT_DOUBLE_EQ(work.flops, 2.0 * 4718592 * 4 * 8);
  const Floor floor = FloorOf(work, Sample());
  EXPECT_DOUBLE_EQ(floor.decode_s, 29 * 4718592.0 / 5e12);
  EXPECT_DOUBLE_EQ(floor.mma_s, work.flops / 500e12);
  EXPECT_DOUBLE_EQ(floor.Seconds(), floor.decode_s + floor.mma_s);
  EXPECT_EQ(floor.Bound(), "decode");
  // The matrix unit adds the codebook's parts up: less is left to decode.
  const Floor summed = FloorOf(WorkOf(Qwen(), 4, 29, Sample(), true), Sample());
  EXPECT_DOUBLE_EQ(summed.decode_s, 29 * 4718592.0 / 7e12);
  EXPECT_EQ(
      FloorOf(WorkOf(Qwen(), 4096, 128, Sample(), false), Sample()).Bound(),
      "mma");
  Ceilings slow = Sample();
  slow.read_bytes_per_s /= 100;
  EXPECT_EQ(FloorOf(work, slow).Bound(), "bytes");
  EXPECT_EQ(FloorOf(work, Ceilings()).Seconds(), work.decode_seconds);
}

// The matrix unit adds up two modes of the stream template, whose names only
// the template knows.
TEST(FloorTest, KnowsWhichClassesTheMatrixUnitAddsUp) {
  for (const Codebook codebook : {Codebook::kMcg, Codebook::kMul1}) {
    Problem problem;
    problem.geometry.hidden = 2048;
    problem.geometry.intermediate = 768;
    problem.geometry.experts = 128;
    problem.geometry.top_k = 8;
    problem.geometry.weights.codebook = codebook;
    problem.geometry.weights.bits = {.gate = 4, .up = 4, .down = 4};
    problem.interval = {1, 4};
    problem.device = AssumedProfile(
        {.backend = Backend::kCuda, .level = 90, .arch_specific = true});
    std::set<int64_t> summed;
    std::set<int64_t> modes;
    const KernelTemplate* const stream = FusedMoeStreamTemplate();
    for (const Assignment& point : stream->Enumerate(problem, 1000).points) {
      ASSERT_OK_AND_ASSIGN(const PlanBody body,
                           stream->MakeBody(problem, point));
      modes.insert(point.at("sum"));
      if (IsSummedByMma(body.numerics_class)) summed.insert(point.at("sum"));
    }
    const bool bytes = codebook == Codebook::kMul1;
    EXPECT_EQ(modes,
              bytes ? std::set<int64_t>({0, 2, 3}) : std::set<int64_t>({0, 1}));
    EXPECT_EQ(summed, std::set<int64_t>({bytes ? 2 : 1}));
  }
  EXPECT_FALSE(IsSummedByMma("w4a16.f16.wgmma.atomic_sum"));
}

TEST(FloorTest, CountsTheWorkOfLinear) {
  RequestGeometry geometry;
  geometry.op = Op::kLinear;
  geometry.linear = {
      .in_features = 4096, .out_features = 1024, .bits = 4, .bias = true};
  const Work work = WorkOf(geometry, 3, 1, Sample(), false);
  EXPECT_DOUBLE_EQ(work.weights, 4096.0 * 1024);
  EXPECT_DOUBLE_EQ(work.bytes, 4096.0 * 1024 / 2 + (4096 + 2 * 1024) * 2.0 +
                                   3 * (4096 * 2 + 1024 * 4));
  EXPECT_DOUBLE_EQ(work.flops, 2.0 * 4096 * 1024 * 3);
  EXPECT_EQ(ExpectedExperts(geometry, 3), 1);
}

PlanBody BodyOf(int64_t tile, uint32_t blocks) {
  PlanBody body;
  body.template_name = "t";
  body.assignment = {{"tokens_tile", tile}};
  Step step;
  step.label = "fc1";
  step.args = {FusedMoeArg(FusedMoeParam::kWGate)};
  step.grid = {LaunchDim::Constant(blocks), LaunchDim::Constant(1),
               LaunchDim::Constant(1)};
  body.steps = {step};
  return body;
}

TEST(CostModelTest, EmptyRowsAndEmptyRoundsCost) {
  Problem problem;
  problem.geometry = Qwen();
  problem.interval = {1, 1};
  problem.device = AssumedProfile(
      {.backend = Backend::kCuda, .level = 90, .arch_specific = true});
  const Ceilings model = Sample().Rounded();
  const auto time = [&](const PlanBody& body) {
    return Predict(problem, body, model).Time();
  };
  // One token in a tile of 128: the rows that stay empty are multiplied too.
  EXPECT_GT(time(BodyOf(128, 1320)), 2 * time(BodyOf(8, 1320)));
  // A few blocks more than the multiprocessors take at once.
  PlanBody full = BodyOf(8, 132);
  PlanBody spill = BodyOf(8, 140);
  EXPECT_GT(time(spill), 1.8 * time(full));
  EXPECT_LT(Predict(problem, full, model).waves, 1.05);
  // Many tokens: small tiles decode the same weights again and again.
  problem.interval = {2049, 4096};
  EXPECT_GT(Predict(problem, BodyOf(8, 13200), model).floor.decode_s,
            10 * Predict(problem, BodyOf(128, 13200), model).floor.decode_s);
}

// A step counts for as many of the op's matrices as it reads.
TEST(CostModelTest, StepsThatReadNoMatrixDoNotCount) {
  Problem problem;
  problem.geometry = Qwen();
  problem.device = AssumedProfile(
      {.backend = Backend::kCuda, .level = 90, .arch_specific = true});
  const auto waves = [&](const PlanBody& body) {
    return Predict(problem, body, Sample().Rounded()).waves;
  };
  PlanBody both = BodyOf(8, 132);
  const double full = waves(both);
  both.steps.push_back(BodyOf(8, 140).steps[0]);
  both.steps[1].args = {FusedMoeArg(FusedMoeParam::kX)};
  EXPECT_DOUBLE_EQ(waves(both), full);
  both.steps[1].args = {FusedMoeArg(FusedMoeParam::kWDown)};
  const double one_each = waves(both);
  EXPECT_GT(one_each, full);
  both.steps[0].args.push_back(FusedMoeArg(FusedMoeParam::kWUp));
  EXPECT_LT(waves(both), one_each);
}

TEST(CostModelTest, TheReasonNamesTheBoundAndTheRatio) {
  Prediction prediction;
  prediction.floor.decode_s = 3;
  EXPECT_EQ(PruneReason(prediction, 1.5),
            "pruned: decode takes 2.00 x the best prediction, beyond 1.50 x");
}

}  // namespace
}  // namespace kiln
