// Attached packages: what is refused before anything happens, whose keys move,
// and real races of a package that Kiln compiles and of one that brings its own
// binary.

#include "tuner/attach.h"

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/registry.h"
#include "tests/support/golden.h"
#include "tests/support/package_folder.h"
#include "tests/support/status_matchers.h"
#include "tests/tuner/cpu_programs.h"
#include "tools/bundle_json.h"
#include "tools/bundle_view.h"
#include "tuner/freeze.h"
#include "tuner/planner.h"
#include "tuner/prewarm.h"

namespace kiln {
namespace {

using ::testing::AllOf;
using testing::CcCpuPath;
using testing::CompileUnits;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::PackageFolder;
using testing::ReadTestFile;
using testing::ScratchFolder;
using testing::SourcePath;
using testing::StatusIs;
using testing::WhyNoCcCpu;
using testing::WriteTestFile;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

std::string ExampleFolder() { return SourcePath("tools/examples/package_cpu"); }

// ---- names -----------------------------------------------------------------

TEST(AttachPackagesTest, AttachesInTheGivenOrder) {
  const PackageFolder small;
  ASSERT_OK_AND_ASSIGN(const AttachedTemplates attached,
                       AttachPackages({small.path(), ExampleFolder()}));
  ASSERT_EQ(attached.size(), 2u);
  EXPECT_TRUE(absl::StartsWith(attached[0]->name(), "acme.small@"));
  EXPECT_TRUE(absl::StartsWith(attached[1]->name(), "example.scalar@"));
}

TEST(AttachPackagesTest, RefusesTwoPackagesOfOneName) {
  const PackageFolder one;
  PackageFolder other;
  other.Change("\"version\": 3", "\"version\": 4");
  EXPECT_THAT(
      AttachPackages({one.path(), other.path()}),
      StatusIs(kInvalid,
               AllOf(HasSubstr("acme.small"), HasSubstr(one.path()),
                     HasSubstr(other.path()), HasSubstr("attach one"))));
}

TEST(AttachPackagesTest, RefusesTheNameOfEveryTemplateOfThisBuild) {
  for (const KernelTemplate* from : AllTemplates()) {
    PackageFolder folder;
    folder.Change("acme.small", std::string(from->name()));
    EXPECT_THAT(AttachPackages({folder.path()}),
                StatusIs(kInvalid, HasSubstr("Kiln's own")))
        << from->name();
  }
}

TEST(AttachPackagesTest, RefusesAChangedByte) {
  PackageFolder folder;
  folder.Write("kernel.cc", absl::StrCat(testing::kPackageSource, "\n"));
  EXPECT_THAT(AttachPackages({folder.path()}),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("kernel.cc")));
}

// ---- binaries of an own compiler -------------------------------------------

// tests/data/runtime/scale.cu: scale(P x, A scratch, m, u32, u64) and
// add(m, A scratch, P out, u32), for sm_90a.
constexpr char kCubinPackage[] = R"json({
 "schema": "kiln.package/1", "name": "acme.prebuilt", "version": 1,
 "op": "fused_moe", "backend": "cuda",
 "serves": {"recipes": ["w4a16"], "formats": ["exl3"], "codebooks": ["mcg"],
  "bits": [4], "scales": ["per_expert"], "activations": ["silu"],
  "io_dtypes": ["bf16"], "id_dtypes": ["i32"]},
 "compute_dtype": "f32", "deterministic": true, "compiler": "own",
 "files": [{"path": "scale.cubin", "sha256": "SHA"}],
 "programs": [{"entries": ["scale", "add"], "binaries": [
  {"file": "scale.cubin", "target": "sm_90a"}]}],
 "arena": [{"name": "scratch", "bytes": "4 * capacity * hidden"}],
 "steps": [
  {"label": "scale", "entry": "scale", "grid": ["m"], "block": [128],
   "shared_bytes": 65536,
   "args": ["param:x", "arena:scratch", "tokens", "u32:hidden", "u64:7"]},
  {"label": "add", "entry": "add", "grid": ["ceil_div(m * hidden, 128)"],
   "block": [128],
   "args": ["tokens", "arena:scratch", "param:out", "u32:hidden"]}]})json";

class PrebuiltTest : public ::testing::Test {
 protected:
  PrebuiltTest() {
    Write(ReadTestFile(SourcePath("tests/data/runtime/scale_sm_90a.cubin")),
          kCubinPackage);
  }

