// Joining caches, and writing chosen plans as a file of their own. Rows are
// copied as they are, after every digest was checked: evidence keeps its
// origin.

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cache/plan_cache.h"
#include "cache/row_codec.h"
#include "cache/schema.h"
#include "cache/sqlite_db.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"
#include "compiler/base/same_file.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

absl::Status CopyRow(absl::string_view table, const Digest& key, Database* from,
                     Database* to) {
  const absl::string_view columns = ShapeOf(table).columns;
  const int count = CountColumns(columns);
  ASSIGN_OR_RETURN(Statement select,
                   from->Prepare(absl::StrCat("SELECT ", columns, " FROM ",
                                              table, " WHERE key = ?1")));
  select.BindBlob(1, key.AsBytes());
  ASSIGN_OR_RETURN(const bool found, select.Step());
  KILN_CHECK(found);  // it was read in the same snapshot
  ASSIGN_OR_RETURN(
      Statement insert,
      to->Prepare(absl::StrCat("INSERT OR REPLACE INTO ", table, " (", columns,
                               ") VALUES (", Slots(count), ")")));
  for (int i = 0; i < count; ++i) insert.BindColumn(i + 1, select, i);
  return insert.Run();
}

std::string DescribeProgram(const Program& program) {
  return absl::StrCat("binary ", program.binary_digest.ToHex(), ", ",
                      program.kernels.size(), " kernels, ",
                      program.toolchain.name, " ", program.toolchain.version);
}

std::string DescribePlan(const StoredPlan& stored) {
  const Evidence& evidence = stored.plan.evidence;
  std::string text = stored.plan.body.Label();
  if (evidence.state == PlanState::kMeasured) {
    absl::StrAppendFormat(&text, ", %.1f us", evidence.median_ns / 1e3);
  } else {
    text += ", predicted";
  }
  return absl::StrCat(text, ", made on \"", stored.provenance.host_name, "\"");
}

bool SameAnswer(const Plan& a, const Plan& b) {
  return a.body == b.body && a.programs == b.programs;
}

bool IsMeasured(const StoredPlan& stored) {
  return stored.plan.evidence.state == PlanState::kMeasured;
}

}  // namespace

absl::Status PlanCache::CopyProgram(PlanCache* source, const Program& program) {
  const Digest& key = program.key.digest;
  RETURN_IF_ERROR(WriteBlob(program.binary_digest, program.binary));
  RETURN_IF_ERROR(
      CopyRow("program", key, source->database_.get(), database_.get()));
  ASSIGN_OR_RETURN(Statement forget,
                   database_->Prepare("DELETE FROM reject WHERE key = ?1"));
  forget.BindBlob(1, key.AsBytes());
  RETURN_IF_ERROR(forget.Run());
  return DropLease(key);
}

absl::Status PlanCache::CopyReject(PlanCache* source, const Digest& key) {
  RETURN_IF_ERROR(
      CopyRow("reject", key, source->database_.get(), database_.get()));
  return DropLease(key);
}

absl::Status PlanCache::CopyPlan(PlanCache* source,
                                 const Row<StoredPlan>& row) {
  const Digest& key = row.value->key.digest;
  {
    ASSIGN_OR_RETURN(Statement remove,
                     database_->Prepare("DELETE FROM plan WHERE key = ?1"));
    remove.BindBlob(1, key.AsBytes());
    RETURN_IF_ERROR(remove.Run());
  }
  RETURN_IF_ERROR(
      CopyRow("plan", key, source->database_.get(), database_.get()));
  const int64_t plan_id = database_->last_insert_id();
  const std::vector<Digest>& programs = row.value->plan.programs;
  for (size_t i = 0; i < programs.size(); ++i) {
    ASSIGN_OR_RETURN(Statement insert,
                     database_->Prepare("INSERT INTO plan_program "
                                        "(plan_id, position, program_key) "
                                        "VALUES (?1, ?2, ?3)"));
    insert.BindInteger(1, plan_id);
    insert.BindInteger(2, static_cast<int64_t>(i));
    insert.BindBlob(3, programs[i].AsBytes());
    RETURN_IF_ERROR(insert.Run());
  }
  const absl::string_view columns = ShapeOf("measurement").columns;
  const int count = CountColumns(columns);
  ASSIGN_OR_RETURN(Statement select, source->database_->Prepare(absl::StrCat(
                                         "SELECT ", columns,
                                         " FROM measurement WHERE plan_id = ?1 "
                                         "ORDER BY position")));
  select.BindInteger(1, row.id);
  for (;;) {
    ASSIGN_OR_RETURN(const bool more, select.Step());
    if (!more) break;
    ASSIGN_OR_RETURN(Statement insert,
                     database_->Prepare(absl::StrCat(
                         "INSERT INTO measurement (", columns,
                         ", plan_id) VALUES (", Slots(count + 1), ")")));
    for (int i = 0; i < count; ++i) insert.BindColumn(i + 1, select, i);
    insert.BindInteger(count + 1, plan_id);
    RETURN_IF_ERROR(insert.Run());
  }
  return DropLease(key);
}

