// Faults in the whole flow: every call of a prewarm to the file system or to
// SQLite fails, or the process dies there. After each, Check passes, what was
// stored is not done again, and the next prewarm completes. And failures of the
// compiler: they are paid for once.
//
// Programs are those of the real compiler, made once; for each point a worker
// process hands them out again, so that a run takes moments. They are verified
// and raced for real.

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache/plan_cache.h"
#include "compiler/base/file_util.h"
#include "compiler/worker_loop.h"
#include "tests/support/fault_fs.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"
#include "tests/tuner/cpu_programs.h"
#include "tuner/prewarm.h"
#include "tuner/race_worker.h"

namespace kiln {
namespace {

using testing::CallsCounted;
using testing::CcCpuPath;
using testing::Fault;
using testing::FaultName;
using testing::InjectFault;
using testing::IsOkAndHolds;
using testing::ScratchFolder;
using testing::WhyNoCcCpu;

constexpr char kReplayVerb[] = "replay-worker";
constexpr uint64_t kProgramBytesMax = 16 << 20;
// Points per fault in the short form.
constexpr int64_t kShortPoints = 2;

constexpr char kManifest[] = R"({
 "schema": "kiln.model/1", "name": "Small",
 "requests": [
  {"name": "moe", "op": "fused_moe", "layers": 1,
   "hidden": 256, "intermediate": 128, "experts": 4, "top_k": 2,
   "activation": "silu", "io_dtype": "bf16", "id_dtype": "i64",
   "weights": {"format": "exl3", "codebook": "mcg", "bits": 4},
   "recipe": "w4a16", "capacities": [1]}]})";
constexpr int kCandidates = 2;

std::string ProgramFile(const std::string& folder, const SourceUnit& unit) {
  return absl::StrCat(folder, "/", Sha256(unit.text).ToHex());
}

// A compiler that knows its programs by heart.
class ReplayCompiler : public WorkerCompiler {
 public:
  ReplayCompiler(const std::string& folder, const std::string& version)
      : folder_(folder), version_(version) {}

  WorkerHello Hello() const override {
    return {.compiler = "replay", .version = version_, .components = {}};
  }

  WorkerResult Compile(const WorkerJob& job) override {
    WorkerResult result;
    // A line per compile, so that a test can count them.
    std::ofstream(folder_ + "/compiles", std::ios::app) << version_ << "\n";
    if (std::filesystem::exists(ProgramFile(folder_, job.unit) + ".refused")) {
      result.status = absl::InvalidArgumentError("it does not compile");
      result.log = "line 1: error: as the test wants it\n";
      return result;
    }
    absl::StatusOr<std::string> bytes =
        ReadFile(ProgramFile(folder_, job.unit), kProgramBytesMax);
    if (bytes.ok()) {
      result.binary = *std::move(bytes);
    } else {
      result.status = bytes.status();
    }
    return result;
  }

 private:
  const std::string folder_;
  const std::string version_;
};

// ReplayCompiler of a version, on the programs in `folder`.
CompilerSetup ReplaySetup(Backend backend, const std::string& folder,
                          const std::string& version) {
  CompilerSetup setup;
  setup.backend = backend;
  setup.toolchain.name = "replay";
  setup.toolchain.version = version;
  setup.command = {.executable = "/proc/self/exe",
                   .arguments = {kReplayVerb, folder, version}};
  return setup;
}

class Quiet : public ProgressSink {
 public:
  void Update(Stage, size_t, size_t, const std::string&) override {}

  void Note(const std::string&) override {}
};

Manifest SmallManifest() {
  absl::StatusOr<Manifest> manifest = ParseManifest(kManifest, "small.json");
  EXPECT_OK(manifest);
  return *std::move(manifest);
}

PrewarmOptions SmallOptions() {
  PrewarmOptions options;
  absl::StatusOr<Target> target = HostCpuTarget();
  EXPECT_OK(target);
  options.targets = {*target};
  options.candidates_max = kCandidates;
  options.jobs = 1;
  options.race_seconds_max = 0.01;
  return options;
}

// What one run in a child came to.
struct Outcome {
  int state = 0;  // of the child, as waitpid gives it
  bool reported = false;
  bool complete = false;
  int64_t compiled = 0;
  int64_t reused = 0;
  int64_t winners = 0;
  int64_t calls = 0;
};

