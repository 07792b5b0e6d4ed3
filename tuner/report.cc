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
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "compiler/base/digest.h"
#include "compiler/base/status_macros.h"
#include "tuner/conclusion.h"
#include "tuner/selection.h"

namespace kiln {
namespace {

// The page carries its own style. Winners have eight colours and a letter each,
// so that colour alone never tells them apart.
constexpr char kStyle[] = R"css(
:root { color-scheme: light dark;
  --page: #f9f9f7; --card: #ffffff; --ink: #16160f; --soft: #52514e;
  --mute: #8b8a85; --line: #dddcd6; --bad: #b3261e;
  --c0: #2a78d6; --c1: #eb6834; --c2: #1baf7a; --c3: #c08400; --c4: #8a3fb5;
  --c5: #008300; --c6: #d6457a; --c7: #4a3aa7; }
@media (prefers-color-scheme: dark) { :root {
  --page: #121211; --card: #1c1c1a; --ink: #f2f1ec; --soft: #c3c2b7;
  --mute: #8f8e88; --line: #3a3935; --bad: #ff8a80;
  --c0: #4c97ee; --c1: #e8743f; --c2: #22b380; --c3: #d19a1c; --c4: #bd84e0;
  --c5: #4caf4c; --c6: #e8709a; --c7: #9085e9; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 16px 64px; max-width: 1120px;
  background: var(--page); color: var(--ink);
  font: 14px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 17px; margin: 0 0 4px; }
h3 { font-size: 14px; margin: 20px 0 6px; }
p { margin: 4px 0 8px; }
section { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; padding: 16px 20px; margin: 20px 0; }
.soft { color: var(--soft); }
.bad { color: var(--bad); }
code, .label { font: 12px/1.45 ui-monospace, monospace;
  overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 10px 4px 0; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); white-space: nowrap; }
.n { text-align: right; white-space: nowrap; }
details { margin: 4px 0; }
summary { cursor: pointer; padding: 2px 0; }
svg { display: block; width: 100%; height: auto; min-width: 640px; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg .title { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--line); stroke-width: 1; }
.axis { stroke: var(--mute); stroke-width: 1; }
.curve { fill: none; stroke: var(--ink); stroke-width: 2; }
.default { fill: none; stroke: var(--soft); stroke-width: 1.5;
  stroke-dasharray: 5 4; }
.dmark { fill: var(--card); stroke: var(--soft); stroke-width: 1.5; }
.rival { fill: var(--mute); fill-opacity: 0.75; }
.band { fill: var(--ink); fill-opacity: 0.13; stroke: none; }
.whisker { stroke: var(--ink); stroke-opacity: 0.45; stroke-width: 1.5; }
.key { display: inline-block; min-width: 20px; padding: 0 5px;
  border-radius: 4px; text-align: center; font-weight: 600; font-size: 12px;
  border: 2px solid; }
.w { stroke: var(--card); stroke-width: 1.5; }
.region { fill-opacity: 0.28; stroke-width: 1.5; }
svg .letter { fill: var(--ink); font-weight: 600; text-anchor: middle; }
.f0 { fill: var(--c0); } .f1 { fill: var(--c1); } .f2 { fill: var(--c2); }
.f3 { fill: var(--c3); } .f4 { fill: var(--c4); } .f5 { fill: var(--c5); }
.f6 { fill: var(--c6); } .f7 { fill: var(--c7); }
.s0 { stroke: var(--c0); border-color: var(--c0); }
.s1 { stroke: var(--c1); border-color: var(--c1); }
.s2 { stroke: var(--c2); border-color: var(--c2); }
.s3 { stroke: var(--c3); border-color: var(--c3); }
.s4 { stroke: var(--c4); border-color: var(--c4); }
.s5 { stroke: var(--c5); border-color: var(--c5); }
.s6 { stroke: var(--c6); border-color: var(--c6); }
.s7 { stroke: var(--c7); border-color: var(--c7); }
@media print { section { break-inside: avoid; } }
)css";

constexpr size_t kColours = 8;

// Length of the well-formed UTF-8 sequence at the start of `text`, or 0. Sets
// `code` (Unicode 15, table 3-7).
size_t DecodeUtf8(absl::string_view text, uint32_t* code) {
  const auto byte = [&](size_t i) {
    return static_cast<uint32_t>(static_cast<unsigned char>(text[i]));
  };
  const uint32_t first = byte(0);
  if (first < 0x80) {
    *code = first;
    return 1;
  }
  const size_t length = first >= 0xF0   ? 4
                        : first >= 0xE0 ? 3
                        : first >= 0xC2 ? 2
                                        : 0;
  if (length == 0 || first > 0xF4 || text.size() < length) return 0;
  uint32_t value = first & (0xFFu >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
    value = (value << 6) | (byte(i) & 0x3F);
  }
  const bool overlong =
      (length == 3 && value < 0x800) || (length == 4 && value < 0x10000);
  if (overlong || value > 0x10FFFF) return 0;
  *code = value;
  return length;
}

// XML 1.0, production Char.
bool IsXmlChar(uint32_t code) {
  if (code < 0x20) return code == '\t' || code == '\n';
  return code != 0x7F && !(code >= 0xD800 && code <= 0xDFFF) &&
         code != 0xFFFE && code != 0xFFFF;
}

std::string Time(double ns) {
  if (!std::isfinite(ns)) return "–";
  if (ns >= 1e9) return absl::StrFormat("%.3f s", ns / 1e9);
  if (ns >= 1e6) return absl::StrFormat("%.3f ms", ns / 1e6);
  if (ns >= 1e3) return absl::StrFormat("%.2f µs", ns / 1e3);
  return absl::StrFormat("%.1f ns", ns);
}

// As short as an axis wants it: "20 µs".
std::string TickTime(double ns) {
  if (ns >= 1e9) return absl::StrFormat("%g s", ns / 1e9);
  if (ns >= 1e6) return absl::StrFormat("%g ms", ns / 1e6);
  if (ns >= 1e3) return absl::StrFormat("%g µs", ns / 1e3);
  return absl::StrFormat("%g ns", ns);
}

std::string Percent(double fraction) {
  if (!std::isfinite(fraction)) return "–";
  return absl::StrFormat("%+.1f %%", 100 * fraction);
}

std::string Error(double error) {
  return std::isfinite(error) ? absl::StrFormat("%.1e", error) : "–";
}

std::string Bytes(uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes >= 1 << 20) return absl::StrFormat("%.1f MiB", value / (1 << 20));
  if (bytes >= 1 << 10) return absl::StrFormat("%.1f KiB", value / (1 << 10));
  return absl::StrCat(bytes, " B");
}

std::string Day(int64_t unix_seconds) {
  return absl::FormatTime("%Y-%m-%d", absl::FromUnixSeconds(unix_seconds),
                          absl::UTCTimeZone());
}

std::string Count(size_t count, absl::string_view noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

std::string Tokens(const Interval& interval) {
  return interval.m_min == interval.m_max
             ? absl::StrCat(interval.m_max)
             : absl::StrCat(interval.m_min, "–", interval.m_max);
}

std::string TokensNoun(const Interval& interval) {
  return absl::StrCat(Tokens(interval),
                      interval.m_max == 1 ? " token" : " tokens");
}

// "A".."Z", "AA"..
std::string Letter(size_t index) {
  std::string out;
  for (size_t i = index + 1; i > 0; i = (i - 1) / 26) {
    out.insert(out.begin(), static_cast<char>('A' + (i - 1) % 26));
  }
  return out;
}

std::string Cell(absl::string_view text) {
  return absl::StrCat("<td>", EscapeMarkup(text), "</td>");
}

std::string Number(absl::string_view text) {
  return absl::StrCat("<td class=\"n\">", EscapeMarkup(text), "</td>");
}

// A plan's label, which may break between its axes.
std::string LabelCell(absl::string_view label) {
  return absl::StrCat(
      "<td class=\"label\">",
      absl::StrReplaceAll(EscapeMarkup(label), {{",", ",<wbr/>"}}), "</td>");
}

bool Finished(const Measurement& measurement) {
  return (measurement.verdict == Verdict::kWon ||
          measurement.verdict == Verdict::kLost) &&
         std::isfinite(MedianNs(measurement)) && MedianNs(measurement) > 0;
}

// What the charts show of one plan.
struct Point {
  const ReportPlan* plan = nullptr;
  Interval interval;
  size_t winner = 0;  // index of the group's winners
  double median = 0;  // ns; of the winner, as stored with the plan
  double low = 0;     // ns; the winner's samples or the noise floor
  double high = 0;
  double default_median = 0;  // ns; 0 when the default did not finish

  struct Rival {
    std::string label;
    double median = 0;
  };

  std::vector<Rival> rivals;  // that finished; neither winner nor default

  double Ratio(double ns) const { return ns / median - 1; }

  bool IsDrawable() const { return std::isfinite(high) && median > 0; }
};

// Plans that share a chart.
struct Group {
  std::string geometry;
  std::string target;
  std::vector<CanonicalField> context;  // what else the keys have in common
  std::vector<const ReportPlan*> plans;
  std::vector<std::string> winners;  // labels in order of first appearance
  std::vector<Point> points;         // by capacity
};

// Fields of the key besides interval and geometry; a key that cannot be read
// stands alone.
std::vector<CanonicalField> ContextOf(const StoredPlan& stored) {
  const absl::StatusOr<CanonicalRecord> record =
      DecodeCanonical(stored.key.preimage);
  if (!record.ok()) return {{"key", stored.key.digest.ToHex()}};
  std::vector<CanonicalField> fields;
  for (const CanonicalField& field : record->fields) {
    const absl::string_view path = field.path;
    if (path.substr(0, 9) == "interval/") continue;
    fields.push_back(field);
  }
  return fields;
}

Point PointOf(const ReportPlan& plan, Group* group) {
  const Plan& stored = plan.stored.plan;
  Point point;
  point.plan = &plan;
  point.interval = stored.interval;
  const std::string label = stored.body.Label();
  const auto known =
      std::find(group->winners.begin(), group->winners.end(), label);
  point.winner = static_cast<size_t>(known - group->winners.begin());
  if (known == group->winners.end()) group->winners.push_back(label);
  point.median = stored.evidence.median_ns;
  // Nothing vouches that an imported number is sensible.
  const double floor = std::isfinite(stored.evidence.noise_floor)
                           ? std::max(stored.evidence.noise_floor, 0.0)
                           : 0;
  point.low = point.median * (1 - floor);
  point.high = point.median * (1 + floor);
  if (std::isfinite(stored.evidence.default_median_ns)) {
    point.default_median = stored.evidence.default_median_ns;
  }
  for (size_t i = 0; i < plan.evidence.size(); ++i) {
    const Measurement& measurement = plan.evidence[i];
    if (measurement.verdict == Verdict::kWon) {
      for (const Sample& sample : measurement.samples) {
        if (!(sample.ns > 0) || !std::isfinite(sample.ns)) continue;
        point.low = std::min(point.low, sample.ns);
        point.high = std::max(point.high, sample.ns);
      }
    } else if (i > 0 && Finished(measurement)) {
      point.rivals.push_back({measurement.label, MedianNs(measurement)});
    }
  }
  // A floor of 100 % or more has no lower end on a logarithmic axis.
  point.low = std::max(point.low, point.median / 10);
  return point;
}

std::vector<Group> GroupPlans(const ReportInput& input) {
  // Text, not bytes, so that the page is in an order that people expect.
  std::map<std::tuple<std::string, RequestGeometry, std::string>, Group> groups;
  for (const ReportPlan& plan : input.plans) {
    const Plan& stored = plan.stored.plan;
    std::vector<CanonicalField> context = ContextOf(plan.stored);
    std::string text;
    for (const CanonicalField& field : context) {
      absl::StrAppend(&text, field.path, "=", field.value, "\n");
    }
    Group& group =
        groups[{stored.target.ToString(), stored.geometry, std::move(text)}];
    group.geometry = stored.geometry.ToString();
    group.target = stored.target.ToString();
    group.context = std::move(context);
    group.plans.push_back(&plan);
  }
  std::vector<Group> out;
  for (auto& [key, group] : groups) {
    std::sort(group.plans.begin(), group.plans.end(),
              [](const ReportPlan* a, const ReportPlan* b) {
                const Interval& x = a->stored.plan.interval;
                const Interval& y = b->stored.plan.interval;
                return std::tie(x.m_max, x.m_min, a->stored.key.digest) <
                       std::tie(y.m_max, y.m_min, b->stored.key.digest);
              });
    for (const ReportPlan* plan : group.plans) {
      group.points.push_back(PointOf(*plan, &group));
    }
    out.push_back(std::move(group));
  }
  return out;
}

// The charts. ---------------------------------------------------------------

// Units of the drawing; the browser scales it.
constexpr double kWidth = 1040;
constexpr double kLeft = 84;
constexpr double kRight = 1024;
constexpr double kTimeTop = 34;
constexpr double kTimeBottom = 334;
constexpr double kStripTop = 386;
constexpr double kLaneHeight = 22;
constexpr double kRatioHeight = 190;

// Rivals further behind than this are drawn at the edge.
constexpr double kRatioMax = 1.0;

class Chart {
 public:
  explicit Chart(const Group& group) : group_(group) {
    uint32_t m_min = UINT32_MAX;
    uint32_t m_max = 1;
    for (const Point& point : group.points) {
      m_min = std::min(m_min, point.interval.m_min);
      m_max = std::max(m_max, point.interval.m_max);
    }
    // An interval starts behind the capacity before it, and 1 has room.
    x_low_ = m_min <= 1 ? 0.6 : m_min - 1.0;
    x_high_ = std::max(m_max * 1.08, x_low_ * 1.2);
    PlaceLanes();
    ratio_top_ = kStripTop + kLaneHeight * static_cast<double>(lanes_) + 46;
    ratio_bottom_ = ratio_top_ + kRatioHeight;
  }

  std::string Render() {
    const double height = ratio_bottom_ + 44;
    out_ = absl::StrFormat(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" "
        "role=\"img\" aria-label=\"%s\">\n",
        kWidth, height,
        EscapeMarkup(absl::StrCat("Time against tokens, ", group_.geometry,
                                  " on ", group_.target)));
    DrawTimes();
    DrawRegions();
    DrawRatios();
    absl::StrAppend(&out_, "</svg>\n");
    return std::move(out_);
  }

 private:
  double X(double tokens) const {
    const double at = std::log(std::max(tokens, x_low_) / x_low_) /
                      std::log(x_high_ / x_low_);
    return kLeft + at * (kRight - kLeft);
  }

  void Line(absl::string_view style, double x1, double y1, double x2,
            double y2) {
    absl::StrAppendFormat(&out_,
                          "<line class=\"%s\" x1=\"%.1f\" y1=\"%.1f\" "
                          "x2=\"%.1f\" y2=\"%.1f\"/>\n",
                          style, x1, y1, x2, y2);
  }

  void Text(absl::string_view style, absl::string_view anchor, double x,
            double y, absl::string_view text) {
    absl::StrAppendFormat(
        &out_,
        "<text class=\"%s\" text-anchor=\"%s\" x=\"%.1f\" y=\"%.1f\">%s"
        "</text>\n",
        style, anchor, x, y, EscapeMarkup(text));
  }

  // A mark that says what it is when pointed at.
  void Mark(absl::string_view shape, absl::string_view title) {
    absl::StrAppend(&out_, "<", shape, "><title>", EscapeMarkup(title),
                    "</title></", shape.substr(0, shape.find(' ')), ">\n");
  }

  void Path(absl::string_view style,
            const std::vector<std::pair<double, double>>& points, bool closed) {
    if (points.size() < 2) return;
    std::string d;
    for (const auto& [x, y] : points) {
      absl::StrAppendFormat(&d, "%s%.1f %.1f", d.empty() ? "M" : "L", x, y);
    }
    absl::StrAppend(&out_, "<path class=\"", style, "\" d=\"", d,
                    closed ? "Z" : "", "\"/>\n");
  }

  // Ticks stand at the capacities; labels only where there is room.
  void DrawTokenAxis(double top, double bottom) {
    double free_from = 0;
    uint32_t last = 0;
    for (const Point& point : group_.points) {
      const uint32_t m = point.interval.m_max;
      if (m == last) continue;
      last = m;
      const std::string text = absl::StrCat(m);
      const double half = 4.0 * static_cast<double>(text.size());
      Line("grid", X(m), top, X(m), bottom);
      if (X(m) - half < free_from) continue;
      Text("tick", "middle", X(m), bottom + 16, text);
      free_from = X(m) + half + 4;
    }
    Line("axis", kLeft, bottom, kRight, bottom);
    Line("axis", kLeft, top, kLeft, bottom);
  }

  void DrawDiamond(double x, double y, absl::string_view title) {
    Mark(absl::StrFormat(
             "path class=\"dmark\" d=\"M%.1f %.1fl5 5l-5 5l-5 -5Z\"", x, y - 5),
         title);
  }

  // Marks that both charts have, at the heights that `y` gives.
  template <typename Y>
  void DrawMarks(const Y& y) {
    std::vector<std::pair<double, double>> curve;
    std::vector<std::pair<double, double>> defaults;
    std::vector<std::pair<double, double>> band;
    for (const Point& point : group_.points) {
      const double x = X(point.interval.m_max);
      curve.emplace_back(x, y(point, point.median));
      band.emplace_back(x, y(point, point.high));
      if (point.default_median > 0) {
        defaults.emplace_back(x, y(point, point.default_median));
      }
    }
    for (auto point = group_.points.rbegin(); point != group_.points.rend();
         ++point) {
      band.emplace_back(X(point->interval.m_max), y(*point, point->low));
    }
    Path("band", band, true);
    for (const Point& point : group_.points) {
      for (const Point::Rival& rival : point.rivals) {
        Mark(absl::StrFormat("circle class=\"rival\" cx=\"%.1f\" cy=\"%.1f\" "
                             "r=\"3\"",
                             X(point.interval.m_max), y(point, rival.median)),
             absl::StrCat(rival.label, ": ", Time(rival.median), ", ",
                          Percent(point.Ratio(rival.median))));
      }
    }
    Path("default", defaults, false);
    Path("curve", curve, false);
    for (const Point& point : group_.points) {
      const double x = X(point.interval.m_max);
      Line("whisker", x, y(point, point.low), x, y(point, point.high));
      if (point.default_median > 0) {
        DrawDiamond(x, y(point, point.default_median),
                    absl::StrCat("default: ", Time(point.default_median), ", ",
                                 Percent(point.Ratio(point.default_median))));
      }
      Mark(absl::StrFormat(
               "circle class=\"w f%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"5\"",
               point.winner % kColours, x, y(point, point.median)),
           absl::StrCat(Letter(point.winner), ", ", TokensNoun(point.interval),
                        ": ", Time(point.median)));
    }
  }

  void DrawTimes() {
    double low = HUGE_VAL;
    double high = 0;
    for (const Point& point : group_.points) {
      low = std::min(low, point.low);
      high = std::max(high, point.high);
      if (point.default_median > 0) {
        low = std::min(low, point.default_median);
        high = std::max(high, point.default_median);
      }
      for (const Point::Rival& rival : point.rivals) {
        low = std::min(low, rival.median);
        high = std::max(high, rival.median);
      }
    }
    low /= 1.12;
    high *= 1.12;
    const auto height = [&](double ns) {
      return kTimeBottom - std::log(ns / low) / std::log(high / low) *
                               (kTimeBottom - kTimeTop);
    };
    Text("title", "start", 8, 16,
         "Time per launch of the whole plan (log), at the capacity of each "
         "interval");
    double free_above = HUGE_VAL;
    const int decades = static_cast<int>(std::floor(std::log10(low)));
    for (int decade = decades; decade <= decades + 24; ++decade) {
      for (const double factor : {1.0, 1.5, 2.0, 3.0, 5.0, 7.0}) {
        const double ns = factor * std::pow(10.0, decade);
        if (ns < low || ns > high) continue;
        // Wide ranges keep only 1, 2, 5, and then only 1.
        const double range = high / low;
        if (range > 10 && (factor == 1.5 || factor == 3 || factor == 7)) {
          continue;
        }
        if (range > 3e4 && factor != 1) continue;
        Line("grid", kLeft, height(ns), kRight, height(ns));
        if (height(ns) > free_above) continue;
        Text("tick", "end", kLeft - 8, height(ns) + 4, TickTime(ns));
        free_above = height(ns) - 13;
      }
    }
    DrawTokenAxis(kTimeTop, kTimeBottom);
    Text("tick", "end", kRight, kTimeBottom + 31, "tokens (log)");
    DrawMarks([&](const Point&, double ns) { return height(ns); });
    DrawLegend();
  }

  void DrawLegend() {
    const double y = kTimeTop + 14;
    double x = kLeft + 14;
    Line("curve", x, y, x + 26, y);
    Mark(
        absl::StrFormat("circle class=\"w f0\" cx=\"%.1f\" cy=\"%.1f\" r=\"5\"",
                        x + 13, y),
        "winner");
    Text("tick", "start", x + 32, y + 4, "winner (colour: which)");
    Line("default", x, y + 20, x + 26, y + 20);
    DrawDiamond(x + 13, y + 20, "default");
    Text("tick", "start", x + 32, y + 24, "default");
    Mark(absl::StrFormat(
             "circle class=\"rival\" cx=\"%.1f\" cy=\"%.1f\" r=\"3\"", x + 13,
             y + 40),
         "rival");
    Text("tick", "start", x + 32, y + 44, "rival that finished");
    absl::StrAppendFormat(&out_,
                          "<rect class=\"band\" x=\"%.1f\" y=\"%.1f\" "
                          "width=\"26\" height=\"12\"/>\n",
                          x, y + 54);
    Text("tick", "start", x + 32, y + 64,
         "noise: the winner's samples, at least the noise floor");
  }

  // Intervals of several manifests may overlap: each takes the first free lane.
  void PlaceLanes() {
    std::vector<const Point*> points;
    for (const Point& point : group_.points) points.push_back(&point);
    std::stable_sort(points.begin(), points.end(),
                     [](const Point* a, const Point* b) {
                       return a->interval.m_min < b->interval.m_min;
                     });
    std::vector<uint32_t> ends;
    for (const Point* point : points) {
      size_t lane = 0;
      while (lane < ends.size() && ends[lane] >= point->interval.m_min) ++lane;
      if (lane == ends.size()) ends.push_back(0);
      ends[lane] = point->interval.m_max;
      placed_.emplace_back(point, lane);
    }
    lanes_ = std::max<size_t>(ends.size(), 1);
  }

  void DrawRegions() {
    Text("title", "start", 8, kStripTop - 6, "Winner of each interval");
    for (const auto& [point, lane] : placed_) {
      const double left = X(point->interval.m_min - 1.0);
      const double right = X(point->interval.m_max);
      const double top = kStripTop + kLaneHeight * static_cast<double>(lane);
      const size_t colour = point->winner % kColours;
      Mark(absl::StrFormat("rect class=\"region f%d s%d\" x=\"%.1f\" "
                           "y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" rx=\"3\"",
                           colour, colour, left + 1, top + 1,
                           std::max(right - left - 2, 0.5), kLaneHeight - 4),
           absl::StrCat(TokensNoun(point->interval), ": ",
                        group_.winners[point->winner]));
      if (right - left >
          9 * static_cast<double>(Letter(point->winner).size()) + 4) {
        Text("letter", "middle", (left + right) / 2, top + 14,
             Letter(point->winner));
      }
    }
  }

  void DrawRatios() {
    double low = 0;
    double high = 0.02;
    for (const Point& point : group_.points) {
      low = std::min(low, point.Ratio(point.low));
      high = std::max(high, point.Ratio(point.high));
      if (point.default_median > 0) {
        low = std::min(low, point.Ratio(point.default_median));
        high = std::max(high, point.Ratio(point.default_median));
      }
      for (const Point::Rival& rival : point.rivals) {
        low = std::min(low, point.Ratio(rival.median));
        high = std::max(high, point.Ratio(rival.median));
      }
    }
    high = std::min(high, kRatioMax);
    const double raw_step = (high - low) / 5;
    double step = std::pow(10.0, std::floor(std::log10(raw_step)));
    for (const double factor : {5.0, 2.0}) {
      if (step * factor <= raw_step * 1.01) {
        step *= factor;
        break;
      }
    }
    const int first = static_cast<int>(std::floor(low / step + 1e-9));
    const int last = static_cast<int>(std::ceil(high / step - 1e-9));
    low = first * step;
    high = last * step;
    const auto height = [&](double ratio) {
      return ratio_bottom_ - (std::clamp(ratio, low, high) - low) /
                                 (high - low) * (ratio_bottom_ - ratio_top_);
    };
    Text("title", "start", 8, ratio_top_ - 12,
         "Time against the winner's in the same interval; further than +100 % "
         "stands at the edge");
    for (int tick = first; tick <= last; ++tick) {
      const double y = height(tick * step);
      Line(tick == 0 ? "axis" : "grid", kLeft, y, kRight, y);
      // + 0.0 keeps zero without a sign.
      Text("tick", "end", kLeft - 8, y + 4,
           tick == 0 ? "0 %"
                     : absl::StrFormat("%+g %%", 100 * tick * step + 0.0));
    }
    DrawTokenAxis(ratio_top_, ratio_bottom_);
    Text("tick", "end", kRight, ratio_bottom_ + 31, "tokens (log)");
    DrawMarks(
        [&](const Point& point, double ns) { return height(point.Ratio(ns)); });
  }

  const Group& group_;
  double x_low_ = 1;   // tokens at the left end
  double x_high_ = 2;  // and at the right
  std::vector<std::pair<const Point*, size_t>> placed_;  // with its lane
  size_t lanes_ = 1;
  double ratio_top_ = 0;
  double ratio_bottom_ = 0;
  std::string out_;
};

// The tables. ---------------------------------------------------------------

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
std::optional<std::string> OtherWinner(const ReportPlan& plan) {
  const std::optional<size_t> derived =
      WinnerOf(plan.evidence, plan.stored.plan.evidence.noise_floor);
  if (!derived.has_value()) return "none";
  if (plan.evidence[*derived].candidate ==
      CandidateDigest(plan.stored.plan.body, plan.stored.plan.programs)) {
    return std::nullopt;
  }
  return plan.evidence[*derived].label;
}

void AppendIntervals(const Group& group, std::string* out) {
  absl::StrAppend(
      out,
      "<h3>Intervals</h3>\n<div class=\"wide\"><table>\n<tr>"
      "<th class=\"n\">tokens</th><th>winner</th><th class=\"n\">median</th>"
      "<th class=\"n\">default</th><th class=\"n\">default loses by</th>"
      "<th class=\"n\">next rival loses by</th>"
      "<th class=\"n\">noise floor</th><th class=\"n\">error</th>"
      "<th class=\"n\">samples</th><th class=\"n\">candidates</th>"
      "<th>samples replayed</th></tr>\n");
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
    double next = HUGE_VAL;
    for (const Measurement& measurement : point.plan->evidence) {
      if (measurement.verdict != Verdict::kLost || !Finished(measurement)) {
        continue;
      }
      next = std::min(next, point.Ratio(MedianNs(measurement)));
    }
    absl::StrAppend(
        out, "<tr>", Number(Tokens(point.interval)), "<td>",
        WinnerKey(point.winner), "</td>", Number(Time(point.median)),
        Number(has_default ? Time(point.default_median) : "–"),
        Number(has_default ? Percent(point.Ratio(point.default_median)) : "–"),
        Number(Percent(next)),
        Number(absl::StrFormat("%.2f %%", 100 * evidence.noise_floor)),
        Number(Error(evidence.worst_error)),
        Number(absl::StrCat(evidence.samples)),
        Number(absl::StrCat(evidence.candidates)),
        other.has_value() ? "<td class=\"bad\">another winner</td>"
                          : "<td>same winner</td>",
        "</tr>\n");
  }
  absl::StrAppend(out, "</table></div>\n", notes);
}

// What failed, each once with the intervals where it did.
void AppendRejects(const Group& group, std::string* out) {
  std::map<std::pair<std::string, std::string>, std::vector<std::string>> rows;
  for (const Point& point : group.points) {
    for (const Measurement& measurement : point.plan->evidence) {
      if (measurement.verdict != Verdict::kRejected) continue;
      rows[{measurement.reason, measurement.label}].push_back(
          Tokens(point.interval));
    }
  }
  absl::StrAppend(out, "<h3>Rejected candidates</h3>\n");
  if (rows.empty()) {
    absl::StrAppend(out, "<p class=\"soft\">None.</p>\n");
    return;
  }
  absl::StrAppend(out,
                  "<div class=\"wide\"><table>\n<tr><th>reason</th>"
                  "<th>plan</th><th>at tokens</th></tr>\n");
  for (const auto& [what, intervals] : rows) {
    absl::StrAppend(out, "<tr>", Cell(what.first), LabelCell(what.second),
                    Cell(absl::StrJoin(intervals, ", ")), "</tr>\n");
  }
  absl::StrAppend(out, "</table></div>\n");
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
    std::map<Verdict, size_t> counts;
    for (const Measurement& measurement : evidence) {
      ++counts[measurement.verdict];
    }
    std::vector<std::string> parts;
    for (const auto& [verdict, count] : counts) {
      parts.push_back(absl::StrCat(count, " ", VerdictName(verdict)));
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
      const double median = MedianNs(evidence[i]);
      return std::tuple(evidence[i].verdict == Verdict::kWon ? 0 : 1,
                        std::isfinite(median) ? median : HUGE_VAL, i);
    };
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return rank(a) < rank(b); });
    for (const size_t i : order) {
      const Measurement& measurement = evidence[i];
      absl::StrAppend(out, "<tr>", LabelCell(measurement.label),
                      Cell(VerdictName(measurement.verdict)),
                      Number(Time(MedianNs(measurement))),
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

std::string OriginOf(const std::vector<const ReportPlan*>& plans) {
  std::string device = Distinct(plans, [](const ReportPlan* plan) {
    return plan->stored.provenance.device_name;
  });
  const std::string tool = Distinct(plans, [](const ReportPlan* plan) {
    return plan->stored.provenance.tool_version;
  });
  int64_t first = INT64_MAX;
  int64_t last = INT64_MIN;
  for (const ReportPlan* plan : plans) {
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
                  EscapeMarkup(group.target), "</h2>\n<p class=\"soft\">",
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
                      : Chart(drawn).Render(),
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
          "faster, "
          "but not by that much.",
          100 * kSelectionMarginMin)),
      " “Samples replayed” derives the winner once more from the stored "
      "samples.</p>\n<p>No roofline is drawn: the cache holds no measured "
      "ceilings of the devices.</p>\n</section>\n");
}

}  // namespace

