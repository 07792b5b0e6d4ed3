// Stats, Check and Repair.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/plan_cache.h"
#include "cache/schema.h"
#include "cache/sqlite_db.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

constexpr size_t kFindingsMax = 10'000;

void Add(absl::string_view table, absl::string_view key,
         absl::string_view problem, std::vector<CacheFinding>* findings) {
  if (findings->size() >= kFindingsMax) return;
  findings->push_back({.table = std::string(table),
                       .key = std::string(key),
                       .problem = std::string(problem)});
}

// Damage that SQLite reports is a finding; anything else ends the check.
absl::Status AsFinding(const absl::Status& status,
                       std::vector<CacheFinding>* findings) {
  if (!absl::IsDataLoss(status)) return status;
  Add(kCacheFileName, "", status.message(), findings);
  return absl::OkStatus();
}

// Copies rows from `from` until the end or the first one that cannot be read;
// rows that `to` already has, or that break its constraints, are passed over.
// Returns how the scan ended.
absl::Status CopyRows(const TableShape& table, absl::string_view direction,
                      Database* from, Database* to) {
  const std::string columns =
      absl::StrCat(table.ids, table.ids.empty() ? "" : ", ", table.columns);
  const int count = CountColumns(columns);
  const std::string insert_sql =
      absl::StrCat("INSERT OR IGNORE INTO ", table.name, " (", columns,
                   ") VALUES (", Slots(count), ")");
  ASSIGN_OR_RETURN(Statement select,
                   from->Prepare(absl::StrCat(
                       "SELECT ", columns, " FROM ", table.name,
                       " NOT INDEXED ORDER BY ", table.order, direction)));
  for (;;) {
    ASSIGN_OR_RETURN(const bool more, select.Step());
    if (!more) return absl::OkStatus();
    ASSIGN_OR_RETURN(Statement insert, to->Prepare(insert_sql));
    for (int i = 0; i < count; ++i) insert.BindColumn(i + 1, select, i);
    const absl::Status status = insert.Run();
    // A column of another type than the table allows: the row is damaged.
    if (!status.ok() && !absl::IsInternal(status)) return status;
  }
}

absl::StatusOr<int64_t> CountRows(absl::string_view table, Database* database) {
  return database->QueryInteger(absl::StrCat("SELECT count(*) FROM ", table));
}

}  // namespace

absl::StatusOr<CacheStats> PlanCache::Stats() {
  CacheStats stats;
  stats.path = path_;
  ASSIGN_OR_RETURN(
      Transaction snapshot,
      Transaction::Begin(database_.get(), Transaction::Kind::kRead));
  ASSIGN_OR_RETURN(const int64_t version,
                   database_->QueryInteger("PRAGMA user_version"));
  stats.schema_version = static_cast<int>(version);
  ASSIGN_OR_RETURN(const int64_t page_bytes,
                   database_->QueryInteger("PRAGMA page_size"));
  ASSIGN_OR_RETURN(const int64_t pages,
                   database_->QueryInteger("PRAGMA page_count"));
  ASSIGN_OR_RETURN(const int64_t free_pages,
                   database_->QueryInteger("PRAGMA freelist_count"));
  stats.bytes = pages * page_bytes;
  stats.free_bytes = free_pages * page_bytes;
  for (const TableShape& table : kCacheTables) {
    TableStats entry;
    entry.name = std::string(table.name);
    ASSIGN_OR_RETURN(entry.rows, CountRows(table.name, database_.get()));
    ASSIGN_OR_RETURN(
        Statement select,
        database_->Prepare("SELECT sum(pgsize) FROM dbstat WHERE aggregate = 1 "
                           "AND name IN (SELECT name FROM sqlite_schema "
                           "WHERE tbl_name = ?1)"));
    select.BindText(1, table.name);
    ASSIGN_OR_RETURN(const bool found, select.Step());
    if (found) entry.bytes = select.Integer(0);
    stats.tables.push_back(std::move(entry));
  }
  std::sort(
      stats.tables.begin(), stats.tables.end(),
      [](const TableStats& a, const TableStats& b) { return a.name < b.name; });
  return stats;
}

