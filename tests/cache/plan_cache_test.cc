#include "cache/plan_cache.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cache/checksum.h"
#include "cache/row_codec.h"
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
using ::kiln::testing::SameMeasurements;
using ::kiln::testing::SameProgram;
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestOptions;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class PlanCacheTest : public ::testing::Test {
 protected:
  // A new connection, as another process would open it.
  PlanCache Open(CacheMode mode = CacheMode::kReadWrite) {
    absl::StatusOr<PlanCache> cache =
        PlanCache::Open(TestOptions(folder_.path(), mode));
    EXPECT_OK(cache);
    return *std::move(cache);
  }

  // Changes the file behind the cache's back.
  void Execute(const std::string& sql) {
    absl::StatusOr<std::unique_ptr<Database>> database =
        Database::Open({.path = folder_.File("index.db")});
    ASSERT_OK(database);
    ASSERT_OK((*database)->Execute("PRAGMA foreign_keys = OFF"));
    ASSERT_OK((*database)->Execute(sql));
  }

  int64_t Count(const std::string& table) {
    absl::StatusOr<std::unique_ptr<Database>> database =
        Database::Open({.path = folder_.File("index.db")});
    EXPECT_OK(database);
    return (*database)->QueryInteger("SELECT count(*) FROM " + table).value();
  }

  const ScratchFolder folder_;
};

TEST_F(PlanCacheTest, ReturnsAProgramAsItWasStored) {
  const Program program = MakeProgram(1, 20000);
  {
    PlanCache cache = Open();
    ASSERT_OK(cache.PutProgram(program));
  }
  PlanCache cache = Open();
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                       cache.FindProgram(program.key.digest));
  ASSERT_TRUE(found.has_value());
  EXPECT_TRUE(SameProgram(*found, program));
  EXPECT_THAT(cache.ContainsProgram(program.key.digest), IsOkAndHolds(true));
  EXPECT_THAT(cache.TakeWarnings(), IsEmpty());
}

TEST_F(PlanCacheTest, FindsNothingUnderAnotherKey) {
  PlanCache cache = Open();
  ASSERT_OK(cache.PutProgram(MakeProgram(1)));
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                       cache.FindProgram(MakeProgram(2).key.digest));
  EXPECT_FALSE(found.has_value());
  EXPECT_THAT(cache.ContainsProgram(MakeProgram(2).key.digest),
              IsOkAndHolds(false));
}

TEST_F(PlanCacheTest, StoresAnEmptyBinaryAndLog) {
  Program program = MakeProgram(2, 0);
  program.kernels.clear();
  PlanCache cache = Open();
  ASSERT_OK(cache.PutProgram(program));
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                       cache.FindProgram(program.key.digest));
  ASSERT_TRUE(found.has_value());
  EXPECT_TRUE(SameProgram(*found, program));
}

TEST_F(PlanCacheTest, KeepsALogOfAnyBytes) {
  Program program = MakeProgram(3);
  program.log = std::string("a\0b\xFF\xFE\n", 6);
  PlanCache cache = Open();
  ASSERT_OK(cache.PutProgram(program));
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                       cache.FindProgram(program.key.digest));
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->log, program.log);
}

TEST_F(PlanCacheTest, StoringAnEqualProgramAgainChangesNothing) {
  PlanCache cache = Open();
  Program program = MakeProgram(1);
  ASSERT_OK(cache.PutProgram(program));
  program.compile_seconds = 99;  // provenance may differ
  program.log = "another log";
  ASSERT_OK(cache.PutProgram(program));
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                       cache.FindProgram(program.key.digest));
  EXPECT_EQ(found->compile_seconds, MakeProgram(1).compile_seconds);
  EXPECT_EQ(Count("program"), 1);
  EXPECT_EQ(Count("blob"), 1);
}

TEST_F(PlanCacheTest, TwoBinariesUnderOneKeyAreAnErrorThatNamesBoth) {
  PlanCache cache = Open();
  const Program program = MakeProgram(1);
  ASSERT_OK(cache.PutProgram(program));
  Program other = program;
  other.binary += "x";
  other.binary_digest = Sha256(other.binary);
  // The whole batch fails, the good program in front included.
  const std::vector<Program> batch = {MakeProgram(2), other};
  EXPECT_THAT(cache.PutPrograms(batch),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr(program.key.digest.ToHex()),
                             HasSubstr(program.binary_digest.ToHex()),
                             HasSubstr(other.binary_digest.ToHex()))));
  EXPECT_THAT(cache.ContainsProgram(batch[0].key.digest), IsOkAndHolds(false));
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                       cache.FindProgram(program.key.digest));
  EXPECT_TRUE(SameProgram(*found, program));
}

TEST_F(PlanCacheTest, TwoKernelDescriptionsOfOneBinaryAreAnError) {
  PlanCache cache = Open();
  Program program = MakeProgram(1);
  ASSERT_OK(cache.PutProgram(program));
  program.kernels[0].registers += 1;
  EXPECT_THAT(
      cache.PutProgram(program),
      StatusIs(absl::StatusCode::kDataLoss, HasSubstr("kernel descriptions")));
}

