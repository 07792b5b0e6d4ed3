// Opening, refusing, warnings and quarantine. Programs and rejects are in
// program_store.cc, plans and measurements in plan_store.cc, Stats, Check and
// Repair in cache_care.cc.

#include "cache/plan_cache.h"

#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache/file_identity.h"
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

// What to do about a file that is too damaged to be opened, and so to repair.
absl::Status WithAdvice(const absl::Status& status) {
  if (!absl::IsDataLoss(status) ||
      absl::StrContains(status.message(), kOtherCacheFolder)) {
    return status;
  }
  return absl::DataLossError(
      absl::StrCat(status.message(), "; its end or its first pages are lost; ",
                   kOtherCacheFolder));
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
  RETURN_IF_ERROR(ApplySchema(0, kCacheSchemaVersion, database));
  return transaction.Commit();
}

// What an older file that may not be changed is read through: its contents in a
// private nameless file, migrated.
absl::StatusOr<std::unique_ptr<Database>> MigratedCopy(Database* database) {
  ASSIGN_OR_RETURN(
      std::unique_ptr<Database> copy,
      Database::Open({.path = "", .access = DatabaseAccess::kTemporary}));
  RETURN_IF_ERROR(copy->ReplaceWith(database));
  if (const absl::Status status = BringUpToDate(copy.get()); !status.ok()) {
    return absl::Status(
        status.code(),
        absl::StrCat("copy of ", database->path(), ": ", status.message()));
  }
  return copy;
}

std::string PathOf(const PlanCacheOptions& options) {
  const std::string& directory = options.directory;
  return absl::StrCat(directory,
                      !directory.empty() && directory.back() == '/' ? "" : "/",
                      options.file_name);
}

}  // namespace

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
  ASSIGN_OR_RETURN(std::unique_ptr<Database> database,
                   NewMemoryDatabase(kCacheSchemaVersion));
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
  ASSIGN_OR_RETURN(const CacheFileState file, ExamineCacheFile(path));
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
  RETURN_IF_ERROR(WithAdvice(BringUpToDate(database.get())));
  return PlanCache(std::move(options), path, std::move(database));
}

absl::StatusOr<PlanCache> PlanCache::OpenReadOnly(PlanCacheOptions options) {
  const std::string path = PathOf(options);
  ASSIGN_OR_RETURN(const CacheFileState file, ExamineCacheFile(path));
  if (file.bytes == 0) {
    ASSIGN_OR_RETURN(PlanCache cache, OpenMemory(std::move(options)));
    cache.Warn(absl::StrCat("no cache at ", path, ", reading it as empty"));
    return cache;
  }
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
  absl::StatusOr<int64_t> version =
      database->QueryInteger("PRAGMA user_version");
  RETURN_IF_ERROR(WithAdvice(version.status()));
  if (*version < kCacheSchemaVersion) {
    absl::StatusOr<std::unique_ptr<Database>> copy =
        MigratedCopy(database.get());
    RETURN_IF_ERROR(WithAdvice(copy.status()));
    PlanCache cache(std::move(options), path, *std::move(copy));
    cache.Warn(absl::StrCat(path, " has the older cache schema ", *version,
                            "; read through a temporary copy, until the cache "
                            "is opened once for writing"));
    return cache;
  }
  RETURN_IF_ERROR(WithAdvice(BringUpToDate(database.get())));
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
