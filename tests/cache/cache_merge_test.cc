// MergeFrom and ExportTo: what is joined, what is refused, and that a row keeps
// its origin.

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "cache/plan_cache.h"
#include "cache/sqlite_db.h"
#include "tests/cache/cache_fixture.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::IsOkAndHolds;
using ::kiln::testing::MakeMeasurements;
using ::kiln::testing::MakePlan;
using ::kiln::testing::MakeProgram;
using ::kiln::testing::MakeReject;
using ::kiln::testing::MakeTestPlanKey;
using ::kiln::testing::ReadTestFile;
using ::kiln::testing::SameMeasurements;
using ::kiln::testing::SameProgram;
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestOptions;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CacheMergeTest : public ::testing::Test {
 protected:
  PlanCache Open(const std::string& name, const std::string& host = "here") {
    PlanCacheOptions options = TestOptions(folder_.File(name));
    options.provenance.host_name = host;
    absl::StatusOr<PlanCache> cache = PlanCache::Open(options);
    EXPECT_OK(cache);
    return *std::move(cache);
  }

  static PlanKey Put(uint64_t seed, PlanCache* cache) {
    const Program program = MakeProgram(seed);
    EXPECT_OK(cache->PutProgram(program));
    const Plan plan = MakePlan(seed, {program.key.digest});
    const PlanKey key = MakeTestPlanKey(plan);
    EXPECT_OK(cache->PutPlan(key, plan, MakeMeasurements(seed)));
    return key;
  }

  // The same key with another binary.
  static Program Other(uint64_t seed) {
    Program program = MakeProgram(seed);
    program.binary += "!";
    program.binary_digest = Sha256(program.binary);
    return program;
  }

  static void ExpectWhole(PlanCache* cache) {
    EXPECT_THAT(cache->Check(), IsOkAndHolds(IsEmpty()));
  }

  ScratchFolder folder_;
};

TEST_F(CacheMergeTest, AddsWhatIsMissingAndKeepsItsOrigin) {
  PlanCache ours = Open("ours");
  PlanCache theirs = Open("theirs", "elsewhere");
  Put(1, &ours);
  Put(1, &theirs);
  const PlanKey key = Put(2, &theirs);
  ASSERT_OK(theirs.PutReject(MakeReject(5)));
  ASSERT_OK_AND_ASSIGN(const MergeReport dry,
                       ours.MergeFrom(&theirs, {.dry_run = true}));
  EXPECT_EQ(dry.plans_added, 1u);
  EXPECT_FALSE(dry.stored);
  EXPECT_THAT(ours.FindPlan(key.digest),
              IsOkAndHolds(::testing::Eq(std::nullopt)));
  ASSERT_OK_AND_ASSIGN(const MergeReport report, ours.MergeFrom(&theirs, {}));
  EXPECT_TRUE(report.stored);
  EXPECT_EQ(report.plans_added, 1u);
  EXPECT_EQ(report.programs_added, 1u);
  EXPECT_EQ(report.rejects_added, 1u);
  EXPECT_EQ(report.kept, 2u);
  EXPECT_THAT(report.conflicts, IsEmpty());
  EXPECT_THAT(report.skipped, IsEmpty());
  ASSERT_OK_AND_ASSIGN(const std::optional<StoredPlan> plan,
                       ours.FindPlan(key.digest));
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->plan, MakePlan(2, {MakeProgram(2).key.digest}));
  EXPECT_EQ(plan->provenance.host_name, "elsewhere");
  ASSERT_OK_AND_ASSIGN(const std::vector<Measurement> evidence,
                       ours.LoadMeasurements(key.digest));
  EXPECT_TRUE(SameMeasurements(evidence, MakeMeasurements(2)));
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> program,
                       ours.FindProgram(MakeProgram(2).key.digest));
  ASSERT_TRUE(program.has_value());
  EXPECT_TRUE(SameProgram(*program, MakeProgram(2)));
  ExpectWhole(&ours);
  ASSERT_OK_AND_ASSIGN(const MergeReport again, ours.MergeFrom(&theirs, {}));
  EXPECT_EQ(again.plans_added + again.programs_added + again.rejects_added, 0u);
}

// What is old where it comes from was wanted here just now.
TEST_F(CacheMergeTest, JoiningCountsAsUse) {
  PlanCache theirs = Open("theirs");
  const PlanKey key = Put(1, &theirs);
  PlanCacheOptions options = TestOptions(folder_.File("ours"));
  int64_t now = options.clock() + 100 * kUseGrainSeconds;
  options.clock = [&now] { return now; };
  ASSERT_OK_AND_ASSIGN(PlanCache ours, PlanCache::Open(options));
  ASSERT_OK(ours.MergeFrom(&theirs, {}));
  now += 5 * kUseGrainSeconds;
  ASSERT_OK(ours.CollectGarbage({.age_max = 10 * kUseGrainSeconds}));
  EXPECT_THAT(ours.ContainsPlans({key.digest}),
              IsOkAndHolds(std::vector<bool>{true}));
  now += 10 * kUseGrainSeconds;
  ASSERT_OK(ours.CollectGarbage({.age_max = 10 * kUseGrainSeconds}));
  EXPECT_THAT(ours.ContainsPlans({key.digest}),
              IsOkAndHolds(std::vector<bool>{false}));
}

