// Report: the measured plans of a cache -> one HTML page that a browser shows
// without network, script or any other file. Pure: equal input gives equal
// bytes; the page says when and on what the plans were made, not when or where
// it was rendered, and names no host.

#ifndef KILN_TUNER_REPORT_H_
#define KILN_TUNER_REPORT_H_

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cache/plan_cache.h"
#include "cache/records.h"
#include "compiler/spec/target.h"
#include "tuner/ceilings.h"
#include "tuner/conclusion.h"

namespace kiln {

struct ReportInput {
  std::vector<MeasuredPlan> plans;  // in any order
  size_t predicted = 0;             // plans left out because they never ran
  std::vector<Target> targets;  // that the plans were limited to; empty = all
  // Of the plans' devices, by CeilingsKeyOf; where absent, no floor is shown.
  std::map<std::string, Ceilings> ceilings;
};

// The page: valid HTML that is also well-formed XML. Plans that can be compared
// (equal geometry, target, device, compiler and candidates) share a chart.
std::string RenderReport(const ReportInput& input);

// The measured plans for `targets` (all when empty) and their evidence.
//   Errors: those of the cache, damaged evidence included.
absl::StatusOr<ReportInput> LoadReport(PlanCache* cache,
                                       absl::Span<const Target> targets);

}  // namespace kiln

#endif  // KILN_TUNER_REPORT_H_
