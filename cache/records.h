// The values that the plan cache stores beside Program and Plan.

#ifndef KILN_CACHE_RECORDS_H_
#define KILN_CACHE_RECORDS_H_

#include <cstdint>
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

// What a file turned out to be.
struct FileMemo {
  std::string name = {};     // "nvrtc"
  std::string version = {};  // "13.0.88"
  Digest content = {};       // SHA-256 of the bytes

  bool operator==(const FileMemo&) const = default;
};

}  // namespace kiln

#endif  // KILN_CACHE_RECORDS_H_
