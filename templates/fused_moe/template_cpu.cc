#include "templates/fused_moe/template_cpu.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "templates/axes.h"
#include "templates/cpu/product_axes.h"
#include "templates/fused_moe/op.h"
#include "templates/registry.h"

namespace kiln {
namespace {

uint32_t CeilDiv(int64_t value, int64_t by) {
  return static_cast<uint32_t>((value + by - 1) / by);
}

class Template : public KernelTemplate {
 public:
  absl::string_view name() const override { return "fused_moe.cpu"; }

  uint32_t version() const override { return 1; }

  Digest sources() const override {
    static const Digest digest = TemplateSourcesDigest(
        {"axes.cc", "cpu/product_axes.cc", "cpu/trellis_product.h",
         "fused_moe/cpu.cc", "fused_moe/op.cc", "fused_moe/template_cpu.cc"});
    return digest;
  }

  Op op() const override { return Op::kFusedMoe; }

  Backend backend() const override { return Backend::kCpu; }

  absl::Status Supports(const RequestGeometry& geometry,
                        const Target& target) const override {
    if (geometry.op != Op::kFusedMoe || target.backend != Backend::kCpu) {
      return absl::UnimplementedError(
          absl::StrCat(name(), " serves fused_moe on CPU targets"));
    }
    return absl::OkStatus();
  }

  ParamSpace Enumerate(const Problem& problem,
                       size_t points_max) const override {
    const std::vector<Axis> axes = CpuProductAxes(problem);
    return OrderPoints(
        axes, {"k_tile", "unroll"},
        [&](const AxisPoint& point) {
          return CpuProductConstraint(problem, point);
        },
        [&](const AxisPoint& point) { return Cost(problem, point); },
        points_max);
  }

  absl::StatusOr<PlanBody> MakeBody(
      const Problem& problem, const Assignment& assignment) const override {
    const std::vector<Axis> axes = CpuProductAxes(problem);
    RETURN_IF_ERROR(CheckAssignment(axes, assignment));
    const std::string broken =
        CpuProductConstraint(problem, AxisPoint(&axes, assignment));
    if (!broken.empty()) return absl::InvalidArgumentError(broken);
    const RequestGeometry& geometry = problem.geometry;
    PlanBody body;
    body.template_name = std::string(name());
    body.template_version = version();
    body.assignment = assignment;
    // Every sum runs in ascending order with one fma per term, whatever the
    // axes are.
    body.numerics_class = "w4a16.f16.sequential";
    body.tolerance = kFusedMoeTolerance;
    body.deterministic = true;
    body.cpu_threads = static_cast<uint32_t>(assignment.at("threads"));
    body.params = FusedMoeParams(geometry);
    AddSteps(problem, assignment, &body);
    return body;
  }

  std::vector<SourceUnit> MakeUnits(
      const RequestGeometry& geometry, const Target&,
      const Assignment& assignment) const override {
    return {Unit(geometry, assignment)};
  }

 private:
  static double Cost(const Problem& problem, const AxisPoint& point) {
    const RequestGeometry& geometry = problem.geometry;
    const double tiles = FusedMoeTilesExpected(
        geometry, static_cast<uint32_t>(point.at("tokens_tile")),
        problem.interval.m_max);
    const double weights = 3.0 * static_cast<double>(geometry.hidden) *
                           static_cast<double>(geometry.intermediate);
    return CpuProductCost(point, tiles, weights, geometry.intermediate);
  }

  SourceUnit Unit(const RequestGeometry& geometry,
                  const Assignment& assignment) const {
    SourceUnit unit;
    unit.name = "fused_moe/cpu.cc";
    unit.template_version = version();
    unit.compute_dtype = "f16";
    unit.text = absl::StrCat(FusedMoePrelude(geometry),
                             AxisPrelude(assignment, CpuProductMacros()),
                             TemplateText("fused_moe/cpu.cc"));
    unit.headers = CpuHeaders();
    unit.entries = {"kiln_moe_cpu_activate", "kiln_moe_cpu_combine",
                    "kiln_moe_cpu_fc1",      "kiln_moe_cpu_fc2",
                    "kiln_moe_cpu_rotate",   "kiln_moe_cpu_route"};
    return unit;
  }

