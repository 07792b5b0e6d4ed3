// Every call to the file system or to SQLite fails once, for ever, or kills the
// process. After each: the file opens, Check passes, what was acknowledged is
// there, and the work can be finished.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "tests/cache/cache_workload.h"
#include "tests/support/fault_fs.h"

namespace kiln {
namespace {

using ::kiln::testing::CacheWorkload;
using ::kiln::testing::CallsCounted;
using ::kiln::testing::Fault;
using ::kiln::testing::FaultName;
using ::kiln::testing::FullTest;
using ::kiln::testing::InjectFault;
using ::kiln::testing::kWorkSteps;
using ::kiln::testing::ScratchFolder;

constexpr int kCompleted = 0;
constexpr int kFaulted = 3;
// Points per fault in the short form.
constexpr int64_t kShortPoints = 12;

// In a child: all steps under the fault, telling each success through `pipe`,
// and at the end how many calls there were.
int Work(const std::string& root, Fault fault, int64_t nth, int pipe,
         CacheWorkload* workload) {
  InjectFault(root, fault, nth);
  absl::StatusOr<PlanCache> cache = workload->Open(root);
  if (!cache.ok()) return kFaulted;
  bool failed = false;
  for (int step = 0; step < kWorkSteps; ++step) {
    if (!workload->Step(step, root, &*cache).ok()) {
      failed = true;
      continue;
    }
    const int64_t done = step;
    if (write(pipe, &done, sizeof(done)) != sizeof(done)) return kFaulted;
  }
  const int64_t calls = CallsCounted();
  if (write(pipe, &calls, sizeof(calls)) != sizeof(calls)) return kFaulted;
  return failed || calls >= nth ? kFaulted : kCompleted;
}

class CacheFaultTest : public ::testing::TestWithParam<Fault> {
 protected:
  static void SetUpTestSuite() {
    if (access("/dev/shm", W_OK) == 0) setenv("TMPDIR", "/dev/shm", 0);
    workload_ = new CacheWorkload;
  }

  static void TearDownTestSuite() {
    delete workload_;
    workload_ = nullptr;
  }

  // One fault at the n-th call. Returns how many calls there were, if the work
  // came to its end.
  static int64_t Try(Fault fault, int64_t nth) {
    SCOPED_TRACE(absl::StrCat("call ", nth));
    const ScratchFolder folder;
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
      _exit(Work(folder.path(), fault, nth, ends[1], workload_));
    }
    close(ends[1]);
    std::vector<int> acknowledged;
    int64_t calls = 0;
    int64_t value = 0;
    while (read(ends[0], &value, sizeof(value)) == sizeof(value)) {
      if (value < kWorkSteps) {
        acknowledged.push_back(static_cast<int>(value));
      } else {
        calls = value;
      }
    }
    close(ends[0]);
    int state = 0;
    EXPECT_EQ(waitpid(child, &state, 0), child);
    const bool killed = WIFSIGNALED(state) && WTERMSIG(state) == SIGKILL;
    EXPECT_TRUE(killed ||
                (WIFEXITED(state) && (WEXITSTATUS(state) == kFaulted ||
                                      WEXITSTATUS(state) == kCompleted)))
        << "crashed with state " << state;
    if (fault == Fault::kKill || fault == Fault::kTear ||
        fault == Fault::kSqliteKill) {
      EXPECT_TRUE(killed || (calls > 0 && calls < nth))
          << "it should have been killed";
    }
    workload_->ExpectRecovery(folder.path(), acknowledged);
    return calls;
  }

  static CacheWorkload* workload_;
};

CacheWorkload* CacheFaultTest::workload_ = nullptr;

TEST_P(CacheFaultTest, NothingAcknowledgedIsLost) {
  // As many calls as the work takes without a fault; a little more, because a
  // fault may lead to more.
  const int64_t calls = Try(GetParam(), INT64_MAX);
  ASSERT_GT(calls, 200);
  const int64_t stride =
      FullTest() ? 1 : std::max<int64_t>(1, calls / kShortPoints);
  // From another start per fault.
  int64_t nth = FullTest() ? 1 : 1 + 3 * static_cast<int64_t>(GetParam());
  int64_t tried = 0;
  for (; nth <= calls && !HasFailure(); nth += stride) {
    Try(GetParam(), nth);
    ++tried;
  }
  EXPECT_GE(tried, kShortPoints - 2);
  std::printf("%s: %lld points tried, the work takes %lld calls\n",
              FaultName(GetParam()), static_cast<long long>(tried),
              static_cast<long long>(calls));
}

INSTANTIATE_TEST_SUITE_P(Faults, CacheFaultTest,
                         ::testing::ValuesIn(testing::kFaults),
                         [](const ::testing::TestParamInfo<Fault>& fault)
                             -> std::string { return FaultName(fault.param); });

}  // namespace
}  // namespace kiln
