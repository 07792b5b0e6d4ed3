// The cache's numbers. Bounds are the goals for a release build on a local
// disk, times kSlack so that a busy machine does not fail; the measured values
// are printed. A commit syncs four times, so where the disk itself is slow
// (others write to it), publishing is held against that.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

#include "cache/plan_cache.h"
#include "tests/cache/cache_fixture.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::MakeMeasurements;
using ::kiln::testing::MakePlan;
using ::kiln::testing::MakeProgram;
using ::kiln::testing::MakeTestPlanKey;
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::TestOptions;

constexpr double kSlack = 3;

double Seconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
      .count();
}

void Report(const char* what, double value, const char* unit, double goal) {
  std::printf("%-36s %10.3f %s (goal %g)\n", what, value, unit, goal);
  EXPECT_LE(value, goal * kSlack) << what;
}

// Milliseconds to append and sync 20 KB, on average.
double SyncMilliseconds(const std::string& path) {
  constexpr int kRounds = 30;
  const int fd = open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0644);
  EXPECT_GE(fd, 0);
  const std::string bytes(20'000, 'x');
  const double seconds = Seconds([&] {
    for (int i = 0; i < kRounds; ++i) {
      EXPECT_EQ(write(fd, bytes.data(), bytes.size()), 20'000);
      EXPECT_EQ(fsync(fd), 0);
    }
  });
  close(fd);
  return seconds * 1e3 / kRounds;
}

double PublishGoal(const ScratchFolder& folder) {
  const double sync_ms = SyncMilliseconds(folder.File("sync"));
  std::printf("%-36s %10.3f ms\n", "one sync of this disk", sync_ms);
  return std::max(5.0, 4 * sync_ms);
}

TEST(CacheSpeedTest, WarmLookupOfAThousandPlans) {
  const ScratchFolder folder;
  std::vector<Digest> keys;
  {
    ASSERT_OK_AND_ASSIGN(PlanCache cache,
                         PlanCache::Open(TestOptions(folder.path())));
    std::vector<Digest> programs;
    for (uint64_t i = 0; i < 3; ++i) {
      ASSERT_OK(cache.PutProgram(MakeProgram(i, 20'000)));
      programs.push_back(MakeProgram(i).key.digest);
    }
    const double seconds = Seconds([&] {
      for (uint64_t i = 0; i < 1000; ++i) {
        const Plan plan = MakePlan(i, programs);
        const PlanKey key = MakeTestPlanKey(plan);
        keys.push_back(key.digest);
        ASSERT_OK(cache.PutPlan(key, plan, MakeMeasurements(i)));
      }
    });
    Report("publish a plan with 3 measurements", seconds, "ms",
           PublishGoal(folder));
  }
  const double seconds = Seconds([&] {
    ASSERT_OK_AND_ASSIGN(PlanCache cache,
                         PlanCache::Open(TestOptions(folder.path())));
    ASSERT_OK_AND_ASSIGN(const auto plans, cache.FindPlans(keys));
    for (const auto& plan : plans) ASSERT_TRUE(plan.has_value());
  });
  Report("open and find 1000 plans", seconds * 1e3, "ms", 100);
  const double presence_seconds = Seconds([&] {
    ASSERT_OK_AND_ASSIGN(PlanCache cache,
                         PlanCache::Open(TestOptions(folder.path())));
    ASSERT_OK_AND_ASSIGN(const std::vector<bool> present,
                         cache.ContainsPlans(keys));
    for (const bool found : present) ASSERT_TRUE(found);
  });
  Report("open and check 1000 plans", presence_seconds * 1e3, "ms", 50);
}

TEST(CacheSpeedTest, AHundredThousandPrograms) {
  const ScratchFolder folder;
  constexpr uint64_t kBatch = 1000;
  constexpr uint64_t kBatches = 100;
  std::vector<Digest> keys;
  {
    ASSERT_OK_AND_ASSIGN(PlanCache cache,
                         PlanCache::Open(TestOptions(folder.path())));
    double seconds = 0;
    for (uint64_t batch = 0; batch < kBatches; ++batch) {
      std::vector<Program> programs;
      for (uint64_t i = 0; i < kBatch; ++i) {
        programs.push_back(MakeProgram(batch * kBatch + i, 6'000));
        keys.push_back(programs.back().key.digest);
      }
      seconds += Seconds([&] { ASSERT_OK(cache.PutPrograms(programs)); });
    }
    Report("publish a program, batches of 1000",
           seconds * 1e3 / kBatch / kBatches, "ms", 5);
    seconds = Seconds([&] {
      for (uint64_t i = 0; i < 200; ++i) {
        ASSERT_OK(cache.PutProgram(MakeProgram(1'000'000 + i, 20'000)));
      }
    });
    Report("publish a program, one by one", seconds * 1e3 / 200, "ms",
           PublishGoal(folder));
  }
  std::optional<PlanCache> cache;
  const double open_seconds = Seconds([&] {
    absl::StatusOr<PlanCache> opened =
        PlanCache::Open(TestOptions(folder.path()));
    ASSERT_OK(opened);
    cache.emplace(*std::move(opened));
  });
  Report("open 100,000 programs", open_seconds * 1e3, "ms", 20);

  // A working set that a prewarm would ask for: twice, the second time warm.
  std::vector<Digest> some;
  for (size_t i = 0; i < keys.size(); i += 97) some.push_back(keys[i]);
  for (const char* what : {"find a program, first touch", "find a program"}) {
    const double seconds = Seconds([&] {
      for (const Digest& key : some) {
        ASSERT_OK_AND_ASSIGN(const auto program, cache->FindProgram(key));
        ASSERT_TRUE(program.has_value());
      }
    });
    Report(what, seconds * 1e6 / static_cast<double>(some.size()), "us", 20);
  }
  const double seconds = Seconds([&] {
    ASSERT_OK_AND_ASSIGN(const auto programs, cache->FindPrograms(some));
    for (const auto& program : programs) ASSERT_TRUE(program.has_value());
  });
  Report("find a program, one snapshot",
         seconds * 1e6 / static_cast<double>(some.size()), "us", 20);
}

}  // namespace
}  // namespace kiln
