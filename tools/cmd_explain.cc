// kiln explain: why an interval has the winner it has, or why it has none.

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "compiler/base/status_macros.h"
#include "tools/cli.h"
#include "tuner/conclusion.h"
#include "tuner/explain.h"

namespace kiln {
namespace {

using Json = nlohmann::ordered_json;

// A field of the key that the plan is stored under; empty without it.
std::string KeyField(const StoredPlan& stored, absl::string_view path) {
  for (const CanonicalField& field : ContextOf(stored)) {
    if (field.path == path) return field.value;
  }
  return "";
}

std::string KeptNumericsOf(const StoredPlan& stored) {
  return KeyField(stored, "candidates/numerics_class");
}

// JSON knows no NaN and no infinity.
Json Finite(double value) {
  return std::isfinite(value) ? Json(value) : Json();
}

Json ToJson(const Provenance& provenance) {
  return {{"created", FormatTime(provenance.created_unix)},
          {"created_unix", provenance.created_unix},
          {"host", provenance.host_name},
          {"device", provenance.device_name},
          {"tool", provenance.tool_version}};
}

std::string Origin(const Provenance& provenance) {
  std::string text = absl::StrCat(FormatTime(provenance.created_unix), " on \"",
                                  provenance.host_name, "\"");
  if (!provenance.device_name.empty()) {
    absl::StrAppend(&text, " (", provenance.device_name, ")");
  }
  return absl::StrCat(text, " by ", provenance.tool_version);
}

Json HitJson(const StoredPlan& stored,
             const std::vector<Measurement>& measurements) {
  const Evidence& evidence = stored.plan.evidence;
  Json out;
  out["state"] =
      evidence.state == PlanState::kMeasured ? "measured" : "predicted";
  out["winner"] = stored.plan.body.Label();
  out["numerics_class"] = stored.plan.body.numerics_class;
  out["arena_bytes"] = stored.plan.body.arena.bytes;
  out["evidence"] = {{"median_ns", evidence.median_ns},
                     {"default_median_ns", evidence.default_median_ns},
                     {"noise_floor", evidence.noise_floor},
                     {"worst_error", evidence.worst_error},
                     {"samples", evidence.samples},
                     {"candidates", evidence.candidates},
                     {"blocks", evidence.blocks},
                     {"discarded", evidence.discarded},
                     {"pruned", evidence.pruned},
                     {"race_seconds", evidence.race_seconds}};
  out["kept_numerics"] = KeptNumericsOf(stored);
  out["provenance"] = ToJson(stored.provenance);
  out["programs"] = Json::array();
  for (const Digest& program : stored.plan.programs) {
    out["programs"].push_back(program.ToHex());
  }
  out["candidates"] = Json::array();
  const std::vector<double> times = TimesNs(measurements);
  for (size_t i = 0; i < measurements.size(); ++i) {
    const Measurement& measurement = measurements[i];
    out["candidates"].push_back(
        {{"label", measurement.label},
         {"digest", measurement.candidate.ToHex()},
         {"verdict", VerdictText(measurement)},
         {"reason", measurement.reason},
         {"median_ns", Finite(times[i])},
         {"regret", Finite(measurement.regret)},
         {"worst_error", Finite(measurement.worst_error)},
         {"samples", measurement.samples.size()},
         {"numerics_class", measurement.numerics_class},
         {"arena_bytes", measurement.arena_bytes},
         {"registers", measurement.registers}});
  }
  return out;
}

void PrintHit(const StoredPlan& stored,
              const std::vector<Measurement>& measurements) {
  const Evidence& evidence = stored.plan.evidence;
  std::printf("winner   %s\n", stored.plan.body.Label().c_str());
  if (evidence.state == PlanState::kMeasured) {
    std::printf(
        "evidence %s median of %u blocks, default %s, noise floor %.2f%%, "
        "error %.1e against the oracle\n",
        FormatNs(evidence.median_ns).c_str(), evidence.samples,
        FormatNs(evidence.default_median_ns).c_str(),
        100 * evidence.noise_floor, evidence.worst_error);
    std::printf(
        "race     %u blocks count, %u discarded as the clock changed, %.2f s; "
        "%u candidates, %u left out by the cost model or the limit\n",
        evidence.blocks, evidence.discarded, evidence.race_seconds,
        evidence.candidates, evidence.pruned);
  } else {
    std::printf("evidence none: predicted, it never ran\n");
  }
  const std::string kept = KeptNumericsOf(stored);
  if (!kept.empty()) {
    std::printf(
        "kept     numerics class %s: only candidates of it, with bit-"
        "identical repeats, were admitted\n",
        kept.c_str());
  }
  std::printf("made     %s\n", Origin(stored.provenance).c_str());
  std::vector<std::vector<std::string>> rows = {
      {"candidate", "verdict", "median", "regret", "error", "reason"}};
  const std::vector<double> times = TimesNs(measurements);
  for (size_t i = 0; i < measurements.size(); ++i) {
    const Measurement& measurement = measurements[i];
    const double median = times[i];
    rows.push_back({measurement.label, VerdictText(measurement),
                    std::isfinite(median) ? FormatNs(median) : "-",
                    std::isfinite(measurement.regret)
                        ? absl::StrFormat("%+.1f%%", 100 * measurement.regret)
                        : "-",
                    std::isfinite(measurement.worst_error)
                        ? absl::StrFormat("%.1e", measurement.worst_error)
                        : "-",
                    measurement.reason.empty() ? "-" : measurement.reason});
  }
  if (rows.size() > 1) std::printf("%s", FormatTable(rows).c_str());
}

Json MissJson(const MissingPlan& missing) {
  Json out;
  out["state"] = "none";
  out["advice"] = missing.Advice();
  out["competing"] = missing.candidates;
  out["rejected"] = Json::array();
  for (const RejectedCandidate& rejected : missing.rejected) {
    out["rejected"].push_back(
        {{"label", rejected.label},
         {"stage", std::string(RejectStageName(rejected.stage))},
         {"reason", rejected.reason}});
  }
  if (!missing.nearest.has_value()) {
    out["nearest"] = nullptr;
    return out;
  }
  const NearestPlan& nearest = *missing.nearest;
  Json differences = Json::array();
  for (const FieldDifference& field : nearest.differences) {
    differences.push_back(
        {{"field", field.path},
         {"stored", field.stored.has_value() ? Json(*field.stored) : Json()},
         {"wanted", field.wanted.has_value() ? Json(*field.wanted) : Json()}});
  }
  out["nearest"] = {{"plan_key", nearest.stored.key.digest.ToHex()},
                    {"winner", nearest.stored.plan.body.Label()},
                    {"provenance", ToJson(nearest.stored.provenance)},
                    {"differences", std::move(differences)}};
  return out;
}

void PrintMiss(const MissingPlan& missing) {
  std::printf("no plan is stored under this key; %s\n",
              missing.Advice().c_str());
  if (!missing.rejected.empty()) {
    std::vector<std::vector<std::string>> rows = {
        {"rejected candidate", "stage", "reason"}};
    for (const RejectedCandidate& rejected : missing.rejected) {
      rows.push_back({rejected.label,
                      std::string(RejectStageName(rejected.stage)),
                      rejected.reason});
    }
    std::printf("%zu of %zu candidates were rejected\n%s",
                missing.rejected.size(), missing.candidates,
                FormatTable(rows).c_str());
  }
  if (!missing.nearest.has_value()) {
    std::printf("the cache has no plan for another key either\n");
    return;
  }
  const NearestPlan& nearest = *missing.nearest;
  std::printf("nearest  %s\nmade     %s\n",
              nearest.stored.key.digest.ToHex().c_str(),
              Origin(nearest.stored.provenance).c_str());
  std::vector<std::vector<std::string>> rows = {
      {"field that differs", "stored", "wanted here"}};
  const auto shown = [](const std::optional<std::string>& value) {
    if (!value.has_value()) return std::string("(absent)");
    return value->empty() ? std::string("(empty)") : *value;
  };
  for (const FieldDifference& field : nearest.differences) {
    rows.push_back({field.path, shown(field.stored), shown(field.wanted)});
  }
  std::printf("%s", FormatTable(rows).c_str());
}

}  // namespace

absl::StatusOr<int> RunExplain(const GlobalOptions& global,
                               const ExplainCommand& command) {
  ASSIGN_OR_RETURN(const Manifest manifest,
                   ReadManifest(command.planning.manifest));
  ASSIGN_OR_RETURN(const PrewarmOptions options,
                   MakePrewarmOptions(global, command.planning));
  ASSIGN_OR_RETURN(PlanCache cache, OpenCacheToRead(global));
  ASSIGN_OR_RETURN(const ResolvedManifest resolved,
                   ResolveManifest(manifest, options, &cache));
  PrintNotesOnIdle(options, resolved);
  std::set<std::string> names;
  uint32_t capacity = 0;
  std::vector<const ResolvedInterval*> matches;
  for (const ResolvedInterval& interval : resolved.intervals) {
    names.insert(interval.names.begin(), interval.names.end());
    if (std::find(interval.names.begin(), interval.names.end(),
                  command.entry) == interval.names.end()) {
      continue;
    }
    capacity = std::max(capacity, interval.interval.m_max);
    if (interval.interval.m_min <= command.tokens &&
        command.tokens <= interval.interval.m_max) {
      matches.push_back(&interval);
    }
  }
  if (names.count(command.entry) == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "entry \"", command.entry, "\" is not in ", command.planning.manifest,
        ", which has ", absl::StrJoin(names, ", ")));
  }
  if (matches.empty()) {
    return absl::OutOfRangeError(
        absl::StrCat("entry \"", command.entry, "\" has intervals for 1..",
                     capacity, " tokens, asked for ", command.tokens,
                     "; add a capacity to the manifest"));
  }
  bool all = true;
  Json out = Json::array();
  for (const ResolvedInterval* interval : matches) {
    const Target& target = resolved.contexts[interval->context].target;
    const Digest& key = interval->key.digest;
    ASSIGN_OR_RETURN(const std::optional<StoredPlan> stored,
                     cache.FindPlan(key));
    Json entry = {{"entry", command.entry},
                  {"tokens", command.tokens},
                  {"target", target.ToString()},
                  {"m_min", interval->interval.m_min},
                  {"m_max", interval->interval.m_max},
                  {"plan_key", key.ToHex()}};
    if (!global.json) {
      std::printf("%s, %u..%u tokens, on %s\nplan key %s\n",
                  command.entry.c_str(), interval->interval.m_min,
                  interval->interval.m_max, target.ToString().c_str(),
                  key.ToHex().c_str());
    }
    if (stored.has_value()) {
      ASSIGN_OR_RETURN(const std::vector<Measurement> measurements,
                       cache.LoadMeasurements(key));
      entry.update(HitJson(*stored, measurements));
      if (!global.json) PrintHit(*stored, measurements);
    } else {
      all = false;
      ASSIGN_OR_RETURN(const MissingPlan missing,
                       ExplainMissing(*interval, &cache));
      entry.update(MissJson(missing));
      if (!global.json) PrintMiss(missing);
    }
    out.push_back(std::move(entry));
  }
  PrintWarnings(&cache);
  if (global.json) {
    PrintJson({{"intervals", std::move(out)}}, 1);
  }
  return all ? kExitDone : kExitIncomplete;
}

}  // namespace kiln
