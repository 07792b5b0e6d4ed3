#include "compiler/compile_pool.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "compiler/base/available_memory.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "compiler/elf_inspect.h"
#include "compiler/worker_process.h"
#include "compiler/worker_protocol.h"

namespace kiln {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kCancelPeriod(100);
// Results wait for others this many times as long as the last ones took to be
// handed over, within a bound.
constexpr int kPatience = 4;
constexpr std::chrono::milliseconds kPatienceMax(250);
// A job whose worker was killed from outside gets this many tries in all.
constexpr int kTriesMax = 2;
// Workers of one backend that end in a row before they are ready.
constexpr int kStartFailuresMax = 3;
// For a worker that closed its channel to end by itself.
constexpr absl::Duration kEndPatience = absl::Seconds(2);

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// "sm_90a fused_moe/cuda.cu".
std::string JobLabel(const CompileJob& job) {
  return absl::StrCat(job.target.ToString(), " ", job.unit.name);
}

std::optional<uint64_t> ParseNumber(absl::string_view text) {
  uint64_t value = 0;
  if (!absl::SimpleAtoi(absl::StripAsciiWhitespace(text), &value)) {
    return std::nullopt;
  }
  return value;
}

int ProcessorCount() {
  int count = 1;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) count = CPU_COUNT(&set);
  // "200000 100000": 2 processors' worth of time in each period.
  const std::string quota = ReadSystemFile("/sys/fs/cgroup/cpu.max");
  const std::vector<absl::string_view> parts = absl::StrSplit(quota, ' ');
  if (parts.size() == 2) {
    const auto time = ParseNumber(parts[0]);
    const auto period = ParseNumber(parts[1]);
    if (time && period && *period > 0) {
      count = std::min<int>(
          count, static_cast<int>(std::max<uint64_t>(1, *time / *period)));
    }
  }
  return std::max(count, 1);
}

// A message from the worker thread to the thread inside Run.
struct Event {
  enum class Kind { kStarted, kFinished, kFailed };
  Kind kind = Kind::kStarted;
  size_t index = 0;
  CompileResult result;  // kFinished
  absl::Status failure;  // kFailed: the run cannot go on
};

}  // namespace

int WorkerCountMax() {
  const uint64_t by_memory = AvailableMemoryBytes() / kWorkerMemoryBytes;
  return static_cast<int>(std::clamp<uint64_t>(
      by_memory, 1, static_cast<uint64_t>(ProcessorCount())));
}

// Three kinds of state: constants; what the mutex guards, shared with Run; and
// what the worker thread alone touches.
class CompilePool::Impl {
 public:
  Impl(const PoolOptions& options, std::vector<CompilerSetup> setups)
      : options_(options), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    for (CompilerSetup& setup : setups) {
      const Backend backend = setup.backend;
      KILN_CHECK(setups_.emplace(backend, std::move(setup)).second);
    }
    KILN_CHECK(wake_ >= 0);
    thread_ = std::thread([this] { Loop(); });
  }

  ~Impl() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    Wake();
    thread_.join();
    close(wake_);
  }

  absl::StatusOr<std::vector<CompileResult>> Run(
      absl::Span<const CompileJob> jobs, const CompileCallbacks& callbacks);

  PoolStats stats() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  std::vector<int> WorkerPids() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return pids_;
  }

 private:
  enum class State { kStarting, kIdle, kBusy };

  struct Worker {
    Backend backend = Backend::kCpu;
    State state = State::kStarting;
    std::unique_ptr<WorkerProcess> process;
    size_t job = 0;           // while busy
    Clock::time_point since;  // of the start or of the job
  };

  void Wake() const {
    const uint64_t one = 1;
    // A full counter wakes as well, so the result does not matter.
    [[maybe_unused]] const ssize_t wrote = write(wake_, &one, sizeof(one));
  }

  // Called by Run.
  void StopBatch();
  std::vector<Event> AwaitEvents(Clock::time_point until);

  // Called by the worker thread.
  void Loop();
  void TakeRequests();
  void AbandonBatch();
  void Schedule();
  bool StartWorker(Backend backend);
  void SendJob(Worker* worker, size_t job);
  void Poll();
  void Advance(Worker* worker, bool ready);
  void HandleFrame(Worker* worker, const Frame& frame);
  void HandleHello(Worker* worker, const Frame& frame);
  void HandleResult(Worker* worker, const Frame& frame);
  void HandleEnd(Worker* worker);
  void CheckDeadline(Worker* worker);
  void Reject(Worker* worker, absl::Status status, std::string log);
  void Retire(Worker* worker);
  void FailRun(absl::Status status);
  void Post(Event event);
  Clock::duration Allowed(const Worker& worker) const;
  void PublishPids();

  const PoolOptions options_;
  const int wake_;
  std::map<Backend, CompilerSetup> setups_;
  std::thread thread_;

  mutable std::mutex mutex_;
  std::condition_variable arrived_;  // events_ or batch_done_ changed
  bool stopping_ = false;            // the pool is being destroyed
  bool cancel_ = false;              // the run is being abandoned
  std::optional<absl::Span<const CompileJob>> submitted_;
  bool active_ = false;  // the worker thread has a batch
  std::deque<Event> events_;
  PoolStats stats_;
  std::vector<int> pids_;

  // Worker thread only.
  std::vector<std::unique_ptr<Worker>> workers_;
  absl::Span<const CompileJob> jobs_;
  std::map<Backend, std::deque<size_t>> pending_;  // jobs not started
  std::map<size_t, int> tries_;  // of jobs whose worker was killed
  std::map<Backend, int> start_failures_;
};

