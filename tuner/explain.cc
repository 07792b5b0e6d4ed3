#include "tuner/explain.h"

#include <map>
#include <utility>

#include "compiler/base/digest.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

// A path with its occurrence.
using FieldId = std::pair<std::string, int>;

std::vector<std::pair<FieldId, std::string>> Number(
    const CanonicalRecord& record) {
  std::vector<std::pair<FieldId, std::string>> fields;
  std::map<std::string, int> seen;
  fields.push_back({{"domain", 0}, record.domain});
  for (const CanonicalField& field : record.fields) {
    fields.push_back({{field.path, ++seen[field.path]}, field.value});
  }
  return fields;
}

}  // namespace

absl::StatusOr<std::vector<FieldDifference>> CompareKeys(
    absl::string_view stored, absl::string_view wanted) {
  ASSIGN_OR_RETURN(const CanonicalRecord stored_record,
                   DecodeCanonical(stored));
  ASSIGN_OR_RETURN(const CanonicalRecord wanted_record,
                   DecodeCanonical(wanted));
  const auto stored_fields = Number(stored_record);
  std::map<FieldId, std::string> left(stored_fields.begin(),
                                      stored_fields.end());
  std::vector<FieldDifference> differences;
  for (const auto& [id, value] : Number(wanted_record)) {
    const auto it = left.find(id);
    if (it == left.end()) {
      differences.push_back({id.first, std::nullopt, value});
      continue;
    }
    if (it->second != value)
      differences.push_back({id.first, it->second, value});
    left.erase(it);
  }
  for (const auto& [id, value] : stored_fields) {
    if (left.count(id) != 0) {
      differences.push_back({id.first, value, std::nullopt});
    }
  }
  return differences;
}

absl::StatusOr<std::optional<NearestPlan>> FindNearestPlan(
    const PlanKey& wanted, PlanCache* cache) {
  ASSIGN_OR_RETURN(std::vector<StoredPlan> plans, cache->ListPlans());
  std::optional<NearestPlan> nearest;
  for (StoredPlan& stored : plans) {
    ASSIGN_OR_RETURN(std::vector<FieldDifference> differences,
                     CompareKeys(stored.key.preimage, wanted.preimage));
    if (nearest.has_value() &&
        differences.size() >= nearest->differences.size()) {
      continue;
    }
    nearest = NearestPlan{std::move(stored), std::move(differences)};
  }
  return nearest;
}

}  // namespace kiln