TEST_F(PlanCacheTest, RefusesAProgramWhoseDigestsAreWrong) {
  PlanCache cache = Open();
  Program program = MakeProgram(1);
  program.binary += "x";
  EXPECT_THAT(cache.PutProgram(program),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("stated as")));
  program = MakeProgram(1);
  program.key.preimage += "x";
  EXPECT_THAT(cache.PutProgram(program),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("pre-image")));
  EXPECT_EQ(Count("program"), 0);
}

TEST_F(PlanCacheTest, EqualBinariesOfTwoKeysAreStoredOnce) {
  PlanCache cache = Open();
  const Program first = MakeProgram(1);
  Program second = MakeProgram(2);
  second.binary = first.binary;
  second.binary_digest = first.binary_digest;
  ASSERT_OK(cache.PutPrograms({first, second}));
  EXPECT_EQ(Count("program"), 2);
  EXPECT_EQ(Count("blob"), 1);
}

TEST_F(PlanCacheTest, FindProgramsAnswersInOrder) {
  PlanCache cache = Open();
  ASSERT_OK(cache.PutPrograms({MakeProgram(1), MakeProgram(3)}));
  ASSERT_OK_AND_ASSIGN(
      const std::vector<std::optional<Program>> found,
      cache.FindPrograms({MakeProgram(3).key.digest, MakeProgram(2).key.digest,
                          MakeProgram(1).key.digest}));
  ASSERT_EQ(found.size(), 3u);
  EXPECT_TRUE(SameProgram(*found[0], MakeProgram(3)));
  EXPECT_FALSE(found[1].has_value());
  EXPECT_TRUE(SameProgram(*found[2], MakeProgram(1)));
}

TEST_F(PlanCacheTest, RemembersARejectWithItsLogAndProvenance) {
  Reject reject = MakeReject(1);
  {
    PlanCache cache = Open();
    ASSERT_OK(cache.PutReject(reject));
  }
  PlanCache cache = Open();
  ASSERT_OK_AND_ASSIGN(const std::optional<Reject> found,
                       cache.FindReject(reject.key));
  ASSERT_TRUE(found.has_value());
  reject.provenance = {.created_unix = 1'800'000'000,
                       .host_name = "build-host",
                       .device_name = "Test Device",
                       .tool_version = "0.1.0"};
  EXPECT_EQ(*found, reject);
}

TEST_F(PlanCacheTest, ANewerRejectReplacesTheOlder) {
  PlanCache cache = Open();
  Reject reject = MakeReject(1);
  ASSERT_OK(cache.PutReject(reject));
  reject.stage = RejectStage::kInspect;
  reject.reason = "spills 64 B";
  ASSERT_OK(cache.PutReject(reject));
  ASSERT_OK_AND_ASSIGN(const std::optional<Reject> found,
                       cache.FindReject(reject.key));
  EXPECT_EQ(found->stage, RejectStage::kInspect);
  EXPECT_EQ(found->reason, "spills 64 B");
  EXPECT_EQ(Count("reject"), 1);
}

TEST_F(PlanCacheTest, AProgramEndsTheRejectOfItsKey) {
  PlanCache cache = Open();
  const Program program = MakeProgram(1);
  Reject reject = MakeReject(1);
  reject.key = program.key.digest;
  reject.preimage = program.key.preimage;
  ASSERT_OK(cache.PutReject(reject));
  ASSERT_OK(cache.PutProgram(program));
  ASSERT_OK_AND_ASSIGN(std::optional<Reject> found,
                       cache.FindReject(reject.key));
  EXPECT_FALSE(found.has_value());
  // And a late reject, of a slower process, does not come back.
  ASSERT_OK(cache.PutReject(reject));
  ASSERT_OK_AND_ASSIGN(found, cache.FindReject(reject.key));
  EXPECT_FALSE(found.has_value());
}

TEST_F(PlanCacheTest, ARejectOfACandidateNeedsNoPreimage) {
  PlanCache cache = Open();
  Reject reject = MakeReject(1);
  reject.preimage = "";
  reject.key = Sha256("candidate");
  EXPECT_THAT(cache.PutReject(reject), StatusIs(absl::StatusCode::kInternal));
  reject.stage = RejectStage::kVerify;
  EXPECT_OK(cache.PutReject(reject));
  ASSERT_OK_AND_ASSIGN(const std::optional<Reject> found,
                       cache.FindReject(reject.key));
  EXPECT_EQ(found->stage, RejectStage::kVerify);
}

