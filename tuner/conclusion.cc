#include "tuner/conclusion.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/plan_key.h"
#include "tuner/cost_model.h"
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

bool IsFinished(const Measurement& measurement) {
  return measurement.verdict == Verdict::kWon ||
         measurement.verdict == Verdict::kLost;
}

std::vector<double> TimesNs(const std::vector<Measurement>& evidence) {
  std::vector<double> times;
  std::map<uint32_t, double> reference;  // ns by block
  double reference_ns = kNone;
  for (const Measurement& measurement : evidence) {
    if (reference.empty() && IsFinished(measurement)) {
      reference_ns = MedianNs(measurement);
      for (const Sample& sample : measurement.samples) {
        reference[sample.block] = sample.ns;
      }
    }
  }
  for (const Measurement& measurement : evidence) {
    std::vector<BlockTime> ratios;
    for (const Sample& sample : measurement.samples) {
      const auto pair = reference.find(sample.block);
      if (pair == reference.end() || !(pair->second > 0)) continue;
      ratios.push_back({sample.block, sample.ns / pair->second});
    }
    times.push_back(ratios.empty() ? MedianNs(measurement)
                                   : MedianNs(ratios) * reference_ns);
  }
  return times;
}

std::optional<size_t> WinnerOf(const std::vector<Measurement>& evidence,
                               double noise_floor) {
  const std::vector<double> times = TimesNs(evidence);
  std::vector<SelectionInput> inputs;
  for (size_t i = 0; i < evidence.size(); ++i) {
    const Measurement& measurement = evidence[i];
    inputs.push_back({.eligible = IsFinished(measurement),
                      .median_ns = times[i],
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
  conclusion.times_ns = TimesNs(conclusion.evidence);
  conclusion.winner = WinnerOf(conclusion.evidence, noise_floor);
  if (!conclusion.winner.has_value()) return conclusion;
  conclusion.evidence[*conclusion.winner].verdict = Verdict::kWon;
  // The verdict "won" instead of "lost" moves no time.
  const double best = conclusion.times_ns[*conclusion.winner];
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!conclusion.evidence[i].samples.empty()) {
      conclusion.evidence[i].regret = conclusion.times_ns[i] / best - 1;
    }
  }
  return conclusion;
}

void AppendPruned(const std::vector<PrunedCandidate>& pruned, size_t count,
                  std::vector<Measurement>* evidence) {
  for (const PrunedCandidate& candidate : pruned) {
    if (count-- == 0) break;
    Measurement out;
    out.label = candidate.label;
    out.candidate = candidate.body;
    out.numerics_class = candidate.numerics_class;
    out.arena_bytes = candidate.arena_bytes;
    out.verdict = Verdict::kRejected;
    out.reason = candidate.reason;
    out.worst_error = kNone;
    out.regret = kNone;
    evidence->push_back(std::move(out));
  }
}

bool IsPruned(const Measurement& measurement) {
  return measurement.verdict == Verdict::kRejected &&
         absl::StartsWith(measurement.reason, kPrunedPrefix);
}

absl::StatusOr<std::vector<ReplayedPlan>> ReplayPlans(PlanCache* cache) {
  std::vector<ReplayedPlan> replayed;
  ASSIGN_OR_RETURN(std::vector<StoredPlan> plans, cache->ListPlans());
  for (StoredPlan& stored : plans) {
    if (stored.plan.evidence.state != PlanState::kMeasured) continue;
    ReplayedPlan result;
    ASSIGN_OR_RETURN(result.plan.evidence,
                     cache->LoadMeasurements(stored.key.digest));
    const std::vector<Measurement>& evidence = result.plan.evidence;
    const std::optional<size_t> winner =
        WinnerOf(evidence, stored.plan.evidence.noise_floor);
    if (winner.has_value()) {
      result.derived = evidence[*winner].label;
      result.agrees = evidence[*winner].candidate ==
                      CandidateDigest(stored.plan.body, stored.plan.programs);
    }
    result.plan.stored = std::move(stored);
    replayed.push_back(std::move(result));
  }
  return replayed;
}

std::string VerdictText(const Measurement& measurement) {
  return IsPruned(measurement) ? "pruned"
                               : std::string(VerdictName(measurement.verdict));
}

std::string CeilingsKeyOf(const StoredPlan& stored) {
  return CeilingsKey(ContextOf(stored));
}

std::vector<std::vector<const MeasuredPlan*>> GroupByContext(
    const std::vector<const MeasuredPlan*>& plans) {
  // Text, not bytes, so that the order is one that people expect.
  std::map<std::tuple<std::string, RequestGeometry, std::string>,
           std::vector<const MeasuredPlan*>>
      groups;
  for (const MeasuredPlan* plan : plans) {
    std::string text;
    for (const CanonicalField& field : ContextOf(plan->stored)) {
      absl::StrAppend(&text, field.path, "=", field.value, "\n");
    }
    groups[{plan->stored.plan.target.ToString(), plan->stored.plan.geometry,
            std::move(text)}]
        .push_back(plan);
  }
  std::vector<std::vector<const MeasuredPlan*>> out;
  for (auto& [key, group] : groups) {
    std::sort(group.begin(), group.end(),
              [](const MeasuredPlan* a, const MeasuredPlan* b) {
                const Interval& x = a->stored.plan.interval;
                const Interval& y = b->stored.plan.interval;
                return std::tie(x.m_max, x.m_min, a->stored.key.digest) <
                       std::tie(y.m_max, y.m_min, b->stored.key.digest);
              });
    out.push_back(std::move(group));
  }
  return out;
}

std::vector<CanonicalField> ContextOf(const StoredPlan& stored) {
  const absl::StatusOr<CanonicalRecord> record =
      DecodeCanonical(stored.key.preimage);
  if (!record.ok()) return {{"key", stored.key.digest.ToHex()}};
  std::vector<CanonicalField> fields;
  for (const CanonicalField& field : record->fields) {
    if (absl::StartsWith(field.path, "interval/")) continue;
    fields.push_back(field);
  }
  return fields;
}

std::vector<std::string> WhatTellsApart(
    const std::vector<std::vector<const MeasuredPlan*>>& groups) {
  std::vector<std::vector<CanonicalField>> contexts;
  for (const auto& group : groups) {
    contexts.push_back(ContextOf(group.front()->stored));
  }
  const auto alike = [&](size_t i, size_t j) {
    const Plan& a = groups[i].front()->stored.plan;
    const Plan& b = groups[j].front()->stored.plan;
    return a.target == b.target && a.geometry == b.geometry;
  };
  std::vector<std::string> texts;
  for (size_t i = 0; i < groups.size(); ++i) {
    std::vector<std::string> own;
    for (const CanonicalField& field : contexts[i]) {
      const bool shared = [&] {
        for (size_t j = 0; j < groups.size(); ++j) {
          if (alike(i, j) && std::find(contexts[j].begin(), contexts[j].end(),
                                       field) == contexts[j].end()) {
            return false;
          }
        }
        return true;
      }();
      if (shared) continue;
      own.push_back(absl::StrCat(
          field.path, " ", field.value.empty() ? "(empty)" : field.value));
    }
    texts.push_back(absl::StrJoin(own, ", "));
  }
  return texts;
}

}  // namespace kiln
