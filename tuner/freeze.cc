#include "tuner/freeze.h"

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/status_macros.h"
#include "compiler/bundle_writer.h"
#include "templates/registry.h"
#include "tuner/bundle_check.h"
#include "tuner/stored_plans.h"

namespace kiln {
namespace {

// The template behind a plan as it is in this build; unknown names and other
// versions have an identity that no receipt has.
TemplateIdentity IdentityOf(const Plan& plan) {
  TemplateIdentity identity;
  identity.name = plan.body.template_name;
  identity.version = plan.body.template_version;
  const KernelTemplate* from = FindTemplate(identity.name);
  if (from != nullptr && from->version() == identity.version) {
    identity.sources = from->sources();
  }
  return identity;
}

// The plan that serves each interval: its own, or the one that it was merged
// into, with the whole interval that this one serves.
absl::StatusOr<std::vector<Plan>> MergePlans(
    const std::vector<ResolvedInterval>& intervals,
    const std::vector<StoredPlan>& stored, double regret_cap,
    PlanCache* cache) {
  std::vector<Plan> plans;
  size_t begin = 0;
  while (begin < intervals.size()) {
    std::vector<CurvePoint> points;
    size_t end = begin;
    for (; end < intervals.size() &&
           intervals[end].context == intervals[begin].context &&
           intervals[end].geometry == intervals[begin].geometry;
         ++end) {
      ASSIGN_OR_RETURN(const std::vector<Measurement> evidence,
                       cache->LoadMeasurements(stored[end].key.digest));
      points.push_back(CurvePointOf(stored[end].plan, evidence));
    }
    for (const CurveSegment& segment : MergeIntervals(points, regret_cap)) {
      Plan plan = stored[begin + segment.last].plan;
      plan.interval.m_min = points[segment.first].interval.m_min;
      plans.insert(plans.end(), segment.last - segment.first + 1, plan);
    }
    begin = end;
  }
  return plans;
}

}  // namespace

absl::StatusOr<FreezeResult> Freeze(const Manifest& manifest,
                                    const PrewarmOptions& options,
                                    const FreezePolicy& policy,
                                    PlanCache* cache) {
  ASSIGN_OR_RETURN(const std::vector<PlannedRequest> requests,
                   Canonicalize(manifest, options.capacity_max));
  std::vector<TargetContext> contexts;
  for (const Target& target : options.targets) {
    ASSIGN_OR_RETURN(TargetContext context,
                     ResolveTarget(target, options, cache));
    contexts.push_back(std::move(context));
  }
  ASSIGN_OR_RETURN(const std::vector<ResolvedInterval> intervals,
                   ResolveIntervals(requests, contexts, options));

  ASSIGN_OR_RETURN(
      const std::vector<StoredPlan> stored,
      FindStoredPlans(intervals, contexts, !options.compile_only, cache));
  std::vector<Plan> plans;
  if (policy.regret_cap.has_value()) {
    ASSIGN_OR_RETURN(plans,
                     MergePlans(intervals, stored, *policy.regret_cap, cache));
  } else {
    for (const StoredPlan& own : stored) plans.push_back(own.plan);
  }

  FreezeResult result;
  std::vector<BundleSection> sections(contexts.size());
  std::vector<std::map<std::string, BundleEntry>> entries(contexts.size());
  std::vector<std::set<Digest>> needed(contexts.size());
  std::vector<std::set<std::string>> unqualified(contexts.size());
  for (size_t i = 0; i < intervals.size(); ++i) {
    const ResolvedInterval& resolved = intervals[i];
    const Target& target = contexts[resolved.context].target;
    const Plan& plan = plans[i];
    if (plan.interval.m_max != resolved.interval.m_max) {
      ++result.merged;
      continue;
    }
    if (plan.evidence.state == PlanState::kPredicted) {
      ++result.predicted;
      if (!policy.allow_predicted) {
        return absl::FailedPreconditionError(absl::StrCat(
            "the plan for ", IntervalName(resolved, target),
            " is predicted: it never ran on the device; prewarm on a machine "
            "that has it, or pass --allow-predicted"));
      }
    }
    if (!IsQualified(IdentityOf(plan), target, policy.receipts)) {
      ++result.unqualified;
      if (!policy.allow_unqualified) {
        return absl::FailedPreconditionError(
            absl::StrCat("template ", plan.body.template_name,
                         " of the plan for ", IntervalName(resolved, target),
                         " has no qualification for ", target.ToString(),
                         ": as it stands it has not passed the suite on "
                         "such a device; run tools/qualify.py on one, or pass "
                         "--allow-unqualified"));
      }
      unqualified[resolved.context].insert(plan.body.template_name);
    }
    ++result.plans;
    needed[resolved.context].insert(plan.programs.begin(), plan.programs.end());
    for (const std::string& name : resolved.names) {
      BundleEntry& entry = entries[resolved.context][name];
      entry.name = name;
      entry.geometry = resolved.geometry;
      entry.plans.push_back(plan);
    }
  }
  for (size_t i = 0; i < contexts.size(); ++i) {
    BundleSection& section = sections[i];
    section.target = contexts[i].target;
    section.driver_version_min =
        section.target.backend == Backend::kCuda ? kDriverVersionMin : 0;
    section.unqualified_templates.assign(unqualified[i].begin(),
                                         unqualified[i].end());
    for (auto& [name, entry] : entries[i]) {
      section.entries.push_back(std::move(entry));
    }
    for (const Digest& digest : needed[i]) {
      ASSIGN_OR_RETURN(std::optional<Program> program,
                       cache->FindProgram(digest));
      if (!program.has_value()) {
        return absl::NotFoundError(
            absl::StrCat("program ", digest.Short(), " of a stored plan for ",
                         section.target.ToString(),
                         " is not in the cache; run kiln prewarm again"));
      }
      section.programs.push_back(
          std::make_shared<const Program>(*std::move(program)));
    }
    result.programs += section.programs.size();
    result.entries += section.entries.size();
  }
  ASSIGN_OR_RETURN(
      result.bytes,
      WriteBundle(sections, {.allow_predicted = policy.allow_predicted,
                             .allow_unqualified = policy.allow_unqualified}));
  RETURN_IF_ERROR(CheckBundleMatches(result.bytes, sections));
  ASSIGN_OR_RETURN(result.root, BundleRoot(result.bytes));
  return result;
}

}  // namespace kiln