TEST_F(PlanCacheTest, ReturnsAPlanWithItsProvenanceAndEverySample) {
  const Program program = MakeProgram(1);
  const Plan plan = MakePlan(1, {program.key.digest});
  const PlanKey key = MakeTestPlanKey(plan);
  {
    PlanCache cache = Open();
    ASSERT_OK(cache.PutProgram(program));
    ASSERT_OK(cache.PutPlan(key, plan, MakeMeasurements(1)));
  }
  PlanCache cache = Open();
  ASSERT_OK_AND_ASSIGN(const std::optional<StoredPlan> found,
                       cache.FindPlan(key.digest));
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->plan, plan);
  EXPECT_EQ(found->key, key);
  EXPECT_EQ(found->provenance.created_unix, 1'800'000'000);
  EXPECT_EQ(found->provenance.host_name, "build-host");
  EXPECT_EQ(found->provenance.device_name, "Test Device");
  EXPECT_EQ(found->provenance.tool_version, "0.1.0");
  ASSERT_OK_AND_ASSIGN(const std::vector<Measurement> measurements,
                       cache.LoadMeasurements(key.digest));
  EXPECT_TRUE(SameMeasurements(measurements, MakeMeasurements(1)));
}

TEST_F(PlanCacheTest, RefusesAPlanWhoseProgramIsMissing) {
  PlanCache cache = Open();
  const Plan plan = MakePlan(1, {MakeProgram(1).key.digest});
  EXPECT_THAT(cache.PutPlan(MakeTestPlanKey(plan), plan, {}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr(MakeProgram(1).key.digest.ToHex())));
}

TEST_F(PlanCacheTest, RefusesAPlanThatIsNotWhole) {
  PlanCache cache = Open();
  ASSERT_OK(cache.PutProgram(MakeProgram(1)));
  Plan plan = MakePlan(1, {MakeProgram(1).key.digest});
  plan.body.steps[0].program = 1;
  EXPECT_THAT(cache.PutPlan(MakeTestPlanKey(plan), plan, {}),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("program 1")));
  plan = MakePlan(1, {MakeProgram(1).key.digest});
  plan.evidence.median_ns = std::nan("");
  EXPECT_THAT(cache.PutPlan(MakeTestPlanKey(plan), plan, {}),
              StatusIs(absl::StatusCode::kInternal));
  EXPECT_EQ(Count("plan"), 0);
}

TEST_F(PlanCacheTest, ANewMeasuredPlanReplacesTheOldWithItsEvidence) {
  PlanCache cache = Open();
  ASSERT_OK(cache.PutPrograms({MakeProgram(1), MakeProgram(2)}));
  const Plan old = MakePlan(1, {MakeProgram(1).key.digest});
  const PlanKey key = MakeTestPlanKey(old);
  ASSERT_OK(cache.PutPlan(key, old, MakeMeasurements(1)));
  Plan fresh = MakePlan(1, {MakeProgram(2).key.digest});
  fresh.evidence.median_ns = 1;
  ASSERT_OK(cache.PutPlan(key, fresh, {}));
  ASSERT_OK_AND_ASSIGN(const std::optional<StoredPlan> found,
                       cache.FindPlan(key.digest));
  EXPECT_EQ(found->plan, fresh);
  EXPECT_EQ(Count("plan"), 1);
  EXPECT_EQ(Count("measurement"), 0);
  EXPECT_EQ(Count("plan_program"), 1);
}

TEST_F(PlanCacheTest, APredictedPlanNeverReplacesAMeasuredOne) {
  PlanCache cache = Open();
  ASSERT_OK(cache.PutProgram(MakeProgram(1)));
  const Plan measured = MakePlan(1, {MakeProgram(1).key.digest});
  Plan predicted = measured;
  predicted.evidence = {};
  const PlanKey key = MakeTestPlanKey(measured);
  ASSERT_OK(cache.PutPlan(key, predicted, {}));
  ASSERT_OK(cache.PutPlan(key, measured, MakeMeasurements(1)));
  ASSERT_OK(cache.PutPlan(key, predicted, {}));
  ASSERT_OK_AND_ASSIGN(const std::optional<StoredPlan> found,
                       cache.FindPlan(key.digest));
  EXPECT_EQ(found->plan, measured);
  EXPECT_EQ(Count("measurement"), 3);
}

TEST_F(PlanCacheTest, PutPlansStoresAllOrNone) {
  PlanCache cache = Open();
  std::vector<NewPlan> plans;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    ASSERT_OK(cache.PutProgram(MakeProgram(seed)));
    const Plan plan = MakePlan(seed, {MakeProgram(seed).key.digest});
    plans.push_back({.key = MakeTestPlanKey(plan),
                     .plan = plan,
                     .measurements = MakeMeasurements(seed)});
  }
  const Plan broken = MakePlan(4, {MakeProgram(4).key.digest});
  plans.push_back({.key = MakeTestPlanKey(broken), .plan = broken});
  EXPECT_THAT(cache.PutPlans(plans),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr(MakeProgram(4).key.digest.ToHex())));
  EXPECT_EQ(Count("plan"), 0);
  plans.pop_back();
  ASSERT_OK(cache.PutPlans(plans));
  EXPECT_EQ(Count("plan"), 3);
  ASSERT_OK_AND_ASSIGN(const std::vector<Measurement> measurements,
                       cache.LoadMeasurements(plans[1].key.digest));
  EXPECT_TRUE(SameMeasurements(measurements, MakeMeasurements(2)));
}

