#include "compiler/worker_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

constexpr size_t kErrorTextBytesMax = 16u << 10;
constexpr size_t kReadBytes = 256u << 10;

// Pairs of descriptors that close themselves unless released.
struct DescriptorPair {
  int fd[2] = {-1, -1};

  DescriptorPair() = default;
  DescriptorPair(const DescriptorPair&) = delete;
  DescriptorPair& operator=(const DescriptorPair&) = delete;

  ~DescriptorPair() {
    for (const int one : fd) {
      if (one >= 0) close(one);
    }
  }

  int Release(int index) {
    const int released = fd[index];
    fd[index] = -1;
    return released;
  }
};

absl::Status SpawnStatus(int code, const std::string& executable) {
  return code == 0 ? absl::OkStatus()
                   : ErrnoStatus(code, "cannot start the worker", executable);
}

absl::StatusOr<pid_t> Spawn(const WorkerCommand& command, int channel,
                            int errors) {
  std::vector<char*> argv = {const_cast<char*>(command.executable.c_str())};
  for (const std::string& argument : command.arguments) {
    argv.push_back(const_cast<char*>(argument.c_str()));
  }
  argv.push_back(nullptr);
  char* no_environment[] = {nullptr};

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, channel, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, channel, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors, STDERR_FILENO);
  int next = STDERR_FILENO + 1;
  if (command.shared >= 0) {
    posix_spawn_file_actions_adddup2(&actions, command.shared, next++);
  }
  // Whatever else this process has open (device files, a database) is none of
  // the worker's business.
  posix_spawn_file_actions_addclosefrom_np(&actions, next);

  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP |
                                            POSIX_SPAWN_SETSIGDEF |
                                            POSIX_SPAWN_SETSIGMASK);
  posix_spawnattr_setpgroup(&attributes, 0);
  sigset_t all, none;
  sigfillset(&all);
  sigemptyset(&none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setsigmask(&attributes, &none);

  // posix_spawn, not fork: the parent may hold a CUDA context and threads.
  pid_t pid = -1;
  const int code = posix_spawn(
      &pid, command.executable.c_str(), &actions, &attributes, argv.data(),
      command.inherit_environment ? environ : no_environment);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  RETURN_IF_ERROR(SpawnStatus(code, command.executable));
  return pid;
}

// Gone for good, as opposed to "nothing now".
bool IsFinal(ssize_t count) {
  return count == 0 || (count < 0 && errno != EAGAIN && errno != EWOULDBLOCK &&
                        errno != EINTR);
}

}  // namespace

absl::StatusOr<std::unique_ptr<WorkerProcess>> WorkerProcess::Start(
    const WorkerCommand& command) {
  DescriptorPair channel, errors;
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, channel.fd) != 0) {
    return ErrnoStatus(errno, "cannot create a socket for", command.executable);
  }
  if (pipe2(errors.fd, O_CLOEXEC) != 0) {
    return ErrnoStatus(errno, "cannot create a pipe for", command.executable);
  }
  ASSIGN_OR_RETURN(const pid_t pid,
                   Spawn(command, channel.fd[1], errors.fd[1]));
  fcntl(channel.fd[0], F_SETFL, O_NONBLOCK);
  fcntl(errors.fd[0], F_SETFL, O_NONBLOCK);
  return std::unique_ptr<WorkerProcess>(
      new WorkerProcess(pid, channel.Release(0), errors.Release(0)));
}

WorkerProcess::~WorkerProcess() {
  Finish();
  close(channel_);
  if (errors_ >= 0) close(errors_);
}

bool WorkerProcess::Send(absl::string_view bytes) {
  if (!WantsToSend()) {
    outgoing_.clear();
    sent_ = 0;
  }
  outgoing_.append(bytes.data(), bytes.size());
  return Flush();
}

bool WorkerProcess::Flush() {
  while (WantsToSend()) {
    const ssize_t count = send(channel_, outgoing_.data() + sent_,
                               outgoing_.size() - sent_, MSG_NOSIGNAL);
    if (count < 0) return !IsFinal(count);
    sent_ += static_cast<size_t>(count);
  }
  return true;
}

