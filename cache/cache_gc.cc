// Garbage collection: what goes is decided on the sizes, ages and references of
// all rows first, then removed in one transaction.

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/plan_cache.h"
#include "cache/sqlite_db.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

struct ProgramRow {
  int64_t id = 0;
  int64_t bytes = 0;  // without the binary
  int64_t created = 0;
  std::string binary;
  size_t plans = 0;  // that need it
  bool kept = false;
  bool removed = false;
};

struct PlanRow {
  int64_t id = 0;
  int64_t bytes = 0;
  int64_t created = 0;
  int64_t used = 0;  // at least `created`
  std::vector<std::string> programs;
  bool kept = false;
  bool removed = false;
};

struct OtherRow {
  std::string table;
  int64_t id = 0;
  std::string key;
  int64_t bytes = 0;
  int64_t created = 0;
  bool removed = false;
};

struct Blob {
  int64_t bytes = 0;
  size_t programs = 0;
};

// What the age of a row counts from.
int64_t LastUse(const ProgramRow& row) { return row.created; }

int64_t LastUse(const PlanRow& row) { return row.used; }

template <typename T>
std::vector<T*> OldestFirst(std::map<std::string, T>* rows) {
  std::vector<T*> sorted;
  for (auto& [key, row] : *rows) sorted.push_back(&row);
  std::stable_sort(sorted.begin(), sorted.end(), [](const T* a, const T* b) {
    return LastUse(*a) < LastUse(*b);
  });
  return sorted;
}

// All rows as far as collection looks at them, by raw key.
class Collection {
 public:
  absl::Status Load(Database* database);

  void SetUse(const Digest& plan, int64_t used) {
    plans_.at(std::string(plan.AsBytes())).used = used;
  }

  void Decide(const GcOptions& options, int64_t now, int64_t file_bytes);
  absl::Status Remove(Database* database) const;

  const std::vector<GcItem>& removed() const { return removed_; }

  int64_t live_bytes() const { return live_; }

  size_t PlansKept() const { return Kept(plans_); }

  size_t ProgramsKept() const { return Kept(programs_); }

 private:
  template <typename T>
  static size_t Kept(const std::map<std::string, T>& rows) {
    return static_cast<size_t>(
        std::count_if(rows.begin(), rows.end(),
                      [](const auto& entry) { return !entry.second.removed; }));
  }

  void Keep(const GcOptions& options);
  void Drop(PlanRow* plan, const std::string& reason, bool with_programs,
            int64_t newest);
  void Drop(ProgramRow* program, const std::string& reason);
  void Drop(OtherRow* row, const std::string& reason);
  void Count(absl::string_view table, const std::string& key, int64_t bytes,
             int64_t created, int64_t used, const std::string& reason);

  std::map<std::string, ProgramRow> programs_;
  std::map<std::string, PlanRow> plans_;
  std::vector<OtherRow> others_;  // quarantine, then rejects; oldest first
  std::map<std::string, Blob> blobs_;
  std::map<const void*, std::string> keys_;  // of programs_ and plans_
  std::vector<GcItem> removed_;
  int64_t live_ = 0;
};

absl::Status Collection::Load(Database* database) {
  {
    ASSIGN_OR_RETURN(
        Statement select,
        database->Prepare("SELECT digest, length(data) FROM blob"));
    for (;;) {
      ASSIGN_OR_RETURN(const bool more, select.Step());
      if (!more) break;
      blobs_[std::string(select.Bytes(0))].bytes = select.Integer(1);
      live_ += select.Integer(1);
    }
  }
  {
    ASSIGN_OR_RETURN(
        Statement select,
        database->Prepare("SELECT id, key, created_unix, binary_digest, "
                          "length(preimage) + length(kernels) + length(log) "
                          "+ 200 FROM program"));
    for (;;) {
      ASSIGN_OR_RETURN(const bool more, select.Step());
      if (!more) break;
      ProgramRow& row = programs_[std::string(select.Bytes(1))];
      row = {.id = select.Integer(0),
             .bytes = select.Integer(4),
             .created = select.Integer(2),
             .binary = std::string(select.Bytes(3))};
      ++blobs_[row.binary].programs;
      live_ += row.bytes;
    }
  }
  std::map<int64_t, PlanRow*> by_id;
  {
    ASSIGN_OR_RETURN(
        Statement select,
        database->Prepare(
            "SELECT id, key, created_unix, length(preimage) + length(plan) + "
            "200 + coalesce((SELECT sum(length(label) + length(reason) + "
            "length(samples) + 200) FROM measurement WHERE plan_id = plan.id), "
            "0) FROM plan"));
    for (;;) {
      ASSIGN_OR_RETURN(const bool more, select.Step());
      if (!more) break;
      PlanRow& row = plans_[std::string(select.Bytes(1))];
      row.id = select.Integer(0);
      row.created = select.Integer(2);
      row.used = row.created;
      row.bytes = select.Integer(3);
      by_id[row.id] = &row;
      live_ += row.bytes;
    }
  }
  {
    ASSIGN_OR_RETURN(
        Statement select,
        database->Prepare("SELECT plan_id, program_key FROM plan_program"));
    for (;;) {
      ASSIGN_OR_RETURN(const bool more, select.Step());
      if (!more) break;
      const auto plan = by_id.find(select.Integer(0));
      if (plan == by_id.end()) continue;
      const std::string key(select.Bytes(1));
      plan->second->programs.push_back(key);
      if (const auto it = programs_.find(key); it != programs_.end()) {
        ++it->second.plans;
      }
    }
  }
  for (const absl::string_view sql :
       {"SELECT 'quarantine', id, key, length(content) + length(reason) + 100, "
        "created_unix FROM quarantine ORDER BY created_unix, id",
        "SELECT 'reject', id, key, length(preimage) + length(reason) + "
        "length(log) + 200, created_unix FROM reject "
        "ORDER BY created_unix, key"}) {
    ASSIGN_OR_RETURN(Statement select, database->Prepare(sql));
    for (;;) {
      ASSIGN_OR_RETURN(const bool more, select.Step());
      if (!more) break;
      others_.push_back({.table = std::string(select.Bytes(0)),
                         .id = select.Integer(1),
                         .key = std::string(select.Bytes(2)),
                         .bytes = select.Integer(3),
                         .created = select.Integer(4)});
      live_ += others_.back().bytes;
    }
  }
  for (auto& [key, row] : programs_) keys_[&row] = key;
  for (auto& [key, row] : plans_) keys_[&row] = key;
  return absl::OkStatus();
}

