// Database, Statement, Transaction: SQLite behind absl::Status. The only users
// of sqlite3.h are this pair of files.
//
// Thread-compatible: one Database and all that comes from it belong to one
// thread at a time.

#ifndef KILN_CACHE_SQLITE_DB_H_
#define KILN_CACHE_SQLITE_DB_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

struct sqlite3;
struct sqlite3_stmt;

namespace kiln {

// Version of the linked SQLite, "3.40.1".
absl::string_view SqliteVersion();

class Database;

// One use of a prepared statement. Bind, then Step until it returns false; the
// destructor resets the statement, which also ends the implicit read
// transaction. Bound bytes are borrowed until then.
class Statement {
 public:
  Statement(Statement&& other) noexcept
      : database_(other.database_), handle_(other.handle_) {
    other.handle_ = nullptr;
  }

  Statement& operator=(Statement&&) = delete;
  ~Statement();

  // Indices count from 1.
  void BindBlob(int index, absl::string_view bytes);
  void BindText(int index, absl::string_view text);
  void BindInteger(int index, int64_t value);
  void BindReal(int index, double value);  // NaN is stored as NULL

  // Binds a column of the current row of `row` with its type, borrowing it.
  void BindColumn(int index, const Statement& row, int column);

  // True when a row is ready, false at the end.
  absl::StatusOr<bool> Step();
  // Steps a statement that yields no row.
  absl::Status Run();

  // Indices count from 0. Views hold until the next Step.
  absl::string_view Bytes(int column) const;
  int64_t Integer(int column) const;
  double Real(int column) const;  // NULL reads as NaN
  bool IsNull(int column) const;

 private:
  friend class Database;

  Statement(Database* database, sqlite3_stmt* handle)
      : database_(database), handle_(handle) {}

  Database* database_;
  sqlite3_stmt* handle_;
};

enum class DatabaseAccess {
  kReadWrite,         // creates the file; rollback journal, synchronous=FULL
  kReadOnly,          // shared locks only; creates and changes nothing
  kReadOnlyUnlocked,  // the same without locks, for file systems without them
  kMemory,            // private, in memory; the path is not used
  kTemporary,         // private, in a nameless file; the path is not used
};

struct DatabaseOptions {
  std::string path;
  DatabaseAccess access = DatabaseAccess::kReadWrite;
  // Longest wait for a lock of another process before DeadlineExceeded.
  std::chrono::milliseconds busy_timeout{30000};
};

// A connection. Errors name the path; codes:
//   DeadlineExceeded    locked by another process beyond busy_timeout
//   ResourceExhausted   disk full, out of memory, value too large
//   DataLoss            SQLite found the file damaged, or it is no database
//   PermissionDenied    file or folder not writable
//   FailedPrecondition  file was replaced underneath, or a read-only opener
//                       found an interrupted write
//   Unavailable         other I/O errors
//   Internal            a statement is wrong or broke a constraint
class Database {
 public:
  static absl::StatusOr<std::unique_ptr<Database>> Open(
      const DatabaseOptions& options);
  Database(const Database&) = delete;
  Database& operator=(const Database&) = delete;
  ~Database();

  // Runs statements separated by ';' and drops their rows.
  absl::Status Execute(const std::string& sql);

  // Prepares `sql`, or takes it from the statements prepared before. A
  // statement must not be asked for again while it is in use.
  absl::StatusOr<Statement> Prepare(absl::string_view sql);

  // First column of the first row; NotFound when there is none.
  absl::StatusOr<int64_t> QueryInteger(absl::string_view sql);

  int64_t last_insert_id() const;
  // True between BEGIN and the end of the transaction.
  bool in_transaction() const;
  // Makes this database an exact copy of `source`, page by page, in one
  // transaction of its own; neither may be inside a transaction.
  absl::Status ReplaceWith(Database* source);

  // The bytes that a file of this database has.
  absl::StatusOr<std::string> Serialize();

  const std::string& path() const { return options_.path; }

 private:
  friend class Statement;
  friend class Transaction;

  explicit Database(const DatabaseOptions& options) : options_(options) {}

  absl::Status Rollback();
  // Status for the result code of the last call.
  absl::Status Error(int code, absl::string_view action) const;
  static int OnBusy(void* self, int count);

  DatabaseOptions options_;
  sqlite3* handle_ = nullptr;
  std::chrono::steady_clock::time_point busy_since_;
  bool wrote_ = false;      // there may be a journal
  bool abandoned_ = false;  // a transaction could not be rolled back
  absl::flat_hash_map<std::string, sqlite3_stmt*> prepared_;
};

// Rolls back unless committed.
class Transaction {
 public:
  enum class Kind {
    kRead,   // one snapshot for several statements
    kWrite,  // takes the write lock at once, so it cannot fail to get it later
  };

  static absl::StatusOr<Transaction> Begin(Database* database, Kind kind);

  Transaction(Transaction&& other) noexcept : database_(other.database_) {
    other.database_ = nullptr;
  }

  Transaction& operator=(Transaction&&) = delete;
  ~Transaction();

  absl::Status Commit();

 private:
  explicit Transaction(Database* database) : database_(database) {}

  Database* database_;
};

}  // namespace kiln

#endif  // KILN_CACHE_SQLITE_DB_H_
