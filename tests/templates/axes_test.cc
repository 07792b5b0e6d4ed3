#include "templates/axes.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::StatusIs;

const std::vector<Axis> kAxes = {{"tile", {8, 16}}, {"warps", {1, 2, 4}}};

std::string NoRule(const AxisPoint&) { return ""; }

std::vector<std::string> Texts(const std::vector<Assignment>& points) {
  std::vector<std::string> texts;
  for (const Assignment& point : points) texts.push_back(AssignmentText(point));
  return texts;
}

TEST(CheckAssignmentTest, AcceptsExactlyTheAxesWithTheirValues) {
  EXPECT_OK(CheckAssignment(kAxes, {{"tile", 16}, {"warps", 1}}));
  EXPECT_OK(CheckAssignment({}, {}));
}

TEST(CheckAssignmentTest, NamesTheAxisTheValueAndTheRule) {
  const auto code = absl::StatusCode::kInvalidArgument;
  EXPECT_THAT(CheckAssignment(kAxes, {{"tile", 16}}),
              StatusIs(code, HasSubstr("axis warps has no value")));
  EXPECT_THAT(CheckAssignment(kAxes, {{"tile", 9}, {"warps", 1}}),
              StatusIs(code, AllOf(HasSubstr("axis tile is 9"),
                                   HasSubstr("one of 8, 16"))));
  EXPECT_THAT(CheckAssignment(kAxes, {{"tile", 8}, {"warps", 1}, {"x", 1}}),
              StatusIs(code, HasSubstr("has 3 axes, expected 2")));
  EXPECT_THAT(CheckAssignment({}, {{"x", 1}}), StatusIs(code));
}

TEST(AxisPointTest, ReadsAnAssignmentAndGivesItBack) {
  const Assignment assignment = {{"tile", 16}, {"warps", 4}};
  const AxisPoint point(&kAxes, assignment);
  EXPECT_EQ(point.at("tile"), 16);
  EXPECT_EQ(point.at("warps"), 4);
  EXPECT_THAT(point.values(), ElementsAre(16, 4));
  EXPECT_EQ(point.ToAssignment(), assignment);
}

TEST(OrderPointsTest, HasEveryPointOnceInTheOrderOfTheProductWhenAllAreEqual) {
  const ParamSpace space = OrderPoints(
      kAxes, {}, NoRule, [](const AxisPoint&) { return 1.0; }, 100);
  EXPECT_THAT(
      Texts(space.points),
      ElementsAre("tile=8,warps=1", "tile=8,warps=2", "tile=8,warps=4",
                  "tile=16,warps=1", "tile=16,warps=2", "tile=16,warps=4"));
  EXPECT_EQ(space.legal, 6u);
  EXPECT_TRUE(space.rejects.empty());
}

TEST(OrderPointsTest, PutsTheCheapestFirst) {
  const ParamSpace space = OrderPoints(
      kAxes, {}, NoRule,
      [](const AxisPoint& point) {
        return static_cast<double>(100 / point.at("tile") + point.at("warps"));
      },
      3);
  EXPECT_THAT(
      Texts(space.points),
      ElementsAre("tile=16,warps=1", "tile=16,warps=2", "tile=16,warps=4"));
  EXPECT_EQ(space.legal, 6u) << "the limit must not hide how many are legal";
}

TEST(OrderPointsTest, CountsRejectsByReasonSorted) {
  const ParamSpace space = OrderPoints(
      kAxes, {},
      [](const AxisPoint& point) -> std::string {
        if (point.at("warps") == 4) return "too many warps";
        if (point.at("tile") == 16) return "tile 16 is too large";
        return "";
      },
      [](const AxisPoint&) { return 0.0; }, 100);
  EXPECT_THAT(Texts(space.points),
              ElementsAre("tile=8,warps=1", "tile=8,warps=2"));
  EXPECT_EQ(space.legal, 2u);
  ASSERT_EQ(space.rejects.size(), 2u);
  EXPECT_EQ(space.rejects[0].reason, "tile 16 is too large");
  EXPECT_EQ(space.rejects[0].count, 2u);
  EXPECT_EQ(space.rejects[1].reason, "too many warps");
  EXPECT_EQ(space.rejects[1].count, 2u);
}

// With "warps" as a variant, a short prefix has every tile once before any
// tile twice, although the second variant of tile 8 beats the first of tile 16.
TEST(OrderPointsTest, TakesEveryGroupsBestBeforeAnySecond) {
  const auto cost = [](const AxisPoint& point) {
    return static_cast<double>(point.at("tile") * 10 - point.at("warps"));
  };
  const ParamSpace space = OrderPoints(kAxes, {"warps"}, NoRule, cost, 100);
  EXPECT_THAT(
      Texts(space.points),
      ElementsAre("tile=8,warps=4", "tile=16,warps=4", "tile=8,warps=2",
                  "tile=16,warps=2", "tile=8,warps=1", "tile=16,warps=1"));
  for (size_t limit = 1; limit < 6; ++limit) {
    const ParamSpace prefix =
        OrderPoints(kAxes, {"warps"}, NoRule, cost, limit);
    ASSERT_EQ(prefix.points.size(), limit);
    EXPECT_TRUE(std::equal(prefix.points.begin(), prefix.points.end(),
                           space.points.begin()));
    EXPECT_EQ(prefix.legal, 6u);
  }
}

TEST(AxisPreludeTest, DefinesTheNamedAxesInTheGivenOrder) {
  const Assignment assignment = {
      {"k_tile", 64}, {"split", 2}, {"tokens_tile", 8}};
  EXPECT_EQ(AxisPrelude(assignment, {"tokens_tile", "k_tile"}),
            "#define KILN_TOKENS_TILE 8\n#define KILN_K_TILE 64\n");
  EXPECT_EQ(AxisPrelude(assignment, {}), "");
}

}  // namespace
}  // namespace kiln
