// Several processes on one cache: concurrent writers, writers that are killed,
// and a disk that fills up. Nothing acknowledged is lost, and Check passes.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "cache/plan_cache.h"
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
using ::kiln::testing::SameProgram;
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestOptions;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Exit codes of children.
constexpr int kPassed = 0;
constexpr int kFailed = 1;
constexpr int kNotPermitted = 7;

pid_t Start(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    const int code = body();
    _exit(::testing::Test::HasFailure() ? kFailed : code);
  }
  return child;
}

int Wait(pid_t child) {
  int state = 0;
  EXPECT_EQ(waitpid(child, &state, 0), child);
  return WIFEXITED(state) ? WEXITSTATUS(state) : 128 + WTERMSIG(state);
}

void ExpectWhole(const std::string& folder) {
  ASSERT_OK_AND_ASSIGN(PlanCache cache, PlanCache::Open(TestOptions(folder)));
  EXPECT_THAT(cache.Check(), IsOkAndHolds(IsEmpty()));
}

TEST(CacheProcessTest, WritersThatStartTogetherAllSucceed) {
  const ScratchFolder folder;
  const std::string directory = folder.File("cache");  // created by the race
  const uint64_t writers = FullTest() ? 32 : 8;
  const uint64_t each = FullTest() ? 40 : 12;
  std::vector<pid_t> children;
  for (uint64_t writer = 0; writer < writers; ++writer) {
    children.push_back(Start([&] {
      absl::StatusOr<PlanCache> cache = PlanCache::Open(TestOptions(directory));
      if (!cache.ok()) {
        ADD_FAILURE() << cache.status();
        return kFailed;
      }
      for (uint64_t i = 0; i < each; ++i) {
        // Half of the keys are shared by all, half are the writer's own.
        const uint64_t seed = i % 2 == 0 ? i : 100 * (writer + 1) + i;
        EXPECT_OK(cache->PutProgram(MakeProgram(seed)));
        EXPECT_OK(cache->PutReject(MakeReject(seed)));
        const Plan plan = MakePlan(seed, {MakeProgram(seed).key.digest});
        EXPECT_OK(cache->PutPlan(MakeTestPlanKey(plan), plan,
                                 MakeMeasurements(seed)));
      }
      return kPassed;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(Wait(child), kPassed);
  ExpectWhole(directory);
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(TestOptions(directory)));
  ASSERT_OK_AND_ASSIGN(const CacheStats stats, cache.Stats());
  EXPECT_EQ(stats.tables[7].name, "program");
  EXPECT_EQ(stats.tables[7].rows,
            static_cast<int64_t>(each / 2 + writers * each / 2));
}

TEST(CacheProcessTest, OpeningACacheKeepsTheLocksOfItsProcess) {
  const ScratchFolder folder;
  ExpectWhole(folder.path());  // creates it
  const DatabaseOptions options = {
      .path = folder.File(kCacheFileName),
      .busy_timeout = std::chrono::milliseconds(20)};
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  // Started first: it would inherit what SQLite knows of the locks.
  const pid_t child = Start([&] {
    char begin;
    EXPECT_EQ(read(pipe_ends[0], &begin, 1), 1);
    absl::StatusOr<std::unique_ptr<Database>> database =
        Database::Open(options);
    EXPECT_OK(database);
    EXPECT_THAT((*database)->Execute("BEGIN IMMEDIATE"),
                StatusIs(absl::StatusCode::kDeadlineExceeded));
    return kPassed;
  });
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Database> writer,
                       Database::Open(options));
  ASSERT_OK(writer->Execute("BEGIN IMMEDIATE"));
  for (const CacheMode mode : {CacheMode::kReadWrite, CacheMode::kReadOnly}) {
    EXPECT_OK(PlanCache::Open(TestOptions(folder.path(), mode)));
  }
  ASSERT_EQ(write(pipe_ends[1], "x", 1), 1);
  EXPECT_EQ(Wait(child), kPassed);
}

TEST(CacheProcessTest, AKilledWriterLosesOnlyWhatWasInFlight) {
  const ScratchFolder folder;
  std::mt19937 random(404);
  const int rounds = FullTest() ? 1000 : 40;
  uint64_t next = 0;
  uint64_t acknowledged = 0;
  // How long a first result takes here, which the first round finds out.
  std::chrono::microseconds usual(0);
  for (int round = 0; round < rounds; ++round) {
    int pipe_ends[2];
    ASSERT_EQ(pipe(pipe_ends), 0);
    const uint64_t start = next;
    const pid_t child = Start([&] {
      close(pipe_ends[0]);
      absl::StatusOr<PlanCache> cache =
          PlanCache::Open(TestOptions(folder.path()));
      if (!cache.ok()) return kFailed;
      for (uint64_t seed = start;; ++seed) {
        const Program program = MakeProgram(seed, 2000);
        const Plan plan = MakePlan(seed, {program.key.digest});
        if (!cache->PutProgram(program).ok() ||
            !cache->PutPlan(MakeTestPlanKey(plan), plan, MakeMeasurements(seed))
                 .ok()) {
          return kFailed;
        }
        // Acknowledged only now.
        if (write(pipe_ends[1], &seed, sizeof(seed)) != sizeof(seed)) {
          return kFailed;
        }
      }
    });
    close(pipe_ends[1]);
    uint64_t seed = 0;
    if (round == 0) {
      const auto begin = std::chrono::steady_clock::now();
      ASSERT_EQ(read(pipe_ends[0], &seed, sizeof(seed)), ssize_t{sizeof(seed)});
      acknowledged = seed + 1;
      usual = std::chrono::duration_cast<std::chrono::microseconds>(
          std::chrono::steady_clock::now() - begin);
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(
          random() % static_cast<uint64_t>(2 * usual.count() + 1)));
    }
    ASSERT_EQ(kill(child, SIGKILL), 0);
    EXPECT_EQ(Wait(child), 128 + SIGKILL);
    while (read(pipe_ends[0], &seed, sizeof(seed)) == sizeof(seed)) {
      acknowledged = std::max(acknowledged, seed + 1);
    }
    close(pipe_ends[0]);
    next = acknowledged;

    ASSERT_OK_AND_ASSIGN(PlanCache cache,
                         PlanCache::Open(TestOptions(folder.path())));
    for (uint64_t i = start; i < acknowledged; ++i) {
      ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                           cache.FindProgram(MakeProgram(i).key.digest));
      ASSERT_TRUE(found.has_value()) << "program " << i << " was lost";
      EXPECT_TRUE(SameProgram(*found, MakeProgram(i, 2000)));
      const Plan plan = MakePlan(i, {MakeProgram(i).key.digest});
      ASSERT_OK_AND_ASSIGN(const std::optional<StoredPlan> stored,
                           cache.FindPlan(MakeTestPlanKey(plan).digest));
      ASSERT_TRUE(stored.has_value()) << "plan " << i << " was lost";
    }
    if (!FullTest() || round % 50 == 0) {
      EXPECT_THAT(cache.Check(), IsOkAndHolds(IsEmpty()));
    }
  }
  ExpectWhole(folder.path());
  std::cout << rounds << " kills, " << acknowledged << " results kept\n";
  EXPECT_GT(acknowledged, 1u);
}

