// Prewarm, the whole flow on one page:
//
//   Resolve   manifest × target -> intervals with their keys
//   LookUp    which intervals the cache answers already
//   Enumerate candidates of the others
//   Compile   missing programs, in worker processes; inspected, then stored;
//             those that a package's own compiler made are stored as they are
//   Race      verify against the oracle, time, select; stored per interval
//
// Each stage takes values and returns values; a killed run loses at most the
// work in flight, because every result is committed when it exists.
//
// Processes that share a cache share the work: each program is compiled and
// each interval raced by whoever claims it first (PlanCache::AcquireLeases),
// the others wait for the result. A device is raced on by one process at a time
// (DeviceLock).
//
// Candidates run in worker processes (RemoteRacer): one that hangs or crashes
// is set aside and the rest goes on. Only this process writes the cache.

#ifndef KILN_TUNER_PREWARM_H_
#define KILN_TUNER_PREWARM_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/plan_cache.h"
#include "compiler/spec/device_profile.h"
#include "compiler/spec/manifest.h"
#include "compiler/spec/plan.h"
#include "compiler/toolchain_probe.h"
#include "tuner/ceilings.h"
#include "tuner/device.h"
#include "tuner/kept_numerics.h"
#include "tuner/planner.h"

namespace kiln {

// Where a run may stop; the stages before it are complete.
enum class Stage { kResolve, kLookUp, kEnumerate, kCompile, kRace };

// "resolve", "lookup", "enumerate", "compile", "race".
absl::string_view StageName(Stage stage);
std::optional<Stage> ParseStage(absl::string_view name);

// What happens, as it happens. All calls come from the calling thread.
class ProgressSink {
 public:
  virtual ~ProgressSink();
  // `done` of `total` units of the stage; `detail` is one line.
  virtual void Update(Stage stage, size_t done, size_t total,
                      const std::string& detail) = 0;
  // A message that stays.
  virtual void Note(const std::string& line) = 0;
};

// Timing that an interval is given unless the caller says otherwise.
inline constexpr double kRaceSecondsPerInterval = 10;

struct PrewarmOptions {
  std::vector<Target> targets;
  uint32_t capacity_max = 0;  // drop larger capacities; 0 keeps all
  int candidates_max = 0;     // per interval; 0 = DefaultCandidatesMax
  uint64_t arena_bytes_max = kArenaBytesMax;  // of a candidate
  // Numerics that winners must keep; absent: any.
  std::optional<KeptNumerics> keep_numerics;
  bool warm_l2 = false;              // time with weights in the L2
  int jobs = 0;                      // compile workers; 0 = WorkerCountMax()
  double compile_seconds_max = 120;  // deadline of one compile
  bool compile_only = false;  // never touch a device; plans are predicted
  // Timing per request, shared by its intervals: what a short race leaves, the
  // others may use.
  double race_seconds_max = 0;  // 0 = kRaceSecondsPerInterval for each
  std::optional<Stage> stop_after;
  // GPUs to race on, by the driver's numbers; distinct, at least one. Those
  // that exist must be equal (MeasureIdentity), so that their winners are.
  std::vector<int> device_ordinals = {0};
  // Refuse a device that another process races or computes on, instead of
  // waiting for the former and warning of the latter.
  bool exclusive = false;
  // Deadline of one launch in a race; 0: 30 seconds on GPUs, 300 on CPUs. Who
  // passes it is set aside.
  double launch_seconds_max = 0;
  // Executable that answers to kRaceWorkerVerb.
  std::string race_worker = "/proc/self/exe";
  // CPU targets race in one worker per set of processors, bound to it; empty:
  // one worker on all of them. Races on other sets disturb each other, so this
  // is for tests of several devices.
  std::vector<std::vector<int>> cpu_sets;
  uint64_t seed = 1;  // of the race's inputs
  // This run does part shard_index (from 0) of shard_count equal parts: with
  // stop_after == kCompile a part of the programs, else a part of the intervals
  // with everything they need. Which, depends on manifest and options alone.
  int shard_index = 0;
  int shard_count = 1;
  // Kernel packages that compete with the templates of this build; part of
  // every key. See AttachPackages.
  AttachedTemplates attached;
  // Finds the compiler of a backend. Called at most once per backend.
  std::function<absl::StatusOr<CompilerSetup>(Backend, ProbeMemo*)> toolchain;
};

// One interval of one request on one target.
struct IntervalReport {
  Target target;
  std::vector<std::string> names;  // requests it serves
  RequestGeometry geometry;
  Interval interval;
  size_t candidates = 0;
  size_t rejected = 0;       // of the candidates
  bool reused = false;       // the cache had the answer
  std::optional<Plan> plan;  // absent when nothing won
  std::string problem;       // why it is absent
};

struct PrewarmReport {
  std::vector<IntervalReport> intervals;
  size_t requests = 0;
  size_t candidates = 0;  // distinct
  size_t programs_compiled = 0;
  size_t programs_reused = 0;
  size_t programs_attached = 0;  // binaries that packages brought
  size_t rejects = 0;            // programs and candidates
  uint64_t launches = 0;
  size_t winners = 0;                     // measured plans
  size_t predicted = 0;                   // plans that were never run
  std::map<std::string, double> seconds;  // by stage, and "total"
  double compile_cpu_seconds = 0;  // sum over compiles, inside the compiler
  // Storing what was compiled, while the workers go on, and in how many
  // transactions.
  double publish_seconds = 0;
  size_t publish_transactions = 0;
  bool complete = false;  // every interval has a plan
  std::optional<Stage> stopped_after;
};

// Keeps what compilers turned out to be in the cache. Borrows the cache.
class CacheProbeMemo : public ProbeMemo {
 public:
  explicit CacheProbeMemo(PlanCache* cache) : cache_(*cache) {}

