// Race workers on a GPU, with kernels that spin, trap and write where nothing
// is: the context of the worker is lost, the device is not.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "compiler/compile_pool.h"
#include "compiler/toolchain_probe.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/tuner/bad_programs.h"
#include "tests/tuner/cpu_programs.h"
#include "tuner/device_lock.h"
#include "tuner/nvml.h"
#include "tuner/planner.h"
#include "tuner/remote_racer.h"

namespace kiln {
namespace {

using testing::Deed;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr Interval kInterval = {1, 8};
constexpr size_t kCandidates = 3;

std::string KilnPath() {
  return std::string(std::getenv("KILN_BIN_DIR")) + "/kiln";
}

class RemoteRacerGpuTest : public ::testing::Test {
 protected:
  // Everything is compiled once: three candidates as they are, and the second
  // one with each deed.
  static void SetUpTestSuite() {
    if (ListCudaDevices().empty()) return;
    profile_ = new DeviceProfile(ListCudaDevices()[0]);
    const absl::StatusOr<CompilerSetup> setup =
        ProbeNvrtc({.library = "", .folders = {}, .worker = KilnPath()});
    ASSERT_OK(setup);
    Planner planner(testing::SmallGeometry(), *profile_, setup->toolchain,
                    {static_cast<int>(kCandidates)});
    ASSERT_OK_AND_ASSIGN(IntervalPlan plan, planner.Plan(kInterval));
    // Of the first template; the others follow.
    ASSERT_GE(plan.candidates.size(), kCandidates);
    plan.candidates.erase(plan.candidates.begin() + kCandidates,
                          plan.candidates.end());
    CompilePool pool({.jobs = 4}, {*setup});
    const auto compile = [&](const PlannedCandidate& from, Deed deed) {
      Contender contender;
      contender.body = from.body;
      contender.digest = from.digest;
      std::vector<CompileJob> jobs;
      for (const SourceUnit& unit : from.kernel_template->MakeUnits(
               testing::SmallGeometry(), profile_->target,
               from.body.assignment)) {
        jobs.push_back({testing::Misbehaving(unit, deed), profile_->target});
      }
      absl::StatusOr<std::vector<CompileResult>> results = pool.Run(jobs);
      EXPECT_OK(results);
      for (size_t i = 0; results.ok() && i < jobs.size(); ++i) {
        absl::StatusOr<Program> program =
            MakeProgram(jobs[i], setup->toolchain, std::move((*results)[i]));
        EXPECT_OK(program);
        if (!program.ok()) continue;
        contender.programs.push_back(
            std::make_shared<const Program>(*std::move(program)));
      }
      return contender;
    };
    contenders_ = new std::vector<Contender>;
    for (const PlannedCandidate& from : plan.candidates) {
      contenders_->push_back(compile(from, Deed::kNone));
    }
    for (const Deed deed : {Deed::kSpins, Deed::kSegfaults, Deed::kTraps}) {
      contenders_->push_back(compile(plan.candidates[1], deed));
    }
  }

  void SetUp() override {
    if (profile_ == nullptr) GTEST_SKIP() << "no GPU";
    ASSERT_NE(contenders_, nullptr) << "the programs did not compile";
    options_.executable = KilnPath();
    options_.site.target = profile_->target;
    options_.device = MeasureIdentity(*profile_);
    options_.launch_seconds_max = 20;
  }

  RaceJob JobOf(std::vector<Contender> contenders) const {
    RaceJob job;
    job.geometry = testing::SmallGeometry();
    job.target = profile_->target;
    job.interval = kInterval;
    job.contenders = std::move(contenders);
    job.options.seconds_max = 100;
    job.options.schedule.blocks_min = 9;
    job.options.schedule.blocks_max = 9;
    job.options.schedule.blocks_unsettled_max = 9;
    job.options.oracle_threads = 4;
    return job;
  }

