// CollectGarbage: what goes, in which order, and what never does.

#include <gtest/gtest.h>

#include <filesystem>

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
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestOptions;
using ::testing::IsEmpty;

constexpr int64_t kDay = 86400;
constexpr size_t kBinaryBytes = 100000;

class CacheGcTest : public ::testing::Test {
 protected:
  void SetUp() override {
    PlanCacheOptions options = TestOptions(folder_.path());
    options.clock = [this] { return now_; };
    absl::StatusOr<PlanCache> cache = PlanCache::Open(options);
    ASSERT_OK(cache);
    cache_ = std::make_unique<PlanCache>(*std::move(cache));
  }

  // Made on day `seed`: a program of its own and one that all plans share.
  PlanKey Put(uint64_t seed) {
    now_ = start_ + static_cast<int64_t>(seed) * kDay;
    const Program own = MakeProgram(seed, kBinaryBytes);
    const Program shared = MakeProgram(99, kBinaryBytes);
    EXPECT_OK(cache_->PutPrograms({own, shared}));
    const Plan plan = MakePlan(seed, {own.key.digest, shared.key.digest});
    const PlanKey key = MakeTestPlanKey(plan);
    EXPECT_OK(cache_->PutPlan(key, plan, MakeMeasurements(seed)));
    return key;
  }

  bool HasProgram(uint64_t seed) {
    absl::StatusOr<bool> has =
        cache_->ContainsProgram(MakeProgram(seed).key.digest);
    EXPECT_OK(has);
    return has.ok() && *has;
  }

  std::vector<bool> Has(const std::vector<PlanKey>& keys) {
    std::vector<Digest> digests;
    for (const PlanKey& key : keys) digests.push_back(key.digest);
    absl::StatusOr<std::vector<bool>> has = cache_->ContainsPlans(digests);
    EXPECT_OK(has);
    return *std::move(has);
  }

  ScratchFolder folder_;
  const int64_t start_ = 1'800'000'000;
  int64_t now_ = start_;
  std::unique_ptr<PlanCache> cache_;
};

TEST_F(CacheGcTest, AgeRemovesOldRowsWithWhatOnlyTheyNeed) {
  const std::vector<PlanKey> keys = {Put(1), Put(2), Put(3)};
  ASSERT_OK(cache_->PutReject(MakeReject(1)));
  now_ = start_ + 12 * kDay;
  GcOptions options = {.age_max = 10 * kDay, .dry_run = true};
  now_ += 1;  // day 1 and 2 are older than ten days
  ASSERT_OK_AND_ASSIGN(const GcReport dry, cache_->CollectGarbage(options));
  EXPECT_EQ(Has(keys), (std::vector<bool>{true, true, true}));
  options.dry_run = false;
  ASSERT_OK_AND_ASSIGN(const GcReport report, cache_->CollectGarbage(options));
  EXPECT_EQ(report.removed, dry.removed);
  EXPECT_EQ(report.removed.size(), 4u) << "two plans and their own programs";
  EXPECT_EQ(report.plans_kept, 1u);
  EXPECT_EQ(Has(keys), (std::vector<bool>{false, false, true}));
  EXPECT_FALSE(HasProgram(1));
  EXPECT_FALSE(HasProgram(2));
  EXPECT_TRUE(HasProgram(3));
  EXPECT_TRUE(HasProgram(99)) << "the third plan needs it";
  EXPECT_LT(report.bytes_after, report.bytes_before - 2 * 100000);
  EXPECT_EQ(report.bytes_after, static_cast<int64_t>(std::filesystem::file_size(
                                    folder_.File("index.db"))));
  EXPECT_THAT(cache_->Check(), IsOkAndHolds(IsEmpty()));
}

