// The pool's own behaviour, with a worker whose compiler does as it is told.
// Real compilers: nvrtc_worker_test.cc and cc_cpu_test.cc.

#include "compiler/compile_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "compiler/base/sanitized.h"
#include "tests/compiler/worker_test_main.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::FakeSetup;
using ::kiln::testing::StatusIs;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

CompileJob Job(const std::string& text, const std::string& target = "sm_90a") {
  CompileJob job;
  job.unit.name = "unit.cu";
  job.unit.text = text;
  job.target = *ParseTarget(target);
  return job;
}

CompilePool MakePool(PoolOptions options = {.jobs = 2}) {
  return CompilePool(options, {FakeSetup(Backend::kCuda)});
}

bool IsRunning(int pid) { return kill(pid, 0) == 0 || errno != ESRCH; }

// True once no process of that id exists any more.
bool EndsSoon(int pid) {
  for (int i = 0; i < 500; ++i) {
    if (!IsRunning(pid)) return true;
    absl::SleepFor(absl::Milliseconds(10));
  }
  return false;
}

TEST(CompilePoolTest, GivesResultsInTheOrderOfTheJobs) {
  CompilePool pool = MakePool({.jobs = 3});
  std::vector<CompileJob> jobs = {Job("sleep 0.3"), Job("ok b"), Job("ok c"),
                                  Job("sleep 0.1"), Job("ok e")};
  std::vector<size_t> completed;
  ASSERT_OK_AND_ASSIGN(
      const std::vector<CompileResult> results,
      pool.Run(jobs, {.on_results = [&](absl::Span<const CompileResult> some) {
                 for (const auto& one : some) {
                   completed.push_back(one.index);
                 }
                 return absl::OkStatus();
               }}));
  ASSERT_THAT(results, SizeIs(5));
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i].index, i);
    EXPECT_OK(results[i].status);
  }
  EXPECT_EQ(results[1].binary, "b");
  EXPECT_EQ(results[4].binary, "e");
  EXPECT_THAT(completed, SizeIs(5));
  EXPECT_NE(completed[0], 0u) << "the slow first job must not hold up others";
}

TEST(CompilePoolTest, RunsNoMoreWorkersThanAskedFor) {
  CompilePool pool = MakePool({.jobs = 2});
  std::vector<CompileJob> jobs(8, Job("sleep 0.02"));
  ASSERT_OK(pool.Run(jobs));
  EXPECT_EQ(pool.stats().workers_peak, 2);
  EXPECT_EQ(pool.stats().workers_started, 2);
}

TEST(CompilePoolTest, StartsNoWorkerWithoutAJobForIt) {
  CompilePool pool = MakePool({.jobs = 8});
  ASSERT_OK(pool.Run(std::vector<CompileJob>{Job("ok")}));
  EXPECT_EQ(pool.stats().workers_started, 1);
}

TEST(CompilePoolTest, KeepsWorkersWarmBetweenRuns) {
  CompilePool pool = MakePool({.jobs = 1});
  ASSERT_OK(pool.Run(std::vector<CompileJob>{Job("ok")}));
  const std::vector<int> before = pool.WorkerPids();
  ASSERT_OK(pool.Run(std::vector<CompileJob>{Job("ok"), Job("ok")}));
  EXPECT_EQ(pool.WorkerPids(), before);
  EXPECT_THAT(before, SizeIs(1));
}

TEST(CompilePoolTest, RejectsWhatTheCompilerRefusesAndKeepsItsLog) {
  CompilePool pool = MakePool();
  ASSERT_OK_AND_ASSIGN(
      const auto results,
      pool.Run(std::vector<CompileJob>{Job("refuse bad type"), Job("ok")}));
  EXPECT_THAT(results[0].status,
              StatusIs(absl::StatusCode::kInvalidArgument, "bad type"));
  EXPECT_EQ(results[0].log, "log of bad type");
  EXPECT_THAT(results[0].binary, IsEmpty());
  EXPECT_OK(results[1].status);
}

