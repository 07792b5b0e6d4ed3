#include "tuner/remote_racer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

// Workers that end in a row before they are ready.
constexpr int kStartFailuresMax = 3;
// Workers of one race that something outside kills.
constexpr int kOutsideEndsMax = 4;
// A device that was just lost may need a moment.
constexpr std::chrono::milliseconds kStartPause(500);
// For a worker that closed its channel to end by itself.
constexpr absl::Duration kEndPatience = absl::Seconds(2);
// A gap between two looks longer than this was not spent by this machine.
constexpr double kLookSecondsMax = 2;
constexpr int kPollMsMax = 250;

// What nobody but an outsider sends; candidates do not kill their process.
bool IsFromOutside(int signal) {
  return signal == SIGKILL || signal == SIGTERM || signal == SIGINT ||
         signal == SIGHUP;
}

std::string OneLine(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

// A page that a worker inherits.
absl::StatusOr<int> MakeShared(size_t bytes) {
  const int fd = memfd_create("kiln-launch-watch", MFD_CLOEXEC);
  if (fd < 0) return ErrnoStatus(errno, "cannot create", "the launch watch");
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    const int code = errno;
    close(fd);
    return ErrnoStatus(code, "cannot size", "the launch watch");
  }
  return fd;
}

}  // namespace

RemoteRacer::RemoteRacer(RemoteRacerOptions options)
    : options_(std::move(options)), looked_at_(Clock::now()) {}

RemoteRacer::~RemoteRacer() {
  Stop();
  if (watch_ != nullptr) munmap(watch_, sizeof(LaunchWatch));
  if (watch_fd_ >= 0) close(watch_fd_);
}

void RemoteRacer::Start() {
  if (state_ != State::kDown) return;
  if (watch_ == nullptr) {
    const absl::StatusOr<int> fd = MakeShared(sizeof(LaunchWatch));
    if (!fd.ok()) return LoseStart(fd.status());
    watch_fd_ = *fd;
    void* memory = mmap(nullptr, sizeof(LaunchWatch), PROT_READ | PROT_WRITE,
                        MAP_SHARED, watch_fd_, 0);
    if (memory == MAP_FAILED) {
      const absl::Status status =
          ErrnoStatus(errno, "cannot map", "the launch watch");
      close(std::exchange(watch_fd_, -1));
      return LoseStart(status);
    }
    watch_ = static_cast<LaunchWatch*>(memory);
  }
  // Nothing of the last worker's counts.
  new (watch_) LaunchWatch;
  absl::StatusOr<std::unique_ptr<WorkerProcess>> process =
      WorkerProcess::Start({.executable = options_.executable,
                            .arguments = RaceWorkerArguments(options_.site),
                            .inherit_environment = true,
                            .shared = watch_fd_});
  if (!process.ok()) return LoseStart(process.status());
  process_ = *std::move(process);
  state_ = State::kStarting;
  idle_seconds_ = 0;
  launch_seconds_ = 0;
  looked_at_ = Clock::now();
}

void RemoteRacer::Prepare(const RacePrepare& prepare) {
  KILN_CHECK(!racing());
  prepare_ = prepare;
  if (state_ == State::kReady) SendWork();
}

void RemoteRacer::Submit(RaceJob job) {
  KILN_CHECK(!racing());
  job.id = ++jobs_;
  job.earlier.reset();
  job_ = std::move(job);
  outcome_.reset();
  outside_ends_ = 0;
  working_ = false;
  if (state_ == State::kReady) SendWork();
}

void RemoteRacer::AppendPollTo(std::vector<pollfd>* fds) const {
  if (process_ == nullptr) return;
  const short out = process_->WantsToSend() ? POLLOUT : 0;
  fds->push_back({process_->channel(), static_cast<short>(POLLIN | out), 0});
  fds->push_back({process_->errors(), POLLIN, 0});
}

int RemoteRacer::PollTimeoutMs() const {
  const double share_ms = options_.launch_seconds_max * 1000 / 8;
  return std::clamp(static_cast<int>(share_ms), 1, kPollMsMax);
}

void RemoteRacer::Advance() {
  if (state_ == State::kDown) {
    if (racing() && Clock::now() >= start_after_) Start();
    looked_at_ = Clock::now();
    return;
  }
  process_->ReceiveErrors();
  process_->Flush();
  const bool open = process_->Receive();
  while (process_ != nullptr) {
    const absl::StatusOr<std::optional<Frame>> frame = process_->NextFrame();
    if (!frame.ok()) {
      Lose(absl::StrCat("race worker broke the protocol: ",
                        frame.status().message()));
      return;
    }
    if (!frame->has_value()) break;
    idle_seconds_ = 0;
    HandleFrame(**frame);
  }
  if (process_ == nullptr) return;
  if (!open) {
    HandleEnd();
    return;
  }
  CheckDeadlines();
}