TEST_F(CacheGcTest, SizeRemovesUnusedProgramsThenTheOldestPlans) {
  const std::vector<PlanKey> keys = {Put(1), Put(2), Put(3)};
  ASSERT_OK(cache_->PutProgram(MakeProgram(50, kBinaryBytes)));  // no plan
  now_ += kDay;
  ASSERT_OK_AND_ASSIGN(const CacheStats before, cache_->Stats());
  ASSERT_OK_AND_ASSIGN(
      const GcReport one,
      cache_->CollectGarbage({.bytes_max = before.bytes - 50000}));
  ASSERT_EQ(one.removed.size(), 1u);
  EXPECT_EQ(one.removed[0].key, MakeProgram(50).key.digest.ToHex());
  EXPECT_EQ(one.removed[0].reason, "size");
  EXPECT_LE(one.bytes_after, before.bytes - 50000);
  ASSERT_OK_AND_ASSIGN(
      const GcReport two,
      cache_->CollectGarbage({.bytes_max = one.bytes_after - 50000}));
  EXPECT_EQ(Has(keys), (std::vector<bool>{false, true, true}));
  EXPECT_FALSE(HasProgram(1));
  EXPECT_LE(two.bytes_after, one.bytes_after - 50000);
  EXPECT_THAT(cache_->Check(), IsOkAndHolds(IsEmpty()));
}

TEST_F(CacheGcTest, WhatIsUsedStays) {
  const std::vector<PlanKey> keys = {Put(1), Put(2), Put(3)};
  now_ = start_ + 100 * kDay;
  ASSERT_OK(cache_->NoteUse({keys[1].digest}));
  now_ += 5 * kDay;
  const GcOptions options = {.age_max = 30 * kDay, .dry_run = true};
  ASSERT_OK_AND_ASSIGN(const GcReport plan, cache_->CollectGarbage(options));
  for (const GcItem& item : plan.removed) {
    EXPECT_NE(item.key, keys[1].digest.ToHex());
  }
  ASSERT_OK(cache_->CollectGarbage({.age_max = 30 * kDay}));
  EXPECT_EQ(Has(keys), (std::vector<bool>{false, true, false}));
  EXPECT_TRUE(HasProgram(2)) << "as old as the others, but needed";
  EXPECT_FALSE(HasProgram(1));
  // By size too: 2 was used after 4 was made.
  now_ -= 100 * kDay;
  const PlanKey newer = Put(4);
  now_ = start_ + 200 * kDay;
  ASSERT_OK_AND_ASSIGN(const CacheStats before, cache_->Stats());
  ASSERT_OK(cache_->CollectGarbage({.bytes_max = before.bytes - 50000}));
  EXPECT_EQ(Has({keys[1], newer}), (std::vector<bool>{true, false}));
}

TEST_F(CacheGcTest, AUseIsWrittenOnceADayAndNotByReaders) {
  const PlanKey key = Put(1);
  const auto uses = [&] {
    absl::StatusOr<CacheStats> stats = cache_->Stats();
    EXPECT_OK(stats);
    for (const TableStats& table : stats->tables) {
      if (table.name == "plan_use") return table.rows;
    }
    return int64_t{-1};
  };
  ASSERT_OK(cache_->NoteUse({key.digest, Sha256("no such plan")}));
  EXPECT_EQ(uses(), 0) << "it was made today";
  now_ += 2 * kDay;
  {
    PlanCacheOptions options =
        TestOptions(folder_.path(), CacheMode::kReadOnly);
    options.clock = [this] { return now_; };
    ASSERT_OK_AND_ASSIGN(PlanCache reader, PlanCache::Open(options));
    EXPECT_OK(reader.NoteUse({key.digest}));
  }
  EXPECT_EQ(uses(), 0);
  ASSERT_OK(cache_->NoteUse({key.digest}));
  EXPECT_EQ(uses(), 1);
  const auto written =
      std::filesystem::last_write_time(folder_.File("index.db"));
  now_ += kDay / 2;
  ASSERT_OK(cache_->NoteUse({key.digest}));
  EXPECT_EQ(std::filesystem::last_write_time(folder_.File("index.db")),
            written);
  // A plan that is replaced begins anew.
  Put(1);
  EXPECT_EQ(uses(), 0);
  EXPECT_THAT(cache_->Check(), IsOkAndHolds(IsEmpty()));
}

