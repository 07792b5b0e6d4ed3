#include "templates/fused_moe/template_mx_cpu.h"

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "templates/axes.h"
#include "templates/cpu/product_axes.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/op_mx.h"
#include "templates/registry.h"

namespace kiln {
namespace {

constexpr int64_t kOuterBlock = 512;     // H512; kMxOuter in mx_boundary.h
constexpr int64_t kIdentityBlock = 128;  // of what does nothing but round
constexpr uint64_t kScaleBlock = 32;

// Headers of mx_cpu.cc beside those of device/.
constexpr const char* kHeaders[] = {"formats/npk_law.h", "fused_moe/mx_block.h",
                                    "fused_moe/mx_boundary.h",
                                    "fused_moe/mx_vector.h"};

uint32_t CeilDiv(int64_t value, int64_t by) {
  return static_cast<uint32_t>((value + by - 1) / by);
}

class Template : public KernelTemplate {
 public:
  absl::string_view name() const override { return "fused_moe.mx_cpu"; }

  uint32_t version() const override { return 1; }

  Digest sources() const override {
    static const Digest digest = [] {
      std::vector<std::string> files(std::begin(kHeaders), std::end(kHeaders));
      for (const char* file :
           {"axes.cc", "cpu/product_axes.cc", "fused_moe/mx_cpu.cc",
            "fused_moe/op.cc", "fused_moe/op_mx.cc",
            "fused_moe/template_mx_cpu.cc"}) {
        files.push_back(file);
      }
      return TemplateSourcesDigest(files);
    }();
    return digest;
  }

  Op op() const override { return Op::kFusedMoe; }

  WeightFormat format() const override { return WeightFormat::kTrellisMx; }

  Backend backend() const override { return Backend::kCpu; }

  absl::Status Supports(const RequestGeometry& geometry,
                        const Target& target) const override {
    return CheckServes(*this, geometry, target.backend == Backend::kCpu,
                       "on CPU targets");
  }

  ParamSpace Enumerate(const Problem& problem,
                       size_t points_max) const override {
    const std::vector<Axis> axes = Axes(problem);
    return OrderPoints(
        axes, {"row_group", "channels_tile"},
        [&](const AxisPoint& point) { return Constraint(problem, point); },
        [&](const AxisPoint& point) { return Cost(problem, point); },
        points_max);
  }

  absl::StatusOr<PlanBody> MakeBody(
      const Problem& problem, const Assignment& assignment) const override {
    const std::vector<Axis> axes = Axes(problem);
    RETURN_IF_ERROR(CheckAssignment(axes, assignment));
    const std::string broken =
        Constraint(problem, AxisPoint(&axes, assignment));
    if (!broken.empty()) return absl::InvalidArgumentError(broken);
    ASSIGN_OR_RETURN(const MxArm arm,
                     MxArmOf(problem.geometry, problem.interval));
    PlanBody body;
    body.template_name = std::string(name());
    body.template_version = version();
    body.assignment = assignment;
    body.numerics_class = std::string(MxNumericsClass(arm));
    body.tolerance = MxTolerance(arm);
    body.deterministic = true;
    body.cpu_threads = static_cast<uint32_t>(assignment.at("threads"));
    body.params = MxParams(problem.geometry);
    AddSteps(problem, assignment, &body);
    return body;
  }

  std::vector<SourceUnit> MakeUnits(
      const RequestGeometry& geometry, const Target&,
      const Assignment& assignment) const override {
    return {Unit(geometry, assignment)};
  }

 private:
  static std::vector<Axis> Axes(const Problem& problem) {
    std::vector<Axis> axes = MxArmAxes(problem);
    axes.insert(axes.end(), {{"tokens_tile", {1, 2, 4, 8, 16}},
                             {"channels_tile", {128, 256}},
                             {"row_group", {1, 2, 4, 8}},
                             {"threads", CpuThreads(problem)}});
    return axes;
  }

  // Empty, or the rule that the point breaks.
  static std::string Constraint(const Problem& problem,
                                const AxisPoint& point) {
    const std::string other_arm = MxArmConstraint(problem, point);
    return other_arm.empty() ? CpuRowGroupRule(point) : other_arm;
  }

  // Seconds on a nominal core; only the order matters. Each weight of a tile
  // is decoded once and multiplied with every row of the tile, empty rows
  // included.
  static double Cost(const Problem& problem, const AxisPoint& point) {
    constexpr double kDecode = 1.5e-9;
    constexpr double kMultiply = 0.08e-9;
    const RequestGeometry& geometry = problem.geometry;
    const auto tile = static_cast<uint32_t>(point.at("tokens_tile"));
    const double tiles =
        FusedMoeTilesExpected(geometry, tile, problem.interval.m_max);
    const double weights = 3.0 * static_cast<double>(geometry.hidden) *
                           static_cast<double>(geometry.intermediate);
    // Weights come from the first-level cache once for each group of rows.
    const double groups =
        static_cast<double>(tile) / static_cast<double>(point.at("row_group"));
    const double work =
        tiles * weights * (kDecode + kMultiply * (tile + groups));
    const auto threads = static_cast<double>(point.at("threads"));
    // Blocks are claimed one by one: few large ones leave threads idle at the
    // end of a step.
    const double blocks =
        std::max(1.0, tiles * static_cast<double>(geometry.intermediate) /
                          static_cast<double>(point.at("channels_tile")));
    return work / threads * (1 + threads / blocks);
  }

