// Plans and the measurements behind them.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache/checksum.h"
#include "cache/plan_cache.h"
#include "cache/row_codec.h"
#include "cache/row_io.h"
#include "cache/sqlite_db.h"
#include "cache/sqlite_vfs.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

// Candidates of one race; far above any template's space.
constexpr int64_t kMeasurementsMax = 1'000'000;

bool VerdictFromName(absl::string_view name, Verdict* verdict) {
  for (const Verdict candidate :
       {Verdict::kWon, Verdict::kLost, Verdict::kEliminated,
        Verdict::kIdentical, Verdict::kRejected}) {
    if (VerdictName(candidate) != name) continue;
    *verdict = candidate;
    return true;
  }
  return false;
}

absl::StatusOr<Measurement> ToMeasurement(const MeasurementColumns& columns) {
  Measurement measurement;
  measurement.label = std::string(columns.label);
  ASSIGN_OR_RETURN(measurement.candidate, Digest::FromBytes(columns.candidate));
  if (!VerdictFromName(columns.verdict, &measurement.verdict)) {
    return absl::DataLossError(
        absl::StrCat("unknown verdict \"", columns.verdict, "\""));
  }
  measurement.reason = std::string(columns.reason);
  measurement.worst_error = columns.worst_error;
  measurement.regret = columns.regret;
  measurement.numerics_class = std::string(columns.numerics_class);
  measurement.arena_bytes = static_cast<uint64_t>(columns.arena_bytes);
  measurement.registers = static_cast<uint32_t>(columns.registers);
  ASSIGN_OR_RETURN(measurement.samples, SamplesFromBytes(columns.samples));
  return measurement;
}

absl::Status CheckPlan(const PlanKey& key, const Plan& plan,
                       absl::string_view text,
                       absl::Span<const Measurement> measurements) {
  const std::string name = absl::StrCat("plan ", key.digest.ToHex());
  if (Sha256(key.preimage) != key.digest) {
    return absl::InternalError(absl::StrCat(name, ": ", kPreimageProblem));
  }
  RETURN_IF_ERROR(Annotate(ValidatePlan(plan), name));
  // What cannot be read back as it is (a NaN, for example) is refused now, not
  // found missing later.
  const absl::StatusOr<Plan> again = PlanFromJson(text);
  if (!again.ok()) {
    return absl::InternalError(
        absl::StrCat(name, " cannot be read back: ", again.status().message()));
  }
  if (*again != plan) {
    return absl::InternalError(
        absl::StrCat(name, " reads back as another plan"));
  }
  if (measurements.size() > static_cast<size_t>(kMeasurementsMax)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        name, " has ", measurements.size(),
        " measurements, the cache takes at most ", kMeasurementsMax));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status PlanCache::ReadPlan(const Digest& key, RowCheck against,
                                 Row<StoredPlan>* row) {
  ASSIGN_OR_RETURN(
      Statement select,
      database_->Prepare("SELECT id, preimage, plan, measurements, "
                         "created_unix, host_name, device_name, tool_version, "
                         "row_digest, checksum FROM plan WHERE key = ?1"));
  select.BindBlob(1, key.AsBytes());
  ASSIGN_OR_RETURN(const bool found, select.Step());
  if (!found) return absl::OkStatus();
  const PlanColumns columns = {.key = key.AsBytes(),
                               .plan = select.Bytes(2),
                               .measurements = select.Integer(3),
                               .provenance = ReadProvenance(select, 4)};
  const absl::string_view preimage = select.Bytes(1);
  const absl::string_view row_digest = select.Bytes(8);
  const std::string encoded = EncodeRow(columns);
  row->id = select.Integer(0);
  const auto check = [&]() -> std::string {
    const ChecksumVerdict checksum =
        CompareChecksum(select, 9, {encoded, row_digest, preimage});
    const bool digests = against == RowCheck::kDigests || !checksum.fits;
    const absl::string_view problem =
        digests ? DigestProblem(encoded, row_digest, preimage, key) : "";
    if (!problem.empty()) return std::string(problem);
    if (checksum.stored && !checksum.fits) return std::string(kChecksumProblem);
    absl::StatusOr<Plan> plan = PlanFromJson(columns.plan);
    if (!plan.ok()) return std::string(plan.status().message());
    row->measurements = columns.measurements;
    row->value =
        StoredPlan{.key = {.digest = key, .preimage = std::string(preimage)},
                   .plan = *std::move(plan),
                   .provenance = ToProvenance(columns.provenance)};
    return "";
  };
  row->problem = check();
  if (!row->problem.empty()) row->content = encoded;
  return absl::OkStatus();
}

