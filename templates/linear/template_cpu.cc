#include "templates/linear/template_cpu.h"

#include <array>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "templates/axes.h"
#include "templates/cpu/product_axes.h"
#include "templates/linear/op.h"
#include "templates/registry.h"

namespace kiln {
namespace {

uint32_t CeilDiv(int64_t value, int64_t by) {
  return static_cast<uint32_t>((value + by - 1) / by);
}

class Template : public KernelTemplate {
 public:
  absl::string_view name() const override { return "linear.cpu"; }

  uint32_t version() const override { return 1; }

  Digest sources() const override {
    static const Digest digest = TemplateSourcesDigest(
        {"axes.cc", "cpu/product_axes.cc", "cpu/trellis_product.h",
         "linear/cpu.cc", "linear/op.cc", "linear/template_cpu.cc"});
    return digest;
  }

  Op op() const override { return Op::kLinear; }

  Backend backend() const override { return Backend::kCpu; }

  absl::Status Supports(const RequestGeometry& geometry,
                        const Target& target) const override {
    if (geometry.op != Op::kLinear || target.backend != Backend::kCpu) {
      return absl::UnimplementedError(
          absl::StrCat(name(), " serves linear on CPU targets"));
    }
    return absl::OkStatus();
  }

  ParamSpace Enumerate(const Problem& problem,
                       size_t points_max) const override {
    const std::vector<Axis> axes = CpuProductAxes(problem);
    const LinearShape& shape = problem.geometry.linear;
    const double weights = static_cast<double>(shape.in_features) *
                           static_cast<double>(shape.out_features);
    return OrderPoints(
        axes, {"k_tile", "unroll"},
        [&](const AxisPoint& point) {
          return CpuProductConstraint(problem, point);
        },
        [&](const AxisPoint& point) {
          const uint32_t tiles =
              CeilDiv(problem.interval.m_max, point.at("tokens_tile"));
          return CpuProductCost(point, tiles, weights, shape.out_features);
        },
        points_max);
  }

  absl::StatusOr<PlanBody> MakeBody(
      const Problem& problem, const Assignment& assignment) const override {
    const std::vector<Axis> axes = CpuProductAxes(problem);
    RETURN_IF_ERROR(CheckAssignment(axes, assignment));
    const std::string broken =
        CpuProductConstraint(problem, AxisPoint(&axes, assignment));
    if (!broken.empty()) return absl::InvalidArgumentError(broken);
    PlanBody body;
    body.template_name = std::string(name());
    body.template_version = version();
    body.assignment = assignment;
    // Every sum runs in ascending order with one fma per term, whatever the
    // axes are.
    body.numerics_class = "w4a16.f16.sequential";
    body.tolerance = kLinearTolerance;
    body.deterministic = true;
    body.cpu_threads = static_cast<uint32_t>(assignment.at("threads"));
    body.params = LinearParams(problem.geometry);
    AddSteps(problem, assignment, &body);
    return body;
  }

  std::vector<SourceUnit> MakeUnits(
      const RequestGeometry& geometry, const Target&,
      const Assignment& assignment) const override {
    SourceUnit unit;
    unit.name = "linear/cpu.cc";
    unit.template_version = version();
    unit.compute_dtype = "f16";
    unit.text = absl::StrCat(LinearPrelude(geometry),
                             AxisPrelude(assignment, CpuProductMacros()),
                             TemplateText("linear/cpu.cc"));
    unit.headers = CpuHeaders();
    unit.entries = {"kiln_linear_cpu_finish", "kiln_linear_cpu_multiply",
                    "kiln_linear_cpu_rotate"};
    return {unit};
  }

 private:
  // Steps, arguments and slices as the head of cpu.cc lists them.
  static void AddSteps(const Problem& problem, const Assignment& assignment,
                       PlanBody* body) {
    const RequestGeometry& geometry = problem.geometry;
    const LinearShape& shape = geometry.linear;
    const auto tile = static_cast<uint32_t>(assignment.at("tokens_tile"));
    const uint64_t rows =
        uint64_t{CeilDiv(problem.interval.m_max, tile)} * tile;
    const Arg rotated = Arg::Arena(body->arena.Add(
        "rotated", 2 * rows * static_cast<uint64_t>(shape.in_features)));
    const Arg sums = Arg::Arena(body->arena.Add(
        "sums", 4 * rows * static_cast<uint64_t>(shape.out_features)));

    const LaunchDim one = LaunchDim::Constant(1);
    const LaunchDim tiles = LaunchDim::Of({.mul = 1, .add = 0, .div = tile});
    const LaunchDim tokens = LaunchDim::Of({.mul = 1, .add = 0, .div = 1});
    const auto p = [&geometry](LinearParam param) {
      return Arg::Param(LinearSlotOf(geometry, param));
    };
    using P = LinearParam;
    const auto add = [body](absl::string_view label,
                            std::array<LaunchDim, 3> grid,
                            std::vector<Arg> args) {
      Step step;
      step.label = std::string(label);
      step.entry = absl::StrCat("kiln_linear_cpu_", label);
      step.grid = grid;
      step.args = std::move(args);
      body->steps.push_back(std::move(step));
    };
    add("rotate",
        {tiles, LaunchDim::Constant(CeilDiv(shape.in_features, kCpuChunk)),
         one},
        {Arg::Tokens(), p(P::kX), p(P::kSuh), rotated});
    add("multiply",
        {tiles,
         LaunchDim::Constant(
             CeilDiv(shape.out_features, assignment.at("channels_tile"))),
         one},
        {p(P::kW), rotated, sums});
    std::vector<Arg> finish = {sums, p(P::kSvh)};
    if (shape.bias) finish.push_back(p(P::kBias));
    finish.push_back(p(P::kOut));
    add("finish",
        {tokens, LaunchDim::Constant(CeilDiv(shape.out_features, kCpuChunk)),
         one},
        std::move(finish));
  }
};

}  // namespace

const KernelTemplate* LinearCpuTemplate() {
  static const auto* const instance = new Template;
  return instance;
}

}  // namespace kiln