TEST(CompilePoolTest, RejectsTheJobOfACrashedWorkerAndGoesOn) {
  CompilePool pool = MakePool({.jobs = 1});
  ASSERT_OK_AND_ASSIGN(const auto results,
                       pool.Run(std::vector<CompileJob>{
                           Job("ok a"), Job("crash last words"), Job("ok c")}));
  EXPECT_OK(results[0].status);
  EXPECT_THAT(results[1].status,
              StatusIs(absl::StatusCode::kInternal,
                       AllOf(HasSubstr("sm_90a unit.cu"),
                             HasSubstr("killed by signal 6"))));
  EXPECT_THAT(results[1].log, HasSubstr("last words"));
  EXPECT_EQ(results[2].binary, "c");
  EXPECT_EQ(pool.stats().workers_started, 2);
}

TEST(CompilePoolTest, RejectsTheJobOfAWorkerThatExits) {
  CompilePool pool = MakePool({.jobs = 1});
  ASSERT_OK_AND_ASSIGN(const auto results,
                       pool.Run(std::vector<CompileJob>{Job("leave")}));
  EXPECT_THAT(results[0].status, StatusIs(absl::StatusCode::kInternal,
                                          HasSubstr("exited with code 3")));
}

TEST(CompilePoolTest, RejectsASourceThatEatsAllMemory) {
#if KILN_SANITIZED
  GTEST_SKIP() << "sanitizers need more address space than the limit";
#endif
  CompilePool pool = MakePool({.jobs = 1});
  ASSERT_OK_AND_ASSIGN(const auto results, pool.Run(std::vector<CompileJob>{
                                               Job("eat"), Job("ok after")}));
  EXPECT_THAT(results[0].status, StatusIs(absl::StatusCode::kInternal));
  EXPECT_THAT(results[0].log, HasSubstr("bad_alloc"));
  EXPECT_EQ(results[1].binary, "after");
}

TEST(CompilePoolTest, StopsACompileAtItsDeadline) {
  CompilePool pool = MakePool({.jobs = 1, .deadline = absl::Milliseconds(200)});
  ASSERT_OK(pool.Run(std::vector<CompileJob>{Job("ok")}));
  const int pid = pool.WorkerPids().at(0);
  ASSERT_OK_AND_ASSIGN(
      const auto results,
      pool.Run(std::vector<CompileJob>{Job("sleep 60"), Job("ok after")}));
  EXPECT_THAT(results[0].status, StatusIs(absl::StatusCode::kDeadlineExceeded,
                                          HasSubstr("ran longer than 200ms")));
  EXPECT_GE(results[0].seconds, 0.2);
  EXPECT_LT(results[0].seconds, 10);
  EXPECT_EQ(results[1].binary, "after");
  EXPECT_TRUE(EndsSoon(pid));
}

TEST(CompilePoolTest, TriesAJobAgainWhenItsWorkerWasKilledFromOutside) {
  const std::string marker =
      absl::StrCat(::testing::TempDir(), "/kiln_once_", getpid());
  unlink(marker.c_str());
  CompilePool pool = MakePool({.jobs = 1});
  ASSERT_OK_AND_ASSIGN(
      const auto results,
      pool.Run(std::vector<CompileJob>{Job("once " + marker), Job("ok")}));
  unlink(marker.c_str());
  EXPECT_OK(results[0].status);
  EXPECT_EQ(results[0].binary, marker);
}

TEST(CompilePoolTest, GivesUpOnAJobWhoseWorkerIsKilledEachTime) {
  CompilePool pool = MakePool({.jobs = 1});
  ASSERT_OK_AND_ASSIGN(
      const auto results,
      pool.Run(std::vector<CompileJob>{Job("killed"), Job("ok after")}));
  EXPECT_THAT(results[0].status,
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr("signal 9"), HasSubstr("2 times"))));
  EXPECT_EQ(results[1].binary, "after");
}

TEST(CompilePoolTest, SurvivesTheDeathOfAnIdleWorker) {
  CompilePool pool = MakePool({.jobs = 1});
  ASSERT_OK(pool.Run(std::vector<CompileJob>{Job("ok")}));
  ASSERT_EQ(kill(pool.WorkerPids().at(0), SIGKILL), 0);
  ASSERT_OK_AND_ASSIGN(const auto results,
                       pool.Run(std::vector<CompileJob>{Job("ok again")}));
  EXPECT_EQ(results[0].binary, "again");
}

