// kiln plan: what prewarm would consider, without compiling anything.

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/status_macros.h"
#include "tools/cli.h"
#include "tuner/planner.h"

namespace kiln {
namespace {

using Json = nlohmann::ordered_json;

// How many points broke each rule.
std::map<std::string, size_t> CountByReason(
    const std::vector<PlannedReject>& rejects) {
  std::map<std::string, size_t> counts;
  for (const PlannedReject& reject : rejects) ++counts[reject.reason];
  return counts;
}

Json ToJson(const ResolvedInterval& resolved, const Target& target) {
  Json out;
  out["target"] = target.ToString();
  out["requests"] = resolved.names;
  out["geometry"] = resolved.geometry.ToString();
  out["m_min"] = resolved.plan.interval.m_min;
  out["m_max"] = resolved.plan.interval.m_max;
  out["plan_key"] = resolved.plan.key.digest.ToHex();
  out["candidates"] = Json::array();
  for (const PlannedCandidate& candidate : resolved.plan.candidates) {
    Json programs = Json::array();
    for (const ProgramKey& key : candidate.programs) {
      programs.push_back(key.digest.ToHex());
    }
    out["candidates"].push_back(
        {{"label", candidate.body.Label()},
         {"numerics_class", candidate.body.numerics_class},
         {"arena_bytes", candidate.body.arena.bytes},
         {"steps", candidate.body.steps.size()},
         {"programs", std::move(programs)}});
  }
  out["rejects"] = Json::array();
  for (const auto& [reason, count] : CountByReason(resolved.plan.rejects)) {
    out["rejects"].push_back({{"reason", reason}, {"points", count}});
  }
  out["pruned"] = resolved.plan.pruned.size();
  return out;
}

void Print(const ResolvedInterval& resolved, const Target& target) {
  std::printf("%s  %s  m %u..%u\n", target.ToString().c_str(),
              absl::StrJoin(resolved.names, ",").c_str(),
              resolved.plan.interval.m_min, resolved.plan.interval.m_max);
  std::vector<std::vector<std::string>> rows = {
      {"  candidate", "numerics", "arena", "steps"}};
  for (const PlannedCandidate& candidate : resolved.plan.candidates) {
    rows.push_back({absl::StrCat("  ", candidate.body.Label()),
                    candidate.body.numerics_class,
                    FormatBytes(candidate.body.arena.bytes),
                    absl::StrCat(candidate.body.steps.size())});
  }
  std::printf("%s", FormatTable(rows).c_str());
  std::printf("  %zu legal points beyond the limit, %zu rejected\n",
              resolved.plan.pruned.size(), resolved.plan.rejects.size());
}

}  // namespace

absl::StatusOr<int> RunPlan(const GlobalOptions& global,
                            const PlanningOptions& command) {
  ASSIGN_OR_RETURN(const Manifest manifest, ReadManifest(command.manifest));
  ASSIGN_OR_RETURN(const PrewarmOptions options,
                   MakePrewarmOptions(global, command));
  ASSIGN_OR_RETURN(PlanCache cache, OpenCache(global));
  ASSIGN_OR_RETURN(const std::vector<PlannedRequest> requests,
                   Canonicalize(manifest, options.capacity_max));
  std::vector<TargetContext> contexts;
  for (const Target& target : options.targets) {
    ASSIGN_OR_RETURN(TargetContext context,
                     ResolveTarget(target, options, &cache));
    contexts.push_back(std::move(context));
  }
  ASSIGN_OR_RETURN(const std::vector<ResolvedInterval> intervals,
                   ResolveIntervals(requests, contexts, options));
  if (global.json) {
    Json out;
    out["model"] = manifest.name;
    out["intervals"] = Json::array();
    for (const ResolvedInterval& resolved : intervals) {
      out["intervals"].push_back(
          ToJson(resolved, contexts[resolved.context].target));
    }
    std::printf("%s\n", out.dump(1).c_str());
    return kExitDone;
  }
  std::map<std::string, size_t> reasons;
  for (const ResolvedInterval& resolved : intervals) {
    Print(resolved, contexts[resolved.context].target);
    for (const auto& [reason, count] : CountByReason(resolved.plan.rejects)) {
      reasons[reason] += count;
    }
  }
  if (!reasons.empty()) std::printf("rejected points by rule:\n");
  for (const auto& [reason, count] : reasons) {
    std::printf("  %6zu  %s\n", count, reason.c_str());
  }
  return kExitDone;
}

}  // namespace kiln
