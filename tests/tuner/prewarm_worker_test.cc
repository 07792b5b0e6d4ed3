// Prewarm with candidates that hang or crash, with workers and parents that are
// killed, and with devices that are busy or many.

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "compiler/base/file_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"
#include "tests/tuner/bad_programs.h"
#include "tests/tuner/cpu_programs.h"
#include "tuner/conclusion.h"
#include "tuner/device_lock.h"
#include "tuner/prewarm.h"
#include "tuner/race_worker.h"

extern char** environ;

namespace kiln {
namespace {

using ::testing::AllOf;
using testing::CcCpuPath;
using testing::CompileUnits;
using ::testing::Contains;
using testing::Deed;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::ReadTestFile;
using testing::ScratchFolder;
using testing::StatusIs;
using testing::WhyNoCcCpu;

constexpr char kManifest[] = R"({
 "schema": "kiln.model/1", "name": "Small",
 "requests": [
  {"name": "moe", "op": "fused_moe", "layers": 2,
   "hidden": 256, "intermediate": 128, "experts": 4, "top_k": 2,
   "activation": "silu", "io_dtype": "bf16", "id_dtype": "i64",
   "weights": {"format": "exl3", "codebook": "mcg", "bits": 4},
   "recipe": "w4a16", "capacities": [1, 2, 4]}]})";

class Notes : public ProgressSink {
 public:
  void Update(Stage, size_t, size_t, const std::string& detail) override {
    details.push_back(detail);
  }

  void Note(const std::string& line) override { lines.push_back(line); }

  std::vector<std::string> lines;
  std::vector<std::string> details;
};

std::string KilnPath() {
  return std::string(std::getenv("KILN_BIN_DIR")) + "/kiln";
}

std::string WhyNoWorker() {
  if (const std::string why = WhyNoCcCpu(); !why.empty()) return why;
  return access(KilnPath().c_str(), X_OK) == 0 ? "" : "kiln is not built";
}

Manifest SmallManifest() {
  absl::StatusOr<Manifest> manifest = ParseManifest(kManifest, "small.json");
  EXPECT_OK(manifest);
  return manifest.ok() ? *std::move(manifest) : Manifest();
}

PrewarmOptions SmallOptions() {
  PrewarmOptions options;
  absl::StatusOr<Target> target = HostCpuTarget();
  EXPECT_OK(target);
  options.targets = {*target};
  options.candidates_max = 3;
  options.jobs = 2;
  options.race_seconds_max = 0.05;
  options.race_worker = KilnPath();
  options.toolchain = [](Backend, ProbeMemo* memo) {
    return ProbeCcCpu(CcCpuPath(), memo);
  };
  return options;
}

absl::StatusOr<PrewarmReport> RunPrewarm(const std::string& folder,
                                         const PrewarmOptions& options,
                                         Notes* notes) {
  absl::StatusOr<PlanCache> cache =
      PlanCache::Open(folder, CacheMode::kReadWrite);
  if (!cache.ok()) return cache.status();
  return Prewarm(SmallManifest(), options, &*cache, notes);
}

class PrewarmWorkerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNoWorker(); !why.empty()) {
      GTEST_SKIP() << why;
    }
  }

  // Puts a program that misbehaves into the cache, under the key of candidate
  // `rank` of the first interval, as a miscompiled one would be. Returns the
  // candidate's digest.
  Digest Plant(const PrewarmOptions& options, size_t rank, Deed deed) {
    Digest digest;
    [&] {
      ASSERT_OK_AND_ASSIGN(
          PlanCache cache,
          PlanCache::Open(scratch_.path(), CacheMode::kReadWrite));
      ASSERT_OK_AND_ASSIGN(const ResolvedManifest resolved,
                           ResolveManifest(SmallManifest(), options, &cache));
      const ResolvedInterval& interval = resolved.intervals.at(0);
      ASSERT_OK_AND_ASSIGN(const IntervalPlan plan,
                           interval.planner->Plan(interval.interval));
      const PlannedCandidate& candidate = plan.candidates.at(rank);
      const SourceUnit unit = candidate.kernel_template->MakeUnits(
          interval.geometry, options.targets[0], candidate.body.assignment)[0];
      const auto programs = CompileUnits({testing::Misbehaving(unit, deed)});
      ASSERT_OK(programs[0]);
      Program planted = **programs[0];
      planted.key = candidate.programs.at(0);
      ASSERT_OK(cache.PutProgram(planted));
      digest = candidate.digest;
    }();
    return digest;
  }

  ScratchFolder scratch_;
  Notes notes_;
};

