// FindStoredPlans: which stored plan answers each interval when nothing may be
// made anew, as for freeze.

#ifndef KILN_TUNER_STORED_PLANS_H_
#define KILN_TUNER_STORED_PLANS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cache/plan_cache.h"
#include "compiler/spec/plan.h"
#include "tuner/prewarm.h"

namespace kiln {

// "moe m 3..4 on sm_90a", for messages.
std::string IntervalName(const ResolvedInterval& resolved,
                         const Target& target);

// The plan of each interval, in their order. A machine that has the device of a
// target takes the plans that were measured on such a device. A machine without
// it (a build host with a cache from elsewhere) takes the measured plans if all
// intervals of the target have one from the same kind of device, and otherwise
// the predicted ones. Every field of the key must match either way, but for the
// device and the balance that a measurement of it adds: of several balances
// that of the cache's ceilings counts.
//   measured_elsewhere: false never takes plans of a device that is not here.
//   Errors: NotFound when an interval has no plan, naming it, why, and what to
//   do (MissingPlan::Advice); FailedPrecondition when several kinds of devices,
//   or balances of one, could answer, naming them.
absl::StatusOr<std::vector<StoredPlan>> FindStoredPlans(
    const std::vector<ResolvedInterval>& intervals,
    const std::vector<TargetContext>& contexts, bool measured_elsewhere,
    PlanCache* cache);

}  // namespace kiln

#endif  // KILN_TUNER_STORED_PLANS_H_