TEST_F(CacheGcTest, ADamagedUseIsFoundAndCountsAsNone) {
  const PlanKey key = Put(1);
  now_ += 10 * kDay;
  ASSERT_OK(cache_->NoteUse({key.digest}));
  {
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<Database> database,
                         Database::Open({.path = folder_.File("index.db")}));
    ASSERT_OK(database->Execute("UPDATE plan_use SET used_unix = 9999999999"));
  }
  ASSERT_OK_AND_ASSIGN(const std::vector<CacheFinding> findings,
                       cache_->Check());
  ASSERT_EQ(findings.size(), 1u);
  EXPECT_EQ(findings[0].table, "plan_use");
  EXPECT_EQ(findings[0].key, key.digest.ToHex());
  ASSERT_OK(cache_->Repair());
  EXPECT_THAT(cache_->Check(), IsOkAndHolds(IsEmpty()));
  ASSERT_OK(cache_->CollectGarbage({.age_max = 5 * kDay}));
  EXPECT_EQ(Has({key}), std::vector<bool>{false});
}

TEST_F(CacheGcTest, RootsStayWhateverTheirAgeAndSize) {
  const std::vector<PlanKey> keys = {Put(1), Put(2), Put(3)};
  now_ += 1000 * kDay;
  // The first by its key, the second by the programs of a bundle.
  GcOptions options;
  options.root_plans = {keys[0].digest};
  options.root_programs = {MakeProgram(2).key.digest,
                           MakeProgram(99).key.digest};
  options.age_max = 0;
  options.bytes_max = 0;
  ASSERT_OK(cache_->CollectGarbage(options));
  EXPECT_EQ(Has(keys), (std::vector<bool>{true, true, false}));
  EXPECT_TRUE(HasProgram(1));
  EXPECT_FALSE(HasProgram(3));
}

TEST_F(CacheGcTest, WhatIsNewStays) {
  const PlanKey key = Put(1);
  now_ += kGcGraceSeconds - 1;
  ASSERT_OK_AND_ASSIGN(const GcReport report,
                       cache_->CollectGarbage({.bytes_max = 0, .age_max = 0}));
  EXPECT_THAT(report.removed, IsEmpty());
  EXPECT_EQ(Has({key}), std::vector<bool>{true});
}

TEST_F(CacheGcTest, ABinaryStaysWithTheLastProgramThatHasIt) {
  Program twin = MakeProgram(2, kBinaryBytes);
  twin.binary = MakeProgram(1, kBinaryBytes).binary;
  twin.binary_digest = Sha256(twin.binary);
  ASSERT_OK(cache_->PutProgram(MakeProgram(1, kBinaryBytes)));
  now_ += 10 * kDay;
  ASSERT_OK(cache_->PutProgram(twin));
  now_ += kDay;
  ASSERT_OK_AND_ASSIGN(const GcReport report,
                       cache_->CollectGarbage({.age_max = 5 * kDay}));
  ASSERT_EQ(report.removed.size(), 1u);
  EXPECT_LT(report.removed[0].bytes, 10000) << "the binary did not go";
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> left,
                       cache_->FindProgram(twin.key.digest));
  ASSERT_TRUE(left.has_value());
  EXPECT_EQ(left->binary, twin.binary);
}

TEST_F(CacheGcTest, ReadOnlyAllowsADryRunAlone) {
  Put(1);
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(folder_.path(), CacheMode::kReadOnly));
  EXPECT_OK(cache.CollectGarbage({.age_max = 0, .dry_run = true}));
  EXPECT_THAT(cache.CollectGarbage({.age_max = 0}).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition));
}

}  // namespace
}  // namespace kiln