class PrewarmFaultTest : public ::testing::TestWithParam<Fault> {
 protected:
  // Compiles the candidates of the manifest once.
  static void SetUpTestSuite() {
    if (!WhyNoCcCpu().empty()) return;
    programs_ = new ScratchFolder;
    absl::StatusOr<PlanCache> cache = PlanCache::Open("", CacheMode::kOff);
    ASSERT_OK(cache);
    PrewarmOptions options = SmallOptions();
    options.toolchain = [](Backend, ProbeMemo*) {
      return ProbeCcCpu(CcCpuPath());
    };
    ASSERT_OK_AND_ASSIGN(const ResolvedManifest resolved,
                         ResolveManifest(SmallManifest(), options, &*cache));
    ASSERT_EQ(resolved.intervals.size(), 1u);
    const ResolvedInterval& interval = resolved.intervals[0];
    ASSERT_OK_AND_ASSIGN(const IntervalPlan plan,
                         interval.planner->Plan(interval.interval));
    ASSERT_EQ(plan.candidates.size(), static_cast<size_t>(kCandidates));
    for (const PlannedCandidate& candidate : plan.candidates) {
      const std::vector<SourceUnit> units =
          candidate.kernel_template->MakeUnits(
              interval.geometry, options.targets[0], candidate.body.assignment);
      const auto compiled = testing::CompileUnits(units);
      for (size_t i = 0; i < units.size(); ++i) {
        ASSERT_OK(compiled[i]);
        ASSERT_OK(WriteFileAtomically(ProgramFile(programs_->path(), units[i]),
                                      (*compiled[i])->binary));
      }
    }
  }

  static void TearDownTestSuite() {
    delete programs_;
    programs_ = nullptr;
  }

  void SetUp() override {
    if (const std::string why = WhyNoCcCpu(); !why.empty()) GTEST_SKIP() << why;
    ASSERT_NE(programs_, nullptr);
  }

  // A prewarm in a child process.
  static Outcome Run(const std::string& root, Fault fault, int64_t nth) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
      close(ends[0]);
      PrewarmOptions options = SmallOptions();
      options.toolchain = [](Backend backend, ProbeMemo*) {
        return ReplaySetup(backend, programs_->path(), "1");
      };
      const Manifest manifest = SmallManifest();
      InjectFault(root, fault, nth);
      Outcome outcome;
      absl::StatusOr<PlanCache> cache =
          PlanCache::Open(root + "/cache", CacheMode::kReadWrite);
      if (cache.ok()) {
        Quiet quiet;
        const absl::StatusOr<PrewarmReport> report =
            Prewarm(manifest, options, &*cache, &quiet);
        if (report.ok()) {
          outcome.reported = true;
          outcome.complete = report->complete;
          outcome.compiled = static_cast<int64_t>(report->programs_compiled);
          outcome.reused = static_cast<int64_t>(report->programs_reused);
          outcome.winners = static_cast<int64_t>(report->winners);
        }
      }
      outcome.calls = CallsCounted();
      InjectFault("", Fault::kNone, 0);
      _exit(write(ends[1], &outcome, sizeof(outcome)) == sizeof(outcome) ? 0
                                                                         : 1);
    }
    close(ends[1]);
    Outcome outcome;
    const ssize_t got = read(ends[0], &outcome, sizeof(outcome));
    close(ends[0]);
    if (got != sizeof(outcome)) outcome = {};
    EXPECT_EQ(waitpid(child, &outcome.state, 0), child);
    return outcome;
  }

  static int64_t Programs(PlanCache* cache) {
    absl::StatusOr<CacheStats> stats = cache->Stats();
    EXPECT_OK(stats);
    for (const TableStats& table : stats->tables) {
      if (table.name == "program") return table.rows;
    }
    return -1;
  }

  // One fault; returns the calls of the run that met it.
  static int64_t Try(Fault fault, int64_t nth) {
    SCOPED_TRACE(absl::StrCat(FaultName(fault), " at call ", nth));
    const ScratchFolder root;
    const Outcome first = Run(root.path(), fault, nth);
    const bool killed =
        WIFSIGNALED(first.state) && WTERMSIG(first.state) == SIGKILL;
    EXPECT_TRUE(killed ||
                (WIFEXITED(first.state) && WEXITSTATUS(first.state) == 0))
        << "crashed with state " << first.state;
    int64_t stored = 0;
    {
      absl::StatusOr<PlanCache> cache =
          PlanCache::Open(root.path() + "/cache", CacheMode::kReadWrite);
      EXPECT_OK(cache);
      if (!cache.ok()) return 0;
      EXPECT_THAT(cache->Check(), IsOkAndHolds(::testing::IsEmpty()));
      stored = Programs(&*cache);
      EXPECT_GE(stored, first.compiled);
    }
    const Outcome second = Run(root.path(), Fault::kNone, 0);
    EXPECT_TRUE(second.reported && second.complete);
    EXPECT_EQ(second.winners, 1);
    if (first.complete) {
      EXPECT_EQ(second.compiled, 0) << "the plan was lost";
    } else {
      EXPECT_EQ(second.compiled, kCandidates - stored)
          << "what was stored is not compiled again";
    }
    absl::StatusOr<PlanCache> cache =
        PlanCache::Open(root.path() + "/cache", CacheMode::kReadOnly);
    EXPECT_OK(cache);
    EXPECT_THAT(cache->Check(), IsOkAndHolds(::testing::IsEmpty()));
    EXPECT_THAT(cache->TakeWarnings(), ::testing::IsEmpty());
    return first.calls;
  }

  static ScratchFolder* programs_;
};

ScratchFolder* PrewarmFaultTest::programs_ = nullptr;

