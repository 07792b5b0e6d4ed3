#include "tuner/race_stage.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/base/status_macros.h"
#include "tuner/nvml.h"

namespace kiln {
namespace {

// How long to wait for workers before progress is shown again.
constexpr double kShowSeconds = 0.2;
// What one launch may take when the options do not say: GPUs answer within
// seconds, a processor may be slow and busy with other things.
constexpr double kGpuLaunchSeconds = 30;
constexpr double kCpuLaunchSeconds = 300;

// Candidates that were left out of a race and are stored with it, the most
// promising ones; kiln plan lists them all.
constexpr size_t kPrunedStored = 32;

int OracleThreads(size_t lanes) {
  const size_t threads = std::thread::hardware_concurrency() / lanes;
  return std::max(1, static_cast<int>(threads));
}

// Registers of the hungriest kernel that `contender` launches.
uint32_t RegistersOf(const Contender& contender) {
  uint32_t registers = 0;
  for (const Step& step : contender.body.steps) {
    const Kernel* kernel =
        contender.programs.at(step.program)->FindKernel(step.entry);
    if (kernel != nullptr) registers = std::max(registers, kernel->registers);
  }
  return registers;
}

std::string LockName(const DeviceProfile& profile, const RaceSite& site) {
  const std::string device = DeviceLockName(profile);
  return site.processors.empty()
             ? device
             : absl::StrCat(device, "/", absl::StrJoin(site.processors, ","));
}

}  // namespace

absl::Status RaceStage::MakeLanes(size_t context) {
  if (context_ == context) return absl::OkStatus();
  // Workers of another target would hold memory for nothing.
  lanes_.clear();
  context_ = context;
  const PrewarmOptions& options = state_.options;
  const TargetContext& at = state_.contexts[context];
  const auto add = [&](const DeviceProfile& profile, RaceSite site,
                       std::string name) {
    auto lane = std::make_unique<Lane>();
    lane->name = std::move(name);
    lane->profile = profile;
    lane->site = std::move(site);
    RemoteRacerOptions racer;
    racer.executable = options.race_worker;
    racer.site = lane->site;
    racer.device = MeasureIdentity(profile);
    racer.launch_seconds_max =
        options.launch_seconds_max > 0       ? options.launch_seconds_max
        : at.target.backend == Backend::kCpu ? kCpuLaunchSeconds
                                             : kGpuLaunchSeconds;
    lane->racer = std::make_unique<RemoteRacer>(std::move(racer));
    lanes_.push_back(std::move(lane));
  };
  if (at.target.backend == Backend::kCpu) {
    if (options.cpu_sets.empty()) {
      add(at.profile, {.target = at.target}, "");
    }
    for (const std::vector<int>& set : options.cpu_sets) {
      add(at.profile, {.target = at.target, .ordinal = 0, .processors = set},
          absl::StrCat("processors ", absl::StrJoin(set, ",")));
    }
    return absl::OkStatus();
  }
  for (size_t i = 0; i < at.devices.size(); ++i) {
    add(at.devices[i],
        {.target = at.target, .ordinal = options.device_ordinals[i]},
        absl::StrCat("GPU ", options.device_ordinals[i]));
  }
  return absl::OkStatus();
}

absl::Status RaceStage::Begin() {
  for (const size_t index : state_.missing) {
    const TargetContext& context = state_.ContextOf(index);
    if (state_.OnlyPredicts(context)) continue;
    RETURN_IF_ERROR(MakeLanes(state_.intervals[index].context));
    // Weights are made ahead only for GPUs: a processor compiles now.
    const bool ahead = context.target.backend == Backend::kCuda &&
                       !state_.plans.at(index).candidates.empty();
    for (const std::unique_ptr<Lane>& lane : lanes_) {
      ASSIGN_OR_RETURN(const bool locked, Lock(lane.get()));
      if (!locked) continue;
      lane->racer->Start();
      if (!ahead) continue;
      const Plan plan =
          state_.MakePlan(index, state_.plans.at(index).candidates.front());
      lane->racer->Prepare({.plan = plan, .seed = state_.options.seed});
    }
    return absl::OkStatus();
  }
  return absl::OkStatus();
}

void RaceStage::WarmUp() {
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    lane->racer->Advance();
    // From here to its first race the worker leaves the device alone.
    if (!lane->racer->warming_up()) lane->lock.reset();
  }
}