  void Write(const std::string& binary, const std::string& text) {
    WriteTestFile(folder_.File("scale.cubin"), binary);
    WriteTestFile(folder_.File("package.json"),
                  absl::StrReplaceAll(text, {{"SHA", Sha256(binary).ToHex()}}));
  }

  // The package with one text in place of another.
  void Change(const std::string& from, const std::string& to) {
    const std::string text = absl::StrReplaceAll(kCubinPackage, {{from, to}});
    ASSERT_NE(text, kCubinPackage) << from;
    Write(ReadTestFile(folder_.File("scale.cubin")), text);
  }

  absl::StatusOr<AttachedTemplates> Attach() {
    return AttachPackages({folder_.path()});
  }

  ScratchFolder folder_;
};

TEST_F(PrebuiltTest, IsAttachedWhenTheBinaryIsWhatTheManifestSays) {
  ASSERT_OK_AND_ASSIGN(const AttachedTemplates attached, Attach());
  ASSERT_OK_AND_ASSIGN(const Target target, ParseTarget("sm_90a"));
  const std::vector<SourceUnit> units = attached[0]->MakeUnits({}, target, {});
  ASSERT_EQ(units.size(), 1u);
  EXPECT_EQ(units[0].binary, ReadTestFile(folder_.File("scale.cubin")));
  EXPECT_THAT(units[0].text, IsEmpty());
}

TEST_F(PrebuiltTest, RefusesAnotherArchitecture) {
  Change("sm_90a", "sm_90");
  EXPECT_THAT(Attach(),
              StatusIs(kInvalid, AllOf(HasSubstr("scale.cubin"),
                                       HasSubstr("cubin is for sm_90a"),
                                       HasSubstr("expected sm_90"))));
}

TEST_F(PrebuiltTest, RefusesAMissingEntry) {
  Change("[\"scale\", \"add\"]", "[\"scale\", \"add\", \"sum\"]");
  EXPECT_THAT(Attach(), StatusIs(kInvalid, AllOf(HasSubstr("scale.cubin"),
                                                 HasSubstr("sum"))));
}

TEST_F(PrebuiltTest, RefusesAnEntryThatTheManifestDoesNotDeclare) {
  Write(ReadTestFile(folder_.File("scale.cubin")),
        absl::StrReplaceAll(kCubinPackage,
                            {{"[\"scale\", \"add\"]", "[\"scale\"]"},
                             {"\"entry\": \"add\"", "\"entry\": \"scale\""}}));
  EXPECT_THAT(Attach(), StatusIs(kInvalid, AllOf(HasSubstr("scale.cubin"),
                                                 HasSubstr("add"))));
}

TEST_F(PrebuiltTest, RefusesTooFewArguments) {
  Change("\"u32:hidden\", \"u64:7\"", "\"u32:hidden\"");
  EXPECT_THAT(Attach(),
              StatusIs(kInvalid, AllOf(HasSubstr("step scale"),
                                       HasSubstr("passes 4 arguments"),
                                       HasSubstr("declares 5 parameters"))));
}

TEST_F(PrebuiltTest, RefusesAnArgumentOfAnotherSize) {
  Change("\"u32:hidden\", \"u64:7\"", "\"u64:hidden\", \"u64:7\"");
  EXPECT_THAT(Attach(),
              StatusIs(kInvalid, AllOf(HasSubstr("argument 3 has 8 bytes"),
                                       HasSubstr("declares 4 bytes"))));
}

TEST_F(PrebuiltTest, RefusesWhatIsNoBinary) {
  Write("not an ELF file", kCubinPackage);
  EXPECT_THAT(Attach(), StatusIs(kInvalid, HasSubstr("scale.cubin")));
}

TEST_F(PrebuiltTest, RefusesACpuTarget) {
  Change("sm_90a", "cpu-x86-64-v3");
  EXPECT_THAT(Attach(), StatusIs(kInvalid, HasSubstr("not of backend cuda")));
}

// ---- keys ------------------------------------------------------------------

Toolchain TestToolchain() { return {"test", "1.2.3", Sha256("compiler")}; }

DeviceProfile CpuProfile() {
  absl::StatusOr<Target> target = ParseTarget("cpu-x86-64-v3");
  EXPECT_OK(target);
  DeviceProfile profile = AssumedProfile(*target);
  profile.multiprocessors = 8;
  return profile;
}

