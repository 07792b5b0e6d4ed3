// kiln prewarm: fill the cache with the winners of a model.

#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "compiler/base/status_macros.h"
#include "tools/cli.h"
#include "tools/interrupt.h"
#include "tuner/recheck.h"

namespace kiln {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kShardsMax = 10000;

std::string StateOf(const IntervalReport& row) {
  if (!row.plan.has_value()) return "none";
  if (row.plan->evidence.state == PlanState::kPredicted) return "predicted";
  return row.reused ? "cached" : "raced";
}

Json ToJson(const RecheckReport& report) {
  Json rows = Json::array();
  for (const RecheckedInterval& row : report.intervals) {
    rows.push_back({{"target", row.target.ToString()},
                    {"requests", row.names},
                    {"m_min", row.interval.m_min},
                    {"m_max", row.interval.m_max},
                    {"winner", row.winner},
                    {"ratio", row.ratio},
                    {"margin", row.margin},
                    {"slower", row.slower}});
  }
  return {{"measured", report.intervals.size()},
          {"default_won", report.same},
          {"skipped", report.skipped},
          {"slower", report.slower},
          {"intervals", std::move(rows)}};
}

void PrintRecheck(const RecheckReport& report) {
  for (const RecheckedInterval& row : report.intervals) {
    if (!row.slower) continue;
    std::printf(
        "slower than the default: %s m %u..%u on %s, %.3f x, margin "
        "%.1f %%, %s\n",
        absl::StrJoin(row.names, ",").c_str(), row.interval.m_min,
        row.interval.m_max, row.target.ToString().c_str(), row.ratio,
        100 * row.margin, row.winner.c_str());
  }
  std::printf(
      "recheck: %zu winners measured again, %zu slower than the "
      "default; %zu are the default, %zu skipped\n",
      report.intervals.size(), report.slower, report.same, report.skipped);
}

void PrintJson(const PrewarmReport& report,
               const std::optional<RecheckReport>& rechecked) {
  Json out;
  out["requests"] = report.requests;
  out["intervals"] = report.intervals.size();
  out["candidates"] = report.candidates;
  out["programs_compiled"] = report.programs_compiled;
  out["programs_reused"] = report.programs_reused;
  out["programs_attached"] = report.programs_attached;
  out["rejects"] = report.rejects;
  out["launches"] = report.launches;
  out["winners"] = report.winners;
  out["predicted"] = report.predicted;
  out["seconds"] = report.seconds;
  out["compile_cpu_seconds"] = report.compile_cpu_seconds;
  out["publish_seconds"] = report.publish_seconds;
  out["publish_transactions"] = report.publish_transactions;
  if (report.stopped_after.has_value()) {
    out["stopped_after"] = std::string(StageName(*report.stopped_after));
  }
  out["plans"] = Json::array();
  for (const IntervalReport& row : report.intervals) {
    Json plan;
    plan["target"] = row.target.ToString();
    plan["requests"] = row.names;
    plan["m_min"] = row.interval.m_min;
    plan["m_max"] = row.interval.m_max;
    plan["candidates"] = row.candidates;
    plan["rejected"] = row.rejected;
    plan["state"] = StateOf(row);
    if (row.plan.has_value()) {
      const Evidence& evidence = row.plan->evidence;
      plan["winner"] = row.plan->body.Label();
      plan["median_ns"] = evidence.median_ns;
      plan["default_median_ns"] = evidence.default_median_ns;
      plan["noise_floor"] = evidence.noise_floor;
      plan["worst_error"] = evidence.worst_error;
      plan["blocks"] = evidence.blocks;
      plan["discarded"] = evidence.discarded;
      plan["pruned"] = evidence.pruned;
      plan["race_seconds"] = evidence.race_seconds;
    } else if (!row.problem.empty()) {
      plan["problem"] = row.problem;
    }
    out["plans"].push_back(std::move(plan));
  }
  if (rechecked.has_value()) out["recheck"] = ToJson(*rechecked);
  out["complete"] = report.complete;
  // One line: the last thing on stdout is one object.
  kiln::PrintJson(out);
}

void PrintTable(const PrewarmReport& report) {
  std::vector<std::vector<std::string>> rows = {{"target", "request", "m",
                                                 "state", "time", "default",
                                                 "error", "winner"}};
  for (const IntervalReport& row : report.intervals) {
    std::vector<std::string> cells = {
        row.target.ToString(), absl::StrJoin(row.names, ","),
        absl::StrCat(row.interval.m_min, "..", row.interval.m_max),
        StateOf(row)};
    if (row.plan.has_value()) {
      const Evidence& evidence = row.plan->evidence;
      const bool measured = evidence.state == PlanState::kMeasured;
      cells.push_back(measured ? FormatNs(evidence.median_ns) : "-");
      cells.push_back(measured ? FormatNs(evidence.default_median_ns) : "-");
      cells.push_back(measured ? absl::StrFormat("%.1e", evidence.worst_error)
                               : "-");
      cells.push_back(row.plan->body.Label());
    } else {
      cells.insert(cells.end(), {"-", "-", "-", row.problem});
    }
    rows.push_back(std::move(cells));
  }
  std::printf("%s", FormatTable(rows).c_str());
  std::printf(
      "%zu intervals: %zu measured, %zu predicted; %zu candidates, %zu "
      "programs compiled, %zu reused, %zu rejects, %llu launches\n",
      report.intervals.size(), report.winners, report.predicted,
      report.candidates, report.programs_compiled, report.programs_reused,
      report.rejects, static_cast<unsigned long long>(report.launches));
  std::vector<std::string> stages;
  for (const auto& [stage, seconds] : report.seconds) {
    stages.push_back(absl::StrFormat("%s %.2f s", stage, seconds));
  }
  std::printf("%s\n", absl::StrJoin(stages, ", ").c_str());
}

// Of an interrupted run: it commits every program and plan when it exists.
std::string WhatIsKept(const GlobalOptions& global) {
  if (global.cache_mode != CacheModeName(CacheMode::kReadWrite)) {
    return absl::StrCat("nothing is kept, as --cache-mode is ",
                        global.cache_mode);
  }
  return absl::StrCat("programs and winners that were finished are kept in ",
                      CacheDirectory(global),
                      "; run the same command again to go on from there");
}

absl::Status ParseShard(const std::string& text, PrewarmOptions* options) {
  const std::vector<std::string> parts = absl::StrSplit(text, '/');
  int index = 0;
  int count = 0;
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &index) ||
      !absl::SimpleAtoi(parts[1], &count) || index < 1 || index > count ||
      count > kShardsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("--shard is \"", text,
                     "\", must be K/N with 1 <= K <= N "
                     "<= ",
                     kShardsMax, "; the first of three is 1/3"));
  }
  options->shard_index = index - 1;
  options->shard_count = count;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int> RunPrewarm(const GlobalOptions& global,
                               const PrewarmCommand& command) {
  ASSIGN_OR_RETURN(const Manifest manifest,
                   ReadManifest(command.planning.manifest));
  ASSIGN_OR_RETURN(PrewarmOptions options,
                   MakePrewarmOptions(global, command.planning));
  options.jobs = command.jobs;
  options.compile_seconds_max = command.compile_timeout;
  options.race_seconds_max = command.budget;
  options.launch_seconds_max = command.launch_timeout;
  options.exclusive = command.exclusive;
  if (!command.stop_after.empty()) {
    options.stop_after = ParseStage(command.stop_after);
    if (!options.stop_after.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--stop-after is \"", command.stop_after,
          "\", must be resolve, lookup, enumerate, compile or race"));
    }
  }
  if (!command.shard.empty()) {
    RETURN_IF_ERROR(ParseShard(command.shard, &options));
  }
  // Before there is a cache: what cannot be served changes nothing.
  if (!CacheExists(global)) {
    ASSIGN_OR_RETURN(PlanCache none, OpenCacheToRead(global));
    RETURN_IF_ERROR(ResolveManifest(manifest, options, &none).status());
  }
  EndCleanlyWhenInterrupted(WhatIsKept(global));
  ASSIGN_OR_RETURN(PlanCache cache, OpenCache(global));
  const std::unique_ptr<ProgressSink> progress = MakeProgress();
  ASSIGN_OR_RETURN(const PrewarmReport report,
                   Prewarm(manifest, options, &cache, progress.get()));
  if (report.predicted > 0) {
    progress->Note(absl::StrCat(
        report.predicted,
        " plans are predicted: their programs compiled and passed inspection, "
        "but never ran here; freeze refuses them without --allow-predicted"));
  }
  std::optional<RecheckReport> rechecked;
  if (command.recheck) {
    ASSIGN_OR_RETURN(rechecked,
                     Recheck(manifest, options, &cache, progress.get()));
  }
  if (global.json) {
    PrintJson(report, rechecked);
  } else {
    PrintTable(report);
    if (rechecked.has_value()) PrintRecheck(*rechecked);
  }
  if (rechecked.has_value() && rechecked->slower > 0) return kExitFailed;
  if (report.stopped_after.has_value()) return kExitDone;
  // Predicted plans are what --compile-only asked for; otherwise they mean that
  // no winner was verified.
  const bool verified = report.predicted == 0 || options.compile_only;
  return report.complete && verified ? kExitDone : kExitIncomplete;
}

}  // namespace kiln
