// PlanCache: the programs, rejects, plans and measurements that were paid for
// once, in one SQLite file of a folder. It stores values and returns values; it
// never asks for one to be made, and never returns bytes whose digest does not
// match. README.md has the guarantees, schema/ the tables.
//
//   ASSIGN_OR_RETURN(PlanCache cache,
//                    PlanCache::Open(folder, CacheMode::kReadWrite));
//   ASSIGN_OR_RETURN(std::optional<Program> program,
//                    cache.FindProgram(key.digest));
//
// Damage. A row or binary that fails its digest is moved to the quarantine
// table (in read-only mode only reported), counts as a miss, and is described
// in TakeWarnings. Damage below the rows, which SQLite itself reports, is a
// DataLoss status; Repair rebuilds the file from the rows that are still whole.
//
// Threads and processes. Thread-compatible. Any number of processes, and of
// objects in each, may share a folder on a local file system; each Put is one
// durable transaction, and a process that is killed leaves the file as it was
// before or after it. Locks are waited for up to
// PlanCacheOptions::busy_timeout, then DeadlineExceeded.

#ifndef KILN_CACHE_PLAN_CACHE_H_
#define KILN_CACHE_PLAN_CACHE_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cache/file_system.h"
#include "cache/lease_owner.h"
#include "cache/records.h"
#include "compiler/base/digest.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/plan_key.h"
#include "compiler/spec/program.h"

namespace kiln {

class Database;

enum class CacheMode {
  kReadWrite,  // creates folder and file as needed
  kReadOnly,  // creates, writes, renames and removes nothing, journals and lock
              // files included; a missing cache reads as an empty one
  kOff,       // a private cache in memory that ends with the object
};

// "read-write", "read-only", "off".
absl::string_view CacheModeName(CacheMode mode);

// Marks the file as Kiln's ("KILN"), and the schema this build writes; it reads
// and migrates those before.
inline constexpr uint32_t kCacheApplicationId = 0x4B494C4E;
inline constexpr int kCacheSchemaVersion = 3;
inline constexpr char kCacheFileName[] = "index.db";
// What to do about a file that is refused.
inline constexpr absl::string_view kOtherCacheFolder =
    "choose another folder with --cache, or move the file away";
// Rows that were made or used within this time are never collected.
inline constexpr int64_t kGcGraceSeconds = 3600;
// Uses of a plan are noted at most this often, in seconds.
inline constexpr int64_t kUseGrainSeconds = 86400;
// Largest binary, log, plan text or sample block that is stored, in bytes.
inline constexpr uint64_t kCacheValueBytesMax = uint64_t{256} << 20;

struct PlanCacheOptions {
  std::string directory;  // ignored when mode is kOff
  // Another name inside the folder, for files that ExportTo wrote.
  std::string file_name = kCacheFileName;
  CacheMode mode = CacheMode::kReadWrite;
  // Stored with new rows; created_unix is taken from the clock instead.
  Provenance provenance;
  std::chrono::milliseconds busy_timeout{30000};
  // Seconds since 1970; the system clock when empty.
  std::function<int64_t()> clock;
  FileSystemProbe probe_file_system = ProbeFileSystem;
};

// What Repair saved and what it could not.
struct RepairReport {
  std::vector<TableStats> kept;       // rows copied per table; bytes are 0
  std::vector<CacheFinding> dropped;  // unreadable ranges and bad rows
};

class PlanCache {
 public:
  // Errors:
  //   FailedPrecondition  the file is no Kiln cache, or has another schema
  //                       version (both are named), or read-write access was
  //                       asked for on a network file system
  //   PermissionDenied    folder or file cannot be written (read-write)
  //   DataLoss            the file's own structure is damaged
  //   DeadlineExceeded, ResourceExhausted, Unavailable
  // A refused file is left as it was.
  static absl::StatusOr<PlanCache> Open(const PlanCacheOptions& options);
  static absl::StatusOr<PlanCache> Open(absl::string_view directory,
                                        CacheMode mode);

  PlanCache(PlanCache&&) noexcept;
  PlanCache& operator=(PlanCache&&) noexcept;
  ~PlanCache();