// One that the small package serves.
RequestGeometry ServedGeometry() {
  RequestGeometry geometry = testing::SmallGeometry();
  geometry.weights.codebook = Codebook::kMcg;
  geometry.weights.bits = {.gate = 4, .up = 4, .down = 4};
  return geometry;
}

class PackageKeyTest : public ::testing::Test {
 protected:
  // Keys of the interval's plan and of the package's program at its first
  // point.
  struct Keys {
    Digest plan;
    Digest program;
    Digest candidate;
  };

  Keys KeysWith(const std::vector<std::string>& folders) {
    absl::StatusOr<AttachedTemplates> attached = AttachPackages(folders);
    EXPECT_OK(attached);
    PlannerOptions options = {.candidates_max = 2};
    options.attached = *attached;
    Planner planner(ServedGeometry(), CpuProfile(), TestToolchain(), options);
    absl::StatusOr<IntervalPlan> plan = planner.Plan(interval_);
    EXPECT_OK(plan);
    Keys keys;
    keys.plan = planner.KeyOf(interval_).digest;
    const PlannedCandidate& last = plan->candidates.back();
    keys.program = last.programs.front().digest;
    keys.candidate = last.digest;
    in_tree_.clear();
    for (const PlannedCandidate& candidate : plan->candidates) {
      if (FindTemplate(candidate.body.template_name) != nullptr) {
        in_tree_.push_back(candidate.digest);
      }
    }
    return keys;
  }

  const Interval interval_ = {.m_min = 5, .m_max = 8};
  std::vector<Digest> in_tree_;  // candidates of this build's templates
};

TEST_F(PackageKeyTest, APackageMovesThePlansKeyAndLeavesOtherCandidatesAlone) {
  const PackageFolder folder;
  const Keys without = KeysWith({});
  const std::vector<Digest> alone = in_tree_;
  const Keys with = KeysWith({folder.path()});
  EXPECT_NE(without.plan, with.plan);
  EXPECT_EQ(in_tree_, alone);
  EXPECT_NE(with.candidate, without.candidate);
}

TEST_F(PackageKeyTest, WithoutAPackageAKeyIsThatOfAPlannerWithoutPackages) {
  Planner planner(ServedGeometry(), CpuProfile(), TestToolchain(), {2});
  EXPECT_EQ(KeysWith({}).plan, planner.KeyOf(interval_).digest);
}

TEST_F(PackageKeyTest, AChangedManifestMovesEveryKeyOfThePackage) {
  PackageFolder folder;
  const Keys before = KeysWith({folder.path()});
  // Serves more, computes the same.
  folder.Change("[128, 512]", "[128, 1024]");
  const Keys after = KeysWith({folder.path()});
  EXPECT_NE(before.plan, after.plan);
  EXPECT_NE(before.program, after.program);
  EXPECT_NE(before.candidate, after.candidate);
}

TEST_F(PackageKeyTest, AChangedHeaderMovesEveryKeyOfThePackage) {
  PackageFolder folder;
  const Keys before = KeysWith({folder.path()});
  folder.Write("sub/more.h", "#define ACME 2\n");
  folder.Change(Sha256(testing::kPackageHeader).ToHex(),
                Sha256("#define ACME 2\n").ToHex());
  const Keys after = KeysWith({folder.path()});
  EXPECT_NE(before.plan, after.plan);
  EXPECT_NE(before.program, after.program);
  EXPECT_NE(before.candidate, after.candidate);
}

TEST_F(PackageKeyTest, TheDefaultStaysATemplateOfThisBuild) {
  const PackageFolder folder;
  absl::StatusOr<AttachedTemplates> attached = AttachPackages({folder.path()});
  ASSERT_OK(attached);
  PlannerOptions options = {.candidates_max = 2};
  options.attached = *attached;
  Planner planner(ServedGeometry(), CpuProfile(), TestToolchain(), options);
  ASSERT_OK_AND_ASSIGN(const IntervalPlan plan, planner.Plan(interval_));
  ASSERT_EQ(plan.candidates.size(), 4u);
  EXPECT_EQ(plan.candidates.front().body.template_name, "fused_moe.cpu");
  EXPECT_EQ(plan.candidates[2].body.Label(),
            absl::StrCat(attached->front()->name().substr(0, 11 + 12),
                         "{tile=4,unroll=1}"));
}

