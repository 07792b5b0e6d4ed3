#include "tuner/prewarm.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/compile_pool.h"
#include "tuner/conclusion.h"
#include "tuner/op_bench.h"
#include "tuner/racer.h"

namespace kiln {
namespace {

class Stopwatch {
 public:
  double Seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                         begin_)
        .count();
  }

 private:
  std::chrono::steady_clock::time_point begin_ =
      std::chrono::steady_clock::now();
};

// Adds the time of a scope to one stage of the report.
class StageTimer {
 public:
  StageTimer(Stage stage, PrewarmReport* report)
      : stage_(stage), report_(report) {}

  ~StageTimer() {
    report_->seconds[std::string(StageName(stage_))] += watch_.Seconds();
  }

  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  Stage stage_;
  PrewarmReport* report_;
  Stopwatch watch_;
};

// A claim on work is renewed long before it ends; the end matters only where an
// owner hangs or cannot be looked at from here.
constexpr int64_t kLeaseSeconds = 600;
constexpr double kRenewSeconds = 60;
constexpr std::chrono::milliseconds kPollInterval(50);
// Programs claimed at once, per worker: enough to keep workers busy, few enough
// that other processes on the same cache find work too.
constexpr size_t kClaimedPerWorker = 8;
constexpr size_t kClaimedMin = 32;

