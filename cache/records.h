// The values that the plan cache stores beside Program and Plan.

#ifndef KILN_CACHE_RECORDS_H_
#define KILN_CACHE_RECORDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "compiler/base/digest.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/plan_key.h"

namespace kiln {

// Where and when a row was made. Never part of a key.
struct Provenance {
  int64_t created_unix = 0;  // seconds; set by the cache when it stores a row
  std::string host_name = {};
  std::string device_name = {};  // empty where no device was involved
  std::string tool_version = {};

  bool operator==(const Provenance&) const = default;
};

// The stage that dropped a program or candidate.
enum class RejectStage { kCompile, kInspect, kVerify, kRace };

// "compile", "inspect", "verify", "race".
absl::string_view RejectStageName(RejectStage stage);

// A failure worth remembering.
struct Reject {
  // kCompile and kInspect: the build digest with its pre-image. kVerify and
  // kRace: the digest of the candidate; its pre-image may be empty.
  Digest key = {};
  std::string preimage = {};
  RejectStage stage = RejectStage::kCompile;
  std::string reason = {};  // one line
  std::string log = {};     // compiler output or failing case, may be empty
  Provenance provenance = {};

  bool operator==(const Reject&) const = default;
};

struct StoredPlan {
  PlanKey key;
  Plan plan;
  Provenance provenance = {};
};

// One timed block.
struct Sample {
  uint32_t block = 0;  // index of the interleaved block it was taken in
  double ns = 0;       // nanoseconds per launch of the whole plan

  bool operator==(const Sample&) const = default;
};

// What became of a candidate of a race.
enum class Verdict {
  kWon,
  kLost,
  kEliminated,  // too slow to be timed to the end
  kIdentical,   // same binaries and launches as another candidate, not timed
  kRejected,    // failed; `reason` says at what
};

// "won", "lost", "eliminated", "identical", "rejected".
absl::string_view VerdictName(Verdict verdict);

// A candidate's part in a race, kept whole so that the winner can be derived
// again without a device.
struct Measurement {
  std::string label = {};  // PlanBody::Label()
  Digest candidate = {};   // CandidateDigest()
  Verdict verdict = Verdict::kLost;
  std::string reason = {};  // of a reject; otherwise may be empty
  double worst_error = 0;   // relative Frobenius error; NaN if never verified
  double regret = 0;        // median / winner's median - 1; NaN if never timed
  // What selection looks at beside the samples.
  std::string numerics_class = {};
  uint64_t arena_bytes = 0;
  uint32_t registers = 0;            // largest of the plan's kernels
  std::vector<Sample> samples = {};  // all, in the order they were taken
};

// A plan to store, with what it answers. Evidence is absent when it was only
// predicted.
struct NewPlan {
  PlanKey key;
  Plan plan;
  std::vector<Measurement> measurements = {};
};

// One problem that PlanCache::Check found.
struct CacheFinding {
  std::string table = {};    // "program"; "index.db" for the file as a whole
  std::string key = {};      // hexadecimal, or empty
  std::string problem = {};  // one line

  bool operator==(const CacheFinding&) const = default;
};

struct TableStats {
  std::string name = {};
  int64_t rows = 0;
  int64_t bytes = 0;  // pages of the table and its indices

  bool operator==(const TableStats&) const = default;
};

struct CacheStats {
  std::string path = {};  // of index.db; empty in memory
  int schema_version = 0;
  int64_t bytes = 0;               // of the whole database
  int64_t free_bytes = 0;          // of these, in unused pages
  std::vector<TableStats> tables;  // sorted by name
};

// What Merge does where both caches answer a key, but not alike.
enum class ConflictChoice { kRefuse, kKeepOurs, kTakeTheirs };

struct MergeOptions {
  // Takes only these plans, with their evidence and programs; everything when
  // absent.
  std::optional<std::vector<Digest>> plans = std::nullopt;
  ConflictChoice choice = ConflictChoice::kRefuse;
  bool dry_run = false;
};

// Two answers to one key.
struct MergeConflict {
  std::string table = {};  // "program" or "plan"
  std::string key = {};    // hexadecimal
  std::string ours = {};   // one line each
  std::string theirs = {};

  bool operator==(const MergeConflict&) const = default;
};

struct MergeReport {
  size_t programs_added = 0;
  size_t plans_added = 0;
  size_t rejects_added = 0;
  // Answered alike, or better here: a measured plan is better than a predicted
  // one.
  size_t kept = 0;
  std::vector<MergeConflict> conflicts;
  // Rows of the source that are damaged or lack a program; not taken.
  std::vector<CacheFinding> skipped;
  // False after a dry run, and when conflicts were refused.
  bool stored = false;
};

struct ExportReport {
  uint64_t bytes = 0;
  Digest digest = {};  // SHA-256 of the file
  size_t plans = 0;
  size_t programs = 0;
};

struct GcOptions {
  // Never removed, with their programs: plans in use.
  std::vector<Digest> root_plans = {};
  // Never removed, nor are plans that need no others: programs of bundles.
  std::vector<Digest> root_programs = {};
  // Size that the file is to shrink to, in bytes.
  std::optional<int64_t> bytes_max = std::nullopt;
  // Rows that were made and last used longer ago go, in seconds.
  std::optional<int64_t> age_max = std::nullopt;
  bool dry_run = false;
};

// A row that garbage collection removes.
struct GcItem {
  std::string table = {};
  std::string key = {};  // hexadecimal
  int64_t bytes = 0;     // of its columns and its binary
  int64_t created_unix = 0;
  int64_t used_unix = 0;    // when it was made or last noted as used
  std::string reason = {};  // "age", "size" or "unused"

  bool operator==(const GcItem&) const = default;
};

struct GcReport {
  std::vector<GcItem> removed;  // in the order of removal
  int64_t bytes_before = 0;     // of the file
  int64_t bytes_after = 0;      // estimated in a dry run
  size_t plans_kept = 0;
  size_t programs_kept = 0;
};

}  // namespace kiln

#endif  // KILN_CACHE_RECORDS_H_
