// Races in real worker processes with real CPU programs, some of which spin,
// crash or leave.

#include "tuner/remote_racer.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/spec/plan_key.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/tuner/bad_programs.h"
#include "tests/tuner/cpu_programs.h"

namespace kiln {
namespace {

using testing::CompileUnits;
using testing::Deed;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::SmallAssignment;
using testing::SmallBody;
using testing::SmallGeometry;
using testing::SmallUnit;
using testing::StatusIs;
using testing::WhyNoCcCpu;

constexpr Interval kInterval = {1, 8};
// In the order of the enumerators.
constexpr Deed kDeeds[] = {
    Deed::kNone,   Deed::kSpins, Deed::kSegfaults,     Deed::kTraps,
    Deed::kAborts, Deed::kExits, Deed::kSegfaultsLate, Deed::kSpinsLate};

std::string KilnPath() {
  const char* folder = std::getenv("KILN_BIN_DIR");
  return folder == nullptr ? "" : std::string(folder) + "/kiln";
}

std::string WhyNoWorker() {
  if (const std::string why = WhyNoCcCpu(); !why.empty()) return why;
  return access(KilnPath().c_str(), X_OK) == 0 ? "" : "kiln is not built";
}

// Kills the worker of `racer`; false when none runs. Never anything else: a
// process id below 1 would mean many processes.
bool KillWorker(const RemoteRacer& racer) {
  const std::optional<pid_t> pid = racer.pid();
  return pid.has_value() && *pid > 1 && kill(*pid, SIGKILL) == 0;
}

class RemoteRacerTest : public ::testing::Test {
 protected:
  // Compiled once: every deed with the small tile, and a right large tile.
  static void SetUpTestSuite() {
    if (!WhyNoWorker().empty()) return;
    std::vector<SourceUnit> units;
    for (const Deed deed : kDeeds) {
      units.push_back(
          testing::Misbehaving(SmallUnit(SmallGeometry(), TileOf(1)), deed));
    }
    units.push_back(SmallUnit(SmallGeometry(), TileOf(16)));
    const auto compiled = CompileUnits(units);
    auto* made = new std::vector<std::shared_ptr<const Program>>;
    for (const auto& program : compiled) {
      ASSERT_OK(program);
      made->push_back(*program);
    }
    programs_ = made;
  }

  void SetUp() override {
    if (const std::string why = WhyNoWorker(); !why.empty()) {
      GTEST_SKIP() << why;
    }
    ASSERT_NE(programs_, nullptr) << "the programs did not compile";
    ASSERT_OK_AND_ASSIGN(options_.site.target, HostCpuTarget());
    ASSERT_OK_AND_ASSIGN(const DeviceProfile profile,
                         HostCpuProfile(options_.site.target));
    options_.device = MeasureIdentity(profile);
    options_.executable = KilnPath();
    options_.launch_seconds_max = 60;
  }

  static Assignment TileOf(int64_t tokens) {
    Assignment assignment = SmallAssignment();
    assignment["tokens_tile"] = tokens;
    return assignment;
  }

  static Contender MakeContender(size_t program, int64_t tile) {
    Contender contender;
    absl::StatusOr<PlanBody> body =
        SmallBody(SmallGeometry(), kInterval.m_max, TileOf(tile));
    EXPECT_OK(body);
    contender.body = *std::move(body);
    contender.programs = {(*programs_)[program]};
    contender.digest =
        CandidateDigest(contender.body, {contender.programs[0]->key.digest});
    return contender;
  }

  static Contender Make(Deed deed) {
    return MakeContender(static_cast<size_t>(deed), 1);
  }

  static Contender MakeLarge() { return MakeContender(std::size(kDeeds), 16); }