TEST_F(PrewarmWorkerTest, AWreckerIsQuarantinedOnceAndTheRestIsRaced) {
  PrewarmOptions options = SmallOptions();
  options.capacity_max = 1;
  const Digest wrecker = Plant(options, 1, Deed::kSegfaults);
  ASSERT_OK_AND_ASSIGN(const PrewarmReport report,
                       RunPrewarm(scratch_.path(), options, &notes_));
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(report.winners, 1u);
  EXPECT_EQ(report.rejects, 1u);
  EXPECT_EQ(report.intervals[0].rejected, 1u);
  EXPECT_THAT(notes_.lines,
              Contains(AllOf(HasSubstr("set aside fused_moe.cpu{"),
                             HasSubstr("killed by signal 11"))));
  {
    ASSERT_OK_AND_ASSIGN(
        PlanCache cache,
        PlanCache::Open(scratch_.path(), CacheMode::kReadOnly));
    ASSERT_OK_AND_ASSIGN(const std::optional<Reject> reject,
                         cache.FindReject(wrecker));
    ASSERT_TRUE(reject.has_value());
    EXPECT_EQ(reject->stage, RejectStage::kRace);
    EXPECT_THAT(reject->reason, HasSubstr("killed by signal 11"));
    // The others' evidence is whole, and leads to the same winner.
    ASSERT_OK_AND_ASSIGN(const std::vector<ReplayedPlan> replayed,
                         ReplayPlans(&cache));
    ASSERT_EQ(replayed.size(), 1u);
    EXPECT_TRUE(replayed[0].agrees);
    EXPECT_THAT(cache.Check(), testing::IsOkAndHolds(IsEmpty()));
  }
  // It does not run again, not even when its interval is raced anew. The plan
  // goes, the reject stays.
  ScratchFolder other;
  {
    ASSERT_OK_AND_ASSIGN(
        PlanCache from, PlanCache::Open(scratch_.path(), CacheMode::kReadOnly));
    ASSERT_OK_AND_ASSIGN(PlanCache to,
                         PlanCache::Open(other.path(), CacheMode::kReadWrite));
    ASSERT_OK_AND_ASSIGN(const std::optional<Reject> reject,
                         from.FindReject(wrecker));
    ASSERT_OK(to.PutReject(*reject));
  }
  Notes notes;
  ASSERT_OK_AND_ASSIGN(const PrewarmReport again,
                       RunPrewarm(other.path(), options, &notes));
  EXPECT_TRUE(again.complete);
  EXPECT_EQ(again.intervals[0].rejected, 1u);
  // Other lines may come: another program may hold the processors.
  EXPECT_THAT(notes.lines, Not(Contains(HasSubstr("set aside"))));
}

TEST_F(PrewarmWorkerTest, ASpinningDefaultIsStoppedAndAnotherWins) {
  PrewarmOptions options = SmallOptions();
  options.capacity_max = 1;
  options.launch_seconds_max = 2;
  const Digest wrecker = Plant(options, 0, Deed::kSpins);
  ASSERT_OK_AND_ASSIGN(const PrewarmReport report,
                       RunPrewarm(scratch_.path(), options, &notes_));
  EXPECT_TRUE(report.complete);
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(scratch_.path(), CacheMode::kReadOnly));
  ASSERT_OK_AND_ASSIGN(const std::optional<Reject> reject,
                       cache.FindReject(wrecker));
  ASSERT_TRUE(reject.has_value());
  EXPECT_THAT(reject->reason, HasSubstr("a launch ran longer than 2 s"));
}

TEST_F(PrewarmWorkerTest, ProgressNamesCandidateAndBest) {
  PrewarmOptions options = SmallOptions();
  options.race_seconds_max = 1;
  ASSERT_OK(RunPrewarm(scratch_.path(), options, &notes_));
  EXPECT_THAT(notes_.details,
              Contains(AllOf(HasSubstr("moe m<="), HasSubstr("left, best "),
                             HasSubstr(" us, fused_moe.cpu{"))));
}

// ---- several devices -------------------------------------------------------

TEST_F(PrewarmWorkerTest, TwoWorkersShareTheRaces) {
  PrewarmOptions options = SmallOptions();
  options.cpu_sets = {{0}, {1}};
  if (std::thread::hardware_concurrency() < 2) options.cpu_sets = {{0}};
  ASSERT_OK_AND_ASSIGN(const PrewarmReport report,
                       RunPrewarm(scratch_.path(), options, &notes_));
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(report.winners, 3u);
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(scratch_.path(), CacheMode::kReadOnly));
  ASSERT_OK_AND_ASSIGN(const std::vector<ReplayedPlan> replayed,
                       ReplayPlans(&cache));
  EXPECT_EQ(replayed.size(), 3u);
  for (const ReplayedPlan& plan : replayed) EXPECT_TRUE(plan.agrees);
  // Both names were seen at work.
  for (const char* name : {"processors 0 ", "processors 1 "}) {
    if (options.cpu_sets.size() < 2) break;
    EXPECT_THAT(notes_.details, Contains(HasSubstr(name)));
  }
}

