#include "tuner/report_chart.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tuner/cost_model.h"
#include "tuner/report_format.h"

namespace kiln {
namespace {

Point PointOf(const ReportInput& input, const MeasuredPlan& plan,
              Group* group) {
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
  point.times = TimesNs(plan.evidence);
  for (size_t i = 0; i < plan.evidence.size(); ++i) {
    const Measurement& measurement = plan.evidence[i];
    if (measurement.verdict == Verdict::kWon) {
      for (const Sample& sample : measurement.samples) {
        if (!(sample.ns > 0) || !std::isfinite(sample.ns)) continue;
        point.low = std::min(point.low, sample.ns);
        point.high = std::max(point.high, sample.ns);
      }
    } else if (i > 0 && IsFinished(measurement) &&
               std::isfinite(point.times[i]) && point.times[i] > 0) {
      point.rivals.push_back({measurement.label, point.times[i]});
    }
  }
  const auto ceilings = input.ceilings.find(CeilingsKeyOf(plan.stored));
  if (ceilings != input.ceilings.end()) {
    const uint32_t m = stored.interval.m_max;
    point.floor = FloorOf(
        WorkOf(stored.geometry, m, ExpectedExperts(stored.geometry, m),
               ceilings->second, IsSummedByMma(stored.body.numerics_class)),
        ceilings->second);
  }
  // A noise floor of 100 % or more has no lower end on a logarithmic axis.
  point.low = std::max(point.low, point.median / 10);
  return point;
}

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
      const double floor = point.floor.Seconds() * 1e9;
      if (floor > 0) low = std::min(low, floor);
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
    std::vector<std::pair<double, double>> floors;
    for (const Point& point : group_.points) {
      const double ns = point.floor.Seconds() * 1e9;
      if (ns > 0) floors.emplace_back(X(point.interval.m_max), height(ns));
    }
    Path("floor", floors, false);
    DrawMarks([&](const Point&, double ns) { return height(ns); });
    DrawLegend(!floors.empty());
  }

  void DrawLegend(bool has_floors) {
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
    if (!has_floors) return;
    Line("floor", x, y + 80, x + 26, y + 80);
    Text("tick", "start", x + 32, y + 84,
         "roofline floor: max(bytes, decode + multiply)");
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

}  // namespace

std::vector<Group> GroupPlans(const ReportInput& input) {
  std::vector<const MeasuredPlan*> plans;
  for (const MeasuredPlan& plan : input.plans) plans.push_back(&plan);
  std::vector<Group> out;
  std::vector<std::vector<const MeasuredPlan*>> groups = GroupByContext(plans);
  const std::vector<std::string> apart = WhatTellsApart(groups);
  for (size_t i = 0; i < groups.size(); ++i) {
    std::vector<const MeasuredPlan*>& members = groups[i];
    Group group;
    group.apart = apart[i];
    const StoredPlan& first = members.front()->stored;
    group.geometry = first.plan.geometry.ToString();
    group.target = first.plan.target.ToString();
    group.context = ContextOf(first);
    for (const MeasuredPlan* plan : members) {
      group.points.push_back(PointOf(input, *plan, &group));
    }
    group.plans = std::move(members);
    out.push_back(std::move(group));
  }
  return out;
}

std::string RenderChart(const Group& group) { return Chart(group).Render(); }

}  // namespace kiln