  // Steps, arguments and slices as the head of cpu.cc lists them.
  static void AddSteps(const Problem& problem, const Assignment& assignment,
                       PlanBody* body) {
    const RequestGeometry& geometry = problem.geometry;
    const auto tile = static_cast<uint32_t>(assignment.at("tokens_tile"));
    const auto strip = assignment.at("channels_tile");
    const auto hidden = static_cast<uint64_t>(geometry.hidden);
    const auto inter = static_cast<uint64_t>(geometry.intermediate);
    const uint32_t capacity = problem.interval.m_max;
    const uint64_t tiles = FusedMoeTilesMax(geometry, tile, capacity);
    const uint64_t rows = tiles * tile;

    ArenaLayout& arena = body->arena;
    const Arg tile_expert = Arg::Arena(arena.Add("tile_expert", 4 * tiles));
    const Arg tile_routes = Arg::Arena(arena.Add("tile_routes", 4 * rows));
    const Arg route_slot = Arg::Arena(arena.Add(
        "route_slot",
        uint64_t{4} * capacity * static_cast<uint64_t>(geometry.top_k)));
    const Arg gate_in = Arg::Arena(arena.Add("gate_in", 2 * rows * hidden));
    const Arg up_in = Arg::Arena(arena.Add("up_in", 2 * rows * hidden));
    const Arg gate_out = Arg::Arena(arena.Add("gate_out", 2 * rows * inter));
    const Arg up_out = Arg::Arena(arena.Add("up_out", 2 * rows * inter));
    const Arg down_in = Arg::Arena(arena.Add("down_in", 2 * rows * inter));
    const Arg down_out = Arg::Arena(arena.Add("down_out", 2 * rows * hidden));

    const LaunchDim one = LaunchDim::Constant(1);
    const LaunchDim tile_dim = FusedMoeTiles(geometry, tile, 1);
    const LaunchDim hidden_chunks =
        LaunchDim::Constant(CeilDiv(geometry.hidden, kCpuChunk));
    const LaunchDim inter_chunks =
        LaunchDim::Constant(CeilDiv(geometry.intermediate, kCpuChunk));
    const LaunchDim hidden_strips =
        LaunchDim::Constant(CeilDiv(geometry.hidden, strip));
    const LaunchDim inter_strips =
        LaunchDim::Constant(CeilDiv(geometry.intermediate, strip));
    const auto p = FusedMoeArg;
    using P = FusedMoeParam;
    const auto add = [body](absl::string_view label,
                            std::array<LaunchDim, 3> grid,
                            std::vector<Arg> args) {
      Step step;
      step.label = std::string(label);
      step.entry = absl::StrCat("kiln_moe_cpu_", label);
      step.grid = grid;
      step.args = std::move(args);
      body->steps.push_back(std::move(step));
    };
    add("route", {one, one, one},
        {Arg::Tokens(), p(P::kTopkIds), tile_expert, tile_routes, route_slot});
    add("rotate", {tile_dim, hidden_chunks, one},
        {tile_expert, tile_routes, p(P::kX), p(P::kGateSuh), p(P::kUpSuh),
         gate_in, up_in});
    add("fc1", {tile_dim, inter_strips, LaunchDim::Constant(2)},
        {tile_expert, p(P::kWGate), p(P::kWUp), gate_in, up_in, gate_out,
         up_out});
    add("activate", {tile_dim, inter_chunks, one},
        {tile_expert, tile_routes, p(P::kRotations), gate_out, up_out,
         down_in});
    add("fc2", {tile_dim, hidden_strips, one},
        {tile_expert, p(P::kWDown), down_in, down_out});
    add("combine",
        {LaunchDim::Of({.mul = 1, .add = 0, .div = 1}), hidden_chunks, one},
        {tile_expert, route_slot, p(P::kTopkWeights), p(P::kDownSvh), down_out,
         p(P::kOut)});
  }
};

}  // namespace

const KernelTemplate* FusedMoeCpuTemplate() {
  static const auto* const instance = new Template;
  return instance;
}

}  // namespace kiln