TEST_F(PlanCacheTest, ListsPlansByKey) {
  PlanCache cache = Open();
  ASSERT_OK(cache.PutProgram(MakeProgram(1)));
  for (uint64_t seed = 0; seed < 5; ++seed) {
    const Plan plan = MakePlan(seed, {MakeProgram(1).key.digest});
    ASSERT_OK(cache.PutPlan(MakeTestPlanKey(plan), plan, {}));
  }
  ASSERT_OK_AND_ASSIGN(const std::vector<StoredPlan> plans, cache.ListPlans());
  ASSERT_EQ(plans.size(), 5u);
  for (size_t i = 1; i < plans.size(); ++i) {
    EXPECT_LT(plans[i - 1].key.digest, plans[i].key.digest);
  }
}

TEST_F(PlanCacheTest, ContainsPlansWantsTheRowWholeAndItsProgramsThere) {
  PlanCache cache = Open();
  std::vector<Digest> keys;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    ASSERT_OK(cache.PutProgram(MakeProgram(seed)));
    const Plan plan = MakePlan(seed, {MakeProgram(seed).key.digest});
    keys.push_back(MakeTestPlanKey(plan).digest);
    ASSERT_OK(cache.PutPlan(MakeTestPlanKey(plan), plan, {}));
  }
  keys.push_back(Sha256("unknown"));
  EXPECT_THAT(cache.ContainsPlans(keys),
              IsOkAndHolds(ElementsAre(true, true, true, true, false)));
  Execute(
      "DELETE FROM program WHERE id = 2;"
      "UPDATE plan SET tool_version = '' WHERE id = 3;"
      "UPDATE plan SET preimage = x'' WHERE id = 4");
  EXPECT_THAT(cache.ContainsPlans(keys),
              IsOkAndHolds(ElementsAre(true, false, false, false, false)));
  EXPECT_EQ(cache.TakeWarnings().size(), 2u);
  EXPECT_EQ(Count("quarantine"), 2);
  EXPECT_EQ(Count("plan"), 2);
}

TEST_F(PlanCacheTest, MeasurementsOfAnUnknownPlanAreNotFound) {
  PlanCache cache = Open();
  EXPECT_THAT(cache.LoadMeasurements(Sha256("x")),
              StatusIs(absl::StatusCode::kNotFound));
}

TEST_F(PlanCacheTest, FindProgramsMissesWhatIsDamagedAndFindsTheRest) {
  PlanCache cache = Open();
  std::vector<Digest> keys;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    ASSERT_OK(cache.PutProgram(MakeProgram(seed)));
    keys.push_back(MakeProgram(seed).key.digest);
  }
  Execute(
      "UPDATE blob SET data = zeroblob(3000) WHERE id = 1;"
      "UPDATE program SET log = 'x' WHERE id = 3");
  ASSERT_OK_AND_ASSIGN(const std::vector<std::optional<Program>> found,
                       cache.FindPrograms(keys));
  ASSERT_EQ(found.size(), 4u);
  EXPECT_FALSE(found[0].has_value());
  EXPECT_TRUE(SameProgram(*found[1], MakeProgram(1)));
  EXPECT_FALSE(found[2].has_value());
  EXPECT_TRUE(SameProgram(*found[3], MakeProgram(3)));
  EXPECT_THAT(
      cache.TakeWarnings(),
      ElementsAre(
          AllOf(HasSubstr(keys[0].ToHex()), HasSubstr("binary has digest"),
                HasSubstr("quarantine")),
          AllOf(HasSubstr(keys[2].ToHex()), HasSubstr("row's digest"),
                HasSubstr("quarantine"))));
  EXPECT_EQ(Count("quarantine"), 3);  // the blob, its program and the other
  EXPECT_EQ(Count("program"), 2);
}

TEST_F(PlanCacheTest, DamagedBinaryBecomesAMissAndGoesToQuarantine) {
  PlanCache cache = Open();
  const Program program = MakeProgram(1);
  Program twin = MakeProgram(2);  // other key, same bytes
  twin.binary = program.binary;
  twin.binary_digest = program.binary_digest;
  ASSERT_OK(cache.PutPrograms({program, twin, MakeProgram(3)}));
  Execute("UPDATE blob SET data = zeroblob(3000) WHERE id = 1");
  ASSERT_OK_AND_ASSIGN(std::optional<Program> found,
                       cache.FindProgram(program.key.digest));
  EXPECT_FALSE(found.has_value());
  EXPECT_THAT(cache.TakeWarnings(),
              ElementsAre(AllOf(HasSubstr(program.key.digest.ToHex()),
                                HasSubstr("binary has digest"),
                                HasSubstr("quarantine"))));
  ASSERT_OK_AND_ASSIGN(found, cache.FindProgram(twin.key.digest));
  EXPECT_FALSE(found.has_value());
  ASSERT_OK_AND_ASSIGN(found, cache.FindProgram(MakeProgram(3).key.digest));
  EXPECT_TRUE(found.has_value());
  EXPECT_EQ(Count("quarantine"), 3);  // the blob and both programs
  EXPECT_EQ(Count("blob"), 1);
  // Compiled again, it is as new.
  ASSERT_OK(cache.PutPrograms({program, twin}));
  ASSERT_OK_AND_ASSIGN(found, cache.FindProgram(program.key.digest));
  EXPECT_TRUE(SameProgram(*found, program));
  EXPECT_THAT(cache.Check(), IsOkAndHolds(IsEmpty()));
}

