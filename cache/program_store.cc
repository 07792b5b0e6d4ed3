// Programs, their binaries, and rejects.

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

// The value of checked columns. DataLoss where a column has another form than
// this build writes.
absl::StatusOr<Program> ToProgram(const ProgramColumns& columns) {
  Program program;
  ASSIGN_OR_RETURN(program.target, ParseTarget(columns.target));
  program.toolchain.name = std::string(columns.toolchain_name);
  program.toolchain.version = std::string(columns.toolchain_version);
  ASSIGN_OR_RETURN(program.toolchain.content,
                   Digest::FromBytes(columns.toolchain_content));
  ASSIGN_OR_RETURN(program.binary_digest,
                   Digest::FromBytes(columns.binary_digest));
  ASSIGN_OR_RETURN(program.kernels, KernelsFromText(columns.kernels));
  program.log = std::string(columns.log);
  program.compile_seconds = columns.compile_seconds;
  return program;
}

absl::Status TooLarge(absl::string_view what, const Digest& key,
                      uint64_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " of ", key.ToHex(), " has ", bytes,
                   " bytes, the cache takes at most ", kCacheValueBytesMax));
}

absl::Status CheckProgram(const Program& program) {
  const Digest& key = program.key.digest;
  if (Sha256(program.key.preimage) != key) {
    return absl::InternalError(
        absl::StrCat("program ", key.ToHex(), ": ", kPreimageProblem));
  }
  if (program.binary.size() > kCacheValueBytesMax) {
    return TooLarge("binary", key, program.binary.size());
  }
  if (program.log.size() > kCacheValueBytesMax) {
    return TooLarge("log", key, program.log.size());
  }
  if (Sha256(program.binary) != program.binary_digest) {
    return absl::InternalError(
        absl::StrCat("program ", key.ToHex(), ": binary has digest ",
                     Sha256(program.binary).ToHex(), ", stated as ",
                     program.binary_digest.ToHex()));
  }
  return absl::OkStatus();
}

absl::Status CheckReject(const Reject& reject) {
  const bool by_build = reject.stage == RejectStage::kCompile ||
                        reject.stage == RejectStage::kInspect;
  if ((by_build || !reject.preimage.empty()) &&
      Sha256(reject.preimage) != reject.key) {
    return absl::InternalError(
        absl::StrCat("reject ", reject.key.ToHex(), ": ", kPreimageProblem));
  }
  if (reject.log.size() > kCacheValueBytesMax) {
    return TooLarge("log", reject.key, reject.log.size());
  }
  return absl::OkStatus();
}

absl::Status Conflict(const Program& stored, const Program& offered) {
  const std::string start =
      absl::StrCat("program ", stored.key.digest.ToHex(), ": ");
  if (stored.binary_digest != offered.binary_digest) {
    return absl::DataLossError(absl::StrCat(
        start, "two different binaries under one build digest: stored ",
        stored.binary_digest.ToHex(), " (", stored.binary.size(),
        " bytes), offered ", offered.binary_digest.ToHex(), " (",
        offered.binary.size(),
        " bytes); a compiler input is missing from the "
        "key, or the compiler is not deterministic"));
  }
  return absl::DataLossError(
      absl::StrCat(start, "one binary ", stored.binary_digest.ToHex(),
                   " with two different kernel descriptions"));
}

}  // namespace

