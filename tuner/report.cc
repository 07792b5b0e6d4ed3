#include "tuner/report.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/base/status_macros.h"
#include "tuner/report_chart.h"
#include "tuner/report_format.h"
#include "tuner/selection.h"

namespace kiln {
namespace {

std::string WinnerKey(size_t winner) {
  return absl::StrFormat("<span class=\"key s%d\">%s</span>", winner % kColours,
                         Letter(winner));
}

void AppendWinners(const Group& group, std::string* out) {
  absl::StrAppend(out,
                  "<h3>Winners</h3>\n<div class=\"wide\"><table>\n"
                  "<tr><th>key</th><th>plan</th><th>wins at tokens</th>"
                  "</tr>\n");
  for (size_t i = 0; i < group.winners.size(); ++i) {
    std::vector<std::string> intervals;
    for (const Point& point : group.points) {
      if (point.winner == i) intervals.push_back(Tokens(point.interval));
    }
    absl::StrAppend(out, "<tr><td>", WinnerKey(i), "</td>",
                    LabelCell(group.winners[i]),
                    Cell(absl::StrJoin(intervals, ", ")), "</tr>\n");
  }
  absl::StrAppend(out, "</table></div>\n");
}

// What today's selection concludes from the samples, when it is another winner
// than the stored one.
std::optional<std::string> OtherWinner(const MeasuredPlan& plan) {
  const std::optional<size_t> derived =
      WinnerOf(plan.evidence, plan.stored.plan.evidence.noise_floor);
  if (!derived.has_value()) return "none";
  if (plan.evidence[*derived].candidate ==
      CandidateDigest(plan.stored.plan.body, plan.stored.plan.programs)) {
    return std::nullopt;
  }
  return plan.evidence[*derived].label;
}

// The floor's columns are there where some interval has one.
void AppendIntervals(const Group& group, std::string* out) {
  const bool any_floor = std::ranges::any_of(
      group.points,
      [](const Point& point) { return point.floor.Seconds() > 0; });
  absl::StrAppend(
      out,
      "<h3>Intervals</h3>\n<div class=\"wide\"><table>\n<tr>"
      "<th class=\"n\">tokens</th><th>winner</th><th class=\"n\">median</th>"
      "<th class=\"n\">default</th><th class=\"n\">default loses by</th>"
      "<th class=\"n\">next rival loses by</th>",
      any_floor ? "<th class=\"n\">roofline floor</th><th>bound</th>"
                  "<th class=\"n\">floor / time</th>"
                : "",
      "<th class=\"n\">noise floor</th><th class=\"n\">error</th>"
      "<th class=\"n\">samples</th>"
      "<th class=\"n\">candidates</th><th class=\"n\">left out</th>"
      "<th>replayed</th></tr>\n");
  std::string notes;
  for (const Point& point : group.points) {
    const std::optional<std::string> other = OtherWinner(*point.plan);
    if (other.has_value()) {
      absl::StrAppend(&notes, "<p><span class=\"bad\">",
                      TokensNoun(point.interval),
                      ": the samples lead to another winner</span> <code>",
                      EscapeMarkup(*other), "</code></p>\n");
    }
    const Evidence& evidence = point.plan->stored.plan.evidence;
    const bool has_default = point.default_median > 0;
    const double floor_ns = point.floor.Seconds() * 1e9;
    const bool has_floor = floor_ns > 0;
    double next = HUGE_VAL;
    for (const Measurement& measurement : point.plan->evidence) {
      if (measurement.verdict != Verdict::kLost) continue;
      const size_t index =
          static_cast<size_t>(&measurement - point.plan->evidence.data());
      const double time = point.times[index];
      if (std::isfinite(time) && time > 0) {
        next = std::min(next, point.Ratio(time));
      }
    }
    absl::StrAppend(
        out, "<tr>", Number(Tokens(point.interval)), "<td>",
        WinnerKey(point.winner), "</td>", Number(Time(point.median)),
        Number(has_default ? Time(point.default_median) : "–"),
        Number(has_default ? Percent(point.Ratio(point.default_median)) : "–"),
        Number(Percent(next)));
    if (any_floor) {
      absl::StrAppend(
          out, Number(has_floor ? Time(floor_ns) : "–"),
          Cell(has_floor ? point.floor.Bound() : "–"),
          Number(has_floor ? absl::StrFormat("%.2f", floor_ns / point.median)
                           : "–"));
    }
    absl::StrAppend(
        out, Number(absl::StrFormat("%.2f %%", 100 * evidence.noise_floor)),
        Number(Error(evidence.worst_error)),
        Number(evidence.discarded == 0
                   ? absl::StrCat(evidence.samples)
                   : absl::StrCat(evidence.samples, " (", evidence.discarded,
                                  " discarded)")),
        Number(absl::StrCat(evidence.candidates)),
        Number(absl::StrCat(evidence.pruned)),
        other.has_value() ? "<td class=\"bad\">another</td>" : "<td>same</td>",
        "</tr>\n");
  }
  absl::StrAppend(out, "</table></div>\n", notes);
}

// Candidates that `pick` names, each once with the intervals where it did.
template <typename Pick>
void AppendReasons(const Group& group, absl::string_view title,
                   const Pick& pick, std::string* out) {
  std::map<std::pair<std::string, std::string>, std::vector<std::string>> rows;
  for (const Point& point : group.points) {
    for (const Measurement& measurement : point.plan->evidence) {
      if (!pick(measurement)) continue;
      rows[{measurement.reason, measurement.label}].push_back(
          Tokens(point.interval));
    }
  }
  absl::StrAppend(out, "<h3>", title, "</h3>\n");
  if (rows.empty()) {
    absl::StrAppend(out, "<p class=\"soft\">None.</p>\n");
    return;
  }
  absl::StrAppend(out, "<details><summary>", Count(rows.size(), "row"),
                  "</summary><div class=\"wide\"><table>\n<tr><th>reason</th>"
                  "<th>plan</th><th>at tokens</th></tr>\n");
  for (const auto& [what, intervals] : rows) {
    absl::StrAppend(out, "<tr>", Cell(what.first), LabelCell(what.second),
                    Cell(absl::StrJoin(intervals, ", ")), "</tr>\n");
  }
  absl::StrAppend(out, "</table></div></details>\n");
}

// What failed, and what never raced.
void AppendRejects(const Group& group, std::string* out) {
  AppendReasons(
      group, "Rejected candidates",
      [](const Measurement& measurement) {
        return measurement.verdict == Verdict::kRejected &&
               !IsPruned(measurement);
      },
      out);
  size_t pruned = 0;
  size_t stored = 0;
  for (const Point& point : group.points) {
    pruned += point.plan->stored.plan.evidence.pruned;
    for (const Measurement& measurement : point.plan->evidence) {
      stored += IsPruned(measurement);
    }
  }
  AppendReasons(group, "Left out of the race", IsPruned, out);
  if (pruned > stored) {
    absl::StrAppend(out, "<p class=\"soft\">", pruned - stored,
                    " more, less promising ones are not stored; <code>kiln "
                    "plan</code> lists them.</p>\n");
  }
}

std::string ReasonOf(const Measurement& measurement, bool is_default) {
  std::string reason = measurement.reason;
  if (reason.empty() && measurement.verdict == Verdict::kEliminated) {
    reason = "clearly slower than the best; not timed to the end";
  }
  if (!is_default) return reason;
  return reason.empty() ? "the default" : absl::StrCat("the default; ", reason);
}

void AppendCandidates(const Group& group, std::string* out) {
  absl::StrAppend(out, "<h3>All candidates, by interval</h3>\n");
  for (const Point& point : group.points) {
    const std::vector<Measurement>& evidence = point.plan->evidence;
    std::map<std::string, size_t> counts;
    for (const Measurement& measurement : evidence) {
      ++counts[VerdictText(measurement)];
    }
    std::vector<std::string> parts;
    for (const auto& [verdict, count] : counts) {
      parts.push_back(absl::StrCat(count, " ", verdict));
    }
    absl::StrAppend(
        out, "<details><summary>",
        EscapeMarkup(absl::StrCat(TokensNoun(point.interval), ": ",
                                  absl::StrJoin(parts, ", "))),
        "</summary>\n<div class=\"wide\"><table>\n<tr><th>candidate</th>"
        "<th>verdict</th><th class=\"n\">median</th><th class=\"n\">loses by"
        "</th><th class=\"n\">error</th><th class=\"n\">arena</th>"
        "<th class=\"n\">registers</th><th class=\"n\">samples</th>"
        "<th>reason</th></tr>\n");
    // Fastest first; what was not timed comes last.
    std::vector<size_t> order(evidence.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    const auto rank = [&](size_t i) {
      const double median = point.times[i];
      return std::tuple(evidence[i].verdict == Verdict::kWon ? 0 : 1,
                        std::isfinite(median) ? median : HUGE_VAL, i);
    };
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return rank(a) < rank(b); });
    for (const size_t i : order) {
      const Measurement& measurement = evidence[i];
      absl::StrAppend(out, "<tr>", LabelCell(measurement.label),
                      Cell(VerdictText(measurement)),
                      Number(Time(point.times[i])),
                      Number(Percent(measurement.regret)),
                      Number(Error(measurement.worst_error)),
                      Number(Bytes(measurement.arena_bytes)),
                      Number(measurement.registers == 0
                                 ? "–"
                                 : absl::StrCat(measurement.registers)),
                      Number(absl::StrCat(measurement.samples.size())),
                      Cell(ReasonOf(measurement, i == 0)), "</tr>\n");
    }
    absl::StrAppend(out, "</table></div>\n<p class=\"soft\">plan key <code>",
                    point.plan->stored.key.digest.ToHex(),
                    "</code></p></details>\n");
  }
}

// Distinct values in order, without empty ones.
template <typename Plans, typename Get>
std::string Distinct(const Plans& plans, const Get& get) {
  std::set<std::string> values;
  for (const auto& plan : plans) values.insert(get(plan));
  values.erase("");
  return absl::StrJoin(values, ", ");
}

std::string OriginOf(const std::vector<const MeasuredPlan*>& plans) {
  std::string device = Distinct(plans, [](const MeasuredPlan* plan) {
    return plan->stored.provenance.device_name;
  });
  const std::string tool = Distinct(plans, [](const MeasuredPlan* plan) {
    return plan->stored.provenance.tool_version;
  });
  int64_t first = INT64_MAX;
  int64_t last = INT64_MIN;
  for (const MeasuredPlan* plan : plans) {
    first = std::min(first, plan->stored.provenance.created_unix);
    last = std::max(last, plan->stored.provenance.created_unix);
  }
  std::string when = Day(first);
  if (Day(last) != when) absl::StrAppend(&when, " to ", Day(last));
  if (device.empty()) device = "a device whose name was not stored";
  return absl::StrCat("Measured on ", device, ", ", when,
                      tool.empty() ? "" : ", by ", tool);
}

void AppendGroup(const Group& group, std::string* out) {
  absl::StrAppend(out, "<section>\n<h2>", EscapeMarkup(group.geometry), " on ",
                  EscapeMarkup(group.target), "</h2>\n");
  if (!group.apart.empty()) {
    absl::StrAppend(out, "<p>", EscapeMarkup(group.apart), "</p>\n");
  }
  absl::StrAppend(out, "<p class=\"soft\">",
                  EscapeMarkup(OriginOf(group.plans)), "</p>\n",
                  "<div class=\"wide\">\n");
  Group drawn = group;
  drawn.points.erase(
      std::remove_if(drawn.points.begin(), drawn.points.end(),
                     [](const Point& point) { return !point.IsDrawable(); }),
      drawn.points.end());
  absl::StrAppend(out,
                  drawn.points.empty()
                      ? "<p>No interval has a time that can be drawn.</p>\n"
                      : RenderChart(drawn),
                  "</div>\n");
  AppendWinners(group, out);
  AppendIntervals(group, out);
  AppendRejects(group, out);
  AppendCandidates(group, out);
  absl::StrAppend(out,
                  "<h3>Environment</h3>\n<details><summary>What these "
                  "plans hold for: every field must match</summary>\n"
                  "<div class=\"wide\"><table>\n");
  for (const CanonicalField& field : group.context) {
    absl::StrAppend(out, "<tr>", Cell(field.path), LabelCell(field.value),
                    "</tr>\n");
  }
  absl::StrAppend(out, "</table></div></details>\n</section>\n");
}

void AppendGuide(std::string* out) {
  absl::StrAppend(
      out,
      "<section>\n<h2>How to read this</h2>\n"
      "<p>Every plan was first compared with a float64 oracle, then timed in "
      "interleaved blocks next to its rivals, at the capacity of its interval. "
      "Medians are per launch of the whole plan. The error is the largest "
      "relative Frobenius error of a row.</p>\n<p>",
      EscapeMarkup(absl::StrFormat(
          "The noise floor is what two sets of samples of the same plan differ "
          "by. The default wins unless a rival beats it by more than %g %% "
          "and three noise floors; a rival that \"loses by\" less than 0 was "
          "faster, but not by that much.",
          100 * kSelectionMarginMin)),
      " “Replayed” derives the winner once more from the stored "
      "samples.</p>\n<p>The roofline floor is the least time that the device's "
      "measured ceilings allow: the larger of reading all bytes once, and of "
      "decoding the weights of the experts that uniform routing is expected to "
      "use plus multiplying. <code>kiln doctor --measure</code> measures the "
      "ceilings; without them no floor is shown.</p>\n</section>\n");
}

}  // namespace

