// Flips bytes of index.db and of plan texts. Whatever the damage: no crash, and
// a value that comes back is the value that was stored.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "absl/strings/str_cat.h"
#include "cache/plan_cache.h"
#include "cache/row_codec.h"
#include "cache/sqlite_db.h"
#include "tests/cache/cache_fixture.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::FullTest;
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
using ::kiln::testing::TestOptions;

constexpr uint64_t kPrograms = 6;
constexpr uint64_t kPlans = 4;
constexpr uint64_t kRejects = 3;

class CacheDamageTest : public ::testing::Test {
 protected:
  // Thousands of commits: in memory, where they need no disk to sync.
  static void SetUpTestSuite() {
    if (access("/dev/shm", W_OK) == 0) setenv("TMPDIR", "/dev/shm", 0);
  }

  void SetUp() override {
    for (uint64_t i = 0; i < kPrograms; ++i) {
      programs_.push_back(MakeProgram(i, 1500 + 900 * i));
    }
    for (uint64_t i = 0; i < kRejects; ++i) rejects_.push_back(MakeReject(i));
    for (uint64_t i = 0; i < kPlans; ++i) {
      plans_.push_back(
          MakePlan(i, {programs_[i].key.digest, programs_[i + 1].key.digest}));
    }
    Store();
    whole_ = ReadTestFile(folder_.File("index.db"));
  }

  void Store() {
    absl::StatusOr<PlanCache> cache =
        PlanCache::Open(TestOptions(folder_.path()));
    ASSERT_OK(cache);
    ASSERT_OK(cache->PutPrograms(programs_));
    ASSERT_OK(cache->PutRejects(rejects_));
    for (uint64_t i = 0; i < kPlans; ++i) {
      ASSERT_OK(cache->PutPlan(MakeTestPlanKey(plans_[i]), plans_[i],
                               MakeMeasurements(i)));
    }
  }

  void WriteFile(const std::string& bytes) {
    std::filesystem::remove(folder_.File("index.db-journal"));
    std::ofstream out(folder_.File("index.db"), std::ios::binary);
    out << bytes;
    ASSERT_TRUE(out.flush().good());
  }

  // What reading everything gave.
  struct Tally {
    int exact = 0;
    int missing = 0;
    int errors = 0;
    int wrong = 0;
  };

  static void Count(const absl::Status& status, bool found, bool same,
                    Tally* tally) {
    if (!status.ok()) {
      ++tally->errors;
    } else if (!found) {
      ++tally->missing;
    } else {
      ++(same ? tally->exact : tally->wrong);
    }
  }

  Tally ReadAll(PlanCache* cache) {
    Tally tally;
    std::vector<Digest> keys;
    for (const Program& program : programs_) {
      keys.push_back(program.key.digest);
    }
    // Counted below; here only what is wrong.
    if (const auto found = cache->FindPrograms(keys); found.ok()) {
      for (size_t i = 0; i < keys.size(); ++i) {
        const std::optional<Program>& program = (*found)[i];
        if (program.has_value() && !SameProgram(*program, programs_[i])) {
          ++tally.wrong;
        }
      }
    }
    for (const Program& program : programs_) {
      const auto found = cache->FindProgram(program.key.digest);
      const bool any = found.ok() && found->has_value();
      Count(found.status(), any, any && SameProgram(**found, program), &tally);
    }
    for (Reject reject : rejects_) {
      const auto found = cache->FindReject(reject.key);
      const bool any = found.ok() && found->has_value();
      if (any) reject.provenance = (*found)->provenance;
      Count(found.status(), any, any && **found == reject, &tally);
    }
    for (uint64_t i = 0; i < kPlans; ++i) {
      const Digest key = MakeTestPlanKey(plans_[i]).digest;
      const auto found = cache->FindPlan(key);
      const bool any = found.ok() && found->has_value();
      Count(found.status(), any, any && (*found)->plan == plans_[i], &tally);
      const auto measurements = cache->LoadMeasurements(key);
      Count(measurements.status(), measurements.ok(),
            measurements.ok() &&
                SameMeasurements(*measurements, MakeMeasurements(i)),
            &tally);
    }
    return tally;
  }

