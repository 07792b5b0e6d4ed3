// The whole flow on the CPU target: a small manifest, a real compiler, a real
// race, a real cache in a scratch folder.

#include "tuner/prewarm.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "compiler/bundle_writer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/registry.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"
#include "tests/tuner/cpu_programs.h"
#include "tuner/conclusion.h"
#include "tuner/freeze.h"

extern char** environ;

namespace kiln {
namespace {

using ::testing::AllOf;
using testing::CcCpuPath;
using testing::CompileUnits;
using ::testing::Contains;
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
   "recipe": "w4a16", "capacities": [1, 4]},
  {"name": "moe_late", "op": "fused_moe", "layers": [2, 5],
   "hidden": 256, "intermediate": 128, "experts": 4, "top_k": 2,
   "activation": "silu", "io_dtype": "bf16", "id_dtype": "i64",
   "weights": {"format": "exl3", "codebook": "mcg", "bits": 4},
   "recipe": "w4a16", "capacities": [1, 4]}]})";

class Notes : public ProgressSink {
 public:
  void Update(Stage stage, size_t done, size_t total,
              const std::string&) override {
    EXPECT_LE(done, total) << StageName(stage);
  }

  void Note(const std::string& line) override { lines.push_back(line); }

  std::vector<std::string> lines;
};

Manifest SmallManifest(const std::string& text = kManifest) {
  absl::StatusOr<Manifest> manifest = ParseManifest(text, "small.json");
  EXPECT_OK(manifest);
  return manifest.ok() ? *std::move(manifest) : Manifest();
}

PrewarmOptions SmallOptions() {
  PrewarmOptions options;
  absl::StatusOr<Target> target = HostCpuTarget();
  EXPECT_OK(target);
  options.targets = {*target};
  options.candidates_max = 2;
  options.jobs = 2;
  options.race_seconds_max = 0.05;
  options.race_worker = std::string(std::getenv("KILN_BIN_DIR")) + "/kiln";
  options.toolchain = [](Backend, ProbeMemo* memo) {
    return ProbeCcCpu(CcCpuPath(), memo);
  };
  return options;
}

absl::StatusOr<PrewarmReport> RunPrewarm(const std::string& folder,
                                         const PrewarmOptions& options,
                                         CacheMode mode = CacheMode::kReadWrite,
                                         Notes* notes = nullptr,
                                         const std::string& text = kManifest) {
  absl::StatusOr<PlanCache> cache = PlanCache::Open(folder, mode);
  if (!cache.ok()) return cache.status();
  Notes own;
  return Prewarm(SmallManifest(text), options, &*cache,
                 notes != nullptr ? notes : &own);
}

absl::StatusOr<FreezeResult> RunFreeze(const std::string& folder,
                                       const PrewarmOptions& options,
                                       bool allow_predicted = false,
                                       CacheMode mode = CacheMode::kReadWrite,
                                       const std::string& text = kManifest) {
  absl::StatusOr<PlanCache> cache = PlanCache::Open(folder, mode);
  if (!cache.ok()) return cache.status();
  FreezePolicy policy;
  policy.allow_predicted = allow_predicted;
  policy.allow_unqualified = true;  // a changed template must not fail these
  policy.regret_cap.reset();        // nor may the samples of this machine
  return Freeze(SmallManifest(text), options, policy, &*cache);
}

// Every file under a folder with its bytes.
std::map<std::string, std::string> Contents(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(folder)) {
    files[entry.path().lexically_relative(folder).string()] =
        entry.is_regular_file() ? ReadTestFile(entry.path().string()) : "";
  }
  return files;
}

std::vector<Plan> PlansOf(const PrewarmReport& report) {
  std::vector<Plan> plans;
  for (const IntervalReport& row : report.intervals) {
    EXPECT_TRUE(row.plan.has_value()) << row.problem;
    if (row.plan.has_value()) plans.push_back(*row.plan);
  }
  return plans;
}

class PrewarmTest : public ::testing::Test {
 protected:
  // One cold run serves all tests that only read its cache.
  static void SetUpTestSuite() {
    if (!WhyNoCcCpu().empty()) return;
    warm_ = new ScratchFolder;
    absl::StatusOr<PrewarmReport> report =
        RunPrewarm(warm_->path(), SmallOptions());
    ASSERT_OK(report);
    cold_ = new PrewarmReport(*std::move(report));
  }

  static void TearDownTestSuite() {
    delete warm_;
    delete cold_;
    warm_ = nullptr;
    cold_ = nullptr;
  }

  void SetUp() override {
    if (const std::string why = WhyNoCcCpu(); !why.empty()) GTEST_SKIP() << why;
    ASSERT_NE(cold_, nullptr) << "the cold run failed";
  }

  static ScratchFolder* warm_;
  static PrewarmReport* cold_;
};

ScratchFolder* PrewarmTest::warm_ = nullptr;
PrewarmReport* PrewarmTest::cold_ = nullptr;

