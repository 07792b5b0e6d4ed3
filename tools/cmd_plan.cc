// kiln plan: what prewarm would consider, without compiling anything.

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/status_macros.h"
#include "tools/cli.h"
#include "tuner/planner.h"

namespace kiln {
namespace {

using Json = nlohmann::ordered_json;

Json ToJson(const ResolvedInterval& resolved, const IntervalPlan& plan,
            const Target& target) {
  Json out;
  out["target"] = target.ToString();
  out["requests"] = resolved.names;
  out["geometry"] = resolved.geometry.ToString();
  out["m_min"] = resolved.interval.m_min;
  out["m_max"] = resolved.interval.m_max;
  out["plan_key"] = resolved.key.digest.ToHex();
  out["candidates"] = Json::array();
  for (const PlannedCandidate& candidate : plan.candidates) {
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
  for (const RejectedPoints& reject : plan.rejects) {
    out["rejects"].push_back(
        {{"reason", reject.reason}, {"points", reject.count}});
  }
  out["pruned"] = Json::array();
  for (const PrunedCandidate& pruned : plan.pruned) {
    out["pruned"].push_back({{"label", pruned.label},
                             {"numerics_class", pruned.numerics_class},
                             {"reason", pruned.reason}});
  }
  return out;
}

// The reason without its numbers.
std::string KindOf(const std::string& reason) {
  std::string kind;
  for (const char c : reason) {
    if (!absl::ascii_isdigit(static_cast<unsigned char>(c))) kind.push_back(c);
  }
  return kind;
}

void Print(const ResolvedInterval& resolved, const IntervalPlan& plan,
           const Target& target) {
  std::printf("%s  %s  m %u..%u\n", target.ToString().c_str(),
              absl::StrJoin(resolved.names, ",").c_str(),
              resolved.interval.m_min, resolved.interval.m_max);
  std::vector<std::vector<std::string>> rows = {
      {"  candidate", "numerics", "arena", "steps"}};
  for (const PlannedCandidate& candidate : plan.candidates) {
    rows.push_back({absl::StrCat("  ", candidate.body.Label()),
                    candidate.body.numerics_class,
                    FormatBytes(candidate.body.arena.bytes),
                    absl::StrCat(candidate.body.steps.size())});
  }
  std::printf("%s", FormatTable(rows).c_str());
  // One line per reason with the most promising of its candidates.
  std::map<std::string, std::pair<size_t, std::string>> reasons;
  std::vector<std::string> order;
  for (const PrunedCandidate& pruned : plan.pruned) {
    auto& [count, label] = reasons[KindOf(pruned.reason)];
    if (count++ == 0) {
      label = absl::StrCat(pruned.label, ", ", pruned.reason);
      order.push_back(KindOf(pruned.reason));
    }
  }
  for (const std::string& kind : order) {
    std::printf("  %zu legal points left out, first %s\n", reasons[kind].first,
                reasons[kind].second.c_str());
  }
  for (const RejectedPoints& reject : plan.rejects) {
    std::printf("  %zu rejected: %s\n", reject.count, reject.reason.c_str());
  }
}

}  // namespace

absl::StatusOr<int> RunPlan(const GlobalOptions& global,
                            const PlanningOptions& command) {
  ASSIGN_OR_RETURN(const Manifest manifest, ReadManifest(command.manifest));
  ASSIGN_OR_RETURN(const PrewarmOptions options,
                   MakePrewarmOptions(global, command));
  ASSIGN_OR_RETURN(PlanCache cache, OpenCacheToRead(global));
  ASSIGN_OR_RETURN(const ResolvedManifest resolved_manifest,
                   ResolveManifest(manifest, options, &cache));
  PrintNotesOnIdle(options, resolved_manifest);
  Json out;
  out["model"] = manifest.name;
  out["intervals"] = Json::array();
  for (const ResolvedInterval& resolved : resolved_manifest.intervals) {
    ASSIGN_OR_RETURN(const IntervalPlan plan,
                     resolved.planner->Plan(resolved.interval));
    const Target& target = resolved_manifest.contexts[resolved.context].target;
    if (global.json) {
      out["intervals"].push_back(ToJson(resolved, plan, target));
    } else {
      Print(resolved, plan, target);
    }
  }
  if (global.json) PrintJson(out, 1);
  return kExitDone;
}

}  // namespace kiln
