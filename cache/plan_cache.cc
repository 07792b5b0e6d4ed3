// Opening, refusing, warnings and quarantine. Programs and rejects are in
// program_store.cc, plans and measurements in plan_store.cc, Stats, Check and
// Repair in cache_care.cc.

#include "cache/plan_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <ctime>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cache/row_codec.h"
#include "cache/row_io.h"
#include "cache/schema.h"
#include "cache/sqlite_db.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

constexpr size_t kWarningsMax = 1000;

// Source: SQLite file format, "The Database Header", sqlite.org/fileformat2.
constexpr size_t kHeaderBytes = 100;
constexpr absl::string_view kSqliteMagic("SQLite format 3\0", 16);
constexpr size_t kWriteVersionOffset = 18;  // 1 = rollback journal, 2 = WAL
constexpr size_t kReadVersionOffset = 19;
constexpr size_t kEncodingOffset = 56;  // 1 = UTF-8
constexpr size_t kUserVersionOffset = 60;
constexpr size_t kApplicationIdOffset = 68;

constexpr absl::string_view kOtherFolder =
    "choose another folder with --cache, or move the file away";

struct FileState {
  bool exists = false;
  uint64_t size = 0;
};

absl::StatusOr<FileState> StateOf(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) return FileState{};
    return ErrnoStatus(errno, "cannot stat", path);
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is not a regular file; ", kOtherFolder));
  }
  return FileState{.exists = true, .size = static_cast<uint64_t>(info.st_size)};
}

absl::StatusOr<std::string> ReadHeader(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus(errno, "cannot open", path);
  std::string header(kHeaderBytes, '\0');
  const ssize_t got = pread(fd, header.data(), header.size(), 0);
  const int read_errno = errno;
  close(fd);
  if (got < 0) return ErrnoStatus(read_errno, "cannot read", path);
  header.resize(static_cast<size_t>(got));
  return header;
}

uint32_t BigEndian32(absl::string_view bytes, size_t offset) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) {
    value = value << 8 | static_cast<uint8_t>(bytes[offset + i]);
  }
  return value;
}

absl::Status CheckIdentity(const std::string& path, uint32_t application_id,
                           int64_t version) {
  if (application_id != kCacheApplicationId) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s is not a Kiln cache: its application id is 0x%08X, expected "
        "0x%08X; %s",
        path, application_id, kCacheApplicationId, kOtherFolder));
  }
  if (version == kCacheSchemaVersion) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      path, " has cache schema ", version, ", this build reads schema ",
      kCacheSchemaVersion,
      version > kCacheSchemaVersion
          ? "; use the newer kiln that wrote it, or choose another folder with "
            "--cache"
          : "; choose another folder with --cache"));
}

// Refuses a file that SQLite must not even open: opening some other program's
// database can roll back its journal or create a write-ahead log beside it.
// `journal` is true when a rollback journal with contents lies beside it.
absl::Status CheckHeader(const std::string& path, bool journal) {
  ASSIGN_OR_RETURN(const std::string header, ReadHeader(path));
  const bool zeros = header.find_first_not_of('\0') == std::string::npos;
  // Power was cut while the very first page was written: SQLite rolls back.
  if (zeros && journal) return absl::OkStatus();
  if (header.size() < kHeaderBytes ||
      absl::string_view(header).substr(0, kSqliteMagic.size()) !=
          kSqliteMagic) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, " is not a Kiln cache: it starts with bytes ",
        ToHex(absl::string_view(header).substr(0, kSqliteMagic.size())),
        ", expected ", ToHex(kSqliteMagic), "; ", kOtherFolder));
  }
  RETURN_IF_ERROR(CheckIdentity(
      path, BigEndian32(header, kApplicationIdOffset),
      static_cast<int32_t>(BigEndian32(header, kUserVersionOffset))));
  const int write_version = header[kWriteVersionOffset];
  const int read_version = header[kReadVersionOffset];
  if (write_version != 1 || read_version != 1) {
    return absl::DataLossError(absl::StrCat(
        path, " has journal mode bytes ", write_version, " and ", read_version,
        ", expected 1 and 1 (rollback journal); ", kOtherFolder));
  }
  const uint32_t encoding = BigEndian32(header, kEncodingOffset);
  if (encoding != 1) {
    return absl::DataLossError(absl::StrCat(path, " has text encoding ",
                                            encoding, ", expected 1 (UTF-8); ",
                                            kOtherFolder));
  }
  return absl::OkStatus();
}