// ---- races -----------------------------------------------------------------

constexpr char kModel[] = R"({
 "schema": "kiln.model/1", "name": "Small",
 "requests": [
  {"name": "moe", "op": "fused_moe", "layers": 1,
   "hidden": 256, "intermediate": 128, "experts": 4, "top_k": 2,
   "activation": "silu", "io_dtype": "bf16", "id_dtype": "i64",
   "weights": {"format": "exl3", "codebook": "mcg", "bits": 4},
   "recipe": "w4a16", "capacities": [4]}]})";

class Silent : public ProgressSink {
 public:
  void Update(Stage, size_t, size_t, const std::string&) override {}

  void Note(const std::string& line) override { lines.push_back(line); }

  std::vector<std::string> lines;
};

class PackageRaceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNoCcCpu(); !why.empty()) GTEST_SKIP() << why;
    ASSERT_OK_AND_ASSIGN(manifest_, ParseManifest(kModel, "model.json"));
    absl::StatusOr<Target> target = HostCpuTarget();
    ASSERT_OK(target);
    options_.targets = {*target};
    options_.candidates_max = 1;
    options_.jobs = 2;
    options_.race_seconds_max = 0.05;
    options_.race_worker = std::string(std::getenv("KILN_BIN_DIR")) + "/kiln";
    options_.toolchain = [](Backend, ProbeMemo* memo) {
      return ProbeCcCpu(CcCpuPath(), memo);
    };
  }

  absl::Status Attach(const std::string& folder) {
    absl::StatusOr<AttachedTemplates> attached = AttachPackages({folder});
    if (attached.ok()) options_.attached = *attached;
    return attached.status();
  }

  absl::StatusOr<PrewarmReport> Run() {
    absl::StatusOr<PlanCache> cache =
        PlanCache::Open(cache_.path(), CacheMode::kReadWrite);
    if (!cache.ok()) return cache.status();
    return Prewarm(manifest_, options_, &*cache, &silent_);
  }

  // What was measured of the one interval.
  absl::StatusOr<std::vector<Measurement>> Measurements() {
    absl::StatusOr<PlanCache> cache =
        PlanCache::Open(cache_.path(), CacheMode::kReadWrite);
    if (!cache.ok()) return cache.status();
    absl::StatusOr<ResolvedManifest> resolved =
        ResolveManifest(manifest_, options_, &*cache);
    if (!resolved.ok()) return resolved.status();
    return cache->LoadMeasurements(resolved->intervals[0].key.digest);
  }

  Manifest manifest_;
  PrewarmOptions options_;
  ScratchFolder cache_;
  Silent silent_;
};

TEST_F(PackageRaceTest, TheExampleIsCompiledVerifiedAndRaced) {
  ASSERT_OK(Attach(ExampleFolder()));
  ASSERT_OK_AND_ASSIGN(const PrewarmReport report, Run());
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(report.rejects, 0u);
  EXPECT_EQ(report.programs_compiled, 2u);
  EXPECT_EQ(report.programs_attached, 0u);
  ASSERT_OK_AND_ASSIGN(const std::vector<Measurement> all, Measurements());
  size_t seen = 0;
  for (const Measurement& one : all) {
    if (!absl::StartsWith(one.label, "example.scalar@")) continue;
    ++seen;
    EXPECT_GT(one.samples.size(), 0u) << one.reason;
    // Binary32 throughout; the tolerance is 2e-3.
    EXPECT_LT(one.worst_error, 1e-5);
    EXPECT_EQ(one.numerics_class, "example.scalar.v1");
  }
  EXPECT_EQ(seen, 1u);
}

TEST_F(PackageRaceTest, WithAndWithoutAPackageNothingIsMixedUp) {
  ASSERT_OK(Run());
  ASSERT_OK(Attach(ExampleFolder()));
  ASSERT_OK_AND_ASSIGN(const PrewarmReport with, Run());
  EXPECT_FALSE(with.intervals[0].reused);
  // The program of this build's template is the same one.
  EXPECT_EQ(with.programs_reused, 1u);
  EXPECT_EQ(with.programs_compiled, 1u);
  ASSERT_OK_AND_ASSIGN(const PrewarmReport again, Run());
  EXPECT_TRUE(again.intervals[0].reused);
  EXPECT_EQ(again.launches, 0u);
  options_.attached.clear();
  ASSERT_OK_AND_ASSIGN(const PrewarmReport without, Run());
  EXPECT_TRUE(without.intervals[0].reused);
}

