// Axes of a template: the cross product of their values, and the checks that
// every template makes of an assignment.

#ifndef KILN_TEMPLATES_AXES_H_
#define KILN_TEMPLATES_AXES_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "compiler/spec/kernel_template.h"
#include "compiler/spec/plan.h"

namespace kiln {

struct Axis {
  std::string name;
  std::vector<int64_t> values;
};

// InvalidArgument unless `assignment` has exactly the axes, each with one of
// its values.
absl::Status CheckAssignment(const std::vector<Axis>& axes,
                             const Assignment& assignment);

// Every point of the cross product.
std::vector<Assignment> AllPoints(const std::vector<Axis>& axes);

// Splits all points into legal and rejected by `constraint` (OK or the reason)
// and orders the legal ones: points that differ only in the axes named by
// `variants` form a group; the cheapest member of each group comes first, by
// cost, then every group's second member, and so on. A short prefix is thus
// diverse. Ties keep the order of the cross product.
ParamSpace OrderPoints(
    const std::vector<Axis>& axes, const std::vector<std::string>& variants,
    const std::function<absl::Status(const Assignment&)>& constraint,
    const std::function<double(const Assignment&)>& cost);

// "#define KILN_TOKENS_TILE 8" for each named axis.
std::string AxisPrelude(const Assignment& assignment,
                        const std::vector<std::string>& names);

}  // namespace kiln

#endif  // KILN_TEMPLATES_AXES_H_
