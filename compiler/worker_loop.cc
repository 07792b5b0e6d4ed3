#include "compiler/worker_loop.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

#include "compiler/base/sanitized.h"
#include "compiler/worker_channel.h"

namespace kiln {
namespace {

#if !KILN_SANITIZED
void LimitAddressSpace() {
  struct rlimit limit;
  if (getrlimit(RLIMIT_AS, &limit) != 0) return;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, kWorkerAddressSpaceBytes);
  setrlimit(RLIMIT_AS, &limit);
}
#endif

void Isolate() {
  EndWithParent();
#if !KILN_SANITIZED
  LimitAddressSpace();
#endif
  // NVRTC reads options (NVRTC_APPEND_FLAGS) and a cache folder from the
  // environment, and looks for headers in the working folder.
  clearenv();
  setenv("CUDA_CACHE_DISABLE", "1", 1);
  if (chdir("/") != 0) std::perror("compiler worker cannot leave its folder");
}

WorkerResult RunJob(WorkerCompiler* compiler, const WorkerJob& job) {
  const auto start = std::chrono::steady_clock::now();
  WorkerResult result = compiler->Compile(job);
  result.id = job.id;
  result.seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
          .count();
  return result;
}

}  // namespace

int ServeCompiler(
    const std::function<absl::StatusOr<std::unique_ptr<WorkerCompiler>>()>&
        create) {
  const int channel = TakeWorkerChannel();
  if (channel < 0) return 2;
  Isolate();
  const absl::StatusOr<std::unique_ptr<WorkerCompiler>> compiler = create();
  if (!compiler.ok()) {
    SendFrame(channel, EncodeFailure(compiler.status()));
    return 1;
  }
  if (!SendFrame(channel, EncodeHello((*compiler)->Hello()))) return 0;

  FrameParser parser;
  while ((*compiler)->Reusable()) {
    const absl::StatusOr<std::optional<Frame>> frame =
        ReceiveFrame(channel, &parser);
    if (!frame.ok()) {
      SendFrame(channel, EncodeFailure(frame.status()));
      return 1;
    }
    if (!frame->has_value()) return 0;
    absl::StatusOr<WorkerJob> job =
        (*frame)->type == FrameType::kJob
            ? DecodeJob((*frame)->payload)
            : absl::DataLossError(
                  "compiler worker received a frame that is "
                  "no job");
    if (!job.ok()) {
      SendFrame(channel, EncodeFailure(job.status()));
      return 1;
    }
    WorkerResult result = RunJob(compiler->get(), *job);
    result.last = !(*compiler)->Reusable();
    absl::StatusOr<std::string> reply = EncodeResult(result);
    if (!reply.ok()) {
      reply = EncodeResult({.id = job->id,
                            .status = reply.status(),
                            .binary = {},
                            .log = {},
                            .seconds = result.seconds,
                            .last = result.last});
    }
    if (!SendFrame(channel, reply)) return 0;
  }
  return 0;
}

}  // namespace kiln