TEST_F(PackageRaceTest, ABinaryThatIsBroughtIsRacedWithoutAnyCompile) {
  // Kiln's compiler stands for another one here.
  ASSERT_OK_AND_ASSIGN(const AttachedTemplates example,
                       AttachPackages({ExampleFolder()}));
  const std::vector<SourceUnit> units = example[0]->MakeUnits(
      manifest_.requests[0].geometry, options_.targets[0], {{"channels", 128}});
  const auto compiled = CompileUnits(units);
  ASSERT_OK(compiled[0]);
  const std::string binary = (*compiled[0])->binary;
  const ScratchFolder folder;
  WriteTestFile(folder.File("moe.so"), binary);
  std::string text =
      ReadTestFile(SourcePath("tools/examples/package_cpu/package.json"));
  const std::string source =
      ReadTestFile(SourcePath("tools/examples/package_cpu/moe.cc"));
  text = absl::StrReplaceAll(
      text,
      {{"example.scalar", "acme.prebuilt"},
       {"\"version\": 1", "\"version\": 1, \"compiler\": \"own\""},
       {"\"values\": [128, 256]", "\"values\": [128]"},
       {"\"path\": \"moe.cc\"", "\"path\": \"moe.so\""},
       {Sha256(source).ToHex(), Sha256(binary).ToHex()},
       {"\"source\": \"moe.cc\"",
        absl::StrCat("\"binaries\": [{\"file\": \"moe.so\", \"target\": \"",
                     options_.targets[0].ToString(), "\"}]")}});
  WriteTestFile(folder.File("package.json"), text);
  ASSERT_OK(Attach(folder.path()));
  ASSERT_OK_AND_ASSIGN(const PrewarmReport report, Run());
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(report.programs_compiled, 1u);  // that of fused_moe.cpu
  EXPECT_EQ(report.programs_attached, 1u);
  ASSERT_OK_AND_ASSIGN(const std::vector<Measurement> all, Measurements());
  ASSERT_GE(all.size(), 2u);
  EXPECT_TRUE(absl::StartsWith(all[1].label, "acme.prebuilt@"));
  EXPECT_GT(all[1].samples.size(), 0u) << all[1].reason;
  EXPECT_LT(all[1].worst_error, 1e-5);
  // The program says who made it.
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(cache_.path(), CacheMode::kReadWrite));
  ASSERT_OK_AND_ASSIGN(const ResolvedManifest resolved,
                       ResolveManifest(manifest_, options_, &cache));
  ASSERT_OK_AND_ASSIGN(
      const IntervalPlan plan,
      resolved.intervals[0].planner->Plan(resolved.intervals[0].interval));
  ASSERT_OK_AND_ASSIGN(
      const std::optional<Program> program,
      cache.FindProgram(plan.candidates[1].programs[0].digest));
  ASSERT_TRUE(program.has_value());
  EXPECT_EQ(program->toolchain.name, "package");
  EXPECT_EQ(program->binary, binary);
}

TEST_F(PackageRaceTest, AWrongKernelIsRejectedByTheOracleAndTheRaceGoesOn) {
  const ScratchFolder folder;
  std::string source =
      ReadTestFile(SourcePath("tools/examples/package_cpu/moe.cc"));
  const std::string text =
      ReadTestFile(SourcePath("tools/examples/package_cpu/package.json"));
  const std::string wrong = absl::StrReplaceAll(
      source, {{"kd::Silu(g) * u", "kd::Silu(g) * u * 1.01f"}});
  ASSERT_NE(wrong, source);
  WriteTestFile(folder.File("moe.cc"), wrong);
  WriteTestFile(folder.File("package.json"),
                absl::StrReplaceAll(
                    text, {{Sha256(source).ToHex(), Sha256(wrong).ToHex()}}));
  ASSERT_OK(Attach(folder.path()));
  ASSERT_OK_AND_ASSIGN(const PrewarmReport report, Run());
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(report.rejects, 1u);
  EXPECT_EQ(report.intervals[0].plan->body.template_name, "fused_moe.cpu");
}