std::optional<absl::StatusOr<RaceResult>> RemoteRacer::TakeOutcome() {
  return std::exchange(outcome_, std::nullopt);
}

std::vector<Casualty> RemoteRacer::TakeCasualties() {
  return std::exchange(casualties_, {});
}

std::optional<size_t> RemoteRacer::turn() const {
  if (process_ == nullptr || !job_.has_value()) return std::nullopt;
  const uint64_t turn = watch_->turn.load(std::memory_order_relaxed);
  // The worker's memory is only its own as long as all candidates behave.
  if (turn == 0 || turn > job_->contenders.size()) return std::nullopt;
  return turn - 1;
}

std::optional<pid_t> RemoteRacer::pid() const {
  if (process_ == nullptr) return std::nullopt;
  return process_->pid();
}

// Gives a ready worker what it lacks.
void RemoteRacer::SendWork() {
  if (prepare_.has_value()) {
    if (!Send(EncodeRacePrepare(*prepare_))) return;
    prepare_.reset();
    preparing_ = true;
  }
  if (!job_.has_value() || working_) return;
  for (const Contender& contender : job_->contenders) {
    for (const auto& program : contender.programs) {
      if (!sent_.insert(program->key.digest).second) continue;
      if (!Send(EncodeRaceProgram(*program))) return;
    }
  }
  working_ = Send(EncodeRaceJob(*job_));
}

// What cannot be sent at all ends the race; a worker that is gone is noticed by
// Advance.
bool RemoteRacer::Send(const absl::StatusOr<std::string>& frame) {
  if (!frame.ok()) {
    Fail(frame.status());
    return false;
  }
  process_->Send(*frame);
  return true;
}

void RemoteRacer::HandleFrame(const Frame& frame) {
  if (frame.type == FrameType::kFailure) {
    return HandleFailure(DecodeFailure(frame.payload));
  }
  if (frame.type == FrameType::kRaceHello && state_ == State::kStarting) {
    return HandleHello(frame.payload);
  }
  if (frame.type == FrameType::kRacePrepared && preparing_) {
    preparing_ = false;
    return;
  }
  if ((frame.type == FrameType::kRaceCheckpoint ||
       frame.type == FrameType::kRaceResult) &&
      state_ == State::kReady && working_) {
    return HandleReport(frame);
  }
  Lose("race worker broke the protocol: it spoke out of turn");
}

void RemoteRacer::HandleHello(absl::string_view payload) {
  const absl::StatusOr<RaceHello> hello = DecodeRaceHello(payload);
  if (!hello.ok()) {
    Stop();
    Fail(hello.status());
    return;
  }
  if (hello->device != options_.device) {
    Stop();
    Fail(absl::FailedPreconditionError(absl::StrCat(
        "the race worker found ", hello->name, " as device ",
        options_.site.ordinal,
        ", which is not the device that was planned for; was it exchanged "
        "meanwhile?")));
    return;
  }
  state_ = State::kReady;
  start_failures_ = 0;
  sent_.clear();
  working_ = false;
  if (suspect_.has_value()) {
    // The device works without it, so it was the contender.
    if (job_.has_value()) {
      if (!job_->earlier.has_value()) {
        job_->earlier.emplace();
        job_->earlier->timings.resize(job_->contenders.size());
      }
      Timing& timing = job_->earlier->timings[suspect_->contender];
      timing = Timing();
      timing.outcome = Outcome::kRejected;
      timing.reason = suspect_->reason;
    }
    casualties_.push_back(*std::move(suspect_));
    suspect_.reset();
  }
  SendWork();
}

void RemoteRacer::HandleReport(const Frame& frame) {
  absl::StatusOr<RaceReport> report = DecodeRaceReport(frame.payload);
  if (!report.ok()) {
    return Lose(
        absl::StrCat("broke the protocol: ", report.status().message()));
  }
  if (report->id != job_->id ||
      report->result.timings.size() != job_->contenders.size()) {
    return Lose("race worker broke the protocol: it reported another race");
  }
  if (frame.type == FrameType::kRaceCheckpoint) {
    job_->earlier = std::move(report->result);
    return;
  }
  outcome_ = std::move(report->result);
  job_.reset();
  working_ = false;
  process_->ClearErrorText();
}