  RaceJob JobOf(std::vector<Contender> contenders) const {
    RaceJob job;
    job.geometry = SmallGeometry();
    job.target = options_.site.target;
    job.interval = kInterval;
    job.contenders = std::move(contenders);
    job.options.seconds_max = 100;
    job.options.schedule.blocks_min = 9;
    job.options.schedule.blocks_max = 9;
    job.options.schedule.blocks_unsettled_max = 9;
    return job;
  }

  // Advances until the race is over; `meanwhile` is called again and again.
  absl::StatusOr<RaceResult> Finish(
      RemoteRacer* racer, const std::function<void()>& meanwhile = [] {}) {
    const auto begin = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - begin < std::chrono::minutes(4)) {
      AdvanceAll({racer}, 0.01);
      meanwhile();
      for (Casualty& casualty : racer->TakeCasualties()) {
        casualties_.push_back(std::move(casualty));
      }
      std::optional<absl::StatusOr<RaceResult>> outcome = racer->TakeOutcome();
      if (outcome.has_value()) return *std::move(outcome);
    }
    return absl::DeadlineExceededError("the race did not end");
  }

  static const std::vector<std::shared_ptr<const Program>>* programs_;

  RemoteRacerOptions options_;
  std::vector<Casualty> casualties_;
};

const std::vector<std::shared_ptr<const Program>>* RemoteRacerTest::programs_ =
    nullptr;

TEST_F(RemoteRacerTest, RacesLikeARaceInThisProcess) {
  RemoteRacer racer(options_);
  racer.Submit(JobOf({Make(Deed::kNone), MakeLarge()}));
  ASSERT_OK_AND_ASSIGN(const RaceResult result, Finish(&racer));
  ASSERT_EQ(result.timings.size(), 2u);
  EXPECT_EQ(result.timings[0].outcome, Outcome::kFinished);
  EXPECT_EQ(result.timings[0].samples.size(), 9u);
  EXPECT_GT(result.timings[0].worst_error, 0);
  EXPECT_LT(result.timings[0].worst_error, 2e-3);
  EXPECT_NE(result.timings[1].outcome, Outcome::kRejected)
      << result.timings[1].reason;
  EXPECT_GE(result.timings[1].samples.size(), 3u);
  EXPECT_GT(result.launches, 20u);
  EXPECT_THAT(casualties_, IsEmpty());
  // Where the candidates ran, the same code gives the same numbers.
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Device> device,
                       OpenCpuDevice(options_.site.target));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<OpBench> bench,
                       OpBench::Create(device.get(), SmallGeometry(), 1));
  const RaceJob job = JobOf({Make(Deed::kNone), MakeLarge()});
  ASSERT_OK_AND_ASSIGN(
      const RaceResult here,
      Race(bench.get(), job.interval, job.contenders, job.options));
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(result.timings[i].worst_error, here.timings[i].worst_error);
  }
}

TEST_F(RemoteRacerTest, OneWorkerRunsManyRaces) {
  RemoteRacer racer(options_);
  std::optional<pid_t> pid;
  for (int round = 0; round < 3; ++round) {
    racer.Submit(JobOf({MakeLarge()}));
    ASSERT_OK(Finish(&racer));
    EXPECT_TRUE(round == 0 || racer.pid() == pid);
    pid = racer.pid();
  }
}

// Every way to end a worker while a candidate is verified.
class RemoteRacerDeedTest
    : public RemoteRacerTest,
      public ::testing::WithParamInterface<std::pair<Deed, const char*>> {};

TEST_P(RemoteRacerDeedTest, IsSetAsideAndTheOthersRace) {
  const auto& [deed, reason] = GetParam();
  if (deed == Deed::kSpins) options_.launch_seconds_max = 2;
  RemoteRacer racer(options_);
  racer.Submit(JobOf({Make(Deed::kNone), Make(deed), MakeLarge()}));
  ASSERT_OK_AND_ASSIGN(const RaceResult result, Finish(&racer));
  ASSERT_EQ(casualties_.size(), 1u);
  EXPECT_EQ(casualties_[0].contender, 1u);
  EXPECT_THAT(casualties_[0].reason, HasSubstr(reason));
  ASSERT_EQ(result.timings.size(), 3u);
  EXPECT_EQ(result.timings[1].outcome, Outcome::kRejected);
  EXPECT_EQ(result.timings[1].reason, casualties_[0].reason);
  EXPECT_THAT(result.timings[1].samples, IsEmpty());
  EXPECT_EQ(result.timings[0].samples.size(), 9u);
  EXPECT_GE(result.timings[2].samples.size(), 3u);
}

