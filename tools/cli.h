// What the verbs of `kiln` share: options, exit codes, output.
//
// Results go to stdout, progress and messages to stderr. Environment variables
// are read here and nowhere else.

#ifndef KILN_TOOLS_CLI_H_
#define KILN_TOOLS_CLI_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/plan_cache.h"
#include "compiler/spec/manifest.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/target.h"
#include "compiler/toolchain_probe.h"
#include "tuner/capacity_curve.h"
#include "tuner/prewarm.h"

namespace kiln {

enum ExitCode {
  kExitDone = 0,
  kExitFailed = 1,
  kExitDifferent = 1,   // of diff
  kExitUsage = 2,       // also: a named file or folder is not there, or is a
                        // folder where a file is meant
  kExitIncomplete = 3,  // some interval has no verified winner
  kExitRefused = 4,     // fingerprint, digest, target or policy, or what no
                        // template serves
};

// Options before the verb.
struct GlobalOptions {
  std::string cache;  // folder; empty = the default
  std::string cache_mode = "read-write";
  bool json = false;
  std::string nvrtc;   // path of libnvrtc; empty = searched for
  std::string cc_cpu;  // path of kiln-cc-cpu; empty = beside this binary
};

// Options of plan, prewarm and freeze.
struct PlanningOptions {
  std::string manifest;
  std::vector<std::string> targets;
  uint32_t max_capacity = 0;
  int max_candidates = 0;
  uint64_t max_arena = kArenaBytesMax;
  std::vector<int> devices = {0};
  bool compile_only = false;
  bool exhaustive = false;
  bool warm_l2 = false;
  std::string keep_numerics;          // bundle; empty = any numerics
  std::vector<std::string> packages;  // folders
};

struct PackageCommand {
  std::string folder;
};

struct PrewarmCommand {
  PlanningOptions planning;
  int jobs = 0;
  double compile_timeout = 120;
  double budget = 0;          // seconds per request; 0 = the default
  double launch_timeout = 0;  // seconds; 0 = by target
  bool exclusive = false;
  std::string stop_after;
  std::string shard;  // "K/N"; empty = all
  bool recheck = false;
};

struct ExplainCommand {
  PlanningOptions planning;
  std::string entry;
  uint64_t tokens = 1;
};

struct CacheCheckCommand {
  bool repair = false;
};

struct CacheGcCommand {
  std::optional<uint64_t> bytes_max;
  std::optional<double> days_max;
  std::vector<std::string> manifests;  // whose plans stay
  PlanningOptions planning;            // of the manifests
  std::vector<std::string> bundles;    // whose programs stay
  bool dry_run = false;
};

struct CacheExportCommand {
  std::vector<std::string> manifests;
  PlanningOptions planning;
  std::string output;
};

struct CacheImportCommand {
  std::string file;
  std::string digest;  // that the file must have; empty = any
  std::string prefer;
  bool dry_run = false;
};

struct CacheMergeCommand {
  std::vector<std::string> directories;
  std::string prefer;
  bool dry_run = false;
};

struct DescribeCommand {
  std::string checkpoint;
  std::string output;                      // empty = stdout
  std::optional<int64_t> tensor_parallel;  // ranks; absent: 1
};

struct PrepareCommand {
  std::string checkpoint;
  std::string output;
  int64_t layer = 0;
  std::string tensor_parallel = "0/1";  // rank/ranks
};

struct FreezeCommand {
  PlanningOptions planning;
  std::string output;
  bool allow_predicted = false;
  bool allow_unqualified = false;
  bool no_golden = false;
  double regret_cap = kRegretCap;
  bool keep_intervals = false;
};

struct ReplayCommand {
  double regret_cap = kRegretCap;
};

struct VerifyCommand {
  std::string file;
  std::string root;
  std::string key;        // public key file; empty = no signature wanted
  std::string signature;  // empty = FILE.sig
  // Golden replay on this machine; the rest is for it alone.
  bool selftest = false;
  std::string target;  // empty = the GPU if the bundle serves it, else the CPU
  int device = 0;
  bool allow_predicted = false;
  bool allow_unqualified = false;
};

struct DiffCommand {
  std::string a;
  std::string b;
};

struct SignCommand {
  std::string file;    // empty with new_key: only make keys
  std::string key;     // secret key file
  std::string output;  // empty = FILE.sig
  bool new_key = false;
};

struct InspectCommand {
  std::string file;
};

struct RunCommand {
  std::string file;
  std::string entry;
  std::string target;  // empty = the GPU if the bundle serves it, else the CPU
  uint64_t tokens = 1;
  uint64_t seed = 1;
  int device = 0;
  bool check = false;
  bool allow_predicted = false;
  bool allow_unqualified = false;
};

struct BenchCommand {
  std::string file;
  std::string entry;   // empty = all
  std::string target;  // empty = the GPU if the bundle serves it, else the CPU
  int device = 0;
  uint32_t max_capacity = UINT32_MAX;  // leave out larger ones
  uint32_t blocks = 15;
  bool warm_l2 = false;
  std::string compare;  // "torch"; empty = nothing
  std::string python = "python3";
  bool allow_predicted = false;
  bool allow_unqualified = false;
};

struct DoctorCommand {
  bool measure = false;
  std::vector<std::string> targets;  // to measure; empty = all devices here
  int device = 0;
  int jobs = 0;
};

struct ReportCommand {
  std::string output;
  std::vector<std::string> targets;  // empty = all
};

// One verb each, in tools/cmd_*.cc. The status decides the exit code unless a
// command returns its own.
absl::StatusOr<int> RunDescribe(const GlobalOptions& global,
                                const DescribeCommand& command);
absl::StatusOr<int> RunPrepare(const GlobalOptions& global,
                               const PrepareCommand& command);
absl::StatusOr<int> RunPlan(const GlobalOptions& global,
                            const PlanningOptions& command);
absl::StatusOr<int> RunPrewarm(const GlobalOptions& global,
                               const PrewarmCommand& command);
absl::StatusOr<int> RunFreeze(const GlobalOptions& global,
                              const FreezeCommand& command);
absl::StatusOr<int> RunVerify(const GlobalOptions& global,
                              const VerifyCommand& command);
absl::StatusOr<int> RunDiff(const GlobalOptions& global,
                            const DiffCommand& command);
absl::StatusOr<int> RunSign(const GlobalOptions& global,
                            const SignCommand& command);
absl::StatusOr<int> RunInspect(const GlobalOptions& global,
                               const InspectCommand& command);
absl::StatusOr<int> RunRun(const GlobalOptions& global,
                           const RunCommand& command);
absl::StatusOr<int> RunExplain(const GlobalOptions& global,
                               const ExplainCommand& command);
absl::StatusOr<int> RunPackageCheck(const GlobalOptions& global,
                                    const PackageCommand& command);
absl::StatusOr<int> RunPackagePin(const GlobalOptions& global,
                                  const PackageCommand& command);
absl::StatusOr<int> RunCacheStats(const GlobalOptions& global);
absl::StatusOr<int> RunCacheCheck(const GlobalOptions& global,
                                  const CacheCheckCommand& command);
absl::StatusOr<int> RunCacheGc(const GlobalOptions& global,
                               const CacheGcCommand& command);
absl::StatusOr<int> RunCacheExport(const GlobalOptions& global,
                                   const CacheExportCommand& command);
absl::StatusOr<int> RunCacheImport(const GlobalOptions& global,
                                   const CacheImportCommand& command);
absl::StatusOr<int> RunCacheMerge(const GlobalOptions& global,
                                  const CacheMergeCommand& command);
absl::StatusOr<int> RunReplay(const GlobalOptions& global,
                              const ReplayCommand& command);
absl::StatusOr<int> RunReport(const GlobalOptions& global,
                              const ReportCommand& command);
absl::StatusOr<int> RunBench(const GlobalOptions& global,
                             const BenchCommand& command);
absl::StatusOr<int> RunDoctor(const GlobalOptions& global,
                              const DoctorCommand& command);

// Prints one object on stdout. Bytes of a path that are no UTF-8 print as
// U+FFFD.
void PrintJson(const nlohmann::ordered_json& value, int indent = -1);

// Exit code for a failure.
int ExitCodeOf(const absl::Status& status);

// --cache, else $KILN_CACHE, else $XDG_CACHE_HOME/kiln, else ~/.cache/kiln;
// empty where none of them is set.
std::string CacheDirectory(const GlobalOptions& global);
// Whether there is a cache, so that none is made where a folder was mistyped.
bool CacheExists(const GlobalOptions& global);
absl::StatusOr<PlanCache> OpenCache(const GlobalOptions& global);
// For verbs that store nothing of their own, but note what is used: where there
// is no cache, none is made, and it reads as empty.
absl::StatusOr<PlanCache> OpenExistingCache(const GlobalOptions& global);
// For verbs that only look: read-only, unless --cache-mode is off.
absl::StatusOr<PlanCache> OpenCacheToRead(const GlobalOptions& global);

// Targets of the command line; "cpu" is this machine's CPU target. Duplicates
// are dropped. InvalidArgument for an unknown one or none.
absl::StatusOr<std::vector<Target>> ParseTargets(
    const std::vector<std::string>& texts);

// Refuses an output that is one of the files that a verb reads. what: "bundle".
absl::Status CheckReplacesNone(absl::string_view what,
                               const std::string& output,
                               const std::vector<std::string>& inputs);

// Fills what plan, prewarm and freeze have in common.
absl::StatusOr<PrewarmOptions> MakePrewarmOptions(
    const GlobalOptions& global, const PlanningOptions& planning);

// Names packages without use (NotesOnIdle) on stderr.
void PrintNotesOnIdle(const PrewarmOptions& options,
                      const ResolvedManifest& resolved);

// Where NVRTC is looked for: --nvrtc, $CUDA_HOME/lib64, the usual places.
NvrtcProbeOptions MakeNvrtcOptions(const GlobalOptions& global);

// Progress on stderr: a bar that redraws itself on a terminal, otherwise a line
// whenever a stage ends and every half minute while it lasts.
std::unique_ptr<ProgressSink> MakeProgress();

// Rows of cells as a left-aligned table; the first row is the head.
std::string FormatTable(const std::vector<std::vector<std::string>>& rows);

// What the cache found damaged, on stderr.
void PrintWarnings(PlanCache* cache);

// "2026-11-29 20:15:03 UTC".
std::string FormatTime(int64_t unix_seconds);

// "12.3 us", "4.56 ms".
std::string FormatNs(double ns);
// "3.4 MiB".
std::string FormatBytes(uint64_t bytes);

}  // namespace kiln

#endif  // KILN_TOOLS_CLI_H_