TEST_F(PlanCacheTest, ADamagedChecksumIsAMiss) {
  PlanCache cache = Open();
  const Program program = MakeProgram(1);
  const Plan plan = MakePlan(1, {program.key.digest});
  const PlanKey key = MakeTestPlanKey(plan);
  ASSERT_OK(cache.PutProgram(program));
  ASSERT_OK(cache.PutPlan(key, plan, {}));
  Execute(
      "UPDATE program SET checksum = zeroblob(16);"
      "UPDATE plan SET checksum = zeroblob(16)");
  ASSERT_OK_AND_ASSIGN(const std::vector<CacheFinding> findings, cache.Check());
  ASSERT_EQ(findings.size(), 2u);
  EXPECT_THAT(findings[0].problem, HasSubstr("does not match its checksum"));
  EXPECT_THAT(findings[1].problem, HasSubstr("does not match its checksum"));
  {
    PlanCache reader = Open(CacheMode::kReadOnly);
    EXPECT_THAT(reader.ContainsPlans({key.digest}),
                IsOkAndHolds(ElementsAre(false)));
  }
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> no_program,
                       cache.FindProgram(program.key.digest));
  EXPECT_FALSE(no_program.has_value());
  ASSERT_OK_AND_ASSIGN(const std::optional<StoredPlan> no_plan,
                       cache.FindPlan(key.digest));
  EXPECT_FALSE(no_plan.has_value());
  EXPECT_EQ(Count("quarantine"), 2);
}

TEST_F(PlanCacheTest, RowsWithoutAChecksumAreHeldAgainstTheirDigests) {
  PlanCache cache = Open();
  std::vector<Digest> keys;
  std::vector<Digest> plans;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    ASSERT_OK(cache.PutProgram(MakeProgram(seed)));
    keys.push_back(MakeProgram(seed).key.digest);
    const Plan plan = MakePlan(seed, {keys[0]});
    ASSERT_OK(cache.PutPlan(MakeTestPlanKey(plan), plan, {}));
    plans.push_back(MakeTestPlanKey(plan).digest);
  }
  Execute(
      "UPDATE program SET checksum = NULL; UPDATE plan SET checksum = NULL");
  ASSERT_OK_AND_ASSIGN(std::vector<std::optional<Program>> programs,
                       cache.FindPrograms(keys));
  for (uint64_t seed = 0; seed < 4; ++seed) {
    EXPECT_TRUE(SameProgram(*programs[seed], MakeProgram(seed)));
  }
  EXPECT_THAT(cache.ContainsPlans(plans),
              IsOkAndHolds(ElementsAre(true, true, true, true)));
  EXPECT_THAT(cache.Check(), IsOkAndHolds(IsEmpty()));
  Execute(
      "UPDATE program SET log = 'x' WHERE id = 2;"
      "UPDATE program SET preimage = x'' WHERE id = 3;"
      "UPDATE blob SET data = zeroblob(3000) WHERE id = 4;"
      "UPDATE plan SET tool_version = '' WHERE id = 2;"
      "UPDATE plan SET preimage = x'' WHERE id = 3");
  ASSERT_OK_AND_ASSIGN(programs, cache.FindPrograms(keys));
  EXPECT_TRUE(programs[0].has_value());
  for (size_t i = 1; i < 4; ++i) EXPECT_FALSE(programs[i].has_value()) << i;
  ASSERT_OK_AND_ASSIGN(const auto found, cache.FindPlans(plans));
  EXPECT_TRUE(found[0].has_value() && found[3].has_value());
  EXPECT_FALSE(found[1].has_value() || found[2].has_value());
}