absl::Status PlanCache::RemovePlansUsing(const Digest& program) {
  ASSIGN_OR_RETURN(
      Statement remove,
      database_->Prepare("DELETE FROM plan WHERE id IN (SELECT plan_id FROM "
                         "plan_program WHERE program_key = ?1)"));
  remove.BindBlob(1, program.AsBytes());
  return remove.Run();
}

absl::Status PlanCache::MergeProgram(PlanCache* source, const Digest& key,
                                     const MergeOptions& options,
                                     MergeState* state) {
  Row<Program> theirs;
  RETURN_IF_ERROR(source->ReadProgram(key, RowCheck::kDigests, &theirs));
  if (!theirs.value.has_value()) {
    state->report.skipped.push_back(
        {.table = "program",
         .key = key.ToHex(),
         .problem = theirs.problem.empty() ? "is missing" : theirs.problem});
    return absl::OkStatus();
  }
  Row<Program> ours;
  RETURN_IF_ERROR(ReadProgram(key, RowCheck::kDigests, &ours));
  if (ours.value.has_value()) {
    if (ours.value->binary_digest == theirs.value->binary_digest &&
        ours.value->kernels == theirs.value->kernels) {
      ++state->report.kept;
      return absl::OkStatus();
    }
    state->conflicting.insert(key);
    state->report.conflicts.push_back(
        {.table = "program",
         .key = key.ToHex(),
         .ours = DescribeProgram(*ours.value),
         .theirs = DescribeProgram(*theirs.value)});
    if (options.choice != ConflictChoice::kTakeTheirs) return absl::OkStatus();
  }
  ++state->report.programs_added;
  if (options.dry_run) return absl::OkStatus();
  if (!ours.problem.empty()) RETURN_IF_ERROR(MoveProgram(key, ours));
  // What was measured with the other binary says nothing about this one.
  if (ours.value.has_value()) RETURN_IF_ERROR(RemovePlansUsing(key));
  return CopyProgram(source, *theirs.value);
}

absl::Status PlanCache::MergeReject(PlanCache* source, const Digest& key,
                                    const MergeOptions& options,
                                    MergeState* state) {
  Row<Reject> theirs;
  RETURN_IF_ERROR(source->ReadReject(key, &theirs));
  if (!theirs.value.has_value()) {
    state->report.skipped.push_back(
        {.table = "reject", .key = key.ToHex(), .problem = theirs.problem});
    return absl::OkStatus();
  }
  Row<Reject> ours;
  RETURN_IF_ERROR(ReadReject(key, &ours));
  ASSIGN_OR_RETURN(const bool compiled, ContainsProgram(key));
  if (ours.value.has_value() || compiled) {
    ++state->report.kept;
    return absl::OkStatus();
  }
  ++state->report.rejects_added;
  return options.dry_run ? absl::OkStatus() : CopyReject(source, key);
}

absl::Status PlanCache::MergePlan(PlanCache* source, const Digest& key,
                                  const MergeOptions& options,
                                  MergeState* state) {
  Row<StoredPlan> theirs;
  RETURN_IF_ERROR(source->ReadPlan(key, RowCheck::kDigests, &theirs));
  std::string problem = theirs.problem;
  if (theirs.value.has_value()) {
    Row<std::vector<Measurement>> evidence;
    RETURN_IF_ERROR(source->ReadMeasurements(key, theirs, &evidence));
    problem = evidence.problem;
    for (const Digest& program : theirs.value->plan.programs) {
      Row<Program> row;
      RETURN_IF_ERROR(source->ReadProgram(program, RowCheck::kDigests, &row));
      if (!row.value.has_value()) {
        problem =
            absl::StrCat("program ", program.ToHex(), " is missing or damaged");
      } else if (state->conflicting.count(program) != 0 &&
                 options.choice == ConflictChoice::kKeepOurs) {
        problem = absl::StrCat("program ", program.ToHex(),
                               " differs from ours, which is kept");
      }
    }
  }
  if (!problem.empty()) {
    state->report.skipped.push_back(
        {.table = "plan", .key = key.ToHex(), .problem = problem});
    return absl::OkStatus();
  }
  Row<StoredPlan> ours;
  RETURN_IF_ERROR(ReadPlan(key, RowCheck::kDigests, &ours));
  if (ours.value.has_value()) {
    const bool better = IsMeasured(*theirs.value) && !IsMeasured(*ours.value);
    const bool worse = !IsMeasured(*theirs.value) && IsMeasured(*ours.value);
    if (worse ||
        (!better && SameAnswer(ours.value->plan, theirs.value->plan))) {
      ++state->report.kept;
      return absl::OkStatus();
    }
    if (!better) {
      state->report.conflicts.push_back(
          {.table = "plan",
           .key = key.ToHex(),
           .ours = DescribePlan(*ours.value),
           .theirs = DescribePlan(*theirs.value)});
      if (options.choice != ConflictChoice::kTakeTheirs) {
        return absl::OkStatus();
      }
    }
  }
  ++state->report.plans_added;
  if (options.dry_run) return absl::OkStatus();
  if (!ours.problem.empty()) RETURN_IF_ERROR(MovePlan(key, ours));
  return CopyPlan(source, theirs);
}