TEST_F(PrewarmTest, AColdRunCompilesVerifiesRacesAndStores) {
  EXPECT_TRUE(cold_->complete);
  EXPECT_EQ(cold_->requests, 2u);
  ASSERT_EQ(cold_->intervals.size(), 2u) << "equal geometries share intervals";
  EXPECT_EQ(cold_->winners, 2u);
  EXPECT_EQ(cold_->predicted, 0u);
  EXPECT_EQ(cold_->rejects, 0u);
  EXPECT_EQ(cold_->programs_reused, 0u);
  EXPECT_GE(cold_->programs_compiled, 2u);
  EXPECT_GT(cold_->launches, 20u);
  EXPECT_GT(cold_->compile_cpu_seconds, 0);
  for (const char* key :
       {"resolve", "lookup", "enumerate", "compile", "race", "total"}) {
    EXPECT_TRUE(cold_->seconds.contains(key)) << key;
  }
  for (const IntervalReport& row : cold_->intervals) {
    EXPECT_FALSE(row.reused);
    EXPECT_EQ(row.candidates, 2u);
    EXPECT_THAT(row.names, ::testing::ElementsAre("moe", "moe_late"));
    ASSERT_TRUE(row.plan.has_value());
    EXPECT_OK(ValidatePlan(*row.plan));
    const Evidence& evidence = row.plan->evidence;
    EXPECT_EQ(evidence.state, PlanState::kMeasured);
    EXPECT_GT(evidence.median_ns, 0);
    EXPECT_GE(evidence.samples, 5u);
    EXPECT_EQ(evidence.candidates, 2u);
    EXPECT_GT(evidence.worst_error, 0);
    EXPECT_LE(evidence.worst_error, row.plan->body.tolerance);
  }
}

TEST_F(PrewarmTest, StoresEveryCandidatesEvidence) {
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(warm_->path(), CacheMode::kReadOnly));
  ASSERT_OK_AND_ASSIGN(const std::vector<StoredPlan> plans, cache.ListPlans());
  ASSERT_EQ(plans.size(), 2u);
  for (const StoredPlan& stored : plans) {
    ASSERT_OK_AND_ASSIGN(const std::vector<Measurement> evidence,
                         cache.LoadMeasurements(stored.key.digest));
    size_t raced = 0;
    int won = 0;
    for (const Measurement& measurement : evidence) {
      if (IsPruned(measurement)) continue;
      ++raced;
      EXPECT_FALSE(measurement.samples.empty()) << measurement.label;
      EXPECT_FALSE(measurement.numerics_class.empty());
      EXPECT_GT(measurement.arena_bytes, 0u);
      won += measurement.verdict == Verdict::kWon ? 1 : 0;
      if (measurement.verdict == Verdict::kWon) {
        EXPECT_EQ(measurement.label, stored.plan.body.Label());
        EXPECT_EQ(measurement.regret, 0);
        EXPECT_EQ(measurement.samples.size(), stored.plan.evidence.samples);
      }
    }
    EXPECT_EQ(raced, 2u);
    EXPECT_EQ(won, 1);
  }
}

TEST_F(PrewarmTest, ASecondRunCompilesNothingLaunchesNothingAndAgrees) {
  const auto before = Contents(warm_->path());
  ASSERT_OK_AND_ASSIGN(const PrewarmReport second,
                       RunPrewarm(warm_->path(), SmallOptions()));
  EXPECT_TRUE(second.complete);
  EXPECT_EQ(second.programs_compiled, 0u);
  EXPECT_EQ(second.launches, 0u);
  EXPECT_EQ(PlansOf(second), PlansOf(*cold_));
  for (const IntervalReport& row : second.intervals) EXPECT_TRUE(row.reused);
  EXPECT_EQ(Contents(warm_->path()), before) << "nothing was to be stored";
}

// What was raced in another time holds as well: its plan says in how many
// blocks and seconds. How its launches were timed is part of the key.
TEST_F(PrewarmTest, AnotherBudgetFindsWhatIsStoredAndAWarmL2DoesNot) {
  PrewarmOptions options = SmallOptions();
  options.race_seconds_max *= 100;
  options.stop_after = Stage::kLookUp;
  ASSERT_OK_AND_ASSIGN(const PrewarmReport longer,
                       RunPrewarm(warm_->path(), options));
  ASSERT_EQ(longer.intervals.size(), 2u);
  for (const Plan& plan : PlansOf(longer)) {
    EXPECT_GT(plan.evidence.race_seconds, 0);
    EXPECT_GT(plan.evidence.blocks, 0u);
  }
  for (const IntervalReport& row : longer.intervals) EXPECT_TRUE(row.reused);
  options.warm_l2 = true;
  ASSERT_OK_AND_ASSIGN(const PrewarmReport warm,
                       RunPrewarm(warm_->path(), options));
  ASSERT_EQ(warm.intervals.size(), longer.intervals.size());
  for (const IntervalReport& row : warm.intervals) EXPECT_FALSE(row.reused);
}

