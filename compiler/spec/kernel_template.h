// KernelTemplate: parameterised kernel source with its candidate axes, its
// constraints, its launch rule and its arena rule.

#ifndef KILN_COMPILER_SPEC_KERNEL_TEMPLATE_H_
#define KILN_COMPILER_SPEC_KERNEL_TEMPLATE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/spec/device_profile.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/request.h"
#include "compiler/spec/target.h"

namespace kiln {

// What a candidate is asked to serve.
struct Problem {
  RequestGeometry geometry;
  Interval interval;
  DeviceProfile device;
};

// A rule of a template and how many of its points break it.
struct RejectedPoints {
  std::string reason;
  size_t count = 0;
};

// The points of a template for one problem.
struct ParamSpace {
  // Legal points in order of predicted cost, at most as many as were asked
  // for; the first is the default, which always races.
  std::vector<Assignment> points;
  size_t legal = 0;                     // how many there are in all
  std::vector<RejectedPoints> rejects;  // by reason, sorted
};

// Stateless; all members are pure functions and may be called from any thread.
class KernelTemplate {
 public:
  virtual ~KernelTemplate();

  virtual absl::string_view name() const = 0;  // "fused_moe.cuda"
  // Moves when the semantics change; part of every key.
  virtual uint32_t version() const = 0;
  // See TemplateIdentity::sources.
  virtual Digest sources() const = 0;
  virtual Op op() const = 0;
  // Of the weights; exl3 unless a template says otherwise.
  virtual WeightFormat format() const;
  virtual Backend backend() const = 0;

  // Unimplemented, with the reason, when no point can serve the geometry.
  virtual absl::Status Supports(const RequestGeometry& geometry,
                                const Target& target) const = 0;

  // The `points_max` legal points that are predicted best. Deterministic.
  virtual ParamSpace Enumerate(const Problem& problem,
                               size_t points_max) const = 0;

  // Launches, arguments and arena at `assignment`. InvalidArgument for an
  // unknown axis, a value outside the axis, or a broken constraint.
  virtual absl::StatusOr<PlanBody> MakeBody(
      const Problem& problem, const Assignment& assignment) const = 0;

  // What to compile at `assignment`, which MakeBody accepted. Does not depend
  // on the interval: capacities share programs.
  virtual std::vector<SourceUnit> MakeUnits(
      const RequestGeometry& geometry, const Target& target,
      const Assignment& assignment) const = 0;

  // Both.
  absl::StatusOr<Candidate> Instantiate(const Problem& problem,
                                        const Assignment& assignment) const;
};

}  // namespace kiln

#endif  // KILN_COMPILER_SPEC_KERNEL_TEMPLATE_H_
