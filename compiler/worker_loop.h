// ServeCompiler: the life of a compiler worker process, the same for every
// compiler. Kiln starts workers itself; they are not for use by hand.

#ifndef KILN_COMPILER_WORKER_LOOP_H_
#define KILN_COMPILER_WORKER_LOOP_H_

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "compiler/worker_protocol.h"

namespace kiln {

// A compiler inside a worker process. Used by one thread.
class WorkerCompiler {
 public:
  virtual ~WorkerCompiler() = default;

  virtual WorkerHello Hello() const = 0;
  // Never fails as a call: a reject is a result. Must be a pure function of the
  // job. `id` and `seconds` of the result are filled in by the caller.
  virtual WorkerResult Compile(const WorkerJob& job) = 0;

  // False once the process must not compile again; it then ends and is
  // replaced.
  virtual bool Reusable() const { return true; }
};

// Address space a worker may use, in bytes: a unit that makes its compiler eat
// memory without end becomes a reject before the machine suffers.
inline constexpr uint64_t kWorkerAddressSpaceBytes = uint64_t{4} << 30;

// Isolates this process from everything that must not change its output or
// outlive its parent - environment, working folder, standard streams, core
// files, GPUs -, creates the compiler, and answers jobs from standard input,
// which must be the stream socket described in worker_protocol.h, until it
// ends. A job after which a device is open has failed, and is the last one.
// Returns the exit code of the process: 0 when the stream ended, 1 when the
// compiler could not be created, 2 when standard input is no such stream.
int ServeCompiler(
    const std::function<absl::StatusOr<std::unique_ptr<WorkerCompiler>>()>&
        create);

}  // namespace kiln

#endif  // KILN_COMPILER_WORKER_LOOP_H_