  CacheMode mode() const { return options_.mode; }

  // Of index.db; empty when the cache is in memory.
  const std::string& path() const { return path_; }

  // Device that later rows are said to come from; empty where none was
  // involved.
  void set_device_name(std::string name) {
    options_.provenance.device_name = std::move(name);
  }

  // Programs, by build digest. ------------------------------------------------

  // Binary, key and every column are checked against their digests.
  absl::StatusOr<std::optional<Program>> FindProgram(const Digest& key);
  // In the order of `keys`, from one snapshot; faster than one by one.
  absl::StatusOr<std::vector<std::optional<Program>>> FindPrograms(
      absl::Span<const Digest> keys);
  // Whether there is a row for `key`. Its bytes are not checked.
  absl::StatusOr<bool> ContainsProgram(const Digest& key);

  // Stores all or none in one transaction, and forgets the rejects of their
  // keys; `rejects` as PutRejects does, in the same transaction. Storing an
  // equal program again changes nothing.
  //   Errors: DataLoss when a key already has another binary or other kernels,
  //   naming both digests; Internal when a program's own digests do not match
  //   its bytes; FailedPrecondition in read-only mode.
  absl::Status PutPrograms(absl::Span<const Program> programs,
                           absl::Span<const Reject> rejects = {});
  absl::Status PutProgram(const Program& program);

  // Rejects. ------------------------------------------------------------------

  absl::StatusOr<std::optional<Reject>> FindReject(const Digest& key);
  // Replaces an earlier reject of the same key. A key that has a program keeps
  // the program, and the reject is not stored. `provenance` is not read.
  //   Errors: Internal when a compile or inspect reject's key is not the digest
  //   of its pre-image.
  absl::Status PutRejects(absl::Span<const Reject> rejects);
  absl::Status PutReject(const Reject& reject);

  // Plans, by measure digest. -------------------------------------------------

  // The plan satisfies ValidatePlan. Whether its programs are there is asked
  // with ContainsProgram or FindProgram.
  absl::StatusOr<std::optional<StoredPlan>> FindPlan(const Digest& key);
  absl::StatusOr<std::vector<std::optional<StoredPlan>>> FindPlans(
      absl::Span<const Digest> keys);
  // Per key, whether its plan is stored whole and the cache has rows for all of
  // its programs. Digests are checked, the text is not parsed: several times
  // faster than FindPlans for a caller that has nothing else to do.
  absl::StatusOr<std::vector<bool>> ContainsPlans(
      absl::Span<const Digest> keys);
  // All that are whole, sorted by key.
  absl::StatusOr<std::vector<StoredPlan>> ListPlans();

  // Stores the plan and its evidence in one transaction. An earlier plan of the
  // same key is replaced together with its measurements, except that a
  // predicted plan never replaces a measured one.
  //   Errors: FailedPrecondition when one of its programs is not in the cache,
  //   naming it, or in read-only mode; Internal when the plan breaks
  //   ValidatePlan or the key is not the digest of its pre-image.
  absl::Status PutPlan(const PlanKey& key, const Plan& plan,
                       absl::Span<const Measurement> measurements);

  // Stores several plans as PutPlan does, all or none in one transaction.
  absl::Status PutPlans(absl::Span<const NewPlan> plans);

  // Notes that these plans answered now, which is what CollectGarbage goes by.
  // Writes once per kUseGrainSeconds and plan at most, and nothing in read-only
  // mode; plans that are not stored are passed over.
  absl::Status NoteUse(absl::Span<const Digest> plans);

  // The evidence of a plan in the order it was stored.
  //   Errors: NotFound without such a plan. DataLoss when any row is damaged or
  //   missing: a winner cannot be derived from part of a race. The plan is then
  //   quarantined too, so that it is raced again.
  absl::StatusOr<std::vector<Measurement>> LoadMeasurements(const Digest& key);

  // Memo. ---------------------------------------------------------------------

  // Opaque bytes kept under opaque bytes. A hint: damage and loss are a miss.
  absl::StatusOr<std::optional<std::string>> FindMemo(absl::string_view key);
  // Replaces what `key` had. Nothing is stored, and that is no error, in
  // read-only mode.
  absl::Status PutMemo(absl::string_view key, absl::string_view value);