absl::StatusOr<MergeReport> PlanCache::MergeFrom(PlanCache* source,
                                                 const MergeOptions& options) {
  if (!options.dry_run) RETURN_IF_ERROR(RequireWritable());
  if (source == this || IsSameFile(path_, source->path_)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, " cannot be merged into itself"));
  }
  ASSIGN_OR_RETURN(
      Transaction snapshot,
      Transaction::Begin(source->database_.get(), Transaction::Kind::kRead));
  ASSIGN_OR_RETURN(
      Transaction transaction,
      Transaction::Begin(database_.get(), options.dry_run
                                              ? Transaction::Kind::kRead
                                              : Transaction::Kind::kWrite));
  MergeState state;
  std::vector<Digest> plans;
  std::vector<Digest> programs;
  if (options.plans.has_value()) {
    plans = *options.plans;
    std::set<Digest> needed;
    for (const Digest& key : plans) {
      Row<StoredPlan> row;
      RETURN_IF_ERROR(source->ReadPlan(key, RowCheck::kDigests, &row));
      if (!row.value.has_value() && row.problem.empty()) {
        return absl::NotFoundError(
            absl::StrCat("no plan ", key.ToHex(), " in ", source->path_));
      }
      if (!row.value.has_value()) continue;
      needed.insert(row.value->plan.programs.begin(),
                    row.value->plan.programs.end());
    }
    programs.assign(needed.begin(), needed.end());
  } else {
    ASSIGN_OR_RETURN(programs,
                     source->Keys("SELECT key FROM program ORDER BY key"));
    ASSIGN_OR_RETURN(plans, source->Keys("SELECT key FROM plan ORDER BY key"));
    ASSIGN_OR_RETURN(const std::vector<Digest> rejects,
                     source->Keys("SELECT key FROM reject ORDER BY key"));
    for (const Digest& key : rejects) {
      RETURN_IF_ERROR(MergeReject(source, key, options, &state));
    }
  }
  for (const Digest& key : programs) {
    RETURN_IF_ERROR(MergeProgram(source, key, options, &state));
  }
  for (const Digest& key : plans) {
    RETURN_IF_ERROR(MergePlan(source, key, options, &state));
  }
  if (options.dry_run) return std::move(state.report);
  // Who joins whole caches wants what is in them, however old it is. An export
  // notes nothing, so that equal plans give equal files.
  if (!options.plans.has_value()) {
    for (const Digest& key : plans) RETURN_IF_ERROR(WritePlanUse(key, Now()));
  }
  if (!state.report.conflicts.empty()) {
    if (options.choice == ConflictChoice::kRefuse) {
      return std::move(state.report);  // rolls back
    }
    RETURN_IF_ERROR(
        database_->Execute("DELETE FROM blob WHERE digest NOT IN "
                           "(SELECT binary_digest FROM program)"));
  }
  RETURN_IF_ERROR(transaction.Commit());
  state.report.stored = true;
  return std::move(state.report);
}

absl::StatusOr<ExportReport> PlanCache::ExportTo(
    const std::string& path, absl::Span<const Digest> plans) {
  if (IsSameFile(path, path_)) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, " is the cache itself, which an export would replace"));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<Database> database,
                   NewMemoryDatabase(kCacheSchemaVersion));
  PlanCacheOptions options = options_;
  options.mode = CacheMode::kOff;
  PlanCache copy(std::move(options), "", std::move(database));
  const std::set<Digest> chosen(plans.begin(), plans.end());
  ASSIGN_OR_RETURN(const MergeReport merged,
                   copy.MergeFrom(this, {.plans = std::vector<Digest>(
                                             chosen.begin(), chosen.end())}));
  if (!merged.skipped.empty()) {
    const CacheFinding& first = merged.skipped.front();
    return absl::DataLossError(absl::StrCat(
        first.table, " ", first.key, " ", first.problem, " (and ",
        merged.skipped.size() - 1, " more); prewarm again, then export"));
  }
  ASSIGN_OR_RETURN(const std::string bytes, copy.database_->Serialize());
  RETURN_IF_ERROR(WriteFileAtomically(path, bytes));
  return ExportReport{.bytes = bytes.size(),
                      .digest = Sha256(bytes),
                      .plans = merged.plans_added,
                      .programs = merged.programs_added};
}

}  // namespace kiln