TEST(CompilePoolTest, ReplacesAWorkerThatCannotBeUsedAgain) {
  CompilePool pool = MakePool({.jobs = 1});
  ASSERT_OK_AND_ASSIGN(const auto results,
                       pool.Run(std::vector<CompileJob>{
                           Job("last a"), Job("last b"), Job("ok c")}));
  EXPECT_EQ(results[0].binary, "a");
  EXPECT_EQ(results[1].binary, "b");
  EXPECT_EQ(results[2].binary, "c");
  EXPECT_EQ(pool.stats().workers_started, 3);
}

TEST(CompilePoolTest, SharesItsWorkersBetweenBackends) {
  CompilePool pool({.jobs = 1},
                   {FakeSetup(Backend::kCuda), FakeSetup(Backend::kCpu)});
  ASSERT_OK_AND_ASSIGN(const auto results,
                       pool.Run(std::vector<CompileJob>{
                           Job("ok 0"), Job("ok 1", "cpu-x86-64-v3"),
                           Job("ok 2"), Job("ok 3", "cpu-x86-64-v3")}));
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_EQ(results[i].binary, absl::StrCat(i));
  }
  EXPECT_EQ(pool.stats().workers_peak, 1);
  EXPECT_EQ(pool.stats().workers_started, 2) << "one change of compiler";
}

TEST(CompilePoolTest, RefusesATargetWithoutCompiler) {
  CompilePool pool = MakePool();
  EXPECT_THAT(pool.Run(std::vector<CompileJob>{Job("ok", "cpu-x86-64-v3")}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("cpu-x86-64-v3"),
                             HasSubstr("kiln-cc-cpu was not found"))));
}

TEST(CompilePoolTest, FailsWhenTheWorkerDoesNotExist) {
  CompilerSetup setup = FakeSetup(Backend::kCuda);
  setup.command.executable = "/nowhere/kiln";
  CompilePool pool({}, {setup});
  EXPECT_THAT(
      pool.Run(std::vector<CompileJob>{Job("ok")}),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nowhere/kiln")));
}

TEST(CompilePoolTest, FailsWhenTheWorkerEndsBeforeItIsReady) {
  CompilerSetup setup = FakeSetup(Backend::kCuda);
  setup.command = {.executable = "/bin/sh",
                   .arguments = {"-c", "echo no luck >&2; exit 7"}};
  CompilePool pool({}, {setup});
  EXPECT_THAT(
      pool.Run(std::vector<CompileJob>{Job("ok")}),
      StatusIs(absl::StatusCode::kUnavailable,
               AllOf(HasSubstr("exited with code 7"), HasSubstr("no luck"))));
}

TEST(CompilePoolTest, FailsWhenTheWorkerNeverBecomesReady) {
  CompilerSetup setup = FakeSetup(Backend::kCuda);
  setup.command = {.executable = "/bin/sleep", .arguments = {"60"}};
  CompilePool pool({.start_deadline = absl::Milliseconds(100)}, {setup});
  EXPECT_THAT(pool.Run(std::vector<CompileJob>{Job("ok")}),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       HasSubstr("was not ready within 100ms")));
}

TEST(CompilePoolTest, FailsWhenTheWorkerIsNotTheProbedCompiler) {
  CompilerSetup setup = FakeSetup(Backend::kCuda);
  setup.components = {{.path = "/lib/libnvrtc.so.13", .bytes = 1}};
  CompilePool pool({}, {setup});
  EXPECT_THAT(pool.Run(std::vector<CompileJob>{Job("ok")}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("other files than were probed")));
}

TEST(CompilePoolTest, FailsWhenTheWorkerDoesNotSpeakTheProtocol) {
  CompilerSetup setup = FakeSetup(Backend::kCuda);
  setup.command = {.executable = "/bin/sh",
                   .arguments = {"-c", "echo this is no frame; sleep 60"}};
  CompilePool pool({}, {setup});
  EXPECT_THAT(pool.Run(std::vector<CompileJob>{Job("ok")}),
              StatusIs(absl::StatusCode::kDataLoss));
}

TEST(CompilePoolTest, CanRunAgainAfterAFailedRun) {
  CompilePool pool = MakePool();
  EXPECT_THAT(pool.Run(std::vector<CompileJob>{Job("ok", "cpu-x86-64-v2")}),
              StatusIs(absl::StatusCode::kFailedPrecondition));
  EXPECT_OK(pool.Run(std::vector<CompileJob>{Job("ok")}));
}