TEST(ChooseGpusTest, TakesEqualOnesAndRefusesAMix) {
  DeviceProfile h200;
  h200.target = {.backend = Backend::kCuda, .level = 90, .arch_specific = true};
  h200.compute_capability = 90;
  h200.multiprocessors = 132;
  h200.memory_gib = 144;
  h200.name = "NVIDIA H200";
  h200.uuid = "00";
  DeviceProfile other = h200;
  other.uuid = "01";
  DeviceProfile smaller = h200;
  smaller.multiprocessors = 114;
  smaller.memory_gib = 80;
  smaller.name = "NVIDIA H100 PCIe";
  const std::vector<DeviceProfile> devices = {h200, smaller, other};
  ASSERT_OK_AND_ASSIGN(const std::vector<DeviceProfile> equal,
                       ChooseGpus(devices, h200.target, {2, 0}));
  ASSERT_EQ(equal.size(), 2u);
  EXPECT_EQ(equal[0].uuid, "01");
  EXPECT_EQ(equal[1].uuid, "00");
  EXPECT_THAT(
      ChooseGpus(devices, h200.target, {0, 2, 1}),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("GPU 0 (NVIDIA H200, sm_90a, 132 SMs, 144 GiB"),
                     HasSubstr("GPU 1 (NVIDIA H100 PCIe, sm_90a, 114 SMs"))));
  EXPECT_THAT(ChooseGpus(devices, h200.target, {0, 3}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("GPU 3 does not exist")));
  // Without any GPU, or for another architecture, plans are predicted.
  EXPECT_THAT(ChooseGpus({}, h200.target, {0, 1}),
              testing::IsOkAndHolds(IsEmpty()));
  const Target newer = {
      .backend = Backend::kCuda, .level = 120, .arch_specific = true};
  EXPECT_THAT(ChooseGpus(devices, newer, {0}),
              testing::IsOkAndHolds(IsEmpty()));
}

// ---- busy devices ----------------------------------------------------------

TEST_F(PrewarmWorkerTest, ABusyDeviceIsWaitedForOrRefused) {
  PrewarmOptions options = SmallOptions();
  options.capacity_max = 1;
  options.candidates_max = 1;
  // Tests beside this one race on the processor too.
  std::optional<DeviceLock> lock;
  while (!lock.has_value()) {
    ASSERT_OK_AND_ASSIGN(lock, DeviceLock::TryAcquire("cpu"));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  options.exclusive = true;
  EXPECT_THAT(RunPrewarm(scratch_.path(), options, &notes_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("is being raced on by process "),
                             HasSubstr("--exclusive"))));
  options.exclusive = false;
  std::thread release([&lock] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    lock.reset();
  });
  const absl::StatusOr<PrewarmReport> report =
      RunPrewarm(scratch_.path(), options, &notes_);
  release.join();
  ASSERT_OK(report);
  EXPECT_TRUE(report->complete);
  EXPECT_THAT(notes_.lines, Contains(HasSubstr("waiting: ")));
}

// ---- killed ----------------------------------------------------------------

// kiln prewarm of small.json in `scratch`; results go to the file `out`, what
// it says to the file `said`.
pid_t StartKiln(const ScratchFolder& scratch, const std::string& out,
                const std::string& said = "/dev/null") {
  std::vector<std::string> words = {KilnPath(),
                                    "--cache",
                                    scratch.File("cache"),
                                    "--cc-cpu",
                                    CcCpuPath(),
                                    "prewarm",
                                    scratch.File("small.json"),
                                    "--target",
                                    "cpu",
                                    "--max-candidates",
                                    "3",
                                    "--budget",
                                    "0.3",
                                    "--json"};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  EXPECT_EQ(posix_spawn_file_actions_init(&files), 0);
  posix_spawn_file_actions_addopen(&files, 1, out.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC, 0644);
  posix_spawn_file_actions_addopen(&files, 2, said.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC, 0644);
  // Whoever runs the tests may ignore signals that these tests send.
  posix_spawnattr_t attributes;
  EXPECT_EQ(posix_spawnattr_init(&attributes), 0);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
  sigset_t all;
  sigfillset(&all);
  posix_spawnattr_setsigdefault(&attributes, &all);
  pid_t pid = -1;
  const int code =
      posix_spawn(&pid, argv[0], &files, &attributes, argv.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  EXPECT_EQ(code, 0);
  return code == 0 ? pid : -1;
}

// Race workers among the children of `parent`.
std::vector<pid_t> WorkersOf(pid_t parent) {
  std::vector<pid_t> workers;
  std::error_code ignored;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc", ignored)) {
    pid_t pid = 0;
    if (!absl::SimpleAtoi(entry.path().filename().string(), &pid)) continue;
    const std::string stat = ReadSystemFile(entry.path().string() + "/stat");
    const size_t name_end = stat.rfind(')');
    if (name_end == std::string::npos) continue;
    // State and parent follow the name.
    const std::vector<std::string> fields =
        absl::StrSplit(stat.substr(name_end + 1), ' ', absl::SkipEmpty());
    if (fields.size() < 2 || fields[1] != absl::StrCat(parent)) continue;
    const std::string words =
        ReadSystemFile(entry.path().string() + "/cmdline");
    if (words.find(kRaceWorkerVerb) != std::string::npos) {
      workers.push_back(pid);
    }
  }
  return workers;
}