  const ScratchFolder folder_;
  std::vector<Program> programs_;
  std::vector<Reject> rejects_;
  std::vector<Plan> plans_;
  std::string whole_;
};

// Tests that share the bytes, so that they can run side by side.
constexpr size_t kParts = 4;

class CacheFlipTest : public CacheDamageTest,
                      public ::testing::WithParamInterface<size_t> {};

INSTANTIATE_TEST_SUITE_P(Parts, CacheFlipTest,
                         ::testing::Range(size_t{0}, kParts));

TEST_P(CacheFlipTest, NoFlippedByteGivesAWrongValue) {
  constexpr int kValues = kPrograms + kRejects + 2 * kPlans;
  std::mt19937 random(20261 + static_cast<uint32_t>(GetParam()));
  const size_t stride = FullTest() ? 1 : 173;
  int opened = 0, refused = 0, seen = 0, unseen = 0, repaired = 0;
  // The header in full, the rest in steps.
  size_t turn = 0;
  for (size_t offset = 0; offset < whole_.size();
       offset += offset < 128 ? 1 : stride) {
    if (turn++ % kParts != GetParam()) continue;
    SCOPED_TRACE(absl::StrCat("offset ", offset));
    std::string bytes = whole_;
    const auto flip = static_cast<char>(1 + random() % 255);
    bytes[offset] = static_cast<char>(bytes[offset] ^ flip);
    WriteFile(bytes);

    // Read-only: nothing wrong, nothing touched.
    {
      absl::StatusOr<PlanCache> cache =
          PlanCache::Open(TestOptions(folder_.path(), CacheMode::kReadOnly));
      if (cache.ok()) {
        EXPECT_EQ(ReadAll(&*cache).wrong, 0);
      }
      EXPECT_EQ(ReadTestFile(folder_.File("index.db")), bytes);
    }

    absl::StatusOr<PlanCache> cache =
        PlanCache::Open(TestOptions(folder_.path()));
    if (!cache.ok()) {
      ++refused;
      continue;
    }
    ++opened;
    const absl::StatusOr<std::vector<CacheFinding>> findings = cache->Check();
    const Tally first = ReadAll(&*cache);
    EXPECT_EQ(first.wrong, 0);
    ASSERT_OK(findings);
    if (findings->empty()) {
      // In bytes that nothing uses.
      ++unseen;
      EXPECT_EQ(first.exact, kValues);
    } else {
      ++seen;
    }

    // Storing everything again either works, and then everything is there, or
    // says that the file is damaged, and then Repair helps.
    absl::Status put = cache->PutPrograms(programs_);
    if (put.ok()) put = cache->PutRejects(rejects_);
    for (uint64_t i = 0; i < kPlans && put.ok(); ++i) {
      put = cache->PutPlan(MakeTestPlanKey(plans_[i]), plans_[i],
                           MakeMeasurements(i));
    }
    const Tally second = ReadAll(&*cache);
    EXPECT_EQ(second.wrong, 0);
    if (findings->empty()) {
      EXPECT_OK(put);
      continue;
    }
    const absl::StatusOr<RepairReport> report = cache->Repair();
    if (!report.ok()) continue;
    ++repaired;
    EXPECT_OK(cache->PutPrograms(programs_));
    EXPECT_OK(cache->PutRejects(rejects_));
    for (uint64_t i = 0; i < kPlans; ++i) {
      EXPECT_OK(cache->PutPlan(MakeTestPlanKey(plans_[i]), plans_[i],
                               MakeMeasurements(i)));
    }
    EXPECT_EQ(ReadAll(&*cache).exact, kValues);
    EXPECT_THAT(cache->Check(), IsOkAndHolds(::testing::IsEmpty()));
  }
  RecordProperty("opened", opened);
  RecordProperty("refused", refused);
  RecordProperty("seen", seen);
  RecordProperty("unseen", unseen);
  RecordProperty("repaired", repaired);
  std::cout << "opened " << opened << ", refused " << refused << ", seen "
            << seen << ", in unused bytes " << unseen << ", repaired "
            << repaired << "\n";
  EXPECT_GT(seen, 10);
  EXPECT_EQ(repaired, seen);
}

