// The racer's statistics on simulated devices whose true times are known.

#include "tuner/race_schedule.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tuner/selection.h"

namespace kiln {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Gt;
using ::testing::IsEmpty;
using ::testing::Not;

// A device with noise of its own kind. The streams of random numbers are those
// of the C++ standard, so every run sees the same races.
struct Device {
  double spread = 0.01;       // of the log of a time, per lane
  double block_spread = 0.2;  // of what all lanes of a block share
  double outlier_rate = 0;    // of lanes that take three times as long
};

double Gaussian(std::mt19937_64* random) {
  // Sum of twelve: no library's own distribution, tails to six.
  double sum = -6;
  for (int i = 0; i < 12; ++i) {
    sum += static_cast<double>((*random)() >> 11) * 0x1p-53;
  }
  return sum;
}

struct Outcome {
  std::set<size_t> dropped;
  size_t lanes_timed = 0;  // over all blocks, the twin included
  uint32_t blocks = 0;
  size_t winner = 0;  // as SelectWinner says; all are alike but for their times
};

double Median(std::vector<double> values) {
  const auto middle =
      values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Outcome Simulate(const std::vector<double>& true_ns, const Device& device,
                 const ScheduleOptions& options, int seed) {
  std::mt19937_64 random(static_cast<uint64_t>(seed));
  std::vector<size_t> all(true_ns.size());
  std::iota(all.begin(), all.end(), size_t{0});
  RaceSchedule schedule(true_ns.size(), all, options);
  Outcome outcome;
  std::vector<std::vector<double>> ratios(true_ns.size());
  for (;;) {
    const std::vector<size_t> order = schedule.NextBlock();
    if (order.empty()) break;
    std::vector<double> ns(true_ns.size() + 1);
    const double shared = device.block_spread * Gaussian(&random);
    for (const size_t lane : order) {
      const size_t contender = lane == schedule.twin() ? 0 : lane;
      ns[lane] = true_ns[contender] *
                 std::exp(shared + device.spread * Gaussian(&random));
      const double draw = static_cast<double>(random() >> 11) * 0x1p-53;
      if (draw < device.outlier_rate) ns[lane] *= 3;
    }
    schedule.Add(ns);
    outcome.lanes_timed += order.size();
    for (const size_t contender : all) {
      if (ns[contender] > 0) ratios[contender].push_back(ns[contender] / ns[0]);
    }
  }
  outcome.blocks = schedule.blocks();
  std::vector<SelectionInput> inputs(all.size());
  for (const size_t contender : all) {
    inputs[contender].eligible = !schedule.IsDropped(contender);
    inputs[contender].median_ns = Median(ratios[contender]);
    if (schedule.IsDropped(contender)) outcome.dropped.insert(contender);
  }
  outcome.winner = SelectWinner(inputs, schedule.noise_floor()).value();
  return outcome;
}

// Sixteen contenders between equal and twice as slow; the fastest is number 3.
std::vector<double> Field() {
  std::vector<double> ns;
  for (int i = 0; i < 16; ++i) ns.push_back(1000 * std::exp2(i / 15.0));
  std::swap(ns[0], ns[3]);
  return ns;
}

// The stated error: the fastest is dropped in at most this share of races.
TEST(EliminationTest, TheFastestIsDroppedMoreRarelyThanStated) {
  const std::map<std::string, Device> devices = {
      {"quiet", {.spread = 0.002}},
      {"usual", {.spread = 0.01}},
      {"loud", {.spread = 0.06}},
      {"outliers", {.spread = 0.01, .outlier_rate = 0.05}},
  };
  constexpr int kRaces = 400;
  for (const auto& [name, device] : devices) {
    int lost_equal = 0;
    int lost_field = 0;
    for (int race = 0; race < kRaces; ++race) {
      // The hardest case: eight that are all equally fast.
      lost_equal +=
          Simulate(std::vector<double>(8, 1000.0), device, {}, 1000 + race)
              .dropped.count(3) != 0;
      lost_field +=
          Simulate(Field(), device, {}, 5000 + race).dropped.count(3) != 0;
    }
    EXPECT_LE(lost_equal, kEliminationError * kRaces) << name;
    EXPECT_LE(lost_field, kEliminationError * kRaces) << name;
  }
}

// A weaker statement must show more errors, or the test above shows nothing.
TEST(EliminationTest, TheErrorRateIsTheOneThatWasAskedFor) {
  int lost = 0;
  for (int race = 0; race < 200; ++race) {
    ScheduleOptions options;
    options.error = 0.9;
    std::vector<double> ns(8, 1000.0);
    ns[3] *= 1.009;  // within the margin, so it must stay
    const Outcome outcome =
        Simulate(ns, {.spread = 0.05}, options, 9000 + race);
    lost += outcome.dropped.count(3) != 0;
  }
  EXPECT_GT(lost, 2);
  EXPECT_LE(lost, 180);
}

TEST(EliminationTest, SlowOnesLeaveAndTheBudgetShrinks) {
  size_t lanes = 0;
  size_t fixed = 0;
  const std::vector<double> field = Field();
  const ScheduleOptions options;
  for (int race = 0; race < 50; ++race) {
    const Outcome outcome =
        Simulate(field, {.spread = 0.01}, options, 20000 + race);
    lanes += outcome.lanes_timed;
    fixed += options.blocks_max * (field.size() + 1);
    for (size_t i = 0; i < field.size(); ++i) {
      // Whoever is 15 % slower than the fastest is seen to be.
      if (field[i] > 1150 && i != 0) {
        EXPECT_EQ(outcome.dropped.count(i), 1u) << field[i];
      }
    }
  }
  const double share = static_cast<double>(lanes) / static_cast<double>(fixed);
  RecordProperty("share_of_fixed_blocks", std::to_string(share));
  EXPECT_LT(share, 0.5) << "of the launches that fixed blocks take";
}

TEST(EliminationTest, WhatTheTieRuleMayChooseStays) {
  // Within the margin of one percent: no number of blocks may drop it.
  ScheduleOptions options;
  options.blocks_max = 300;
  options.blocks_unsettled_max = 300;
  size_t dropped = 0;
  for (int race = 0; race < 40; ++race) {
    dropped +=
        Simulate({1000, 1005, 1009}, {.spread = 0.004}, options, 30000 + race)
            .dropped.size();
  }
  EXPECT_EQ(dropped, 0u);
}

TEST(EliminationTest, NoiseWidensWhatStays) {
  // Five percent slower, but a floor of more than that: nobody may say so.
  Eliminator eliminator(2, kEliminationError);
  for (int block = 0; block < 200; ++block) {
    eliminator.AddBlock({1000, 1050}, /*margin=*/0.06, /*spread=*/0.02);
  }
  EXPECT_FALSE(eliminator.IsSlower(1));
  for (int block = 0; block < 200; ++block) {
    eliminator.AddBlock({1000, 1050}, /*margin=*/0.01, /*spread=*/0.02);
  }
  EXPECT_TRUE(eliminator.IsSlower(1));
  EXPECT_TRUE(eliminator.IsSlowerThan(1, 0));
  EXPECT_FALSE(eliminator.IsSlower(0));
}

TEST(EliminationTest, OneDisturbedBlockDropsNobody) {
  Eliminator eliminator(3, kEliminationError);
  eliminator.AddBlock({1000, 1000, 2500}, 0.01, -1);
  EXPECT_FALSE(eliminator.IsSlower(2));
}

TEST(EliminationTest, BlocksWithoutATimeAreNoEvidence) {
  Eliminator eliminator(2, kEliminationError);
  for (int block = 0; block < 50; ++block) {
    eliminator.AddBlock({1000, 0}, 0.01, 0.01);
  }
  EXPECT_FALSE(eliminator.IsSlower(0));
  EXPECT_FALSE(eliminator.IsSlower(1));
}

TEST(RaceScheduleTest, OrderStartsAtAnotherLaneAndTurnsAround) {
  RaceSchedule schedule(3, {0, 1, 2}, {});
  const std::vector<double> equal = {10, 10, 10, 10};
  std::vector<std::vector<size_t>> orders;
  for (int block = 0; block < 4; ++block) {
    orders.push_back(schedule.NextBlock());
    schedule.Add(equal);
  }
  EXPECT_THAT(orders[0], ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(orders[1], ElementsAre(3, 2, 1, 0));
  EXPECT_THAT(orders[2], ElementsAre(1, 2, 3, 0));
  EXPECT_THAT(orders[3], ElementsAre(0, 3, 2, 1));
}

TEST(RaceScheduleTest, ABlockThatDoesNotCountIsNamedAgainInAnotherOrder) {
  RaceSchedule schedule(2, {0, 1}, {});
  const std::vector<size_t> first = schedule.NextBlock();
  const std::vector<size_t> second = schedule.NextBlock();
  EXPECT_NE(first, second);
  EXPECT_EQ(schedule.blocks(), 0u);
}

TEST(RaceScheduleTest, WhoTakesNoPartIsNeverNamed) {
  RaceSchedule schedule(4, {1, 3}, {});
  EXPECT_EQ(schedule.reference(), 1u);
  EXPECT_THAT(schedule.NextBlock(), ElementsAre(1, 3, 4));
}

TEST(RaceScheduleTest, ALoneContenderIsTimedTheFewestTimes) {
  ScheduleOptions options;
  options.blocks_min = 5;
  EXPECT_EQ(Simulate({1000}, {}, options, 1).blocks, 5u);
}

TEST(RaceScheduleTest, EndsWhenTheDefaultIsShownSlowerThanTheOnlyRival) {
  const Outcome outcome = Simulate({1000, 500}, {}, {}, 1);
  EXPECT_THAT(outcome.dropped, IsEmpty()) << "the default never leaves";
  EXPECT_LT(outcome.blocks, ScheduleOptions().blocks_max);
}

TEST(RaceScheduleTest, GoesOnWhileNoiseCouldChangeTheWinner) {
  const ScheduleOptions options;
  const Device device = {.spread = 0.004};
  uint32_t near_the_tie = 0;
  uint32_t near_the_default = 0;
  for (int race = 0; race < 20; ++race) {
    // Equally fast, or clearly not: as many blocks as ever.
    EXPECT_EQ(Simulate({1000, 1000, 1002}, device, options, race).blocks,
              options.blocks_max);
    near_the_tie =
        std::max(near_the_tie,
                 Simulate({1500, 1000, 1010}, device, options, race).blocks);
    near_the_default =
        std::max(near_the_default,
                 Simulate({1011.5, 1000}, device, options, race).blocks);
  }
  EXPECT_GT(near_the_tie, options.blocks_max);
  EXPECT_GT(near_the_default, options.blocks_max);
  EXPECT_LE(near_the_tie, options.blocks_unsettled_max);
  EXPECT_LE(near_the_default, options.blocks_unsettled_max);
}

// Independent races of equal devices come to equal winners, also where the
// advantage over the default is exactly what counts.
TEST(RaceScheduleTest, WinnersRepeatAtTheMarginOfTheDefault) {
  constexpr int kRaces = 200;
  for (const double spread : {0.001, 0.004}) {
    int default_wins = 0;
    int challenger_wins = 0;
    for (int race = 0; race < kRaces; ++race) {
      const Device device = {.spread = spread};
      default_wins +=
          Simulate({1010, 1000}, device, {}, 40000 + race).winner == 0;
      challenger_wins +=
          Simulate({1020, 1000}, device, {}, 50000 + race).winner == 1;
    }
    EXPECT_GE(default_wins, 0.96 * kRaces) << spread;
    EXPECT_GE(challenger_wins, 0.99 * kRaces) << spread;
  }
}

// 60 contenders in batches: the reference and the champions are in every block
// from the batch they came in to the end, however they fare later.
TEST(RaceScheduleTest, ChampionsOfEarlierBatchesAreNeverDropped) {
  std::vector<double> ns(60);
  for (size_t i = 0; i < ns.size(); ++i) {
    ns[i] = 2000.0 - 20.0 * static_cast<double>(i);
  }
  std::vector<size_t> all(ns.size());
  std::iota(all.begin(), all.end(), size_t{0});
  ScheduleOptions options;
  options.batch_max = 16;
  RaceSchedule schedule(ns.size(), all, options);
  std::mt19937_64 random(7);
  std::set<size_t> timed;
  size_t most = 0;
  for (;;) {
    const std::vector<size_t> order = schedule.NextBlock();
    if (order.empty()) break;
    EXPECT_THAT(order, Contains(size_t{0}));
    EXPECT_THAT(order, Contains(schedule.twin()));
    for (const size_t champion : schedule.champions()) {
      EXPECT_THAT(order, Contains(champion));
      EXPECT_FALSE(schedule.IsDropped(champion));
    }
    std::vector<double> block(ns.size() + 1);
    for (const size_t lane : order) {
      block[lane] = ns[lane == schedule.twin() ? 0 : lane] *
                    std::exp(0.005 * Gaussian(&random));
      timed.insert(lane);
    }
    most = std::max(most, order.size());
    schedule.Add(block);
  }
  EXPECT_EQ(timed.size(), ns.size() + 1) << "every contender had its batch";
  EXPECT_THAT(schedule.champions(), Not(IsEmpty()));
  EXPECT_FALSE(schedule.IsDropped(59)) << "the fastest came last";
  EXPECT_TRUE(schedule.IsDropped(1));
  EXPECT_LE(most, 33u) << "never all at once";
}

// A race that stopped after any block and goes on names the same contenders and
// comes to the same end.
TEST(RaceScheduleTest, GoesOnFromTheBlocksOfAnEarlierRace) {
  const std::vector<double> field = Field();
  std::vector<size_t> all(field.size());
  std::iota(all.begin(), all.end(), size_t{0});
  const auto block = [&](uint32_t number, const std::vector<size_t>& lanes) {
    std::mt19937_64 random(100 + number);
    std::vector<double> noise(field.size() + 1);
    for (double& each : noise) each = std::exp(0.01 * Gaussian(&random));
    std::vector<double> ns(field.size() + 1);
    for (const size_t lane : lanes) {
      ns[lane] = noise[lane] * field[lane == field.size() ? 0 : lane];
    }
    return ns;
  };
  RaceSchedule whole(field.size(), all, {});
  std::map<uint32_t, std::vector<double>> blocks;
  for (auto lanes = whole.NextBlock(); !lanes.empty();
       lanes = whole.NextBlock()) {
    const uint32_t number = whole.blocks();
    blocks[number] = block(number, lanes);
    whole.Add(blocks[number]);
  }
  ASSERT_GT(blocks.size(), 6u);
  for (const uint32_t stop : {1u, 6u}) {
    RaceSchedule resumed(field.size(), all, {});
    resumed.Restore({blocks.begin(), blocks.find(stop)});
    EXPECT_EQ(resumed.blocks(), stop);
    for (auto lanes = resumed.NextBlock(); !lanes.empty();
         lanes = resumed.NextBlock()) {
      resumed.Add(block(resumed.blocks(), lanes));
    }
    EXPECT_EQ(resumed.blocks(), whole.blocks()) << stop;
    for (const size_t contender : all) {
      EXPECT_EQ(resumed.IsDropped(contender), whole.IsDropped(contender))
          << contender;
    }
    EXPECT_EQ(resumed.noise_floor(), whole.noise_floor());
  }
}

TEST(NoiseFloorTest, IsZeroForEqualLanesAndGrowsWithTheirDifference) {
  EXPECT_EQ(NoiseFloorOf({}), 0);
  EXPECT_EQ(NoiseFloorOf({0, 0, 0}), 0);
  EXPECT_NEAR(NoiseFloorOf({0.02, 0.02, 0.02}), std::expm1(0.02), 1e-12);
  EXPECT_NEAR(NoiseFloorOf({-0.02, -0.02, -0.02}), std::expm1(0.02), 1e-12);
  // A median that happens to be 0 proves nothing when its samples scatter.
  EXPECT_GT(NoiseFloorOf({-0.1, 0.1, -0.1, 0.1, 0}), 0.03);
}

TEST(SpreadTest, NeedsThreeBlocksAndIgnoresOneOutlier) {
  EXPECT_LT(SpreadOf({}), 0);
  EXPECT_LT(SpreadOf({0.1, 0.1}), 0);
  EXPECT_NEAR(SpreadOf({0.01, -0.01, 0.01}), 0.014826, 1e-9);
  EXPECT_NEAR(SpreadOf({0.01, -0.01, 0.01, 3, 0.01}), 0.014826, 1e-9);
}

}  // namespace
}  // namespace kiln