absl::Status RaceStage::Run() {
  std::vector<size_t> contexts;
  for (const size_t index : state_.missing) {
    const size_t context = state_.intervals[index].context;
    if (contexts.empty() || contexts.back() != context) {
      contexts.push_back(context);
    }
  }
  for (const size_t context : contexts) RETURN_IF_ERROR(RunContext(context));
  lanes_.clear();
  RETURN_IF_ERROR(state_.cache.PutPlans(predicted_));
  state_.TakeWarnings();
  state_.progress.Update(Stage::kRace, done_, state_.missing.size(), "done");
  return absl::OkStatus();
}

absl::Status RaceStage::RunContext(size_t context) {
  std::vector<size_t> open;
  for (const size_t index : state_.missing) {
    if (state_.intervals[index].context == context) open.push_back(index);
  }
  if (state_.OnlyPredicts(state_.contexts[context])) {
    for (const size_t index : open) {
      ASSIGN_OR_RETURN(const bool settled, Settle(index));
      if (!settled) RETURN_IF_ERROR(Predict(index));
      ++done_;
    }
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(MakeLanes(context));
  std::vector<RemoteRacer*> racers;
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    racers.push_back(lane->racer.get());
  }
  for (;;) {
    const Stopwatch look;
    bool moved = false;
    for (const std::unique_ptr<Lane>& lane : lanes_) {
      RETURN_IF_ERROR(TakeCasualties(lane.get()));
      std::optional<absl::StatusOr<RaceResult>> outcome =
          lane->racer->TakeOutcome();
      if (outcome.has_value()) {
        RETURN_IF_ERROR(FinishRace(lane.get(), *outcome));
        moved = true;
      }
      // The first interval that nobody else works on.
      for (size_t i = 0; i < open.size() && !lane->racer->racing();) {
        state_.progress.Update(Stage::kRace, done_, state_.missing.size(),
                               Describe(open[i]));
        ASSIGN_OR_RETURN(const Step step, TryBegin(open[i], lane.get()));
        if (step == Step::kBusy) {
          ++i;
          continue;
        }
        if (step == Step::kSettled) ++done_;
        open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
        moved = true;
      }
    }
    const bool racing =
        std::any_of(lanes_.begin(), lanes_.end(),
                    [](const auto& lane) { return lane->racer->racing(); });
    if (!racing && open.empty()) return absl::OkStatus();
    state_.claims.Renew();
    if (racing) {
      ShowProgress();
      AdvanceAll(racers, kShowSeconds);
    } else if (!moved) {
      if (!std::exchange(told_busy_, true)) {
        state_.progress.Note(absl::StrCat("waiting for ", open.size(),
                                          " races of another process"));
      }
      AdvanceAll(racers, 0);
      PrewarmState::Wait(look.Seconds());
    }
  }
}

absl::StatusOr<bool> RaceStage::Settle(size_t index) {
  ASSIGN_OR_RETURN(const bool before, AnsweredMeanwhile(index));
  if (before) return true;
  ASSIGN_OR_RETURN(const std::string undecided, WhyUndecided(index));
  if (undecided.empty()) return false;
  state_.report.intervals[index].problem = undecided;
  ++state_.report.intervals[index].rejected;
  return true;
}

absl::StatusOr<RaceStage::Step> RaceStage::TryBegin(size_t index, Lane* lane) {
  ASSIGN_OR_RETURN(const bool settled, Settle(index));
  if (settled) return Step::kSettled;
  ASSIGN_OR_RETURN(const bool locked, Lock(lane));
  if (!locked) return Step::kBusy;
  // The device is claimed in the cache too: containers may share that and not
  // the lock.
  lane->claims = {CanonicalEncoder("kiln.racer/2")
                      .Text("device", LockName(lane->profile, lane->site))
                      .digest(),
                  state_.intervals[index].key.digest};
  ASSIGN_OR_RETURN(const bool claimed, state_.claims.ClaimAll(lane->claims));
  Step step = Step::kBusy;
  if (claimed) {
    // Whoever had the claim may have finished in between.
    ASSIGN_OR_RETURN(const bool answered, AnsweredMeanwhile(index));
    if (answered) {
      step = Step::kSettled;
    } else {
      ASSIGN_OR_RETURN(step, BeginRace(index, lane));
    }
  }
  if (step != Step::kRacing) {
    if (claimed) state_.claims.Release(lane->claims);
    lane->lock.reset();
  }
  return step;
}

