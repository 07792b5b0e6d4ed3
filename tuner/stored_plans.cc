#include "tuner/stored_plans.h"

#include <map>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/digest.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

// A key's pre-image in two parts: what it says of the device, and the rest.
struct SplitKey {
  std::string device;  // for people too: "multiprocessors 132, l2_bytes ..."
  std::string rest;
};

absl::StatusOr<SplitKey> Split(const PlanKey& key) {
  ASSIGN_OR_RETURN(const CanonicalRecord record, DecodeCanonical(key.preimage));
  CanonicalEncoder rest(record.domain);
  std::vector<std::string> device;
  for (const CanonicalField& field : record.fields) {
    constexpr absl::string_view kPrefix = "device/";
    if (!absl::StartsWith(field.path, kPrefix)) {
      rest.Text(field.path, field.value);
    } else if (field.path == "device/target") {
      rest.Text(field.path, field.value);
    } else if (!field.value.empty() && field.value != "0" &&
               field.path != "device/assumed") {
      device.push_back(
          absl::StrCat(field.path.substr(kPrefix.size()), " ", field.value));
    }
  }
  return SplitKey{absl::StrJoin(device, ", "), rest.bytes()};
}

// Measured plans by device, then by the rest of their keys.
using MeasuredPlans = std::map<std::string, std::map<std::string, StoredPlan>>;

absl::StatusOr<MeasuredPlans> ListMeasured(PlanCache* cache) {
  MeasuredPlans measured;
  ASSIGN_OR_RETURN(std::vector<StoredPlan> stored, cache->ListPlans());
  for (StoredPlan& entry : stored) {
    if (entry.plan.evidence.state != PlanState::kMeasured) continue;
    ASSIGN_OR_RETURN(const SplitKey key, Split(entry.key));
    measured[key.device].emplace(key.rest, std::move(entry));
  }
  return measured;
}

// Plans of one target's intervals (indices into `intervals`) from the one kind
// of device that measured all of them; empty when there is none.
absl::StatusOr<std::vector<StoredPlan>> FromOneDevice(
    const std::vector<ResolvedInterval>& intervals,
    const std::vector<size_t>& indices, const MeasuredPlans& measured,
    const Target& target) {
  std::vector<StoredPlan> found;
  std::vector<std::string> devices;
  for (const auto& [device, plans] : measured) {
    std::vector<StoredPlan> here;
    for (const size_t index : indices) {
      ASSIGN_OR_RETURN(const SplitKey key, Split(intervals[index].key));
      const auto plan = plans.find(key.rest);
      if (plan == plans.end()) break;
      here.push_back(plan->second);
    }
    if (here.size() != indices.size()) continue;
    devices.push_back(absl::StrCat("(", device, ")"));
    found = std::move(here);
  }
  if (devices.size() > 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        "plans for ", target.ToString(), " were measured on ", devices.size(),
        " kinds of devices and none of them is here: ",
        absl::StrJoin(devices, " and "),
        "; freeze on a machine with the one that is meant, or from a cache "
        "that holds only its plans"));
  }
  return found;
}

}  // namespace

std::string IntervalName(const ResolvedInterval& resolved,
                         const Target& target) {
  return absl::StrCat(absl::StrJoin(resolved.names, ","), " m ",
                      resolved.interval.m_min, "..", resolved.interval.m_max,
                      " on ", target.ToString());
}

absl::StatusOr<std::vector<StoredPlan>> FindStoredPlans(
    const std::vector<ResolvedInterval>& intervals,
    const std::vector<TargetContext>& contexts, bool measured_elsewhere,
    PlanCache* cache) {
  std::vector<std::optional<StoredPlan>> plans(intervals.size());
  std::optional<MeasuredPlans> measured;
  for (size_t context = 0; context < contexts.size(); ++context) {
    if (!measured_elsewhere || !contexts[context].profile.assumed) continue;
    if (!measured.has_value()) {
      ASSIGN_OR_RETURN(measured, ListMeasured(cache));
    }
    std::vector<size_t> indices;
    for (size_t i = 0; i < intervals.size(); ++i) {
      if (intervals[i].context == context) indices.push_back(i);
    }
    ASSIGN_OR_RETURN(
        std::vector<StoredPlan> found,
        FromOneDevice(intervals, indices, *measured, contexts[context].target));
    for (size_t i = 0; i < found.size(); ++i) {
      plans[indices[i]] = std::move(found[i]);
    }
  }
  std::vector<StoredPlan> result;
  std::vector<Digest> used;
  for (size_t i = 0; i < intervals.size(); ++i) {
    if (!plans[i].has_value()) {
      ASSIGN_OR_RETURN(std::optional<StoredPlan> stored,
                       cache->FindPlan(intervals[i].key.digest));
      if (!stored.has_value()) {
        return absl::NotFoundError(absl::StrCat(
            "no plan for ",
            IntervalName(intervals[i], contexts[intervals[i].context].target),
            " in ", cache->path().empty() ? "the cache" : cache->path(),
            "; run kiln prewarm with the same manifest, target and limits "
            "first"));
      }
      plans[i] = *std::move(stored);
    }
    used.push_back(plans[i]->key.digest);
    result.push_back(*std::move(plans[i]));
  }
  // Costs nothing but that garbage collection may take them for unused.
  cache->NoteUse(used).IgnoreError();
  return result;
}

}  // namespace kiln
