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
#include "compiler/spec/plan.h"
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
};

// entries: in planned order; the first is the default.
Conclusion Conclude(const std::vector<RaceEntry>& entries, double noise_floor);

// The winner that the stored measurements of a race lead to, or nullopt.
std::optional<size_t> WinnerOf(const std::vector<Measurement>& evidence,
                               double noise_floor);

// Median of the samples in nanoseconds; NaN without samples.
double MedianNs(const Measurement& measurement);

// One stored plan, derived again.
struct ReplayedPlan {
  StoredPlan stored;
  std::string derived;  // label of the derived winner; empty when there is none
  bool agrees = false;
};

// Derives every measured plan of the cache again. Needs no device.
//   Errors: those of the cache.
absl::StatusOr<std::vector<ReplayedPlan>> ReplayPlans(PlanCache* cache);

}  // namespace kiln

#endif  // KILN_TUNER_CONCLUSION_H_