// A look-up trusts the checksum; what a cache gives away or declares sound is
// held against every SHA-256. Here somebody changed a row and fitted its
// checksum, but not its digest.
TEST_F(PlanCacheTest, CheckAndMergeHoldRowsAgainstTheirDigests) {
  PlanCache cache = Open();
  Program program = MakeProgram(1);
  ASSERT_OK(cache.PutProgram(program));
  {
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<Database> database,
                         Database::Open({.path = folder_.File("index.db")}));
    ASSERT_OK_AND_ASSIGN(
        Statement select,
        database->Prepare("SELECT kernels, created_unix, host_name, "
                          "device_name, tool_version, row_digest "
                          "FROM program"));
    ASSERT_THAT(select.Step(), IsOkAndHolds(true));
    const std::string target = program.target.ToString();
    const std::string encoded = EncodeRow(
        ProgramColumns{.key = program.key.digest.AsBytes(),
                       .target = target,
                       .toolchain_name = program.toolchain.name,
                       .toolchain_version = program.toolchain.version,
                       .toolchain_content = program.toolchain.content.AsBytes(),
                       .binary_digest = program.binary_digest.AsBytes(),
                       .kernels = select.Bytes(0),
                       .log = "forged",
                       .compile_seconds = program.compile_seconds,
                       .provenance = {.created_unix = select.Integer(1),
                                      .host_name = select.Bytes(2),
                                      .device_name = select.Bytes(3),
                                      .tool_version = select.Bytes(4)}});
    const Checksum checksum = ChecksumOf(
        {encoded, select.Bytes(5), program.key.preimage, program.binary});
    ASSERT_OK_AND_ASSIGN(
        Statement update,
        database->Prepare("UPDATE program SET log = 'forged', checksum = ?1"));
    update.BindBlob(1, checksum.AsBytes());
    // The reader's lock would be in the way.
    { const Statement done = std::move(select); }
    ASSERT_OK(update.Run());
  }
  program.log = "forged";
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                       cache.FindProgram(program.key.digest));
  ASSERT_TRUE(found.has_value());
  EXPECT_TRUE(SameProgram(*found, program));

  ASSERT_OK_AND_ASSIGN(const std::vector<CacheFinding> findings, cache.Check());
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_THAT(findings[0].problem, HasSubstr("row's digest"));
  const ScratchFolder other;
  ASSERT_OK_AND_ASSIGN(PlanCache joined,
                       PlanCache::Open(TestOptions(other.path())));
  ASSERT_OK_AND_ASSIGN(const MergeReport report, joined.MergeFrom(&cache, {}));
  ASSERT_EQ(report.skipped.size(), 1u);
  EXPECT_THAT(report.skipped[0].problem, HasSubstr("row's digest"));
  EXPECT_EQ(report.programs_added, 0u);
}

TEST_F(PlanCacheTest, PutReplacesADamagedCopyUnasked) {
  PlanCache cache = Open();
  const Program program = MakeProgram(1);
  ASSERT_OK(cache.PutProgram(program));
  Execute("UPDATE program SET log = 'forged'");
  ASSERT_OK(cache.PutProgram(program));
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                       cache.FindProgram(program.key.digest));
  EXPECT_TRUE(SameProgram(*found, program));
  EXPECT_EQ(Count("quarantine"), 1);
}

TEST_F(PlanCacheTest, PutMendsABinaryThatAnotherProgramShares) {
  PlanCache cache = Open();
  const Program program = MakeProgram(1);
  Program twin = MakeProgram(2);
  twin.binary = program.binary;
  twin.binary_digest = program.binary_digest;
  ASSERT_OK(cache.PutProgram(program));
  Execute("UPDATE blob SET data = x'00'");
  ASSERT_OK(cache.PutProgram(twin));
  EXPECT_THAT(cache.TakeWarnings(), ElementsAre(HasSubstr("replaced")));
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                       cache.FindProgram(program.key.digest));
  EXPECT_TRUE(SameProgram(*found, program));
}

struct ForgeryCase {
  const char* name;
  const char* sql;
};

class ForgeryTest : public PlanCacheTest,
                    public ::testing::WithParamInterface<ForgeryCase> {};

TEST_P(ForgeryTest, AChangedColumnIsSeenByReadersAndCheck) {
  const Program program = MakeProgram(1);
  const Reject reject = MakeReject(1);
  const Plan plan = MakePlan(1, {program.key.digest});
  const PlanKey key = MakeTestPlanKey(plan);
  {
    PlanCache cache = Open();
    ASSERT_OK(cache.PutProgram(program));
    ASSERT_OK(cache.PutReject(reject));
    ASSERT_OK(cache.PutPlan(key, plan, MakeMeasurements(1)));
  }
  Execute(GetParam().sql);
  {
    PlanCache cache = Open(CacheMode::kReadOnly);
    ASSERT_OK_AND_ASSIGN(const std::vector<CacheFinding> findings,
                         cache.Check());
    EXPECT_FALSE(findings.empty());
  }
  PlanCache cache = Open();
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> found_program,
                       cache.FindProgram(program.key.digest));
  ASSERT_OK_AND_ASSIGN(const std::optional<Reject> found_reject,
                       cache.FindReject(reject.key));
  ASSERT_OK_AND_ASSIGN(const std::optional<StoredPlan> found_plan,
                       cache.FindPlan(key.digest));
  const absl::StatusOr<std::vector<Measurement>> measurements =
      cache.LoadMeasurements(key.digest);
  EXPECT_TRUE(!found_program || !found_reject || !found_plan ||
              !measurements.ok());
  EXPECT_EQ(cache.TakeWarnings().size(), 1u);
  EXPECT_GE(Count("quarantine"), 1);
}