void Collection::Keep(const GcOptions& options) {
  std::set<std::string> roots;
  for (const Digest& key : options.root_programs) {
    roots.insert(std::string(key.AsBytes()));
  }
  for (const Digest& key : options.root_plans) {
    const auto it = plans_.find(std::string(key.AsBytes()));
    if (it != plans_.end()) it->second.kept = true;
  }
  for (auto& [key, plan] : plans_) {
    const bool of_bundle =
        !plan.programs.empty() &&
        std::all_of(plan.programs.begin(), plan.programs.end(),
                    [&](const std::string& program) {
                      return roots.count(program) != 0;
                    });
    plan.kept = plan.kept || of_bundle;
    if (!plan.kept) continue;
    for (const std::string& program : plan.programs) {
      const auto it = programs_.find(program);
      if (it != programs_.end()) it->second.kept = true;
    }
  }
  for (auto& [key, program] : programs_) {
    program.kept = program.kept || roots.count(key) != 0;
  }
}

void Collection::Count(absl::string_view table, const std::string& key,
                       int64_t bytes, int64_t created, int64_t used,
                       const std::string& reason) {
  live_ -= bytes;
  removed_.push_back({.table = std::string(table),
                      .key = ToHex(key),
                      .bytes = bytes,
                      .created_unix = created,
                      .used_unix = used,
                      .reason = reason});
}

void Collection::Drop(ProgramRow* program, const std::string& reason) {
  program->removed = true;
  Blob& blob = blobs_[program->binary];
  // A binary goes with the last program that has it.
  const int64_t binary = --blob.programs == 0 ? blob.bytes : 0;
  Count("program", keys_[program], program->bytes + binary, program->created,
        program->created, reason);
}

void Collection::Drop(PlanRow* plan, const std::string& reason,
                      bool with_programs, int64_t newest) {
  plan->removed = true;
  Count("plan", keys_[plan], plan->bytes, plan->created, plan->used, reason);
  for (const std::string& key : plan->programs) {
    const auto it = programs_.find(key);
    if (it == programs_.end()) continue;
    ProgramRow& program = it->second;
    --program.plans;
    if (with_programs && program.plans == 0 && !program.kept &&
        !program.removed && program.created <= newest) {
      Drop(&program, "unused");
    }
  }
}

void Collection::Drop(OtherRow* row, const std::string& reason) {
  row->removed = true;
  Count(row->table, row->key, row->bytes, row->created, row->created, reason);
}