int OracleThreads() {
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Registers of the hungriest kernel that `body` launches.
uint32_t RegistersOf(
    const PlanBody& body,
    const std::vector<std::shared_ptr<const Program>>& programs) {
  uint32_t registers = 0;
  for (const Step& step : body.steps) {
    const Kernel* kernel = programs.at(step.program)->FindKernel(step.entry);
    if (kernel != nullptr) registers = std::max(registers, kernel->registers);
  }
  return registers;
}

// One program to compile, and everybody who needs it.
struct PendingProgram {
  ProgramKey key;
  size_t context = 0;
  CompileJob job;
};

// What races keep from one interval to the next.
struct Racetrack {
  size_t context = std::numeric_limits<size_t>::max();
  std::unique_ptr<Device> device;
  std::unique_ptr<OpBench> bench;
};

class Session {
 public:
  Session(const PrewarmOptions& options, PlanCache* cache,
          ProgressSink* progress)
      : options_(options), cache_(*cache), progress_(*progress) {}

  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  ~Session() {
    // What an early end leaves claimed, others may have at once.
    if (!claims_.empty()) Release({claims_.begin(), claims_.end()});
  }

  absl::StatusOr<PrewarmReport> Run(const Manifest& manifest) {
    Stopwatch total;
    report_.requests = manifest.requests.size();
    const auto finish = [&] {
      Summarize();
      report_.seconds["total"] = total.Seconds();
      return std::move(report_);
    };
    RETURN_IF_ERROR(Resolve(manifest));
    if (StopAfter(Stage::kResolve)) return finish();
    RETURN_IF_ERROR(LookUp());
    if (StopAfter(Stage::kLookUp)) return finish();
    RETURN_IF_ERROR(Enumerate());
    if (StopAfter(Stage::kEnumerate)) return finish();
    RETURN_IF_ERROR(Compile());
    if (StopAfter(Stage::kCompile)) return finish();
    RETURN_IF_ERROR(Race());
    return finish();
  }

 private:
  bool StopAfter(Stage stage) {
    if (options_.stop_after != stage) return false;
    report_.stopped_after = stage;
    return true;
  }

  absl::Status Resolve(const Manifest& manifest) {
    const StageTimer timer(Stage::kResolve, &report_);
    ASSIGN_OR_RETURN(ResolvedManifest resolved,
                     ResolveManifest(manifest, options_, &cache_));
    contexts_ = std::move(resolved.contexts);
    intervals_ = std::move(resolved.intervals);
    if (options_.shard_count > 1 && !ShardsPrograms()) {
      std::vector<ResolvedInterval> own;
      for (size_t i = 0; i < intervals_.size(); ++i) {
        // In turn, because neighbours cost about the same.
        if (i % static_cast<size_t>(options_.shard_count) ==
            static_cast<size_t>(options_.shard_index)) {
          own.push_back(std::move(intervals_[i]));
        }
      }
      intervals_ = std::move(own);
    }
    for (const ResolvedInterval& interval : intervals_) {
      IntervalReport row;
      row.target = contexts_[interval.context].target;
      row.names = interval.names;
      row.geometry = interval.geometry;
      row.interval = interval.interval;
      report_.intervals.push_back(std::move(row));
    }
    return absl::OkStatus();
  }

  // A run that ends with compiling splits the programs, because intervals share
  // them; any other run splits the intervals, with all that they need.
  bool ShardsPrograms() const {
    return options_.shard_count > 1 && options_.stop_after == Stage::kCompile;
  }

  bool IsOwnProgram(const Digest& key) const {
    if (!ShardsPrograms()) return true;
    uint32_t head = 0;
    for (size_t i = 0; i < 4; ++i) head = head << 8 | key.bytes[i];
    return head % static_cast<uint32_t>(options_.shard_count) ==
           static_cast<uint32_t>(options_.shard_index);
  }

  // Claims. Others that share the cache wait for what is claimed here.

  absl::StatusOr<std::vector<bool>> Claim(const std::vector<Digest>& keys,
                                          size_t limit) {
    ASSIGN_OR_RETURN(const std::vector<bool> claimed,
                     cache_.AcquireLeases(keys, kLeaseSeconds, limit));
    for (size_t i = 0; i < keys.size(); ++i) {
      if (claimed[i]) claims_.insert(keys[i]);
    }
    return claimed;
  }

  // A claim that cannot be given up ends with this process.
  void Release(const std::vector<Digest>& keys) {
    std::vector<Digest> held;
    for (const Digest& key : keys) {
      if (claims_.erase(key) != 0) held.push_back(key);
    }
    cache_.ReleaseLeases(held).IgnoreError();
  }

  void RenewClaims() {
    if (renewed_.Seconds() < kRenewSeconds || claims_.empty()) return;
    renewed_ = Stopwatch();
    const std::vector<Digest> keys(claims_.begin(), claims_.end());
    cache_.RenewLeases(keys, kLeaseSeconds).IgnoreError();
  }

  // Sleeps at least as long as it takes to look ten times.
  static void Wait(double seconds_to_look) {
    std::this_thread::sleep_for(
        kPollInterval + std::chrono::duration<double>(9 * seconds_to_look));
  }

  const TargetContext& ContextOf(size_t index) const {
    return contexts_[intervals_[index].context];
  }

  // A stored plan answers unless it is only predicted and a device is here.
  absl::StatusOr<bool> Answers(const Plan& plan, const TargetContext& context) {
    if (plan.evidence.state == PlanState::kPredicted &&
        !context.profile.assumed && !options_.compile_only) {
      return false;
    }
    for (const Digest& program : plan.programs) {
      ASSIGN_OR_RETURN(const bool present, cache_.ContainsProgram(program));
      if (!present) return false;
    }
    return true;
  }

  absl::Status LookUp() {
    const StageTimer timer(Stage::kLookUp, &report_);
    std::vector<Digest> keys;
    for (const ResolvedInterval& resolved : intervals_) {
      keys.push_back(resolved.key.digest);
    }
    ASSIGN_OR_RETURN(const std::vector<std::optional<StoredPlan>> stored,
                     cache_.FindPlans(keys));
    for (size_t i = 0; i < stored.size(); ++i) {
      if (!stored[i].has_value()) {
        missing_.push_back(i);
        continue;
      }
      ASSIGN_OR_RETURN(const bool answers,
                       Answers(stored[i]->plan, ContextOf(i)));
      if (!answers) {
        missing_.push_back(i);
        continue;
      }
      IntervalReport& row = report_.intervals[i];
      row.plan = stored[i]->plan;
      row.candidates = stored[i]->plan.evidence.candidates;
      row.reused = true;
    }
    TakeWarnings();
    progress_.Update(Stage::kLookUp, keys.size() - missing_.size(), keys.size(),
                     "answered by the cache");
    return absl::OkStatus();
  }

  absl::Status Enumerate() {
    const StageTimer timer(Stage::kEnumerate, &report_);
    std::set<Digest> distinct;
    for (const size_t index : missing_) {
      ASSIGN_OR_RETURN(plans_[index], intervals_[index].planner->Plan(
                                          intervals_[index].interval));
      report_.intervals[index].candidates = plans_[index].candidates.size();
      for (const PlannedCandidate& candidate : plans_[index].candidates) {
        distinct.insert(candidate.digest);
      }
    }
    report_.candidates = distinct.size();
    return absl::OkStatus();
  }

  void TakeWarnings() {
    for (const std::string& warning : cache_.TakeWarnings()) {
      progress_.Note(absl::StrCat("cache: ", warning));
    }
  }

  // Programs of the missing intervals that neither the cache nor an earlier
  // reject answers. Default candidates come first: they are required.
  absl::StatusOr<std::vector<PendingProgram>> FindPending() {
    std::vector<PendingProgram> pending;
    std::set<Digest> seen;
    size_t longest = 0;
    for (const size_t index : missing_) {
      longest = std::max(longest, plans_.at(index).candidates.size());
    }
    for (size_t rank = 0; rank < longest; ++rank) {
      for (const size_t index : missing_) {
        const IntervalPlan& plan = plans_.at(index);
        if (rank >= plan.candidates.size()) continue;
        RETURN_IF_ERROR(AddPending(intervals_[index], plan.candidates[rank],
                                   &seen, &pending));
      }
    }
    return pending;
  }

  // True when the cache has the program or a reject of it, which is counted.
  absl::StatusOr<bool> ProgramIsAnswered(const Digest& key) {
    ASSIGN_OR_RETURN(const bool present, cache_.ContainsProgram(key));
    if (present) {
      ++report_.programs_reused;
      return true;
    }
    ASSIGN_OR_RETURN(const std::optional<Reject> reject,
                     cache_.FindReject(key));
    if (!reject.has_value()) return false;
    rejected_programs_[key] = reject->reason;
    return true;
  }

  absl::Status AddPending(const ResolvedInterval& resolved,
                          const PlannedCandidate& candidate,
                          std::set<Digest>* seen,
                          std::vector<PendingProgram>* pending) {
    std::vector<SourceUnit> units;
    for (size_t i = 0; i < candidate.programs.size(); ++i) {
      const ProgramKey& key = candidate.programs[i];
      if (!IsOwnProgram(key.digest)) continue;
      if (!seen->insert(key.digest).second) continue;
      ASSIGN_OR_RETURN(const bool answered, ProgramIsAnswered(key.digest));
      if (answered) continue;
      if (units.empty()) {
        units = candidate.kernel_template->MakeUnits(
            resolved.geometry, contexts_[resolved.context].target,
            candidate.body.assignment);
      }
      pending->push_back(
          {key, resolved.context,
           CompileJob{units[i], contexts_[resolved.context].target}});
    }
    return absl::OkStatus();
  }

  absl::Status Compile() {
    const StageTimer timer(Stage::kCompile, &report_);
    ASSIGN_OR_RETURN(std::vector<PendingProgram> pending, FindPending());
    if (pending.empty()) return absl::OkStatus();
    std::vector<CompilerSetup> setups;
    for (const TargetContext& context : contexts_) {
      const bool known = std::any_of(
          setups.begin(), setups.end(), [&](const CompilerSetup& setup) {
            return setup.backend == context.target.backend;
          });
      if (!known) setups.push_back(context.setup);
    }
    PoolOptions pool_options;
    pool_options.jobs = options_.jobs > 0 ? options_.jobs : WorkerCountMax();
    pool_options.deadline = absl::Seconds(options_.compile_seconds_max);
    CompilePool pool(pool_options, std::move(setups));
    const size_t batch_max =
        std::max(kClaimedMin,
                 kClaimedPerWorker * static_cast<size_t>(pool_options.jobs));
    const size_t total = pending.size();
    bool told = false;
    while (!pending.empty()) {
      const Stopwatch look;
      std::vector<Digest> keys;
      for (const PendingProgram& program : pending) {
        keys.push_back(program.key.digest);
      }
      ASSIGN_OR_RETURN(const std::vector<bool> claimed, Claim(keys, batch_max));
      std::vector<PendingProgram> batch;
      std::vector<PendingProgram> others;
      for (size_t i = 0; i < pending.size(); ++i) {
        (claimed[i] ? batch : others).push_back(std::move(pending[i]));
      }
      if (!batch.empty()) {
        RETURN_IF_ERROR(CompileBatch(
            batch, total - others.size() - batch.size(), total, &pool));
      }
      ASSIGN_OR_RETURN(pending, DropAnswered(std::move(others)));
      if (!batch.empty() || pending.empty()) continue;
      if (!std::exchange(told, true)) {
        progress_.Note(absl::StrCat("waiting for ", pending.size(),
                                    " programs that another process compiles"));
      }
      Wait(look.Seconds());
    }
    report_.compile_cpu_seconds += pool.stats().compile_seconds;
    return absl::OkStatus();
  }

  absl::Status CompileBatch(const std::vector<PendingProgram>& batch,
                            size_t done, size_t total, CompilePool* pool) {
    std::vector<CompileJob> jobs;
    std::vector<Digest> keys;
    for (const PendingProgram& program : batch) {
      jobs.push_back(program.job);
      keys.push_back(program.key.digest);
    }
    CompileCallbacks callbacks;
    callbacks.on_results =
        [&](absl::Span<const CompileResult> results) -> absl::Status {
      return Publish(batch, results);
    };
    callbacks.on_progress = [&](const CompileProgress& update) {
      progress_.Update(Stage::kCompile, done + update.done, total,
                       update.current);
    };
    callbacks.cancelled = [&] {
      RenewClaims();
      return false;
    };
    RETURN_IF_ERROR(pool->Run(jobs, callbacks).status());
    // What was stored is no longer claimed; a compile that was killed is.
    Release(keys);
    return absl::OkStatus();
  }

  // The programs that others have not answered yet.
  absl::StatusOr<std::vector<PendingProgram>> DropAnswered(
      std::vector<PendingProgram> programs) {
    std::vector<PendingProgram> open;
    for (PendingProgram& program : programs) {
      ASSIGN_OR_RETURN(const bool answered,
                       ProgramIsAnswered(program.key.digest));
      if (!answered) open.push_back(std::move(program));
    }
    return open;
  }

  absl::Status Publish(const std::vector<PendingProgram>& pending,
                       absl::Span<const CompileResult> results) {
    std::vector<Program> programs;
    std::vector<Reject> rejects;
    for (const CompileResult& result : results) {
      const PendingProgram& program = pending[result.index];
      absl::StatusOr<Program> made = MakeProgram(
          program.job, contexts_[program.context].setup.toolchain, result);
      if (made.ok() && made->key != program.key) {
        return absl::InternalError(
            absl::StrCat("program key of ", program.job.unit.name,
                         " changed between ", "planning and compiling"));
      }
      if (made.ok()) {
        programs.push_back(*std::move(made));
        continue;
      }
      const bool again = absl::IsUnavailable(made.status()) ||
                         absl::IsDeadlineExceeded(made.status());
      rejected_programs_[program.key.digest] =
          std::string(made.status().message());
      ++report_.rejects;
      progress_.Note(absl::StrCat("rejected ", program.job.unit.name, " for ",
                                  program.job.target.ToString(), ": ",
                                  made.status().message()));
      // What an outsider killed says nothing about the source, and what took
      // too long may finish within the next run's deadline.
      if (again) {
        unfinished_.insert(program.key.digest);
        continue;
      }
      Reject reject;
      reject.key = program.key.digest;
      reject.preimage = program.key.preimage;
      reject.stage =
          result.status.ok() ? RejectStage::kInspect : RejectStage::kCompile;
      reject.reason = std::string(made.status().message());
      reject.log = result.log;
      rejects.push_back(std::move(reject));
    }
    report_.programs_compiled += programs.size();
    RETURN_IF_ERROR(cache_.PutPrograms(programs));
    for (const Program& program : programs) claims_.erase(program.key.digest);
    if (rejects.empty()) return absl::OkStatus();
    RETURN_IF_ERROR(cache_.PutRejects(rejects));
    for (const Reject& reject : rejects) claims_.erase(reject.key);
    return absl::OkStatus();
  }

  // The candidate with its programs, or why it cannot run.
  absl::StatusOr<Contender> MakeContender(const PlannedCandidate& candidate) {
    Contender contender;
    contender.body = candidate.body;
    contender.digest = candidate.digest;
    for (const ProgramKey& key : candidate.programs) {
      std::shared_ptr<const Program>& slot = programs_[key.digest];
      if (slot == nullptr) {
        ASSIGN_OR_RETURN(std::optional<Program> program,
                         cache_.FindProgram(key.digest));
        if (!program.has_value()) {
          const auto reject = rejected_programs_.find(key.digest);
          return absl::NotFoundError(
              reject != rejected_programs_.end()
                  ? reject->second
                  : absl::StrCat("program ", key.digest.Short(),
                                 " is not in the cache"));
        }
        slot = std::make_shared<const Program>(*std::move(program));
      }
      contender.programs.push_back(slot);
    }
    return contender;
  }

  // Takes the answer that another process may have stored since LookUp.
  absl::StatusOr<bool> AnsweredMeanwhile(size_t index) {
    ASSIGN_OR_RETURN(const std::optional<StoredPlan> stored,
                     cache_.FindPlan(intervals_[index].key.digest));
    if (!stored.has_value()) return false;
    ASSIGN_OR_RETURN(const bool answers,
                     Answers(stored->plan, ContextOf(index)));
    if (!answers) return false;
    report_.intervals[index].plan = stored->plan;
    report_.intervals[index].reused = true;
    return true;
  }

  // Why no winner may be chosen yet: the default always competes, so a default
  // that was not compiled for a passing reason is waited for. Else the answer
  // would depend on how busy this machine was. Empty: go on.
  absl::StatusOr<std::string> WhyUndecided(size_t index) {
    const std::vector<PlannedCandidate>& candidates =
        plans_.at(index).candidates;
    if (candidates.empty()) return std::string();
    for (const ProgramKey& key : candidates.front().programs) {
      if (unfinished_.count(key.digest) == 0) continue;
      // Another process may have been luckier.
      ASSIGN_OR_RETURN(const bool present, cache_.ContainsProgram(key.digest));
      if (present) continue;
      return absl::StrCat(rejected_programs_.at(key.digest),
                          "; it is the default, which always competes: run the "
                          "same command again, or with a longer "
                          "--compile-timeout");
    }
    return std::string();
  }

  // What a race claims: its plan, and the device, because two races on one
  // device would time each other.
  std::vector<Digest> RaceClaims(size_t index) const {
    const Digest device =
        CanonicalEncoder("kiln.racer/1")
            .Text("target", ContextOf(index).target.ToString())
            .Number("ordinal", options_.device_ordinal)
            .digest();
    return {device, intervals_[index].key.digest};
  }

  // True when the interval is settled; false when another process works on it
  // or on its device.
  absl::StatusOr<bool> Settle(size_t index, size_t done, Racetrack* track) {
    ASSIGN_OR_RETURN(const bool before, AnsweredMeanwhile(index));
    if (before) return true;
    ASSIGN_OR_RETURN(const std::string undecided, WhyUndecided(index));
    if (!undecided.empty()) {
      report_.intervals[index].problem = undecided;
      ++report_.intervals[index].rejected;
      return true;
    }
    const TargetContext& context = ContextOf(index);
    if (options_.compile_only || context.profile.assumed) {
      RETURN_IF_ERROR(Predict(index));
      return true;
    }
    const std::vector<Digest> keys = RaceClaims(index);
    ASSIGN_OR_RETURN(const std::vector<bool> claimed, Claim(keys, keys.size()));
    if (claimed != std::vector<bool>(keys.size(), true)) {
      Release(keys);
      return false;
    }
    // Whoever had the claim may have finished in between.
    ASSIGN_OR_RETURN(const bool answered, AnsweredMeanwhile(index));
    if (!answered) {
      if (track->context != intervals_[index].context) {
        track->bench.reset();
        ASSIGN_OR_RETURN(track->device, OpenDevice(context));
        track->context = intervals_[index].context;
      }
      if (track->bench == nullptr ||
          track->bench->geometry() != intervals_[index].geometry) {
        track->bench.reset();
        ASSIGN_OR_RETURN(
            track->bench,
            OpBench::Create(track->device.get(), intervals_[index].geometry,
                            options_.seed));
      }
      cache_.set_device_name(context.profile.name);
      const absl::Status raced = RaceInterval(index, track->bench.get(), done);
      cache_.set_device_name("");
      RETURN_IF_ERROR(raced);
    }
    Release(keys);
    return true;
  }

  absl::Status Race() {
    const StageTimer timer(Stage::kRace, &report_);
    size_t done = 0;
    Racetrack track;
    bool told = false;
    std::vector<size_t> open = missing_;
    while (!open.empty()) {
      const Stopwatch look;
      std::vector<size_t> waiting;
      for (const size_t index : open) {
        progress_.Update(Stage::kRace, done, missing_.size(),
                         Describe(intervals_[index], ""));
        ASSIGN_OR_RETURN(const bool settled, Settle(index, done, &track));
        if (settled) {
          ++done;
        } else {
          waiting.push_back(index);
        }
      }
      if (waiting.size() == open.size()) {
        if (!std::exchange(told, true)) {
          progress_.Note(absl::StrCat("waiting for ", waiting.size(),
                                      " races of another process"));
        }
        Wait(look.Seconds());
      }
      open = std::move(waiting);
    }
    TakeWarnings();
    progress_.Update(Stage::kRace, done, missing_.size(), "done");
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<Device>> OpenDevice(
      const TargetContext& context) {
    if (context.target.backend == Backend::kCpu) {
      return OpenCpuDevice(context.target);
    }
    return OpenCudaDevice(options_.device_ordinal, context.target);
  }

  std::string Describe(const ResolvedInterval& resolved,
                       const std::string& detail) const {
    return absl::StrCat(contexts_[resolved.context].target.ToString(), " ",
                        absl::StrJoin(resolved.names, ","),
                        " m<=", resolved.interval.m_max,
                        detail.empty() ? "" : " ", detail);
  }

  Plan MakePlan(size_t index, const PlannedCandidate& winner) const {
    const ResolvedInterval& resolved = intervals_[index];
    Plan plan;
    plan.geometry = resolved.geometry;
    plan.target = contexts_[resolved.context].target;
    plan.interval = resolved.interval;
    plan.body = winner.body;
    for (const ProgramKey& key : winner.programs) {
      plan.programs.push_back(key.digest);
    }
    plan.evidence.candidates =
        static_cast<uint32_t>(plans_.at(index).candidates.size());
    return plan;
  }

  // Without a device the best predicted candidate that compiled stands in, and
  // says so.
  absl::Status Predict(size_t index) {
    IntervalReport& row = report_.intervals[index];
    const PlannedCandidate* first = nullptr;
    for (const PlannedCandidate& candidate : plans_.at(index).candidates) {
      const absl::StatusOr<Contender> contender = MakeContender(candidate);
      if (!contender.ok()) {
        if (!absl::IsNotFound(contender.status())) return contender.status();
        ++row.rejected;
        row.problem = std::string(contender.status().message());
        continue;
      }
      if (first == nullptr) first = &candidate;
    }
    if (first == nullptr) return absl::OkStatus();
    row.problem.clear();
    Plan plan = MakePlan(index, *first);
    plan.evidence.state = PlanState::kPredicted;
    RETURN_IF_ERROR(cache_.PutPlan(intervals_[index].key, plan, {}));
    row.plan = std::move(plan);
    return absl::OkStatus();
  }

  absl::Status RaceInterval(size_t index, OpBench* bench, size_t done) {
    const ResolvedInterval& resolved = intervals_[index];
    // Every candidate in planned order; the contenders are those that can run.
    std::vector<RaceEntry> entries;
    std::vector<Contender> contenders;
    std::vector<size_t> entry_of;
    for (const PlannedCandidate& candidate : plans_.at(index).candidates) {
      RaceEntry& entry = entries.emplace_back();
      entry.body = &candidate.body;
      entry.digest = candidate.digest;
      ASSIGN_OR_RETURN(const std::optional<Reject> known,
                       cache_.FindReject(candidate.digest));
      absl::StatusOr<Contender> contender =
          known.has_value()
              ? absl::StatusOr<Contender>(absl::NotFoundError(known->reason))
              : MakeContender(candidate);
      if (!contender.ok()) {
        if (!absl::IsNotFound(contender.status())) return contender.status();
        entry.problem = std::string(contender.status().message());
        continue;
      }
      entry.registers = RegistersOf(contender->body, contender->programs);
      entry_of.push_back(entries.size() - 1);
      contenders.push_back(*std::move(contender));
    }
    double noise_floor = 0;
    if (!contenders.empty()) {
      size_t running = 0;
      RaceOptions race;
      race.seconds_max = options_.race_seconds_max;
      race.oracle_threads = OracleThreads();
      race.progress = [&](const std::string& line) {
        progress_.Update(Stage::kRace, done, missing_.size(),
                         Describe(resolved, line));
        RenewClaims();
      };
      race.about_to_run = [&](size_t contender) { running = contender; };
      absl::StatusOr<RaceResult> result =
          kiln::Race(bench, resolved.interval, contenders, race);
      // A machine without room says nothing about the candidate.
      if (IsWantOfResources(result.status())) {
        return Annotate(result.status(),
                        absl::StrCat("racing ", Describe(resolved, "")));
      }
      if (!result.ok()) {
        return Quarantine(contenders[running], result.status());
      }
      report_.launches += result->launches;
      noise_floor = result->noise_floor;
      for (size_t i = 0; i < contenders.size(); ++i) {
        entries[entry_of[i]].timing = std::move(result->timings[i]);
      }
    }
    RETURN_IF_ERROR(RememberWrong(index, entries));
    return StoreWinner(index, kiln::Conclude(entries, noise_floor),
                       noise_floor);
  }

  // Reports the candidates that were dropped, and remembers those that ran and
  // were wrong.
  absl::Status RememberWrong(size_t index,
                             const std::vector<RaceEntry>& entries) {
    IntervalReport& row = report_.intervals[index];
    std::vector<Reject> rejects;
    for (const RaceEntry& entry : entries) {
      const bool ran = entry.timing.has_value();
      if (ran && entry.timing->outcome != Outcome::kRejected) continue;
      ++row.rejected;
      row.problem = ran ? entry.timing->reason : entry.problem;
      if (!ran) continue;
      ++report_.rejects;
      progress_.Note(
          absl::StrCat("rejected ", entry.body->Label(), ": ", row.problem));
      Reject reject;
      reject.key = entry.digest;
      reject.stage = RejectStage::kVerify;
      reject.reason = row.problem;
      rejects.push_back(std::move(reject));
    }
    return cache_.PutRejects(rejects);
  }

  // The device failed while a candidate ran. The device may be unusable in this
  // process, so the run ends; the next one goes on without the candidate.
  absl::Status Quarantine(const Contender& contender,
                          const absl::Status& failure) {
    Reject reject;
    reject.key = contender.digest;
    reject.stage = RejectStage::kRace;
    reject.reason = absl::StrCat("device failed: ", failure.message());
    RETURN_IF_ERROR(cache_.PutReject(reject));
    return absl::InternalError(absl::StrCat(
        "the device failed while racing ", contender.body.Label(), ": ",
        failure.message(),
        "; the candidate is set aside, run the same command again"));
  }

  // Stores the winner with all evidence.
  absl::Status StoreWinner(size_t index, const Conclusion& conclusion,
                           double noise_floor) {
    IntervalReport& row = report_.intervals[index];
    if (!conclusion.winner.has_value()) return absl::OkStatus();
    row.problem.clear();
    const size_t winner = *conclusion.winner;
    const Measurement& measured = conclusion.evidence[winner];
    Plan plan = MakePlan(index, plans_.at(index).candidates[winner]);
    Evidence& proof = plan.evidence;
    proof.state = PlanState::kMeasured;
    proof.median_ns = MedianNs(measured);
    // A default that was wrong or never ran is no comparison.
    const double standard = MedianNs(conclusion.evidence[0]);
    proof.default_median_ns = standard > 0 ? standard : proof.median_ns;
    proof.noise_floor = noise_floor;
    proof.worst_error = measured.worst_error;
    proof.samples = static_cast<uint32_t>(measured.samples.size());
    RETURN_IF_ERROR(
        cache_.PutPlan(intervals_[index].key, plan, conclusion.evidence));
    row.plan = std::move(plan);
    return absl::OkStatus();
  }

  void Summarize() {
    report_.complete = !report_.stopped_after.has_value();
    for (const IntervalReport& row : report_.intervals) {
      if (!row.plan.has_value()) {
        report_.complete = false;
      } else if (row.plan->evidence.state == PlanState::kMeasured) {
        ++report_.winners;
      } else {
        ++report_.predicted;
      }
    }
  }

  const PrewarmOptions& options_;
  PlanCache& cache_;
  ProgressSink& progress_;
  PrewarmReport report_;
  std::vector<TargetContext> contexts_;
  std::vector<ResolvedInterval> intervals_;
  std::vector<size_t> missing_;           // indices of intervals_
  std::map<size_t, IntervalPlan> plans_;  // of the missing ones
  std::map<Digest, std::string> rejected_programs_;
  std::set<Digest> unfinished_;  // of these, what may compile next time
  std::map<Digest, std::shared_ptr<const Program>> programs_;
  std::set<Digest> claims_;  // leases held now
  Stopwatch renewed_;
};

}  // namespace

ProgressSink::~ProgressSink() = default;

std::optional<std::string> CacheProbeMemo::Lookup(absl::string_view key) {
  absl::StatusOr<std::optional<std::string>> memo = cache_.FindMemo(key);
  return memo.ok() ? *std::move(memo) : std::nullopt;
}

void CacheProbeMemo::Store(absl::string_view key, absl::string_view value) {
  // A memo that is lost costs a probe next time and nothing else.
  cache_.PutMemo(key, value).IgnoreError();
}

absl::string_view StageName(Stage stage) {
  switch (stage) {
    case Stage::kResolve:
      return "resolve";
    case Stage::kLookUp:
      return "lookup";
    case Stage::kEnumerate:
      return "enumerate";
    case Stage::kCompile:
      return "compile";
    case Stage::kRace:
      return "race";
  }
  KILN_UNREACHABLE();
}

std::optional<Stage> ParseStage(absl::string_view name) {
  for (const Stage stage : {Stage::kResolve, Stage::kLookUp, Stage::kEnumerate,
                            Stage::kCompile, Stage::kRace}) {
    if (StageName(stage) == name) return stage;
  }
  return std::nullopt;
}

absl::StatusOr<TargetContext> ResolveTarget(const Target& target,
                                            const PrewarmOptions& options,
                                            PlanCache* cache) {
  TargetContext context;
  context.target = target;
  context.profile = AssumedProfile(target);
  if (!options.compile_only) {
    absl::StatusOr<DeviceProfile> profile =
        absl::FailedPreconditionError("no device");
    if (target.backend == Backend::kCpu) {
      profile = HostCpuProfile(target);
    } else {
      const std::vector<DeviceProfile> devices = ListCudaDevices();
      const auto ordinal = static_cast<size_t>(options.device_ordinal);
      if (ordinal < devices.size()) {
        profile = ProfileForTarget(devices[ordinal], target);
      }
    }
    if (profile.ok()) context.profile = *std::move(profile);
  }
  CacheProbeMemo memo(cache);
  absl::StatusOr<CompilerSetup> setup =
      options.toolchain(target.backend, &memo);
  if (!setup.ok()) {
    // Not NotFound: that means a plan which is not stored.
    const std::string message =
        absl::StrCat("no compiler for ", target.ToString(), ": ",
                     setup.status().message(), "; kiln doctor shows more");
    return absl::IsNotFound(setup.status())
               ? absl::UnavailableError(message)
               : absl::Status(setup.status().code(), message);
  }
  context.setup = *std::move(setup);
  return context;
}

std::vector<ResolvedInterval> ResolveIntervals(
    const std::vector<PlannedRequest>& requests,
    const std::vector<TargetContext>& contexts, const PrewarmOptions& options) {
  std::vector<ResolvedInterval> resolved;
  for (size_t index = 0; index < contexts.size(); ++index) {
    const TargetContext& context = contexts[index];
    const int candidates_max =
        options.candidates_max > 0
            ? options.candidates_max
            : DefaultCandidatesMax(context.target.backend);
    for (const PlannedRequest& request : requests) {
      const auto planner =
          std::make_shared<Planner>(request.geometry, context.profile,
                                    context.setup.toolchain, candidates_max);
      for (const Interval& interval : request.intervals) {
        resolved.push_back({index, request.names, request.geometry, interval,
                            planner->KeyOf(interval), planner});
      }
    }
  }
  return resolved;
}

absl::StatusOr<ResolvedManifest> ResolveManifest(const Manifest& manifest,
                                                 const PrewarmOptions& options,
                                                 PlanCache* cache) {
  ASSIGN_OR_RETURN(const std::vector<PlannedRequest> requests,
                   Canonicalize(manifest, options.capacity_max));
  ResolvedManifest resolved;
  for (const Target& target : options.targets) {
    ASSIGN_OR_RETURN(TargetContext context,
                     ResolveTarget(target, options, cache));
    resolved.contexts.push_back(std::move(context));
  }
  resolved.intervals = ResolveIntervals(requests, resolved.contexts, options);
  return resolved;
}

absl::StatusOr<PrewarmReport> Prewarm(const Manifest& manifest,
                                      const PrewarmOptions& options,
                                      PlanCache* cache,
                                      ProgressSink* progress) {
  absl::StatusOr<PrewarmReport> report =
      Session(options, cache, progress).Run(manifest);
  if (!absl::IsDataLoss(report.status()) ||
      cache->mode() != CacheMode::kReadWrite) {
    return report;
  }
  // Damage below the rows is repaired once; other losses of data (two binaries
  // under one key) are for people.
  ASSIGN_OR_RETURN(const std::vector<CacheFinding> findings, cache->Check());
  const bool damaged = std::any_of(findings.begin(), findings.end(),
                                   [](const CacheFinding& finding) {
                                     return finding.table == kCacheFileName;
                                   });
  if (!damaged) return report;
  progress->Note(absl::StrCat("cache: ", report.status().message(),
                              "; rebuilding it from the rows that are whole"));
  ASSIGN_OR_RETURN(const RepairReport repaired, cache->Repair());
  for (const CacheFinding& finding : repaired.dropped) {
    progress->Note(absl::StrCat("cache: dropped from ", finding.table, " ",
                                finding.key, ": ", finding.problem));
  }
  return Session(options, cache, progress).Run(manifest);
}

}  // namespace kiln
