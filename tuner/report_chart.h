// The charts of the report: measured plans grouped by what they have in common,
// drawn as SVG.

#ifndef KILN_TUNER_REPORT_CHART_H_
#define KILN_TUNER_REPORT_CHART_H_

#include <cstddef>
#include <string>
#include <vector>

#include "compiler/base/digest.h"
#include "compiler/spec/request.h"
#include "tuner/ceilings.h"
#include "tuner/conclusion.h"
#include "tuner/report.h"

namespace kiln {

// What the charts show of one plan.
struct Point {
  const MeasuredPlan* plan = nullptr;
  Interval interval;
  size_t winner = 0;  // index of the group's winners
  double median = 0;  // ns; of the winner, as stored with the plan
  double low = 0;     // ns; the winner's samples or the noise floor
  double high = 0;
  double default_median = 0;  // ns; 0 when the default did not finish
  std::vector<double> times;  // TimesNs of the plan's evidence
  Floor floor;                // of the interval's capacity; zero when unknown

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
  std::string apart;                    // WhatTellsApart
  std::vector<CanonicalField> context;  // what else the keys have in common
  std::vector<const MeasuredPlan*> plans;
  std::vector<std::string> winners;  // labels in order of first appearance
  std::vector<Point> points;         // by capacity
};

// The groups in the order of the page. Points borrow the input's plans.
std::vector<Group> GroupPlans(const ReportInput& input);

// One SVG element: times, winner regions, ratios. Every point must be drawable,
// and there must be one.
std::string RenderChart(const Group& group);

}  // namespace kiln

#endif  // KILN_TUNER_REPORT_CHART_H_
