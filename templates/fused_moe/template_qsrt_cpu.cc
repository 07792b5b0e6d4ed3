#include "templates/fused_moe/template_qsrt_cpu.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "templates/axes.h"
#include "templates/cpu/product_axes.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/op_qsrt.h"
#include "templates/registry.h"

namespace kiln {
namespace {

constexpr int64_t kChunk = 512;  // as in qsrt_cpu.cc
constexpr uint32_t kTableBlocks = 64;
constexpr uint64_t kScaleBlock = 32;
constexpr double kStates = 65536;
constexpr uint64_t kInter = kQsrtIntermediate;

// Headers of qsrt_cpu.cc beside those of device/.
constexpr const char* kHeaders[] = {
    "fused_moe/cpu_operand.h", "fused_moe/cpu_routes.h",
    "fused_moe/mx_block.h",    "fused_moe/situ.h",
    "fused_moe/sqg_table.h",   "fused_moe/sqg_vector.h"};

uint32_t CeilDiv(int64_t value, int64_t by) {
  return static_cast<uint32_t>((value + by - 1) / by);
}

class Template : public KernelTemplate {
 public:
  absl::string_view name() const override { return "fused_moe.qsrt_cpu"; }

  uint32_t version() const override { return 1; }

  Digest sources() const override {
    static const Digest digest = [] {
      std::vector<std::string> files(std::begin(kHeaders), std::end(kHeaders));
      for (const char* file :
           {"axes.cc", "cpu/product_axes.cc", "fused_moe/op.cc",
            "fused_moe/op_qsrt.cc", "fused_moe/qsrt_cpu.cc",
            "fused_moe/template_qsrt_cpu.cc"}) {
        files.push_back(file);
      }
      return TemplateSourcesDigest(files);
    }();
    return digest;
  }

  Op op() const override { return Op::kFusedMoe; }

  WeightFormat format() const override { return WeightFormat::kQsrt; }

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
        axes, {"codewords", "row_group", "channels_tile", "k_tile"},
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
    ASSIGN_OR_RETURN(const QsrtArm arm,
                     QsrtArmOf(problem.geometry, problem.interval));
    PlanBody body;
    body.template_name = std::string(name());
    body.template_version = version();
    body.assignment = assignment;
    body.numerics_class = std::string(QsrtNumericsClass(arm));
    body.tolerance = QsrtTolerance(arm);
    body.deterministic = true;
    body.cpu_threads = static_cast<uint32_t>(assignment.at("threads"));
    body.params = QsrtParams(problem.geometry);
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
    return {{"activation_bits", {16, 8}},    {"tokens_tile", {1, 2, 4, 8, 16}},
            {"channels_tile", {128, 256}},   {"k_tile", {32, 128}},
            {"codewords", {0, 1}},           {"row_group", {1, 2, 4, 8}},
            {"threads", CpuThreads(problem)}};
  }

  // Empty, or the rule that the point breaks.
  static std::string Constraint(const Problem& problem,
                                const AxisPoint& point) {
    const std::string other_arm = QsrtArmConstraint(problem, point);
    return other_arm.empty() ? CpuRowGroupRule(point) : other_arm;
  }

  // Seconds on a nominal core; only the order matters. Each weight of a tile
  // is decoded once and multiplied with every row of the tile, empty rows
  // included.
  static double Cost(const Problem& problem, const AxisPoint& point) {
    constexpr double kDecode = 0.5e-9;
    constexpr double kLookUp = 0.3e-9;
    constexpr double kMultiply = 0.02e-9;
    const RequestGeometry& geometry = problem.geometry;
    const auto tile = static_cast<uint32_t>(point.at("tokens_tile"));
    const double tiles =
        FusedMoeTilesExpected(geometry, tile, problem.interval.m_max);
    const double weights = 3.0 * static_cast<double>(geometry.hidden) *
                           static_cast<double>(kInter);
    // Weights come from the first-level cache once for each group of rows.
    const double groups =
        static_cast<double>(tile) / static_cast<double>(point.at("row_group"));
    const bool by_table = point.at("codewords") == 1;
    const double work =
        tiles * weights *
            ((by_table ? kLookUp : kDecode) + kMultiply * (tile + groups)) +
        (by_table ? kDecode * kStates * QsrtRates(geometry) : 0);
    const auto threads = static_cast<double>(point.at("threads"));
    // Blocks are claimed one by one: few large ones leave threads idle at the
    // end of a step.
    const double blocks =
        std::max(1.0, tiles * static_cast<double>(geometry.hidden) /
                          static_cast<double>(point.at("channels_tile")));
    return work / threads * (1 + threads / blocks);
  }

  SourceUnit Unit(const RequestGeometry& geometry,
                  const Assignment& assignment) const {
    SourceUnit unit;
    unit.name = "fused_moe/qsrt_cpu.cc";
    unit.template_version = version();
    unit.compute_dtype = assignment.at("activation_bits") == 8 ? "e4m3" : "f16";
    unit.text =
        absl::StrCat(QsrtPrelude(geometry),
                     AxisPrelude(assignment, {"activation_bits", "tokens_tile",
                                              "channels_tile", "k_tile",
                                              "codewords", "row_group"}),
                     TemplateText("fused_moe/qsrt_cpu.cc"));
    unit.headers = DeviceHeaders();
    for (const char* header : kHeaders) {
      unit.headers.emplace_back(header, TemplateText(header));
    }
    unit.entries = {"kiln_qsrt_cpu_combine", "kiln_qsrt_cpu_fc1",
                    "kiln_qsrt_cpu_fc2", "kiln_qsrt_cpu_rotate",
                    "kiln_qsrt_cpu_route"};
    if (assignment.at("codewords") == 1) {
      unit.entries.push_back("kiln_qsrt_cpu_table");
    }
    return unit;
  }