  // Leases: who works on what. -----------------------------------------------

  // Claims the work behind each key for this object, at most `limit` of them in
  // the order of `keys`, and says per key whether it is claimed. Refused are
  // keys that another living owner has claimed, and keys that a program or
  // reject answers already. An owner is gone when its process on this machine
  // has ended, or when its time is over. A claim ends with the Put of its key,
  // with ReleaseLeases, or after `seconds`.
  absl::StatusOr<std::vector<bool>> AcquireLeases(absl::Span<const Digest> keys,
                                                  int64_t seconds,
                                                  size_t limit = SIZE_MAX);
  // Extends the claims of this object among `keys`.
  absl::Status RenewLeases(absl::Span<const Digest> keys, int64_t seconds);
  // Gives up the claims of this object among `keys`.
  absl::Status ReleaseLeases(absl::Span<const Digest> keys);

  // Care. ---------------------------------------------------------------------

  absl::StatusOr<CacheStats> Stats();
  // Reads everything and changes nothing: SQLite's own checks, every digest,
  // programs that plans name and the cache lacks. Empty when all is well.
  absl::StatusOr<std::vector<CacheFinding>> Check();
  // Rebuilds the file in place from all rows that are whole, in one
  // transaction, for damage that Find and Put report as DataLoss. Works while
  // the file still opens; other processes wait.
  absl::StatusOr<RepairReport> Repair();

  // Joins another cache into this one, in one transaction; rows keep when and
  // where they were made. With conflicts and ConflictChoice::kRefuse, nothing
  // is stored. kKeepOurs leaves out plans that need a program that differs;
  // kTakeTheirs drops our plans that do.
  //   Errors: NotFound for a chosen plan that `source` lacks, naming it;
  //   InvalidArgument when both are one file.
  absl::StatusOr<MergeReport> MergeFrom(PlanCache* source,
                                        const MergeOptions& options);
  // Writes the chosen plans, their evidence and programs as one file, which is
  // a cache of its own (see PlanCacheOptions::file_name). Equal rows give equal
  // bytes. Built in memory.
  //   Errors: NotFound for a plan that is missing; DataLoss where a chosen row
  //   is damaged; InvalidArgument where `path` is the file of this cache.
  absl::StatusOr<ExportReport> ExportTo(const std::string& path,
                                        absl::Span<const Digest> plans);
  // Removes what is old, and then what is oldest until the file is small
  // enough: quarantined rows, programs that no plan needs, plans with the
  // programs that only they need, rejects. Roots stay, and so does whatever
  // was made within the last kGcGraceSeconds: it may belong to a run that is
  // not done. One transaction, then the file is compacted.
  absl::StatusOr<GcReport> CollectGarbage(const GcOptions& options);

  // What went wrong without failing a call, oldest first, and forgets it.
  std::vector<std::string> TakeWarnings();

 private:
  // What a row is held against.
  enum class RowCheck {
    kChecksum,  // its checksum: look-ups; its digests where it has none
    kDigests,   // every SHA-256, and its checksum
  };

  // One row as it was read: a value, a problem, or neither when there is none.
  template <typename T>
  struct Row {
    std::optional<T> value;
    std::string problem;
    int64_t id = 0;
    std::string content;          // of a row with a problem: columns as read
    bool binary_damaged = false;  // the problem lies in the blob, not the row
    std::string binary_digest;    // 32 raw bytes; set with binary_damaged
    int64_t measurements = 0;     // of a plan
  };

  struct MergeState {
    MergeReport report;
    std::set<Digest> conflicting;  // programs
  };

  PlanCache(PlanCacheOptions options, std::string path,
            std::unique_ptr<Database> database);

  static absl::StatusOr<PlanCache> OpenReadWrite(PlanCacheOptions options);
  static absl::StatusOr<PlanCache> OpenReadOnly(PlanCacheOptions options);
  static absl::StatusOr<PlanCache> OpenMemory(PlanCacheOptions options);

