// Capacity curve: adjacent intervals of one request that one plan may serve.
// A pure function of the stored samples: freezing and replaying agree.
//
// The plan of a merged interval is the winner of its largest capacity. It takes
// the place of the winners of smaller capacities where it was timed to the end
// there too and loses by no more than the regret cap. Of all ways to do that,
// the one with the fewest intervals is taken; of these, the one with the least
// regret in all.

#ifndef KILN_TUNER_CAPACITY_CURVE_H_
#define KILN_TUNER_CAPACITY_CURVE_H_

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "cache/records.h"
#include "compiler/spec/plan.h"

namespace kiln {

// Loss that merging may cost, as a fraction of a winner's time.
inline constexpr double kRegretCap = 0.01;

// One interval as it was raced.
struct CurvePoint {
  Interval interval;
  std::string winner;  // label
  // Of the plans that were timed to the end, by label: time / winner's - 1.
  std::map<std::string, double> regrets;
};

// The point of a stored plan. A predicted plan has no regrets and is never
// merged.
CurvePoint CurvePointOf(const Plan& plan,
                        const std::vector<Measurement>& evidence);

// Points first..last, served by the plan of the last.
struct CurveSegment {
  size_t first = 0;
  size_t last = 0;
  double regret = 0;  // largest of its points

  bool operator==(const CurveSegment&) const = default;
};

// Segments in order; each point is in exactly one. Points must be in order of
// their intervals; where these do not touch, nothing is merged.
//   regret_cap: at least 0; 0 merges what has the same winner.
std::vector<CurveSegment> MergeIntervals(absl::Span<const CurvePoint> points,
                                         double regret_cap);

}  // namespace kiln

#endif  // KILN_TUNER_CAPACITY_CURVE_H_
