#include "compiler/nvrtc_worker.h"

#include <cstdio>

#include "absl/strings/string_view.h"
#include "compiler/nvrtc_library.h"
#include "compiler/worker_loop.h"

namespace kiln {

int NvrtcWorkerMain(int argc, char** argv) {
  if (argc != 4 || absl::string_view(argv[1]) != kNvrtcWorkerVerb ||
      absl::string_view(argv[2]) != "--nvrtc") {
    std::fprintf(stderr, "usage: %s --nvrtc PATH\n", kNvrtcWorkerVerb);
    return 2;
  }
  const std::string library = argv[3];
  return ServeCompiler([&library] { return OpenNvrtc(library); });
}

}  // namespace kiln
