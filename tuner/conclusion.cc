#include "tuner/conclusion.h"

#include <limits>
#include <utility>

#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/plan_key.h"
#include "tuner/selection.h"

namespace kiln {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();

// Evidence of one entry; who won is not known yet.
Measurement MeasurementOf(const RaceEntry& entry) {
  Measurement out;
  out.label = entry.body->Label();
  out.candidate = entry.digest;
  out.numerics_class = entry.body->numerics_class;
  out.arena_bytes = entry.body->arena.bytes;
  out.registers = entry.registers;
  out.regret = kNone;
  if (!entry.timing.has_value()) {
    out.verdict = Verdict::kRejected;
    out.reason = entry.problem;
    out.worst_error = kNone;
    return out;
  }
  const Timing& timing = *entry.timing;
  out.reason = timing.reason;
  out.worst_error = timing.worst_error;
  for (const BlockTime& sample : timing.samples) {
    out.samples.push_back({sample.block, sample.ns});
  }
  switch (timing.outcome) {
    case Outcome::kFinished:
      out.verdict = Verdict::kLost;
      break;
    case Outcome::kEliminated:
      out.verdict = Verdict::kEliminated;
      break;
    case Outcome::kIdentical:
      out.verdict = Verdict::kIdentical;
      out.worst_error = kNone;
      break;
    case Outcome::kOpen:
    case Outcome::kRejected:
      out.verdict = Verdict::kRejected;
      break;
  }
  return out;
}

}  // namespace

double MedianNs(const Measurement& measurement) {
  std::vector<BlockTime> samples;
  for (const Sample& sample : measurement.samples) {
    samples.push_back({sample.block, sample.ns});
  }
  return MedianNs(samples);
}

std::optional<size_t> WinnerOf(const std::vector<Measurement>& evidence,
                               double noise_floor) {
  std::vector<SelectionInput> inputs;
  for (const Measurement& measurement : evidence) {
    inputs.push_back({.eligible = measurement.verdict == Verdict::kWon ||
                                  measurement.verdict == Verdict::kLost,
                      .median_ns = MedianNs(measurement),
                      .numerics_class = measurement.numerics_class,
                      .arena_bytes = measurement.arena_bytes,
                      .registers = measurement.registers,
                      .key = measurement.candidate});
  }
  return SelectWinner(inputs, noise_floor);
}

Conclusion Conclude(const std::vector<RaceEntry>& entries, double noise_floor) {
  Conclusion conclusion;
  for (const RaceEntry& entry : entries) {
    conclusion.evidence.push_back(MeasurementOf(entry));
  }
  conclusion.winner = WinnerOf(conclusion.evidence, noise_floor);
  if (!conclusion.winner.has_value()) return conclusion;
  Measurement& winner = conclusion.evidence[*conclusion.winner];
  winner.verdict = Verdict::kWon;
  const double best = MedianNs(winner);
  for (Measurement& measurement : conclusion.evidence) {
    if (!measurement.samples.empty()) {
      measurement.regret = MedianNs(measurement) / best - 1;
    }
  }
  return conclusion;
}

absl::StatusOr<std::vector<ReplayedPlan>> ReplayPlans(PlanCache* cache) {
  std::vector<ReplayedPlan> replayed;
  ASSIGN_OR_RETURN(std::vector<StoredPlan> plans, cache->ListPlans());
  for (StoredPlan& stored : plans) {
    if (stored.plan.evidence.state != PlanState::kMeasured) continue;
    ASSIGN_OR_RETURN(const std::vector<Measurement> evidence,
                     cache->LoadMeasurements(stored.key.digest));
    const std::optional<size_t> winner =
        WinnerOf(evidence, stored.plan.evidence.noise_floor);
    ReplayedPlan result;
    if (winner.has_value()) {
      result.derived = evidence[*winner].label;
      result.agrees = evidence[*winner].candidate ==
                      CandidateDigest(stored.plan.body, stored.plan.programs);
    }
    result.stored = std::move(stored);
    replayed.push_back(std::move(result));
  }
  return replayed;
}

}  // namespace kiln
