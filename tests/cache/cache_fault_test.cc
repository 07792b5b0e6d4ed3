// Every call to the file system fails once, for ever, or kills the process.
// After each: the file opens, Check passes, what was acknowledged is there, and
// the work can be finished.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <memory>

#include "absl/strings/str_cat.h"
#include "cache/plan_cache.h"
#include "tests/cache/cache_fixture.h"
#include "tests/cache/fault_vfs.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::Fault;
using ::kiln::testing::FileCalls;
using ::kiln::testing::FullTest;
using ::kiln::testing::InjectFault;
using ::kiln::testing::IsOkAndHolds;
using ::kiln::testing::MakeMeasurements;
using ::kiln::testing::MakePlan;
using ::kiln::testing::MakeProgram;
using ::kiln::testing::MakeReject;
using ::kiln::testing::MakeTestPlanKey;
using ::kiln::testing::SameProgram;
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::TestOptions;
using ::testing::IsEmpty;

constexpr int kSteps = 8;
constexpr int kCompleted = 0;
constexpr int kFaulted = 3;

Program StepProgram(uint64_t seed) { return MakeProgram(seed, 9000); }

PlanKey StepPlanKey(uint64_t seed) {
  return MakeTestPlanKey(MakePlan(seed, {StepProgram(seed).key.digest}));
}

// One step of the work; each is one acknowledgement.
absl::Status Step(int step, PlanCache* cache) {
  switch (step) {
    case 0:
      return cache->PutProgram(StepProgram(1));
    case 1: {
      const Plan plan = MakePlan(1, {StepProgram(1).key.digest});
      return cache->PutPlan(StepPlanKey(1), plan, MakeMeasurements(1));
    }
    case 2:
      return cache->PutReject(MakeReject(1));
    case 3:
      return cache->AcquireLeases({StepProgram(2).key.digest}, 600).status();
    case 4:
      return cache->PutPrograms({StepProgram(2), StepProgram(3)});
    case 5:  // replaces the plan of step 1
      return cache->PutPlan(StepPlanKey(1),
                            MakePlan(1, {StepProgram(1).key.digest}),
                            MakeMeasurements(2));
    case 6:
      return cache->CollectGarbage({}).status();  // compacts the file
    default:
      return cache->Repair().status();  // rewrites the file
  }
}

void ExpectStep(int step, PlanCache* cache) {
  SCOPED_TRACE(absl::StrCat("step ", step));
  const auto has_program = [&](uint64_t seed) {
    ASSERT_OK_AND_ASSIGN(const std::optional<Program> program,
                         cache->FindProgram(StepProgram(seed).key.digest));
    ASSERT_TRUE(program.has_value());
    EXPECT_TRUE(SameProgram(*program, StepProgram(seed)));
  };
  switch (step) {
    case 0:
      return has_program(1);
    case 1:
    case 5: {
      ASSERT_OK_AND_ASSIGN(const std::optional<StoredPlan> plan,
                           cache->FindPlan(StepPlanKey(1).digest));
      EXPECT_TRUE(plan.has_value());
      EXPECT_OK(cache->LoadMeasurements(StepPlanKey(1).digest));
      return;
    }
    case 2: {
      ASSERT_OK_AND_ASSIGN(const std::optional<Reject> reject,
                           cache->FindReject(MakeReject(1).key));
      EXPECT_TRUE(reject.has_value());
      return;
    }
    case 4:
      has_program(2);
      return has_program(3);
    default:
      return;
  }
}

// In a child: all steps under the fault, telling each success through `pipe`.
int Work(const std::string& folder, Fault fault, int64_t nth, int pipe) {
  InjectFault(fault, nth);
  absl::StatusOr<PlanCache> cache = PlanCache::Open(TestOptions(folder));
  if (!cache.ok()) return kFaulted;
  bool failed = false;
  for (int step = 0; step < kSteps; ++step) {
    if (!Step(step, &*cache).ok()) {
      failed = true;
      continue;
    }
    const char done = static_cast<char>(step);
    if (write(pipe, &done, 1) != 1) return kFaulted;
  }
  return failed || FileCalls() >= nth ? kFaulted : kCompleted;
}

// One fault; false when the work completed before it came.
bool Try(Fault fault, int64_t nth) {
  SCOPED_TRACE(absl::StrCat("call ", nth));
  const ScratchFolder folder;
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) _exit(Work(folder.path(), fault, nth, ends[1]));
  close(ends[1]);
  std::vector<int> acknowledged;
  char step = 0;
  while (read(ends[0], &step, 1) == 1) acknowledged.push_back(step);
  close(ends[0]);
  int state = 0;
  EXPECT_EQ(waitpid(child, &state, 0), child);
  const bool killed = WIFSIGNALED(state) && WTERMSIG(state) == SIGKILL;
  EXPECT_TRUE(killed ||
              (WIFEXITED(state) && (WEXITSTATUS(state) == kFaulted ||
                                    WEXITSTATUS(state) == kCompleted)))
      << "crashed with state " << state;
  if (fault == Fault::kKill || fault == Fault::kTear) {
    EXPECT_TRUE(killed || WEXITSTATUS(state) == kCompleted)
        << "it should have been killed";
  }

  absl::StatusOr<PlanCache> cache = PlanCache::Open(TestOptions(folder.path()));
  EXPECT_OK(cache);
  if (!cache.ok()) return true;
  EXPECT_THAT(cache->Check(), IsOkAndHolds(IsEmpty()));
  for (const int done : acknowledged) ExpectStep(done, &*cache);
  EXPECT_THAT(cache->TakeWarnings(), IsEmpty()) << "something was quarantined";
  for (int todo = 0; todo < kSteps; ++todo) EXPECT_OK(Step(todo, &*cache));
  for (int todo = 0; todo < kSteps; ++todo) ExpectStep(todo, &*cache);
  return killed || WEXITSTATUS(state) == kFaulted;
}

class CacheFaultTest : public ::testing::TestWithParam<Fault> {
 protected:
  static void SetUpTestSuite() {
    if (access("/dev/shm", W_OK) == 0) setenv("TMPDIR", "/dev/shm", 0);
  }
};

TEST_P(CacheFaultTest, NothingAcknowledgedIsLost) {
  // Every call in full; in short every 5th, from another start per fault.
  const int64_t stride = FullTest() ? 1 : 5;
  int64_t nth = FullTest() ? 1 : 1 + static_cast<int64_t>(GetParam());
  int64_t tried = 0;
  while (Try(GetParam(), nth) && !HasFailure()) {
    nth += stride;
    ++tried;
    ASSERT_LT(nth, 100'000) << "the work never completes";
  }
  EXPECT_GT(tried, 20);
  std::printf("%lld faults tried, the work takes about %lld calls\n",
              static_cast<long long>(tried), static_cast<long long>(nth));
}

INSTANTIATE_TEST_SUITE_P(
    Faults, CacheFaultTest,
    ::testing::Values(Fault::kFailOnce, Fault::kFailOn, Fault::kDiskFull,
                      Fault::kKill, Fault::kTear),
    [](const ::testing::TestParamInfo<Fault>& fault) -> std::string {
      switch (fault.param) {
        case Fault::kFailOnce:
          return "FailOnce";
        case Fault::kFailOn:
          return "FailOn";
        case Fault::kDiskFull:
          return "DiskFull";
        case Fault::kKill:
          return "Kill";
        default:
          return "Tear";
      }
    });

}  // namespace
}  // namespace kiln
