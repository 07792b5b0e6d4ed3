#include "cache/schema.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "cache/plan_cache.h"
#include "cache/sqlite_db.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

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

absl::Status CheckTables(int version, Database* database) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Database> model,
                   NewMemoryDatabase(version));
  ASSIGN_OR_RETURN(const std::string expected, SchemaText(model.get()));
  ASSIGN_OR_RETURN(const std::string found, SchemaText(database));
  if (found == expected) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      "the table definitions of ", database->path(),
      " are not those of schema ", version, ": digest ", Sha256(found).Short(),
      ", expected ", Sha256(expected).Short(), "; ", kOtherCacheFolder));
}

// The schema version of a database that passes CheckIdentity.
absl::StatusOr<int> VersionOf(Database* database) {
  ASSIGN_OR_RETURN(const int64_t application_id,
                   database->QueryInteger("PRAGMA application_id"));
  ASSIGN_OR_RETURN(const int64_t version,
                   database->QueryInteger("PRAGMA user_version"));
  RETURN_IF_ERROR(CheckIdentity(
      database->path(), static_cast<uint32_t>(application_id), version));
  return static_cast<int>(version);
}

}  // namespace

absl::Status CheckIdentity(const std::string& path, uint32_t application_id,
                           int64_t version) {
  if (application_id != kCacheApplicationId) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s is not a Kiln cache: its application id is 0x%08X, expected "
        "0x%08X; %s",
        path, application_id, kCacheApplicationId, kOtherCacheFolder));
  }
  if (version >= 1 && version <= kCacheSchemaVersion) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      path, " has cache schema ", version, ", this build reads schemas 1 to ",
      kCacheSchemaVersion,
      version > kCacheSchemaVersion
          ? "; use the newer kiln that wrote it, or choose another folder with "
            "--cache"
          : "; choose another folder with --cache"));
}

absl::Status ApplySchema(int version, int to, Database* database) {
  const auto& files = CacheSchemaFiles();
  KILN_CHECK(files.size() == static_cast<size_t>(kCacheSchemaVersion));
  KILN_CHECK(0 <= version && version <= to && to <= kCacheSchemaVersion);
  while (version < to) {
    const auto& [name, sql] = files[static_cast<size_t>(version++)];
    KILN_CHECK(name == absl::StrFormat("schema/%02d.sql", version));
    RETURN_IF_ERROR(database->Execute(sql));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Database>> NewMemoryDatabase(int version) {
  ASSIGN_OR_RETURN(
      std::unique_ptr<Database> database,
      Database::Open({.path = "", .access = DatabaseAccess::kMemory}));
  RETURN_IF_ERROR(ApplySchema(0, version, database.get()));
  return database;
}

absl::Status BringUpToDate(Database* database) {
  ASSIGN_OR_RETURN(int version, VersionOf(database));
  if (version < kCacheSchemaVersion) {
    // Before anything that writes: a file that is refused is left alone.
    RETURN_IF_ERROR(CheckTables(version, database));
    ASSIGN_OR_RETURN(Transaction transaction,
                     Transaction::Begin(database, Transaction::Kind::kWrite));
    // Another process may have been faster.
    ASSIGN_OR_RETURN(version, VersionOf(database));
    RETURN_IF_ERROR(CheckTables(version, database));
    RETURN_IF_ERROR(ApplySchema(version, kCacheSchemaVersion, database));
    RETURN_IF_ERROR(transaction.Commit());
  }
  return CheckTables(kCacheSchemaVersion, database);
}

const TableShape& ShapeOf(absl::string_view table) {
  const auto found = std::find_if(
      kCacheTables.begin(), kCacheTables.end(),
      [&](const TableShape& shape) { return shape.name == table; });
  KILN_CHECK(found != kCacheTables.end());
  return *found;
}

int CountColumns(absl::string_view columns) {
  return static_cast<int>(std::count(columns.begin(), columns.end(), ',')) + 1;
}

std::string Slots(int count) {
  std::vector<std::string> slots;
  for (int i = 1; i <= count; ++i) slots.push_back(absl::StrCat("?", i));
  return absl::StrJoin(slots, ", ");
}

}  // namespace kiln