TEST_F(PrewarmWorkerTest, WorkersMayBeKilledAtAnyMoment) {
  std::ofstream(scratch_.File("small.json")) << kManifest;
  const pid_t run = StartKiln(scratch_, scratch_.File("out"));
  ASSERT_GT(run, 0);
  std::minstd_rand random(11);
  int kills = 0;
  int state = 0;
  while (waitpid(run, &state, WNOHANG) == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1 + random() % 150));
    for (const pid_t worker : WorkersOf(run)) {
      // A race ends when its worker is killed three times before it is ready.
      if (kills >= 2) continue;
      kill(worker, SIGKILL);
      ++kills;
    }
  }
  EXPECT_GE(kills, 1) << "it was over before a worker was seen";
  EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << state;
  const std::string out = ReadTestFile(scratch_.File("out"));
  EXPECT_THAT(out, HasSubstr("\"winners\":3"));
  EXPECT_THAT(out, HasSubstr("\"rejects\":0"));
  ASSERT_OK_AND_ASSIGN(PlanCache cache, PlanCache::Open(scratch_.File("cache"),
                                                        CacheMode::kReadOnly));
  EXPECT_THAT(cache.Check(), testing::IsOkAndHolds(IsEmpty()));
}

TEST_F(PrewarmWorkerTest, AWorkerDiesWithItsParent) {
  std::ofstream(scratch_.File("small.json")) << kManifest;
  for (const int signal : {SIGKILL, SIGINT, SIGTERM}) {
    SCOPED_TRACE(signal);
    const std::string said = scratch_.File("said");
    const pid_t run = StartKiln(scratch_, "/dev/null", said);
    ASSERT_GT(run, 0);
    std::vector<pid_t> workers;
    const auto begin = std::chrono::steady_clock::now();
    while (workers.empty() &&
           std::chrono::steady_clock::now() - begin < std::chrono::minutes(2)) {
      workers = WorkersOf(run);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_FALSE(workers.empty());
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    kill(run, signal);
    int state = 0;
    ASSERT_EQ(waitpid(run, &state, 0), run);
    // A shell makes 128 and the number of it.
    ASSERT_TRUE(WIFSIGNALED(state)) << "it ended before it was killed";
    EXPECT_EQ(WTERMSIG(state), signal);
    if (signal != SIGKILL) {
      EXPECT_THAT(
          ReadTestFile(said),
          EndsWith(absl::StrCat("kiln: interrupted; programs and winners that "
                                "were finished are kept in ",
                                scratch_.File("cache"),
                                "; run the same command again to go on from "
                                "there\n")));
    }
    for (const pid_t worker : workers) {
      const auto killed = std::chrono::steady_clock::now();
      // Orphans are reaped by whoever adopts them.
      const auto alive = [worker] {
        const std::string stat =
            ReadSystemFile(absl::StrCat("/proc/", worker, "/stat"));
        return !stat.empty() && stat.find(") Z ") == std::string::npos;
      };
      while (alive() && std::chrono::steady_clock::now() - killed <
                            std::chrono::seconds(10)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      EXPECT_FALSE(alive()) << worker;
    }
    // For writing: the parent may have died within a transaction, which the
    // next writer rolls back.
    ASSERT_OK_AND_ASSIGN(
        PlanCache cache,
        PlanCache::Open(scratch_.File("cache"), CacheMode::kReadWrite));
    EXPECT_THAT(cache.Check(), testing::IsOkAndHolds(IsEmpty()));
  }
  // What was left is done by the next run.
  Notes notes;
  PrewarmOptions options = SmallOptions();
  ASSERT_OK_AND_ASSIGN(const PrewarmReport report,
                       RunPrewarm(scratch_.File("cache"), options, &notes));
  EXPECT_TRUE(report.complete);
}

}  // namespace
}  // namespace kiln
