#include "cache/sqlite_db.h"

#include <sqlite3.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "absl/strings/str_cat.h"
#include "cache/sqlite_vfs.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

// Longest value SQLite may read or write, in bytes: above any program, below
// what a damaged length could make it allocate.
constexpr int kValueBytesMax = 512 << 20;
// Statements kept prepared; all are literals of this folder.
constexpr size_t kPreparedMax = 256;

// A file name that SQLite takes literally: "file:" would start a URI.
std::string LiteralPath(const std::string& path) {
  return !path.empty() && path[0] == '/' ? path : absl::StrCat("./", path);
}

}  // namespace

absl::string_view SqliteVersion() { return sqlite3_libversion(); }

Statement::~Statement() {
  if (handle_ == nullptr) return;
  sqlite3_reset(handle_);
  sqlite3_clear_bindings(handle_);
}

void Statement::BindBlob(int index, absl::string_view bytes) {
  // A null pointer would bind NULL.
  const int code = bytes.empty()
                       ? sqlite3_bind_zeroblob(handle_, index, 0)
                       : sqlite3_bind_blob64(handle_, index, bytes.data(),
                                             bytes.size(), SQLITE_STATIC);
  KILN_CHECK(code != SQLITE_RANGE && code != SQLITE_MISUSE);
}

void Statement::BindText(int index, absl::string_view text) {
  const int code =
      sqlite3_bind_text64(handle_, index, text.empty() ? "" : text.data(),
                          text.size(), SQLITE_STATIC, SQLITE_UTF8);
  KILN_CHECK(code != SQLITE_RANGE && code != SQLITE_MISUSE);
}

void Statement::BindInteger(int index, int64_t value) {
  KILN_CHECK(sqlite3_bind_int64(handle_, index, value) == SQLITE_OK);
}

void Statement::BindReal(int index, double value) {
  const int code = std::isnan(value)
                       ? sqlite3_bind_null(handle_, index)
                       : sqlite3_bind_double(handle_, index, value);
  KILN_CHECK(code == SQLITE_OK);
}

void Statement::BindColumn(int index, const Statement& row, int column) {
  switch (sqlite3_column_type(row.handle_, column)) {
    case SQLITE_INTEGER:
      return BindInteger(index, row.Integer(column));
    case SQLITE_FLOAT:
      return BindReal(index, row.Real(column));
    case SQLITE_TEXT:
      return BindText(index, row.Bytes(column));
    case SQLITE_BLOB:
      return BindBlob(index, row.Bytes(column));
    default:
      KILN_CHECK(sqlite3_bind_null(handle_, index) == SQLITE_OK);
  }
}

absl::StatusOr<bool> Statement::Step() {
  const int code = sqlite3_step(handle_);
  if (code == SQLITE_ROW) return true;
  if (code == SQLITE_DONE) return false;
  return database_->Error(code, "cannot run a statement on");
}

absl::Status Statement::Run() {
  ASSIGN_OR_RETURN(const bool row, Step());
  if (row) {
    return absl::InternalError(
        absl::StrCat("statement yields a row where none is expected: ",
                     sqlite3_sql(handle_)));
  }
  return absl::OkStatus();
}

absl::string_view Statement::Bytes(int column) const {
  const void* data = sqlite3_column_blob(handle_, column);
  const int size = sqlite3_column_bytes(handle_, column);
  if (data == nullptr || size <= 0) return absl::string_view();
  return absl::string_view(static_cast<const char*>(data),
                           static_cast<size_t>(size));
}

int64_t Statement::Integer(int column) const {
  return sqlite3_column_int64(handle_, column);
}

double Statement::Real(int column) const {
  return IsNull(column) ? std::numeric_limits<double>::quiet_NaN()
                        : sqlite3_column_double(handle_, column);
}

bool Statement::IsNull(int column) const {
  return sqlite3_column_type(handle_, column) == SQLITE_NULL;
}