absl::StatusOr<RaceStage::Step> RaceStage::BeginRace(size_t index, Lane* lane) {
  lane->index = index;
  lane->entries.clear();
  lane->entry_of.clear();
  const std::vector<PlannedCandidate>& candidates =
      state_.plans.at(index).candidates;
  std::vector<size_t> admitted;
  std::set<Digest> needed;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const PlannedCandidate& candidate = candidates[i];
    RaceEntry& entry = lane->entries.emplace_back();
    entry.body = &candidate.body;
    entry.digest = candidate.digest;
    ASSIGN_OR_RETURN(const std::optional<Reject> known,
                     state_.cache.FindReject(candidate.digest));
    if (known.has_value()) {
      entry.problem = known->reason;
      continue;
    }
    admitted.push_back(i);
    for (const ProgramKey& key : candidate.programs) needed.insert(key.digest);
  }
  RETURN_IF_ERROR(state_.LoadPrograms(needed));
  RaceJob job;
  for (const size_t i : admitted) {
    const PlannedCandidate& candidate = candidates[i];
    RaceEntry& entry = lane->entries[i];
    absl::StatusOr<Contender> contender = state_.MakeContender(candidate);
    if (!contender.ok()) {
      entry.problem = std::string(contender.status().message());
      continue;
    }
    if (const absl::Status valid =
            ValidatePlan(state_.MakePlan(index, candidate));
        !valid.ok()) {
      entry.problem = std::string(valid.message());
      continue;
    }
    entry.registers = RegistersOf(*contender);
    lane->entry_of.push_back(i);
    job.contenders.push_back(*std::move(contender));
  }
  lane->quarantined.assign(job.contenders.size(), false);
  if (job.contenders.empty()) {
    RETURN_IF_ERROR(RememberWrong(*lane));
    RETURN_IF_ERROR(StoreWinner(index, lane->entries, {}));
    return Step::kSettled;
  }
  const ResolvedInterval& resolved = state_.intervals[index];
  job.seed = state_.options.seed;
  job.geometry = resolved.geometry;
  job.target = state_.contexts[resolved.context].target;
  job.interval = resolved.interval;
  job.options.seconds_max = RaceSecondsFor(index);
  job.options.warm_l2 = state_.options.warm_l2;
  job.options.oracle_threads = OracleThreads(lanes_.size());
  lane->racer->Submit(std::move(job));
  return Step::kRacing;
}

absl::StatusOr<bool> RaceStage::Lock(Lane* lane) {
  if (lane->lock.has_value()) return true;
  const std::string name = LockName(lane->profile, lane->site);
  ASSIGN_OR_RETURN(lane->lock, DeviceLock::TryAcquire(name));
  if (lane->lock.has_value()) {
    RETURN_IF_ERROR(LookAround(lane));
    return true;
  }
  if (told_busy_ && !state_.options.exclusive) return false;
  const std::optional<int> holder = DeviceLock::Holder(name);
  // Two lanes of this process may share a device only in vain.
  const std::string text = absl::StrCat(
      lane->profile.name,
      lane->name.empty() ? "" : absl::StrCat(" (", lane->name, ")"),
      " is being raced on by ",
      holder.has_value() ? absl::StrCat("process ", *holder)
                         : "another process");
  if (state_.options.exclusive) {
    return absl::FailedPreconditionError(
        absl::StrCat(text, "; leave out --exclusive to wait for it"));
  }
  if (!std::exchange(told_busy_, true)) {
    state_.progress.Note(absl::StrCat("waiting: ", text));
  }
  return false;
}

