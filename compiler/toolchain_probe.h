// Finds compilers, identifies them by content, and says how to start their
// workers. Reads no environment variable and loads no compiler into this
// process.

#ifndef KILN_COMPILER_TOOLCHAIN_PROBE_H_
#define KILN_COMPILER_TOOLCHAIN_PROBE_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/spec/program.h"
#include "compiler/spec/target.h"
#include "compiler/worker_process.h"
#include "compiler/worker_protocol.h"

namespace kiln {

// Everything needed to compile for one backend.
struct CompilerSetup {
  Backend backend = Backend::kCpu;
  Toolchain toolchain;
  // The files behind Toolchain::content. A worker that reports others is
  // refused: its programs would be stored under a wrong key.
  std::vector<FileIdentity> components;
  WorkerCommand command;
};

// Remembers probe results between runs, so that a start does not hash 100-200
// MB again (60-150 ms). Keys and values are opaque bytes. A key names a file by
// path, size, modification time and inode, so an entry never needs to be
// invalidated; a value that is damaged or names files that have changed is
// ignored and replaced.
class ProbeMemo {
 public:
  virtual ~ProbeMemo() = default;
  virtual std::optional<std::string> Lookup(absl::string_view key) = 0;
  // Failing to remember costs time only, hence no status.
  virtual void Store(absl::string_view key, absl::string_view value) = 0;
};

struct NvrtcProbeOptions {
  // Path of libnvrtc; empty means that it is searched for.
  std::string library = {};
  // Searched before the folders of the system, for example $CUDA_HOME/lib64.
  std::vector<std::string> folders = {};
  // Executable whose main calls NvrtcWorkerMain when argv[1] says so.
  std::string worker = "/proc/self/exe";
};

// Path of the libnvrtc that ProbeNvrtc uses: `library` itself, else libnvrtc.so
// .13 or .12 in `folders`, /usr/local/cuda/lib64, /usr/local/cuda-*/lib64
// (newest first) and the system's library folders.
//   Errors: NotFound, with the places that were searched.
absl::StatusOr<std::string> FindNvrtc(const NvrtcProbeOptions& options);

// The NVRTC toolchain. content covers libnvrtc, its builtins and the options
// that Kiln always gives it.
//   memo: may be null.
//   Errors: NotFound, PermissionDenied, FailedPrecondition.
absl::StatusOr<CompilerSetup> ProbeNvrtc(const NvrtcProbeOptions& options,
                                         ProbeMemo* memo = nullptr);

// The CPU toolchain. content covers the worker executable, libclang-cpp and
// libLLVM. Starts the worker once when the memo does not know it.
//   executable: path of kiln-cc-cpu.
//   Errors: NotFound, PermissionDenied, and those of AwaitHello.
absl::StatusOr<CompilerSetup> ProbeCcCpu(const std::string& executable,
                                         ProbeMemo* memo = nullptr);

// kiln-cc-cpu in the folder of the running executable.
std::string DefaultCcCpuPath();

}  // namespace kiln

#endif  // KILN_COMPILER_TOOLCHAIN_PROBE_H_