std::string RenderReport(const ReportInput& input) {
  std::vector<const MeasuredPlan*> plans;
  for (const MeasuredPlan& plan : input.plans) plans.push_back(&plan);
  std::string out = absl::StrCat(
      "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" "
      "lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src "
      "'none'; style-src 'unsafe-inline'\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width\"/>\n"
      "<title>Kiln report</title>\n<style>",
      ReportStyle(), "</style>\n</head>\n<body>\n<h1>Kiln report</h1>\n");
  std::vector<std::string> targets;
  for (const Target& target : input.targets) {
    targets.push_back(target.ToString());
  }
  const std::string limit =
      targets.empty() ? ""
                      : absl::StrCat(" for ", absl::StrJoin(targets, ", "));
  const std::string predicted =
      input.predicted == 0
          ? ""
          : absl::StrCat(
                " Left out: ", Count(input.predicted, "predicted plan"),
                ", never run.");
  if (plans.empty()) {
    absl::StrAppend(&out, "<section><p>",
                    EscapeMarkup(absl::StrCat("The cache has no measured plans",
                                              limit, ".", predicted)),
                    " <code>kiln prewarm</code> makes them.</p></section>\n");
  } else {
    const std::vector<Group> groups = GroupPlans(input);
    absl::StrAppend(
        &out, "<p class=\"soft\">",
        EscapeMarkup(absl::StrCat(Count(plans.size(), "measured plan"), limit,
                                  " in ", Count(groups.size(), "chart"), ". ",
                                  OriginOf(plans), ".", predicted)),
        "</p>\n");
    for (const Group& group : groups) AppendGroup(group, &out);
    AppendGuide(&out);
  }
  absl::StrAppend(&out, "</body>\n</html>\n");
  return out;
}