absl::Status PlanCache::CheckPrograms(std::vector<CacheFinding>* findings) {
  ASSIGN_OR_RETURN(const std::vector<Digest> keys,
                   Keys("SELECT key FROM program NOT INDEXED ORDER BY id"));
  for (const Digest& key : keys) {
    Row<Program> row;
    RETURN_IF_ERROR(
        AsFinding(ReadProgram(key, RowCheck::kDigests, &row), findings));
    if (!row.problem.empty()) {
      Add("program", key.ToHex(), row.problem, findings);
    }
  }
  // Binaries that no program uses any more.
  ASSIGN_OR_RETURN(
      Statement select,
      database_->Prepare("SELECT digest, data FROM blob WHERE NOT EXISTS "
                         "(SELECT 1 FROM program "
                         "WHERE binary_digest = blob.digest) ORDER BY id"));
  for (;;) {
    ASSIGN_OR_RETURN(const bool more, select.Step());
    if (!more) return absl::OkStatus();
    if (Sha256(select.Bytes(1)).AsBytes() != select.Bytes(0)) {
      Add("blob", ToHex(select.Bytes(0)), "bytes do not match their digest",
          findings);
    }
  }
}

absl::Status PlanCache::CheckRejects(std::vector<CacheFinding>* findings) {
  ASSIGN_OR_RETURN(const std::vector<Digest> keys,
                   Keys("SELECT key FROM reject NOT INDEXED ORDER BY id"));
  for (const Digest& key : keys) {
    Row<Reject> row;
    RETURN_IF_ERROR(AsFinding(ReadReject(key, &row), findings));
    if (!row.problem.empty()) {
      Add("reject", key.ToHex(), row.problem, findings);
    }
  }
  return absl::OkStatus();
}

