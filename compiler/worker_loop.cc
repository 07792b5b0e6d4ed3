#include "compiler/worker_loop.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
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
  // NVRTC initialises the GPU's driver where there is one, which would open
  // every device that it sees and take longer than a small program does.
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  if (chdir("/") != 0) std::perror("compiler worker cannot leave its folder");
}

// A device that this process has open, other than /dev/null and its like; empty
// if there is none.
std::string OpenDevice() {
  constexpr unsigned kMemoryDevices = 1;  // of Linux, by its major number
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/self/fd", error)) {
    struct stat info;
    if (stat(entry.path().c_str(), &info) == 0 && S_ISCHR(info.st_mode) &&
        major(info.st_rdev) != kMemoryDevices) {
      return std::filesystem::read_symlink(entry.path(), error).string();
    }
  }
  return "";
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
    // A process that can touch a device has no result, nor another job.
    const std::string device = OpenDevice();
    if (!device.empty()) {
      result.status = absl::InternalError(
          absl::StrCat("the compiler opened ", device,
                       "; programs are compiled without a device"));
      result.binary.clear();
    }
    result.last = !(*compiler)->Reusable() || !device.empty();
    absl::StatusOr<std::string> reply = EncodeResult(result);
    if (!reply.ok()) {
      reply = EncodeResult({.id = job->id,
                            .status = reply.status(),
                            .binary = {},
                            .log = {},
                            .seconds = result.seconds,
                            .last = result.last});
    }
    if (!SendFrame(channel, reply) || result.last) return 0;
  }
  return 0;
}

}  // namespace kiln