absl::StatusOr<std::vector<CompileResult>> CompilePool::Impl::Run(
    absl::Span<const CompileJob> jobs, const CompileCallbacks& callbacks) {
  for (const CompileJob& job : jobs) {
    if (setups_.find(job.target.backend) == setups_.end()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "no compiler for target ", job.target.ToString(), ": ",
          job.target.backend == Backend::kCuda ? "NVRTC" : "kiln-cc-cpu",
          " was not found; see kiln doctor"));
    }
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    cancel_ = false;
    events_.clear();
    submitted_ = jobs;
    active_ = true;
  }
  Wake();

  std::vector<CompileResult> results(jobs.size());
  CompileProgress progress{.done = 0, .total = jobs.size(), .current = {}};
  absl::Status failure;
  std::vector<CompileResult> finished;  // not handed over yet
  Clock::time_point due;                // when these are
  Clock::duration patience{0};
  const auto hand_over = [&] {
    const Clock::time_point begin = Clock::now();
    if (callbacks.on_results) {
      const absl::Status status = callbacks.on_results(finished);
      if (failure.ok()) failure = status;
    }
    patience = std::min<Clock::duration>(kPatience * (Clock::now() - begin),
                                         kPatienceMax);
    for (CompileResult& result : finished) {
      const size_t index = result.index;
      results[index] = std::move(result);
    }
    finished.clear();
  };
  while (progress.done < jobs.size() && failure.ok()) {
    if (callbacks.cancelled && callbacks.cancelled()) {
      failure = absl::CancelledError("compiling was cancelled");
      break;
    }
    Clock::time_point until = Clock::now() + kCancelPeriod;
    if (!finished.empty()) until = std::min(until, due);
    for (Event& event : AwaitEvents(until)) {
      switch (event.kind) {
        case Event::Kind::kStarted:
          progress.current = JobLabel(jobs[event.index]);
          break;
        case Event::Kind::kFinished:
          if (finished.empty()) due = Clock::now() + patience;
          finished.push_back(std::move(event.result));
          ++progress.done;
          break;
        case Event::Kind::kFailed:
          failure = std::move(event.failure);
          break;
      }
    }
    if (!finished.empty() && Clock::now() >= due) hand_over();
    if (callbacks.on_progress) callbacks.on_progress(progress);
  }
  if (!finished.empty()) hand_over();
  StopBatch();
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const CompileResult& result : results) {
    stats_.compile_seconds += result.seconds;
  }
  if (!failure.ok()) return failure;
  return results;
}

// Returns once the worker thread no longer looks at the jobs.
void CompilePool::Impl::StopBatch() {
  std::unique_lock<std::mutex> lock(mutex_);
  cancel_ = true;
  Wake();
  arrived_.wait(lock, [this] { return !active_; });
}

// Everything that has arrived; nothing when the time is up.
std::vector<Event> CompilePool::Impl::AwaitEvents(Clock::time_point until) {
  std::unique_lock<std::mutex> lock(mutex_);
  arrived_.wait_until(lock, until, [this] { return !events_.empty(); });
  std::vector<Event> events(std::make_move_iterator(events_.begin()),
                            std::make_move_iterator(events_.end()));
  events_.clear();
  return events;
}

void CompilePool::Impl::Post(Event event) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    events_.push_back(std::move(event));
  }
  arrived_.notify_all();
}

void CompilePool::Impl::Loop() {
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_) break;
    }
    TakeRequests();
    Schedule();
    Poll();
  }
  workers_.clear();
  PublishPids();
}

