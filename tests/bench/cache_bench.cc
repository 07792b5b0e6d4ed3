// What the plan cache costs: look-ups, publishing, claims, joining. Rows are
// those of the cache's tests; the folder is under TMPDIR.

#include <benchmark/benchmark.h>

#include <memory>
#include <string>
#include <vector>

#include "cache/plan_cache.h"
#include "compiler/base/check.h"
#include "tests/cache/cache_fixture.h"
#include "tests/support/golden.h"

namespace kiln {
namespace {

using ::kiln::testing::MakeMeasurements;
using ::kiln::testing::MakePlan;
using ::kiln::testing::MakeProgram;
using ::kiln::testing::MakeTestPlanKey;
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::TestOptions;

constexpr uint64_t kPlans = 1000;
constexpr size_t kBinaryBytes = 20'000;

PlanCache OpenCache(const std::string& folder) {
  absl::StatusOr<PlanCache> cache = PlanCache::Open(TestOptions(folder));
  KILN_CHECK(cache.ok());
  return *std::move(cache);
}

// A cache of kPlans plans with one program each, made once.
struct Filled {
  Filled() {
    PlanCache cache = OpenCache(folder.path());
    std::vector<Program> programs;
    for (uint64_t i = 0; i < kPlans; ++i) {
      programs.push_back(MakeProgram(i, kBinaryBytes));
      program_keys.push_back(programs.back().key.digest);
    }
    KILN_CHECK(cache.PutPrograms(programs).ok());
    for (uint64_t i = 0; i < kPlans; ++i) {
      const Plan plan = MakePlan(i, {program_keys[i]});
      const PlanKey key = MakeTestPlanKey(plan);
      plan_keys.push_back(key.digest);
      KILN_CHECK(cache.PutPlan(key, plan, MakeMeasurements(i)).ok());
    }
  }

  ScratchFolder folder;
  std::vector<Digest> program_keys;
  std::vector<Digest> plan_keys;
};

Filled& Data() {
  static Filled& filled = *new Filled;
  return filled;
}

void BM_Open(benchmark::State& state) {
  const std::string folder = Data().folder.path();
  for (auto _ : state) {
    PlanCache cache = OpenCache(folder);
    benchmark::DoNotOptimize(cache);
  }
}

BENCHMARK(BM_Open)->Unit(benchmark::kMillisecond);

void BM_OpenAndFind1000Plans(benchmark::State& state) {
  for (auto _ : state) {
    PlanCache cache = OpenCache(Data().folder.path());
    const auto plans = cache.FindPlans(Data().plan_keys);
    KILN_CHECK(plans.ok() && plans->back().has_value());
  }
}

BENCHMARK(BM_OpenAndFind1000Plans)->Unit(benchmark::kMillisecond);

void BM_FindProgram(benchmark::State& state) {
  PlanCache cache = OpenCache(Data().folder.path());
  size_t i = 0;
  for (auto _ : state) {
    const auto program = cache.FindProgram(Data().program_keys[i++ % kPlans]);
    KILN_CHECK(program.ok() && program->has_value());
  }
}

BENCHMARK(BM_FindProgram)->Unit(benchmark::kMicrosecond);

void BM_ContainsProgram(benchmark::State& state) {
  PlanCache cache = OpenCache(Data().folder.path());
  size_t i = 0;
  for (auto _ : state) {
    const auto found = cache.ContainsProgram(Data().program_keys[i++ % kPlans]);
    KILN_CHECK(found.ok() && *found);
  }
}

BENCHMARK(BM_ContainsProgram)->Unit(benchmark::kMicrosecond);

// One durable transaction of range(0) programs.
void BM_PutPrograms(benchmark::State& state) {
  ScratchFolder folder;
  PlanCache cache = OpenCache(folder.path());
  uint64_t seed = 0;
  for (auto _ : state) {
    state.PauseTiming();
    std::vector<Program> programs;
    for (int64_t i = 0; i < state.range(0); ++i) {
      programs.push_back(MakeProgram(seed++, kBinaryBytes));
    }
    state.ResumeTiming();
    KILN_CHECK(cache.PutPrograms(programs).ok());
  }
  state.SetItemsProcessed(static_cast<int64_t>(seed));
}

BENCHMARK(BM_PutPrograms)
    ->Arg(1)
    ->Arg(64)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

void BM_AcquireAndReleaseLease(benchmark::State& state) {
  ScratchFolder folder;
  PlanCache cache = OpenCache(folder.path());
  const std::vector<Digest> keys = {Sha256("work")};
  for (auto _ : state) {
    KILN_CHECK(cache.AcquireLeases(keys, 600).ok());
    KILN_CHECK(cache.ReleaseLeases(keys).ok());
  }
}

BENCHMARK(BM_AcquireAndReleaseLease)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

void BM_Merge1000Plans(benchmark::State& state) {
  PlanCache source = OpenCache(Data().folder.path());
  for (auto _ : state) {
    state.PauseTiming();
    auto folder = std::make_unique<ScratchFolder>();
    PlanCache cache = OpenCache(folder->path());
    state.ResumeTiming();
    const auto merged = cache.MergeFrom(&source, {});
    KILN_CHECK(merged.ok() && merged->plans_added == kPlans);
    state.PauseTiming();
    folder.reset();
    state.ResumeTiming();
  }
}

BENCHMARK(BM_Merge1000Plans)->UseRealTime()->Unit(benchmark::kMillisecond);

void BM_Check1000Plans(benchmark::State& state) {
  PlanCache cache = OpenCache(Data().folder.path());
  for (auto _ : state) {
    const auto findings = cache.Check();
    KILN_CHECK(findings.ok() && findings->empty());
  }
}

BENCHMARK(BM_Check1000Plans)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kiln

BENCHMARK_MAIN();
