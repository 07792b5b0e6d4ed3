#include "compiler/worker_loop.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>

namespace kiln {
namespace {

constexpr size_t kReadBytes = 256u << 10;

// Moves the channel away from standard input and output, so that nothing a
// compiler prints can reach it. Returns the channel, or -1.
int TakeChannel() {
  struct stat info;
  if (fstat(STDIN_FILENO, &info) != 0 || !S_ISSOCK(info.st_mode)) {
    std::fprintf(
        stderr, "this is a compiler worker; kiln starts it when it needs it\n");
    return -1;
  }
  const int channel = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3);
  const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (channel < 0 || null < 0 || dup2(null, STDIN_FILENO) < 0 ||
      dup2(STDERR_FILENO, STDOUT_FILENO) < 0) {
    std::perror("compiler worker cannot set up its streams");
    return -1;
  }
  close(null);
  return channel;
}

void SetLimit(__rlimit_resource_t resource, uint64_t value) {
  struct rlimit limit;
  if (getrlimit(resource, &limit) != 0) return;
  if (limit.rlim_max != RLIM_INFINITY && value > limit.rlim_max) return;
  limit.rlim_cur = value;
  setrlimit(resource, &limit);
}

void Isolate() {
  // The parent's death ends this process even in the middle of a compile. A
  // parent that died before this call shows as the end of the channel.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  SetLimit(RLIMIT_CORE, 0);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  SetLimit(RLIMIT_AS, kWorkerAddressSpaceBytes);
#endif
  // If memory runs out all the same, a worker goes before its parent.
  if (std::FILE* file = std::fopen("/proc/self/oom_score_adj", "we")) {
    std::fputs("1000", file);
    std::fclose(file);
  }
  // NVRTC reads options (NVRTC_APPEND_FLAGS) and a cache folder from the
  // environment, and looks for headers in the working folder.
  clearenv();
  setenv("CUDA_CACHE_DISABLE", "1", 1);
  if (chdir("/") != 0) std::perror("compiler worker cannot leave its folder");
}

bool SendAll(int fd, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      return false;
    }
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

bool SendFrame(int fd, const absl::StatusOr<std::string>& frame) {
  return frame.ok() && SendAll(fd, *frame);
}

// Blocks until one whole frame is there. nullopt at the end of the stream.
absl::StatusOr<std::optional<Frame>> ReceiveFrame(int fd, FrameParser* parser) {
  std::string chunk(kReadBytes, '\0');
  for (;;) {
    absl::StatusOr<std::optional<Frame>> frame = parser->Next();
    if (!frame.ok() || frame->has_value()) return frame;
    const ssize_t got = read(fd, chunk.data(), chunk.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return std::optional<Frame>();
    parser->Feed(absl::string_view(chunk.data(), static_cast<size_t>(got)));
  }
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
  const int channel = TakeChannel();
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
