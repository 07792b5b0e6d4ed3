// The tables of the cache and how they came about: one SQL file per schema
// version, each on top of the one before. Internal to cache/.

#ifndef KILN_CACHE_SCHEMA_H_
#define KILN_CACHE_SCHEMA_H_

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kiln {

class Database;

// Generated from schema/*.sql by kiln_embed: name and contents, by version.
const std::vector<std::pair<std::string, std::string>>& CacheSchemaFiles();

// Brings a database from schema `version` (0: empty) to `to`. Inside the
// caller's transaction, so that a file is never between two versions.
absl::Status ApplySchema(int version, int to, Database* database);

// A private database in memory with the empty tables of schema `version`.
absl::StatusOr<std::unique_ptr<Database>> NewMemoryDatabase(int version);

// Migrates an older file in one transaction, and checks that the tables of a
// file are exactly those of its version, before and after.
//   Errors: FailedPrecondition (foreign, or newer than this build), DataLoss
//   (altered tables), and those of Database.
absl::Status BringUpToDate(Database* database);

// FailedPrecondition unless this build reads and migrates such a file; names
// both versions and what to do.
absl::Status CheckIdentity(const std::string& path, uint32_t application_id,
                           int64_t version);

// A table and its columns in the order of their declaration.
struct TableShape {
  absl::string_view name;
  absl::string_view ids;      // columns that hold row ids of this file
  absl::string_view columns;  // the rest: the same in every file
  absl::string_view order;    // primary key
};

// Every table, parents before children. A new column is added here once.
inline constexpr std::array<TableShape, 10> kCacheTables = {{
    {"blob", "id", "digest, data", "id"},
    {"program", "id",
     "key, preimage, target, toolchain_name, toolchain_version, "
     "toolchain_content, binary_digest, kernels, log, compile_seconds, "
     "created_unix, host_name, device_name, tool_version, row_digest, "
     "checksum",
     "id"},
    {"reject", "id",
     "key, preimage, stage, reason, log, created_unix, host_name, "
     "device_name, tool_version, row_digest",
     "id"},
    {"plan", "id",
     "key, preimage, plan, measurements, created_unix, host_name, "
     "device_name, tool_version, row_digest, checksum",
     "id"},
    {"plan_program", "plan_id", "position, program_key", "plan_id"},
    {"plan_use", "plan_id", "used_unix, row_digest", "plan_id"},
    {"measurement", "id, plan_id",
     "position, label, candidate, verdict, reason, worst_error, regret, "
     "numerics_class, arena_bytes, registers, samples, row_digest",
     "id"},
    {"memo", "", "key, value, row_digest", "key"},
    {"lease", "",
     "key, boot, pid, start_ticks, token, expires_unix, row_digest", "key"},
    {"quarantine", "id", "source, key, reason, content, created_unix", "id"},
}};

// The shape of a table that exists.
const TableShape& ShapeOf(absl::string_view table);

// Columns in a list such as TableShape::columns.
int CountColumns(absl::string_view columns);
// "?1, ?2, ...", `count` of them.
std::string Slots(int count);

}  // namespace kiln

#endif  // KILN_CACHE_SCHEMA_H_