TEST_F(PrewarmTest, AReadOnlyCacheAnswersAndIsNotTouched) {
  const auto before = Contents(warm_->path());
  ASSERT_OK_AND_ASSIGN(
      const PrewarmReport second,
      RunPrewarm(warm_->path(), SmallOptions(), CacheMode::kReadOnly));
  EXPECT_TRUE(second.complete);
  EXPECT_EQ(second.launches, 0u);
  EXPECT_EQ(PlansOf(second), PlansOf(*cold_));
  EXPECT_OK(
      RunFreeze(warm_->path(), SmallOptions(), false, CacheMode::kReadOnly));
  EXPECT_EQ(Contents(warm_->path()), before);
}

TEST_F(PrewarmTest, WorkForAReadOnlyCacheIsRefusedAndLeavesNoTrace) {
  ScratchFolder scratch;
  const std::string folder = scratch.File("absent");
  EXPECT_THAT(
      RunPrewarm(folder, SmallOptions(), CacheMode::kReadOnly),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("read-only")));
  EXPECT_FALSE(std::filesystem::exists(folder));
}

TEST_F(PrewarmTest, WithoutACacheEverythingStillWorks) {
  PrewarmOptions options = SmallOptions();
  options.candidates_max = 1;
  options.capacity_max = 1;
  ASSERT_OK_AND_ASSIGN(const PrewarmReport report,
                       RunPrewarm("", options, CacheMode::kOff));
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(report.intervals.size(), 1u) << "capacity 4 is above the limit";
  EXPECT_EQ(report.winners, 1u);
}

TEST_F(PrewarmTest, FreezingTwiceGivesTheSameBytes) {
  ASSERT_OK_AND_ASSIGN(const FreezeResult first,
                       RunFreeze(warm_->path(), SmallOptions()));
  ASSERT_OK_AND_ASSIGN(const FreezeResult second,
                       RunFreeze(warm_->path(), SmallOptions()));
  EXPECT_EQ(first.bytes, second.bytes);
  EXPECT_EQ(first.root, second.root);
  EXPECT_THAT(BundleRoot(first.bytes), testing::IsOkAndHolds(first.root));
  EXPECT_EQ(first.entries, 2u);
  EXPECT_EQ(first.plans, 2u);
  // Two entries share each plan.
  EXPECT_EQ(first.golden, 2u);
  EXPECT_EQ(first.predicted, 0u);
  EXPECT_GE(first.programs, 1u);
}

TEST_F(PrewarmTest, ACopiedCacheFreezesToTheSameBytes) {
  ASSERT_OK_AND_ASSIGN(const FreezeResult first,
                       RunFreeze(warm_->path(), SmallOptions()));
  ScratchFolder scratch;
  const std::string copy = scratch.File("another folder");
  std::filesystem::copy(warm_->path(), copy,
                        std::filesystem::copy_options::recursive);
  ASSERT_OK_AND_ASSIGN(const FreezeResult second,
                       RunFreeze(copy, SmallOptions()));
  EXPECT_EQ(first.bytes, second.bytes);
}

TEST_F(PrewarmTest, TheOrderOfTheManifestDoesNotMoveTheBundle) {
  ASSERT_OK_AND_ASSIGN(const FreezeResult first,
                       RunFreeze(warm_->path(), SmallOptions()));
  // The two requests change names, and so places.
  const std::string swapped = absl::StrReplaceAll(
      kManifest, {{"\"moe\"", "\"moe_late\""}, {"\"moe_late\"", "\"moe\""}});
  ASSERT_OK_AND_ASSIGN(const FreezeResult second,
                       RunFreeze(warm_->path(), SmallOptions(), false,
                                 CacheMode::kReadWrite, swapped));
  EXPECT_EQ(first.bytes, second.bytes);
}

TEST_F(PrewarmTest, FreezeRefusesATemplateWithoutAQualification) {
  absl::StatusOr<PlanCache> cache =
      PlanCache::Open(warm_->path(), CacheMode::kReadOnly);
  ASSERT_OK(cache);
  FreezePolicy policy;
  policy.receipts.clear();
  EXPECT_THAT(Freeze(SmallManifest(kManifest), SmallOptions(), policy, &*cache),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("template fused_moe.cpu"),
                             HasSubstr("no qualification for cpu-x86-64-v"),
                             HasSubstr("--allow-unqualified"))));
  // One that passed another suite has passed nothing here, and is told so.
  const KernelTemplate* const from = FindTemplate("fused_moe.cpu");
  ASSERT_NE(from, nullptr);
  QualificationReceipt receipt;
  receipt.target = SmallOptions().targets[0];
  receipt.templates = {
      {std::string(from->name()), from->version(), from->sources()}};
  receipt.suite = {.name = "mine.json", .content = Sha256("mine")};
  policy.receipts = {receipt};
  EXPECT_THAT(Freeze(SmallManifest(kManifest), SmallOptions(), policy, &*cache),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("suite mine.json"),
                             HasSubstr(Sha256("mine").ToHex()),
                             HasSubstr(TreeSuite().content.ToHex()),
                             HasSubstr("--allow-unqualified"))));
  policy.receipts[0].suite->content = TreeSuite().content;
  EXPECT_OK(Freeze(SmallManifest(kManifest), SmallOptions(), policy, &*cache));
  policy.receipts.clear();
  policy.allow_unqualified = true;
  ASSERT_OK_AND_ASSIGN(
      const FreezeResult allowed,
      Freeze(SmallManifest(kManifest), SmallOptions(), policy, &*cache));
  EXPECT_EQ(allowed.unqualified, allowed.plans);
}