absl::Status PlanCache::ReadProgram(const Digest& key, RowCheck against,
                                    Row<Program>* row) {
  ASSIGN_OR_RETURN(
      Statement select,
      database_->Prepare(
          "SELECT program.id, preimage, target, toolchain_name, "
          "toolchain_version, toolchain_content, binary_digest, kernels, log, "
          "compile_seconds, created_unix, host_name, device_name, "
          "tool_version, row_digest, checksum, blob.data FROM program "
          "LEFT JOIN blob ON blob.digest = binary_digest "
          "WHERE program.key = ?1"));
  select.BindBlob(1, key.AsBytes());
  ASSIGN_OR_RETURN(const bool found, select.Step());
  if (!found) return absl::OkStatus();

  // The key asked for, not the one an index may claim, goes into digest and
  // checksum.
  const ProgramColumns columns = {.key = key.AsBytes(),
                                  .target = select.Bytes(2),
                                  .toolchain_name = select.Bytes(3),
                                  .toolchain_version = select.Bytes(4),
                                  .toolchain_content = select.Bytes(5),
                                  .binary_digest = select.Bytes(6),
                                  .kernels = select.Bytes(7),
                                  .log = select.Bytes(8),
                                  .compile_seconds = select.Real(9),
                                  .provenance = ReadProvenance(select, 10)};
  const absl::string_view preimage = select.Bytes(1);
  const absl::string_view row_digest = select.Bytes(14);
  const absl::string_view binary = select.Bytes(16);
  const std::string encoded = EncodeRow(columns);
  row->id = select.Integer(0);

  const auto check = [&]() -> std::string {
    const ChecksumVerdict checksum =
        CompareChecksum(select, 15, {encoded, row_digest, preimage, binary});
    const bool digests = against == RowCheck::kDigests || !checksum.fits;
    const absl::string_view problem =
        digests ? DigestProblem(encoded, row_digest, preimage, key) : "";
    if (!problem.empty()) return std::string(problem);
    absl::StatusOr<Program> program = ToProgram(columns);
    if (!program.ok()) return std::string(program.status().message());
    if (select.IsNull(16)) return "its binary is missing";
    if (digests) {
      const Digest digest = Sha256(binary);
      if (digest != program->binary_digest) {
        row->binary_damaged = true;
        row->binary_digest = std::string(columns.binary_digest);
        return absl::StrCat("binary has digest ", digest.ToHex(), ", expected ",
                            program->binary_digest.ToHex());
      }
    }
    if (checksum.stored && !checksum.fits) return std::string(kChecksumProblem);
    program->key = {.digest = key, .preimage = std::string(preimage)};
    program->binary = std::string(binary);
    row->value = *std::move(program);
    return "";
  };
  row->problem = check();
  if (!row->problem.empty()) row->content = encoded;
  return absl::OkStatus();
}

absl::Status PlanCache::MoveProgram(const Digest& key,
                                    const Row<Program>& row) {
  std::vector<std::pair<int64_t, std::string>> siblings;  // id, key
  std::string blob;
  if (row.binary_damaged) {
    {
      ASSIGN_OR_RETURN(
          Statement select,
          database_->Prepare("SELECT id, key FROM program "
                             "WHERE binary_digest = ?1 AND id <> ?2 "
                             "ORDER BY id"));
      select.BindBlob(1, row.binary_digest);
      select.BindInteger(2, row.id);
      for (;;) {
        ASSIGN_OR_RETURN(const bool more, select.Step());
        if (!more) break;
        siblings.emplace_back(select.Integer(0), select.Bytes(1));
      }
    }
    ASSIGN_OR_RETURN(
        Statement select,
        database_->Prepare("SELECT data FROM blob WHERE digest = ?1"));
    select.BindBlob(1, row.binary_digest);
    ASSIGN_OR_RETURN(const bool found, select.Step());
    if (found) blob = std::string(select.Bytes(0));
    RETURN_IF_ERROR(
        AddToQuarantine("blob", row.binary_digest, row.problem, blob));
  }
  RETURN_IF_ERROR(
      AddToQuarantine("program", key.AsBytes(), row.problem, row.content));
  for (const auto& [id, sibling_key] : siblings) {
    RETURN_IF_ERROR(AddToQuarantine("program", sibling_key, row.problem, ""));
  }
  siblings.emplace_back(row.id, "");
  for (const auto& [id, sibling_key] : siblings) {
    ASSIGN_OR_RETURN(Statement remove,
                     database_->Prepare("DELETE FROM program WHERE id = ?1"));
    remove.BindInteger(1, id);
    RETURN_IF_ERROR(remove.Run());
  }
  if (!row.binary_damaged) return absl::OkStatus();
  ASSIGN_OR_RETURN(Statement remove,
                   database_->Prepare("DELETE FROM blob WHERE digest = ?1"));
  remove.BindBlob(1, row.binary_digest);
  return remove.Run();
}