absl::StatusOr<ReportInput> LoadReport(PlanCache* cache,
                                       absl::Span<const Target> targets) {
  ReportInput input;
  input.targets.assign(targets.begin(), targets.end());
  ASSIGN_OR_RETURN(std::vector<StoredPlan> plans, cache->ListPlans());
  for (StoredPlan& stored : plans) {
    if (!targets.empty() && std::find(targets.begin(), targets.end(),
                                      stored.plan.target) == targets.end()) {
      continue;
    }
    if (stored.plan.evidence.state != PlanState::kMeasured) {
      ++input.predicted;
      continue;
    }
    MeasuredPlan plan;
    ASSIGN_OR_RETURN(plan.evidence, cache->LoadMeasurements(stored.key.digest));
    plan.stored = std::move(stored);
    const std::string key = CeilingsKeyOf(plan.stored);
    ASSIGN_OR_RETURN(const std::optional<std::string> memo,
                     cache->FindMemo(key));
    if (memo.has_value()) {
      // Damaged ceilings are only absent: they can be measured again.
      absl::StatusOr<Ceilings> ceilings = CeilingsFromJson(*memo);
      if (ceilings.ok()) input.ceilings[key] = *std::move(ceilings);
    }
    input.plans.push_back(std::move(plan));
  }
  return input;
}

}  // namespace kiln