INSTANTIATE_TEST_SUITE_P(
    Columns, ForgeryTest,
    ::testing::Values(
        ForgeryCase{"ProgramTarget", "UPDATE program SET target = 'sm_90'"},
        ForgeryCase{"ProgramKernels",
                    "UPDATE program SET kernels = replace(kernels, '64', "
                    "'65') || ''; UPDATE program SET kernels = kernels || 'x'"},
        ForgeryCase{"ProgramVersion",
                    "UPDATE program SET toolchain_version = '13.1'"},
        ForgeryCase{"ProgramPreimage", "UPDATE program SET preimage = x'00'"},
        ForgeryCase{"ProgramSeconds", "UPDATE program SET compile_seconds = 0"},
        ForgeryCase{"ProgramHost", "UPDATE program SET host_name = ''"},
        ForgeryCase{"ProgramBinaryMissing", "DELETE FROM blob"},
        ForgeryCase{"RejectReason", "UPDATE reject SET reason = 'x'"},
        ForgeryCase{"RejectStage", "UPDATE reject SET stage = 'race'"},
        ForgeryCase{"PlanText",
                    "UPDATE plan SET plan = replace(plan, '49152', '49153')"},
        ForgeryCase{"PlanPreimage", "UPDATE plan SET preimage = x'00'"},
        ForgeryCase{"PlanCount", "UPDATE plan SET measurements = 2"},
        ForgeryCase{"PlanClock", "UPDATE plan SET created_unix = 1"},
        ForgeryCase{"SampleBytes",
                    "UPDATE measurement SET samples = zeroblob(300) "
                    "WHERE position = 0"},
        ForgeryCase{"Regret", "UPDATE measurement SET regret = NULL"},
        ForgeryCase{"LostMeasurement",
                    "DELETE FROM measurement WHERE position = 2"},
        ForgeryCase{"MiddleMeasurement",
                    "DELETE FROM measurement WHERE position = 1"}),
    [](const auto& test) { return std::string(test.param.name); });

TEST_F(PlanCacheTest, ReadOnlyReportsDamageAndLeavesItInPlace) {
  const Program program = MakeProgram(1);
  Open().PutProgram(program).IgnoreError();
  Execute("UPDATE blob SET data = x'00'");
  PlanCache cache = Open(CacheMode::kReadOnly);
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                       cache.FindProgram(program.key.digest));
  EXPECT_FALSE(found.has_value());
  EXPECT_THAT(cache.TakeWarnings(), ElementsAre(HasSubstr("left in place")));
  EXPECT_EQ(Count("quarantine"), 0);
  EXPECT_EQ(Count("program"), 1);
}

TEST_F(PlanCacheTest, ReadOnlyRefusesToStore) {
  { PlanCache cache = Open(); }
  PlanCache cache = Open(CacheMode::kReadOnly);
  const auto read_only =
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("read-only"));
  EXPECT_THAT(cache.PutProgram(MakeProgram(1)), read_only);
  EXPECT_THAT(cache.PutReject(MakeReject(1)), read_only);
  const Plan plan = MakePlan(1, {});
  EXPECT_THAT(cache.PutPlan(MakeTestPlanKey(plan), plan, {}), read_only);
  EXPECT_THAT(cache.Repair().status(), read_only);
  EXPECT_OK(cache.PutMemo("key", "value"));
}

TEST_F(PlanCacheTest, OffKeepsEverythingInMemory) {
  PlanCache cache = Open(CacheMode::kOff);
  const Program program = MakeProgram(1);
  ASSERT_OK(cache.PutProgram(program));
  const Plan plan = MakePlan(1, {program.key.digest});
  ASSERT_OK(cache.PutPlan(MakeTestPlanKey(plan), plan, MakeMeasurements(1)));
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                       cache.FindProgram(program.key.digest));
  EXPECT_TRUE(SameProgram(*found, program));
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
  EXPECT_EQ(cache.path(), "");
}

TEST_F(PlanCacheTest, MemoKeepsOpaqueBytesUntilTheyAreDamaged) {
  const std::string key("path\0stamp", 10);
  const std::string value("a\0b", 3);
  {
    PlanCache cache = Open();
    EXPECT_THAT(cache.FindMemo(key),
                IsOkAndHolds(std::optional<std::string>()));
    ASSERT_OK(cache.PutMemo(key, "older"));
    ASSERT_OK(cache.PutMemo(key, value));
  }
  PlanCache cache = Open();
  EXPECT_THAT(cache.FindMemo(key), IsOkAndHolds(std::optional(value)));
  EXPECT_THAT(cache.FindMemo("path"),
              IsOkAndHolds(std::optional<std::string>()));
  Execute("UPDATE memo SET value = x'00'");
  EXPECT_THAT(cache.FindMemo(key), IsOkAndHolds(std::optional<std::string>()));
  EXPECT_THAT(cache.TakeWarnings(), ElementsAre(HasSubstr("memo")));
  ASSERT_OK_AND_ASSIGN(const auto findings, cache.Check());
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].table, "memo");
  ASSERT_OK(cache.PutMemo(key, value));
  EXPECT_THAT(cache.FindMemo(key), IsOkAndHolds(std::optional(value)));
}