TEST_F(PackageRaceTest, AParameterLayoutThatDiffersIsRejectedBeforeALaunch) {
  PackageFolder folder;  // acme_f takes one pointer, the step passes five
  ASSERT_OK(Attach(folder.path()));
  ASSERT_OK_AND_ASSIGN(const PrewarmReport report, Run());
  EXPECT_TRUE(report.complete);
  EXPECT_EQ(report.intervals[0].rejected, 1u);
  EXPECT_EQ(report.intervals[0].plan->body.template_name, "fused_moe.cpu");
  ASSERT_FALSE(silent_.lines.empty());
  EXPECT_THAT(silent_.lines.back(), HasSubstr("argument"));
}

// A bundle of the package's plans without a race that it won: the example is no
// match for fused_moe.cpu, so its plan takes the place of the winner's.
TEST_F(PackageRaceTest, KeptNumericsMakeItWinAndAWinnerFreezesWithConsentOnly) {
  ASSERT_OK(Attach(ExampleFolder()));
  ASSERT_OK(Run());
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(cache_.path(), CacheMode::kReadWrite));
  ASSERT_OK_AND_ASSIGN(ResolvedManifest resolved,
                       ResolveManifest(manifest_, options_, &cache));
  const ResolvedInterval& interval = resolved.intervals[0];
  ASSERT_OK_AND_ASSIGN(const IntervalPlan planned,
                       interval.planner->Plan(interval.interval));
  ASSERT_OK_AND_ASSIGN(const std::optional<StoredPlan> stored,
                       cache.FindPlan(interval.key.digest));
  ASSERT_TRUE(stored.has_value());
  ASSERT_OK_AND_ASSIGN(const std::vector<Measurement> evidence,
                       cache.LoadMeasurements(interval.key.digest));
  Plan plan = stored->plan;
  plan.body = planned.candidates[1].body;
  plan.programs = {planned.candidates[1].programs[0].digest};
  ASSERT_OK(cache.PutPlan(interval.key, plan, evidence));
  FreezePolicy policy;
  policy.allow_unqualified = true;
  ASSERT_OK_AND_ASSIGN(const FreezeResult first,
                       Freeze(manifest_, options_, policy, &cache));

  // Who keeps the numerics of that bundle admits nothing but the package.
  WriteTestFile(cache_.File("first.kiln"), first.bytes);
  ASSERT_OK_AND_ASSIGN(
      const BundleView view,
      BundleView::Open(cache_.File("first.kiln"), std::nullopt));
  ASSERT_OK_AND_ASSIGN(options_.keep_numerics,
                       KeptNumerics::Read(view.handle()));
  ASSERT_OK_AND_ASSIGN(const PrewarmReport report,
                       Prewarm(manifest_, options_, &cache, &silent_));
  ASSERT_TRUE(report.complete);
  const Plan& winner = *report.intervals[0].plan;
  EXPECT_EQ(winner.body.template_name, options_.attached[0]->name());
  EXPECT_EQ(winner.evidence.state, PlanState::kMeasured);
  EXPECT_GT(winner.evidence.median_ns, 0);

  policy.allow_unqualified = false;
  EXPECT_THAT(Freeze(manifest_, options_, policy, &cache),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("template example.scalar@"),
                             HasSubstr("has no qualification"),
                             HasSubstr("no package has"),
                             HasSubstr("--allow-unqualified"))));
  policy.allow_unqualified = true;
  ASSERT_OK_AND_ASSIGN(const FreezeResult frozen,
                       Freeze(manifest_, options_, policy, &cache));
  EXPECT_EQ(frozen.unqualified, 1u);
  EXPECT_EQ(frozen.golden, 1u);

  // The bundle says what it holds: name and digest in full.
  WriteTestFile(cache_.File("second.kiln"), frozen.bytes);
  ASSERT_OK_AND_ASSIGN(
      const BundleView second,
      BundleView::Open(cache_.File("second.kiln"), std::nullopt));
  const kiln_plan_info_t info = second.Plan(0, 0, 0);
  EXPECT_EQ(std::string(info.template_name), options_.attached[0]->name());
  EXPECT_NE(info.flags & KILN_CONTAINS_UNQUALIFIED, 0u);
  EXPECT_THAT(BundleToJson(second).dump(),
              HasSubstr(std::string(options_.attached[0]->name())));
}

}  // namespace
}  // namespace kiln
