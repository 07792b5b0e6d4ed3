#include "runtime/cpu_pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace kiln::runtime {
namespace {

struct Work {
  std::vector<std::atomic<uint32_t>> runs;
  std::atomic<int> threads{0};

  explicit Work(size_t n) : runs(n) {}
};

thread_local const void* t_last = nullptr;

void Count(const void* args, uint32_t x, uint32_t y, uint32_t z) {
  Work* work = *static_cast<Work* const*>(args);
  if (t_last != work) {
    t_last = work;
    ++work->threads;
  }
  ++work->runs[x + y * 8 + z * 24];
}

TEST(CpuPoolTest, RunsEveryBlockOnceForEveryThreadCount) {
  CpuPool* pool = nullptr;
  ASSERT_EQ(CpuPool::Create(4, &pool, nullptr), KILN_STATUS_OK);
  EXPECT_EQ(pool->threads(), 4u);
  for (uint32_t threads = 0; threads <= 6; ++threads) {
    for (int round = 0; round < 200; ++round) {
      Work work(8 * 3 * 2);
      Work* pointer = &work;
      pool->Lock();
      pool->Run({Count, &pointer, {8, 3, 2}}, threads);
      pool->Unlock();
      for (auto& n : work.runs) ASSERT_EQ(n.load(), 1u);
      EXPECT_LE(work.threads.load(),
                static_cast<int>(threads < 1 ? 1 : threads));
    }
  }
  CpuPool::Destroy(pool);
}

TEST(CpuPoolTest, HelpersThatSleepWakeUp) {
  CpuPool* pool = nullptr;
  ASSERT_EQ(CpuPool::Create(3, &pool, nullptr), KILN_STATUS_OK);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    Work work(48);
    Work* pointer = &work;
    pool->Run({Count, &pointer, {8, 3, 2}}, 3);
    for (auto& n : work.runs) ASSERT_EQ(n.load(), 1u);
  }
  CpuPool::Destroy(pool);
}

// Blocks that wait for each other finish only if as many threads take part.
std::atomic<uint32_t> g_arrived;

void Meet(const void* args, uint32_t, uint32_t, uint32_t) {
  const uint32_t wanted = *static_cast<const uint32_t*>(args);
  ++g_arrived;
  while (g_arrived.load() < wanted) std::this_thread::yield();
}

TEST(CpuPoolTest, ThreadsReallyRunSideBySide) {
  CpuPool* pool = nullptr;
  ASSERT_EQ(CpuPool::Create(3, &pool, nullptr), KILN_STATUS_OK);
  const uint32_t wanted = 3;
  for (int round = 0; round < 20; ++round) {
    g_arrived = 0;
    pool->Run({Meet, &wanted, {3, 1, 1}}, 3);
    EXPECT_EQ(g_arrived.load(), 3u);
  }
  CpuPool::Destroy(pool);
}

std::thread::id g_caller;
std::atomic<int> g_finished;

// Both threads have a block; the helper takes much longer over its own.
void MeetAndLinger(const void* args, uint32_t x, uint32_t y, uint32_t z) {
  Meet(args, x, y, z);
  if (std::this_thread::get_id() != g_caller) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ++g_finished;
}

TEST(CpuPoolTest, RunReturnsWhenTheSlowestHelperIsDone) {
  CpuPool* pool = nullptr;
  ASSERT_EQ(CpuPool::Create(2, &pool, nullptr), KILN_STATUS_OK);
  const uint32_t wanted = 2;
  g_caller = std::this_thread::get_id();
  for (int round = 0; round < 5; ++round) {
    g_arrived = 0;
    g_finished = 0;
    pool->Run({MeetAndLinger, &wanted, {2, 1, 1}}, 2);
    EXPECT_EQ(g_finished.load(), 2);
  }
  CpuPool::Destroy(pool);
}

TEST(CpuPoolTest, AnEmptyGridReturns) {
  CpuPool* pool = nullptr;
  ASSERT_EQ(CpuPool::Create(2, &pool, nullptr), KILN_STATUS_OK);
  Work work(1);
  Work* pointer = &work;
  pool->Run({Count, &pointer, {0, 3, 2}}, 2);
  EXPECT_EQ(work.runs[0].load(), 0u);
  CpuPool::Destroy(pool);
}

TEST(CpuPoolTest, AForkedChildStillRunsItsBlocks) {
  // The helpers are not in the child; the calling thread does all the work.
  CpuPool* pool = nullptr;
  ASSERT_EQ(CpuPool::Create(3, &pool, nullptr), KILN_STATUS_OK);
  const pid_t child = fork();
  if (child == 0) {
    Work work(48);
    Work* pointer = &work;
    pool->Run({Count, &pointer, {8, 3, 2}}, 3);
    int wrong = 0;
    for (auto& n : work.runs) wrong += n.load() == 1 ? 0 : 1;
    _exit(wrong == 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CpuPool::Destroy(pool);
}

TEST(AvailableProcessorsTest, FollowsTheAffinityMask) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  EXPECT_EQ(AvailableProcessors(), static_cast<uint32_t>(CPU_COUNT(&before)));
  int first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(AvailableProcessors(), 1u);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

}  // namespace
}  // namespace kiln::runtime