TEST(CompilePoolTest, CancelStopsRunningCompiles) {
  CompilePool pool = MakePool({.jobs = 2});
  const absl::Time start = absl::Now();
  size_t done = 0;
  const auto result = pool.Run(
      std::vector<CompileJob>{Job("ok"), Job("sleep 60"), Job("sleep 60")},
      {.on_results =
           [&](absl::Span<const CompileResult> some) {
             done += some.size();
             return absl::OkStatus();
           },
       .cancelled = [&] { return done > 0; }});
  EXPECT_THAT(result, StatusIs(absl::StatusCode::kCancelled));
  EXPECT_EQ(done, 1u);
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
  ASSERT_OK_AND_ASSIGN(const auto results,
                       pool.Run(std::vector<CompileJob>{Job("ok next")}));
  EXPECT_EQ(results[0].binary, "next");
}

// Writing that takes long is done for several results at once: it takes a
// fifth of the time at most, but for the first and the last of it.
TEST(CompilePoolTest, SlowWritingIsDoneForSeveralResultsAtOnce) {
  constexpr size_t kJobs = 60;
  constexpr absl::Duration kWriting = absl::Milliseconds(20);
  CompilePool pool = MakePool({.jobs = 2});
  std::vector<size_t> batches;
  const absl::Time begin = absl::Now();
  ASSERT_OK(pool.Run(std::vector<CompileJob>(kJobs, Job("sleep 0.01")),
                     {.on_results = [&](absl::Span<const CompileResult> some) {
                       absl::SleepFor(kWriting);
                       batches.push_back(some.size());
                       return absl::OkStatus();
                     }}));
  EXPECT_EQ(std::accumulate(batches.begin(), batches.end(), size_t{0}), kJobs);
  ASSERT_GE(batches.size(), 2u);
  EXPECT_LE(5 * kWriting * (batches.size() - 2), absl::Now() - begin)
      << batches.size() << " calls";
}

TEST(CompilePoolTest, WhatHasFinishedIsHandedOverWhenTheRunIsStopped) {
  CompilePool pool = MakePool({.jobs = 2});
  size_t handed = 0;
  size_t done = 0;
  const auto result = pool.Run(
      std::vector<CompileJob>{Job("ok"), Job("ok"), Job("ok"), Job("sleep 60")},
      {.on_results =
           [&](absl::Span<const CompileResult> some) {
             // From now on results wait for each other.
             absl::SleepFor(absl::Milliseconds(300));
             handed += some.size();
             return absl::OkStatus();
           },
       .on_progress =
           [&](const CompileProgress& progress) { done = progress.done; },
       .cancelled = [&] { return done == 3; }});
  EXPECT_THAT(result, StatusIs(absl::StatusCode::kCancelled));
  EXPECT_EQ(handed, 3u);
}

TEST(CompilePoolTest, AnErrorOfTheCallbackStopsTheRun) {
  CompilePool pool = MakePool();
  EXPECT_THAT(pool.Run(std::vector<CompileJob>{Job("ok"), Job("sleep 60")},
                       {.on_results =
                            [](absl::Span<const CompileResult>) {
                              return absl::UnavailableError("disk full");
                            }}),
              StatusIs(absl::StatusCode::kUnavailable, "disk full"));
}

TEST(CompilePoolTest, ReportsProgressUpToTheTotal) {
  CompilePool pool = MakePool();
  CompileProgress last;
  ASSERT_OK(pool.Run(std::vector<CompileJob>(4, Job("ok")),
                     {.on_progress = [&](const CompileProgress& progress) {
                       EXPECT_GE(progress.done, last.done);
                       last = progress;
                     }}));
  EXPECT_EQ(last.done, 4u);
  EXPECT_EQ(last.total, 4u);
  EXPECT_EQ(last.current, "sm_90a unit.cu");
}

TEST(CompilePoolTest, RunsNoJobsAtOnce) {
  CompilePool pool = MakePool();
  ASSERT_OK_AND_ASSIGN(const auto results, pool.Run({}));
  EXPECT_THAT(results, IsEmpty());
  EXPECT_EQ(pool.stats().workers_started, 0);
}

