// NvrtcLibrary: NVIDIA's run-time compiler, opened at run time. Only worker
// processes load it. No toolkit header is needed to build or to use it; the
// prototypes are those of nvrtc.h (CUDA 12 and 13).

#ifndef KILN_COMPILER_NVRTC_LIBRARY_H_
#define KILN_COMPILER_NVRTC_LIBRARY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compiler/worker_loop.h"
#include "compiler/worker_protocol.h"

namespace kiln {

// The files that decide what libnvrtc at `library` generates: the library and
// the libnvrtc-builtins.so.* in its own folder, sorted by path. Opens nothing.
//   Errors: NotFound when either is missing.
absl::StatusOr<std::vector<FileIdentity>> NvrtcComponents(
    const std::string& library);

// Loads libnvrtc from exactly `library` (an absolute path) together with the
// builtins beside it.
//   Errors: NotFound, FailedPrecondition (cannot be loaded, or lacks a symbol).
absl::StatusOr<std::unique_ptr<WorkerCompiler>> OpenNvrtc(
    const std::string& library);

// Options that every compile gets, whatever the unit and the target; part of
// the toolchain's identity. NVRTC 12 goes without -frandom-seed.
std::vector<std::string> NvrtcFixedOptions();

}  // namespace kiln

#endif  // KILN_COMPILER_NVRTC_LIBRARY_H_