// Once, before this process has a context on the device: whoever computes on it
// then is somebody else.
absl::Status RaceStage::LookAround(Lane* lane) {
  if (std::exchange(lane->looked_around, true) ||
      lane->profile.target.backend != Backend::kCuda) {
    return absl::OkStatus();
  }
  const absl::StatusOr<NvmlDevice> nvml =
      FindNvmlDevice(lane->profile.pci_bus_id);
  const absl::StatusOr<std::vector<uint32_t>> processes =
      nvml.ok() ? nvml->ComputeProcesses()
                : absl::StatusOr<std::vector<uint32_t>>(nvml.status());
  if (!processes.ok()) {
    if (!state_.options.exclusive) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("cannot tell whether ", lane->profile.name,
                     " is free: ", processes.status().message(),
                     "; leave out --exclusive to race all the same"));
  }
  if (processes->empty()) return absl::OkStatus();
  const std::string text = absl::StrCat(lane->profile.name, " (", lane->name,
                                        ") has contexts of process ",
                                        absl::StrJoin(*processes, ", "));
  if (state_.options.exclusive) {
    return absl::FailedPreconditionError(absl::StrCat(
        text, "; end them, or leave out --exclusive to race all the same"));
  }
  state_.progress.Note(absl::StrCat(
      "warning: ", text,
      ": if they compute during a race, its figures mean little; --exclusive "
      "refuses instead"));
  return absl::OkStatus();
}

// Takes the answer that another process may have stored since LookUp.
absl::StatusOr<bool> RaceStage::AnsweredMeanwhile(size_t index) {
  const Digest& key = state_.intervals[index].key.digest;
  ASSIGN_OR_RETURN(const std::optional<StoredPlan> stored,
                   state_.cache.FindPlan(key));
  ASSIGN_OR_RETURN(const std::vector<bool> complete,
                   state_.cache.ContainsPlans({key}));
  if (!stored.has_value() || !complete[0] ||
      !state_.Answers(stored->plan, state_.ContextOf(index))) {
    return false;
  }
  state_.report.intervals[index].plan = stored->plan;
  state_.report.intervals[index].reused = true;
  return true;
}

// Why no winner may be chosen yet: the default always competes, so a default
// that was not compiled for a passing reason is waited for. Else the answer
// would depend on how busy this machine was. Empty: go on.
absl::StatusOr<std::string> RaceStage::WhyUndecided(size_t index) {
  const std::vector<PlannedCandidate>& candidates =
      state_.plans.at(index).candidates;
  if (candidates.empty()) return std::string();
  for (const ProgramKey& key : candidates.front().programs) {
    if (state_.unfinished.count(key.digest) == 0) continue;
    // Another process may have been luckier.
    ASSIGN_OR_RETURN(const bool present,
                     state_.cache.ContainsProgram(key.digest));
    if (present) continue;
    return absl::StrCat(state_.rejected_programs.at(key.digest),
                        "; it is the default, which always competes: run the "
                        "same command again, or with a longer "
                        "--compile-timeout");
  }
  return std::string();
}

// Why a candidate cannot run; empty when the cache has all its programs.
absl::StatusOr<std::string> RaceStage::WhyIncomplete(
    const PlannedCandidate& candidate) {
  for (const ProgramKey& key : candidate.programs) {
    ASSIGN_OR_RETURN(const bool present,
                     state_.cache.ContainsProgram(key.digest));
    if (!present) return state_.WhyMissing(key.digest);
  }
  return std::string();
}

// Without a device the best predicted candidate that compiled stands in, and
// says so. Stored at the end of the stage, all in one transaction: it costs
// nothing to predict them again.
absl::Status RaceStage::Predict(size_t index) {
  IntervalReport& row = state_.report.intervals[index];
  const PlannedCandidate* first = nullptr;
  for (const PlannedCandidate& candidate : state_.plans.at(index).candidates) {
    ASSIGN_OR_RETURN(const std::string problem, WhyIncomplete(candidate));
    if (!problem.empty()) {
      ++row.rejected;
      row.problem = problem;
      continue;
    }
    if (first == nullptr) first = &candidate;
  }
  if (first == nullptr) return absl::OkStatus();
  row.problem.clear();
  Plan plan = state_.MakePlan(index, *first);
  plan.evidence.state = PlanState::kPredicted;
  predicted_.push_back({.key = state_.intervals[index].key, .plan = plan});
  row.plan = std::move(plan);
  return absl::OkStatus();
}