void CompilePool::Impl::TakeRequests() {
  bool cancel = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (submitted_.has_value()) {
      jobs_ = *submitted_;
      submitted_.reset();
      pending_.clear();
      tries_.clear();
      start_failures_.clear();
      for (size_t i = 0; i < jobs_.size(); ++i) {
        pending_[jobs_[i].target.backend].push_back(i);
      }
    }
    cancel = cancel_ && active_;
  }
  if (!cancel) return;
  AbandonBatch();
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    active_ = false;
  }
  arrived_.notify_all();
}

// Drops what is pending and kills the workers that are still compiling.
void CompilePool::Impl::AbandonBatch() {
  pending_.clear();
  for (std::unique_ptr<Worker>& worker : workers_) {
    if (worker->state == State::kBusy) Retire(worker.get());
  }
  std::erase_if(workers_, [](const std::unique_ptr<Worker>& worker) {
    return worker->process == nullptr;
  });
  PublishPids();
  jobs_ = {};
}

// Gives pending jobs, in order, to idle workers, and starts more workers while
// there is work that none of them will take.
void CompilePool::Impl::Schedule() {
  std::map<Backend, size_t> starting;
  for (const std::unique_ptr<Worker>& worker : workers_) {
    std::deque<size_t>& pending = pending_[worker->backend];
    while (worker->state == State::kIdle && !pending.empty()) {
      const size_t job = pending.front();
      pending.pop_front();
      SendJob(worker.get(), job);
    }
    if (worker->state == State::kStarting) ++starting[worker->backend];
  }
  for (;;) {
    // The backend whose first unserved job comes first.
    std::optional<Backend> chosen;
    size_t first = 0;
    for (const auto& [backend, pending] : pending_) {
      const size_t served = starting[backend];
      if (pending.size() <= served) continue;
      if (!chosen.has_value() || pending[served] < first) {
        chosen = backend;
        first = pending[served];
      }
    }
    if (!chosen.has_value() || !StartWorker(*chosen)) return;
    ++starting[*chosen];
  }
}

// False when no further worker is allowed now, or none can be started.
bool CompilePool::Impl::StartWorker(Backend backend) {
  if (workers_.size() >= static_cast<size_t>(std::max(1, options_.jobs))) {
    // An idle worker of another backend makes room; it has nothing to do, or
    // Schedule would have given it a job.
    const auto idle = std::find_if(
        workers_.begin(), workers_.end(),
        [backend](const std::unique_ptr<Worker>& worker) {
          return worker->state == State::kIdle && worker->backend != backend;
        });
    if (idle == workers_.end()) return false;
    workers_.erase(idle);
  }
  absl::StatusOr<std::unique_ptr<WorkerProcess>> process =
      WorkerProcess::Start(setups_.at(backend).command);
  if (!process.ok()) {
    FailRun(process.status());
    return false;
  }
  auto worker = std::make_unique<Worker>();
  worker->backend = backend;
  worker->process = *std::move(process);
  worker->since = Clock::now();
  workers_.push_back(std::move(worker));
  PublishPids();
  const std::lock_guard<std::mutex> lock(mutex_);
  ++stats_.workers_started;
  stats_.workers_peak =
      std::max(stats_.workers_peak, static_cast<int>(workers_.size()));
  return true;
}

void CompilePool::Impl::SendJob(Worker* worker, size_t job) {
  worker->state = State::kBusy;
  worker->job = job;
  worker->since = Clock::now();
  Post({.kind = Event::Kind::kStarted,
        .index = job,
        .result = {},
        .failure = {}});
  const absl::StatusOr<std::string> frame = EncodeJob(
      {.id = job, .target = jobs_[job].target, .unit = jobs_[job].unit});
  if (!frame.ok()) {
    Reject(worker, frame.status(), "");
    return;
  }
  // A worker that is already gone is noticed by Poll.
  worker->process->Send(*frame);
}

