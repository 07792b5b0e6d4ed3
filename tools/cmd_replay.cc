// kiln replay: derive every stored winner again from its samples.

#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "tools/cli.h"
#include "tuner/conclusion.h"

namespace kiln {

absl::StatusOr<int> RunReplay(const GlobalOptions& global) {
  ASSIGN_OR_RETURN(PlanCache cache, OpenCacheToRead(global));
  ASSIGN_OR_RETURN(const std::vector<ReplayedPlan> plans, ReplayPlans(&cache));
  size_t differ = 0;
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const ReplayedPlan& replayed : plans) {
    const Plan& plan = replayed.stored.plan;
    if (replayed.agrees) continue;
    ++differ;
    const std::string derived =
        replayed.derived.empty() ? "none" : replayed.derived;
    rows.push_back({{"plan_key", replayed.stored.key.digest.ToHex()},
                    {"target", plan.target.ToString()},
                    {"m_min", plan.interval.m_min},
                    {"m_max", plan.interval.m_max},
                    {"stored", plan.body.Label()},
                    {"derived", derived}});
    if (!global.json) {
      std::printf("%s %s m %u..%u\n  stored   %s\n  derived  %s\n",
                  plan.target.ToString().c_str(),
                  plan.geometry.ToString().c_str(), plan.interval.m_min,
                  plan.interval.m_max, plan.body.Label().c_str(),
                  derived.c_str());
    }
  }
  if (global.json) {
    const nlohmann::ordered_json out = {{"plans", plans.size()},
                                        {"agree", plans.size() - differ},
                                        {"differ", std::move(rows)}};
    PrintJson(out);
  } else {
    std::printf("%zu measured plans, %zu winners derived again, %zu differ\n",
                plans.size(), plans.size() - differ, differ);
  }
  return differ == 0 ? kExitDone : kExitFailed;
}

}  // namespace kiln