std::string DeedName(
    const ::testing::TestParamInfo<std::pair<Deed, const char*>>& info) {
  constexpr const char* kNames[] = {"None",  "Spins",  "Segfaults",
                                    "Traps", "Aborts", "Exits"};
  return kNames[static_cast<size_t>(info.param.first)];
}

INSTANTIATE_TEST_SUITE_P(
    All, RemoteRacerDeedTest,
    ::testing::Values(std::pair(Deed::kSpins, "a launch ran longer than 2 s"),
                      std::pair(Deed::kSegfaults, "was killed by signal 11"),
                      std::pair(Deed::kAborts, "was killed by signal 6"),
                      std::pair(Deed::kExits, "exited with code 3"),
                      std::pair(Deed::kTraps, "was killed by signal 4")),
    DeedName);

TEST_F(RemoteRacerTest, TheDefaultMayBeTheOneThatIsSetAside) {
  RemoteRacer racer(options_);
  racer.Submit(JobOf({Make(Deed::kSegfaults), MakeLarge()}));
  ASSERT_OK_AND_ASSIGN(const RaceResult result, Finish(&racer));
  EXPECT_EQ(result.timings[0].outcome, Outcome::kRejected);
  EXPECT_EQ(result.timings[1].outcome, Outcome::kFinished);
  EXPECT_EQ(result.twin, 1u);
}

TEST_F(RemoteRacerTest, ARaceOfWreckersEndsWithoutATiming) {
  RemoteRacer racer(options_);
  racer.Submit(JobOf({Make(Deed::kSegfaults), Make(Deed::kTraps)}));
  ASSERT_OK_AND_ASSIGN(const RaceResult result, Finish(&racer));
  EXPECT_EQ(casualties_.size(), 2u);
  for (const Timing& timing : result.timings) {
    EXPECT_EQ(timing.outcome, Outcome::kRejected);
    EXPECT_THAT(timing.samples, IsEmpty());
  }
}

TEST_F(RemoteRacerTest, WhatWasMeasuredBeforeTheEndIsKept) {
  for (const Deed deed : {Deed::kSegfaultsLate, Deed::kSpinsLate}) {
    options_.launch_seconds_max = deed == Deed::kSpinsLate ? 2 : 60;
    casualties_.clear();
    RemoteRacer racer(options_);
    racer.Submit(JobOf({MakeLarge(), Make(deed)}));
    std::vector<BlockTime> before;
    ASSERT_OK_AND_ASSIGN(
        const RaceResult result, Finish(&racer, [&] {
          if (casualties_.empty() && racer.progress() != nullptr) {
            before = racer.progress()->timings[0].samples;
          }
        }));
    ASSERT_EQ(casualties_.size(), 1u);
    EXPECT_EQ(casualties_[0].contender, 1u);
    EXPECT_EQ(result.timings[1].outcome, Outcome::kRejected);
    EXPECT_EQ(result.timings[0].outcome, Outcome::kFinished);
    ASSERT_GE(before.size(), 1u) << "it ended before a block was whole";
    const std::vector<BlockTime>& samples = result.timings[0].samples;
    ASSERT_EQ(samples.size(), 9u);
    ASSERT_LT(before.size(), samples.size());
    for (size_t i = 0; i < samples.size(); ++i) {
      EXPECT_EQ(samples[i].block, i);
      EXPECT_TRUE(i >= before.size() || samples[i].ns == before[i].ns) << i;
    }
    EXPECT_EQ(result.twin_samples.size(), 9u);
  }
}