void CompilePool::Impl::Poll() {
  std::vector<pollfd> fds = {{wake_, POLLIN, 0}};
  std::optional<Clock::time_point> next;
  for (const std::unique_ptr<Worker>& worker : workers_) {
    const WorkerProcess& process = *worker->process;
    const short out = process.WantsToSend() ? POLLOUT : 0;
    fds.push_back({process.channel(), static_cast<short>(POLLIN | out), 0});
    fds.push_back({process.errors(), POLLIN, 0});
    if (worker->state == State::kIdle) continue;
    const Clock::time_point end = worker->since + Allowed(*worker);
    if (!next.has_value() || end < *next) next = end;
  }
  int timeout_ms = -1;
  if (next.has_value()) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(*next - Clock::now());
    timeout_ms = static_cast<int>(
        std::clamp<int64_t>(left.count(), 0, std::numeric_limits<int>::max()));
  }
  if (poll(fds.data(), fds.size(), timeout_ms) < 0 && errno != EINTR) {
    FailRun(absl::InternalError("poll failed in the compile pool"));
    return;
  }
  uint64_t drained = 0;
  [[maybe_unused]] const ssize_t got = read(wake_, &drained, sizeof(drained));
  // Workers do not move while they are advanced; dead ones are removed after.
  for (size_t i = 0; i < workers_.size(); ++i) {
    Advance(workers_[i].get(), fds[1 + 2 * i].revents != 0);
  }
  if (std::erase_if(workers_, [](const std::unique_ptr<Worker>& worker) {
        return worker->process == nullptr;
      }) > 0) {
    PublishPids();
  }
}

// `ready`: its channel can be read, written, or has ended.
void CompilePool::Impl::Advance(Worker* worker, bool ready) {
  worker->process->ReceiveErrors();
  // A failed send shows as the end of the stream as well.
  if (ready) worker->process->Flush();
  const bool open = !ready || worker->process->Receive();
  while (worker->process != nullptr) {
    const absl::StatusOr<std::optional<Frame>> frame =
        worker->process->NextFrame();
    if (!frame.ok()) {
      if (worker->state == State::kStarting) FailRun(frame.status());
      Reject(worker, absl::InternalError(frame.status().message()), "");
      Retire(worker);
      return;
    }
    if (!frame->has_value()) break;
    HandleFrame(worker, **frame);
  }
  if (worker->process == nullptr) return;
  if (!open) {
    HandleEnd(worker);
    return;
  }
  CheckDeadline(worker);
}

void CompilePool::Impl::HandleFrame(Worker* worker, const Frame& frame) {
  if (worker->state == State::kStarting) {
    HandleHello(worker, frame);
    return;
  }
  HandleResult(worker, frame);
}

void CompilePool::Impl::HandleHello(Worker* worker, const Frame& frame) {
  const CompilerSetup& setup = setups_.at(worker->backend);
  const absl::StatusOr<WorkerHello> hello = HelloFromFrame(frame);
  absl::Status status = hello.status();
  if (hello.ok() && (hello->compiler != setup.toolchain.name ||
                     hello->components != setup.components)) {
    status = absl::FailedPreconditionError(absl::StrCat(
        "compiler worker ", setup.command.executable,
        " loaded other files than were probed for ", setup.toolchain.name, " ",
        setup.toolchain.version,
        "; the compiler was exchanged meanwhile, so run the command again"));
  }
  if (!status.ok()) {
    Retire(worker);
    FailRun(std::move(status));
    return;
  }
  start_failures_[worker->backend] = 0;
  worker->state = State::kIdle;
}

void CompilePool::Impl::HandleResult(Worker* worker, const Frame& frame) {
  absl::Status damage;
  if (frame.type == FrameType::kFailure) {
    damage = DecodeFailure(frame.payload);
  } else if (frame.type != FrameType::kResult ||
             worker->state != State::kBusy) {
    damage = absl::InternalError("compiler worker spoke out of turn");
  } else {
    absl::StatusOr<WorkerResult> answer = DecodeResult(frame.payload);
    damage = answer.status();
    if (answer.ok() && answer->id != worker->job) {
      damage = absl::InternalError(absl::StrCat("compiler worker answered job ",
                                                answer->id, " instead of job ",
                                                worker->job));
    }
    if (damage.ok()) {
      worker->state = State::kIdle;
      worker->process->ClearErrorText();
      Post({.kind = Event::Kind::kFinished,
            .index = worker->job,
            .result = {.index = worker->job,
                       .status = std::move(answer->status),
                       .binary = std::move(answer->binary),
                       .log = std::move(answer->log),
                       .seconds = answer->seconds},
            .failure = {}});
      if (answer->last) Retire(worker);
      return;
    }
  }
  Reject(worker, absl::InternalError(damage.message()), "");
  Retire(worker);
}

