#include "tuner/conclusion.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace kiln {
namespace {

class ConclusionTest : public ::testing::Test {
 protected:
  ConclusionTest() { bodies_.reserve(8); }

  // Adds a candidate with samples around `ns`; returns its entry.
  RaceEntry& Add(Outcome outcome, double ns) {
    PlanBody& body = bodies_.emplace_back();
    body.template_name = absl::StrCat("t", bodies_.size());
    body.numerics_class = "n";
    body.arena.bytes = 256 * bodies_.size();
    RaceEntry& entry = entries_.emplace_back();
    entry.body = &body;
    entry.digest = Sha256(body.template_name);
    entry.registers = 32;
    Timing timing;
    timing.outcome = outcome;
    timing.worst_error = 1e-4;
    for (uint32_t block = 0; block < 5 && ns > 0; ++block) {
      timing.samples.push_back({block, ns + block});
    }
    entry.timing = timing;
    return entry;
  }

  // A candidate that could not enter.
  RaceEntry& AddAbsent(const std::string& problem) {
    RaceEntry& entry = Add(Outcome::kRejected, 0);
    entry.timing.reset();
    entry.problem = problem;
    return entry;
  }

  std::vector<PlanBody> bodies_;
  std::vector<RaceEntry> entries_;
};

TEST_F(ConclusionTest, TheFastestThatIsRightWins) {
  Add(Outcome::kFinished, 1000);
  Add(Outcome::kFinished, 800);
  Add(Outcome::kRejected, 0).timing->reason = "row 3 is wrong";
  Add(Outcome::kEliminated, 1500);
  Add(Outcome::kIdentical, 0);
  const Conclusion conclusion = Conclude(entries_, 0.001);
  ASSERT_EQ(conclusion.winner, 1u);
  ASSERT_EQ(conclusion.evidence.size(), 5u);
  EXPECT_EQ(conclusion.evidence[0].verdict, Verdict::kLost);
  EXPECT_NEAR(conclusion.evidence[0].regret, 1002.0 / 802 - 1, 1e-12);
  EXPECT_EQ(conclusion.evidence[1].verdict, Verdict::kWon);
  EXPECT_EQ(conclusion.evidence[1].regret, 0);
  EXPECT_EQ(conclusion.evidence[1].samples.size(), 5u);
  EXPECT_EQ(conclusion.evidence[2].verdict, Verdict::kRejected);
  EXPECT_EQ(conclusion.evidence[2].reason, "row 3 is wrong");
  EXPECT_EQ(conclusion.evidence[3].verdict, Verdict::kEliminated);
  EXPECT_GT(conclusion.evidence[3].regret, 0.5);
  EXPECT_EQ(conclusion.evidence[4].verdict, Verdict::kIdentical);
  EXPECT_TRUE(std::isnan(conclusion.evidence[4].regret));
}

TEST_F(ConclusionTest, AnEliminatedCandidateCannotWin) {
  Add(Outcome::kFinished, 1000);
  Add(Outcome::kEliminated, 500);
  EXPECT_EQ(Conclude(entries_, 0).winner, 0u);
}

TEST_F(ConclusionTest, WithoutTheDefaultNobodyHasToBeatIt) {
  AddAbsent("its program did not compile");
  Add(Outcome::kFinished, 1000);
  Add(Outcome::kFinished, 999);
  const Conclusion conclusion = Conclude(entries_, 0);
  // 999 and 1000 tie; the smaller arena decides.
  EXPECT_EQ(conclusion.winner, 1u);
  EXPECT_EQ(conclusion.evidence[0].reason, "its program did not compile");
  EXPECT_TRUE(std::isnan(conclusion.evidence[0].worst_error));
}

TEST_F(ConclusionTest, NobodyWinsWhenNobodyIsRight) {
  Add(Outcome::kRejected, 0);
  AddAbsent("gone");
  const Conclusion conclusion = Conclude(entries_, 0);
  EXPECT_EQ(conclusion.winner, std::nullopt);
  EXPECT_EQ(WinnerOf(conclusion.evidence, 0), std::nullopt);
}

TEST_F(ConclusionTest, StoredEvidenceLeadsToTheSameWinner) {
  for (const double noise : {0.0, 0.001, 0.02, 0.2}) {
    for (int round = 0; round < 50; ++round) {
      bodies_.clear();
      entries_.clear();
      for (int i = 0; i < 6; ++i) {
        Add(i == round % 7 ? Outcome::kEliminated : Outcome::kFinished,
            1000 + (round * 37 + i * i * 53) % 200);
      }
      const Conclusion conclusion = Conclude(entries_, noise);
      EXPECT_EQ(WinnerOf(conclusion.evidence, noise), conclusion.winner);
    }
  }
}

}  // namespace
}  // namespace kiln
