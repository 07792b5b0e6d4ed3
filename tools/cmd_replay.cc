// kiln replay: derive every stored winner, and the intervals that one plan may
// serve, again from the samples.

#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/base/status_macros.h"
#include "tools/cli.h"
#include "tuner/capacity_curve.h"
#include "tuner/conclusion.h"

namespace kiln {
namespace {

using Json = nlohmann::ordered_json;

// Names where stored and derived winner differ.
Json CompareWinners(const std::vector<ReplayedPlan>& plans, bool print) {
  Json rows = Json::array();
  for (const ReplayedPlan& replayed : plans) {
    if (replayed.agrees) continue;
    const Plan& plan = replayed.plan.stored.plan;
    const std::string derived =
        replayed.derived.empty() ? "none" : replayed.derived;
    rows.push_back({{"plan_key", replayed.plan.stored.key.digest.ToHex()},
                    {"target", plan.target.ToString()},
                    {"m_min", plan.interval.m_min},
                    {"m_max", plan.interval.m_max},
                    {"stored", plan.body.Label()},
                    {"derived", derived}});
    if (!print) continue;
    std::printf("%s %s m %u..%u, plan key %s\n  stored   %s\n  derived  %s\n",
                plan.target.ToString().c_str(),
                plan.geometry.ToString().c_str(), plan.interval.m_min,
                plan.interval.m_max,
                replayed.plan.stored.key.digest.ToHex().c_str(),
                plan.body.Label().c_str(), derived.c_str());
  }
  return rows;
}

Json DeriveCurves(const std::vector<ReplayedPlan>& plans, double regret_cap,
                  bool print) {
  std::vector<const MeasuredPlan*> measured;
  for (const ReplayedPlan& replayed : plans) measured.push_back(&replayed.plan);
  Json curves = Json::array();
  const std::vector<std::vector<const MeasuredPlan*>> groups =
      GroupByContext(measured);
  const std::vector<std::string> apart = WhatTellsApart(groups);
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::vector<const MeasuredPlan*>& group = groups[i];
    std::vector<CurvePoint> points;
    for (const MeasuredPlan* plan : group) {
      points.push_back(CurvePointOf(plan->stored.plan, plan->evidence));
    }
    const Plan& first = group.front()->stored.plan;
    Json segments = Json::array();
    if (print) {
      std::printf("%s %s%s%s\n", first.target.ToString().c_str(),
                  first.geometry.ToString().c_str(),
                  apart[i].empty() ? "" : ", ", apart[i].c_str());
    }
    for (const CurveSegment& segment : MergeIntervals(points, regret_cap)) {
      const uint32_t m_min = points[segment.first].interval.m_min;
      const uint32_t m_max = points[segment.last].interval.m_max;
      const std::string& winner = points[segment.last].winner;
      segments.push_back({{"m_min", m_min},
                          {"m_max", m_max},
                          {"intervals", segment.last - segment.first + 1},
                          {"regret", segment.regret},
                          {"plan", winner}});
      if (print) {
        std::printf("  m %u..%u  %s%s\n", m_min, m_max, winner.c_str(),
                    segment.first == segment.last
                        ? ""
                        : absl::StrFormat("  (%d intervals, regret %.2f %%)",
                                          segment.last - segment.first + 1,
                                          100 * segment.regret)
                              .c_str());
      }
    }
    curves.push_back({{"target", first.target.ToString()},
                      {"geometry", first.geometry.ToString()},
                      {"apart_by", apart[i]},
                      {"segments", std::move(segments)}});
  }
  return curves;
}

}  // namespace

absl::StatusOr<int> RunReplay(const GlobalOptions& global,
                              const ReplayCommand& command) {
  ASSIGN_OR_RETURN(PlanCache cache, OpenCacheToRead(global));
  ASSIGN_OR_RETURN(const std::vector<ReplayedPlan> plans, ReplayPlans(&cache));
  Json curves = DeriveCurves(plans, command.regret_cap, !global.json);
  Json differ = CompareWinners(plans, !global.json);
  const size_t count = differ.size();
  if (global.json) {
    PrintJson({{"plans", plans.size()},
               {"agree", plans.size() - count},
               {"differ", std::move(differ)},
               {"regret_cap", command.regret_cap},
               {"curves", std::move(curves)}});
  } else {
    std::printf("%zu measured plans, %zu winners derived again, %zu differ\n",
                plans.size(), plans.size() - count, count);
  }
  return count == 0 ? kExitDone : kExitFailed;
}

}  // namespace kiln