  SourceUnit Unit(const RequestGeometry& geometry,
                  const Assignment& assignment) const {
    SourceUnit unit;
    unit.name = "fused_moe/mx_cpu.cc";
    unit.template_version = version();
    unit.compute_dtype = assignment.at("activation_bits") == 8 ? "e4m3" : "f16";
    unit.text = absl::StrCat(
        MxPrelude(geometry), MxArmPrelude(assignment),
        AxisPrelude(assignment, {"tokens_tile", "channels_tile", "row_group"}),
        TemplateText("fused_moe/mx_cpu.cc"));
    unit.headers = DeviceHeaders();
    for (const char* header : kHeaders) {
      unit.headers.emplace_back(header, TemplateText(header));
    }
    unit.entries = {"kiln_mx_cpu_combine", "kiln_mx_cpu_fc1", "kiln_mx_cpu_fc2",
                    "kiln_mx_cpu_rotate", "kiln_mx_cpu_route"};
    return unit;
  }

  // Steps, arguments and slices as the head of mx_cpu.cc lists them.
  static void AddSteps(const Problem& problem, const Assignment& assignment,
                       PlanBody* body) {
    const RequestGeometry& geometry = problem.geometry;
    const auto tile = static_cast<uint32_t>(assignment.at("tokens_tile"));
    const auto strip = assignment.at("channels_tile");
    const bool quantised = assignment.at("activation_bits") == 8;
    // Bytes of a channel: two terms are two numbers.
    const uint64_t terms = MxActivationTerms(problem);
    const uint64_t value = terms * (quantised ? 1 : 2);
    const auto hidden = static_cast<uint64_t>(geometry.hidden);
    const auto inter = static_cast<uint64_t>(geometry.intermediate);
    const uint64_t capacity = problem.interval.m_max;
    const uint64_t tiles =
        FusedMoeTilesMax(geometry, tile, problem.interval.m_max);
    const uint64_t rows = tiles * tile;
    const auto scales = [&](uint64_t values) {
      return quantised ? terms * values / kScaleBlock : 0;
    };

    ArenaLayout& arena = body->arena;
    const auto slice = [&arena](absl::string_view label, uint64_t bytes) {
      return Arg::Arena(arena.Add(label, bytes));
    };
    const Arg tile_expert = slice("tile_expert", 4 * tiles);
    const Arg tile_routes = slice("tile_routes", 4 * rows);
    const Arg route_slot = slice(
        "route_slot", 4 * capacity * static_cast<uint64_t>(geometry.top_k));
    const Arg x_values = slice("x_values", value * capacity * hidden);
    const Arg x_scales = slice("x_scales", scales(capacity * hidden));
    const Arg mid_values = slice("mid_values", value * rows * inter);
    const Arg mid_scales = slice("mid_scales", scales(rows * inter));
    const Arg routed = slice("routed", 4 * rows * hidden);

    const LaunchDim one = LaunchDim::Constant(1);
    const LaunchDim tokens = LaunchDim::Of({.mul = 1, .add = 0, .div = 1});
    const LaunchDim tile_dim = FusedMoeTiles(geometry, tile, 1);
    const LaunchDim chunks = LaunchDim::Constant(
        CeilDiv(geometry.hidden, geometry.mx.boundary == MxBoundary::kCoupled
                                     ? kOuterBlock
                                     : kIdentityBlock));
    const LaunchDim hidden_strips =
        LaunchDim::Constant(CeilDiv(geometry.hidden, strip));
    const LaunchDim inter_strips =
        LaunchDim::Constant(CeilDiv(geometry.intermediate, strip));
    const auto p = [&](MxParam param) { return MxArg(geometry, param); };
    using P = MxParam;
    const auto add = [body](absl::string_view label,
                            std::array<LaunchDim, 3> grid,
                            std::vector<Arg> args) {
      Step step;
      step.label = std::string(label);
      step.entry = absl::StrCat("kiln_mx_cpu_", label);
      step.grid = grid;
      step.args = std::move(args);
      body->steps.push_back(std::move(step));
    };
    add("route", {one, one, one},
        {Arg::Tokens(), p(P::kTopkIds), tile_expert, tile_routes, route_slot});
    add("rotate", {tokens, chunks, one},
        {p(P::kX), p(P::kGateUpSuh), x_values, x_scales});
    add("fc1", {tile_dim, inter_strips, one},
        {tile_expert, tile_routes, p(P::kW13), p(P::kW13Scale),
         p(P::kRotations), x_values, x_scales, mid_values, mid_scales});
    add("fc2", {tile_dim, hidden_strips, one},
        {tile_expert, tile_routes, p(P::kW2), p(P::kW2Scale), p(P::kDownSvh),
         mid_values, mid_scales, routed});
    add("combine", {tokens, chunks, one},
        {route_slot, p(P::kTopkWeights), routed, p(P::kOut)});
  }
};

}  // namespace

const KernelTemplate* FusedMoeMxCpuTemplate() {
  static const auto* const instance = new Template;
  return instance;
}

}  // namespace kiln
