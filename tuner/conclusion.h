// Conclude: what a race found out -> evidence and winner. Pure. The winner is
// derived from the evidence in the form in which it is stored, so replaying a
// stored race cannot come to another one.

#ifndef KILN_TUNER_CONCLUSION_H_
#define KILN_TUNER_CONCLUSION_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cache/plan_cache.h"
#include "cache/records.h"
#include "compiler/base/digest.h"
#include "compiler/spec/plan.h"
#include "tuner/planner.h"
#include "tuner/racer.h"

namespace kiln {

// One candidate of an interval, and how far it came.
struct RaceEntry {
  const PlanBody* body = nullptr;
  Digest digest;           // CandidateDigest
  uint32_t registers = 0;  // largest of its kernels
  // Absent when it could not enter; `problem` then says why.
  std::optional<Timing> timing;
  std::string problem;
};

struct Conclusion {
  std::optional<size_t> winner;       // index of the entries
  std::vector<Measurement> evidence;  // of each entry, in their order
  std::vector<double> times_ns;       // TimesNs(evidence)
};

// entries: in planned order; the first is the default.
Conclusion Conclude(const std::vector<RaceEntry>& entries, double noise_floor);

// Adds the candidates that were left out of a race: the first `count` with
// their reasons, which start with kPrunedPrefix. They never change a winner.
void AppendPruned(const std::vector<PrunedCandidate>& pruned, size_t count,
                  std::vector<Measurement>* evidence);

// Whether it was left out of its race by the planner.
bool IsPruned(const Measurement& measurement);

// VerdictName, or "pruned".
std::string VerdictText(const Measurement& measurement);

// CeilingsKey of the device that a stored plan is for.
std::string CeilingsKeyOf(const StoredPlan& stored);

// The winner that the stored measurements of a race lead to, or nullopt.
std::optional<size_t> WinnerOf(const std::vector<Measurement>& evidence,
                               double noise_floor);

// Median of the samples in nanoseconds; NaN without samples.
double MedianNs(const Measurement& measurement);

// Whether it was right and timed to the end, so that it may win.
bool IsFinished(const Measurement& measurement);

// Time of each candidate of a race in nanoseconds; NaN for what was not timed.
// Of the reference, the first that finished, the median of its samples; of the
// others, that times the median of their ratios to the reference in the blocks
// that both were in. Drift between blocks, and between those of early and late
// batches, thus cancels.
std::vector<double> TimesNs(const std::vector<Measurement>& evidence);

// A measured plan with all that entered its race.
struct MeasuredPlan {
  StoredPlan stored;
  std::vector<Measurement> evidence;  // in stored order: the default is first
};

// One stored plan, derived again.
struct ReplayedPlan {
  MeasuredPlan plan;
  std::string derived;  // label of the derived winner; empty when there is none
  bool agrees = false;
};

// Derives every measured plan of the cache again. Needs no device.
//   Errors: those of the cache.
absl::StatusOr<std::vector<ReplayedPlan>> ReplayPlans(PlanCache* cache);

// Plans that lie on one capacity curve: equal target, geometry and ContextOf.
// Groups are in the order that people expect, plans in that of their intervals.
std::vector<std::vector<const MeasuredPlan*>> GroupByContext(
    const std::vector<const MeasuredPlan*>& plans);

// What a stored plan's key holds besides its interval: plans with equal fields
// lie on one capacity curve. A key that cannot be read stands alone.
std::vector<CanonicalField> ContextOf(const StoredPlan& stored);

// Of each group of GroupByContext, the fields that a group of the same target
// and geometry has not: "candidates/limit 6, candidates/warm_l2 true"; empty
// where it stands alone.
std::vector<std::string> WhatTellsApart(
    const std::vector<std::vector<const MeasuredPlan*>>& groups);

}  // namespace kiln

#endif  // KILN_TUNER_CONCLUSION_H_