TEST_F(PlanCacheTest, StatsCountRowsAndBytesOfEachTable) {
  PlanCache cache = Open();
  ASSERT_OK(cache.PutPrograms({MakeProgram(1, 50000), MakeProgram(2, 50000)}));
  ASSERT_OK(cache.PutReject(MakeReject(1)));
  ASSERT_OK_AND_ASSIGN(const CacheStats stats, cache.Stats());
  EXPECT_EQ(stats.path, folder_.File("index.db"));
  EXPECT_EQ(stats.schema_version, kCacheSchemaVersion);
  EXPECT_EQ(stats.bytes,
            static_cast<int64_t>(std::filesystem::file_size(stats.path)));
  ASSERT_EQ(stats.tables.size(), 10u);
  EXPECT_EQ(stats.tables[0].name, "blob");
  EXPECT_EQ(stats.tables[0].rows, 2);
  EXPECT_GT(stats.tables[0].bytes, 100000);
  EXPECT_EQ(stats.tables[7].name, "program");
  EXPECT_EQ(stats.tables[7].rows, 2);
  EXPECT_LT(stats.tables[7].bytes, 50000);
  int64_t sum = 0;
  for (const TableStats& table : stats.tables) sum += table.bytes;
  EXPECT_LE(sum, stats.bytes);
}

TEST_F(PlanCacheTest, CheckFindsAPlanWhoseProgramIsGone) {
  PlanCache cache = Open();
  const Program program = MakeProgram(1);
  const Plan plan = MakePlan(1, {program.key.digest});
  ASSERT_OK(cache.PutProgram(program));
  ASSERT_OK(cache.PutPlan(MakeTestPlanKey(plan), plan, MakeMeasurements(1)));
  EXPECT_THAT(cache.Check(), IsOkAndHolds(IsEmpty()));
  Execute("DELETE FROM program");
  EXPECT_THAT(
      cache.Check(),
      IsOkAndHolds(ElementsAre(CacheFinding{
          .table = "plan",
          .key = MakeTestPlanKey(plan).digest.ToHex(),
          .problem = absl::StrCat("program ", program.key.digest.ToHex(),
                                  " is missing")})));
}

TEST_F(PlanCacheTest, CheckComparesTheProgramListWithThePlansText) {
  PlanCache cache = Open();
  const Program program = MakeProgram(1);
  const Plan plan = MakePlan(1, {program.key.digest});
  ASSERT_OK(cache.PutProgram(program));
  ASSERT_OK(cache.PutPlan(MakeTestPlanKey(plan), plan, {}));
  Execute("UPDATE plan_program SET program_key = zeroblob(32)");
  ASSERT_OK_AND_ASSIGN(const std::vector<CacheFinding> findings, cache.Check());
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].table, "plan_program");
}

TEST_F(PlanCacheTest, RepairKeepsWholeRowsAndDropsTheRest) {
  PlanCache cache = Open();
  const Plan plan = MakePlan(1, {MakeProgram(1).key.digest});
  ASSERT_OK(cache.PutPrograms({MakeProgram(1), MakeProgram(2)}));
  ASSERT_OK(cache.PutReject(MakeReject(1)));
  ASSERT_OK(cache.PutPlan(MakeTestPlanKey(plan), plan, MakeMeasurements(1)));
  Execute(
      "UPDATE program SET log = 'forged' WHERE id = 2;"
      "DELETE FROM plan_program");
  ASSERT_OK_AND_ASSIGN(const RepairReport report, cache.Repair());
  EXPECT_EQ(report.dropped.size(), 1u);
  EXPECT_THAT(cache.Check(), IsOkAndHolds(IsEmpty()));
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> first,
                       cache.FindProgram(MakeProgram(1).key.digest));
  EXPECT_TRUE(SameProgram(*first, MakeProgram(1)));
  EXPECT_THAT(cache.ContainsProgram(MakeProgram(2).key.digest),
              IsOkAndHolds(false));
  ASSERT_OK_AND_ASSIGN(const std::vector<Measurement> measurements,
                       cache.LoadMeasurements(MakeTestPlanKey(plan).digest));
  EXPECT_TRUE(SameMeasurements(measurements, MakeMeasurements(1)));
  // Another process can go on, and this one too.
  ASSERT_OK(Open().PutProgram(MakeProgram(5)));
  ASSERT_OK(cache.PutProgram(MakeProgram(6)));
}

}  // namespace
}  // namespace kiln