  // Steps, arguments and slices as the head of qsrt_cpu.cc lists them.
  static void AddSteps(const Problem& problem, const Assignment& assignment,
                       PlanBody* body) {
    const RequestGeometry& geometry = problem.geometry;
    const auto tile = static_cast<uint32_t>(assignment.at("tokens_tile"));
    const auto strip = assignment.at("channels_tile");
    const bool quantised = assignment.at("activation_bits") == 8;
    const bool shared = geometry.weights.shared_scales;
    const uint64_t value = quantised ? 1 : 2;
    const auto hidden = static_cast<uint64_t>(geometry.hidden);
    const uint64_t capacity = problem.interval.m_max;
    const uint64_t tiles =
        FusedMoeTilesMax(geometry, tile, problem.interval.m_max);
    const uint64_t rows = tiles * tile;
    const uint64_t x_rows = shared ? capacity : rows;
    const auto scales = [&](uint64_t values) {
      return quantised ? values / kScaleBlock : 0;
    };

    ArenaLayout& arena = body->arena;
    const auto slice = [&arena](absl::string_view label, uint64_t bytes) {
      return Arg::Arena(arena.Add(label, bytes));
    };
    const Arg tile_expert = slice("tile_expert", 4 * tiles);
    const Arg tile_routes = slice("tile_routes", 4 * rows);
    const Arg route_slot = slice(
        "route_slot", 4 * capacity * static_cast<uint64_t>(geometry.top_k));
    const Arg places =
        slice("places", 16 * static_cast<uint64_t>(geometry.experts));
    const Arg gate_values = slice("gate_values", value * x_rows * hidden);
    const Arg gate_scales = slice("gate_scales", scales(x_rows * hidden));
    const Arg up_values = slice("up_values", value * x_rows * hidden);
    const Arg up_scales = slice("up_scales", scales(x_rows * hidden));
    const Arg mid_values = slice("mid_values", value * rows * kInter);
    const Arg mid_scales = slice("mid_scales", scales(rows * kInter));
    const Arg routed = slice("routed", 4 * rows * hidden);

    const bool by_table = assignment.at("codewords") == 1;
    const uint32_t rates = QsrtRates(geometry);
    Arg codewords;
    if (by_table) {
      codewords = slice("codewords", sizeof(uint16_t) * rates *
                                         static_cast<uint64_t>(kStates));
    }

    const LaunchDim one = LaunchDim::Constant(1);
    const LaunchDim tokens = LaunchDim::Of({.mul = 1, .add = 0, .div = 1});
    const LaunchDim tile_dim = FusedMoeTiles(geometry, tile, 1);
    const LaunchDim chunks =
        LaunchDim::Constant(CeilDiv(geometry.hidden, kChunk));
    const LaunchDim strips =
        LaunchDim::Constant(CeilDiv(geometry.hidden, strip));
    const auto p = QsrtArg;
    using P = QsrtParam;
    const auto add = [body](absl::string_view label,
                            std::array<LaunchDim, 3> grid,
                            std::vector<Arg> args) {
      Step step;
      step.label = std::string(label);
      step.entry = absl::StrCat("kiln_qsrt_cpu_", label);
      step.grid = grid;
      step.args = std::move(args);
      body->steps.push_back(std::move(step));
    };
    add("route", {one, one, one},
        {Arg::Tokens(), p(P::kTopkIds), p(P::kModesFc1), p(P::kModesFc2),
         tile_expert, tile_routes, route_slot, places});
    if (by_table) {
      add("table",
          {LaunchDim::Constant(kTableBlocks), LaunchDim::Constant(rates), one},
          {codewords});
    }
    add("rotate", {shared ? tokens : tile_dim, chunks, one},
        {tile_expert, tile_routes, p(P::kX), p(P::kGateSuh), p(P::kUpSuh),
         gate_values, gate_scales, up_values, up_scales});
    std::vector<Arg> fc1 = {tile_expert,  tile_routes, places,
                            p(P::kWGate), p(P::kWUp),  p(P::kRotations),
                            gate_values,  gate_scales, up_values,
                            up_scales,    mid_values,  mid_scales};
    if (geometry.activation == Activation::kPerExpert) {
      fc1.push_back(p(P::kActivations));
    }
    if (by_table) fc1.push_back(codewords);
    add("fc1", {tile_dim, LaunchDim::Constant(2), one}, std::move(fc1));
    std::vector<Arg> fc2 = {tile_expert,  tile_routes,    places,
                            p(P::kWDown), p(P::kDownSvh), mid_values,
                            mid_scales,   routed};
    if (by_table) fc2.push_back(codewords);
    add("fc2", {tile_dim, strips, one}, std::move(fc2));
    add("combine", {tokens, chunks, one},
        {route_slot, p(P::kTopkWeights), routed, p(P::kOut)});
  }
};

}  // namespace

const KernelTemplate* FusedMoeQsrtCpuTemplate() {
  static const auto* const instance = new Template;
  return instance;
}

}  // namespace kiln