absl::Status PlanCache::MovePlan(const Digest& key,
                                 const Row<StoredPlan>& row) {
  RETURN_IF_ERROR(
      AddToQuarantine("plan", key.AsBytes(), row.problem, row.content));
  // Its measurements and program references go with it.
  ASSIGN_OR_RETURN(Statement remove,
                   database_->Prepare("DELETE FROM plan WHERE id = ?1"));
  remove.BindInteger(1, row.id);
  return remove.Run();
}

void PlanCache::QuarantinePlan(const Digest& key, absl::string_view problem) {
  Quarantine("plan", key, problem, [&]() -> absl::Status {
    Row<StoredPlan> row;
    RETURN_IF_ERROR(ReadPlan(key, RowCheck::kDigests, &row));
    if (row.value.has_value()) {
      // The plan itself is whole; is its evidence?
      Row<std::vector<Measurement>> evidence;
      RETURN_IF_ERROR(ReadMeasurements(key, row, &evidence));
      row.problem = evidence.problem;
      row.content = PlanToJson(row.value->plan);
    }
    if (row.problem.empty()) return absl::OkStatus();
    return MovePlan(key, row);
  });
}

absl::StatusOr<std::optional<StoredPlan>> PlanCache::FindPlan(
    const Digest& key) {
  Row<StoredPlan> row;
  RETURN_IF_ERROR(LookUp([&] {
    row = {};
    return ReadPlan(key, RowCheck::kChecksum, &row);
  }));
  if (!row.problem.empty()) QuarantinePlan(key, row.problem);
  return std::move(row.value);
}

absl::StatusOr<std::vector<std::optional<StoredPlan>>> PlanCache::FindPlans(
    absl::Span<const Digest> keys) {
  std::vector<std::optional<StoredPlan>> plans;
  std::vector<std::pair<Digest, std::string>> problems;
  {
    ASSIGN_OR_RETURN(
        Transaction snapshot,
        Transaction::Begin(database_.get(), Transaction::Kind::kRead));
    plans.reserve(keys.size());
    for (const Digest& key : keys) {
      Row<StoredPlan> row;
      RETURN_IF_ERROR(ReadPlan(key, RowCheck::kChecksum, &row));
      if (!row.problem.empty()) problems.emplace_back(key, row.problem);
      plans.push_back(std::move(row.value));
    }
  }
  // Only now: a reader must not wait for the write lock inside its snapshot.
  for (const auto& [key, problem] : problems) QuarantinePlan(key, problem);
  return plans;
}