absl::Status PlanCache::CheckPlans(std::vector<CacheFinding>* findings) {
  ASSIGN_OR_RETURN(const std::vector<Digest> keys,
                   Keys("SELECT key FROM plan NOT INDEXED ORDER BY id"));
  for (const Digest& key : keys) {
    Row<StoredPlan> row;
    RETURN_IF_ERROR(
        AsFinding(ReadPlan(key, RowCheck::kDigests, &row), findings));
    if (!row.problem.empty()) Add("plan", key.ToHex(), row.problem, findings);
    Row<int64_t> use;
    RETURN_IF_ERROR(AsFinding(ReadPlanUse(key, &use), findings));
    if (!use.problem.empty()) {
      Add("plan_use", key.ToHex(), use.problem, findings);
    }
    if (!row.value.has_value()) continue;
    Row<std::vector<Measurement>> evidence;
    RETURN_IF_ERROR(AsFinding(ReadMeasurements(key, row, &evidence), findings));
    if (!evidence.problem.empty()) {
      Add("measurement", key.ToHex(), evidence.problem, findings);
    }
    std::vector<Digest> listed;
    {
      ASSIGN_OR_RETURN(
          Statement select,
          database_->Prepare("SELECT program_key FROM plan_program "
                             "WHERE plan_id = ?1 ORDER BY position"));
      select.BindInteger(1, row.id);
      for (;;) {
        ASSIGN_OR_RETURN(const bool more, select.Step());
        if (!more) break;
        // A damaged entry shows as a list that differs.
        listed.push_back(Digest::FromBytes(select.Bytes(0)).value_or(Digest{}));
      }
    }
    if (listed != row.value->plan.programs) {
      Add("plan_program", key.ToHex(),
          "the list of programs is not that of the plan's text", findings);
    }
    for (const Digest& program : row.value->plan.programs) {
      ASSIGN_OR_RETURN(const bool present, ContainsProgram(program));
      if (!present) {
        Add("plan", key.ToHex(),
            absl::StrCat("program ", program.ToHex(), " is missing"), findings);
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> PlanCache::MemoKeys() {
  ASSIGN_OR_RETURN(Statement select,
                   database_->Prepare("SELECT key FROM memo ORDER BY key"));
  std::vector<std::string> keys;
  for (;;) {
    ASSIGN_OR_RETURN(const bool more, select.Step());
    if (!more) return keys;
    keys.emplace_back(select.Bytes(0));
  }
}

absl::Status PlanCache::CheckMemos(std::vector<CacheFinding>* findings) {
  ASSIGN_OR_RETURN(const std::vector<std::string> keys, MemoKeys());
  for (const std::string& key : keys) {
    Row<std::string> row;
    RETURN_IF_ERROR(AsFinding(ReadMemo(key, &row), findings));
    if (!row.problem.empty()) Add("memo", ToHex(key), row.problem, findings);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<CacheFinding>> PlanCache::Check() {
  std::vector<CacheFinding> findings;
  ASSIGN_OR_RETURN(
      Transaction snapshot,
      Transaction::Begin(database_.get(), Transaction::Kind::kRead));
  const auto sqlite_checks = [&]() -> absl::Status {
    {
      ASSIGN_OR_RETURN(Statement check,
                       database_->Prepare("PRAGMA integrity_check"));
      for (;;) {
        ASSIGN_OR_RETURN(const bool more, check.Step());
        if (!more) break;
        if (check.Bytes(0) != "ok") {
          Add(kCacheFileName, "", check.Bytes(0), &findings);
        }
      }
    }
    ASSIGN_OR_RETURN(Statement check,
                     database_->Prepare("PRAGMA foreign_key_check"));
    for (;;) {
      ASSIGN_OR_RETURN(const bool more, check.Step());
      if (!more) return absl::OkStatus();
      Add(check.Bytes(0), "",
          absl::StrCat("row ", check.Integer(1), " refers to a missing row of ",
                       check.Bytes(2)),
          &findings);
    }
  };
  RETURN_IF_ERROR(AsFinding(sqlite_checks(), &findings));
  RETURN_IF_ERROR(AsFinding(CheckPrograms(&findings), &findings));
  RETURN_IF_ERROR(AsFinding(CheckRejects(&findings), &findings));
  RETURN_IF_ERROR(AsFinding(CheckPlans(&findings), &findings));
  RETURN_IF_ERROR(AsFinding(CheckMemos(&findings), &findings));
  return findings;
}

absl::StatusOr<RepairReport> PlanCache::Repair() {
  RETURN_IF_ERROR(RequireWritable());
  RepairReport report;
  ASSIGN_OR_RETURN(
      std::unique_ptr<Database> fresh,
      Database::Open({.path = "", .access = DatabaseAccess::kTemporary}));
  RETURN_IF_ERROR(ApplySchema(0, kCacheSchemaVersion, fresh.get()));
  // Children may arrive whose parents are lost; they are dropped below.
  RETURN_IF_ERROR(fresh->Execute("PRAGMA foreign_keys = OFF"));

  // Exclusive from the first row read until the last page replaced, so that
  // nothing another process publishes in between is lost.
  RETURN_IF_ERROR(database_->Execute("PRAGMA locking_mode = EXCLUSIVE"));

  struct Unlock {
    Database* database;

    ~Unlock() {
      database->Execute("PRAGMA locking_mode = NORMAL").IgnoreError();
      // The lock goes with the next access.
      database->QueryInteger("PRAGMA user_version").IgnoreError();
    }
  } unlock{database_.get()};

  RETURN_IF_ERROR(database_->Execute("BEGIN EXCLUSIVE; COMMIT"));
  // A newer build may have migrated the file since it was opened.
  RETURN_IF_ERROR(BringUpToDate(database_.get()));

  RETURN_IF_ERROR(fresh->Execute("BEGIN"));
  for (const TableShape& table : kCacheTables) {
    for (const absl::string_view direction : {"", " DESC"}) {
      const absl::Status status =
          CopyRows(table, direction, database_.get(), fresh.get());
      if (status.ok()) break;
      if (!absl::IsDataLoss(status)) return status;
      Add(table.name, "", status.message(), &report.dropped);
    }
  }
  RETURN_IF_ERROR(fresh->Execute(
      "DELETE FROM measurement WHERE plan_id NOT IN (SELECT id FROM plan);"
      "DELETE FROM plan_program WHERE plan_id NOT IN (SELECT id FROM plan);"
      "DELETE FROM plan_use WHERE plan_id NOT IN (SELECT id FROM plan);"
      "COMMIT; PRAGMA foreign_keys = ON"));

  // Every row is now looked at as any reader would, which moves the bad ones
  // into the new file's quarantine.
  PlanCacheOptions options = options_;
  options.mode = CacheMode::kOff;
  PlanCache copy(std::move(options), "", std::move(fresh));
  RETURN_IF_ERROR(copy.Sift(&report.dropped));
  for (const TableShape& table : kCacheTables) {
    ASSIGN_OR_RETURN(const int64_t rows,
                     CountRows(table.name, copy.database_.get()));
    report.kept.push_back({.name = std::string(table.name), .rows = rows});
  }
  RETURN_IF_ERROR(database_->ReplaceWith(copy.database_.get()));
  return report;
}

absl::Status PlanCache::Sift(std::vector<CacheFinding>* dropped) {
  ASSIGN_OR_RETURN(const std::vector<Digest> programs,
                   Keys("SELECT key FROM program ORDER BY id"));
  for (const Digest& key : programs) {
    RETURN_IF_ERROR(FindProgram(key).status());
  }
  ASSIGN_OR_RETURN(const std::vector<Digest> rejects,
                   Keys("SELECT key FROM reject ORDER BY id"));
  for (const Digest& key : rejects) {
    RETURN_IF_ERROR(FindReject(key).status());
  }
  ASSIGN_OR_RETURN(const std::vector<Digest> plans,
                   Keys("SELECT key FROM plan ORDER BY id"));
  for (const Digest& key : plans) {
    // Damaged evidence takes its plan along.
    const absl::Status status = LoadMeasurements(key).status();
    if (!status.ok() && !absl::IsDataLoss(status)) return status;
    Row<int64_t> use;
    RETURN_IF_ERROR(ReadPlanUse(key, &use));
    if (use.problem.empty()) continue;
    Add("plan_use", key.ToHex(), use.problem, dropped);
    ASSIGN_OR_RETURN(
        Statement remove,
        database_->Prepare("DELETE FROM plan_use WHERE plan_id = ?1"));
    remove.BindInteger(1, use.id);
    RETURN_IF_ERROR(remove.Run());
  }
  ASSIGN_OR_RETURN(const std::vector<std::string> memos, MemoKeys());
  for (const std::string& key : memos) {
    Row<std::string> row;
    RETURN_IF_ERROR(ReadMemo(key, &row));
    if (row.problem.empty()) continue;
    Add("memo", ToHex(key), row.problem, dropped);
    ASSIGN_OR_RETURN(Statement remove,
                     database_->Prepare("DELETE FROM memo WHERE key = ?1"));
    remove.BindBlob(1, key);
    RETURN_IF_ERROR(remove.Run());
  }
  RETURN_IF_ERROR(database_->Execute(
      "DELETE FROM blob WHERE digest NOT IN "
      "(SELECT binary_digest FROM program); DELETE FROM plan_program"));
  ASSIGN_OR_RETURN(const std::vector<StoredPlan> kept, ListPlans());
  for (const StoredPlan& stored : kept) {
    for (size_t i = 0; i < stored.plan.programs.size(); ++i) {
      ASSIGN_OR_RETURN(
          Statement insert,
          database_->Prepare("INSERT INTO plan_program "
                             "(plan_id, position, program_key) SELECT id, ?2, "
                             "?3 FROM plan WHERE key = ?1"));
      insert.BindBlob(1, stored.key.digest.AsBytes());
      insert.BindInteger(2, static_cast<int64_t>(i));
      insert.BindBlob(3, stored.plan.programs[i].AsBytes());
      RETURN_IF_ERROR(insert.Run());
    }
  }
  for (std::string& warning : TakeWarnings()) {
    Add("quarantine", "", warning, dropped);
  }
  return absl::OkStatus();
}

}  // namespace kiln