void Collection::Decide(const GcOptions& options, int64_t now,
                        int64_t file_bytes) {
  Keep(options);
  // Nothing newer may go.
  const int64_t newest = now - kGcGraceSeconds;
  const std::vector<PlanRow*> plans = OldestFirst(&plans_);
  const std::vector<ProgramRow*> programs = OldestFirst(&programs_);
  // Pages hold less than they could; what they hold now tells how much less.
  const double overhead = live_ > 0
                              ? std::max(1.0, static_cast<double>(file_bytes) /
                                                  static_cast<double>(live_))
                              : 1.0;
  if (options.age_max.has_value()) {
    const int64_t oldest = std::min(newest, now - *options.age_max);
    for (OtherRow& row : others_) {
      if (row.created < oldest) Drop(&row, "age");
    }
    for (PlanRow* plan : plans) {
      if (!plan->kept && plan->used < oldest) {
        Drop(plan, "age", false, newest);
      }
    }
    for (ProgramRow* program : programs) {
      if (!program->kept && program->plans == 0 && program->created < oldest) {
        Drop(program, "age");
      }
    }
  }
  if (!options.bytes_max.has_value()) return;
  const auto small_enough = [&] {
    return static_cast<double>(live_) * overhead <=
           static_cast<double>(*options.bytes_max);
  };
  const auto drop_others = [&](absl::string_view table) {
    for (OtherRow& row : others_) {
      if (small_enough()) return;
      if (row.table == table && !row.removed && row.created <= newest) {
        Drop(&row, "size");
      }
    }
  };
  drop_others("quarantine");
  for (ProgramRow* program : programs) {
    if (small_enough()) return;
    if (!program->kept && !program->removed && program->plans == 0 &&
        program->created <= newest) {
      Drop(program, "size");
    }
  }
  for (PlanRow* plan : plans) {
    if (small_enough()) return;
    if (!plan->kept && !plan->removed && plan->used <= newest) {
      Drop(plan, "size", true, newest);
    }
  }
  drop_others("reject");
}

absl::Status Collection::Remove(Database* database) const {
  const auto remove = [&](absl::string_view table, int64_t id) -> absl::Status {
    ASSIGN_OR_RETURN(Statement statement,
                     database->Prepare(absl::StrCat("DELETE FROM ", table,
                                                    " WHERE id = ?1")));
    statement.BindInteger(1, id);
    return statement.Run();
  };
  for (const auto& [key, plan] : plans_) {
    if (plan.removed) RETURN_IF_ERROR(remove("plan", plan.id));
  }
  for (const auto& [key, program] : programs_) {
    if (program.removed) RETURN_IF_ERROR(remove("program", program.id));
  }
  for (const OtherRow& row : others_) {
    if (row.removed) RETURN_IF_ERROR(remove(row.table, row.id));
  }
  return database->Execute(
      "DELETE FROM blob WHERE digest NOT IN "
      "(SELECT binary_digest FROM program)");
}

absl::StatusOr<int64_t> FileBytes(Database* database) {
  ASSIGN_OR_RETURN(const int64_t pages,
                   database->QueryInteger("PRAGMA page_count"));
  ASSIGN_OR_RETURN(const int64_t page_bytes,
                   database->QueryInteger("PRAGMA page_size"));
  return pages * page_bytes;
}

}  // namespace

absl::StatusOr<GcReport> PlanCache::CollectGarbage(const GcOptions& options) {
  if (!options.dry_run) RETURN_IF_ERROR(RequireWritable());
  GcReport report;
  Collection rows;
  {
    ASSIGN_OR_RETURN(
        Transaction transaction,
        Transaction::Begin(database_.get(), options.dry_run
                                                ? Transaction::Kind::kRead
                                                : Transaction::Kind::kWrite));
    ASSIGN_OR_RETURN(report.bytes_before, FileBytes(database_.get()));
    ASSIGN_OR_RETURN(const int64_t free_pages,
                     database_->QueryInteger("PRAGMA freelist_count"));
    ASSIGN_OR_RETURN(const int64_t page_bytes,
                     database_->QueryInteger("PRAGMA page_size"));
    const int64_t used = report.bytes_before - free_pages * page_bytes;
    RETURN_IF_ERROR(rows.Load(database_.get()));
    ASSIGN_OR_RETURN(const std::vector<Digest> noted,
                     Keys("SELECT key FROM plan_use JOIN plan ON id = plan_id "
                          "ORDER BY plan_id"));
    for (const Digest& key : noted) {
      Row<int64_t> row;
      RETURN_IF_ERROR(ReadPlanUse(key, &row));
      if (row.value.has_value()) rows.SetUse(key, *row.value);
    }
    const int64_t live_before = rows.live_bytes();
    rows.Decide(options, Now(), used);
    report.removed = rows.removed();
    report.plans_kept = rows.PlansKept();
    report.programs_kept = rows.ProgramsKept();
    report.bytes_after =
        live_before == 0
            ? used
            : static_cast<int64_t>(static_cast<double>(used) *
                                   static_cast<double>(rows.live_bytes()) /
                                   static_cast<double>(live_before));
    if (options.dry_run) return report;
    if (!report.removed.empty()) {
      RETURN_IF_ERROR(rows.Remove(database_.get()));
    }
    ASSIGN_OR_RETURN(const std::vector<Digest> leases,
                     Keys("SELECT key FROM lease ORDER BY key"));
    for (const Digest& key : leases) {
      ASSIGN_OR_RETURN(const bool alive, IsLeasedToOther(key));
      if (!alive) RETURN_IF_ERROR(DropLease(key));
    }
    RETURN_IF_ERROR(transaction.Commit());
  }
  // Gives the pages back to the file system; atomic like any other write.
  RETURN_IF_ERROR(database_->Execute("VACUUM"));
  ASSIGN_OR_RETURN(report.bytes_after, FileBytes(database_.get()));
  return report;
}

}  // namespace kiln