void PlanCache::QuarantineProgram(const Digest& key,
                                  absl::string_view problem) {
  Quarantine("program", key, problem, [&]() -> absl::Status {
    Row<Program> row;
    RETURN_IF_ERROR(ReadProgram(key, RowCheck::kDigests, &row));
    if (row.problem.empty()) return absl::OkStatus();
    return MoveProgram(key, row);
  });
}

absl::StatusOr<std::optional<Program>> PlanCache::FindProgram(
    const Digest& key) {
  Row<Program> row;
  RETURN_IF_ERROR(LookUp([&] {
    row = {};
    return ReadProgram(key, RowCheck::kChecksum, &row);
  }));
  if (!row.problem.empty()) QuarantineProgram(key, row.problem);
  return std::move(row.value);
}

absl::StatusOr<std::vector<std::optional<Program>>> PlanCache::FindPrograms(
    absl::Span<const Digest> keys) {
  std::vector<std::optional<Program>> programs;
  std::vector<std::pair<Digest, std::string>> problems;
  {
    ASSIGN_OR_RETURN(
        Transaction snapshot,
        Transaction::Begin(database_.get(), Transaction::Kind::kRead));
    programs.reserve(keys.size());
    for (const Digest& key : keys) {
      Row<Program> row;
      RETURN_IF_ERROR(ReadProgram(key, RowCheck::kChecksum, &row));
      if (!row.problem.empty()) problems.emplace_back(key, row.problem);
      programs.push_back(std::move(row.value));
    }
  }
  // Only now: a reader must not wait for the write lock inside its snapshot.
  for (const auto& [key, problem] : problems) QuarantineProgram(key, problem);
  return programs;
}

absl::StatusOr<bool> PlanCache::ContainsProgram(const Digest& key) {
  return LookUp([&]() -> absl::StatusOr<bool> {
    ASSIGN_OR_RETURN(
        Statement select,
        database_->Prepare("SELECT 1 FROM program WHERE key = ?1"));
    select.BindBlob(1, key.AsBytes());
    return select.Step();
  });
}

absl::Status PlanCache::WriteBlob(const Digest& digest,
                                  absl::string_view data) {
  int64_t id = 0;
  bool exists = false;
  std::string damaged;
  {
    ASSIGN_OR_RETURN(
        Statement select,
        database_->Prepare("SELECT id, data FROM blob WHERE digest = ?1"));
    select.BindBlob(1, digest.AsBytes());
    ASSIGN_OR_RETURN(exists, select.Step());
    if (exists) {
      if (select.Bytes(1) == data) return absl::OkStatus();
      id = select.Integer(0);
      damaged = std::string(select.Bytes(1));
    }
  }
  if (exists) {
    const std::string problem =
        absl::StrCat("bytes have digest ", Sha256(damaged).ToHex());
    RETURN_IF_ERROR(
        AddToQuarantine("blob", digest.AsBytes(), problem, damaged));
    Warn(absl::StrCat("blob ", digest.ToHex(), " in ", path_,
                      " is damaged: ", problem,
                      "; replaced by the new copy, the old one is in "
                      "quarantine"));
    ASSIGN_OR_RETURN(
        Statement update,
        database_->Prepare("UPDATE blob SET data = ?2 WHERE id = ?1"));
    update.BindInteger(1, id);
    update.BindBlob(2, data);
    return update.Run();
  }
  ASSIGN_OR_RETURN(
      Statement insert,
      database_->Prepare("INSERT INTO blob (digest, data) VALUES (?1, ?2)"));
  insert.BindBlob(1, digest.AsBytes());
  insert.BindBlob(2, data);
  return insert.Run();
}