TEST_F(CacheMergeTest, AConflictingProgramIsShownAndNothingIsStored) {
  PlanCache ours = Open("ours");
  PlanCache theirs = Open("theirs");
  ASSERT_OK(ours.PutProgram(MakeProgram(1)));
  ASSERT_OK(theirs.PutProgram(Other(1)));
  const Plan plan = MakePlan(1, {Other(1).key.digest});
  const PlanKey key = MakeTestPlanKey(plan);
  ASSERT_OK(theirs.PutPlan(key, plan, {}));
  const PlanKey unrelated = Put(2, &theirs);
  ASSERT_OK_AND_ASSIGN(const MergeReport refused, ours.MergeFrom(&theirs, {}));
  EXPECT_FALSE(refused.stored);
  ASSERT_EQ(refused.conflicts.size(), 1u);
  EXPECT_EQ(refused.conflicts[0].table, "program");
  EXPECT_EQ(refused.conflicts[0].key, MakeProgram(1).key.digest.ToHex());
  EXPECT_THAT(refused.conflicts[0].ours,
              HasSubstr(MakeProgram(1).binary_digest.ToHex()));
  EXPECT_THAT(refused.conflicts[0].theirs,
              HasSubstr(Other(1).binary_digest.ToHex()));
  EXPECT_THAT(ours.ListPlans(), IsOkAndHolds(IsEmpty()));

  // Theirs measured their program, not ours.
  ASSERT_OK_AND_ASSIGN(
      const MergeReport kept,
      ours.MergeFrom(&theirs, {.choice = ConflictChoice::kKeepOurs}));
  EXPECT_TRUE(kept.stored);
  ASSERT_EQ(kept.skipped.size(), 1u);
  EXPECT_EQ(kept.skipped[0].key, key.digest.ToHex());
  ASSERT_OK_AND_ASSIGN(std::optional<Program> program,
                       ours.FindProgram(MakeProgram(1).key.digest));
  EXPECT_TRUE(SameProgram(*program, MakeProgram(1)));
  EXPECT_THAT(ours.ContainsPlans({unrelated.digest, key.digest}),
              IsOkAndHolds(std::vector<bool>{true, false}));

  const Plan old = MakePlan(7, {MakeProgram(1).key.digest});
  const PlanKey old_key = MakeTestPlanKey(old);
  ASSERT_OK(ours.PutPlan(old_key, old, {}));
  ASSERT_OK_AND_ASSIGN(
      const MergeReport taken,
      ours.MergeFrom(&theirs, {.choice = ConflictChoice::kTakeTheirs}));
  EXPECT_TRUE(taken.stored);
  ASSERT_OK_AND_ASSIGN(program, ours.FindProgram(MakeProgram(1).key.digest));
  EXPECT_TRUE(SameProgram(*program, Other(1)));
  EXPECT_THAT(
      ours.ContainsPlans({unrelated.digest, key.digest, old_key.digest}),
      IsOkAndHolds(std::vector<bool>{true, true, false}))
      << "what was measured with the replaced binary must go";
  ExpectWhole(&ours);
}

TEST_F(CacheMergeTest, AnotherWinnerIsAConflictAndAnotherMedianIsNot) {
  PlanCache ours = Open("ours");
  PlanCache theirs = Open("theirs");
  const PlanKey key = Put(1, &ours);
  Put(1, &theirs);
  Plan plan = MakePlan(1, {MakeProgram(1).key.digest});
  plan.evidence.median_ns *= 2;
  ASSERT_OK(theirs.PutPlan(key, plan, {}));
  ASSERT_OK_AND_ASSIGN(const MergeReport same, ours.MergeFrom(&theirs, {}));
  EXPECT_TRUE(same.stored);
  EXPECT_THAT(same.conflicts, IsEmpty());
  plan.body.assignment["warps"] = 8;
  ASSERT_OK(theirs.PutPlan(key, plan, {}));
  ASSERT_OK_AND_ASSIGN(const MergeReport other, ours.MergeFrom(&theirs, {}));
  EXPECT_FALSE(other.stored);
  ASSERT_EQ(other.conflicts.size(), 1u);
  EXPECT_THAT(other.conflicts[0].ours, HasSubstr("warps=4"));
  EXPECT_THAT(other.conflicts[0].theirs, HasSubstr("warps=8"));
}