absl::Status PlanCache::ReadPlanPresence(const Digest& key,
                                         Row<StoredPlan>* row, bool* present) {
  *present = false;
  ASSIGN_OR_RETURN(
      Statement select,
      database_->Prepare("SELECT preimage, plan, measurements, created_unix, "
                         "host_name, device_name, tool_version, row_digest, "
                         "checksum, EXISTS (SELECT 1 FROM plan_program "
                         "WHERE plan_id = plan.id AND NOT EXISTS "
                         "(SELECT 1 FROM program WHERE key = program_key)) "
                         "FROM plan WHERE key = ?1"));
  select.BindBlob(1, key.AsBytes());
  ASSIGN_OR_RETURN(const bool found, select.Step());
  if (!found) return absl::OkStatus();
  const PlanColumns columns = {.key = key.AsBytes(),
                               .plan = select.Bytes(1),
                               .measurements = select.Integer(2),
                               .provenance = ReadProvenance(select, 3)};
  const absl::string_view preimage = select.Bytes(0);
  const absl::string_view row_digest = select.Bytes(7);
  const std::string encoded = EncodeRow(columns);
  const ChecksumVerdict checksum =
      CompareChecksum(select, 8, {encoded, row_digest, preimage});
  if (!checksum.fits) {
    row->problem =
        std::string(DigestProblem(encoded, row_digest, preimage, key));
    if (row->problem.empty() && checksum.stored) {
      row->problem = std::string(kChecksumProblem);
    }
  }
  if (row->problem.empty()) *present = select.Integer(9) == 0;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<bool>> PlanCache::ContainsPlans(
    absl::Span<const Digest> keys) {
  std::vector<bool> present;
  std::vector<std::pair<Digest, std::string>> problems;
  {
    ASSIGN_OR_RETURN(
        Transaction snapshot,
        Transaction::Begin(database_.get(), Transaction::Kind::kRead));
    for (const Digest& key : keys) {
      Row<StoredPlan> row;
      bool found = false;
      RETURN_IF_ERROR(ReadPlanPresence(key, &row, &found));
      if (!row.problem.empty()) problems.emplace_back(key, row.problem);
      present.push_back(found);
    }
  }
  for (const auto& [key, problem] : problems) QuarantinePlan(key, problem);
  return present;
}

absl::StatusOr<std::vector<StoredPlan>> PlanCache::ListPlans() {
  ASSIGN_OR_RETURN(const std::vector<Digest> keys,
                   Keys("SELECT key FROM plan ORDER BY key"));
  ASSIGN_OR_RETURN(std::vector<std::optional<StoredPlan>> found,
                   FindPlans(keys));
  std::vector<StoredPlan> plans;
  for (std::optional<StoredPlan>& plan : found) {
    if (plan.has_value()) plans.push_back(*std::move(plan));
  }
  return plans;
}

absl::Status PlanCache::WritePlan(const PlanKey& key, const Plan& plan,
                                  absl::Span<const Measurement> measurements) {
  for (const Digest& program : plan.programs) {
    ASSIGN_OR_RETURN(const bool present, ContainsProgram(program));
    if (present) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("plan ", key.digest.ToHex(), " uses program ",
                     program.ToHex(), ", which is not in the cache"));
  }
  Row<StoredPlan> old;
  RETURN_IF_ERROR(ReadPlan(key.digest, RowCheck::kDigests, &old));
  if (!old.problem.empty()) {
    Warn(absl::StrCat("plan ", key.digest.ToHex(), " in ", path_,
                      " is damaged: ", old.problem,
                      "; replaced by the new one"));
    RETURN_IF_ERROR(MovePlan(key.digest, old));
  }
  if (old.value.has_value()) {
    if (old.value->plan.evidence.state == PlanState::kMeasured &&
        plan.evidence.state == PlanState::kPredicted) {
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(Statement remove,
                     database_->Prepare("DELETE FROM plan WHERE id = ?1"));
    remove.BindInteger(1, old.id);
    RETURN_IF_ERROR(remove.Run());
  }

  const std::string text = PlanToJson(plan);
  const PlanColumns columns = {
      .key = key.digest.AsBytes(),
      .plan = text,
      .measurements = static_cast<int64_t>(measurements.size()),
      .provenance = FromProvenance(options_.provenance, Now())};
  const std::string encoded = EncodeRow(columns);
  const Digest row_digest = Sha256(encoded);
  const Checksum checksum =
      ChecksumOf({encoded, row_digest.AsBytes(), key.preimage});
  {
    ASSIGN_OR_RETURN(
        Statement insert,
        database_->Prepare(
            "INSERT INTO plan (key, preimage, plan, measurements, "
            "created_unix, host_name, device_name, tool_version, row_digest, "
            "checksum) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)"));
    insert.BindBlob(1, columns.key);
    insert.BindBlob(2, key.preimage);
    insert.BindText(3, columns.plan);
    insert.BindInteger(4, columns.measurements);
    BindProvenance(columns.provenance, 5, &insert);
    insert.BindBlob(9, row_digest.AsBytes());
    insert.BindBlob(10, checksum.AsBytes());
    RETURN_IF_ERROR(insert.Run());
  }
  const int64_t plan_id = database_->last_insert_id();
  for (size_t i = 0; i < plan.programs.size(); ++i) {
    ASSIGN_OR_RETURN(Statement insert,
                     database_->Prepare("INSERT INTO plan_program "
                                        "(plan_id, position, program_key) "
                                        "VALUES (?1, ?2, ?3)"));
    insert.BindInteger(1, plan_id);
    insert.BindInteger(2, static_cast<int64_t>(i));
    insert.BindBlob(3, plan.programs[i].AsBytes());
    RETURN_IF_ERROR(insert.Run());
  }
  for (size_t i = 0; i < measurements.size(); ++i) {
    const Measurement& measurement = measurements[i];
    const std::string samples = SamplesToBytes(measurement.samples);
    const MeasurementColumns row = {
        .plan_key = columns.key,
        .position = static_cast<int64_t>(i),
        .label = measurement.label,
        .candidate = measurement.candidate.AsBytes(),
        .verdict = VerdictName(measurement.verdict),
        .reason = measurement.reason,
        .worst_error = measurement.worst_error,
        .regret = measurement.regret,
        .numerics_class = measurement.numerics_class,
        .arena_bytes = static_cast<int64_t>(measurement.arena_bytes),
        .registers = measurement.registers,
        .samples = samples};
    const Digest digest = Sha256(EncodeRow(row));
    ASSIGN_OR_RETURN(
        Statement insert,
        database_->Prepare(
            "INSERT INTO measurement (plan_id, position, label, candidate, "
            "verdict, reason, worst_error, regret, numerics_class, "
            "arena_bytes, registers, samples, row_digest) VALUES (?1, ?2, ?3, "
            "?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)"));
    insert.BindInteger(1, plan_id);
    insert.BindInteger(2, row.position);
    insert.BindText(3, row.label);
    insert.BindBlob(4, row.candidate);
    insert.BindText(5, row.verdict);
    insert.BindText(6, row.reason);
    insert.BindReal(7, row.worst_error);
    insert.BindReal(8, row.regret);
    insert.BindText(9, row.numerics_class);
    insert.BindInteger(10, row.arena_bytes);
    insert.BindInteger(11, row.registers);
    insert.BindBlob(12, row.samples);
    insert.BindBlob(13, digest.AsBytes());
    RETURN_IF_ERROR(insert.Run());
  }
  return DropLease(key.digest);
}

absl::Status PlanCache::PutPlan(const PlanKey& key, const Plan& plan,
                                absl::Span<const Measurement> measurements) {
  const NewPlan one = {
      .key = key,
      .plan = plan,
      .measurements = {measurements.begin(), measurements.end()}};
  return PutPlans(absl::MakeConstSpan(&one, 1));
}

absl::Status PlanCache::PutPlans(absl::Span<const NewPlan> plans) {
  if (plans.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(RequireWritable());
  for (const NewPlan& plan : plans) {
    RETURN_IF_ERROR(CheckPlan(plan.key, plan.plan, PlanToJson(plan.plan),
                              plan.measurements));
  }
  ASSIGN_OR_RETURN(
      Transaction transaction,
      Transaction::Begin(database_.get(), Transaction::Kind::kWrite));
  for (const NewPlan& plan : plans) {
    RETURN_IF_ERROR(WritePlan(plan.key, plan.plan, plan.measurements));
  }
  return transaction.Commit();
}

absl::Status PlanCache::ReadPlanUse(const Digest& key, Row<int64_t>* row) {
  ASSIGN_OR_RETURN(
      Statement select,
      database_->Prepare("SELECT plan.id, created_unix, used_unix, "
                         "plan_use.row_digest FROM plan LEFT JOIN plan_use ON "
                         "plan_use.plan_id = plan.id WHERE key = ?1"));
  select.BindBlob(1, key.AsBytes());
  ASSIGN_OR_RETURN(const bool found, select.Step());
  if (!found) return absl::OkStatus();
  row->id = select.Integer(0);
  row->value = select.Integer(1);
  if (select.IsNull(2)) return absl::OkStatus();
  const std::string encoded = EncodeRow(PlanUseColumns{
      .plan_key = key.AsBytes(), .used_unix = select.Integer(2)});
  if (Sha256(encoded).AsBytes() != select.Bytes(3)) {
    row->problem = std::string(kRowDigestProblem);
  } else {
    row->value = std::max(*row->value, select.Integer(2));
  }
  return absl::OkStatus();
}

absl::Status PlanCache::WritePlanUse(const Digest& key, int64_t used_unix) {
  const Digest row_digest = Sha256(EncodeRow(
      PlanUseColumns{.plan_key = key.AsBytes(), .used_unix = used_unix}));
  ASSIGN_OR_RETURN(
      Statement insert,
      database_->Prepare("INSERT OR REPLACE INTO plan_use "
                         "(plan_id, used_unix, row_digest) "
                         "SELECT id, ?2, ?3 FROM plan WHERE key = ?1"));
  insert.BindBlob(1, key.AsBytes());
  insert.BindInteger(2, used_unix);
  insert.BindBlob(3, row_digest.AsBytes());
  return insert.Run();
}

absl::Status PlanCache::NoteUse(absl::Span<const Digest> plans) {
  if (options_.mode == CacheMode::kReadOnly) return absl::OkStatus();
  const int64_t now = Now();
  std::vector<Digest> stale;
  {
    ASSIGN_OR_RETURN(
        Transaction snapshot,
        Transaction::Begin(database_.get(), Transaction::Kind::kRead));
    for (const Digest& key : plans) {
      Row<int64_t> used;
      RETURN_IF_ERROR(ReadPlanUse(key, &used));
      // A clock that was wrong once must not keep a plan for ever.
      if (!used.value.has_value() ||
          (used.problem.empty() && *used.value > now - kUseGrainSeconds &&
           *used.value < now + kUseGrainSeconds)) {
        continue;
      }
      stale.push_back(key);
    }
  }
  if (stale.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(
      Transaction transaction,
      Transaction::Begin(database_.get(), Transaction::Kind::kWrite));
  for (const Digest& key : stale) RETURN_IF_ERROR(WritePlanUse(key, now));
  return transaction.Commit();
}

absl::Status PlanCache::ReadMeasurements(const Digest& key,
                                         const Row<StoredPlan>& plan,
                                         Row<std::vector<Measurement>>* row) {
  ASSIGN_OR_RETURN(
      Statement select,
      database_->Prepare("SELECT position, label, candidate, verdict, reason, "
                         "worst_error, regret, numerics_class, arena_bytes, "
                         "registers, samples, row_digest "
                         "FROM measurement WHERE plan_id = ?1 "
                         "ORDER BY position"));
  select.BindInteger(1, plan.id);
  std::vector<Measurement> measurements;
  for (int64_t position = 0; position <= kMeasurementsMax; ++position) {
    ASSIGN_OR_RETURN(const bool more, select.Step());
    if (!more) break;
    const MeasurementColumns columns = {.plan_key = key.AsBytes(),
                                        .position = position,
                                        .label = select.Bytes(1),
                                        .candidate = select.Bytes(2),
                                        .verdict = select.Bytes(3),
                                        .reason = select.Bytes(4),
                                        .worst_error = select.Real(5),
                                        .regret = select.Real(6),
                                        .numerics_class = select.Bytes(7),
                                        .arena_bytes = select.Integer(8),
                                        .registers = select.Integer(9),
                                        .samples = select.Bytes(10)};
    if (select.Integer(0) != position ||
        Sha256(EncodeRow(columns)).AsBytes() != select.Bytes(11)) {
      row->problem =
          absl::StrCat("measurement ", position, ": ", kRowDigestProblem);
      return absl::OkStatus();
    }
    absl::StatusOr<Measurement> measurement = ToMeasurement(columns);
    if (!measurement.ok()) {
      row->problem = absl::StrCat("measurement ", position, ": ",
                                  measurement.status().message());
      return absl::OkStatus();
    }
    measurements.push_back(*std::move(measurement));
  }
  if (static_cast<int64_t>(measurements.size()) != plan.measurements) {
    row->problem = absl::StrCat(measurements.size(), " measurements found, ",
                                plan.measurements, " were stored");
    return absl::OkStatus();
  }
  row->value = std::move(measurements);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Measurement>> PlanCache::LoadMeasurements(
    const Digest& key) {
  Row<StoredPlan> plan;
  Row<std::vector<Measurement>> row;
  {
    ASSIGN_OR_RETURN(
        Transaction snapshot,
        Transaction::Begin(database_.get(), Transaction::Kind::kRead));
    RETURN_IF_ERROR(ReadPlan(key, RowCheck::kChecksum, &plan));
    if (plan.value.has_value()) {
      RETURN_IF_ERROR(ReadMeasurements(key, plan, &row));
    } else {
      row.problem = plan.problem;
    }
  }
  if (row.value.has_value()) return *std::move(row.value);
  if (row.problem.empty()) {
    return absl::NotFoundError(
        absl::StrCat("no plan ", key.ToHex(), " in the cache"));
  }
  QuarantinePlan(key, row.problem);
  return absl::DataLossError(absl::StrCat("evidence of plan ", key.ToHex(),
                                          " is damaged: ", row.problem));
}

}  // namespace kiln