TEST(CacheProcessTest, ReadersSeeAWriterKilledInsideItsTransaction) {
  const ScratchFolder folder;
  ASSERT_OK(PlanCache::Open(TestOptions(folder.path())));
  // More than the page cache holds, so that half-written pages reach the file.
  const pid_t child = Start([&] {
    absl::StatusOr<std::unique_ptr<Database>> database =
        Database::Open({.path = folder.File("index.db")});
    if (!database.ok()) return kFailed;
    absl::StatusOr<Transaction> transaction =
        Transaction::Begin(database->get(), Transaction::Kind::kWrite);
    if (!transaction.ok()) return kFailed;
    EXPECT_OK(
        (*database)->Execute("INSERT INTO blob (digest, data) "
                             "VALUES (zeroblob(32), zeroblob(96000000))"));
    kill(getpid(), SIGKILL);
    return kFailed;
  });
  ASSERT_EQ(Wait(child), 128 + SIGKILL);
  ASSERT_GT(std::filesystem::file_size(folder.File("index.db-journal")), 0u);
  const auto journal_time =
      std::filesystem::last_write_time(folder.File("index.db-journal"));
  EXPECT_THAT(PlanCache::Open(TestOptions(folder.path(), CacheMode::kReadOnly))
                  .status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("interrupted write")));
  EXPECT_EQ(std::filesystem::last_write_time(folder.File("index.db-journal")),
            journal_time);
  ExpectWhole(folder.path());
  EXPECT_OK(PlanCache::Open(TestOptions(folder.path(), CacheMode::kReadOnly)));
}

