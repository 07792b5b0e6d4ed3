// CompilePool: many compiles at once, each in a worker process that may crash,
// hang or eat memory without harm to the rest.

#ifndef KILN_COMPILER_COMPILE_POOL_H_
#define KILN_COMPILER_COMPILE_POOL_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/program.h"
#include "compiler/spec/target.h"
#include "compiler/toolchain_probe.h"

namespace kiln {

struct CompileJob {
  SourceUnit unit;
  Target target;
};

// Outcome of one job.
//
// A status that is not OK is a reject, with the reason. By code:
//   InvalidArgument    the compiler refused the source; it always will
//   Internal           the compiler crashed or failed on this source
//   DeadlineExceeded   the compile ran longer than PoolOptions::deadline
//   ResourceExhausted  source or program exceeds a stated size
//   Unavailable        something outside killed the worker, twice; try again
struct CompileResult {
  size_t index = 0;  // of the job
  absl::Status status;
  std::string binary;  // empty unless OK
  std::string log;  // compiler output; after a crash, the worker's last words
  double seconds = 0;  // inside the compiler; until the end for killed ones
};

struct CompileProgress {
  size_t done = 0;
  size_t total = 0;
  std::string current;  // label of the job that started last
};

// Both are called on the thread that called Run, never at the same time, and
// never hold up the workers.
struct CompileCallbacks {
  // Results in order of completion: one transaction per call is the right
  // amount of writing. Those that come in during a call wait for its end and,
  // while others still compile, up to four times as long as the call took
  // (at most a quarter of a second), so that slow writing is done for several
  // at once and takes a fifth of the time at most. All are handed over, also
  // when the run is stopped. An error stops the run, which returns it.
  std::function<absl::Status(absl::Span<const CompileResult>)> on_results =
      nullptr;
  std::function<void(const CompileProgress&)> on_progress = nullptr;
  // Polled about ten times a second; true stops the run with Cancelled.
  std::function<bool()> cancelled = nullptr;
};

struct PoolOptions {
  // Worker processes at most; see WorkerCountMax for a good number.
  int jobs = 1;
  // For one compile, from the moment its worker is ready.
  absl::Duration deadline = absl::Seconds(120);
  // For a worker to become ready.
  absl::Duration start_deadline = absl::Seconds(60);
};

// Memory that one worker is counted with, in bytes.
inline constexpr uint64_t kWorkerMemoryBytes = uint64_t{512} << 20;

// How many workers this machine can take now: as many as processors this
// process may use (affinity and cgroup quota), but no more than fit into the
// available memory (system and cgroup), and at least 1.
int WorkerCountMax();

// What was spent, for reports.
struct PoolStats {
  double compile_seconds = 0;  // sum over jobs, inside compilers
  int workers_started = 0;
  int workers_peak = 0;  // running at the same time
};

// Threads: one internal thread owns all workers; they end with the pool, and
// also when this process is killed. Run may be called repeatedly, from one
// thread at a time; workers stay warm in between.
class CompilePool {
 public:
  // setups: at most one per backend.
  CompilePool(const PoolOptions& options, std::vector<CompilerSetup> setups);
  CompilePool(const CompilePool&) = delete;
  CompilePool& operator=(const CompilePool&) = delete;
  ~CompilePool();

  // Compiles all jobs, started in the order given, and returns their results in
  // that order. Jobs must stay unchanged meanwhile.
  //   Errors (the whole run): FailedPrecondition (no setup for a target, or a
  //   worker that is not the compiler that was probed), Cancelled, the error of
  //   on_results, and the error of a worker that cannot start at all.
  absl::StatusOr<std::vector<CompileResult>> Run(
      absl::Span<const CompileJob> jobs,
      const CompileCallbacks& callbacks = {});

  // Of all runs so far. Not during Run.
  PoolStats stats() const;
  // Process ids of the workers that run now, for tests and diagnostics.
  std::vector<int> WorkerPids() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// The inspected program of a job that compiled. The key is that of the probed
// toolchain.
//   Errors: the result's own status when it is a reject; those of
//   InspectProgram otherwise.
absl::StatusOr<Program> MakeProgram(const CompileJob& job,
                                    const Toolchain& toolchain,
                                    CompileResult result);

}  // namespace kiln

#endif  // KILN_COMPILER_COMPILE_POOL_H_