  int64_t Now() const;
  void Warn(std::string text);
  absl::Status RequireWritable() const;

  absl::Status ReadProgram(const Digest& key, RowCheck against,
                           Row<Program>* row);
  absl::Status ReadReject(const Digest& key, Row<Reject>* row);
  absl::Status ReadPlan(const Digest& key, RowCheck against,
                        Row<StoredPlan>* row);
  // Like ReadPlan without the value: sets `present`, or the row's problem.
  absl::Status ReadPlanPresence(const Digest& key, Row<StoredPlan>* row,
                                bool* present);
  absl::Status ReadMeasurements(const Digest& key, const Row<StoredPlan>& plan,
                                Row<std::vector<Measurement>>* row);
  absl::Status ReadPlanUse(const Digest& key, Row<int64_t>* row);
  absl::Status ReadMemo(absl::string_view key, Row<std::string>* row);
  // Whether another living owner has claimed `key`.
  absl::StatusOr<bool> IsLeasedToOther(const Digest& key);
  absl::Status DropLease(const Digest& key);

  // Inside a write transaction.
  absl::Status WriteProgram(const Program& program);
  absl::Status WriteBlob(const Digest& digest, absl::string_view data);
  absl::Status WriteReject(const Reject& reject);
  absl::Status WritePlan(const PlanKey& key, const Plan& plan,
                         absl::Span<const Measurement> measurements);
  // Replaces what was noted before.
  absl::Status WritePlanUse(const Digest& key, int64_t used_unix);
  absl::Status AddToQuarantine(absl::string_view table, absl::string_view key,
                               absl::string_view reason,
                               absl::string_view content);
  absl::Status MoveProgram(const Digest& key, const Row<Program>& row);
  absl::Status MoveReject(const Digest& key, const Row<Reject>& row);
  absl::Status MovePlan(const Digest& key, const Row<StoredPlan>& row);

  // Each reads the row again under the write lock and moves it away if it is
  // still bad. A failure is a warning: the caller has its miss either way.
  void QuarantineProgram(const Digest& key, absl::string_view problem);
  void QuarantineReject(const Digest& key, absl::string_view problem);
  void QuarantinePlan(const Digest& key, absl::string_view problem);
  void Quarantine(absl::string_view table, const Digest& key,
                  absl::string_view problem,
                  const std::function<absl::Status()>& move);

  // Copies one whole row of `source` as it is. Inside a write transaction.
  absl::Status CopyProgram(PlanCache* source, const Program& program);
  absl::Status CopyReject(PlanCache* source, const Digest& key);
  absl::Status CopyPlan(PlanCache* source, const Row<StoredPlan>& row);
  absl::Status RemovePlansUsing(const Digest& program);
  // Decides about one row each; writes unless `dry_run`.
  absl::Status MergeProgram(PlanCache* source, const Digest& key,
                            const MergeOptions& options, MergeState* state);
  absl::Status MergeReject(PlanCache* source, const Digest& key,
                           const MergeOptions& options, MergeState* state);
  absl::Status MergePlan(PlanCache* source, const Digest& key,
                         const MergeOptions& options, MergeState* state);

  absl::Status CheckPrograms(std::vector<CacheFinding>* findings);
  absl::Status CheckRejects(std::vector<CacheFinding>* findings);
  absl::Status CheckPlans(std::vector<CacheFinding>* findings);
  absl::Status CheckMemos(std::vector<CacheFinding>* findings);
  absl::StatusOr<std::vector<std::string>> MemoKeys();
  // Reads every row of a rebuilt file and leaves only whole ones.
  absl::Status Sift(std::vector<CacheFinding>* dropped);
  // First column of every row. Rows whose key is damaged, which no look-up can
  // reach, are warned of and passed over.
  absl::StatusOr<std::vector<Digest>> Keys(absl::string_view sql);

  PlanCacheOptions options_;
  std::string path_;
  std::unique_ptr<Database> database_;
  std::vector<std::string> warnings_;
  LeaseOwner owner_ = NewLeaseOwner();
};

}  // namespace kiln

#endif  // KILN_CACHE_PLAN_CACHE_H_