  absl::StatusOr<RaceResult> Finish(RemoteRacer* racer) {
    const auto begin = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - begin < std::chrono::minutes(3)) {
      AdvanceAll({racer}, 0.1);
      for (Casualty& casualty : racer->TakeCasualties()) {
        casualties_.push_back(std::move(casualty));
      }
      std::optional<absl::StatusOr<RaceResult>> outcome = racer->TakeOutcome();
      if (outcome.has_value()) return *std::move(outcome);
    }
    return absl::DeadlineExceededError("the race did not end");
  }

  static const DeviceProfile* profile_;
  static std::vector<Contender>* contenders_;

  RemoteRacerOptions options_;
  std::vector<Casualty> casualties_;
};

const DeviceProfile* RemoteRacerGpuTest::profile_ = nullptr;
std::vector<Contender>* RemoteRacerGpuTest::contenders_ = nullptr;

TEST_F(RemoteRacerGpuTest, RightCandidatesRace) {
  RemoteRacer racer(options_);
  const std::vector<Contender>& all = *contenders_;
  racer.Submit(JobOf({all[0], all[1], all[2]}));
  ASSERT_OK_AND_ASSIGN(const RaceResult result, Finish(&racer));
  EXPECT_THAT(casualties_, IsEmpty());
  EXPECT_EQ(result.timings[0].samples.size(), 9u);
  for (const Timing& timing : result.timings) {
    EXPECT_NE(timing.outcome, Outcome::kRejected) << timing.reason;
  }
}

TEST_F(RemoteRacerGpuTest, WreckersAreSetAsideOneAfterTheOther) {
  options_.launch_seconds_max = 3;
  RemoteRacer racer(options_);
  racer.Submit(JobOf({(*contenders_)[0], (*contenders_)[3], (*contenders_)[4],
                      (*contenders_)[5], (*contenders_)[2]}));
  ASSERT_OK_AND_ASSIGN(const RaceResult result, Finish(&racer));
  ASSERT_EQ(casualties_.size(), 3u);
  EXPECT_THAT(casualties_[0].reason, HasSubstr("a launch ran longer than 3 s"));
  EXPECT_THAT(casualties_[1].reason, HasSubstr("CUDA_ERROR_"));
  EXPECT_THAT(casualties_[2].reason, HasSubstr("CUDA_ERROR_"));
  for (const size_t i : {1u, 2u, 3u}) {
    EXPECT_EQ(result.timings[i].outcome, Outcome::kRejected);
    EXPECT_THAT(result.timings[i].samples, IsEmpty());
  }
  EXPECT_EQ(result.timings[0].outcome, Outcome::kFinished);
  EXPECT_EQ(result.timings[0].samples.size(), 9u);
  EXPECT_NE(result.timings[4].outcome, Outcome::kRejected)
      << result.timings[4].reason;
  for (const Casualty& casualty : casualties_) {
    GTEST_LOG_(INFO) << casualty.contender << ": " << casualty.reason;
  }
}

TEST_F(RemoteRacerGpuTest, NvmlKnowsTheDevice) {
  const absl::StatusOr<NvmlDevice> nvml = FindNvmlDevice(profile_->pci_bus_id);
  if (absl::IsUnavailable(nvml.status())) GTEST_SKIP() << nvml.status();
  ASSERT_OK(nvml);
  const GpuState state = nvml->State();
  EXPECT_GT(state.sm_clock_mhz, 0);
  EXPECT_GE(state.sm_clock_max_mhz, state.sm_clock_mhz);
  EXPECT_GT(state.memory_clock_mhz, 0);
  EXPECT_GT(state.temperature_c, 0);
  EXPECT_GT(state.power_mw, 1000);
  EXPECT_OK(nvml->ComputeProcesses());
  EXPECT_EQ(profile_->uuid.size(), 32u);
  EXPECT_EQ(DeviceLockName(*profile_), profile_->uuid);
  GTEST_LOG_(INFO) << state.sm_clock_mhz << " MHz, throttle "
                   << ThrottleText(state.throttle_reasons);
}

}  // namespace
}  // namespace kiln
