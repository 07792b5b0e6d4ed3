// Why a stored plan does not apply: the fields of two measure keys side by
// side. Nothing here chooses a plan; a key that differs is a miss.

#ifndef KILN_TUNER_EXPLAIN_H_
#define KILN_TUNER_EXPLAIN_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache/plan_cache.h"
#include "compiler/spec/plan_key.h"

namespace kiln {

// One field of two pre-images; a side without the field is nullopt.
struct FieldDifference {
  std::string path;  // "device/driver"
  std::optional<std::string> stored;
  std::optional<std::string> wanted;

  bool operator==(const FieldDifference&) const = default;
};

// The fields that differ, in the order of `wanted`, then those that only
// `stored` has. A path that occurs repeatedly is compared by occurrence.
//   Errors: DataLoss unless both are CanonicalEncoder bytes.
absl::StatusOr<std::vector<FieldDifference>> CompareKeys(
    absl::string_view stored, absl::string_view wanted);

struct NearestPlan {
  StoredPlan stored;
  std::vector<FieldDifference> differences;
};

// The stored plan whose key differs from `wanted` in the fewest fields; the
// lower key among equals. Absent when the cache has no plan.
absl::StatusOr<std::optional<NearestPlan>> FindNearestPlan(
    const PlanKey& wanted, PlanCache* cache);

}  // namespace kiln

#endif  // KILN_TUNER_EXPLAIN_H_
