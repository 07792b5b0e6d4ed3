#include "tuner/stored_plans.h"

#include <map>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/digest.h"
#include "compiler/base/status_macros.h"
#include "tuner/explain.h"

namespace kiln {
namespace {

// A key's pre-image in parts.
struct SplitKey {
  // What it says of the device, for people too: "multiprocessors 132, ...".
  std::string device;
  // What a measurement of the device added: a machine without the device has
  // none. See Ceilings::Balance.
  std::string balance;
  std::string rest;
  std::vector<CanonicalField> fields;  // all
};

absl::StatusOr<SplitKey> Split(const PlanKey& key) {
  ASSIGN_OR_RETURN(CanonicalRecord record, DecodeCanonical(key.preimage));
  SplitKey split;
  CanonicalEncoder rest(record.domain);
  std::vector<std::string> device;
  for (const CanonicalField& field : record.fields) {
    constexpr absl::string_view kPrefix = "device/";
    if (field.path == kBalanceField) {
      split.balance = field.value;
    } else if (!absl::StartsWith(field.path, kPrefix)) {
      rest.Text(field.path, field.value);
    } else if (field.path == "device/target") {
      rest.Text(field.path, field.value);
    } else if (!field.value.empty() && field.value != "0" &&
               field.path != "device/assumed") {
      device.push_back(
          absl::StrCat(field.path.substr(kPrefix.size()), " ", field.value));
    }
  }
  split.device = absl::StrJoin(device, ", ");
  split.rest = rest.bytes();
  split.fields = std::move(record.fields);
  return split;
}

// What one kind of device measured: plans by balance, then by the rest of their
// keys.
struct MeasuredDevice {
  std::string balance;  // that the cache holds of the device now
  std::map<std::string, std::map<std::string, StoredPlan>> plans;
};

using MeasuredPlans = std::map<std::string, MeasuredDevice>;

absl::StatusOr<MeasuredPlans> ListMeasured(PlanCache* cache) {
  MeasuredPlans measured;
  ASSIGN_OR_RETURN(std::vector<StoredPlan> stored, cache->ListPlans());
  for (StoredPlan& entry : stored) {
    if (entry.plan.evidence.state != PlanState::kMeasured) continue;
    ASSIGN_OR_RETURN(const SplitKey key, Split(entry.key));
    const auto [device, first] = measured.try_emplace(key.device);
    if (first) {
      device->second.balance =
          FindCeilings(key.fields, cache).value_or(Ceilings()).Balance();
    }
    device->second.plans[key.balance].emplace(key.rest, std::move(entry));
  }
  return measured;
}

// The plans for all keys (`rests` of them), or nothing.
std::vector<StoredPlan> PlansForAll(
    const std::vector<std::string>& rests,
    const std::map<std::string, StoredPlan>& plans) {
  std::vector<StoredPlan> found;
  for (const std::string& rest : rests) {
    const auto plan = plans.find(rest);
    if (plan == plans.end()) return {};
    found.push_back(plan->second);
  }
  return found;
}

// Plans of one target's intervals (indices into `intervals`) from the one kind
// of device that measured all of them; empty when there is none.
absl::StatusOr<std::vector<StoredPlan>> FromOneDevice(
    const std::vector<ResolvedInterval>& intervals,
    const std::vector<size_t>& indices, const MeasuredPlans& measured,
    const Target& target) {
  std::vector<std::string> rests;
  for (const size_t index : indices) {
    ASSIGN_OR_RETURN(SplitKey key, Split(intervals[index].key));
    rests.push_back(std::move(key.rest));
  }
  std::vector<StoredPlan> found;
  std::vector<std::string> devices;
  for (const auto& [device, of_device] : measured) {
    std::map<std::string, std::vector<StoredPlan>> whole;  // by balance
    for (const auto& [balance, plans] : of_device.plans) {
      std::vector<StoredPlan> here = PlansForAll(rests, plans);
      if (!here.empty()) whole.emplace(balance, std::move(here));
    }
    if (whole.empty()) continue;
    devices.push_back(absl::StrCat("(", device, ")"));
    auto chosen = whole.find(of_device.balance);
    if (chosen == whole.end()) {
      if (whole.size() > 1) {
        return absl::FailedPreconditionError(absl::StrCat(
            "plans for ", target.ToString(), " of a device (", device,
            ") went by ", whole.size(), " balances of it, none of which is \"",
            of_device.balance,
            "\", that of the cache; freeze on a machine with the device"));
      }
      chosen = whole.begin();
    }
    found = std::move(chosen->second);
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
        ASSIGN_OR_RETURN(const MissingPlan missing,
                         ExplainMissing(intervals[i], cache));
        return absl::NotFoundError(absl::StrCat(
            "no plan for ",
            IntervalName(intervals[i], contexts[intervals[i].context].target),
            " in ", cache->path().empty() ? "the cache" : cache->path(), "; ",
            missing.Advice(),
            missing.rejected.empty() && !missing.nearest.has_value()
                ? ""
                : "; kiln explain shows more"));
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
