// What PlanCache::Open accepts and refuses, and what read-only access leaves
// untouched.

#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "absl/strings/str_cat.h"
#include "cache/plan_cache.h"
#include "cache/schema.h"
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
using ::kiln::testing::SourcePath;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestOptions;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Names, contents and all times but the time of last access.
std::map<std::string, std::string> Snapshot(const std::string& folder) {
  std::map<std::string, std::string> result;
  std::vector<std::string> names = {"."};
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  for (const std::string& name : names) {
    struct stat info;
    EXPECT_EQ(stat((folder + "/" + name).c_str(), &info), 0);
    result[name] =
        absl::StrCat(info.st_ino, " ", info.st_size, " ", info.st_mode, " ",
                     info.st_mtim.tv_sec, ".", info.st_mtim.tv_nsec, " ",
                     info.st_ctim.tv_sec, ".", info.st_ctim.tv_nsec, " ",
                     S_ISREG(info.st_mode)
                         ? Sha256(ReadTestFile(folder + "/" + name)).ToHex()
                         : "");
  }
  return result;
}

void Fill(const std::string& folder) {
  absl::StatusOr<PlanCache> cache = PlanCache::Open(TestOptions(folder));
  ASSERT_OK(cache);
  ASSERT_OK(cache->PutPrograms({MakeProgram(1), MakeProgram(2)}));
  ASSERT_OK(cache->PutReject(MakeReject(1)));
  const Plan plan = MakePlan(1, {MakeProgram(1).key.digest});
  ASSERT_OK(cache->PutPlan(MakeTestPlanKey(plan), plan, MakeMeasurements(1)));
}

void Patch(const std::string& path, std::streamoff offset,
           const std::string& bytes) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(offset);
  file << bytes;
  ASSERT_TRUE(file.flush().good());
}

// Runs `body` in a child without root's right to write everywhere. Failures
// of expectations travel as the exit code; use EXPECT only.
void RunUnprivileged(const std::function<void()>& body) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    constexpr uid_t kNobody = 65534;
    if (geteuid() == 0 && (setgid(kNobody) != 0 || setuid(kNobody) != 0)) {
      _exit(3);
    }
    body();
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int state = 0;
  ASSERT_EQ(waitpid(child, &state, 0), child);
  ASSERT_TRUE(WIFEXITED(state));
  EXPECT_EQ(WEXITSTATUS(state), 0);
}

TEST(CacheOpenTest, CreatesTheFolderWithItsParents) {
  const ScratchFolder folder;
  ASSERT_OK(PlanCache::Open(folder.File("a/b/c"), CacheMode::kReadWrite));
  struct stat info;
  ASSERT_EQ(stat(folder.File("a/b").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0755u);
  EXPECT_TRUE(std::filesystem::exists(folder.File("a/b/c/index.db")));
}

TEST(CacheOpenTest, MarksTheFileAsKilns) {
  const ScratchFolder folder;
  ASSERT_OK(PlanCache::Open(folder.path(), CacheMode::kReadWrite));
  const std::string bytes = ReadTestFile(folder.File("index.db"));
  EXPECT_EQ(bytes.substr(68, 4), "KILN");
  EXPECT_EQ(bytes.substr(60, 4), std::string("\0\0\0\3", 4));
}

TEST(CacheOpenTest, LeavesNothingButTheDatabaseBehind) {
  const ScratchFolder folder;
  Fill(folder.path());
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    names.push_back(entry.path().filename().string());
  }
  EXPECT_THAT(names, ElementsAre("index.db"));
}

TEST(CacheOpenTest, OpeningAFullCacheChangesNothing) {
  const ScratchFolder folder;
  Fill(folder.path());
  const auto before = Snapshot(folder.path());
  {
    ASSERT_OK_AND_ASSIGN(PlanCache cache,
                         PlanCache::Open(TestOptions(folder.path())));
    ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                         cache.FindProgram(MakeProgram(1).key.digest));
    EXPECT_TRUE(found.has_value());
  }
  EXPECT_EQ(Snapshot(folder.path()), before);
}

