// Report: the measured plans of a cache -> one HTML page that a browser shows
// without network, script or any other file. Pure: equal input gives equal
// bytes; the page says when and on what the plans were made, not when or where
// it was rendered, and names no host.

#ifndef KILN_TUNER_REPORT_H_
#define KILN_TUNER_REPORT_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cache/plan_cache.h"
#include "cache/records.h"
#include "compiler/spec/target.h"

namespace kiln {

// A measured plan with all that entered its race.
struct ReportPlan {
  StoredPlan stored;
  std::vector<Measurement> evidence;  // in stored order: the default is first
};

struct ReportInput {
  std::vector<ReportPlan> plans;  // in any order
  size_t predicted = 0;           // plans left out because they never ran
  std::vector<Target> targets;    // that the plans were limited to; empty = all
};

// The page: valid HTML that is also well-formed XML. Plans that can be compared
// (equal geometry, target, device, compiler and candidates) share a chart.
std::string RenderReport(const ReportInput& input);

// Text as it may stand in an element or a quoted attribute. What XML cannot
// carry (control characters, bytes that are no UTF-8) becomes U+FFFD.
std::string EscapeMarkup(absl::string_view text);

// The measured plans for `targets` (all when empty) and their evidence.
//   Errors: those of the cache, damaged evidence included.
absl::StatusOr<ReportInput> LoadReport(PlanCache* cache,
                                       absl::Span<const Target> targets);

}  // namespace kiln

#endif  // KILN_TUNER_REPORT_H_