TEST_F(PrewarmTest, FreezeNamesTheIntervalThatIsMissing) {
  const std::string more =
      absl::StrReplaceAll(kManifest, {{"[1, 4]", "[1, 4, 6]"}});
  EXPECT_THAT(RunFreeze(warm_->path(), SmallOptions(), false,
                        CacheMode::kReadWrite, more),
              StatusIs(absl::StatusCode::kNotFound,
                       AllOf(HasSubstr("moe,moe_late m 5..6"),
                             HasSubstr("kiln prewarm"))));
}

TEST_F(PrewarmTest, OnlyTheMissingIntervalsAreWorkedOn) {
  ScratchFolder scratch;
  std::filesystem::copy(warm_->path(), scratch.path(),
                        std::filesystem::copy_options::recursive);
  const std::string more =
      absl::StrReplaceAll(kManifest, {{"[1, 4]", "[1, 4, 6]"}});
  ASSERT_OK_AND_ASSIGN(const PrewarmReport report,
                       RunPrewarm(scratch.path(), SmallOptions(),
                                  CacheMode::kReadWrite, nullptr, more));
  ASSERT_EQ(report.intervals.size(), 3u);
  EXPECT_TRUE(report.intervals[0].reused);
  EXPECT_TRUE(report.intervals[1].reused);
  EXPECT_FALSE(report.intervals[2].reused);
  EXPECT_TRUE(report.complete);
}

TEST_F(PrewarmTest, CompileOnlyPredictsAndFreezeRefusesIt) {
  ScratchFolder scratch;
  PrewarmOptions options = SmallOptions();
  options.compile_only = true;
  options.candidates_max = 1;
  ASSERT_OK_AND_ASSIGN(const PrewarmReport report,
                       RunPrewarm(scratch.path(), options));
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(report.launches, 0u);
  EXPECT_EQ(report.winners, 0u);
  EXPECT_EQ(report.predicted, 2u);
  for (const Plan& plan : PlansOf(report)) {
    EXPECT_EQ(plan.evidence.state, PlanState::kPredicted);
    EXPECT_EQ(plan.evidence.median_ns, 0);
    EXPECT_EQ(plan.evidence.samples, 0u);
  }
  EXPECT_THAT(
      RunFreeze(scratch.path(), options),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("predicted"), HasSubstr("--allow-predicted"))));
  ASSERT_OK_AND_ASSIGN(const FreezeResult frozen,
                       RunFreeze(scratch.path(), options, true));
  EXPECT_EQ(frozen.predicted, frozen.plans);

  // Nothing that was only predicted answers for a device that is here.
  options.compile_only = false;
  EXPECT_THAT(RunFreeze(scratch.path(), options, true),
              StatusIs(absl::StatusCode::kNotFound));
  ASSERT_OK_AND_ASSIGN(const PrewarmReport raced,
                       RunPrewarm(scratch.path(), options));
  EXPECT_EQ(raced.winners, 2u);
  EXPECT_EQ(raced.predicted, 0u);
}

TEST_F(PrewarmTest, StopsWhereItIsTold) {
  ScratchFolder scratch;
  PrewarmOptions options = SmallOptions();
  options.capacity_max = 1;
  options.candidates_max = 1;
  for (const Stage stage :
       {Stage::kResolve, Stage::kLookUp, Stage::kEnumerate, Stage::kCompile}) {
    options.stop_after = stage;
    ASSERT_OK_AND_ASSIGN(const PrewarmReport report,
                         RunPrewarm(scratch.path(), options));
    EXPECT_EQ(report.stopped_after, stage);
    EXPECT_FALSE(report.complete);
    EXPECT_EQ(report.launches, 0u);
    EXPECT_EQ(report.winners + report.predicted, 0u);
    EXPECT_EQ(report.programs_compiled, stage == Stage::kCompile ? 1u : 0u);
  }
  options.stop_after.reset();
  ASSERT_OK_AND_ASSIGN(const PrewarmReport report,
                       RunPrewarm(scratch.path(), options));
  EXPECT_EQ(report.programs_compiled, 0u) << "the program was stored";
  EXPECT_EQ(report.winners, 1u);
}

TEST(StageTest, NamesRoundTrip) {
  for (const Stage stage : {Stage::kResolve, Stage::kLookUp, Stage::kEnumerate,
                            Stage::kCompile, Stage::kRace}) {
    EXPECT_EQ(ParseStage(StageName(stage)), stage);
  }
  EXPECT_EQ(ParseStage(""), std::nullopt);
  EXPECT_EQ(ParseStage("Race"), std::nullopt);
}

