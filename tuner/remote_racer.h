// RemoteRacer: races in a worker process, seen from the process that owns the
// cache. A candidate that hangs, crashes or breaks its device ends the worker
// and nothing else: it is set aside, a new worker starts, and the race goes on
// with the others from the last whole block.

#ifndef KILN_TUNER_REMOTE_RACER_H_
#define KILN_TUNER_REMOTE_RACER_H_

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compiler/worker_process.h"
#include "tuner/launch_watch.h"
#include "tuner/race_protocol.h"
#include "tuner/race_worker.h"

namespace kiln {

struct RemoteRacerOptions {
  // What answers to kRaceWorkerVerb: `kiln` itself.
  std::string executable = "/proc/self/exe";
  RaceSite site;
  // MeasureIdentity that the worker's device must have.
  Digest device;
  // For one launch of a plan, or one replay of a captured sequence.
  double launch_seconds_max = 60;
  // Without a launch, a verdict or a block: the oracle, weights, uploads.
  double idle_seconds_max = 1200;
  // For a worker to open its device.
  double start_seconds_max = 300;
};

// A contender that ended its worker.
struct Casualty {
  size_t contender = 0;
  std::string reason;  // one line
  std::string log;     // the worker's last words, may be empty
};

// Owned by the thread that calls Start and Advance, which must live as long.
class RemoteRacer {
 public:
  explicit RemoteRacer(RemoteRacerOptions options);
  RemoteRacer(const RemoteRacer&) = delete;
  RemoteRacer& operator=(const RemoteRacer&) = delete;
  // Kills the worker.
  ~RemoteRacer();

  const RaceSite& site() const { return options_.site; }

  // Starts the worker if none runs; does not wait for it.
  void Start();
  // Has the worker make the bench of a request ahead of its first race. Not
  // during a race.
  void Prepare(const RacePrepare& prepare);
  // Begins a race; `job.earlier` is not read. Not during a race.
  void Submit(RaceJob job);

  bool racing() const { return job_.has_value(); }

  // A worker is starting or preparing.
  bool warming_up() const { return state_ == State::kStarting || preparing_; }

  // Descriptors to wait for, and how long at most, before the next Advance.
  void AppendPollTo(std::vector<pollfd>* fds) const;
  int PollTimeoutMs() const;
  // Does what is due, without waiting: reads, writes, deadlines, new workers.
  void Advance();

  // The result of the race, once: what Race returned.
  //   Errors: want of resources; the worker cannot be started or is killed from
  //   outside again and again (Unavailable); the device is not the expected one
  //   (FailedPrecondition). No contender is to blame for any of them.
  std::optional<absl::StatusOr<RaceResult>> TakeOutcome();
  // Contenders that were set aside since the last call. They are certain: a new
  // worker has opened the device since.
  std::vector<Casualty> TakeCasualties();

  // What is known about the race so far; null outside a race.
  const RaceResult* progress() const {
    return job_.has_value() && job_->earlier.has_value() ? &*job_->earlier
                                                         : nullptr;
  }

  const RaceJob* job() const { return job_.has_value() ? &*job_ : nullptr; }

  // Whose turn it is.
  std::optional<size_t> turn() const;

  // Of the worker, if one runs; for tests and diagnostics.
  std::optional<pid_t> pid() const;

 private:
  using Clock = std::chrono::steady_clock;

  enum class State { kDown, kStarting, kReady };

  void SendWork();
  bool Send(const absl::StatusOr<std::string>& frame);
  void HandleFrame(const Frame& frame);
  void HandleHello(absl::string_view payload);
  void HandleReport(const Frame& frame);
  void HandleFailure(const absl::Status& failure);
  void HandleEnd();
  void CheckDeadlines();
  // The worker ends because of `reason`, for which the contender whose turn it
  // is, if there is one, is to blame.
  void Lose(const std::string& reason);
  void LoseStart(const absl::Status& failure);
  void Fail(absl::Status status);
  void Stop();

  RemoteRacerOptions options_;
  // In shared memory; null when there was none to be had.
  LaunchWatch* watch_ = nullptr;
  int watch_fd_ = -1;
  State state_ = State::kDown;
  std::unique_ptr<WorkerProcess> process_;
  std::set<Digest> sent_;  // programs that the worker has
  std::optional<RacePrepare> prepare_;
  bool preparing_ = false;  // the worker makes what Prepare asked for
  bool working_ = false;    // the worker has the job

  std::optional<RaceJob> job_;
  uint64_t jobs_ = 0;
  std::optional<absl::StatusOr<RaceResult>> outcome_;
  std::optional<Casualty> suspect_;  // until the next worker is ready
  std::vector<Casualty> casualties_;
  int start_failures_ = 0;  // in a row
  int outside_ends_ = 0;    // of this race
  Clock::time_point start_after_;

  // Time as this process lived through it: a machine that slept is no reason to
  // blame a launch.
  Clock::time_point looked_at_;
  double launch_seconds_ = 0;
  double idle_seconds_ = 0;
  uint64_t launch_seen_ = 0;
  uint64_t moves_seen_ = 0;
};

// Waits until one of them has something to do, at most `seconds`, and advances
// all.
void AdvanceAll(const std::vector<RemoteRacer*>& racers, double seconds);

}  // namespace kiln

#endif  // KILN_TUNER_REMOTE_RACER_H_
