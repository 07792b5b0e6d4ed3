#include "tuner/explain.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
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

// The reject of the candidate itself, or of a program that it needs.
absl::StatusOr<std::optional<Reject>> FindRejectOf(
    const PlannedCandidate& candidate, PlanCache* cache) {
  ASSIGN_OR_RETURN(std::optional<Reject> reject,
                   cache->FindReject(candidate.digest));
  for (const ProgramKey& program : candidate.programs) {
    if (reject.has_value()) break;
    ASSIGN_OR_RETURN(reject, cache->FindReject(program.digest));
  }
  return reject;
}

std::string AdviceOnBalance(const FieldDifference& balance) {
  const std::string stored = balance.stored.value_or("");
  const std::string wanted = balance.wanted.value_or("");
  std::string what =
      stored.empty()
          ? absl::StrCat(
                "its plan was made before kiln doctor --measure found "
                "this device's balance, \"",
                wanted, "\"")
      : wanted.empty()
          ? absl::StrCat("its plan went by the balance \"", stored,
                         "\" of this device, and the cache has no measurement "
                         "of it; run kiln doctor --measure, or else")
          : absl::StrCat(
                "its plan went by another balance of this device, \"", stored,
                "\", than kiln doctor --measure found last, \"", wanted, "\"");
  return absl::StrCat(what, wanted.empty() ? "" : ";",
                      " run kiln prewarm again, which compiles only what is "
                      "new");
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

bool MissingPlan::AllRejected() const {
  return candidates > 0 && rejected.size() == candidates;
}

const FieldDifference* MissingPlan::OtherBalance() const {
  if (!nearest.has_value() || nearest->differences.size() != 1) return nullptr;
  const FieldDifference& only = nearest->differences.front();
  return only.path == kBalanceField ? &only : nullptr;
}

std::string MissingPlan::Advice() const {
  if (!no_candidate.empty()) return no_candidate;
  if (AllRejected()) {
    const RejectedCandidate& first = rejected.front();
    return absl::StrCat(
        candidates == 1
            ? "its only candidate was"
            : absl::StrCat("all of its ", candidates, " candidates were"),
        " rejected, ", candidates == 1 ? "" : "the first ", first.label, " at ",
        RejectStageName(first.stage), ": ", first.reason,
        "; run kiln prewarm when others may compete, with --max-candidates or "
        "--exhaustive, or when kiln cache gc has dropped the rejects");
  }
  if (const FieldDifference* const balance = OtherBalance()) {
    return AdviceOnBalance(*balance);
  }
  return "run kiln prewarm with the same manifest, target and limits first";
}

absl::StatusOr<MissingPlan> ExplainMissing(const ResolvedInterval& resolved,
                                           PlanCache* cache) {
  MissingPlan missing;
  const absl::StatusOr<IntervalPlan> plan =
      resolved.planner->Plan(resolved.interval);
  if (plan.ok()) {
    missing.candidates = plan->candidates.size();
    for (const PlannedCandidate& candidate : plan->candidates) {
      ASSIGN_OR_RETURN(const std::optional<Reject> reject,
                       FindRejectOf(candidate, cache));
      if (!reject.has_value()) continue;
      missing.rejected.push_back(
          {candidate.body.Label(), reject->stage, reject->reason});
    }
  } else {
    missing.no_candidate = std::string(plan.status().message());
  }
  ASSIGN_OR_RETURN(missing.nearest, FindNearestPlan(resolved.key, cache));
  return missing;
}

}  // namespace kiln