absl::Status PlanCache::WriteProgram(const Program& program) {
  const Digest& key = program.key.digest;
  Row<Program> row;
  RETURN_IF_ERROR(ReadProgram(key, RowCheck::kDigests, &row));
  if (row.value.has_value()) {
    return row.value->binary_digest == program.binary_digest &&
                   row.value->kernels == program.kernels
               ? absl::OkStatus()
               : Conflict(*row.value, program);
  }
  if (!row.problem.empty()) {
    Warn(absl::StrCat("program ", key.ToHex(), " in ", path_, " is damaged: ",
                      row.problem, "; replaced by the new copy"));
    RETURN_IF_ERROR(MoveProgram(key, row));
  }
  RETURN_IF_ERROR(WriteBlob(program.binary_digest, program.binary));

  ASSIGN_OR_RETURN(const std::string kernels, KernelsToText(program.kernels));
  const std::string target = program.target.ToString();
  const ProgramColumns columns = {
      .key = key.AsBytes(),
      .target = target,
      .toolchain_name = program.toolchain.name,
      .toolchain_version = program.toolchain.version,
      .toolchain_content = program.toolchain.content.AsBytes(),
      .binary_digest = program.binary_digest.AsBytes(),
      .kernels = kernels,
      .log = program.log,
      .compile_seconds = program.compile_seconds,
      .provenance = FromProvenance(options_.provenance, Now())};
  const std::string encoded = EncodeRow(columns);
  const Digest row_digest = Sha256(encoded);
  const Checksum checksum = ChecksumOf(
      {encoded, row_digest.AsBytes(), program.key.preimage, program.binary});
  {
    ASSIGN_OR_RETURN(
        Statement insert,
        database_->Prepare(
            "INSERT INTO program (key, preimage, target, toolchain_name, "
            "toolchain_version, toolchain_content, binary_digest, kernels, "
            "log, compile_seconds, created_unix, host_name, device_name, "
            "tool_version, row_digest, checksum) VALUES (?1, ?2, ?3, ?4, ?5, "
            "?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)"));
    insert.BindBlob(1, columns.key);
    insert.BindBlob(2, program.key.preimage);
    insert.BindText(3, columns.target);
    insert.BindText(4, columns.toolchain_name);
    insert.BindText(5, columns.toolchain_version);
    insert.BindBlob(6, columns.toolchain_content);
    insert.BindBlob(7, columns.binary_digest);
    insert.BindText(8, columns.kernels);
    insert.BindText(9, columns.log);
    insert.BindReal(10, columns.compile_seconds);
    BindProvenance(columns.provenance, 11, &insert);
    insert.BindBlob(15, row_digest.AsBytes());
    insert.BindBlob(16, checksum.AsBytes());
    RETURN_IF_ERROR(insert.Run());
  }
  ASSIGN_OR_RETURN(Statement forget,
                   database_->Prepare("DELETE FROM reject WHERE key = ?1"));
  forget.BindBlob(1, columns.key);
  RETURN_IF_ERROR(forget.Run());
  return DropLease(key);
}

