// The NVRTC worker: what `kiln cc-nvrtc` runs when Kiln starts itself again.

#ifndef KILN_COMPILER_NVRTC_WORKER_H_
#define KILN_COMPILER_NVRTC_WORKER_H_

#include <string>

namespace kiln {

// First argument that selects this worker in any executable that can be one.
inline constexpr char kNvrtcWorkerVerb[] = "cc-nvrtc";

// Serves compiles until standard input ends. Arguments:
//   argv[1] = kNvrtcWorkerVerb, argv[2] = "--nvrtc", argv[3] = path of libnvrtc
// Returns the exit code; see ServeCompiler.
int NvrtcWorkerMain(int argc, char** argv);

}  // namespace kiln

#endif  // KILN_COMPILER_NVRTC_WORKER_H_
