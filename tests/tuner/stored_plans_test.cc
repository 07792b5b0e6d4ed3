#include "tuner/stored_plans.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "compiler/spec/manifest.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

// A build host without a GPU and a cache that came from elsewhere.
class StoredPlansTest : public ::testing::Test {
 protected:
  StoredPlansTest() : cache_(PlanCache::Open("", CacheMode::kOff).value()) {
    TargetContext context;
    context.target = ParseTarget("sm_90a").value();
    context.profile = AssumedProfile(context.target);
    context.setup.toolchain = {"nvrtc", "13.0.88", Sha256("library")};
    contexts_ = {context};
    Resolve();
  }

  // Keys of the request for the contexts as they are now.
  void Resolve() {
    PlannedRequest request;
    request.geometry.hidden = 256;
    request.geometry.intermediate = 128;
    request.geometry.experts = 4;
    request.geometry.top_k = 2;
    request.geometry.weights.bits = {4, 4, 4};
    request.names = {"moe"};
    request.intervals = {{1, 1}, {2, 4}};
    PrewarmOptions options;
    options.candidates_max = 1;
    intervals_ = ResolveIntervals({request}, contexts_, options).value();
  }

  static DeviceProfile Gpu(int multiprocessors) {
    DeviceProfile profile = AssumedProfile(ParseTarget("sm_90a").value());
    profile.assumed = false;
    profile.multiprocessors = multiprocessors;
    profile.memory_gib = 144;
    profile.driver_version = 13000;
    profile.name = "Some GPU";
    return profile;
  }

  // Stores a plan of interval `index` as if `device` had measured it.
  void Store(size_t index, const DeviceProfile& device, PlanState state,
             double median_ns) {
    const ResolvedInterval& resolved = intervals_[index];
    Planner planner(resolved.geometry, device, contexts_[0].setup.toolchain,
                    {1});
    const IntervalPlan planned = planner.Plan(resolved.interval).value();
    const PlannedCandidate& candidate = planned.candidates[0];
    Plan plan;
    plan.geometry = resolved.geometry;
    plan.target = contexts_[0].target;
    plan.interval = resolved.interval;
    plan.body = candidate.body;
    plan.evidence.state = state;
    plan.evidence.median_ns = median_ns;
    for (const ProgramKey& key : candidate.programs) {
      Program program;
      program.key = key;
      program.target = plan.target;
      program.toolchain = contexts_[0].setup.toolchain;
      program.binary = "binary of " + key.digest.ToHex();
      program.binary_digest = Sha256(program.binary);
      ASSERT_OK(cache_.PutProgram(program));
      plan.programs.push_back(key.digest);
    }
    ASSERT_OK(cache_.PutPlan(planner.KeyOf(resolved.interval), plan, {}));
  }

  absl::StatusOr<std::vector<StoredPlan>> Find(bool measured_elsewhere = true) {
    return FindStoredPlans(intervals_, contexts_, measured_elsewhere, &cache_);
  }

  PlanCache cache_;
  std::vector<TargetContext> contexts_;
  std::vector<ResolvedInterval> intervals_;
};

TEST_F(StoredPlansTest, NothingStoredNamesTheIntervalAndTheCommand) {
  EXPECT_THAT(Find(), StatusIs(absl::StatusCode::kNotFound,
                               AllOf(HasSubstr("moe m 1..1 on sm_90a"),
                                     HasSubstr("kiln prewarm"))));
}

TEST_F(StoredPlansTest, PlansMeasuredElsewhereBeatPredictedOnes) {
  for (const size_t i : {0u, 1u}) {
    Store(i, contexts_[0].profile, PlanState::kPredicted, 0);
    Store(i, Gpu(132), PlanState::kMeasured, 1000 + static_cast<double>(i));
  }
  ASSERT_OK_AND_ASSIGN(const std::vector<StoredPlan> plans, Find());
  ASSERT_EQ(plans.size(), 2u);
  EXPECT_EQ(plans[0].plan.evidence.median_ns, 1000);
  EXPECT_EQ(plans[1].plan.evidence.median_ns, 1001);
  EXPECT_EQ(plans[1].plan.interval, intervals_[1].interval);

  ASSERT_OK_AND_ASSIGN(const std::vector<StoredPlan> predicted, Find(false));
  EXPECT_EQ(predicted[0].plan.evidence.state, PlanState::kPredicted);
}

TEST_F(StoredPlansTest, ADeviceThatMeasuredOnlySomeIntervalsDoesNotAnswer) {
  Store(0, Gpu(132), PlanState::kMeasured, 1000);
  EXPECT_THAT(Find(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("moe m 1..1")));
  for (const size_t i : {0u, 1u}) {
    Store(i, contexts_[0].profile, PlanState::kPredicted, 0);
  }
  ASSERT_OK_AND_ASSIGN(const std::vector<StoredPlan> plans, Find());
  // Never a mixture of a measured plan and a guess for its neighbour.
  EXPECT_EQ(plans[0].plan.evidence.state, PlanState::kPredicted);
  EXPECT_EQ(plans[1].plan.evidence.state, PlanState::kPredicted);
}

TEST_F(StoredPlansTest, TwoKindsOfDevicesAreNotChosenBetween) {
  for (const size_t i : {0u, 1u}) {
    Store(i, Gpu(132), PlanState::kMeasured, 1000);
    Store(i, Gpu(114), PlanState::kMeasured, 900);
  }
  EXPECT_THAT(Find(), StatusIs(absl::StatusCode::kFailedPrecondition,
                               AllOf(HasSubstr("2 kinds of devices"),
                                     HasSubstr("multiprocessors 132"),
                                     HasSubstr("multiprocessors 114"))));
}

TEST_F(StoredPlansTest, AnotherCompilerIsAMiss) {
  for (const size_t i : {0u, 1u}) {
    Store(i, Gpu(132), PlanState::kMeasured, 1000);
  }
  contexts_[0].setup.toolchain.version = "13.1";
  Resolve();
  EXPECT_THAT(Find(), StatusIs(absl::StatusCode::kNotFound));
}

TEST_F(StoredPlansTest, AMachineWithTheDeviceTakesOnlyItsOwn) {
  for (const size_t i : {0u, 1u}) {
    Store(i, Gpu(132), PlanState::kMeasured, 1000);
  }
  contexts_[0].profile = Gpu(114);
  Resolve();
  EXPECT_THAT(Find(), StatusIs(absl::StatusCode::kNotFound));
}

}  // namespace
}  // namespace kiln
