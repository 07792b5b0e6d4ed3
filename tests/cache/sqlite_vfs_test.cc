#include "cache/sqlite_vfs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache/sqlite_db.h"
#include "compiler/base/status_macros.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::IsOkAndHolds;
using ::kiln::testing::ReadTestFile;
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::StatusIs;

constexpr int kRows = 200;  // of a page each

// Two connections to a table of kRows rows with the value `first`.
class LockFreeReadsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    writer_ = OpenDatabase();
    ASSERT_OK(writer_->Execute(
        "CREATE TABLE t (id INTEGER PRIMARY KEY, value, filler);"
        "INSERT INTO t SELECT value, 'first', zeroblob(3500) FROM "
        "(WITH RECURSIVE n(value) AS (SELECT 1 UNION ALL SELECT value + 1 "
        "FROM n LIMIT 200) SELECT value FROM n);"));
    reader_ = OpenDatabase();
  }

  std::unique_ptr<Database> OpenDatabase() {
    absl::StatusOr<std::unique_ptr<Database>> database =
        Database::Open({.path = folder_.File("t.db"),
                        .busy_timeout = std::chrono::milliseconds(20)});
    EXPECT_OK(database);
    return *std::move(database);
  }

  static absl::StatusOr<std::string> Value(Database* database, int id) {
    return LookUp([&]() -> absl::StatusOr<std::string> {
      ASSIGN_OR_RETURN(Statement select,
                       database->Prepare("SELECT value FROM t WHERE id = ?1"));
      select.BindInteger(1, id);
      ASSIGN_OR_RETURN(const bool found, select.Step());
      return found ? std::string(select.Bytes(0)) : "none";
    });
  }

  void ExpectEverywhere(Database* database, const std::string& value) {
    for (int id = 1; id <= kRows; ++id) {
      ASSERT_THAT(Value(database, id), IsOkAndHolds(value)) << id;
    }
  }

  // Writes pages of a transaction that has not been committed, as SQLite does
  // when they are too many for its memory.
  static absl::Status UpdateOnDisk(Database* database) {
    return database->Execute(
        "PRAGMA cache_size = 2; PRAGMA cache_spill = ON; BEGIN;"
        "UPDATE t SET value = 'second';");
  }

  std::string File() const { return ReadTestFile(folder_.File("t.db")); }

  ScratchFolder folder_;
  std::unique_ptr<Database> writer_;
  std::unique_ptr<Database> reader_;
};

TEST_F(LockFreeReadsTest, AnswerFromMemoryWhileAWriterKeepsReadersOut) {
  ASSERT_THAT(Value(reader_.get(), 1), IsOkAndHolds("first"));
  ASSERT_THAT(Value(reader_.get(), 1), IsOkAndHolds("first"));
  ASSERT_OK(writer_->Execute("BEGIN EXCLUSIVE"));
  EXPECT_THAT(Value(reader_.get(), 1), IsOkAndHolds("first"));
  // What is not in memory needs the lock.
  EXPECT_THAT(Value(reader_.get(), kRows),
              StatusIs(absl::StatusCode::kDeadlineExceeded));
  EXPECT_THAT(Value(reader_.get(), 1), IsOkAndHolds("first"));
  ASSERT_OK(writer_->Execute("COMMIT"));
  EXPECT_THAT(Value(reader_.get(), kRows), IsOkAndHolds("first"));
}

TEST_F(LockFreeReadsTest, TakeALockForWhatIsNotInMemory) {
  ASSERT_THAT(Value(reader_.get(), 1), IsOkAndHolds("first"));
  ASSERT_THAT(Value(reader_.get(), 1), IsOkAndHolds("first"));
  ExpectEverywhere(reader_.get(), "first");
  EXPECT_THAT(Value(reader_.get(), kRows + 1), IsOkAndHolds("none"));
}

TEST_F(LockFreeReadsTest, SeeACommitOfAnotherConnectionAtOnce) {
  for (int i = 0; i < 20; ++i) {
    ASSERT_OK(writer_->Execute(
        absl::StrCat("UPDATE t SET value = 'v", i, "' WHERE id = 7")));
    for (int look = 0; look < 3; ++look) {
      EXPECT_THAT(Value(reader_.get(), 7), IsOkAndHolds(absl::StrCat("v", i)));
    }
  }
}

TEST_F(LockFreeReadsTest, SeeACommitOfTheirOwnConnectionAtOnce) {
  for (int i = 0; i < 20; ++i) {
    ASSERT_OK(reader_->Execute(
        absl::StrCat("UPDATE t SET value = 'v", i, "' WHERE id = 7")));
    for (int look = 0; look < 3; ++look) {
      EXPECT_THAT(Value(reader_.get(), 7), IsOkAndHolds(absl::StrCat("v", i)));
    }
  }
}

TEST_F(LockFreeReadsTest, DoNotSeePagesOfATransactionBeforeItsCommit) {
  ExpectEverywhere(reader_.get(), "first");
  const std::string before = File();
  ASSERT_OK(UpdateOnDisk(writer_.get()));
  ASSERT_NE(File(), before);
  ExpectEverywhere(reader_.get(), "first");
  ASSERT_OK(writer_->Execute("ROLLBACK"));
  ASSERT_EQ(File(), before);
  ExpectEverywhere(reader_.get(), "first");

  ASSERT_OK(UpdateOnDisk(writer_.get()));
  ExpectEverywhere(reader_.get(), "first");
  ASSERT_OK(writer_->Execute("COMMIT"));
  ExpectEverywhere(reader_.get(), "second");
}

TEST_F(LockFreeReadsTest, DoNotSeePagesThatAKilledWriterLeft) {
  ExpectEverywhere(reader_.get(), "first");
  writer_.reset();
  const std::string before = File();
  const pid_t child = fork();
  if (child == 0) {
    const std::unique_ptr<Database> database = OpenDatabase();
    if (!UpdateOnDisk(database.get()).ok()) _exit(1);
    kill(getpid(), SIGKILL);
  }
  int state = 0;
  ASSERT_EQ(waitpid(child, &state, 0), child);
  ASSERT_TRUE(WIFSIGNALED(state));
  ASSERT_NE(File(), before);
  ExpectEverywhere(reader_.get(), "first");
  ASSERT_NE(File(), before);  // from memory alone
  // The next reader under a lock rolls them back.
  const std::unique_ptr<Database> fresh = OpenDatabase();
  ExpectEverywhere(fresh.get(), "first");
  EXPECT_EQ(File(), before);
  ExpectEverywhere(reader_.get(), "first");
}

TEST_F(LockFreeReadsTest, RefuseToWrite) {
  ExpectEverywhere(reader_.get(), "first");
  {
    const LockFreeReads lock_free;
    EXPECT_FALSE(reader_->Execute("DELETE FROM t WHERE id = 3").ok());
    EXPECT_TRUE(lock_free.refused());
  }
  EXPECT_THAT(Value(reader_.get(), 3), IsOkAndHolds("first"));
}

}  // namespace
}  // namespace kiln
