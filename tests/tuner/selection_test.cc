#include "tuner/selection.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kiln {
namespace {

using ::testing::Eq;
using ::testing::Optional;

SelectionInput Input(double ns, const std::string& key,
                     const std::string& numerics = "a", uint64_t arena = 100,
                     uint32_t registers = 10) {
  return {.eligible = true,
          .median_ns = ns,
          .numerics_class = numerics,
          .arena_bytes = arena,
          .registers = registers,
          .key = Sha256(key)};
}

SelectionInput Ineligible(double ns, const std::string& key) {
  SelectionInput input = Input(ns, key);
  input.eligible = false;
  return input;
}

// Keys in ascending order of their digests, for ties.
std::vector<std::string> SortedKeys(int count) {
  std::vector<std::string> keys;
  for (int i = 0; i < count; ++i) keys.push_back(std::to_string(i));
  std::sort(keys.begin(), keys.end(),
            [](const std::string& a, const std::string& b) {
              return Sha256(a) < Sha256(b);
            });
  return keys;
}

TEST(SelectionMarginTest, IsOnePercentUntilTheNoiseIsLarger) {
  EXPECT_DOUBLE_EQ(SelectionMargin(0), 0.01);
  EXPECT_DOUBLE_EQ(SelectionMargin(0.003), 0.01);
  EXPECT_DOUBLE_EQ(SelectionMargin(0.02), 0.06);
}

TEST(SelectionMarginTest, TheDefaultIsBeatenByOnePercentBeyondTheNoise) {
  EXPECT_DOUBLE_EQ(DefaultMargin(0), 0.011);
  EXPECT_DOUBLE_EQ(DefaultMargin(0.0004), 0.011);
  EXPECT_DOUBLE_EQ(DefaultMargin(0.003), 0.016);
  EXPECT_DOUBLE_EQ(DefaultMargin(0.02), 0.06);
}

TEST(SelectionTest, NothingWinsWhenNothingIsEligible) {
  EXPECT_EQ(SelectWinner({}, 0), std::nullopt);
  EXPECT_EQ(SelectWinner({Ineligible(10, "a"), Ineligible(1, "b")}, 0),
            std::nullopt);
}

TEST(SelectionTest, TheOnlyEligibleOneWinsHoweverSlow) {
  EXPECT_THAT(SelectWinner({Input(10, "a")}, 0), Optional(Eq(0u)));
  EXPECT_THAT(SelectWinner(
                  {Ineligible(1, "a"), Input(1e9, "b"), Ineligible(1, "c")}, 0),
              Optional(Eq(1u)));
}

TEST(SelectionTest, TheDefaultKeepsTheWinWithinTheMargin) {
  EXPECT_THAT(SelectWinner({Input(1000, "a"), Input(1000, "b")}, 0),
              Optional(Eq(0u)));
  // Faster, but by too little.
  EXPECT_THAT(SelectWinner({Input(1010.9, "a"), Input(1000, "b")}, 0),
              Optional(Eq(0u)));
  // By more, but two equal candidates may differ by 0.2 % here.
  EXPECT_THAT(SelectWinner({Input(1013.9, "a"), Input(1000, "b")}, 0.002),
              Optional(Eq(0u)));
  EXPECT_THAT(SelectWinner({Input(1014.1, "a"), Input(1000, "b")}, 0.002),
              Optional(Eq(1u)));
}

TEST(SelectionTest, AChallengerWinsBeyondTheMargin) {
  EXPECT_THAT(SelectWinner({Input(1011.1, "a"), Input(1000, "b")}, 0),
              Optional(Eq(1u)));
  EXPECT_THAT(SelectWinner({Input(5000, "a"), Input(1000, "b")}, 0),
              Optional(Eq(1u)));
}

TEST(SelectionTest, NoiseWidensTheMargin) {
  const std::vector<SelectionInput> inputs = {Input(1050, "a"),
                                              Input(1000, "b")};
  EXPECT_THAT(SelectWinner(inputs, 0.001), Optional(Eq(1u)));
  EXPECT_THAT(SelectWinner(inputs, 0.016), Optional(Eq(1u)));  // margin 4.8 %
  EXPECT_THAT(SelectWinner(inputs, 0.017), Optional(Eq(0u)));  // margin 5.1 %
}

TEST(SelectionTest, IneligibleChallengersDoNotMoveTheBar) {
  EXPECT_THAT(SelectWinner({Input(1000, "a"), Ineligible(1, "b")}, 0),
              Optional(Eq(0u)));
  // The default is not eligible: its time does not protect anything.
  EXPECT_THAT(
      SelectWinner({Ineligible(1, "a"), Input(1000, "b"), Input(1200, "c")}, 0),
      Optional(Eq(1u)));
}

// Rows: each tie rule decides when all rules before it are even, although every
// later rule (and the exact time) points the other way.
struct TieCase {
  const char* name;
  SelectionInput winner;
  SelectionInput loser;
};

class SelectionTieTest : public ::testing::TestWithParam<TieCase> {};

TEST_P(SelectionTieTest, IsDecidedInOrder) {
  const TieCase& test = GetParam();
  const SelectionInput slow_default = Input(2000, "default", "d");
  EXPECT_THAT(SelectWinner({slow_default, test.winner, test.loser}, 0),
              Optional(Eq(1u)));
  EXPECT_THAT(SelectWinner({slow_default, test.loser, test.winner}, 0),
              Optional(Eq(2u)));
}

std::vector<TieCase> TieCases() {
  const std::vector<std::string> keys = SortedKeys(2);
  const std::string& low = keys[0];
  const std::string& high = keys[1];
  return {
      {"ClassOfTheDefault", Input(1005, high, "d", 900, 90),
       Input(1000, low, "a", 1, 1)},
      {"ClassByName", Input(1005, high, "a", 900, 90),
       Input(1000, low, "b", 1, 1)},
      {"Arena", Input(1005, high, "a", 100, 90), Input(1000, low, "a", 101, 1)},
      {"Registers", Input(1005, high, "a", 100, 32),
       Input(1000, low, "a", 100, 33)},
      {"Key", Input(1005, low, "a", 100, 32), Input(1000, high, "a", 100, 32)},
  };
}

INSTANTIATE_TEST_SUITE_P(Rules, SelectionTieTest,
                         ::testing::ValuesIn(TieCases()),
                         [](const auto& test) { return test.param.name; });

TEST(SelectionTest, ATieReachesNoFurtherThanTheMargin) {
  // Better by every tie rule, but 1.1 % slower than the fastest.
  EXPECT_THAT(SelectWinner({Input(2000, "default"), Input(1011, "b", "a", 1, 1),
                            Input(1000, "c", "z", 900, 90)},
                           0),
              Optional(Eq(2u)));
}

TEST(SelectionTest, ATieCannotPickWhatDoesNotBeatTheDefault) {
  // 1000 beats 1015 by more than the margin; 1008 would win the tie, but does
  // not beat the default itself.
  EXPECT_THAT(SelectWinner({Input(1015, "default"), Input(1008, "b", "a", 1, 1),
                            Input(1000, "c")},
                           0),
              Optional(Eq(2u)));
}

TEST(SelectionTest, TimesThatAreNotNumbersNeverWin) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(SelectWinner({Input(nan, "a"), Input(1000, "b")}, 0),
              Optional(Eq(1u)));
  EXPECT_THAT(SelectWinner({Input(1000, "a"), Input(nan, "b")}, 0),
              Optional(Eq(0u)));
  EXPECT_EQ(SelectWinner({Input(nan, "a")}, 0), std::nullopt);
}

