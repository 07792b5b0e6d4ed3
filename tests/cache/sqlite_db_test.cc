#include "cache/sqlite_db.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>

#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::IsOkAndHolds;
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::StatusIs;
using ::testing::HasSubstr;

std::unique_ptr<Database> OpenOrDie(const std::string& path,
                                    int busy_timeout_ms = 50) {
  absl::StatusOr<std::unique_ptr<Database>> database = Database::Open(
      {.path = path,
       .busy_timeout = std::chrono::milliseconds(busy_timeout_ms)});
  EXPECT_OK(database);
  return *std::move(database);
}

TEST(DatabaseTest, KeepsEveryKindOfValue) {
  const ScratchFolder folder;
  const auto database = OpenOrDie(folder.File("t.db"));
  ASSERT_OK(database->Execute(
      "CREATE TABLE t (a BLOB, b TEXT, c INTEGER, d REAL, e REAL) STRICT"));
  const std::string zeros("\0a\0", 3);
  {
    ASSERT_OK_AND_ASSIGN(
        Statement insert,
        database->Prepare("INSERT INTO t VALUES (?1, ?2, ?3, ?4, ?5)"));
    insert.BindBlob(1, zeros);
    insert.BindText(2, zeros);
    insert.BindInteger(3, std::numeric_limits<int64_t>::min());
    insert.BindReal(4, std::nan(""));
    insert.BindReal(5, 0.1);
    ASSERT_OK(insert.Run());
  }
  ASSERT_OK_AND_ASSIGN(Statement select, database->Prepare("SELECT * FROM t"));
  EXPECT_THAT(select.Step(), IsOkAndHolds(true));
  EXPECT_EQ(select.Bytes(0), zeros);
  EXPECT_EQ(select.Bytes(1), zeros);
  EXPECT_EQ(select.Integer(2), std::numeric_limits<int64_t>::min());
  EXPECT_TRUE(select.IsNull(3));
  EXPECT_TRUE(std::isnan(select.Real(3)));
  EXPECT_EQ(select.Real(4), 0.1);
  EXPECT_THAT(select.Step(), IsOkAndHolds(false));
}

TEST(DatabaseTest, EmptyBytesAreNotNull) {
  const ScratchFolder folder;
  const auto database = OpenOrDie(folder.File("t.db"));
  ASSERT_OK(database->Execute(
      "CREATE TABLE t (a BLOB NOT NULL, b TEXT NOT NULL) STRICT"));
  ASSERT_OK_AND_ASSIGN(Statement insert,
                       database->Prepare("INSERT INTO t VALUES (?1, ?2)"));
  insert.BindBlob(1, absl::string_view());
  insert.BindText(2, absl::string_view());
  EXPECT_OK(insert.Run());
}

TEST(DatabaseTest, TransactionRollsBackUnlessCommitted) {
  const ScratchFolder folder;
  const auto database = OpenOrDie(folder.File("t.db"));
  ASSERT_OK(database->Execute("CREATE TABLE t (a INTEGER) STRICT"));
  {
    ASSERT_OK_AND_ASSIGN(
        Transaction transaction,
        Transaction::Begin(database.get(), Transaction::Kind::kWrite));
    ASSERT_OK(database->Execute("INSERT INTO t VALUES (1)"));
  }
  EXPECT_FALSE(database->in_transaction());
  EXPECT_THAT(database->QueryInteger("SELECT count(*) FROM t"),
              IsOkAndHolds(0));
  {
    ASSERT_OK_AND_ASSIGN(
        Transaction transaction,
        Transaction::Begin(database.get(), Transaction::Kind::kWrite));
    ASSERT_OK(database->Execute("INSERT INTO t VALUES (1)"));
    ASSERT_OK(transaction.Commit());
  }
  EXPECT_THAT(database->QueryInteger("SELECT count(*) FROM t"),
              IsOkAndHolds(1));
}

TEST(DatabaseTest, WaitsForALockOnlyUntilTheDeadline) {
  const ScratchFolder folder;
  const auto first = OpenOrDie(folder.File("t.db"));
  const auto second = OpenOrDie(folder.File("t.db"), 60);
  ASSERT_OK_AND_ASSIGN(
      const Transaction held,
      Transaction::Begin(first.get(), Transaction::Kind::kWrite));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(
      Transaction::Begin(second.get(), Transaction::Kind::kWrite).status(),
      StatusIs(absl::StatusCode::kDeadlineExceeded,
               HasSubstr("more than 60 ms")));
  const auto waited = std::chrono::steady_clock::now() - start;
  EXPECT_GE(waited, std::chrono::milliseconds(60));
  EXPECT_LT(waited, std::chrono::seconds(10));
}

TEST(DatabaseTest, UsesARollbackJournalWithFullSync) {
  const ScratchFolder folder;
  const auto database = OpenOrDie(folder.File("t.db"));
  EXPECT_THAT(database->QueryInteger("PRAGMA synchronous"), IsOkAndHolds(2));
  EXPECT_THAT(database->QueryInteger("PRAGMA foreign_keys"), IsOkAndHolds(1));
  ASSERT_OK_AND_ASSIGN(Statement mode,
                       database->Prepare("PRAGMA journal_mode"));
  EXPECT_THAT(mode.Step(), IsOkAndHolds(true));
  EXPECT_EQ(mode.Bytes(0), "truncate");
}

