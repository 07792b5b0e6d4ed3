// What a miss is explained with: every field that differs, with both values.

#include "tuner/explain.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cache/cache_fixture.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::testing::ElementsAre;
using ::testing::Eq;
using ::testing::IsEmpty;
using testing::IsOkAndHolds;
using testing::MakePlan;
using testing::MakeProgram;
using testing::MakeTestPlanKey;
using testing::StatusIs;
using testing::TestOptions;

TEST(ExplainTest, NamesChangedAddedAndRemovedFields) {
  CanonicalEncoder stored("kiln.test/1");
  stored.Text("same", "x").Begin("device").Number("driver", 1).End();
  stored.Text("list", "a").Text("list", "b").Flag("only_stored", true);
  CanonicalEncoder wanted("kiln.test/1");
  wanted.Text("same", "x").Begin("device").Number("driver", 2).End();
  wanted.Text("list", "a").Text("list", "c").Text("list", "d");
  EXPECT_THAT(CompareKeys(stored.bytes(), wanted.bytes()),
              IsOkAndHolds(ElementsAre(
                  FieldDifference{"device/driver", "1", "2"},
                  FieldDifference{"list", "b", "c"},
                  FieldDifference{"list", std::nullopt, "d"},
                  FieldDifference{"only_stored", "true", std::nullopt})));
  EXPECT_THAT(CompareKeys(stored.bytes(), stored.bytes()),
              IsOkAndHolds(IsEmpty()));
  EXPECT_THAT(CompareKeys("nonsense", wanted.bytes()).status(),
              StatusIs(absl::StatusCode::kDataLoss));
}

TEST(ExplainTest, FindsThePlanWithTheFewestDifferences) {
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(TestOptions("", CacheMode::kOff)));
  Plan wanted = MakePlan(1, {MakeProgram(1).key.digest});
  EXPECT_THAT(FindNearestPlan(MakeTestPlanKey(wanted), &cache),
              IsOkAndHolds(Eq(std::nullopt)));
  ASSERT_OK(cache.PutProgram(MakeProgram(1)));
  Plan near = wanted;
  near.geometry.experts = 64;
  Plan far = near;
  far.geometry.hidden = 4096;
  for (const Plan& plan : {far, near}) {
    ASSERT_OK(cache.PutPlan(MakeTestPlanKey(plan), plan, {}));
  }
  ASSERT_OK_AND_ASSIGN(const std::optional<NearestPlan> nearest,
                       FindNearestPlan(MakeTestPlanKey(wanted), &cache));
  ASSERT_TRUE(nearest.has_value());
  EXPECT_EQ(nearest->stored.key, MakeTestPlanKey(near));
  ASSERT_EQ(nearest->differences.size(), 1u);
  EXPECT_EQ(nearest->differences[0].stored, "64");
  EXPECT_EQ(nearest->differences[0].wanted, "128");
}

}  // namespace
}  // namespace kiln