// The definitions of all tables and indices, for comparison.
absl::StatusOr<std::string> SchemaText(Database* database) {
  // ANALYZE may add sqlite_stat tables; they change no result.
  ASSIGN_OR_RETURN(
      Statement statement,
      database->Prepare("SELECT type, name, tbl_name, sql FROM sqlite_schema "
                        "WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\' "
                        "ORDER BY type, name"));
  std::string text;
  for (;;) {
    ASSIGN_OR_RETURN(const bool row, statement.Step());
    if (!row) return text;
    for (int column = 0; column < 4; ++column) {
      const absl::string_view bytes = statement.Bytes(column);
      absl::StrAppend(&text, bytes.size(), ":", bytes, ";");
    }
  }
}

absl::Status CheckSchema(Database* database) {
  ASSIGN_OR_RETURN(const int64_t application_id,
                   database->QueryInteger("PRAGMA application_id"));
  ASSIGN_OR_RETURN(const int64_t version,
                   database->QueryInteger("PRAGMA user_version"));
  RETURN_IF_ERROR(CheckIdentity(
      database->path(), static_cast<uint32_t>(application_id), version));
  ASSIGN_OR_RETURN(std::unique_ptr<Database> model, NewMemoryDatabase());
  ASSIGN_OR_RETURN(const std::string expected, SchemaText(model.get()));
  ASSIGN_OR_RETURN(const std::string found, SchemaText(database));
  if (found == expected) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("the table definitions of ", database->path(),
                   " are not those of schema ", kCacheSchemaVersion,
                   ": digest ", Sha256(found).Short(), ", expected ",
                   Sha256(expected).Short(), "; ", kOtherFolder));
}

// What to do about a file that is too damaged to be opened, and so to repair.
absl::Status WithAdvice(const absl::Status& status) {
  if (!absl::IsDataLoss(status) ||
      absl::StrContains(status.message(), kOtherFolder)) {
    return status;
  }
  return absl::DataLossError(
      absl::StrCat(status.message(), "; its end or its first pages are lost; ",
                   kOtherFolder));
}

// Creates the tables unless another process was faster.
absl::Status CreateIfEmpty(Database* database) {
  constexpr absl::string_view kPageCount = "PRAGMA page_count";
  ASSIGN_OR_RETURN(int64_t pages, database->QueryInteger(kPageCount));
  if (pages > 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(Transaction transaction,
                   Transaction::Begin(database, Transaction::Kind::kWrite));
  ASSIGN_OR_RETURN(
      const int64_t tables,
      database->QueryInteger("SELECT count(*) FROM sqlite_schema"));
  if (tables > 0) return absl::OkStatus();
  RETURN_IF_ERROR(database->Execute(CacheSchemaSql()));
  return transaction.Commit();
}

std::string PathOf(const PlanCacheOptions& options) {
  const std::string& directory = options.directory;
  return absl::StrCat(directory,
                      !directory.empty() && directory.back() == '/' ? "" : "/",
                      options.file_name);
}

}  // namespace

const std::string& CacheSchemaSql() {
  const auto& files = CacheSchemaFiles();
  KILN_CHECK(files.size() == 1);
  return files[0].second;
}

absl::StatusOr<std::unique_ptr<Database>> NewMemoryDatabase() {
  ASSIGN_OR_RETURN(
      std::unique_ptr<Database> database,
      Database::Open({.path = "", .access = DatabaseAccess::kMemory}));
  RETURN_IF_ERROR(database->Execute(CacheSchemaSql()));
  return database;
}

absl::string_view CacheModeName(CacheMode mode) {
  switch (mode) {
    case CacheMode::kReadWrite:
      return "read-write";
    case CacheMode::kReadOnly:
      return "read-only";
    case CacheMode::kOff:
      return "off";
  }
  KILN_UNREACHABLE();
}

absl::string_view RejectStageName(RejectStage stage) {
  switch (stage) {
    case RejectStage::kCompile:
      return "compile";
    case RejectStage::kInspect:
      return "inspect";
    case RejectStage::kVerify:
      return "verify";
    case RejectStage::kRace:
      return "race";
  }
  KILN_UNREACHABLE();
}

absl::string_view VerdictName(Verdict verdict) {
  switch (verdict) {
    case Verdict::kWon:
      return "won";
    case Verdict::kLost:
      return "lost";
    case Verdict::kEliminated:
      return "eliminated";
    case Verdict::kIdentical:
      return "identical";
    case Verdict::kRejected:
      return "rejected";
  }
  KILN_UNREACHABLE();
}

PlanCache::PlanCache(PlanCacheOptions options, std::string path,
                     std::unique_ptr<Database> database)
    : options_(std::move(options)),
      path_(std::move(path)),
      database_(std::move(database)) {}

PlanCache::PlanCache(PlanCache&&) noexcept = default;
PlanCache& PlanCache::operator=(PlanCache&&) noexcept = default;
PlanCache::~PlanCache() = default;