std::string EscapeMarkup(absl::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    uint32_t code = 0;
    const size_t length = DecodeUtf8(text, &code);
    if (length == 0 || !IsXmlChar(code)) {
      absl::StrAppend(&out, "\xEF\xBF\xBD");
    } else if (code == '&') {
      absl::StrAppend(&out, "&amp;");
    } else if (code == '<') {
      absl::StrAppend(&out, "&lt;");
    } else if (code == '>') {
      absl::StrAppend(&out, "&gt;");
    } else if (code == '"') {
      absl::StrAppend(&out, "&quot;");
    } else if (code == '\'') {
      absl::StrAppend(&out, "&#39;");
    } else {
      absl::StrAppend(&out, text.substr(0, length));
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return out;
}

std::string RenderReport(const ReportInput& input) {
  std::vector<const ReportPlan*> plans;
  for (const ReportPlan& plan : input.plans) plans.push_back(&plan);
  std::string out = absl::StrCat(
      "<!DOCTYPE html>\n<html xmlns=\"http://www.w3.org/1999/xhtml\" "
      "lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src "
      "'none'; style-src 'unsafe-inline'\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width\"/>\n"
      "<title>Kiln report</title>\n<style>",
      kStyle, "</style>\n</head>\n<body>\n<h1>Kiln report</h1>\n");
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
    ReportPlan plan;
    ASSIGN_OR_RETURN(plan.evidence, cache->LoadMeasurements(stored.key.digest));
    plan.stored = std::move(stored);
    input.plans.push_back(std::move(plan));
  }
  return input;
}

}  // namespace kiln