// Remembers who ended a worker as soon as that is certain.
absl::Status RaceStage::TakeCasualties(Lane* lane) {
  for (const Casualty& casualty : lane->racer->TakeCasualties()) {
    const RaceEntry& entry =
        lane->entries[lane->entry_of.at(casualty.contender)];
    lane->quarantined.at(casualty.contender) = true;
    ++state_.report.rejects;
    state_.progress.Note(
        absl::StrCat("set aside ", entry.body->Label(), ": ", casualty.reason));
    Reject reject;
    reject.key = entry.digest;
    reject.stage = RejectStage::kRace;
    reject.reason = casualty.reason;
    reject.log = casualty.log;
    state_.cache.set_device_name(lane->profile.name);
    const absl::Status stored = state_.cache.PutReject(reject);
    state_.cache.set_device_name("");
    RETURN_IF_ERROR(stored);
  }
  return absl::OkStatus();
}

absl::Status RaceStage::FinishRace(Lane* lane,
                                   const absl::StatusOr<RaceResult>& result) {
  if (absl::IsResourceExhausted(result.status())) {
    // Other requests may fit.
    std::string& problem = state_.report.intervals[lane->index].problem;
    problem = std::string(result.status().message());
    state_.progress.Note(
        absl::StrCat(Describe(lane->index), ": no race: ", problem));
  } else if (!result.ok()) {
    return Annotate(result.status(),
                    absl::StrCat("racing ", Describe(lane->index)));
  } else {
    RETURN_IF_ERROR(StoreRace(lane, *result));
  }
  state_.claims.Release(lane->claims);
  lane->lock.reset();
  ++done_;
  return absl::OkStatus();
}

absl::Status RaceStage::StoreRace(Lane* lane, const RaceResult& result) {
  state_.report.launches += result.launches;
  BudgetOf(lane->index).seconds -= result.seconds;
  for (size_t i = 0; i < lane->entry_of.size(); ++i) {
    lane->entries[lane->entry_of[i]].timing = result.timings[i];
  }
  state_.cache.set_device_name(lane->profile.name);
  absl::Status stored = RememberWrong(*lane);
  if (stored.ok()) {
    stored = StoreWinner(lane->index, lane->entries, result);
  }
  state_.cache.set_device_name("");
  return stored;
}

// Reports the candidates that were dropped, and remembers those that ran and
// were wrong.
absl::Status RaceStage::RememberWrong(const Lane& lane) {
  IntervalReport& row = state_.report.intervals[lane.index];
  std::vector<bool> stored(lane.entries.size(), false);
  for (size_t i = 0; i < lane.entry_of.size(); ++i) {
    stored[lane.entry_of[i]] = lane.quarantined[i];
  }
  std::vector<Reject> rejects;
  for (size_t i = 0; i < lane.entries.size(); ++i) {
    const RaceEntry& entry = lane.entries[i];
    const bool ran = entry.timing.has_value();
    if (ran && entry.timing->outcome != Outcome::kRejected) continue;
    ++row.rejected;
    row.problem = ran ? entry.timing->reason : entry.problem;
    if (!ran || stored[i]) continue;
    ++state_.report.rejects;
    state_.progress.Note(
        absl::StrCat("rejected ", entry.body->Label(), ": ", row.problem));
    Reject reject;
    reject.key = entry.digest;
    reject.stage = RejectStage::kVerify;
    reject.reason = row.problem;
    rejects.push_back(std::move(reject));
  }
  return state_.cache.PutRejects(rejects);
}