bool WorkerProcess::Receive() {
  std::string chunk(kReadBytes, '\0');
  for (;;) {
    const ssize_t count = read(channel_, chunk.data(), chunk.size());
    if (count <= 0) return !IsFinal(count);
    parser_.Feed(absl::string_view(chunk.data(), static_cast<size_t>(count)));
    // One full read may be followed by more; a short one emptied the socket.
    if (static_cast<size_t>(count) < chunk.size()) return true;
  }
}

void WorkerProcess::ReceiveErrors() {
  char chunk[4096];
  while (errors_ >= 0) {
    const ssize_t count = read(errors_, chunk, sizeof(chunk));
    if (count <= 0) {
      if (IsFinal(count)) {
        close(errors_);
        errors_ = -1;
      }
      return;
    }
    error_text_.append(chunk, static_cast<size_t>(count));
    if (error_text_.size() > kErrorTextBytesMax) {
      error_text_.erase(0, error_text_.size() - kErrorTextBytesMax);
    }
  }
}

std::string WorkerProcess::Finish(absl::Duration patience) {
  if (finished_) return "has ended";
  finished_ = true;
  const absl::Time until = absl::Now() + patience;
  int status = 0;
  pid_t reaped = waitpid(pid_, &status, WNOHANG);
  while (reaped == 0 && absl::Now() < until) {
    absl::SleepFor(absl::Milliseconds(1));
    reaped = waitpid(pid_, &status, WNOHANG);
  }
  const bool killed_here = reaped == 0;
  if (killed_here) kill(-pid_, SIGKILL);
  const absl::Time given_up = absl::Now() + kReapPatience;
  for (absl::Duration pause = absl::Microseconds(50); reaped <= 0;
       pause = std::min(2 * pause, absl::Milliseconds(50))) {
    reaped = waitpid(pid_, &status, WNOHANG);
    if (reaped < 0 && errno != EINTR) return "ended for an unknown reason";
    if (reaped > 0) break;
    if (absl::Now() > given_up) return "was killed and does not end";
    absl::SleepFor(pause);
  }
  ReceiveErrors();
  if (WIFEXITED(status)) {
    return absl::StrCat("exited with code ", WEXITSTATUS(status));
  }
  const int signal = WTERMSIG(status);
  if (!killed_here) ending_signal_ = signal;
  return absl::StrCat("was killed by signal ", signal, " (", strsignal(signal),
                      ")");
}

absl::StatusOr<WorkerHello> HelloFromFrame(const Frame& frame) {
  if (frame.type == FrameType::kHello) return DecodeHello(frame.payload);
  if (frame.type == FrameType::kFailure) return DecodeFailure(frame.payload);
  return absl::DataLossError("compiler worker did not start with a hello");
}

absl::StatusOr<WorkerHello> AwaitHello(WorkerProcess* worker,
                                       absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  bool open = true;
  while (open) {
    const int64_t left = absl::ToInt64Milliseconds(deadline - absl::Now());
    if (left <= 0) {
      return absl::DeadlineExceededError(
          absl::StrCat("compiler worker sent no hello within ",
                       absl::FormatDuration(timeout)));
    }
    pollfd fds[2] = {{worker->channel(), POLLIN, 0},
                     {worker->errors(), POLLIN, 0}};
    if (poll(fds, 2, static_cast<int>(std::min<int64_t>(left, 1000))) < 0) {
      continue;
    }
    worker->ReceiveErrors();
    open = worker->Receive();
    ASSIGN_OR_RETURN(const std::optional<Frame> frame, worker->NextFrame());
    if (frame.has_value()) return HelloFromFrame(*frame);
  }
  const std::string ending = worker->Finish(absl::Seconds(1));
  return absl::UnavailableError(absl::StrCat(
      "compiler worker ", ending, " before it was ready",
      worker->error_text().empty() ? "" : ": ", worker->error_text()));
}

}  // namespace kiln