TEST(CacheOpenTest, ReadOnlyTouchesNothing) {
  const ScratchFolder folder;
  Fill(folder.path());
  const auto before = Snapshot(folder.path());
  {
    ASSERT_OK_AND_ASSIGN(
        PlanCache cache,
        PlanCache::Open(TestOptions(folder.path(), CacheMode::kReadOnly)));
    ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                         cache.FindProgram(MakeProgram(1).key.digest));
    ASSERT_TRUE(found.has_value());
    EXPECT_TRUE(SameProgram(*found, MakeProgram(1)));
    EXPECT_THAT(cache.Check(), IsOkAndHolds(IsEmpty()));
    EXPECT_OK(cache.Stats());
    EXPECT_EQ(Snapshot(folder.path()), before) << "while it is open";
  }
  EXPECT_EQ(Snapshot(folder.path()), before);
}

TEST(CacheOpenTest, ReadOnlyWorksInAFolderNobodyMayWrite) {
  const ScratchFolder folder;
  Fill(folder.path());
  ASSERT_EQ(chmod(folder.path().c_str(), 0555), 0);
  ASSERT_EQ(chmod(folder.File("index.db").c_str(), 0444), 0);
  RunUnprivileged([&] {
    absl::StatusOr<PlanCache> cache =
        PlanCache::Open(folder.path(), CacheMode::kReadOnly);
    EXPECT_OK(cache);
    if (!cache.ok()) return;
    EXPECT_THAT(cache->ContainsProgram(MakeProgram(1).key.digest),
                IsOkAndHolds(true));
    // And read-write access is refused in one sentence.
    EXPECT_THAT(PlanCache::Open(folder.path(), CacheMode::kReadWrite).status(),
                StatusIs(absl::StatusCode::kPermissionDenied,
                         HasSubstr(folder.File("index.db"))));
  });
  ASSERT_EQ(chmod(folder.path().c_str(), 0755), 0);
}

TEST(CacheOpenTest, RefusesAFolderWhereNothingCanBeCreated) {
  const ScratchFolder folder;
  ASSERT_EQ(chmod(folder.path().c_str(), 0555), 0);
  RunUnprivileged([&] {
    EXPECT_THAT(PlanCache::Open(folder.path(), CacheMode::kReadWrite).status(),
                StatusIs(absl::StatusCode::kPermissionDenied,
                         HasSubstr(folder.path())));
    EXPECT_THAT(
        PlanCache::Open(folder.File("new"), CacheMode::kReadWrite).status(),
        StatusIs(absl::StatusCode::kPermissionDenied,
                 HasSubstr(folder.File("new"))));
  });
  ASSERT_EQ(chmod(folder.path().c_str(), 0755), 0);
}

TEST(CacheOpenTest, AFolderThatTurnsReadOnlyFailsThePutAndKeepsTheRest) {
  const ScratchFolder folder;
  Fill(folder.path());
  // Owned by the child, so that it may write at first.
  if (geteuid() == 0) {
    ASSERT_EQ(chown(folder.path().c_str(), 65534, 65534), 0);
    ASSERT_EQ(chown(folder.File("index.db").c_str(), 65534, 65534), 0);
  }
  RunUnprivileged([&] {
    absl::StatusOr<PlanCache> cache =
        PlanCache::Open(folder.path(), CacheMode::kReadWrite);
    EXPECT_OK(cache);
    if (!cache.ok()) return;
    EXPECT_EQ(chmod(folder.path().c_str(), 0555), 0);
    EXPECT_THAT(cache->PutProgram(MakeProgram(7)),
                StatusIs(absl::StatusCode::kPermissionDenied));
    EXPECT_THAT(cache->ContainsProgram(MakeProgram(7).key.digest),
                IsOkAndHolds(false));
    EXPECT_THAT(cache->Check(), IsOkAndHolds(IsEmpty()));
    EXPECT_EQ(chmod(folder.path().c_str(), 0755), 0);
    EXPECT_OK(cache->PutProgram(MakeProgram(7)));
  });
}