// Stores the winner with all evidence.
absl::Status RaceStage::StoreWinner(size_t index,
                                    const std::vector<RaceEntry>& entries,
                                    const RaceResult& result) {
  const Conclusion conclusion = Conclude(entries, result.noise_floor);
  IntervalReport& row = state_.report.intervals[index];
  if (!conclusion.winner.has_value()) return absl::OkStatus();
  row.problem.clear();
  const size_t winner = *conclusion.winner;
  const Measurement& measured = conclusion.evidence[winner];
  const IntervalPlan& planned = state_.plans.at(index);
  Plan plan = state_.MakePlan(index, planned.candidates[winner]);
  Evidence& proof = plan.evidence;
  proof.state = PlanState::kMeasured;
  proof.median_ns = conclusion.times_ns[winner];
  // A default that was wrong or never ran is no comparison.
  const double standard = conclusion.times_ns[0];
  proof.default_median_ns = standard > 0 ? standard : proof.median_ns;
  proof.noise_floor = result.noise_floor;
  proof.worst_error = measured.worst_error;
  proof.samples = static_cast<uint32_t>(measured.samples.size());
  proof.blocks = result.blocks;
  proof.discarded = result.discarded;
  proof.race_seconds = result.seconds;
  proof.pruned = static_cast<uint32_t>(planned.pruned.size());
  std::vector<Measurement> evidence = conclusion.evidence;
  AppendPruned(planned.pruned, kPrunedStored, &evidence);
  RETURN_IF_ERROR(
      state_.cache.PutPlan(state_.intervals[index].key, plan, evidence));
  row.plan = std::move(plan);
  return absl::OkStatus();
}

RaceStage::Budget& RaceStage::BudgetOf(size_t index) {
  const ResolvedInterval& resolved = state_.intervals[index];
  const auto [it, first] =
      budgets_.try_emplace(std::pair(resolved.context, resolved.geometry));
  if (first) {
    for (const size_t other : state_.missing) {
      it->second.intervals +=
          state_.intervals[other].context == resolved.context &&
          state_.intervals[other].geometry == resolved.geometry;
    }
    const double seconds = state_.options.race_seconds_max;
    it->second.seconds = seconds > 0
                             ? seconds
                             : kRaceSecondsPerInterval *
                                   static_cast<double>(it->second.intervals);
  }
  return it->second;
}

// What is left, over the intervals that are left.
double RaceStage::RaceSecondsFor(size_t index) {
  Budget& budget = BudgetOf(index);
  const size_t share = std::max<size_t>(1, budget.intervals);
  if (budget.intervals > 0) --budget.intervals;
  return std::max(0.0, budget.seconds) / static_cast<double>(share);
}

std::string RaceStage::Describe(size_t index) const {
  const ResolvedInterval& resolved = state_.intervals[index];
  return absl::StrCat(state_.contexts[resolved.context].target.ToString(), " ",
                      absl::StrJoin(resolved.names, ","),
                      " m<=", resolved.interval.m_max);
}

// "cpu-x86-64-v4 moe m<=8: 3/16 verified, best 12.3 us, fused_moe.cpu{...}".
std::string RaceStage::DescribeRace(const Lane& lane) const {
  std::string line = Describe(lane.index);
  if (!lane.name.empty()) line = absl::StrCat(lane.name, " ", line);
  const RaceJob* job = lane.racer->job();
  if (job == nullptr) return line;
  size_t known = 0;
  size_t left = 0;
  uint32_t blocks = 0;
  double best = std::numeric_limits<double>::infinity();
  if (const RaceResult* progress = lane.racer->progress()) {
    for (const Timing& timing : progress->timings) {
      if (timing.outcome != Outcome::kOpen) ++known;
      if (timing.outcome != Outcome::kFinished) continue;
      ++left;
      if (timing.samples.empty()) continue;
      best = std::min(best, MedianNs(timing.samples));
      blocks = std::max(blocks, timing.samples.back().block + 1);
    }
  }
  if (std::isfinite(best)) {
    absl::StrAppendFormat(&line, ": block %d, %d left, best %.1f us", blocks,
                          left, best / 1e3);
  } else {
    absl::StrAppendFormat(&line, ": %d/%d verified", known,
                          job->contenders.size());
  }
  if (const std::optional<size_t> turn = lane.racer->turn()) {
    absl::StrAppend(&line, ", ", job->contenders[*turn].body.Label());
  }
  return line;
}

void RaceStage::ShowProgress() {
  std::vector<std::string> lines;
  for (const std::unique_ptr<Lane>& lane : lanes_) {
    if (lane->racer->racing()) lines.push_back(DescribeRace(*lane));
  }
  state_.progress.Update(Stage::kRace, done_, state_.missing.size(),
                         absl::StrJoin(lines, " | "));
}

}  // namespace kiln