absl::StatusOr<PlanCache> PlanCache::Open(absl::string_view directory,
                                          CacheMode mode) {
  PlanCacheOptions options;
  options.directory = std::string(directory);
  options.mode = mode;
  return Open(options);
}

absl::StatusOr<PlanCache> PlanCache::Open(const PlanCacheOptions& options) {
  if (options.mode != CacheMode::kOff && options.directory.empty()) {
    return absl::InvalidArgumentError("cache folder is empty");
  }
  switch (options.mode) {
    case CacheMode::kReadWrite:
      return OpenReadWrite(options);
    case CacheMode::kReadOnly:
      return OpenReadOnly(options);
    case CacheMode::kOff:
      return OpenMemory(options);
  }
  KILN_UNREACHABLE();
}

absl::StatusOr<PlanCache> PlanCache::OpenMemory(PlanCacheOptions options) {
  ASSIGN_OR_RETURN(std::unique_ptr<Database> database, NewMemoryDatabase());
  return PlanCache(std::move(options), "", std::move(database));
}

absl::StatusOr<PlanCache> PlanCache::OpenReadWrite(PlanCacheOptions options) {
  RETURN_IF_ERROR(MakeDirectories(options.directory));
  ASSIGN_OR_RETURN(const FileSystemInfo info,
                   options.probe_file_system(options.directory));
  if (const std::string name = NetworkFileSystemName(info); !name.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cache folder ", options.directory, " lies on a network file system (",
        name,
        "), where locks of two hosts may not see each other and writers "
        "destroy the file; choose a local folder with --cache and carry "
        "results over with kiln cache export, or use the cache read-only"));
  }
  const std::string path = PathOf(options);
  ASSIGN_OR_RETURN(const FileState file, StateOf(path));
  if (file.size > 0) {
    ASSIGN_OR_RETURN(const FileState journal,
                     StateOf(absl::StrCat(path, "-journal")));
    RETURN_IF_ERROR(CheckHeader(path, journal.size > 0));
  }
  // SQLite would quietly fall back to reading only.
  if (access(file.exists ? path.c_str() : options.directory.c_str(), W_OK) !=
      0) {
    const absl::Status status = ErrnoStatus(
        errno, "cannot write", file.exists ? path : options.directory);
    return absl::Status(status.code(),
                        absl::StrCat(status.message(),
                                     "; --cache-mode read-only reads it, off "
                                     "does without it"));
  }
  absl::StatusOr<std::unique_ptr<Database>> opened =
      Database::Open({.path = path,
                      .access = DatabaseAccess::kReadWrite,
                      .busy_timeout = options.busy_timeout});
  RETURN_IF_ERROR(WithAdvice(opened.status()));
  std::unique_ptr<Database> database = *std::move(opened);
  RETURN_IF_ERROR(WithAdvice(CreateIfEmpty(database.get())));
  RETURN_IF_ERROR(WithAdvice(CheckSchema(database.get())));
  return PlanCache(std::move(options), path, std::move(database));
}

absl::StatusOr<PlanCache> PlanCache::OpenReadOnly(PlanCacheOptions options) {
  const std::string path = PathOf(options);
  ASSIGN_OR_RETURN(const FileState file, StateOf(path));
  if (file.size == 0) {
    ASSIGN_OR_RETURN(PlanCache cache, OpenMemory(std::move(options)));
    cache.Warn(absl::StrCat("no cache at ", path, ", reading it as empty"));
    return cache;
  }
  ASSIGN_OR_RETURN(const FileState journal,
                   StateOf(absl::StrCat(path, "-journal")));
  RETURN_IF_ERROR(CheckHeader(path, journal.size > 0));
  ASSIGN_OR_RETURN(const FileSystemInfo info,
                   options.probe_file_system(options.directory));
  // Nobody writes on a network file system, and its locks may not work.
  const DatabaseAccess access = NetworkFileSystemName(info).empty()
                                    ? DatabaseAccess::kReadOnly
                                    : DatabaseAccess::kReadOnlyUnlocked;
  absl::StatusOr<std::unique_ptr<Database>> opened = Database::Open(
      {.path = path, .access = access, .busy_timeout = options.busy_timeout});
  RETURN_IF_ERROR(WithAdvice(opened.status()));
  std::unique_ptr<Database> database = *std::move(opened);
  RETURN_IF_ERROR(WithAdvice(CheckSchema(database.get())));
  return PlanCache(std::move(options), path, std::move(database));
}

int64_t PlanCache::Now() const {
  return options_.clock ? options_.clock()
                        : static_cast<int64_t>(std::time(nullptr));
}

void PlanCache::Warn(std::string text) {
  if (warnings_.size() < kWarningsMax) warnings_.push_back(std::move(text));
}

