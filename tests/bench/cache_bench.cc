// What the plan cache costs: look-ups, publishing, claims, joining, a warm
// prewarm. Rows are those of the cache's tests; the folder is under TMPDIR,
// which has to be on the disk that is meant. The goals are in cache/README.md.

#include <benchmark/benchmark.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "cache/plan_cache.h"
#include "compiler/base/check.h"
#include "compiler/spec/device_profile.h"
#include "compiler/spec/manifest.h"
#include "compiler/toolchain_probe.h"
#include "tests/cache/cache_fixture.h"
#include "tests/support/golden.h"
#include "tests/tuner/cpu_programs.h"
#include "tuner/prewarm.h"

namespace kiln {
namespace {

using ::kiln::testing::CcCpuPath;
using ::kiln::testing::MakeMeasurements;
using ::kiln::testing::MakePlan;
using ::kiln::testing::MakeProgram;
using ::kiln::testing::MakeTestPlanKey;
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::TestOptions;
using ::kiln::testing::WhyNoCcCpu;

class NoProgress : public ProgressSink {
 public:
  void Update(Stage, size_t, size_t, const std::string&) override {}

  void Note(const std::string&) override {}
};

constexpr uint64_t kPlans = 1000;
constexpr size_t kBinaryBytes = 20'000;
constexpr size_t kSmallBinaryBytes = 6'000;

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
    const std::vector<NewPlan> plans = NewPlans(0, program_keys);
    for (const NewPlan& plan : plans) plan_keys.push_back(plan.key.digest);
    KILN_CHECK(cache.PutPlans(plans).ok());
  }

