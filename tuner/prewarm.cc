#include "tuner/prewarm.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/compile_pool.h"
#include "tuner/prewarm_state.h"
#include "tuner/race_stage.h"

namespace kiln {
namespace {

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

// Programs claimed at once, per worker: enough to keep workers busy, few enough
// that other processes on the same cache find work too.
constexpr size_t kClaimedPerWorker = 8;
constexpr size_t kClaimedMin = 32;

// One program that is missing, and how to make it.
struct PendingProgram {
  ProgramKey key;
  size_t context = 0;
  CompileJob job;
};

class Session {
 public:
  Session(const PrewarmOptions& options, PlanCache* cache,
          ProgressSink* progress)
      : state_(options, cache, progress), race_(&state_) {}

  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

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
    for (const std::string& note : NotesOnIdle(options_.attached, resolved)) {
      progress_.Note(note);
    }
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

  absl::Status LookUp() {
    const StageTimer timer(Stage::kLookUp, &report_);
    std::vector<Digest> keys;
    for (const ResolvedInterval& resolved : intervals_) {
      keys.push_back(resolved.key.digest);
    }
    ASSIGN_OR_RETURN(const std::vector<std::optional<StoredPlan>> stored,
                     cache_.FindPlans(keys));
    // With all of their programs.
    ASSIGN_OR_RETURN(const std::vector<bool> complete,
                     cache_.ContainsPlans(keys));
    std::vector<Digest> used;
    for (size_t i = 0; i < stored.size(); ++i) {
      if (!stored[i].has_value() || !complete[i] ||
          !state_.Answers(stored[i]->plan, state_.ContextOf(i))) {
        missing_.push_back(i);
        continue;
      }
      IntervalReport& row = report_.intervals[i];
      row.plan = stored[i]->plan;
      row.candidates = stored[i]->plan.evidence.candidates;
      row.reused = true;
      used.push_back(keys[i]);
    }
    // Costs nothing but that garbage collection may take them for unused.
    cache_.NoteUse(used).IgnoreError();
    state_.TakeWarnings();
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
    ASSIGN_OR_RETURN(pending, StoreAttached(std::move(pending)));
    if (pending.empty()) return absl::OkStatus();
    if (!options_.stop_after.has_value()) RETURN_IF_ERROR(race_.Begin());
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
      ASSIGN_OR_RETURN(const std::vector<bool> claimed,
                       claims_.Claim(keys, batch_max));
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
      PrewarmState::Wait(look.Seconds());
    }
    report_.compile_cpu_seconds += pool.stats().compile_seconds;
    return absl::OkStatus();
  }

  // Stores the binaries that packages brought; returns what is to be compiled.
  absl::StatusOr<std::vector<PendingProgram>> StoreAttached(
      std::vector<PendingProgram> pending) {
    std::vector<PendingProgram> open;
    std::vector<Program> programs;
    for (PendingProgram& program : pending) {
      if (program.job.unit.binary.empty()) {
        open.push_back(std::move(program));
        continue;
      }
      CompileResult result;
      result.binary = program.job.unit.binary;
      ASSIGN_OR_RETURN(
          Program made,
          MakeProgram(program.job, contexts_[program.context].setup.toolchain,
                      std::move(result)));
      programs.push_back(std::move(made));
    }
    if (programs.empty()) return open;
    RETURN_IF_ERROR(cache_.PutPrograms(programs, {}));
    report_.programs_attached += programs.size();
    return open;
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
      claims_.Renew();
      race_.WarmUp();
      return false;
    };
    RETURN_IF_ERROR(pool->Run(jobs, callbacks).status());
    // What was stored is no longer claimed; a compile that was killed is.
    claims_.Release(keys);
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
        state_.unfinished.insert(program.key.digest);
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
    const Stopwatch watch;
    RETURN_IF_ERROR(cache_.PutPrograms(programs, rejects));
    report_.publish_seconds += watch.Seconds();
    if (!programs.empty() || !rejects.empty()) ++report_.publish_transactions;
    for (const Program& program : programs) claims_.Forget(program.key.digest);
    for (const Reject& reject : rejects) claims_.Forget(reject.key);
    return absl::OkStatus();
  }