absl::Status PlanCache::PutPrograms(absl::Span<const Program> programs,
                                    absl::Span<const Reject> rejects) {
  if (programs.empty() && rejects.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(RequireWritable());
  for (const Program& program : programs) {
    RETURN_IF_ERROR(CheckProgram(program));
  }
  for (const Reject& reject : rejects) RETURN_IF_ERROR(CheckReject(reject));
  ASSIGN_OR_RETURN(
      Transaction transaction,
      Transaction::Begin(database_.get(), Transaction::Kind::kWrite));
  for (const Program& program : programs) {
    RETURN_IF_ERROR(WriteProgram(program));
  }
  for (const Reject& reject : rejects) RETURN_IF_ERROR(WriteReject(reject));
  return transaction.Commit();
}

absl::Status PlanCache::PutProgram(const Program& program) {
  return PutPrograms(absl::MakeConstSpan(&program, 1));
}

absl::Status PlanCache::ReadReject(const Digest& key, Row<Reject>* row) {
  ASSIGN_OR_RETURN(
      Statement select,
      database_->Prepare("SELECT id, preimage, stage, reason, log, "
                         "created_unix, host_name, device_name, tool_version, "
                         "row_digest FROM reject WHERE key = ?1"));
  select.BindBlob(1, key.AsBytes());
  ASSIGN_OR_RETURN(const bool found, select.Step());
  if (!found) return absl::OkStatus();
  const RejectColumns columns = {.key = key.AsBytes(),
                                 .preimage = select.Bytes(1),
                                 .stage = select.Bytes(2),
                                 .reason = select.Bytes(3),
                                 .log = select.Bytes(4),
                                 .provenance = ReadProvenance(select, 5)};
  const std::string encoded = EncodeRow(columns);
  row->id = select.Integer(0);
  const auto check = [&]() -> std::string {
    if (Sha256(encoded).AsBytes() != select.Bytes(9)) {
      return std::string(kRowDigestProblem);
    }
    Reject reject = {.key = key,
                     .preimage = std::string(columns.preimage),
                     .stage = RejectStage::kCompile,
                     .reason = std::string(columns.reason),
                     .log = std::string(columns.log),
                     .provenance = ToProvenance(columns.provenance)};
    bool known = false;
    for (const RejectStage stage :
         {RejectStage::kCompile, RejectStage::kInspect, RejectStage::kVerify,
          RejectStage::kRace}) {
      if (RejectStageName(stage) != columns.stage) continue;
      reject.stage = stage;
      known = true;
    }
    if (!known) return absl::StrCat("unknown stage \"", columns.stage, "\"");
    if (!CheckReject(reject).ok()) return std::string(kPreimageProblem);
    row->value = std::move(reject);
    return "";
  };
  row->problem = check();
  if (!row->problem.empty()) row->content = encoded;
  return absl::OkStatus();
}

absl::Status PlanCache::MoveReject(const Digest& key, const Row<Reject>& row) {
  RETURN_IF_ERROR(
      AddToQuarantine("reject", key.AsBytes(), row.problem, row.content));
  ASSIGN_OR_RETURN(Statement remove,
                   database_->Prepare("DELETE FROM reject WHERE id = ?1"));
  remove.BindInteger(1, row.id);
  return remove.Run();
}

void PlanCache::QuarantineReject(const Digest& key, absl::string_view problem) {
  Quarantine("reject", key, problem, [&]() -> absl::Status {
    Row<Reject> row;
    RETURN_IF_ERROR(ReadReject(key, &row));
    if (row.problem.empty()) return absl::OkStatus();
    return MoveReject(key, row);
  });
}

absl::StatusOr<std::optional<Reject>> PlanCache::FindReject(const Digest& key) {
  Row<Reject> row;
  RETURN_IF_ERROR(LookUp([&] {
    row = {};
    return ReadReject(key, &row);
  }));
  if (!row.problem.empty()) QuarantineReject(key, row.problem);
  return std::move(row.value);
}

absl::Status PlanCache::WriteReject(const Reject& reject) {
  ASSIGN_OR_RETURN(const bool compiled, ContainsProgram(reject.key));
  if (compiled) return absl::OkStatus();
  const RejectColumns columns = {
      .key = reject.key.AsBytes(),
      .preimage = reject.preimage,
      .stage = RejectStageName(reject.stage),
      .reason = reject.reason,
      .log = reject.log,
      .provenance = FromProvenance(options_.provenance, Now())};
  const Digest row_digest = Sha256(EncodeRow(columns));
  ASSIGN_OR_RETURN(
      Statement insert,
      database_->Prepare(
          "INSERT OR REPLACE INTO reject (key, preimage, stage, reason, log, "
          "created_unix, host_name, device_name, tool_version, row_digest) "
          "VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)"));
  insert.BindBlob(1, columns.key);
  insert.BindBlob(2, columns.preimage);
  insert.BindText(3, columns.stage);
  insert.BindText(4, columns.reason);
  insert.BindText(5, columns.log);
  BindProvenance(columns.provenance, 6, &insert);
  insert.BindBlob(10, row_digest.AsBytes());
  RETURN_IF_ERROR(insert.Run());
  return DropLease(reject.key);
}

absl::Status PlanCache::PutRejects(absl::Span<const Reject> rejects) {
  return PutPrograms({}, rejects);
}

absl::Status PlanCache::PutReject(const Reject& reject) {
  return PutRejects(absl::MakeConstSpan(&reject, 1));
}

}  // namespace kiln