// Dies inside a transaction of `sql`, with pages and a journal on the disk.
void DieWriting(const std::string& path, const std::string& sql) {
  const pid_t child = Start([&] {
    absl::StatusOr<std::unique_ptr<Database>> database =
        Database::Open({.path = path});
    if (!database.ok()) return kFailed;
    // Few pages fit into memory, the others reach the file.
    EXPECT_OK((*database)->Execute("PRAGMA cache_size = 5; BEGIN IMMEDIATE"));
    EXPECT_OK((*database)->Execute(sql));
    kill(getpid(), SIGKILL);
    return kFailed;
  });
  ASSERT_EQ(Wait(child), 128 + SIGKILL);
  ASSERT_GT(std::filesystem::file_size(path + "-journal"), 0u);
}

// A power cut may leave anything in the page that was being written, also in
// the bytes that tell a cache from other files.
TEST(CacheProcessTest, ATornFirstPageIsRolledBackIfTheJournalIsThatOfACache) {
  const std::string garbage = testing::RandomBytes(3, 512);
  const auto tear = [&](const std::string& path) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file << garbage;
    ASSERT_TRUE(file.flush().good());
  };
  const ScratchFolder folder;
  {
    ASSERT_OK_AND_ASSIGN(PlanCache cache,
                         PlanCache::Open(TestOptions(folder.path())));
    ASSERT_OK(cache.PutProgram(MakeProgram(1)));
  }
  // A cookie is in the first page.
  DieWriting(folder.File("index.db"),
             "PRAGMA user_version = 2;"
             "INSERT INTO blob (digest, data) "
             "VALUES (zeroblob(32), zeroblob(1000000))");
  tear(folder.File("index.db"));
  ExpectWhole(folder.path());
  ASSERT_OK_AND_ASSIGN(PlanCache cache,
                       PlanCache::Open(TestOptions(folder.path())));
  EXPECT_THAT(cache.ContainsProgram(MakeProgram(1).key.digest),
              IsOkAndHolds(true));

  const ScratchFolder other;
  const std::string foreign = other.File("index.db");
  {
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<Database> database,
                         Database::Open({.path = foreign}));
    ASSERT_OK(database->Execute("CREATE TABLE t (a)"));
  }
  DieWriting(foreign,
             "PRAGMA user_version = 2;"
             "INSERT INTO t VALUES (zeroblob(1000000))");
  tear(foreign);
  const auto size = std::filesystem::file_size(foreign);
  EXPECT_THAT(PlanCache::Open(TestOptions(other.path())).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("not a Kiln cache")));
  EXPECT_EQ(std::filesystem::file_size(foreign), size);
  EXPECT_GT(std::filesystem::file_size(foreign + "-journal"), 0u);
}