  absl::Status Race() {
    const StageTimer timer(Stage::kRace, &report_);
    return race_.Run();
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

  PrewarmState state_;
  RaceStage race_;
  const PrewarmOptions& options_ = state_.options;
  PlanCache& cache_ = state_.cache;
  ProgressSink& progress_ = state_.progress;
  PrewarmReport& report_ = state_.report;
  std::vector<TargetContext>& contexts_ = state_.contexts;
  std::vector<ResolvedInterval>& intervals_ = state_.intervals;
  std::vector<size_t>& missing_ = state_.missing;
  std::map<size_t, IntervalPlan>& plans_ = state_.plans;
  std::map<Digest, std::string>& rejected_programs_ = state_.rejected_programs;
  Claims& claims_ = state_.claims;
};

}  // namespace

namespace {

// A processor below the target's level is no device for it.
absl::StatusOr<std::vector<DeviceProfile>> FindCpu(const Target& target) {
  const absl::StatusOr<DeviceProfile> profile = HostCpuProfile(target);
  if (!profile.ok()) return std::vector<DeviceProfile>();
  return std::vector<DeviceProfile>{*profile};
}

std::optional<Ceilings> CeilingsUnder(const std::string& key,
                                      PlanCache* cache) {
  const absl::StatusOr<std::optional<std::string>> memo = cache->FindMemo(key);
  if (!memo.ok() || !memo->has_value()) return std::nullopt;
  absl::StatusOr<Ceilings> ceilings = CeilingsFromJson(**memo);
  return ceilings.ok() ? std::optional(*std::move(ceilings)) : std::nullopt;
}

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

absl::StatusOr<std::vector<DeviceProfile>> ChooseGpus(
    const std::vector<DeviceProfile>& devices, const Target& target,
    const std::vector<int>& ordinals) {
  std::vector<DeviceProfile> found;
  if (devices.empty()) return found;
  for (const int ordinal : ordinals) {
    if (static_cast<size_t>(ordinal) >= devices.size()) {
      return absl::FailedPreconditionError(
          absl::StrCat("GPU ", ordinal, " does not exist: the driver lists ",
                       devices.size(), ", numbered from 0"));
    }
    const DeviceProfile& device = devices[static_cast<size_t>(ordinal)];
    const DeviceProfile& first = devices[static_cast<size_t>(ordinals.front())];
    if (MeasureIdentity(device) != MeasureIdentity(first)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "GPU ", ordinals.front(), " (", first.Describe(), ") and GPU ",
          ordinal, " (", device.Describe(),
          ") are not alike, so their winners may differ: race on each kind "
          "of device in a run of its own"));
    }
    const absl::StatusOr<DeviceProfile> profile =
        ProfileForTarget(device, target);
    // A target that these devices do not run is compiled and predicted.
    if (!profile.ok()) return std::vector<DeviceProfile>();
    found.push_back(*profile);
  }
  return found;
}