absl::StatusOr<std::unique_ptr<Database>> Database::Open(
    const DatabaseOptions& options) {
  std::unique_ptr<Database> database(new Database(options));
  // One connection belongs to one thread at a time, so SQLite need not lock.
  int flags = SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE;
  const char* vfs = SqliteVfsName();
  std::string path = LiteralPath(options.path);
  switch (options.access) {
    case DatabaseAccess::kReadWrite:
      flags |= SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;
      break;
    case DatabaseAccess::kReadOnly:
      flags |= SQLITE_OPEN_READONLY;
      break;
    case DatabaseAccess::kReadOnlyUnlocked:
      flags |= SQLITE_OPEN_READONLY;
      vfs = "unix-none";
      break;
    case DatabaseAccess::kMemory:
      flags |= SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_MEMORY;
      path = ":memory:";
      database->options_.path = "the in-memory cache";
      break;
    case DatabaseAccess::kTemporary:
      flags |= SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE;
      path = "";
      database->options_.path = "a temporary file";
      break;
  }
  const int code =
      sqlite3_open_v2(path.c_str(), &database->handle_, flags, vfs);
  if (code != SQLITE_OK) return database->Error(code, "cannot open");
  sqlite3_limit(database->handle_, SQLITE_LIMIT_LENGTH, kValueBytesMax);
  sqlite3_busy_handler(database->handle_, &Database::OnBusy, database.get());
  // The file may hold anything: no code of its own, no writes to the schema,
  // and cells are checked before they are used.
  sqlite3_db_config(database->handle_, SQLITE_DBCONFIG_DEFENSIVE, 1, nullptr);
  sqlite3_db_config(database->handle_, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0,
                    nullptr);
  sqlite3_db_config(database->handle_, SQLITE_DBCONFIG_ENABLE_FKEY, 1, nullptr);
  RETURN_IF_ERROR(database->Execute(
      "PRAGMA cell_size_check = ON; PRAGMA temp_store = MEMORY;"
      "PRAGMA cache_size = -65536;"));
  if (options.access == DatabaseAccess::kReadWrite) {
    // SQLite 3.7.0 to 3.51.2 can corrupt a write-ahead log when it is reset,
    // so: a rollback journal. TRUNCATE rather than DELETE: with
    // synchronous=FULL the truncation is synced, so that a journal cannot come
    // back after a power cut and undo an acknowledged transaction.
    RETURN_IF_ERROR(database->Execute(
        "PRAGMA synchronous = FULL; PRAGMA journal_mode = TRUNCATE;"));
  }
  return database;
}

Database::~Database() {
  for (const auto& [sql, statement] : prepared_) sqlite3_finalize(statement);
  if (options_.access == DatabaseAccess::kReadWrite && wrote_) {
    // Removes the empty journal under the right lock, or leaves it if anybody
    // else is writing: readers look into a journal that exists, every time.
    sqlite3_busy_handler(handle_, nullptr, nullptr);
    sqlite3_exec(handle_, "PRAGMA journal_mode = DELETE", nullptr, nullptr,
                 nullptr);
  }
  sqlite3_close(handle_);
}

absl::Status Database::Execute(const std::string& sql) {
  const int code =
      sqlite3_exec(handle_, sql.c_str(), nullptr, nullptr, nullptr);
  if (code != SQLITE_OK) return Error(code, "cannot run a statement on");
  return absl::OkStatus();
}

absl::Status Database::Rollback() {
  ASSIGN_OR_RETURN(Statement rollback, Prepare("ROLLBACK"));
  return rollback.Run();
}

absl::StatusOr<Statement> Database::Prepare(absl::string_view sql) {
  auto found = prepared_.find(sql);
  if (found == prepared_.end()) {
    KILN_CHECK(prepared_.size() < kPreparedMax);
    sqlite3_stmt* handle = nullptr;
    const int code =
        sqlite3_prepare_v3(handle_, sql.data(), static_cast<int>(sql.size()),
                           SQLITE_PREPARE_PERSISTENT, &handle, nullptr);
    if (code != SQLITE_OK) return Error(code, "cannot prepare a statement on");
    found = prepared_.emplace(std::string(sql), handle).first;
  }
  KILN_CHECK(sqlite3_stmt_busy(found->second) == 0);
  return Statement(this, found->second);
}

absl::StatusOr<int64_t> Database::QueryInteger(absl::string_view sql) {
  ASSIGN_OR_RETURN(Statement statement, Prepare(sql));
  ASSIGN_OR_RETURN(const bool row, statement.Step());
  if (!row) {
    return absl::NotFoundError(
        absl::StrCat("no row in ", options_.path, " for: ", sql));
  }
  return statement.Integer(0);
}

int64_t Database::last_insert_id() const {
  return sqlite3_last_insert_rowid(handle_);
}

bool Database::in_transaction() const {
  return sqlite3_get_autocommit(handle_) == 0;
}