std::vector<std::string> PlanCache::TakeWarnings() {
  return std::exchange(warnings_, {});
}

absl::Status PlanCache::RequireWritable() const {
  if (options_.mode != CacheMode::kReadOnly) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("cache ", options_.directory, " is open read-only"));
}

absl::StatusOr<std::vector<Digest>> PlanCache::Keys(absl::string_view sql) {
  ASSIGN_OR_RETURN(Statement statement, database_->Prepare(sql));
  std::vector<Digest> keys;
  for (;;) {
    ASSIGN_OR_RETURN(const bool row, statement.Step());
    if (!row) return keys;
    const absl::StatusOr<Digest> key = Digest::FromBytes(statement.Bytes(0));
    if (key.ok()) {
      keys.push_back(*key);
    } else {
      Warn(absl::StrCat("a row of ", path_,
                        " has no usable key: ", key.status().message()));
    }
  }
}

absl::Status PlanCache::AddToQuarantine(absl::string_view table,
                                        absl::string_view key,
                                        absl::string_view reason,
                                        absl::string_view content) {
  ASSIGN_OR_RETURN(
      Statement insert,
      database_->Prepare("INSERT INTO quarantine "
                         "(source, key, reason, content, created_unix) "
                         "VALUES (?1, ?2, ?3, ?4, ?5)"));
  insert.BindText(1, table);
  insert.BindBlob(2, key);
  insert.BindText(3, reason);
  insert.BindBlob(4, content);
  insert.BindInteger(5, Now());
  return insert.Run();
}

void PlanCache::Quarantine(absl::string_view table, const Digest& key,
                           absl::string_view problem,
                           const std::function<absl::Status()>& move) {
  const std::string what =
      absl::StrCat(table, " ", key.ToHex(), " in ",
                   path_.empty() ? "memory" : path_, " is damaged: ", problem);
  if (options_.mode == CacheMode::kReadOnly) {
    Warn(absl::StrCat(what, "; not used, and left in place (read-only)"));
    return;
  }
  const auto run = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(
        Transaction transaction,
        Transaction::Begin(database_.get(), Transaction::Kind::kWrite));
    RETURN_IF_ERROR(move());
    return transaction.Commit();
  };
  if (const absl::Status status = run(); !status.ok()) {
    Warn(absl::StrCat(what, "; not used, but it could not be quarantined: ",
                      status.message()));
    return;
  }
  Warn(absl::StrCat(what, "; moved to quarantine, counts as a miss"));
}

absl::Status PlanCache::ReadMemo(absl::string_view key, Row<std::string>* row) {
  ASSIGN_OR_RETURN(
      Statement select,
      database_->Prepare("SELECT value, row_digest FROM memo WHERE key = ?1"));
  select.BindBlob(1, key);
  ASSIGN_OR_RETURN(const bool found, select.Step());
  if (!found) return absl::OkStatus();
  const std::string encoded =
      EncodeRow(MemoColumns{.key = key, .value = select.Bytes(0)});
  if (Sha256(encoded).AsBytes() != select.Bytes(1)) {
    row->problem = std::string(kRowDigestProblem);
    row->content = encoded;
    return absl::OkStatus();
  }
  row->value = std::string(select.Bytes(0));
  return absl::OkStatus();
}

absl::StatusOr<std::optional<std::string>> PlanCache::FindMemo(
    absl::string_view key) {
  Row<std::string> row;
  RETURN_IF_ERROR(ReadMemo(key, &row));
  // No quarantine: the next PutMemo of the key replaces the row.
  if (!row.problem.empty()) {
    Warn(absl::StrCat("memo ", Sha256(key).Short(),
                      " is damaged: ", row.problem, "; counts as a miss"));
  }
  return std::move(row.value);
}

absl::Status PlanCache::PutMemo(absl::string_view key,
                                absl::string_view value) {
  if (options_.mode == CacheMode::kReadOnly) return absl::OkStatus();
  const Digest row_digest =
      Sha256(EncodeRow(MemoColumns{.key = key, .value = value}));
  ASSIGN_OR_RETURN(
      Transaction transaction,
      Transaction::Begin(database_.get(), Transaction::Kind::kWrite));
  {
    ASSIGN_OR_RETURN(
        Statement insert,
        database_->Prepare("INSERT OR REPLACE INTO memo "
                           "(key, value, row_digest) VALUES (?1, ?2, ?3)"));
    insert.BindBlob(1, key);
    insert.BindBlob(2, value);
    insert.BindBlob(3, row_digest.AsBytes());
    RETURN_IF_ERROR(insert.Run());
  }
  return transaction.Commit();
}

}  // namespace kiln