TEST_F(CacheDamageTest, NoOverwrittenPageOrCutEndGivesAWrongValue) {
  std::mt19937 random(5);
  const size_t pages = whole_.size() / 4096;
  for (size_t page = 0; page < pages; ++page) {
    for (const int kind : {0, 1, 2}) {
      SCOPED_TRACE(absl::StrCat("page ", page, " kind ", kind));
      std::string bytes = whole_;
      if (kind == 0) {
        bytes.replace(page * 4096, 4096, std::string(4096, '\0'));
      } else if (kind == 1) {
        // Another page's contents, as after a misdirected write.
        bytes.replace(page * 4096, 4096,
                      whole_.substr(random() % pages * 4096, 4096));
      } else {
        bytes.resize(page * 4096 + random() % 4096);
      }
      WriteFile(bytes);
      absl::StatusOr<PlanCache> cache =
          PlanCache::Open(TestOptions(folder_.path()));
      if (!cache.ok()) {
        // Nothing can be repaired, so the message says what to do.
        EXPECT_THAT(std::string(cache.status().message()),
                    ::testing::HasSubstr("move the file away"));
        continue;
      }
      EXPECT_EQ(ReadAll(&*cache).wrong, 0);
      cache->PutPrograms(programs_).IgnoreError();
      EXPECT_EQ(ReadAll(&*cache).wrong, 0);
      EXPECT_OK(cache->Check());
    }
  }
}

// A plan text that fits its row digest but not the reader: what a later build,
// or a bug, might have written.
TEST_F(CacheDamageTest, APlanTextThatDoesNotParseIsAMiss) {
  std::mt19937 random(77);
  const std::string text = PlanToJson(plans_[0]);
  const PlanKey key = MakeTestPlanKey(plans_[0]);
  const int rounds = FullTest() ? 20'000 : 400;
  int missing = 0;
  for (int round = 0; round < rounds; ++round) {
    std::string changed = text;
    for (int edits = 1 + static_cast<int>(random() % 3); edits > 0; --edits) {
      const size_t at = random() % changed.size();
      switch (random() % 4) {
        case 0:
          changed[at] = static_cast<char>(random() % 256);
          break;
        case 1:
          changed.erase(at, 1 + random() % 20);
          break;
        case 2:
          changed.insert(at, changed.substr(random() % changed.size(), 9));
          break;
        default:
          changed[at] = "0123456789-.eE{}[],:\"\\"[random() % 22];
          break;
      }
      if (changed.empty()) changed = "{";
    }
    {
      ASSERT_OK_AND_ASSIGN(std::unique_ptr<Database> database,
                           Database::Open({.path = folder_.File("index.db")}));
      ASSERT_OK(database->Execute("PRAGMA synchronous = OFF"));
      const PlanColumns columns = {.key = key.digest.AsBytes(),
                                   .plan = changed,
                                   .measurements = 0,
                                   .provenance = {}};
      const Digest row_digest = Sha256(EncodeRow(columns));
      ASSERT_OK_AND_ASSIGN(
          Statement insert,
          database->Prepare("INSERT OR REPLACE INTO plan (key, preimage, plan, "
                            "measurements, created_unix, host_name, "
                            "device_name, tool_version, row_digest) "
                            "VALUES (?1, ?2, ?3, 0, 0, '', '', '', ?4)"));
      insert.BindBlob(1, key.digest.AsBytes());
      insert.BindBlob(2, key.preimage);
      insert.BindText(3, changed);
      insert.BindBlob(4, row_digest.AsBytes());
      ASSERT_OK(insert.Run());
    }
    ASSERT_OK_AND_ASSIGN(
        PlanCache cache,
        PlanCache::Open(TestOptions(folder_.path(), CacheMode::kReadOnly)));
    ASSERT_OK_AND_ASSIGN(const std::optional<StoredPlan> found,
                         cache.FindPlan(key.digest));
    if (!found.has_value()) {
      ++missing;
      EXPECT_EQ(cache.TakeWarnings().size(), 1u);
    } else {
      EXPECT_OK(ValidatePlan(found->plan)) << changed;
    }
  }
  EXPECT_GT(missing, rounds / 2);
}

}  // namespace
}  // namespace kiln