absl::StatusOr<std::string> Database::Serialize() {
  sqlite3_int64 size = 0;
  unsigned char* bytes = sqlite3_serialize(handle_, "main", &size, 0);
  if (bytes == nullptr) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no memory for a copy of ", options_.path, " of ", size, " bytes"));
  }
  std::string copy(reinterpret_cast<const char*>(bytes),
                   static_cast<size_t>(size));
  sqlite3_free(bytes);
  return copy;
}

absl::Status Database::ReplaceWith(Database* source) {
  sqlite3_backup* backup =
      sqlite3_backup_init(handle_, "main", source->handle_, "main");
  if (backup == nullptr) {
    return Error(sqlite3_extended_errcode(handle_), "cannot replace");
  }
  const int step = sqlite3_backup_step(backup, -1);
  const int finish = sqlite3_backup_finish(backup);
  wrote_ = true;
  if (step != SQLITE_DONE) return Error(step, "cannot replace");
  if (finish != SQLITE_OK) return Error(finish, "cannot replace");
  return absl::OkStatus();
}

absl::Status Database::Error(int code, absl::string_view action) const {
  const int system_errno =
      handle_ == nullptr ? 0 : sqlite3_system_errno(handle_);
  std::string message = absl::StrCat(action, " ", options_.path, ": ");
  const char* detail =
      handle_ == nullptr ? sqlite3_errstr(code) : sqlite3_errmsg(handle_);
  if (code == SQLITE_READONLY_ROLLBACK) {
    return absl::FailedPreconditionError(absl::StrCat(
        message,
        "an interrupted write is still to be rolled back, which a "
        "read-only user must not do; open the cache once for writing, as kiln "
        "cache check does"));
  }
  if (code == SQLITE_READONLY_DBMOVED) {
    return absl::FailedPreconditionError(absl::StrCat(
        message,
        "the file was moved, replaced or deleted while it was open; "
        "start again"));
  }
  switch (code & 0xFF) {
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return absl::DeadlineExceededError(absl::StrCat(
          message, "another process has held the lock for more than ",
          options_.busy_timeout.count(), " ms"));
    case SQLITE_FULL:
      return absl::ResourceExhaustedError(
          absl::StrCat(message, "no space left on the disk"));
    case SQLITE_NOMEM:
    case SQLITE_TOOBIG:
      return absl::ResourceExhaustedError(absl::StrCat(message, detail));
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return absl::DataLossError(
          absl::StrCat(message, detail, " (code ", code, ")"));
    case SQLITE_READONLY:
    case SQLITE_PERM:
      return absl::PermissionDeniedError(absl::StrCat(message, detail));
    case SQLITE_CANTOPEN:
    case SQLITE_IOERR:
      if (system_errno != 0) {
        return ErrnoStatus(system_errno, action, options_.path);
      }
      return absl::UnavailableError(
          absl::StrCat(message, detail, " (code ", code, ")"));
    default:
      return absl::InternalError(
          absl::StrCat(message, detail, " (code ", code, ")"));
  }
}

int Database::OnBusy(void* self, int count) {
  auto* database = static_cast<Database*>(self);
  const auto now = std::chrono::steady_clock::now();
  if (count == 0) database->busy_since_ = now;
  if (now - database->busy_since_ >= database->options_.busy_timeout) return 0;
  // Commits take about a millisecond; back off to 16 ms.
  std::this_thread::sleep_for(
      std::chrono::milliseconds(int64_t{1} << std::min(count, 4)));
  return 1;
}

absl::StatusOr<Transaction> Transaction::Begin(Database* database, Kind kind) {
  if (database->abandoned_) {
    RETURN_IF_ERROR(database->Rollback());
    database->abandoned_ = false;
  }
  KILN_CHECK(!database->in_transaction());
  ASSIGN_OR_RETURN(
      Statement begin,
      database->Prepare(kind == Kind::kRead ? "BEGIN" : "BEGIN IMMEDIATE"));
  RETURN_IF_ERROR(begin.Run());
  database->wrote_ = database->wrote_ || kind == Kind::kWrite;
  return Transaction(database);
}

Transaction::~Transaction() {
  if (database_ == nullptr) return;
  // After some errors SQLite has already rolled back. Where memory does not
  // even suffice for a ROLLBACK, the next transaction begins with it.
  if (database_->in_transaction()) {
    database_->abandoned_ = !database_->Rollback().ok();
  }
}

absl::Status Transaction::Commit() {
  KILN_CHECK(database_ != nullptr);
  ASSIGN_OR_RETURN(Statement commit, database_->Prepare("COMMIT"));
  RETURN_IF_ERROR(commit.Run());
  database_ = nullptr;
  return absl::OkStatus();
}

}  // namespace kiln
