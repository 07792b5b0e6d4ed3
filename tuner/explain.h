// Why an interval has no plan: its candidates were rejected, or the stored
// plans are for other keys, whose fields are shown side by side. Nothing here
// chooses a plan; a key that differs is a miss.

#ifndef KILN_TUNER_EXPLAIN_H_
#define KILN_TUNER_EXPLAIN_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache/plan_cache.h"
#include "compiler/spec/plan_key.h"
#include "tuner/prewarm.h"

namespace kiln {

// The field of a key that holds Ceilings::Balance.
inline constexpr absl::string_view kBalanceField = "candidates/balance";

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

// A candidate that failed, as the cache remembers.
struct RejectedCandidate {
  std::string label;  // PlanBody::Label()
  RejectStage stage = RejectStage::kCompile;
  std::string reason;
};

// What the cache knows of an interval that has no plan under its key.
struct MissingPlan {
  size_t candidates = 0;  // that compete for it
  std::vector<RejectedCandidate> rejected;
  // Why none competes; empty when some do.
  std::string no_candidate;
  std::optional<NearestPlan> nearest;

  // Every candidate failed, so that another race decides nothing.
  bool AllRejected() const;
  // Plans of this device are stored, but they went by another measurement of
  // it: this field of the key alone differs. Null otherwise.
  const FieldDifference* OtherBalance() const;
  // What is so and what to do, without a stop at the end: "run kiln prewarm
  // with the same manifest, target and limits first".
  std::string Advice() const;
};

absl::StatusOr<MissingPlan> ExplainMissing(const ResolvedInterval& resolved,
                                           PlanCache* cache);

}  // namespace kiln

#endif  // KILN_TUNER_EXPLAIN_H_
