// WorkerProcess: one running worker, owned by the thread that started it.

#ifndef KILN_COMPILER_WORKER_PROCESS_H_
#define KILN_COMPILER_WORKER_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "compiler/worker_protocol.h"

namespace kiln {

// How long a process that was killed may take to be gone.
inline constexpr absl::Duration kReapPatience = absl::Seconds(60);

// How to start a worker. `arguments` excludes argv[0].
struct WorkerCommand {
  std::string executable;  // absolute path, or "/proc/self/exe"
  std::vector<std::string> arguments = {};
  // Compilers get an empty environment. A worker that opens a device needs that
  // of its parent: CUDA_VISIBLE_DEVICES and the like say what an ordinal means.
  bool inherit_environment = false;
  // A descriptor that the worker gets as its number 3; -1 for none. Borrowed
  // during Start.
  int shared = -1;
};

// A child process in a process group of its own, with one stream socket as
// standard input and output, and standard error caught.
//
// The child asks to be killed when its starter's thread ends, so the thread
// that calls Start must live as long as the worker is wanted. Not thread-safe.
class WorkerProcess {
 public:
  // Errors: NotFound and PermissionDenied (the executable), Unavailable and
  // ResourceExhausted (the system).
  static absl::StatusOr<std::unique_ptr<WorkerProcess>> Start(
      const WorkerCommand& command);

  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;
  // Kills and reaps the process.
  ~WorkerProcess();

  // For poll(2): both are non-blocking; errors() is -1 once it has ended.
  int channel() const { return channel_; }

  int errors() const { return errors_; }

  pid_t pid() const { return pid_; }

  // Queues bytes and sends what the socket takes now. False when the peer is
  // gone.
  bool Send(absl::string_view bytes);
  // Sends more of what is queued.
  bool Flush();

  bool WantsToSend() const { return sent_ < outgoing_.size(); }

  // Reads what is there into the parser. False at the end of the stream.
  bool Receive();

  absl::StatusOr<std::optional<Frame>> NextFrame() { return parser_.Next(); }

  // Reads what is there from standard error, of which the last part is kept.
  void ReceiveErrors();

  const std::string& error_text() const { return error_text_; }

  void ClearErrorText() { error_text_.clear(); }

  // Waits at most `patience` for the process to end by itself, kills its group
  // if it still runs, reaps it, and says how it ended: "exited with code 3",
  // "was killed by signal 11 (Segmentation fault)". A process that a driver
  // keeps alive all the same is left behind after kReapPatience.
  std::string Finish(absl::Duration patience = absl::ZeroDuration());

  // Valid after Finish: the signal that ended the process before Finish had to,
  // or 0.
  int ending_signal() const { return ending_signal_; }

 private:
  WorkerProcess(pid_t pid, int channel, int errors)
      : pid_(pid), channel_(channel), errors_(errors) {}

  pid_t pid_;
  int channel_;
  int errors_;
  std::string outgoing_;
  size_t sent_ = 0;
  FrameParser parser_;
  std::string error_text_;
  bool finished_ = false;
  int ending_signal_ = 0;
};

// Waits for a new worker's hello and returns it; the worker's own Failure is
// returned as the error it carries.
//   Errors: DeadlineExceeded, Unavailable (it ended), DataLoss (it does not
//   speak the protocol), FailedPrecondition (another version of it).
absl::StatusOr<WorkerHello> AwaitHello(WorkerProcess* worker,
                                       absl::Duration timeout);

// Interprets a worker's first frame.
absl::StatusOr<WorkerHello> HelloFromFrame(const Frame& frame);

}  // namespace kiln

#endif  // KILN_COMPILER_WORKER_PROCESS_H_