TEST(PrewarmErrorTest, AMissingCompilerIsOneClearError) {
  PrewarmOptions options = SmallOptions();
  options.toolchain = [](Backend, ProbeMemo* memo) {
    return ProbeCcCpu("/nonexistent/kiln-cc-cpu", memo);
  };
  ScratchFolder scratch;
  const absl::Status status = RunPrewarm(scratch.path(), options).status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable,
                               AllOf(HasSubstr("no compiler for cpu-x86-64-v"),
                                     HasSubstr("/nonexistent/kiln-cc-cpu"),
                                     HasSubstr("kiln doctor"))));
  EXPECT_EQ(std::string(status.message()).find('\n'), std::string::npos);
  // For freeze too, and there it must not look like a plan that is missing.
  EXPECT_THAT(RunFreeze(scratch.path(), options),
              StatusIs(absl::StatusCode::kUnavailable));
}

TEST_F(PrewarmTest, ACompileThatTakesTooLongIsARejectAndTriedAgainLater) {
  ScratchFolder scratch;
  PrewarmOptions options = SmallOptions();
  options.candidates_max = 1;
  options.capacity_max = 1;
  options.compile_seconds_max = 0.001;
  Notes notes;
  ASSERT_OK_AND_ASSIGN(
      const PrewarmReport hurried,
      RunPrewarm(scratch.path(), options, CacheMode::kReadWrite, &notes));
  EXPECT_FALSE(hurried.complete);
  EXPECT_EQ(hurried.rejects, 1u);
  EXPECT_EQ(hurried.winners, 0u);
  EXPECT_NE(hurried.intervals[0].problem, "");
  EXPECT_THAT(notes.lines, Contains(HasSubstr("rejected fused_moe/cpu.cc")));
  EXPECT_THAT(RunFreeze(scratch.path(), options),
              StatusIs(absl::StatusCode::kNotFound));

  options.compile_seconds_max = 120;
  ASSERT_OK_AND_ASSIGN(const PrewarmReport patient,
                       RunPrewarm(scratch.path(), options));
  EXPECT_TRUE(patient.complete) << patient.intervals[0].problem;
}

// A program that compiled but computes something else: planted in the cache
// under the right key, as a broken compiler would leave it.
TEST_F(PrewarmTest, AWrongProgramIsRejectedOnceAndNeverRunAgain) {
  PrewarmOptions options = SmallOptions();
  options.candidates_max = 1;
  options.capacity_max = 1;
  ScratchFolder scratch;
  {
    ASSERT_OK_AND_ASSIGN(
        PlanCache cache,
        PlanCache::Open(scratch.path(), CacheMode::kReadWrite));
    ASSERT_OK_AND_ASSIGN(const TargetContext context,
                         ResolveTarget(options.targets[0], options, &cache));
    ASSERT_OK_AND_ASSIGN(const std::vector<PlannedRequest> requests,
                         Canonicalize(SmallManifest(), options.capacity_max));
    ASSERT_OK_AND_ASSIGN(const std::vector<ResolvedInterval> intervals,
                         ResolveIntervals(requests, {context}, options));
    ASSERT_EQ(intervals.size(), 1u);
    ASSERT_OK_AND_ASSIGN(const IntervalPlan plan,
                         intervals[0].planner->Plan(intervals[0].interval));
    const PlannedCandidate& candidate = plan.candidates.at(0);
    SourceUnit unit = candidate.kernel_template->MakeUnits(
        intervals[0].geometry, context.target, candidate.body.assignment)[0];
    ASSERT_EQ(absl::StrReplaceAll({{"gate[c] = kd::Silu(gate[c]) * up[c];",
                                    "gate[c] = kd::Silu(up[c]) * gate[c];"}},
                                  &unit.text),
              1);
    const auto programs = CompileUnits({unit});
    ASSERT_OK(programs[0]);
    Program planted = **programs[0];
    planted.key = candidate.programs.at(0);
    ASSERT_OK(cache.PutProgram(planted));
  }
  Notes notes;
  ASSERT_OK_AND_ASSIGN(
      const PrewarmReport first,
      RunPrewarm(scratch.path(), options, CacheMode::kReadWrite, &notes));
  EXPECT_FALSE(first.complete);
  EXPECT_EQ(first.winners, 0u);
  EXPECT_GE(first.launches, 1u);
  EXPECT_THAT(first.intervals[0].problem, HasSubstr("float64 oracle"));
  EXPECT_THAT(notes.lines, Contains(AllOf(HasSubstr("rejected fused_moe.cpu{"),
                                          HasSubstr("float64 oracle"))));
  ASSERT_OK_AND_ASSIGN(const PrewarmReport second,
                       RunPrewarm(scratch.path(), options));
  EXPECT_FALSE(second.complete);
  EXPECT_EQ(second.launches, 0u) << "a known wrong candidate ran again";
  EXPECT_EQ(second.programs_compiled, 0u);
  EXPECT_THAT(second.intervals[0].problem, HasSubstr("float64 oracle"));
}

// ---- killed ----------------------------------------------------------------

int64_t StoredRows(const std::string& folder, const std::string& name) {
  absl::StatusOr<PlanCache> cache =
      PlanCache::Open(folder, CacheMode::kReadOnly);
  if (!cache.ok()) return 0;
  const absl::StatusOr<CacheStats> stats = cache->Stats();
  if (!stats.ok()) return 0;
  for (const TableStats& table : stats->tables) {
    if (table.name == name) return table.rows;
  }
  return 0;
}