TEST(CacheOpenTest, ReadOnlyReadsAMissingCacheAsEmpty) {
  const ScratchFolder folder;
  ASSERT_OK_AND_ASSIGN(PlanCache cache, PlanCache::Open(folder.File("none"),
                                                        CacheMode::kReadOnly));
  EXPECT_THAT(cache.TakeWarnings(),
              ElementsAre(HasSubstr(folder.File("none/index.db"))));
  EXPECT_THAT(cache.ContainsProgram(MakeProgram(1).key.digest),
              IsOkAndHolds(false));
  EXPECT_THAT(cache.PutProgram(MakeProgram(1)),
              StatusIs(absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(CacheOpenTest, RefusesAnEmptyFolderName) {
  EXPECT_THAT(PlanCache::Open("", CacheMode::kReadWrite).status(),
              StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_OK(PlanCache::Open("", CacheMode::kOff));
}

struct RefusalCase {
  const char* name;
  absl::StatusCode code;
  std::vector<std::string> substrings;
  // Makes index.db in the folder.
  void (*make)(const std::string& path);
};

void MakeDatabase(const std::string& path, const std::string& sql) {
  absl::StatusOr<std::unique_ptr<Database>> database =
      Database::Open({.path = path});
  ASSERT_OK(database);
  ASSERT_OK((*database)->Execute(sql));
}

// A cache's tables, and then `sql`.
void MakeCache(const std::string& path, const std::string& sql) {
  absl::StatusOr<std::unique_ptr<Database>> database =
      Database::Open({.path = path});
  ASSERT_OK(database);
  ASSERT_OK(ApplySchema(0, kCacheSchemaVersion, database->get()));
  ASSERT_OK((*database)->Execute(sql));
}

class CacheRefusalTest : public ::testing::TestWithParam<RefusalCase> {};

TEST_P(CacheRefusalTest, NamesWhatWasFoundAndLeavesTheFileAlone) {
  const ScratchFolder folder;
  GetParam().make(folder.File("index.db"));
  const auto before = Snapshot(folder.path());
  for (const CacheMode mode : {CacheMode::kReadWrite, CacheMode::kReadOnly}) {
    const absl::Status status = PlanCache::Open(folder.path(), mode).status();
    EXPECT_EQ(status.code(), GetParam().code) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(folder.File("index.db")));
    for (const std::string& text : GetParam().substrings) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    }
    EXPECT_EQ(Snapshot(folder.path()), before) << CacheModeName(mode);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Files, CacheRefusalTest,
    ::testing::Values(
        RefusalCase{"Text",
                    absl::StatusCode::kFailedPrecondition,
                    {"68656c6c6f", "--cache"},
                    [](const std::string& path) {
                      std::ofstream(path) << "hello, this is not a database";
                    }},
        RefusalCase{"LongText",
                    absl::StatusCode::kFailedPrecondition,
                    {"not a Kiln cache"},
                    [](const std::string& path) {
                      std::ofstream(path) << std::string(100'000, 'x');
                    }},
        RefusalCase{"TextBesideAJournal",
                    absl::StatusCode::kFailedPrecondition,
                    {"not a Kiln cache"},
                    [](const std::string& path) {
                      std::ofstream(path) << std::string(100'000, 'x');
                      std::ofstream(path + "-journal") << "something";
                    }},
        RefusalCase{"OtherDatabase",
                    absl::StatusCode::kFailedPrecondition,
                    {"0x00000000", "0x4B494C4E", "--cache"},
                    [](const std::string& path) {
                      MakeDatabase(path, "CREATE TABLE t (a)");
                    }},
        RefusalCase{"OtherApplication",
                    absl::StatusCode::kFailedPrecondition,
                    {"0x00001234", "0x4B494C4E"},
                    [](const std::string& path) {
                      MakeDatabase(path,
                                   "PRAGMA application_id = 0x1234;"
                                   "CREATE TABLE t (a)");
                    }},
        RefusalCase{"WriteAheadLogOfAnotherProgram",
                    absl::StatusCode::kFailedPrecondition,
                    {"0x00000000"},
                    [](const std::string& path) {
                      MakeDatabase(path,
                                   "PRAGMA journal_mode = WAL;"
                                   "CREATE TABLE t (a)");
                    }},
        RefusalCase{"NewerSchema",
                    absl::StatusCode::kFailedPrecondition,
                    {"schema 7", "reads schemas 1 to 3", "newer kiln"},
                    [](const std::string& path) {
                      MakeCache(path, "PRAGMA user_version = 7;");
                    }},
        RefusalCase{"SchemaBeforeTheFirst",
                    absl::StatusCode::kFailedPrecondition,
                    {"schema 0", "reads schemas 1 to 3"},
                    [](const std::string& path) {
                      MakeCache(path, "PRAGMA user_version = 0;");
                    }},
        RefusalCase{"OlderSchemaWithAlteredTables",
                    absl::StatusCode::kDataLoss,
                    {"table definitions", "schema 1"},
                    [](const std::string& path) {
                      MakeCache(path,
                                "DROP TABLE plan_use;"
                                "CREATE TABLE extra (a);"
                                "PRAGMA user_version = 1;");
                    }},
        RefusalCase{"AlteredTables",
                    absl::StatusCode::kDataLoss,
                    {"table definitions"},
                    [](const std::string& path) {
                      MakeCache(path, "CREATE TABLE extra (a);");
                    }},
        RefusalCase{"Folder",
                    absl::StatusCode::kFailedPrecondition,
                    {"not a regular file"},
                    [](const std::string& path) {
                      std::filesystem::create_directory(path);
                    }}),
    [](const auto& test) { return std::string(test.param.name); });

TEST(CacheOpenTest, AnEmptyFileBecomesACache) {
  const ScratchFolder folder;
  std::ofstream(folder.File("index.db")).flush();
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(folder.path(), CacheMode::kReadWrite));
  EXPECT_OK(cache.PutProgram(MakeProgram(1)));
}

TEST(CacheOpenTest, RefusesDamagedHeaderFields) {
  for (const auto& [offset, bytes] : std::map<std::streamoff, std::string>{
           {18, "\2"}, {19, "\2"}, {59, "\3"}}) {
    const ScratchFolder folder;
    Fill(folder.path());
    Patch(folder.File("index.db"), offset, bytes);
    EXPECT_THAT(PlanCache::Open(folder.path(), CacheMode::kReadWrite).status(),
                StatusIs(absl::StatusCode::kDataLoss))
        << offset;
  }
}

TEST(CacheOpenTest, RefusesToWriteOnANetworkFileSystem) {
  const ScratchFolder folder;
  PlanCacheOptions options = TestOptions(folder.path());
  options.probe_file_system = [](const std::string&) {
    return FileSystemInfo{.magic = 0x6969};
  };
  EXPECT_THAT(
      PlanCache::Open(options).status(),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("NFS"), HasSubstr(folder.path()),
                     HasSubstr("--cache"), HasSubstr("kiln cache export"),
                     HasSubstr("read-only"))));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(CacheOpenTest, ReadsFromANetworkFileSystem) {
  const ScratchFolder folder;
  Fill(folder.path());
  const auto before = Snapshot(folder.path());
  PlanCacheOptions options = TestOptions(folder.path(), CacheMode::kReadOnly);
  options.probe_file_system = [](const std::string&) {
    return FileSystemInfo{.magic = 0x6969};
  };
  ASSERT_OK_AND_ASSIGN(PlanCache cache, PlanCache::Open(options));
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                       cache.FindProgram(MakeProgram(1).key.digest));
  EXPECT_TRUE(found.has_value());
  EXPECT_EQ(Snapshot(folder.path()), before);
}

TEST(CacheOpenTest, ReportsAFailingProbe) {
  const ScratchFolder folder;
  PlanCacheOptions options = TestOptions(folder.path());
  options.probe_file_system =
      [](const std::string&) -> absl::StatusOr<FileSystemInfo> {
    return absl::UnavailableError("statfs failed");
  };
  EXPECT_THAT(PlanCache::Open(options).status(),
              StatusIs(absl::StatusCode::kUnavailable));
}

// A file of every schema version, as a build of that version wrote it (see
// tests/data/cache/README.md). KILN_UPDATE_GOLDENS=1 writes that of this
// version anew, for a schema that never shipped.
class GoldenCacheTest : public ::testing::TestWithParam<int> {
 protected:
  static std::string Golden(int version) {
    return SourcePath(absl::StrCat("tests/data/cache/index.v", version, ".db"));
  }

  static void ExpectContents(PlanCache* cache) {
    EXPECT_THAT(cache->Check(), IsOkAndHolds(IsEmpty()));
    ASSERT_OK_AND_ASSIGN(const std::vector<StoredPlan> plans,
                         cache->ListPlans());
    ASSERT_EQ(plans.size(), 1u);
    EXPECT_EQ(plans[0].plan.body.Label(),
              "fused_moe.cuda{tokens_tile=8,warps=4}");
    EXPECT_EQ(plans[0].plan.evidence.median_ns, 41251.5);
    ASSERT_EQ(plans[0].plan.programs.size(), 1u);
    ASSERT_OK_AND_ASSIGN(const std::optional<Program> program,
                         cache->FindProgram(plans[0].plan.programs[0]));
    ASSERT_TRUE(program.has_value());
    EXPECT_EQ(program->binary, MakeProgram(1).binary);
    ASSERT_EQ(program->kernels.size(), 2u);
    EXPECT_EQ(program->kernels[0].params.size(), 3u);
    ASSERT_OK_AND_ASSIGN(const std::vector<Measurement> measurements,
                         cache->LoadMeasurements(plans[0].key.digest));
    EXPECT_TRUE(SameMeasurements(measurements, MakeMeasurements(1)));
    ASSERT_OK_AND_ASSIGN(const std::optional<Reject> reject,
                         cache->FindReject(MakeReject(1).key));
    EXPECT_TRUE(reject.has_value());
    ASSERT_OK_AND_ASSIGN(const CacheStats stats, cache->Stats());
    EXPECT_EQ(stats.schema_version, kCacheSchemaVersion);
  }
};

TEST_P(GoldenCacheTest, IsMigratedWithAllItHasAndStaysUsable) {
  const char* update = std::getenv("KILN_UPDATE_GOLDENS");
  if (update != nullptr && std::string(update) == "1" &&
      GetParam() == kCacheSchemaVersion) {
    const ScratchFolder folder;
    Fill(folder.path());
    {
      PlanCacheOptions options = TestOptions(folder.path());
      const int64_t later = options.clock() + 2 * kUseGrainSeconds;
      options.clock = [later] { return later; };
      ASSERT_OK_AND_ASSIGN(PlanCache cache, PlanCache::Open(options));
      const Plan plan = MakePlan(1, {MakeProgram(1).key.digest});
      ASSERT_OK(cache.NoteUse({MakeTestPlanKey(plan).digest}));
    }
    std::filesystem::copy_file(
        folder.File("index.db"), Golden(GetParam()),
        std::filesystem::copy_options::overwrite_existing);
  }
  const ScratchFolder folder;
  std::filesystem::copy_file(Golden(GetParam()), folder.File("index.db"));
  for (const bool again : {false, true}) {
    SCOPED_TRACE(again);
    ASSERT_OK_AND_ASSIGN(PlanCache cache,
                         PlanCache::Open(TestOptions(folder.path())));
    EXPECT_THAT(cache.TakeWarnings(), IsEmpty());
    ExpectContents(&cache);
  }
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(TestOptions(folder.path())));
  ASSERT_OK(cache.PutProgram(MakeProgram(3)));
  const Plan plan = MakePlan(3, {MakeProgram(3).key.digest});
  ASSERT_OK(cache.PutPlan(MakeTestPlanKey(plan), plan, MakeMeasurements(3)));
  ASSERT_OK(cache.Repair());
  EXPECT_THAT(cache.Check(), IsOkAndHolds(IsEmpty()));
}

TEST_P(GoldenCacheTest, IsReadWithoutBeingTouched) {
  const ScratchFolder folder;
  std::filesystem::copy_file(Golden(GetParam()), folder.File("index.db"));
  const auto before = Snapshot(folder.path());
  {
    ASSERT_OK_AND_ASSIGN(
        PlanCache cache,
        PlanCache::Open(TestOptions(folder.path(), CacheMode::kReadOnly)));
    if (GetParam() < kCacheSchemaVersion) {
      EXPECT_THAT(cache.TakeWarnings(),
                  ElementsAre(AllOf(HasSubstr(folder.File("index.db")),
                                    HasSubstr("older cache schema"))));
    }
    ExpectContents(&cache);
    EXPECT_THAT(cache.PutProgram(MakeProgram(3)),
                StatusIs(absl::StatusCode::kFailedPrecondition));
  }
  EXPECT_EQ(Snapshot(folder.path()), before);
}

TEST_P(GoldenCacheTest, JoinsACacheOfThisVersion) {
  const ScratchFolder folder;
  std::filesystem::copy_file(Golden(GetParam()), folder.File("index.db"));
  ASSERT_OK_AND_ASSIGN(
      PlanCache source,
      PlanCache::Open(TestOptions(folder.path(), CacheMode::kReadOnly)));
  const ScratchFolder other;
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(TestOptions(other.path())));
  ASSERT_OK_AND_ASSIGN(const MergeReport report, cache.MergeFrom(&source, {}));
  EXPECT_TRUE(report.stored);
  EXPECT_THAT(report.skipped, IsEmpty());
  ExpectContents(&cache);
}

