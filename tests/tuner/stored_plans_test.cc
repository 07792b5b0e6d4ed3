#include "tuner/stored_plans.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "compiler/spec/manifest.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

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

  static PrewarmOptions OneCandidate() {
    PrewarmOptions options;
    options.candidates_max = 1;
    return options;
  }

  // Keys of the request for the contexts as they are now.
  void Resolve(const PrewarmOptions& options = OneCandidate()) {
    PlannedRequest request;
    request.geometry.hidden = 256;
    request.geometry.intermediate = 128;
    request.geometry.experts = 4;
    request.geometry.top_k = 2;
    request.geometry.weights.bits = {4, 4, 4};
    request.names = {"moe"};
    request.intervals = {{1, 1}, {2, 4}};
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
             double median_ns,
             const std::optional<Ceilings>& ceilings = std::nullopt) {
    const ResolvedInterval& resolved = intervals_[index];
    Planner planner(resolved.geometry, device, contexts_[0].setup.toolchain,
                    {.candidates_max = 1, .ceilings = ceilings});
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

  // Reads `read` times what Some GPU decodes.
  static Ceilings Measured(double read) {
    Ceilings ceilings;
    ceilings.read_bytes_per_s = read * 5e12;
    ceilings.mma_flops_per_s = 500e12;
    ceilings.decode_weights_per_s = {{{Codebook::kMcg, 4}, 5e12}};
    return ceilings;
  }

  // As kiln doctor --measure leaves it.
  void Remember(const DeviceProfile& device, const Ceilings& ceilings) {
    ASSERT_OK(cache_.PutMemo(CeilingsKey(device), CeilingsToJson(ceilings)));
  }

  // Remembers that every candidate of interval `index` was wrong, or did not
  // compile.
  void RejectAll(size_t index, bool compile) {
    ASSERT_OK_AND_ASSIGN(
        const IntervalPlan plan,
        intervals_[index].planner->Plan(intervals_[index].interval));
    for (const PlannedCandidate& candidate : plan.candidates) {
      Reject reject;
      reject.key = candidate.digest;
      reject.stage = RejectStage::kVerify;
      reject.reason = "row 3 is off";
      if (compile) {
        reject.key = candidate.programs[0].digest;
        reject.preimage = candidate.programs[0].preimage;
        reject.stage = RejectStage::kCompile;
        reject.reason = "line 7 is bad";
      }
      ASSERT_OK(cache_.PutReject(reject));
    }
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

TEST_F(StoredPlansTest, CandidatesThatAllFailedAreToldInsteadOfPrewarm) {
  RejectAll(0, false);
  EXPECT_THAT(
      Find(),
      StatusIs(
          absl::StatusCode::kNotFound,
          AllOf(HasSubstr("moe m 1..1 on sm_90a"), HasSubstr("candidate"),
                HasSubstr("rejected"), HasSubstr("at verify: row 3 is off"),
                HasSubstr("kiln cache gc"), HasSubstr("kiln explain"),
                Not(HasSubstr("same manifest")))));
}

TEST_F(StoredPlansTest, CandidatesThatDoNotCompileAreToldToo) {
  RejectAll(0, true);
  EXPECT_THAT(Find(), StatusIs(absl::StatusCode::kNotFound,
                               AllOf(HasSubstr("at compile: line 7 is bad"),
                                     Not(HasSubstr("same manifest")))));
}

TEST_F(StoredPlansTest, WhereOneCandidateIsLeftPrewarmIsTheAdvice) {
  PrewarmOptions options;
  options.candidates_max = 2;
  Resolve(options);
  ASSERT_OK_AND_ASSIGN(const IntervalPlan plan,
                       intervals_[0].planner->Plan(intervals_[0].interval));
  ASSERT_GE(plan.candidates.size(), 2u);
  Reject reject;
  reject.key = plan.candidates[0].digest;
  reject.stage = RejectStage::kVerify;
  reject.reason = "row 3 is off";
  ASSERT_OK(cache_.PutReject(reject));
  EXPECT_THAT(Find(), StatusIs(absl::StatusCode::kNotFound,
                               AllOf(HasSubstr("same manifest"),
                                     HasSubstr("kiln explain"))));
}

TEST_F(StoredPlansTest, LimitsThatLeaveNoCandidateAreTold) {
  PrewarmOptions options;
  options.candidates_max = 1;
  options.arena_bytes_max = 16;
  Resolve(options);
  EXPECT_THAT(Find(), StatusIs(absl::StatusCode::kNotFound,
                               AllOf(HasSubstr("no candidate is legal"),
                                     HasSubstr("exceeds the limit of 16"),
                                     Not(HasSubstr("same manifest")))));
}

TEST_F(StoredPlansTest, AnotherBalanceOfTheDeviceIsTold) {
  const DeviceProfile here = Gpu(132);
  contexts_[0].profile = here;
  contexts_[0].ceilings = Measured(1);
  Resolve();
  Store(0, here, PlanState::kMeasured, 1000, Measured(2));
  EXPECT_THAT(
      Find(),
      StatusIs(
          absl::StatusCode::kNotFound,
          AllOf(HasSubstr("another balance of this device, \"decode -3 mma "
                          "17\""),
                HasSubstr("found last, \"decode 0 mma 20\""),
                HasSubstr("run kiln prewarm again"))));
  contexts_[0].ceilings.reset();
  Resolve();
  EXPECT_THAT(Find(), StatusIs(absl::StatusCode::kNotFound,
                               AllOf(HasSubstr("has no measurement of it"),
                                     HasSubstr("kiln doctor --measure"))));
}

TEST_F(StoredPlansTest, APlanThatWasMadeBeforeTheMeasurementIsTold) {
  const DeviceProfile here = Gpu(132);
  contexts_[0].profile = here;
  contexts_[0].ceilings = Measured(1);
  Resolve();
  Store(0, here, PlanState::kMeasured, 1000);
  EXPECT_THAT(Find(),
              StatusIs(absl::StatusCode::kNotFound,
                       AllOf(HasSubstr("made before kiln doctor --measure"),
                             HasSubstr("\"decode 0 mma 20\""))));
}

// A build host has no measurement of a device that it lacks.
TEST_F(StoredPlansTest, PlansOfAMeasuredDeviceAnswerElsewhere) {
  for (const size_t i : {0u, 1u}) {
    Store(i, Gpu(132), PlanState::kMeasured, 1000, Measured(1));
  }
  ASSERT_OK_AND_ASSIGN(const std::vector<StoredPlan> plans, Find());
  EXPECT_EQ(plans[0].plan.evidence.median_ns, 1000);
}

TEST_F(StoredPlansTest, OfSeveralBalancesTheOneThatTheCacheHoldsCounts) {
  for (const size_t i : {0u, 1u}) {
    Store(i, Gpu(132), PlanState::kMeasured, 1000, Measured(1));
    Store(i, Gpu(132), PlanState::kMeasured, 900, Measured(2));
  }
  EXPECT_THAT(Find(), StatusIs(absl::StatusCode::kFailedPrecondition,
                               AllOf(HasSubstr("2 balances"),
                                     HasSubstr("multiprocessors 132"))));
  Remember(Gpu(132), Measured(1));
  ASSERT_OK_AND_ASSIGN(const std::vector<StoredPlan> plans, Find());
  EXPECT_EQ(plans[0].plan.evidence.median_ns, 1000);
}

}  // namespace
}  // namespace kiln