// kiln prewarm of small.json in `scratch` on its folder "cache"; results go to
// the file `out`. Returns the process, or -1.
pid_t StartKiln(const ScratchFolder& scratch, const std::string& out,
                const std::string& candidates) {
  const std::string kiln = std::string(std::getenv("KILN_BIN_DIR")) + "/kiln";
  const std::string folder = scratch.File("cache");
  const std::string manifest = scratch.File("small.json");
  const std::string target = SmallOptions().targets[0].ToString();
  std::vector<std::string> words = {
      kiln,        "--cache",          folder,     "--cc-cpu",
      CcCpuPath(), "prewarm",          manifest,   "--target",
      target,      "--max-candidates", candidates, "--jobs",
      "1",         "--budget",         "0.05",     "--json"};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  EXPECT_EQ(posix_spawn_file_actions_init(&files), 0);
  posix_spawn_file_actions_addopen(&files, 1, out.c_str(),
                                   O_WRONLY | O_CREAT | O_TRUNC, 0644);
  posix_spawn_file_actions_addopen(&files, 2, "/dev/null", O_WRONLY, 0);
  pid_t pid = -1;
  const int code =
      posix_spawn(&pid, kiln.c_str(), &files, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  EXPECT_EQ(code, 0);
  return code == 0 ? pid : -1;
}

std::string WhyNoKiln() {
  const std::string kiln = std::string(std::getenv("KILN_BIN_DIR")) + "/kiln";
  return access(kiln.c_str(), X_OK) == 0 ? "" : kiln + " is not built";
}

// The number behind "name": in a line of JSON; -1 without it.
int64_t NumberIn(const std::string& json, const std::string& name) {
  const std::string mark = absl::StrCat("\"", name, "\":");
  const size_t at = json.rfind(mark);
  return at == std::string::npos
             ? -1
             : std::strtoll(json.c_str() + at + mark.size(), nullptr, 10);
}

TEST_F(PrewarmTest, AKilledRunKeepsWhatItHadAndTheNextOneFinishes) {
  if (const std::string why = WhyNoKiln(); !why.empty()) GTEST_SKIP() << why;
  ScratchFolder scratch;
  const std::string folder = scratch.File("cache");
  std::ofstream(scratch.File("small.json")) << kManifest;
  const pid_t pid = StartKiln(scratch, "/dev/null", "6");
  ASSERT_GT(pid, 0);
  const auto begin = std::chrono::steady_clock::now();
  int64_t stored = 0;
  int state = 0;
  while (stored == 0 &&
         std::chrono::steady_clock::now() - begin < std::chrono::minutes(2)) {
    ASSERT_EQ(waitpid(pid, &state, WNOHANG), 0) << "ended before it was killed";
    stored = StoredRows(folder, "program");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  kill(pid, SIGKILL);
  ASSERT_EQ(waitpid(pid, &state, 0), pid);
  ASSERT_TRUE(WIFSIGNALED(state)) << "ended before it was killed";
  stored = StoredRows(folder, "program");
  ASSERT_GE(stored, 1);

  PrewarmOptions options = SmallOptions();
  options.candidates_max = 6;
  ASSERT_OK_AND_ASSIGN(const PrewarmReport report, RunPrewarm(folder, options));
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(report.winners, 2u);
  EXPECT_EQ(report.programs_reused, static_cast<size_t>(stored));
  EXPECT_GE(report.programs_compiled, 1u) << "it was killed too late";
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(folder, CacheMode::kReadOnly));
  EXPECT_THAT(cache.Check(), testing::IsOkAndHolds(IsEmpty()));
}

// ---- many processes on one cache -------------------------------------------

TEST_F(PrewarmTest, SixteenColdRunsCompileAndRaceEverythingOnce) {
  if (const std::string why = WhyNoKiln(); !why.empty()) GTEST_SKIP() << why;
  constexpr int kRuns = 16;
  ScratchFolder scratch;
  std::ofstream(scratch.File("small.json")) << kManifest;
  std::vector<pid_t> runs;
  for (int i = 0; i < kRuns; ++i) {
    runs.push_back(StartKiln(scratch, scratch.File(absl::StrCat(i)), "2"));
    ASSERT_GT(runs.back(), 0);
  }
  int64_t compiled = 0;
  int64_t raced = 0;
  for (int i = 0; i < kRuns; ++i) {
    int state = 0;
    ASSERT_EQ(waitpid(runs[static_cast<size_t>(i)], &state, 0),
              runs[static_cast<size_t>(i)]);
    EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << state;
    const std::string out = ReadTestFile(scratch.File(absl::StrCat(i)));
    EXPECT_EQ(NumberIn(out, "winners"), 2) << out;
    EXPECT_EQ(NumberIn(out, "rejects"), 0) << out;
    compiled += NumberIn(out, "programs_compiled");
    for (size_t at = 0; (at = out.find("\"raced\"", at)) != std::string::npos;
         ++at) {
      ++raced;
    }
  }
  const std::string folder = scratch.File("cache");
  EXPECT_GE(compiled, 2);
  EXPECT_EQ(compiled, StoredRows(folder, "program"));
  EXPECT_EQ(raced, 2) << "each interval is raced by one of them";
  EXPECT_EQ(StoredRows(folder, "plan"), 2);
  EXPECT_EQ(StoredRows(folder, "lease"), 0);
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(folder, CacheMode::kReadOnly));
  EXPECT_THAT(cache.Check(), testing::IsOkAndHolds(IsEmpty()));
}