TEST(CompilePoolTest, WorkersSeeNoEnvironmentAndNoFolder) {
  setenv("NVRTC_APPEND_FLAGS", "--device-debug", 1);
  CompilePool pool = MakePool();
  ASSERT_OK_AND_ASSIGN(const auto results,
                       pool.Run(std::vector<CompileJob>{Job("environ")}));
  unsetenv("NVRTC_APPEND_FLAGS");
  EXPECT_EQ(results[0].binary,
            "/\nCUDA_CACHE_DISABLE=1\nCUDA_VISIBLE_DEVICES=\n");
}

// A pseudo-terminal stands in for a GPU: a device that every machine has. Its
// job fails, and the next one has another process.
TEST(CompilePoolTest, AWorkerThatOpensADeviceFailsItsJob) {
  CompilePool pool = MakePool({.jobs = 1});
  ASSERT_OK_AND_ASSIGN(
      const auto results,
      pool.Run(std::vector<CompileJob>{Job("open /dev/zero"),
                                       Job("open /dev/ptmx"), Job("ok c")}));
  EXPECT_OK(results[0].status);
  EXPECT_THAT(results[1].status,
              StatusIs(absl::StatusCode::kInternal,
                       AllOf(HasSubstr("opened /dev/"),
                             HasSubstr("compiled without a device"))));
  EXPECT_EQ(results[1].binary, "");
  EXPECT_EQ(results[2].binary, "c");
  EXPECT_EQ(pool.stats().workers_started, 2);
}

TEST(CompilePoolTest, PassesLargeSourcesAndPrograms) {
  CompilePool pool = MakePool();
  const std::string large(8 << 20, 'x');
  ASSERT_OK_AND_ASSIGN(
      const auto results,
      pool.Run(std::vector<CompileJob>{Job("ok " + large), Job("ok small")}));
  EXPECT_EQ(results[0].binary, large);
  EXPECT_EQ(results[1].binary, "small");
}

TEST(CompilePoolTest, RejectsASourceThatExceedsAFrame) {
  CompilePool pool = MakePool();
  ASSERT_OK_AND_ASSIGN(const auto results,
                       pool.Run(std::vector<CompileJob>{
                           Job(std::string(65 << 20, 'x')), Job("ok small")}));
  EXPECT_THAT(results[0].status,
              StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(results[1].binary, "small");
}

TEST(CompilePoolTest, WorkersEndWithThePool) {
  std::vector<int> pids;
  {
    CompilePool pool = MakePool();
    ASSERT_OK(pool.Run(std::vector<CompileJob>(4, Job("sleep 0.05"))));
    pids = pool.WorkerPids();
  }
  ASSERT_THAT(pids, SizeIs(2));
  for (const int pid : pids) EXPECT_FALSE(IsRunning(pid));
}

// The parent is killed while its workers compile; nothing can tell them.
TEST(CompilePoolTest, WorkersEndWhenTheirParentIsKilled) {
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  const pid_t parent = fork();
  if (parent == 0) {
    CompilePool pool = MakePool();
    static_cast<void>(pool.Run(
        std::vector<CompileJob>{Job("ok"), Job("sleep 60"), Job("sleep 60")},
        {.cancelled = [&] {
          std::vector<int> pids = pool.WorkerPids();
          if (pids.size() == 2) {
            if (write(pipe_fds[1], pids.data(), 2 * sizeof(int)) < 0) abort();
          }
          return false;
        }}));
    _exit(1);
  }
  int pids[2] = {0, 0};
  ASSERT_EQ(read(pipe_fds[0], pids, sizeof(pids)),
            static_cast<ssize_t>(sizeof(pids)));
  absl::SleepFor(absl::Milliseconds(200));  // both are compiling now
  EXPECT_TRUE(IsRunning(pids[0]));
  EXPECT_TRUE(IsRunning(pids[1]));
  ASSERT_EQ(kill(parent, SIGKILL), 0);
  waitpid(parent, nullptr, 0);
  close(pipe_fds[0]);
  close(pipe_fds[1]);
  EXPECT_TRUE(EndsSoon(pids[0]));
  EXPECT_TRUE(EndsSoon(pids[1]));
}

TEST(WorkerCountMaxTest, IsAtLeastOneAndAtMostTheProcessors) {
  EXPECT_GE(WorkerCountMax(), 1);
  EXPECT_LE(WorkerCountMax(), sysconf(_SC_NPROCESSORS_ONLN));
}

}  // namespace
}  // namespace kiln