TEST_P(PrewarmFaultTest, TheNextRunCompletes) {
  const int64_t calls = Try(GetParam(), INT64_MAX);
  ASSERT_GT(calls, 50);
  const bool full = std::getenv("KILN_TEST_FULL") != nullptr;
  const int64_t stride = full ? 1 : calls / kShortPoints;
  int64_t nth = full ? 1 : 10 + 11 * static_cast<int64_t>(GetParam());
  int64_t tried = 0;
  for (; nth <= calls && !HasFailure(); nth += stride) {
    Try(GetParam(), nth);
    ++tried;
  }
  std::printf("%s: %lld points tried, the run makes %lld calls\n",
              FaultName(GetParam()), static_cast<long long>(tried),
              static_cast<long long>(calls));
}

INSTANTIATE_TEST_SUITE_P(Faults, PrewarmFaultTest,
                         ::testing::ValuesIn(testing::kFaults),
                         [](const ::testing::TestParamInfo<Fault>& fault)
                             -> std::string { return FaultName(fault.param); });

// A failure is kept with its log and its key: a resumed run does not pay for it
// again, and another compiler tries anew.
TEST(PrewarmRejectTest, EachCompilerPaysForARefusedProgramOnce) {
  const ScratchFolder folder;
  PrewarmOptions options = SmallOptions();
  options.stop_after = Stage::kCompile;
  const auto run = [&](const std::string& version) {
    options.toolchain = [&folder, version](Backend backend, ProbeMemo*) {
      return ReplaySetup(backend, folder.path(), version);
    };
    absl::StatusOr<PlanCache> cache =
        PlanCache::Open(folder.File("cache"), CacheMode::kReadWrite);
    EXPECT_OK(cache);
    Quiet quiet;
    absl::StatusOr<PrewarmReport> report =
        Prewarm(SmallManifest(), options, &*cache, &quiet);
    EXPECT_OK(report);
    EXPECT_EQ(report->programs_compiled, 0u);
  };
  const auto compiles = [&] {
    const std::string lines = testing::ReadTestFile(folder.File("compiles"));
    return std::count(lines.begin(), lines.end(), '\n');
  };
  options.toolchain = [&folder](Backend backend, ProbeMemo*) {
    return ReplaySetup(backend, folder.path(), "1");
  };
  // The programs of all candidates are refused.
  ASSERT_OK_AND_ASSIGN(PlanCache empty, PlanCache::Open("", CacheMode::kOff));
  ASSERT_OK_AND_ASSIGN(const ResolvedManifest resolved,
                       ResolveManifest(SmallManifest(), options, &empty));
  const ResolvedInterval& interval = resolved.intervals[0];
  ASSERT_OK_AND_ASSIGN(const IntervalPlan plan,
                       interval.planner->Plan(interval.interval));
  std::set<Digest> keys;
  for (const PlannedCandidate& candidate : plan.candidates) {
    const std::vector<SourceUnit> units = candidate.kernel_template->MakeUnits(
        interval.geometry, options.targets[0], candidate.body.assignment);
    for (const SourceUnit& unit : units) {
      std::ofstream(ProgramFile(folder.path(), unit) + ".refused").flush();
    }
    for (const ProgramKey& key : candidate.programs) keys.insert(key.digest);
  }
  const auto programs = static_cast<int64_t>(keys.size());
  run("1");
  EXPECT_EQ(compiles(), programs);
  {
    ASSERT_OK_AND_ASSIGN(
        PlanCache cache,
        PlanCache::Open(folder.File("cache"), CacheMode::kReadOnly));
    for (const Digest& key : keys) {
      ASSERT_OK_AND_ASSIGN(const std::optional<Reject> reject,
                           cache.FindReject(key));
      ASSERT_TRUE(reject.has_value());
      EXPECT_EQ(reject->stage, RejectStage::kCompile);
      EXPECT_EQ(reject->log, "line 1: error: as the test wants it\n");
      EXPECT_EQ(Sha256(reject->preimage), key);
    }
  }
  run("1");
  EXPECT_EQ(compiles(), programs) << "a resumed run paid again";
  run("2");
  EXPECT_EQ(compiles(), 2 * programs) << "another compiler was not tried";
}

}  // namespace
}  // namespace kiln

int main(int argc, char** argv) {
  if (argc > 3 && std::strcmp(argv[1], kiln::kReplayVerb) == 0) {
    return kiln::ServeCompiler(
        [&]() -> absl::StatusOr<std::unique_ptr<kiln::WorkerCompiler>> {
          return std::make_unique<kiln::ReplayCompiler>(argv[2], argv[3]);
        });
  }
  if (argc > 1 && std::strcmp(argv[1], kiln::kRaceWorkerVerb) == 0) {
    return kiln::RaceWorkerMain(argc, argv);
  }
  ::testing::InitGoogleTest(&argc, argv);
  if (access("/dev/shm", W_OK) == 0) setenv("TMPDIR", "/dev/shm", 0);
  return RUN_ALL_TESTS();
}
