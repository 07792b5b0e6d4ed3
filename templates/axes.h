// Axes of a template: the cross product of their values, and the checks that
// every template makes of an assignment.

#ifndef KILN_TEMPLATES_AXES_H_
#define KILN_TEMPLATES_AXES_H_

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
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

// One point of a cross product, light enough to make thousands of: borrows the
// axes.
class AxisPoint {
 public:
  AxisPoint(const std::vector<Axis>* axes, std::vector<int64_t> values)
      : axes_(axes), values_(std::move(values)) {}

  // Reads an assignment that CheckAssignment accepted.
  AxisPoint(const std::vector<Axis>* axes, const Assignment& assignment);

  // The value of an axis; aborts on a name that is no axis.
  int64_t at(absl::string_view axis) const;

  const std::vector<int64_t>& values() const { return values_; }

  Assignment ToAssignment() const;

 private:
  const std::vector<Axis>* axes_;
  std::vector<int64_t> values_;  // in the order of the axes
};

// Splits the cross product into legal and rejected points by `constraint`
// (empty, or the reason) and orders the legal ones: points that differ only in
// the axes named by `variants` form a group; the cheapest member of each group
// comes first, by cost, then every group's second member, and so on. A short
// prefix is thus diverse. Ties keep the order of the cross product, whose last
// axis varies fastest.
ParamSpace OrderPoints(
    const std::vector<Axis>& axes, const std::vector<std::string>& variants,
    const std::function<std::string(const AxisPoint&)>& constraint,
    const std::function<double(const AxisPoint&)>& cost, size_t points_max);

// Unimplemented unless the geometry is of the template's op and weight format
// and the target is one of its own.
//   targets: those, "on CPU targets"
absl::Status CheckServes(const KernelTemplate& from,
                         const RequestGeometry& geometry, bool is_target,
                         absl::string_view targets);

// Rules of CUDA templates: empty, or why a point breaks it.
// Warps of a block have whole strips of 16 of its channels_tile.
std::string WarpStripsRule(const AxisPoint& point);
// Sums of a thread for tokens_tile fit its registers.
std::string ThreadSumsRule(const AxisPoint& point);
// A block may have so much shared memory.
std::string SharedBytesRule(const Problem& problem, int64_t shared_bytes);

// "#define KILN_TOKENS_TILE 8" for each named axis.
std::string AxisPrelude(const Assignment& assignment,
                        const std::vector<std::string>& names);

}  // namespace kiln

#endif  // KILN_TEMPLATES_AXES_H_