// The order in which challengers are listed must not matter: ranks may compile
// and time them in different orders.
TEST(SelectionTest, DoesNotDependOnTheOrderOfTheChallengers) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    std::vector<SelectionInput> inputs;
    const size_t count = 2 + random() % 8;
    for (size_t i = 0; i < count; ++i) {
      // Few distinct values, so that ties of every kind occur.
      SelectionInput input =
          Input(1000 + static_cast<double>(random() % 5) * 4, std::to_string(i),
                std::string(1, "abd"[random() % 3]), random() % 3,
                static_cast<uint32_t>(random() % 3));
      input.eligible = random() % 5 != 0;
      inputs.push_back(input);
    }
    if (round % 2 == 0) inputs[0].median_ns = 1500;
    const double noise = static_cast<double>(random() % 3) * 0.002;
    const std::optional<size_t> expected = SelectWinner(inputs, noise);
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), size_t{0});
    for (int shuffle = 0; shuffle < 10; ++shuffle) {
      std::shuffle(order.begin() + 1, order.end(), random);
      std::vector<SelectionInput> shuffled;
      for (const size_t index : order) shuffled.push_back(inputs[index]);
      const std::optional<size_t> winner = SelectWinner(shuffled, noise);
      ASSERT_EQ(winner.has_value(), expected.has_value());
      if (winner.has_value()) {
        ASSERT_EQ(inputs[order[*winner]].key, inputs[*expected].key)
            << "round " << round;
      }
    }
  }
}

TEST(SelectionTest, TheWinnerIsEligibleAndNeverClearlySlowerThanTheBest) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 1000; ++round) {
    std::vector<SelectionInput> inputs;
    double best = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < 1 + random() % 6; ++i) {
      SelectionInput input =
          Input(900 + static_cast<double>(random() % 200), std::to_string(i),
                std::string(1, "ab"[random() % 2]), random() % 2, 1);
      input.eligible = random() % 4 != 0;
      if (input.eligible) best = std::min(best, input.median_ns);
      inputs.push_back(input);
    }
    const double noise = static_cast<double>(random() % 4) * 0.003;
    const std::optional<size_t> winner = SelectWinner(inputs, noise);
    ASSERT_EQ(winner.has_value(), std::isfinite(best));
    if (!winner.has_value()) continue;
    ASSERT_TRUE(inputs[*winner].eligible);
    ASSERT_LE(inputs[*winner].median_ns, best * (1 + DefaultMargin(noise)));
  }
}

}  // namespace
}  // namespace kiln
