#include "tuner/recheck.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/status_macros.h"
#include "tuner/conclusion.h"
#include "tuner/op_bench.h"
#include "tuner/racer.h"
#include "tuner/selection.h"

namespace kiln {
namespace {

// Added to the seed of the race: other weights, tokens and routes.
constexpr uint64_t kOtherSeed = 0x9E3779B97F4A7C15u;
constexpr uint32_t kBlocks = 20;

absl::StatusOr<Contender> MakeContender(PlanBody body,
                                        const std::vector<Digest>& programs,
                                        PlanCache* cache) {
  Contender contender;
  contender.digest = CandidateDigest(body, programs);
  contender.body = std::move(body);
  ASSIGN_OR_RETURN(std::vector<std::optional<Program>> found,
                   cache->FindPrograms(programs));
  for (size_t i = 0; i < programs.size(); ++i) {
    if (!found[i].has_value()) {
      return absl::UnavailableError(absl::StrCat(
          "program ", programs[i].Short(), " of ", contender.body.Label(),
          " is not in the cache; run kiln prewarm again"));
    }
    contender.programs.push_back(
        std::make_shared<const Program>(*std::move(found[i])));
  }
  return contender;
}

}  // namespace

absl::StatusOr<RecheckReport> Recheck(const Manifest& manifest,
                                      const PrewarmOptions& options,
                                      PlanCache* cache,
                                      ProgressSink* progress) {
  ASSIGN_OR_RETURN(const ResolvedManifest resolved,
                   ResolveManifest(manifest, options, cache));
  RecheckReport report;
  std::unique_ptr<Device> device;
  std::unique_ptr<OpBench> bench;
  size_t open_context = resolved.contexts.size();
  for (size_t i = 0; i < resolved.intervals.size(); ++i) {
    const ResolvedInterval& interval = resolved.intervals[i];
    const TargetContext& context = resolved.contexts[interval.context];
    ASSIGN_OR_RETURN(std::optional<StoredPlan> stored,
                     cache->FindPlan(interval.key.digest));
    if (!stored.has_value() || context.profile.assumed ||
        stored->plan.evidence.state != PlanState::kMeasured) {
      ++report.skipped;
      continue;
    }
    ASSIGN_OR_RETURN(IntervalPlan plan,
                     interval.planner->Plan(interval.interval));
    PlannedCandidate& standard = plan.candidates.front();
    std::vector<Digest> programs;
    for (const ProgramKey& key : standard.programs) {
      programs.push_back(key.digest);
    }
    ASSIGN_OR_RETURN(const std::vector<Measurement> evidence,
                     cache->LoadMeasurements(interval.key.digest));
    const bool has_default = !evidence.empty() &&
                             evidence.front().candidate == standard.digest &&
                             IsFinished(evidence.front());
    if (!has_default ||
        standard.digest ==
            CandidateDigest(stored->plan.body, stored->plan.programs)) {
      // A default that was wrong is no comparison.
      ++report.same;
      continue;
    }
    std::vector<Contender> contenders;
    ASSIGN_OR_RETURN(Contender first,
                     MakeContender(standard.body, programs, cache));
    ASSIGN_OR_RETURN(
        Contender second,
        MakeContender(stored->plan.body, stored->plan.programs, cache));
    contenders.push_back(std::move(first));
    contenders.push_back(std::move(second));
    if (interval.context != open_context) {
      bench.reset();
      if (context.target.backend == Backend::kCpu) {
        ASSIGN_OR_RETURN(device, OpenCpuDevice(context.target));
      } else {
        ASSIGN_OR_RETURN(device, OpenCudaDevice(options.device_ordinals.front(),
                                                context.target));
      }
      open_context = interval.context;
    }
    if (bench == nullptr || bench->geometry() != interval.geometry) {
      bench.reset();
      ASSIGN_OR_RETURN(bench, OpBench::Create(device.get(), interval.geometry,
                                              options.seed + kOtherSeed));
    }
    RaceOptions race;
    race.seconds_max = kRaceSecondsPerInterval;
    race.warm_l2 = options.warm_l2;
    race.oracle_threads =
        std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    // A measurement, not a search: it does not end early.
    race.schedule.blocks_min = kBlocks;
    race.schedule.blocks_max = kBlocks;
    race.schedule.blocks_unsettled_max = kBlocks;
    ASSIGN_OR_RETURN(const RaceResult result,
                     Race(bench.get(), interval.interval, contenders, race));
    for (size_t c = 0; c < contenders.size(); ++c) {
      if (result.timings[c].outcome != Outcome::kRejected) continue;
      return absl::InternalError(
          absl::StrCat(contenders[c].body.Label(),
                       " is wrong on new inputs: ", result.timings[c].reason));
    }
    std::vector<RaceEntry> entries(2);
    for (size_t c = 0; c < 2; ++c) {
      entries[c].body = &contenders[c].body;
      entries[c].digest = contenders[c].digest;
      entries[c].timing = result.timings[c];
    }
    const Conclusion conclusion = Conclude(entries, result.noise_floor);
    RecheckedInterval row;
    row.target = context.target;
    row.names = interval.names;
    row.interval = interval.interval;
    row.winner = stored->plan.body.Label();
    // Equal code is equally fast; it was not timed twice.
    if (result.timings[1].outcome != Outcome::kIdentical) {
      row.ratio = conclusion.times_ns[1] / conclusion.times_ns[0];
    }
    row.margin = SelectionMargin(result.noise_floor);
    row.slower = row.ratio > 1 + row.margin;
    report.slower += row.slower;
    progress->Update(Stage::kRace, i + 1, resolved.intervals.size(),
                     absl::StrCat("recheck ", absl::StrJoin(row.names, ","),
                                  " m<=", row.interval.m_max));
    report.intervals.push_back(std::move(row));
  }
  return report;
}

}  // namespace kiln