INSTANTIATE_TEST_SUITE_P(Versions, GoldenCacheTest,
                         ::testing::Range(1, kCacheSchemaVersion + 1));

// A process that dies between two steps of a migration leaves the old version.
TEST(CacheOpenTest, AMigrationThatFailsLeavesTheFileAsItWas) {
  const ScratchFolder folder;
  MakeDatabase(folder.File("index.db"), CacheSchemaFiles()[0].second);
  {
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<Database> database,
                         Database::Open({.path = folder.File("index.db")}));
    ASSERT_OK_AND_ASSIGN(
        Transaction transaction,
        Transaction::Begin(database.get(), Transaction::Kind::kWrite));
    ASSERT_OK(ApplySchema(1, kCacheSchemaVersion, database.get()));
    EXPECT_THAT(database->QueryInteger("PRAGMA user_version"),
                IsOkAndHolds(kCacheSchemaVersion));
  }
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<Database> database,
                       Database::Open({.path = folder.File("index.db")}));
  EXPECT_THAT(database->QueryInteger("PRAGMA user_version"), IsOkAndHolds(1));
  EXPECT_THAT(database->QueryInteger("SELECT count(*) FROM sqlite_schema "
                                     "WHERE name = 'plan_use'"),
              IsOkAndHolds(0));
}

TEST(CacheOpenTest, TheListOfColumnsIsThatOfTheTables) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Database> database,
                       NewMemoryDatabase(kCacheSchemaVersion));
  EXPECT_THAT(
      database->QueryInteger("SELECT count(*) FROM sqlite_schema WHERE type = "
                             "'table' AND name NOT LIKE 'sqlite%'"),
      IsOkAndHolds(static_cast<int64_t>(kCacheTables.size())));
  for (const TableShape& table : kCacheTables) {
    ASSERT_OK_AND_ASSIGN(
        Statement select,
        database->Prepare("SELECT group_concat(name, ', ') FROM "
                          "pragma_table_info(?1)"));
    select.BindText(1, table.name);
    ASSERT_OK_AND_ASSIGN(const bool found, select.Step());
    ASSERT_TRUE(found);
    EXPECT_EQ(
        select.Bytes(0),
        absl::StrCat(table.ids, table.ids.empty() ? "" : ", ", table.columns))
        << table.name;
  }
}

}  // namespace
}  // namespace kiln
