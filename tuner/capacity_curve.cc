#include "tuner/capacity_curve.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "tuner/conclusion.h"

namespace kiln {

CurvePoint CurvePointOf(const Plan& plan,
                        const std::vector<Measurement>& evidence) {
  CurvePoint point;
  point.interval = plan.interval;
  point.winner = plan.body.Label();
  if (plan.evidence.state != PlanState::kMeasured) return point;
  const std::vector<double> times = TimesNs(evidence);
  double best = 0;
  for (size_t i = 0; i < evidence.size(); ++i) {
    if (evidence[i].label == point.winner && IsFinished(evidence[i])) {
      best = times[i];
    }
  }
  if (!(best > 0)) return point;
  for (size_t i = 0; i < evidence.size(); ++i) {
    if (!IsFinished(evidence[i]) || !std::isfinite(times[i])) continue;
    // What ties with the winner may have been faster.
    point.regrets[evidence[i].label] = std::max(0.0, times[i] / best - 1);
  }
  return point;
}

std::vector<CurveSegment> MergeIntervals(absl::Span<const CurvePoint> points,
                                         double regret_cap) {
  // best[n]: of all ways to split the first n points, fewest segments, then
  // least regret.
  struct Split {
    size_t segments = 0;
    double regret = 0;
    CurveSegment last;
  };

  std::vector<Split> best(points.size() + 1);
  for (size_t end = 0; end < points.size(); ++end) {
    Split& chosen = best[end + 1];
    double sum = 0;
    double largest = 0;
    for (size_t first = end + 1; first-- > 0;) {
      if (first < end) {
        const bool touches = points[first].interval.m_max + 1 ==
                             points[first + 1].interval.m_min;
        const auto regret = points[first].regrets.find(points[end].winner);
        // A plan that never ran has no samples to go by.
        if (!touches || points[end].regrets.empty() ||
            regret == points[first].regrets.end() ||
            !(regret->second <= regret_cap)) {
          break;
        }
        sum += regret->second;
        largest = std::max(largest, regret->second);
      }
      const Split split = {best[first].segments + 1,
                           best[first].regret + sum,
                           {first, end, largest}};
      if (chosen.segments == 0 ||
          std::tie(split.segments, split.regret) <
              std::tie(chosen.segments, chosen.regret)) {
        chosen = split;
      }
    }
  }
  std::vector<CurveSegment> segments;
  for (size_t end = points.size(); end > 0;) {
    segments.push_back(best[end].last);
    end = best[end].last.first;
  }
  std::reverse(segments.begin(), segments.end());
  return segments;
}

}  // namespace kiln