// A log of another database's life, in the place where SQLite would take it for
// this one's.
TEST(DatabaseTest, DoesNotReadAWriteAheadLogThatLiesThere) {
  const ScratchFolder folder;
  const std::string other = folder.File("other.db");
  const std::string path = folder.File("t.db");
  {
    const auto database = OpenOrDie(other);
    ASSERT_OK(database->Execute(
        "CREATE TABLE t (a INTEGER) STRICT; INSERT INTO t VALUES (1)"));
  }
  std::filesystem::copy_file(other, path);
  const auto logging = OpenOrDie(other);
  ASSERT_OK(
      logging->Execute("PRAGMA journal_mode = WAL; INSERT INTO t VALUES (2)"));
  ASSERT_GT(std::filesystem::file_size(other + "-wal"), 0u);
  std::filesystem::copy_file(other + "-wal", path + "-wal");
  const auto database = OpenOrDie(path);
  EXPECT_THAT(database->QueryInteger("SELECT count(*) FROM t"),
              IsOkAndHolds(1));
  EXPECT_FALSE(std::filesystem::exists(path + "-shm"));
}

TEST(DatabaseTest, SeesAtOnceThatAnotherConnectionChangedTheFilesSize) {
  const ScratchFolder folder;
  const auto writer = OpenOrDie(folder.File("t.db"));
  ASSERT_OK(writer->Execute(
      "CREATE TABLE t (a BLOB) STRICT; INSERT INTO t VALUES (x'00')"));
  const auto reader = OpenOrDie(folder.File("t.db"));
  const auto pages = [&] {
    return static_cast<int>(reader->QueryInteger("PRAGMA page_count").value());
  };
  const auto rows = [&] {
    return reader->QueryInteger("SELECT count(*) FROM t WHERE length(a) > 0");
  };
  for (int round = 0; round < 3; ++round) {
    // Twice, so that the second one finds nothing changed.
    for (int again = 0; again < 2; ++again) {
      EXPECT_THAT(rows(), IsOkAndHolds(1));
      EXPECT_EQ(pages(), 2);
    }
    ASSERT_OK(writer->Execute("INSERT INTO t VALUES (zeroblob(100000))"));
    for (int again = 0; again < 2; ++again) {
      EXPECT_THAT(rows(), IsOkAndHolds(2));
      EXPECT_GT(pages(), 20);
    }
    // Pages that the rollback takes back, written while the cache is too small.
    ASSERT_OK(writer->Execute(
        "PRAGMA cache_size = 1; BEGIN; INSERT INTO t VALUES "
        "(zeroblob(1000000)); ROLLBACK; PRAGMA cache_size = -65536"));
    for (int again = 0; again < 2; ++again) {
      EXPECT_THAT(rows(), IsOkAndHolds(2));
      EXPECT_LT(pages(), 40);
    }
    // The reader writes, too.
    ASSERT_OK(reader->Execute("INSERT INTO t VALUES (zeroblob(200000))"));
    EXPECT_THAT(rows(), IsOkAndHolds(3));
    EXPECT_GT(pages(), 70);
    ASSERT_OK(writer->Execute("DELETE FROM t WHERE length(a) > 1; VACUUM"));
  }
  EXPECT_THAT(rows(), IsOkAndHolds(1));
  EXPECT_EQ(pages(), 2);
  EXPECT_EQ(std::filesystem::file_size(folder.File("t.db")), 2 * 4096u);
}

TEST(DatabaseTest, TakesAPathLiterally) {
  const ScratchFolder folder;
  const std::string path = folder.File("a%20b?mode=memory#c.db");
  {
    const auto database = OpenOrDie(path);
    ASSERT_OK(database->Execute("CREATE TABLE t (a INTEGER) STRICT"));
  }
  EXPECT_TRUE(std::filesystem::exists(path));
}

TEST(DatabaseTest, ReportsAFileThatIsNoDatabase) {
  const ScratchFolder folder;
  std::ofstream(folder.File("t.db")) << std::string(5000, 'x');
  EXPECT_THAT(
      Database::Open({.path = folder.File("t.db")}).status(),
      StatusIs(absl::StatusCode::kDataLoss, HasSubstr("not a database")));
}

TEST(DatabaseTest, ReportsAMissingFolderWithTheSystemsReason) {
  EXPECT_THAT(
      Database::Open({.path = "/nonexistent/t.db"}).status(),
      StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nonexistent/t.db")));
}

TEST(DatabaseTest, BrokenConstraintIsInternal) {
  const ScratchFolder folder;
  const auto database = OpenOrDie(folder.File("t.db"));
  ASSERT_OK(database->Execute("CREATE TABLE t (a INTEGER) STRICT"));
  EXPECT_THAT(database->Execute("INSERT INTO t VALUES ('text')"),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("t.db")));
}

TEST(DatabaseTest, ReplaceWithCopiesEverything) {
  const ScratchFolder folder;
  const auto database = OpenOrDie(folder.File("t.db"));
  const auto source = OpenOrDie(folder.File("source.db"));
  ASSERT_OK(database->Execute("CREATE TABLE old (a INTEGER) STRICT"));
  ASSERT_OK(source->Execute(
      "CREATE TABLE t (a INTEGER) STRICT; INSERT INTO t VALUES (7)"));
  ASSERT_OK(database->ReplaceWith(source.get()));
  EXPECT_THAT(database->QueryInteger("SELECT a FROM t"), IsOkAndHolds(7));
  EXPECT_THAT(
      database->QueryInteger("SELECT a FROM old"),
      StatusIs(absl::StatusCode::kInternal, HasSubstr("no such table")));
}

}  // namespace
}  // namespace kiln
