#include "compiler/worker_channel.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace kiln {
namespace {

constexpr size_t kReadBytes = 256u << 10;

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

}  // namespace

int TakeWorkerChannel() {
  struct stat info;
  if (fstat(STDIN_FILENO, &info) != 0 || !S_ISSOCK(info.st_mode)) {
    std::fprintf(stderr,
                 "this is a worker process; kiln starts it when it needs it\n");
    return -1;
  }
  const int channel = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3);
  const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (channel < 0 || null < 0 || dup2(null, STDIN_FILENO) < 0 ||
      dup2(STDERR_FILENO, STDOUT_FILENO) < 0) {
    std::perror("worker cannot set up its streams");
    return -1;
  }
  close(null);
  return channel;
}

void EndWithParent() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const struct rlimit none = {0, 0};
  setrlimit(RLIMIT_CORE, &none);
  if (std::FILE* file = std::fopen("/proc/self/oom_score_adj", "we")) {
    std::fputs("1000", file);
    std::fclose(file);
  }
}

bool SendFrame(int fd, const absl::StatusOr<std::string>& frame) {
  return frame.ok() && SendAll(fd, *frame);
}

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

}  // namespace kiln
