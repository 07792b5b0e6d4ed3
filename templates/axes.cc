#include "templates/axes.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kiln {

absl::Status CheckAssignment(const std::vector<Axis>& axes,
                             const Assignment& assignment) {
  for (const Axis& axis : axes) {
    const auto it = assignment.find(axis.name);
    if (it == assignment.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("axis ", axis.name, " has no value"));
    }
    if (std::find(axis.values.begin(), axis.values.end(), it->second) ==
        axis.values.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("axis ", axis.name, " is ", it->second,
                       ", must be one of ", absl::StrJoin(axis.values, ", ")));
    }
  }
  if (assignment.size() != axes.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("assignment ", AssignmentText(assignment), " has ",
                     assignment.size(), " axes, expected ", axes.size()));
  }
  return absl::OkStatus();
}

std::vector<Assignment> AllPoints(const std::vector<Axis>& axes) {
  std::vector<Assignment> points = {{}};
  for (const Axis& axis : axes) {
    std::vector<Assignment> next;
    next.reserve(points.size() * axis.values.size());
    for (const Assignment& point : points) {
      for (const int64_t value : axis.values) {
        Assignment extended = point;
        extended[axis.name] = value;
        next.push_back(std::move(extended));
      }
    }
    points = std::move(next);
  }
  return points;
}

ParamSpace OrderPoints(
    const std::vector<Axis>& axes, const std::vector<std::string>& variants,
    const std::function<absl::Status(const Assignment&)>& constraint,
    const std::function<double(const Assignment&)>& cost) {
  struct Ranked {
    double cost = 0;
    size_t turn = 0;
    Assignment assignment;
  };

  ParamSpace space;
  std::vector<Ranked> legal;
  for (Assignment& point : AllPoints(axes)) {
    const absl::Status status = constraint(point);
    if (status.ok()) {
      const double predicted = cost(point);
      legal.push_back({predicted, 0, std::move(point)});
    } else {
      space.rejects.push_back(
          {std::move(point), std::string(status.message())});
    }
  }
  std::stable_sort(
      legal.begin(), legal.end(),
      [](const Ranked& a, const Ranked& b) { return a.cost < b.cost; });
  std::map<Assignment, size_t> members;
  for (Ranked& ranked : legal) {
    Assignment group = ranked.assignment;
    for (const std::string& axis : variants) group.erase(axis);
    ranked.turn = members[group]++;
  }
  std::stable_sort(
      legal.begin(), legal.end(),
      [](const Ranked& a, const Ranked& b) { return a.turn < b.turn; });
  for (Ranked& ranked : legal) {
    space.points.push_back(std::move(ranked.assignment));
  }
  return space;
}

std::string AxisPrelude(const Assignment& assignment,
                        const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) {
    absl::StrAppend(&out, "#define KILN_", absl::AsciiStrToUpper(name), " ",
                    assignment.at(name), "\n");
  }
  return out;
}

}  // namespace kiln