TEST_F(PrewarmTest, WhatAKilledRunHadClaimedIsTakenOver) {
  if (const std::string why = WhyNoKiln(); !why.empty()) GTEST_SKIP() << why;
  ScratchFolder scratch;
  const std::string folder = scratch.File("cache");
  std::ofstream(scratch.File("small.json")) << kManifest;
  const pid_t owner = StartKiln(scratch, "/dev/null", "3");
  ASSERT_GT(owner, 0);
  const auto begin = std::chrono::steady_clock::now();
  while (StoredRows(folder, "lease") == 0 &&
         std::chrono::steady_clock::now() - begin < std::chrono::minutes(2)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  // A second one is waiting already when the first dies.
  const pid_t heir = StartKiln(scratch, scratch.File("heir"), "3");
  ASSERT_GT(heir, 0);
  kill(owner, SIGKILL);
  int state = 0;
  ASSERT_EQ(waitpid(owner, &state, 0), owner);
  ASSERT_TRUE(WIFSIGNALED(state)) << "ended before it was killed";
  EXPECT_GE(StoredRows(folder, "lease"), 1) << "it died with its claims";
  ASSERT_EQ(waitpid(heir, &state, 0), heir);
  EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << state;
  const std::string out = ReadTestFile(scratch.File("heir"));
  EXPECT_EQ(NumberIn(out, "winners"), 2) << out;
  EXPECT_EQ(
      NumberIn(out, "programs_compiled") + NumberIn(out, "programs_reused"),
      StoredRows(folder, "program"));
  EXPECT_EQ(StoredRows(folder, "lease"), 0);
}

TEST_F(PrewarmTest, ShardsJoinToWhatOneRunMakes) {
  constexpr int kShards = 3;
  const std::string text =
      absl::StrReplaceAll(kManifest, {{"[1, 4]", "[1, 2, 4]"}});
  ScratchFolder scratch;
  ASSERT_OK_AND_ASSIGN(
      PlanCache joined,
      PlanCache::Open(scratch.File("joined"), CacheMode::kReadWrite));
  ASSERT_OK(RunPrewarm(scratch.File("whole"), SmallOptions(),
                       CacheMode::kReadWrite, nullptr, text));
  // First the programs, each compiled by one shard.
  size_t compiled = 0;
  for (int shard = 0; shard < kShards; ++shard) {
    PrewarmOptions options = SmallOptions();
    options.shard_index = shard;
    options.shard_count = kShards;
    options.stop_after = Stage::kCompile;
    const std::string folder = scratch.File(absl::StrCat("compile", shard));
    ASSERT_OK_AND_ASSIGN(
        const PrewarmReport report,
        RunPrewarm(folder, options, CacheMode::kReadWrite, nullptr, text));
    compiled += report.programs_compiled;
    ASSERT_OK_AND_ASSIGN(PlanCache part,
                         PlanCache::Open(folder, CacheMode::kReadOnly));
    ASSERT_OK_AND_ASSIGN(const MergeReport merged, joined.MergeFrom(&part, {}));
    EXPECT_TRUE(merged.stored);
  }
  EXPECT_EQ(compiled,
            static_cast<size_t>(StoredRows(scratch.File("whole"), "program")));
  EXPECT_EQ(StoredRows(scratch.File("joined"), "program"),
            static_cast<int64_t>(compiled));
  // Then the races, each from a copy of all programs.
  size_t intervals = 0;
  for (int shard = 0; shard < kShards; ++shard) {
    PrewarmOptions options = SmallOptions();
    options.shard_index = shard;
    options.shard_count = kShards;
    const std::string folder = scratch.File(absl::StrCat("race", shard));
    std::filesystem::copy(scratch.File("joined"), folder,
                          std::filesystem::copy_options::recursive);
    ASSERT_OK_AND_ASSIGN(
        const PrewarmReport report,
        RunPrewarm(folder, options, CacheMode::kReadWrite, nullptr, text));
    EXPECT_TRUE(report.complete);
    EXPECT_EQ(report.programs_compiled, 0u);
    intervals += report.intervals.size();
  }
  EXPECT_EQ(intervals, 3u);
  for (int shard = 0; shard < kShards; ++shard) {
    ASSERT_OK_AND_ASSIGN(
        PlanCache part,
        PlanCache::Open(scratch.File(absl::StrCat("race", shard)),
                        CacheMode::kReadOnly));
    ASSERT_OK_AND_ASSIGN(const MergeReport merged, joined.MergeFrom(&part, {}));
    EXPECT_TRUE(merged.stored);
    EXPECT_THAT(merged.conflicts, IsEmpty());
  }
  ASSERT_OK_AND_ASSIGN(PlanCache whole, PlanCache::Open(scratch.File("whole"),
                                                        CacheMode::kReadOnly));
  const auto keys = [](PlanCache* cache) {
    std::vector<PlanKey> found;
    absl::StatusOr<std::vector<StoredPlan>> plans = cache->ListPlans();
    EXPECT_OK(plans);
    for (const StoredPlan& plan : *plans) found.push_back(plan.key);
    return found;
  };
  EXPECT_EQ(keys(&joined), keys(&whole));
  EXPECT_THAT(joined.Check(), testing::IsOkAndHolds(IsEmpty()));
  ASSERT_OK_AND_ASSIGN(const FreezeResult frozen,
                       RunFreeze(scratch.File("joined"), SmallOptions(), false,
                                 CacheMode::kReadOnly, text));
  EXPECT_EQ(frozen.plans, 3u);
}

// Without a race nothing is left to chance: the joined shards are the unsharded
// cache, and freeze to the same bytes.
TEST_F(PrewarmTest, PredictedShardsJoinToTheSameBundle) {
  constexpr int kShards = 3;
  const std::string text =
      absl::StrReplaceAll(kManifest, {{"[1, 4]", "[1, 2, 4, 6]"}});
  ScratchFolder scratch;
  PrewarmOptions options = SmallOptions();
  options.compile_only = true;
  ASSERT_OK(RunPrewarm(scratch.File("whole"), options, CacheMode::kReadWrite,
                       nullptr, text));
  {
    ASSERT_OK_AND_ASSIGN(
        PlanCache joined,
        PlanCache::Open(scratch.File("joined"), CacheMode::kReadWrite));
    for (int shard = 0; shard < kShards; ++shard) {
      PrewarmOptions part = options;
      part.shard_index = shard;
      part.shard_count = kShards;
      const std::string folder = scratch.File(absl::StrCat("part", shard));
      ASSERT_OK(RunPrewarm(folder, part, CacheMode::kReadWrite, nullptr, text));
      ASSERT_OK_AND_ASSIGN(PlanCache source,
                           PlanCache::Open(folder, CacheMode::kReadOnly));
      ASSERT_OK_AND_ASSIGN(const MergeReport merged,
                           joined.MergeFrom(&source, {}));
      EXPECT_TRUE(merged.stored);
    }
  }
  const auto contents = [&](const std::string& folder) {
    std::map<Digest, std::string> found;  // by key
    absl::StatusOr<PlanCache> cache =
        PlanCache::Open(scratch.File(folder), CacheMode::kReadOnly);
    EXPECT_OK(cache);
    absl::StatusOr<std::vector<StoredPlan>> plans = cache->ListPlans();
    EXPECT_OK(plans);
    for (const StoredPlan& stored : *plans) {
      found[stored.key.digest] = PlanToJson(stored.plan);
      for (const Digest& key : stored.plan.programs) {
        absl::StatusOr<std::optional<Program>> program =
            cache->FindProgram(key);
        EXPECT_OK(program);
        EXPECT_TRUE(program->has_value());
        found[key] = (*program)->binary;
      }
    }
    return found;
  };
  EXPECT_EQ(contents("joined"), contents("whole"));
  EXPECT_GE(contents("whole").size(), 5u);
  ASSERT_OK_AND_ASSIGN(const FreezeResult whole,
                       RunFreeze(scratch.File("whole"), options, true,
                                 CacheMode::kReadOnly, text));
  ASSERT_OK_AND_ASSIGN(const FreezeResult joined,
                       RunFreeze(scratch.File("joined"), options, true,
                                 CacheMode::kReadOnly, text));
  EXPECT_EQ(joined.bytes, whole.bytes);
}

TEST_F(PrewarmTest, ADamagedFileIsRepairedOnceAndTheRunGoesOn) {
  ScratchFolder scratch;
  std::filesystem::copy(warm_->path(), scratch.path(),
                        std::filesystem::copy_options::recursive);
  const std::string path = scratch.File("index.db");
  const std::string whole = ReadTestFile(path);
  // Pages of 4096 bytes from the second on, until one stops a plain run.
  bool repaired = false;
  for (size_t page = 1; page < whole.size() / 4096 && !repaired; ++page) {
    std::string damaged = whole;
    damaged.replace(page * 4096, 4096, 4096, '\x5A');
    std::ofstream(path, std::ios::binary) << damaged;
    SCOPED_TRACE(absl::StrCat("page ", page));
    Notes notes;
    ASSERT_OK_AND_ASSIGN(const PrewarmReport report,
                         RunPrewarm(scratch.path(), SmallOptions(),
                                    CacheMode::kReadWrite, &notes));
    EXPECT_TRUE(report.complete);
    for (const std::string& line : notes.lines) {
      repaired = repaired || line.find("rebuilding it") != std::string::npos;
    }
    ASSERT_OK_AND_ASSIGN(PlanCache cache,
                         PlanCache::Open(scratch.path(), CacheMode::kReadOnly));
    if (repaired) {
      EXPECT_THAT(cache.Check(), testing::IsOkAndHolds(IsEmpty()));
    }
  }
  EXPECT_TRUE(repaired) << "no damaged page stopped a run";
}

}  // namespace
}  // namespace kiln
