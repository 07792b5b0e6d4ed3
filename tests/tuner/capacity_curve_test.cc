#include "tuner/capacity_curve.h"

#include <map>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kiln {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Points for 1, 2, 4, 8, ...
class CapacityCurveTest : public ::testing::Test {
 protected:
  void Add(const std::string& winner,
           const std::map<std::string, double>& rivals) {
    CurvePoint point;
    point.interval = {next_min_, next_max_};
    next_min_ = next_max_ + 1;
    next_max_ *= 2;
    point.winner = winner;
    point.regrets = rivals;
    point.regrets[winner] = 0;
    points_.push_back(point);
  }

  std::vector<CurvePoint> points_;
  uint32_t next_min_ = 1;
  uint32_t next_max_ = 1;
};

TEST_F(CapacityCurveTest, NothingToMerge) {
  EXPECT_THAT(MergeIntervals({}, 0.01), IsEmpty());
  Add("a", {});
  EXPECT_THAT(MergeIntervals(points_, 0.01),
              ElementsAre(CurveSegment{0, 0, 0}));
}

TEST_F(CapacityCurveTest, EqualWinnersMergeEvenWithoutACap) {
  Add("a", {});
  Add("a", {});
  Add("b", {{"a", 0.001}});
  EXPECT_THAT(MergeIntervals(points_, 0),
              ElementsAre(CurveSegment{0, 1, 0}, CurveSegment{2, 2, 0}));
}

TEST_F(CapacityCurveTest, APlanWithinTheCapTakesTheSmallerInterval) {
  Add("a", {{"b", 0.009}});
  Add("b", {{"a", 0.5}});
  EXPECT_THAT(MergeIntervals(points_, 0.01),
              ElementsAre(CurveSegment{0, 1, 0.009}));
  EXPECT_THAT(MergeIntervals(points_, 0.008),
              ElementsAre(CurveSegment{0, 0, 0}, CurveSegment{1, 1, 0}));
}

TEST_F(CapacityCurveTest, OnlyTheWinnerOfTheLargestCapacityServesAll) {
  // "a" would do for both, but the stored plan of the larger one is "b".
  Add("a", {});
  Add("b", {{"a", 0.001}});
  EXPECT_THAT(MergeIntervals(points_, 0.01),
              ElementsAre(CurveSegment{0, 0, 0}, CurveSegment{1, 1, 0}));
}

TEST_F(CapacityCurveTest, WhatWasNotTimedToTheEndDoesNotMerge) {
  Add("a", {{"c", 0.001}});
  Add("b", {{"c", 0.001}});
  Add("c", {});
  EXPECT_THAT(MergeIntervals(points_, 0.01),
              ElementsAre(CurveSegment{0, 2, 0.001}));
  points_[1].regrets.erase("c");
  EXPECT_THAT(MergeIntervals(points_, 0.01),
              ElementsAre(CurveSegment{0, 0, 0}, CurveSegment{1, 1, 0},
                          CurveSegment{2, 2, 0}));
}

TEST_F(CapacityCurveTest, FewestIntervalsThenLeastRegret) {
  // {0,1} + {2} and {0} + {1,2} are both two; the second costs less.
  Add("a", {{"b", 0.008}});
  Add("b", {{"c", 0.002}});
  Add("c", {});
  EXPECT_THAT(MergeIntervals(points_, 0.01),
              ElementsAre(CurveSegment{0, 0, 0}, CurveSegment{1, 2, 0.002}));
}

TEST_F(CapacityCurveTest, IntervalsThatDoNotTouchStayApart) {
  Add("a", {});
  Add("a", {});
  points_[1].interval.m_min += 1;
  EXPECT_EQ(MergeIntervals(points_, 0.01).size(), 2u);
}

TEST_F(CapacityCurveTest, PredictedPlansStayApart) {
  Plan plan;
  plan.interval = {1, 4};
  plan.body.template_name = "t";
  CurvePoint small = CurvePointOf(plan, {});
  plan.interval = {5, 8};
  EXPECT_EQ(MergeIntervals({small, CurvePointOf(plan, {})}, 1).size(), 2u);
}

// Whatever the samples are: no gap, no overlap, no regret beyond the cap.
TEST_F(CapacityCurveTest, LeavesNoGapAndKeepsTheCap) {
  std::mt19937 random(5);
  const std::vector<std::string> names = {"a", "b", "c", "d"};
  for (int round = 0; round < 500; ++round) {
    points_.clear();
    next_min_ = next_max_ = 1;
    for (int i = 0; i < 12; ++i) {
      std::map<std::string, double> rivals;
      for (const std::string& name : names) {
        if (random() % 4 != 0)
          rivals[name] = static_cast<double>(random() % 40) / 1000.0;
      }
      Add(names[random() % names.size()], rivals);
    }
    const std::vector<CurveSegment> segments = MergeIntervals(points_, 0.01);
    size_t next = 0;
    for (const CurveSegment& segment : segments) {
      ASSERT_EQ(segment.first, next);
      ASSERT_LE(segment.first, segment.last);
      next = segment.last + 1;
      const std::string& plan = points_[segment.last].winner;
      for (size_t i = segment.first; i <= segment.last; ++i) {
        ASSERT_LE(points_[i].regrets.at(plan), 0.01);
        ASSERT_LE(points_[i].regrets.at(plan), segment.regret);
      }
    }
    ASSERT_EQ(next, points_.size());
    ASSERT_LE(MergeIntervals(points_, 0.04).size(), segments.size());
  }
}

}  // namespace
}  // namespace kiln