  // One plan per program, with three measurements; `seed` tells sets apart.
  static std::vector<NewPlan> NewPlans(uint64_t seed,
                                       const std::vector<Digest>& programs) {
    std::vector<NewPlan> plans;
    for (const Digest& program : programs) {
      const Plan plan = MakePlan(seed, {program});
      plans.push_back({.key = MakeTestPlanKey(plan),
                       .plan = plan,
                       .measurements = MakeMeasurements(seed)});
      ++seed;
    }
    return plans;
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
  const Filled& data = Data();  // made before
  for (auto _ : state) {
    PlanCache cache = OpenCache(data.folder.path());
    const auto plans = cache.FindPlans(data.plan_keys);
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

void BM_FindPlan(benchmark::State& state) {
  PlanCache cache = OpenCache(Data().folder.path());
  size_t i = 0;
  for (auto _ : state) {
    const auto plan = cache.FindPlan(Data().plan_keys[i++ % kPlans]);
    KILN_CHECK(plan.ok() && plan->has_value());
  }
}

BENCHMARK(BM_FindPlan)->Unit(benchmark::kMicrosecond);

void BM_ContainsProgram(benchmark::State& state) {
  PlanCache cache = OpenCache(Data().folder.path());
  size_t i = 0;
  for (auto _ : state) {
    const auto found = cache.ContainsProgram(Data().program_keys[i++ % kPlans]);
    KILN_CHECK(found.ok() && *found);
  }
}

BENCHMARK(BM_ContainsProgram)->Unit(benchmark::kMicrosecond);

double MillisecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now() - begin)
      .count();
}

// What one fdatasync takes after a small append to a file in `folder`, in
// milliseconds: the price of this disk, beside which publishing is to be read.
double SyncMilliseconds(const ScratchFolder& folder) {
  const int fd = open(folder.File("f").c_str(), O_CREAT | O_WRONLY, 0644);
  KILN_CHECK(fd >= 0);
  const std::string bytes(512, 'x');
  std::vector<double> times(21);
  for (double& time : times) {
    KILN_CHECK(write(fd, bytes.data(), bytes.size()) ==
               static_cast<ssize_t>(bytes.size()));
    const auto begin = std::chrono::steady_clock::now();
    KILN_CHECK(fdatasync(fd) == 0);
    time = MillisecondsSince(begin);
  }
  close(fd);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// One durable transaction of range(0) programs, also counted in syncs of this
// disk: a commit waits for four.
void BM_PutPrograms(benchmark::State& state) {
  ScratchFolder folder;
  PlanCache cache = OpenCache(folder.path());
  uint64_t seed = 0;
  std::vector<double> commits;
  std::vector<double> syncs;
  for (auto _ : state) {
    state.PauseTiming();
    if (commits.size() % 100 == 0) syncs.push_back(SyncMilliseconds(folder));
    std::vector<Program> programs;
    for (int64_t i = 0; i < state.range(0); ++i) {
      programs.push_back(MakeProgram(seed++, kBinaryBytes));
    }
    state.ResumeTiming();
    const auto begin = std::chrono::steady_clock::now();
    KILN_CHECK(cache.PutPrograms(programs).ok());
    commits.push_back(MillisecondsSince(begin));
  }
  std::sort(commits.begin(), commits.end());
  std::sort(syncs.begin(), syncs.end());
  const double commit = commits[commits.size() / 2];
  const double sync = syncs[syncs.size() / 2];
  state.counters["ms_per_program"] =
      commit / static_cast<double>(state.range(0));
  state.counters["fdatasync_ms"] = sync;
  state.counters["commit_in_fdatasyncs"] = commit / sync;
  state.SetItemsProcessed(static_cast<int64_t>(seed));
}

BENCHMARK(BM_PutPrograms)
    ->Arg(1)
    ->Arg(8)
    ->Arg(64)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

// What a cold prewarm pays for publishing what real compilers make, while they
// go on: range(0) candidates of each interval of a small model.
void BM_PublishInAColdPrewarm(benchmark::State& state) {
  if (const std::string why = WhyNoCcCpu(); !why.empty()) {
    state.SkipWithError(why.c_str());
    return;
  }
  const absl::StatusOr<Manifest> manifest = ParseManifest(
      R"({"schema": "kiln.model/1", "name": "Small", "requests": [)"
      R"({"name": "moe", "op": "fused_moe", "layers": 1, "hidden": 256,)"
      R"( "intermediate": 128, "experts": 4, "top_k": 2,)"
      R"( "activation": "silu", "io_dtype": "bf16", "id_dtype": "i32",)"
      R"( "weights": {"format": "exl3", "codebook": "mcg", "bits": 4},)"
      R"( "recipe": "w4a16", "capacities": [1, 4]}]})",
      "small.json");
  KILN_CHECK(manifest.ok());
  PrewarmOptions options;
  const absl::StatusOr<Target> target = HostCpuTarget();
  KILN_CHECK(target.ok());
  options.targets = {*target};
  options.candidates_max = static_cast<int>(state.range(0));
  options.stop_after = Stage::kCompile;
  options.toolchain = [](Backend, ProbeMemo* memo) {
    return ProbeCcCpu(CcCpuPath(), memo);
  };
  NoProgress progress;
  double programs = 0;
  double transactions = 0;
  double publish = 0;
  double compile = 0;
  for (auto _ : state) {
    ScratchFolder folder;
    PlanCache cache = OpenCache(folder.path());
    const auto report = Prewarm(*manifest, options, &cache, &progress);
    KILN_CHECK(report.ok() && report->programs_compiled > 0);
    programs += static_cast<double>(report->programs_compiled);
    transactions += static_cast<double>(report->publish_transactions);
    publish += 1e3 * report->publish_seconds;
    compile += 1e3 * report->seconds.at("compile");
  }
  state.counters["ms_per_program"] = publish / programs;
  state.counters["programs_per_commit"] = programs / transactions;
  state.counters["compile_ms_per_program"] = compile / programs;
}

BENCHMARK(BM_PublishInAColdPrewarm)
    ->Arg(8)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

// One durable transaction of range(0) plans.
void BM_PutPlans(benchmark::State& state) {
  ScratchFolder folder;
  PlanCache cache = OpenCache(folder.path());
  const Program program = MakeProgram(1, kBinaryBytes);
  KILN_CHECK(cache.PutProgram(program).ok());
  const std::vector<Digest> programs(static_cast<size_t>(state.range(0)),
                                     program.key.digest);
  uint64_t seed = 0;
  for (auto _ : state) {
    state.PauseTiming();
    const std::vector<NewPlan> plans = Filled::NewPlans(seed, programs);
    seed += plans.size();
    state.ResumeTiming();
    KILN_CHECK(cache.PutPlans(plans).ok());
  }
  state.SetItemsProcessed(static_cast<int64_t>(seed));
}

BENCHMARK(BM_PutPlans)
    ->Arg(1)
    ->Arg(1000)
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

// A cache of 100,000 programs of 6 KB, made once.
struct Large {
  Large() {
    constexpr uint64_t kBatch = 1000;
    PlanCache cache = OpenCache(folder.path());
    for (uint64_t begin = 0; begin < 100'000; begin += kBatch) {
      std::vector<Program> programs;
      for (uint64_t i = 0; i < kBatch; ++i) {
        programs.push_back(MakeProgram(begin + i, kSmallBinaryBytes));
        // A working set that a prewarm would ask for.
        if ((begin + i) % 97 == 0) some.push_back(programs.back().key.digest);
      }
      KILN_CHECK(cache.PutPrograms(programs).ok());
    }
  }

  ScratchFolder folder;
  std::vector<Digest> some;
};

Large& LargeData() {
  static Large& large = *new Large;
  return large;
}

void BM_OpenOf100000Programs(benchmark::State& state) {
  const std::string folder = LargeData().folder.path();  // made before
  for (auto _ : state) {
    PlanCache cache = OpenCache(folder);
    benchmark::DoNotOptimize(cache);
  }
}

BENCHMARK(BM_OpenOf100000Programs)->Unit(benchmark::kMillisecond);

// One by one in a cache that was just opened: pages come from the system.
void BM_FindProgramOf100000FirstTouch(benchmark::State& state) {
  int64_t found = 0;
  for (auto _ : state) {
    state.PauseTiming();
    auto cache =
        std::make_unique<PlanCache>(OpenCache(LargeData().folder.path()));
    state.ResumeTiming();
    for (const Digest& key : LargeData().some) {
      const auto program = cache->FindProgram(key);
      KILN_CHECK(program.ok() && program->has_value());
      ++found;
    }
    state.PauseTiming();
    cache.reset();
    state.ResumeTiming();
  }
  state.SetItemsProcessed(found);
}

BENCHMARK(BM_FindProgramOf100000FirstTouch)->Unit(benchmark::kMillisecond);

void BM_FindProgramOf100000(benchmark::State& state) {
  PlanCache cache = OpenCache(LargeData().folder.path());
  const std::vector<Digest>& some = LargeData().some;
  for (const Digest& key : some) KILN_CHECK(cache.FindProgram(key).ok());
  size_t i = 0;
  for (auto _ : state) {
    const auto program = cache.FindProgram(some[i++ % some.size()]);
    KILN_CHECK(program.ok() && program->has_value());
  }
}

BENCHMARK(BM_FindProgramOf100000)->Unit(benchmark::kMicrosecond);

// range(0) at a time, each time from one snapshot: two as a recheck asks for
// one contender, 32 as a race asks for its candidates, all as freeze does.
void BM_FindProgramsOf100000(benchmark::State& state) {
  PlanCache cache = OpenCache(LargeData().folder.path());
  const absl::Span<const Digest> some = LargeData().some;
  const auto at_once = static_cast<size_t>(state.range(0));
  for (auto _ : state) {
    for (size_t begin = 0; begin < some.size(); begin += at_once) {
      const auto programs = cache.FindPrograms(some.subspan(begin, at_once));
      KILN_CHECK(programs.ok() && programs->back().has_value());
    }
  }
  const auto found = static_cast<double>(state.iterations()) *
                     static_cast<double>(some.size());
  state.counters["seconds_each"] = benchmark::Counter(
      found, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

BENCHMARK(BM_FindProgramsOf100000)
    ->Arg(2)
    ->Arg(32)
    ->Arg(2000)
    ->Unit(benchmark::kMillisecond);

// A model of 1,001 intervals whose plans, with bodies as the planner makes
// them, are all stored.
struct Warm {
  Warm() {
    constexpr int kRequests = 77;
    std::vector<std::string> requests;
    for (int i = 0; i < kRequests; ++i) {
      requests.push_back(absl::StrCat(
          R"({"name": "moe)", i, R"(", "op": "fused_moe", "layers": 1,)",
          R"("hidden": )", 2048 + 128 * i,
          R"(, "intermediate": 768, "experts": 128, "top_k": 8,)",
          R"("activation": "silu", "io_dtype": "bf16", "id_dtype": "i32",)",
          R"("weights": {"format": "exl3", "codebook": "mcg", "bits": 4},)",
          R"("recipe": "w4a16", "capacities": [1, 2, 4, 8, 16, 32, 64, 128,)",
          R"( 256, 512, 1024, 2048, 4096]})"));
    }
    absl::StatusOr<Manifest> parsed = ParseManifest(
        absl::StrCat(R"({"schema": "kiln.model/1", "name": "Large",)",
                     R"( "requests": [)", absl::StrJoin(requests, ","), "]}"),
        "large.json");
    KILN_CHECK(parsed.ok());
    manifest = *std::move(parsed);
    options.targets = {testing::TestTarget()};
    options.compile_only = true;
    options.toolchain = [](Backend backend, ProbeMemo*) {
      CompilerSetup setup;
      setup.backend = backend;
      setup.toolchain = {
          .name = "nvrtc", .version = "13.0.88", .content = Sha256("library")};
      return setup;
    };
    PlanCache cache = OpenCache(folder.path());
    const Program program = MakeProgram(1, kBinaryBytes);
    KILN_CHECK(cache.PutProgram(program).ok());
    const absl::StatusOr<ResolvedManifest> resolved =
        ResolveManifest(manifest, options, &cache);
    KILN_CHECK(resolved.ok());
    std::vector<NewPlan> plans;
    PlanBody body;
    for (const ResolvedInterval& interval : resolved->intervals) {
      if (body.steps.empty()) {
        const auto planned = interval.planner->Plan(interval.interval);
        KILN_CHECK(planned.ok());
        body = planned->candidates.front().body;
      }
      Plan plan = MakePlan(1, {});
      plan.geometry = interval.geometry;
      plan.target = options.targets[0];
      plan.interval = interval.interval;
      plan.body = body;
      for (const Step& step : body.steps) {
        plan.programs.resize(
            std::max<size_t>(plan.programs.size(), step.program + 1),
            program.key.digest);
      }
      plans.push_back({.key = interval.key, .plan = std::move(plan)});
    }
    KILN_CHECK(plans.size() > kPlans);
    KILN_CHECK(cache.PutPlans(plans).ok());
  }

  ScratchFolder folder;
  Manifest manifest;
  PrewarmOptions options;
};

// Open, keys, look-up and the report; all but the start of a process.
void BM_WarmPrewarmOf1001Plans(benchmark::State& state) {
  static Warm& warm = *new Warm;
  NoProgress progress;
  for (auto _ : state) {
    PlanCache cache = OpenCache(warm.folder.path());
    const auto report = Prewarm(warm.manifest, warm.options, &cache, &progress);
    KILN_CHECK(report.ok() && report->complete);
    KILN_CHECK(report->intervals.size() > kPlans);
  }
}

BENCHMARK(BM_WarmPrewarmOf1001Plans)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace kiln

BENCHMARK_MAIN();