// The worker says itself why it ends.
void RemoteRacer::HandleFailure(const absl::Status& failure) {
  if (state_ == State::kStarting) return LoseStart(failure);
  if (IsWantOfResources(failure)) {
    Stop();
    Fail(failure);
    return;
  }
  Lose(absl::StrCat("device failed: ", failure.message()));
}

// The worker closed its channel without a word.
void RemoteRacer::HandleEnd() {
  const std::string ending = process_->Finish(kEndPatience);
  const int signal = process_->ending_signal();
  if (state_ == State::kStarting) {
    return LoseStart(absl::UnavailableError(absl::StrCat(
        "race worker ", ending, " before it was ready",
        process_->error_text().empty() ? "" : ": ", process_->error_text())));
  }
  if (!IsFromOutside(signal)) return Lose(absl::StrCat("race worker ", ending));
  Stop();
  if (!racing() || ++outside_ends_ < kOutsideEndsMax) return;
  Fail(absl::UnavailableError(
      absl::StrCat("race worker ", ending, ", ", kOutsideEndsMax,
                   " times; the system may be short of memory")));
}

void RemoteRacer::CheckDeadlines() {
  const Clock::time_point now = Clock::now();
  const double tick = std::min(
      kLookSecondsMax, std::chrono::duration<double>(now - looked_at_).count());
  looked_at_ = now;
  idle_seconds_ += tick;
  if (state_ == State::kStarting) {
    if (idle_seconds_ < options_.start_seconds_max) return;
    return LoseStart(absl::DeadlineExceededError(
        absl::StrFormat("race worker did not open its device within %g s",
                        options_.start_seconds_max)));
  }
  if (!racing()) return;
  const uint64_t launch = watch_->running_since.load(std::memory_order_relaxed);
  const uint64_t moves = watch_->moves.load(std::memory_order_relaxed);
  if (launch != launch_seen_ || moves != moves_seen_) {
    launch_seen_ = launch;
    moves_seen_ = moves;
    launch_seconds_ = 0;
    idle_seconds_ = 0;
    return;
  }
  if (launch != 0) {
    launch_seconds_ += tick;
    if (launch_seconds_ < options_.launch_seconds_max) return;
    return Lose(absl::StrFormat("a launch ran longer than %g s and was stopped",
                                options_.launch_seconds_max));
  }
  if (idle_seconds_ < options_.idle_seconds_max) return;
  Lose(absl::StrFormat("nothing moved for %g s", options_.idle_seconds_max));
}

void RemoteRacer::Lose(const std::string& reason) {
  const std::optional<size_t> contender = turn();
  const std::string words = process_->error_text();
  Stop();
  if (!racing()) return;
  if (contender.has_value()) {
    suspect_ = Casualty{
        .contender = *contender, .reason = OneLine(reason), .log = words};
    return;
  }
  // Outside every turn only Kiln itself can be wrong.
  Fail(absl::InternalError(
      absl::StrCat("race worker ", reason, words.empty() ? "" : ": ", words)));
}

void RemoteRacer::LoseStart(const absl::Status& failure) {
  Stop();
  start_after_ = Clock::now() + kStartPause;
  // What is refused stays refused; a device may come back.
  const bool refused =
      absl::IsFailedPrecondition(failure) || absl::IsInvalidArgument(failure) ||
      absl::IsNotFound(failure) || absl::IsPermissionDenied(failure);
  if (++start_failures_ < kStartFailuresMax && !refused) return;
  start_failures_ = 0;
  if (!suspect_.has_value()) return Fail(failure);
  const std::string after =
      absl::StrCat(failure.message(), "; the device was lost when ",
                   job_->contenders[suspect_->contender].body.Label(),
                   " ran: ", suspect_->reason);
  suspect_.reset();
  Fail(absl::UnavailableError(after));
}

void RemoteRacer::Fail(absl::Status status) {
  suspect_.reset();
  // Outside a race the next one tries again.
  if (!racing()) return;
  job_.reset();
  working_ = false;
  outcome_ = std::move(status);
}

void RemoteRacer::Stop() {
  process_.reset();
  state_ = State::kDown;
  working_ = false;
  preparing_ = false;
}

void AdvanceAll(const std::vector<RemoteRacer*>& racers, double seconds) {
  std::vector<pollfd> fds;
  double timeout_ms = seconds * 1000;
  for (const RemoteRacer* racer : racers) {
    racer->AppendPollTo(&fds);
    timeout_ms = std::min<double>(timeout_ms, racer->PollTimeoutMs());
  }
  poll(fds.data(), fds.size(), std::max(0, static_cast<int>(timeout_ms)));
  for (RemoteRacer* racer : racers) racer->Advance();
}

}  // namespace kiln
