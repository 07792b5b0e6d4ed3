#include "compiler/base/status_macros.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "compiler/base/check.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::IsOk;
using ::kiln::testing::IsOkAndHolds;
using ::kiln::testing::StatusIs;
using ::testing::Eq;
using ::testing::Not;

TEST(AnnotateTest, KeepsTheCodeAndPutsTheContextFirst) {
  EXPECT_THAT(Annotate(absl::NotFoundError("no plan"), "layer 3"),
              StatusIs(absl::StatusCode::kNotFound, Eq("layer 3: no plan")));
}

TEST(AnnotateTest, LeavesOkAlone) {
  EXPECT_OK(Annotate(absl::OkStatus(), "layer 3"));
}

absl::Status ReturnsEarly(const absl::Status& status, bool* passed) {
  RETURN_IF_ERROR(status);
  *passed = true;
  return absl::OkStatus();
}

TEST(ReturnIfErrorTest, ReturnsOnlyErrors) {
  bool passed = false;
  EXPECT_THAT(ReturnsEarly(absl::DataLossError("bad"), &passed),
              StatusIs(absl::StatusCode::kDataLoss, Eq("bad")));
  EXPECT_FALSE(passed);
  EXPECT_OK(ReturnsEarly(absl::OkStatus(), &passed));
  EXPECT_TRUE(passed);
}

absl::StatusOr<int> Doubled(absl::StatusOr<std::unique_ptr<int>> value) {
  ASSIGN_OR_RETURN(const std::unique_ptr<int> held, std::move(value));
  return 2 * *held;
}

TEST(AssignOrReturnTest, MovesTheValueOrReturnsTheError) {
  EXPECT_THAT(Doubled(std::make_unique<int>(21)), IsOkAndHolds(42));
  EXPECT_THAT(Doubled(absl::UnavailableError("later")),
              StatusIs(absl::StatusCode::kUnavailable, Eq("later")));
}

TEST(StatusMatchersTest, TellValuesAndCodesApart) {
  const absl::StatusOr<int> seven = 7;
  EXPECT_THAT(seven, Not(IsOkAndHolds(8)));
  EXPECT_THAT(seven, Not(StatusIs(absl::StatusCode::kNotFound)));
  EXPECT_THAT(absl::InternalError("x"), Not(IsOk()));
  EXPECT_THAT(absl::InternalError("x"),
              Not(StatusIs(absl::StatusCode::kInternal, Eq("y"))));
}

TEST(CheckDeathTest, NamesTheConditionAndAborts) {
  EXPECT_DEATH(KILN_CHECK(1 + 1 == 3), "check failed: 1 \\+ 1 == 3");
  EXPECT_DEATH(KILN_UNREACHABLE(), "check failed: unreachable");
}

}  // namespace
}  // namespace kiln