  std::optional<std::string> Lookup(absl::string_view key) override;
  void Store(absl::string_view key, absl::string_view value) override;

 private:
  PlanCache& cache_;
};

// A target with the device that answers for it, if there is one.
struct TargetContext {
  Target target;
  DeviceProfile profile;  // assumed when there is no device
  // Of each device to race on, in the order of the options; all of one measure
  // identity, which is that of `profile`. Empty when there is no device.
  std::vector<DeviceProfile> devices;
  CompilerSetup setup;
  std::optional<Ceilings> ceilings;  // of the device, if it was measured
};

// The GPUs with the driver's numbers `ordinals` among all `devices`, as devices
// for `target`; empty when there is none or they do not run it.
//   Errors: FailedPrecondition for one that does not exist or whose measure
//   identity is not that of the first, naming both.
absl::StatusOr<std::vector<DeviceProfile>> ChooseGpus(
    const std::vector<DeviceProfile>& devices, const Target& target,
    const std::vector<int>& ordinals);

// The ceilings that `kiln doctor --measure` kept for such a device; damaged
// ones count as absent. The second form takes the device from the fields of a
// stored plan's key.
std::optional<Ceilings> FindCeilings(const DeviceProfile& device,
                                     PlanCache* cache);
std::optional<Ceilings> FindCeilings(const std::vector<CanonicalField>& fields,
                                     PlanCache* cache);

// Finds device profile and compiler of a target. With compile_only, or without
// the device, the profile is the target's usual one (`assumed`).
//   Errors: FailedPrecondition when one of several devices does not exist or is
//   not like the others, naming them; Unavailable without a compiler.
absl::StatusOr<TargetContext> ResolveTarget(const Target& target,
                                            const PrewarmOptions& options,
                                            PlanCache* cache);

// One interval with what identifies it.
struct ResolvedInterval {
  size_t context = 0;  // index into the contexts
  std::vector<std::string> names;
  RequestGeometry geometry;
  Interval interval;
  PlanKey key;
  // Of the geometry on the context's device; shared by its intervals.
  std::shared_ptr<Planner> planner;
};

// Intervals of all requests on all contexts: by context, geometry, interval.
// Enumerates nothing.
//   Errors: FailedPrecondition when options.keep_numerics says nothing, or more
//   than one thing, about an interval.
absl::StatusOr<std::vector<ResolvedInterval>> ResolveIntervals(
    const std::vector<PlannedRequest>& requests,
    const std::vector<TargetContext>& contexts, const PrewarmOptions& options);

// The intervals of a manifest on targets, and what stands behind them.
struct ResolvedManifest {
  std::vector<TargetContext> contexts;  // one per target
  std::vector<ResolvedInterval> intervals;
};

// CheckOpsServed, Canonicalize, ResolveTarget for each target,
// ResolveIntervals.
absl::StatusOr<ResolvedManifest> ResolveManifest(const Manifest& manifest,
                                                 const PrewarmOptions& options,
                                                 PlanCache* cache);

// One line for each of `attached` that offers no candidate to any interval,
// with its name and why: what was attached is expected to compete.
std::vector<std::string> NotesOnIdle(const AttachedTemplates& attached,
                                     const ResolvedManifest& resolved);

// Runs all stages. An interval without a winner is no error: see
// PrewarmReport::complete. A cache whose file is damaged is repaired once, with
// a note.
//   Errors: Unimplemented, before the cache is touched, for a request of an op
//   that no template serves.
absl::StatusOr<PrewarmReport> Prewarm(const Manifest& manifest,
                                      const PrewarmOptions& options,
                                      PlanCache* cache, ProgressSink* progress);

}  // namespace kiln

#endif  // KILN_TUNER_PREWARM_H_