TEST_F(RemoteRacerTest, KilledFromOutsideNobodyIsBlamedAndTheRaceGoesOn) {
  std::minstd_rand random(7);
  RemoteRacer racer(options_);
  for (int round = 0; round < 5; ++round) {
    SCOPED_TRACE(round);
    racer.Submit(JobOf({Make(Deed::kNone), MakeLarge()}));
    int kills = 0;
    int kills_at_start = 0;  // the third in a row ends a race
    auto next = std::chrono::steady_clock::now();
    const auto plan = [&] {
      next = std::chrono::steady_clock::now() +
             std::chrono::microseconds(random() % 400000);
    };
    plan();
    ASSERT_OK_AND_ASSIGN(
        const RaceResult result, Finish(&racer, [&] {
          if (kills >= 3 || std::chrono::steady_clock::now() < next) {
            return;
          }
          const bool starts = !racer.turn().has_value();
          if (starts && kills_at_start == 2) return;
          if (!KillWorker(racer)) return;
          ++kills;
          kills_at_start += starts ? 1 : 0;
          plan();
        }));
    EXPECT_THAT(casualties_, IsEmpty());
    EXPECT_EQ(result.timings[0].outcome, Outcome::kFinished);
    EXPECT_EQ(result.timings[0].samples.size(), 9u);
    EXPECT_NE(result.timings[1].outcome, Outcome::kRejected);
  }
}

TEST_F(RemoteRacerTest, AWorkerThatIsKilledAgainAndAgainEndsTheRace) {
  RemoteRacer racer(options_);
  racer.Submit(JobOf({Make(Deed::kNone), MakeLarge()}));
  EXPECT_THAT(Finish(&racer,
                     [&] {
                       // In the middle of a race, not while it starts.
                       if (racer.turn().has_value()) KillWorker(racer);
                     }),
              StatusIs(absl::StatusCode::kUnavailable,
                       HasSubstr("was killed by signal 9")));
  EXPECT_THAT(casualties_, IsEmpty());
  // The next race starts afresh.
  racer.Submit(JobOf({MakeLarge()}));
  EXPECT_OK(Finish(&racer));
}

TEST_F(RemoteRacerTest, AWorkerThatCannotStartIsOneClearError) {
  options_.executable = "/nonexistent/kiln";
  RemoteRacer absent(options_);
  absent.Submit(JobOf({MakeLarge()}));
  EXPECT_THAT(Finish(&absent), StatusIs(absl::StatusCode::kNotFound,
                                        HasSubstr("/nonexistent/kiln")));
  // Something else than Kiln: it ends without a word.
  options_.executable = "/bin/true";
  RemoteRacer silent(options_);
  silent.Submit(JobOf({MakeLarge()}));
  EXPECT_THAT(Finish(&silent), StatusIs(absl::StatusCode::kUnavailable,
                                        HasSubstr("before it was ready")));
}

TEST_F(RemoteRacerTest, AnotherDeviceThanPlannedForIsRefused) {
  options_.device = Sha256("another device");
  RemoteRacer racer(options_);
  racer.Submit(JobOf({MakeLarge()}));
  EXPECT_THAT(Finish(&racer),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("not the device that was planned for")));
}

TEST_F(RemoteRacerTest, AnIdleWorkerLeavesWithItsRacer) {
  std::optional<pid_t> pid;
  {
    RemoteRacer racer(options_);
    racer.Submit(JobOf({MakeLarge()}));
    ASSERT_OK(Finish(&racer));
    pid = racer.pid();
    ASSERT_TRUE(pid.has_value());
    EXPECT_EQ(kill(*pid, 0), 0);
  }
  EXPECT_EQ(kill(*pid, 0), -1) << "it was not even reaped";
}

}  // namespace
}  // namespace kiln
