#include "templates/axes.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"

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

AxisPoint::AxisPoint(const std::vector<Axis>* axes,
                     const Assignment& assignment)
    : axes_(axes) {
  for (const Axis& axis : *axes) values_.push_back(assignment.at(axis.name));
}

int64_t AxisPoint::at(absl::string_view axis) const {
  for (size_t i = 0; i < axes_->size(); ++i) {
    if ((*axes_)[i].name == axis) return values_[i];
  }
  KILN_UNREACHABLE();
}

Assignment AxisPoint::ToAssignment() const {
  Assignment assignment;
  for (size_t i = 0; i < axes_->size(); ++i) {
    assignment[(*axes_)[i].name] = values_[i];
  }
  return assignment;
}

ParamSpace OrderPoints(
    const std::vector<Axis>& axes, const std::vector<std::string>& variants,
    const std::function<std::string(const AxisPoint&)>& constraint,
    const std::function<double(const AxisPoint&)>& cost, size_t points_max) {
  struct Ranked {
    double cost = 0;
    size_t group = 0;
    size_t turn = 0;
    AxisPoint point;
  };

  std::vector<bool> varies;
  size_t total = 1;
  size_t groups = 1;
  for (const Axis& axis : axes) {
    varies.push_back(std::find(variants.begin(), variants.end(), axis.name) !=
                     variants.end());
    total *= axis.values.size();
    if (!varies.back()) groups *= axis.values.size();
  }
  std::map<std::string, size_t> rejects;
  std::vector<Ranked> legal;
  for (size_t index = 0; index < total; ++index) {
    std::vector<int64_t> values(axes.size());
    size_t rest = index;
    size_t group = 0;
    size_t stride = 1;
    for (size_t i = axes.size(); i-- > 0;) {
      const size_t count = axes[i].values.size();
      values[i] = axes[i].values[rest % count];
      if (!varies[i]) {
        group += stride * (rest % count);
        stride *= count;
      }
      rest /= count;
    }
    AxisPoint point(&axes, std::move(values));
    std::string reason = constraint(point);
    if (!reason.empty()) {
      ++rejects[std::move(reason)];
      continue;
    }
    const double predicted = cost(point);
    legal.push_back({predicted, group, 0, std::move(point)});
  }
  std::stable_sort(
      legal.begin(), legal.end(),
      [](const Ranked& a, const Ranked& b) { return a.cost < b.cost; });
  std::vector<size_t> members(groups, 0);
  for (Ranked& ranked : legal) ranked.turn = members[ranked.group]++;
  std::stable_sort(
      legal.begin(), legal.end(),
      [](const Ranked& a, const Ranked& b) { return a.turn < b.turn; });
  ParamSpace space;
  space.legal = legal.size();
  for (size_t i = 0; i < std::min(points_max, legal.size()); ++i) {
    space.points.push_back(legal[i].point.ToAssignment());
  }
  for (const auto& [reason, count] : rejects) {
    space.rejects.push_back({reason, count});
  }
  return space;
}

absl::Status CheckServes(const KernelTemplate& from,
                         const RequestGeometry& geometry, bool is_target,
                         absl::string_view targets) {
  if (geometry.op == from.op() && geometry.weights.format == from.format() &&
      is_target) {
    return absl::OkStatus();
  }
  return absl::UnimplementedError(absl::StrCat(
      from.name(), " serves ", OpName(from.op()), " over weights of ",
      WeightFormatName(from.format()), " ", targets));
}

std::string WarpStripsRule(const AxisPoint& point) {
  const int64_t channels = point.at("channels_tile");
  const int64_t warps = point.at("warps");
  if (channels >= 16 * warps) return "";
  return absl::StrCat("channels_tile ", channels, " gives ", warps,
                      " warps less than one tile of 16 channels each");
}

std::string ThreadSumsRule(const AxisPoint& point) {
  constexpr int64_t kSumsMax = 128;  // without spilling
  const int64_t sums = point.at("channels_tile") / 16 / point.at("warps") *
                       point.at("tokens_tile") / 8 * 4;
  if (sums <= kSumsMax) return "";
  return absl::StrCat(sums, " sums per thread, at most ", kSumsMax,
                      " fit the registers");
}

std::string SharedBytesRule(const Problem& problem, int64_t shared_bytes) {
  if (shared_bytes <= problem.device.shared_bytes_max) return "";
  return absl::StrCat("shared memory ", shared_bytes, " B exceeds the ",
                      problem.device.shared_bytes_max, " B of a block on ",
                      problem.device.target.ToString());
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