TEST_F(CacheMergeTest, AMeasuredPlanReplacesAPredictedOneOnly) {
  PlanCache ours = Open("ours");
  PlanCache theirs = Open("theirs");
  Plan predicted = MakePlan(1, {MakeProgram(1).key.digest});
  predicted.evidence = {};
  const PlanKey key = MakeTestPlanKey(predicted);
  ASSERT_OK(ours.PutProgram(MakeProgram(1)));
  ASSERT_OK(ours.PutPlan(key, predicted, {}));
  Put(1, &theirs);
  ASSERT_OK_AND_ASSIGN(const MergeReport back, theirs.MergeFrom(&ours, {}));
  EXPECT_EQ(back.plans_added, 0u);
  ASSERT_OK_AND_ASSIGN(const MergeReport report, ours.MergeFrom(&theirs, {}));
  EXPECT_EQ(report.plans_added, 1u);
  EXPECT_THAT(report.conflicts, IsEmpty());
  for (PlanCache* cache : {&ours, &theirs}) {
    ASSERT_OK_AND_ASSIGN(const std::optional<StoredPlan> plan,
                         cache->FindPlan(key.digest));
    EXPECT_EQ(plan->plan.evidence.state, PlanState::kMeasured);
  }
}

TEST_F(CacheMergeTest, DamagedRowsStayBehindAndAreNamed) {
  PlanCache ours = Open("ours");
  PlanCache theirs = Open("theirs");
  const PlanKey bad = Put(1, &theirs);
  const PlanKey good = Put(2, &theirs);
  {
    ASSERT_OK_AND_ASSIGN(
        std::unique_ptr<Database> database,
        Database::Open({.path = folder_.File("theirs/index.db")}));
    ASSERT_OK(database->Execute(
        "UPDATE blob SET data = x'00' WHERE id = (SELECT min(id) FROM blob)"));
  }
  ASSERT_OK_AND_ASSIGN(const MergeReport report, ours.MergeFrom(&theirs, {}));
  EXPECT_TRUE(report.stored);
  ASSERT_EQ(report.skipped.size(), 2u) << "the program and its plan";
  EXPECT_EQ(report.skipped[0].table, "program");
  EXPECT_EQ(report.skipped[1].key, bad.digest.ToHex());
  EXPECT_THAT(ours.ContainsPlans({bad.digest, good.digest}),
              IsOkAndHolds(std::vector<bool>{false, true}));
  ExpectWhole(&ours);
}

TEST_F(CacheMergeTest, ACacheIsNotMergedIntoItself) {
  PlanCache ours = Open("ours");
  PlanCache same = Open("ours");
  EXPECT_THAT(ours.MergeFrom(&same, {}).status(),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST_F(CacheMergeTest, AnExportedFileHoldsTheChosenPlansAlone) {
  PlanCache ours = Open("ours");
  const PlanKey chosen = Put(1, &ours);
  Put(2, &ours);
  ASSERT_OK(ours.PutReject(MakeReject(1)));
  const std::string path = folder_.File("model.kilncache");
  ASSERT_OK_AND_ASSIGN(const ExportReport report,
                       ours.ExportTo(path, {chosen.digest}));
  EXPECT_EQ(report.plans, 1u);
  EXPECT_EQ(report.programs, 1u);
  const std::string bytes = ReadTestFile(path);
  EXPECT_EQ(report.bytes, bytes.size());
  EXPECT_EQ(report.digest, Sha256(bytes));
  ASSERT_OK_AND_ASSIGN(const ExportReport again,
                       ours.ExportTo(path, {chosen.digest, chosen.digest}));
  EXPECT_EQ(again.digest, report.digest);

  PlanCacheOptions options = TestOptions(folder_.path(), CacheMode::kReadOnly);
  options.file_name = "model.kilncache";
  ASSERT_OK_AND_ASSIGN(PlanCache file, PlanCache::Open(options));
  ExpectWhole(&file);
  PlanCache other = Open("other", "there");
  ASSERT_OK_AND_ASSIGN(const MergeReport merged, other.MergeFrom(&file, {}));
  EXPECT_TRUE(merged.stored);
  ASSERT_OK_AND_ASSIGN(const std::vector<StoredPlan> plans, other.ListPlans());
  ASSERT_EQ(plans.size(), 1u);
  EXPECT_EQ(plans[0].key, chosen);
  EXPECT_EQ(plans[0].provenance.host_name, "here");
}

TEST_F(CacheMergeTest, ExportNamesWhatIsMissingAndWritesNothing) {
  PlanCache ours = Open("ours");
  const std::string path = folder_.File("model.kilncache");
  EXPECT_THAT(ours.ExportTo(path, {Sha256("absent")}).status(),
              StatusIs(absl::StatusCode::kNotFound,
                       HasSubstr(Sha256("absent").ToHex())));
  EXPECT_FALSE(std::filesystem::exists(path));
}

}  // namespace
}  // namespace kiln