absl::StatusOr<TargetContext> ResolveTarget(const Target& target,
                                            const PrewarmOptions& options,
                                            PlanCache* cache) {
  TargetContext context;
  context.target = target;
  context.profile = AssumedProfile(target);
  if (!options.compile_only) {
    ASSIGN_OR_RETURN(
        context.devices,
        target.backend == Backend::kCpu
            ? FindCpu(target)
            : ChooseGpus(ListCudaDevices(), target, options.device_ordinals));
    if (!context.devices.empty()) context.profile = context.devices.front();
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
  context.ceilings = FindCeilings(context.profile, cache);
  return context;
}

std::optional<Ceilings> FindCeilings(const DeviceProfile& device,
                                     PlanCache* cache) {
  return CeilingsUnder(CeilingsKey(device), cache);
}

std::optional<Ceilings> FindCeilings(const std::vector<CanonicalField>& fields,
                                     PlanCache* cache) {
  return CeilingsUnder(CeilingsKey(fields), cache);
}

absl::StatusOr<std::vector<ResolvedInterval>> ResolveIntervals(
    const std::vector<PlannedRequest>& requests,
    const std::vector<TargetContext>& contexts, const PrewarmOptions& options) {
  std::vector<ResolvedInterval> resolved;
  for (size_t index = 0; index < contexts.size(); ++index) {
    const TargetContext& context = contexts[index];
    PlannerOptions planning;
    planning.candidates_max =
        options.candidates_max > 0
            ? options.candidates_max
            : DefaultCandidatesMax(context.target.backend);
    planning.arena_bytes_max = options.arena_bytes_max;
    planning.ceilings = context.ceilings;
    planning.warm_l2 = options.warm_l2;
    planning.attached = options.attached;
    for (const PlannedRequest& request : requests) {
      planning.numerics.clear();
      if (options.keep_numerics.has_value()) {
        for (const Interval& interval : request.intervals) {
          ASSIGN_OR_RETURN(
              planning.numerics[interval],
              options.keep_numerics->ClassOf(context.target, request.names,
                                             request.geometry, interval));
        }
      }
      const auto planner = std::make_shared<Planner>(
          request.geometry, context.profile, context.setup.toolchain, planning);
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
  RETURN_IF_ERROR(CheckOpsServed(manifest, options.targets, options.attached));
  ASSIGN_OR_RETURN(const std::vector<PlannedRequest> requests,
                   Canonicalize(manifest, options.capacity_max));
  ResolvedManifest resolved;
  for (const Target& target : options.targets) {
    ASSIGN_OR_RETURN(TargetContext context,
                     ResolveTarget(target, options, cache));
    resolved.contexts.push_back(std::move(context));
  }
  ASSIGN_OR_RETURN(resolved.intervals,
                   ResolveIntervals(requests, resolved.contexts, options));
  return resolved;
}

std::vector<std::string> NotesOnIdle(const AttachedTemplates& attached,
                                     const ResolvedManifest& resolved) {
  constexpr size_t kReasonsMax = 3;
  std::vector<std::string> notes;
  for (const auto& from : attached) {
    const absl::string_view name = from->name();
    const std::string package =
        absl::StrCat("package ", name.substr(0, name.find('@')));
    std::set<std::string> seen;
    std::vector<std::string> reasons;  // each with the first interval it is of
    bool idle = true;
    for (const ResolvedInterval& interval : resolved.intervals) {
      const std::vector<std::string> why =
          interval.planner->WhyIdle(*from, interval.interval);
      idle = idle && !why.empty();
      if (!idle) break;
      for (absl::string_view reason : why) {
        // The line begins with the name.
        if (absl::ConsumePrefix(&reason, package)) {
          absl::ConsumePrefix(&reason, ",");
        }
        reason = absl::StripLeadingAsciiWhitespace(reason);
        if (!seen.insert(std::string(reason)).second) continue;
        reasons.push_back(absl::StrCat(
            reason, " (", absl::StrJoin(interval.names, ","), " m ",
            interval.interval.m_min, "..", interval.interval.m_max, " on ",
            resolved.contexts[interval.context].target.ToString(), ")"));
      }
    }
    if (!idle) continue;
    const size_t shown = std::min(reasons.size(), kReasonsMax);
    const size_t more = reasons.size() - shown;
    reasons.resize(shown);
    notes.push_back(absl::StrCat(
        package,
        " offers no candidate to any request: ", absl::StrJoin(reasons, "; "),
        more == 0 ? "" : absl::StrCat("; and ", more, " more")));
  }
  return notes;
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