TEST(CacheProcessTest, AReaderWorksWhileAWriterPublishes) {
  const ScratchFolder folder;
  {
    ASSERT_OK_AND_ASSIGN(PlanCache cache,
                         PlanCache::Open(TestOptions(folder.path())));
    ASSERT_OK(cache.PutProgram(MakeProgram(0)));
  }
  const pid_t child = Start([&] {
    absl::StatusOr<PlanCache> cache =
        PlanCache::Open(TestOptions(folder.path()));
    if (!cache.ok()) return kFailed;
    for (uint64_t seed = 1; seed < 60; ++seed) {
      EXPECT_OK(cache->PutProgram(MakeProgram(seed, 30000)));
    }
    return kPassed;
  });
  ASSERT_OK_AND_ASSIGN(
      PlanCache reader,
      PlanCache::Open(TestOptions(folder.path(), CacheMode::kReadOnly)));
  for (int i = 0; i < 300; ++i) {
    ASSERT_OK_AND_ASSIGN(const std::optional<Program> found,
                         reader.FindProgram(MakeProgram(0).key.digest));
    ASSERT_TRUE(found.has_value());
  }
  EXPECT_EQ(Wait(child), kPassed);
  ASSERT_OK_AND_ASSIGN(const std::optional<Program> last,
                       reader.FindProgram(MakeProgram(59).key.digest));
  EXPECT_TRUE(last.has_value());
  EXPECT_THAT(reader.TakeWarnings(), IsEmpty());
}

TEST(CacheProcessTest, AFileSizeLimitFailsThePutAndKeepsTheRest) {
  const ScratchFolder folder;
  const pid_t child = Start([&] {
    signal(SIGXFSZ, SIG_IGN);
    absl::StatusOr<PlanCache> cache =
        PlanCache::Open(TestOptions(folder.path()));
    if (!cache.ok()) return kFailed;
    EXPECT_OK(cache->PutProgram(MakeProgram(1)));
    rlimit limit = {};
    getrlimit(RLIMIT_FSIZE, &limit);
    const rlim_t usual = limit.rlim_cur;
    const auto size = std::filesystem::file_size(folder.File("index.db"));
    // From "not one page more" to "almost enough".
    for (uint64_t extra = 0; extra < 300'000; extra += 20'000) {
      limit.rlim_cur = size + extra;
      EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
      EXPECT_THAT(cache->PutProgram(MakeProgram(2, 400'000)),
                  StatusIs(absl::StatusCode::kUnavailable));
      limit.rlim_cur = usual;
      EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
      EXPECT_THAT(cache->ContainsProgram(MakeProgram(1).key.digest),
                  IsOkAndHolds(true));
      EXPECT_THAT(cache->ContainsProgram(MakeProgram(2).key.digest),
                  IsOkAndHolds(false));
      EXPECT_THAT(cache->Check(), IsOkAndHolds(IsEmpty()));
    }
    EXPECT_OK(cache->PutProgram(MakeProgram(2, 400'000)));
    return kPassed;
  });
  EXPECT_EQ(Wait(child), kPassed);
  ExpectWhole(folder.path());
}

TEST(CacheProcessTest, AFullDiskFailsThePutAndKeepsTheRest) {
  const ScratchFolder folder;
  const pid_t child = Start([&] {
    // A small file system that only this child sees.
    if (unshare(CLONE_NEWNS) != 0 &&
        unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) {
      return kNotPermitted;
    }
    if (mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=1m") != 0) {
      return kNotPermitted;
    }
    absl::StatusOr<PlanCache> cache =
        PlanCache::Open(TestOptions(folder.path()));
    if (!cache.ok()) return kFailed;
    uint64_t seed = 0;
    absl::Status status;
    while (seed < 1000) {
      status = cache->PutProgram(MakeProgram(seed, 20'000));
      if (!status.ok()) break;
      ++seed;
    }
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted,
                                 HasSubstr("index.db")));
    EXPECT_GT(seed, 5u);
    for (uint64_t i = 0; i < seed; ++i) {
      EXPECT_THAT(cache->ContainsProgram(MakeProgram(i).key.digest),
                  IsOkAndHolds(true));
    }
    EXPECT_THAT(cache->Check(), IsOkAndHolds(IsEmpty()));
    // A second process, with the disk still full.
    absl::StatusOr<PlanCache> again =
        PlanCache::Open(TestOptions(folder.path()));
    EXPECT_OK(again);
    return kPassed;
  });
  const int code = Wait(child);
  if (code == kNotPermitted) {
    GTEST_SKIP() << "this user may not mount a small tmpfs";
  }
  EXPECT_EQ(code, kPassed);
}

}  // namespace
}  // namespace kiln