// The worker closed its channel: it crashed, was killed, or ended on its own
// after a result because it must not be used again.
void CompilePool::Impl::HandleEnd(Worker* worker) {
  const State state = worker->state;
  const std::string ending = worker->process->Finish(kEndPatience);
  const int signal = worker->process->ending_signal();
  const std::string words = worker->process->error_text();
  if (state == State::kStarting &&
      ++start_failures_[worker->backend] >= kStartFailuresMax) {
    FailRun(absl::UnavailableError(absl::StrCat(
        "compiler worker ", setups_.at(worker->backend).command.executable, " ",
        ending, " before it was ready", words.empty() ? "" : ": ", words)));
  }
  if (state == State::kBusy) {
    // Compilers do not kill themselves with these; a compiler that calls exit
    // ends without any.
    const bool from_outside = signal == SIGKILL || signal == SIGTERM ||
                              signal == SIGINT || signal == SIGHUP;
    if (from_outside && ++tries_[worker->job] < kTriesMax) {
      pending_[worker->backend].push_back(worker->job);
    } else if (from_outside) {
      Reject(worker,
             absl::UnavailableError(
                 absl::StrCat("compiler worker ", ending, ", ", kTriesMax,
                              " times; the system may be short of memory")),
             words);
    } else {
      Reject(worker,
             absl::InternalError(absl::StrCat(JobLabel(jobs_[worker->job]),
                                              ": compiler worker ", ending)),
             words);
    }
  }
  Retire(worker);
}

void CompilePool::Impl::CheckDeadline(Worker* worker) {
  if (worker->state == State::kIdle ||
      Clock::now() < worker->since + Allowed(*worker)) {
    return;
  }
  if (worker->state == State::kStarting) {
    const absl::Status status = absl::DeadlineExceededError(absl::StrCat(
        "compiler worker ", setups_.at(worker->backend).command.executable,
        " was not ready within ",
        absl::FormatDuration(options_.start_deadline)));
    Retire(worker);
    FailRun(status);
    return;
  }
  const std::string words = worker->process->error_text();
  Reject(worker,
         absl::DeadlineExceededError(absl::StrCat(
             JobLabel(jobs_[worker->job]), ": the compiler ran longer than ",
             absl::FormatDuration(options_.deadline), " and was stopped")),
         words);
  Retire(worker);
}

// Finishes the worker's job, if it has one, without a program.
void CompilePool::Impl::Reject(Worker* worker, absl::Status status,
                               std::string log) {
  if (worker->state != State::kBusy) return;
  worker->state = State::kIdle;
  Post({.kind = Event::Kind::kFinished,
        .index = worker->job,
        .result = {.index = worker->job,
                   .status = std::move(status),
                   .binary = {},
                   .log = std::move(log),
                   .seconds = SecondsSince(worker->since)},
        .failure = {}});
}

// Ends the process. The worker is removed from workers_ afterwards.
void CompilePool::Impl::Retire(Worker* worker) { worker->process.reset(); }

void CompilePool::Impl::FailRun(absl::Status status) {
  pending_.clear();
  Post({.kind = Event::Kind::kFailed,
        .index = 0,
        .result = {},
        .failure = std::move(status)});
}

Clock::duration CompilePool::Impl::Allowed(const Worker& worker) const {
  const absl::Duration allowed = worker.state == State::kStarting
                                     ? options_.start_deadline
                                     : options_.deadline;
  return absl::ToChronoNanoseconds(allowed);
}

void CompilePool::Impl::PublishPids() {
  const std::lock_guard<std::mutex> lock(mutex_);
  pids_.clear();
  for (const std::unique_ptr<Worker>& worker : workers_) {
    if (worker->process != nullptr) pids_.push_back(worker->process->pid());
  }
}

CompilePool::CompilePool(const PoolOptions& options,
                         std::vector<CompilerSetup> setups)
    : impl_(std::make_unique<Impl>(options, std::move(setups))) {}

CompilePool::~CompilePool() = default;

absl::StatusOr<std::vector<CompileResult>> CompilePool::Run(
    absl::Span<const CompileJob> jobs, const CompileCallbacks& callbacks) {
  return impl_->Run(jobs, callbacks);
}

PoolStats CompilePool::stats() const { return impl_->stats(); }

std::vector<int> CompilePool::WorkerPids() const { return impl_->WorkerPids(); }

absl::StatusOr<Program> MakeProgram(const CompileJob& job,
                                    const Toolchain& toolchain,
                                    CompileResult result) {
  RETURN_IF_ERROR(result.status);
  Program program;
  ASSIGN_OR_RETURN(program.kernels,
                   InspectProgram(result.binary, job.target, job.unit.entries));
  program.key = MakeProgramKey(job.unit, job.target, toolchain);
  program.target = job.target;
  program.toolchain = ToolchainOf(job.unit, toolchain);
  program.binary_digest = Sha256(result.binary);
  program.binary = std::move(result.binary);
  program.log = std::move(result.log);
  program.compile_seconds = result.seconds;
  return program;
}

}  // namespace kiln
