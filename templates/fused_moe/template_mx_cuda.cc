#include "templates/fused_moe/template_mx_cuda.h"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "templates/axes.h"
#include "templates/fused_moe/grouped_cost.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/op_mx.h"
#include "templates/fused_moe/routed_steps.h"
#include "templates/registry.h"

namespace kiln {
namespace {

constexpr uint32_t kScaleBlock = 32;
// Channels that one warp of a helper has.
constexpr uint32_t kWarpChannels = 128;

// With two terms the second takes back what a step of the first moved.
double Tolerance(MxArm arm) {
  switch (arm) {
    case MxArm::kSmallM:
    case MxArm::kDirectRp2:
      return MxTolerance(arm);
    case MxArm::kDirect:
    case MxArm::kGrouped:
      return kMxOneTermTolerance;
  }
  KILN_UNREACHABLE();
}

// Rows of one expert that a tile has: with two terms a row is two columns of
// the MMA.
uint32_t RowsOf(const Problem& problem, int64_t tokens_tile) {
  return static_cast<uint32_t>(tokens_tile) / MxActivationTerms(problem);
}

// Ring of packed weights, a word of scales per channel, padded operand rows
// and, in the grouped arm, a binary32 scale per row and 32 channels.
int64_t SharedBytes(const RequestGeometry& geometry, const AxisPoint& point) {
  const int64_t k_tile = point.at("k_tile");
  const int64_t channels = point.at("channels_tile");
  const int64_t row_scales =
      point.at("activation_bits") == 8 ? k_tile / kScaleBlock * 4 : 0;
  return point.at("stages") *
         (k_tile * channels * geometry.weights.bits.gate / 8 + channels * 4 +
          point.at("tokens_tile") * ((k_tile + 8) * 2 + row_scales));
}

// One of the two parts of mx_cuda.cu.
SourceUnit MxCudaUnit(const RequestGeometry& geometry, uint32_t version,
                      absl::string_view compute_dtype, int part,
                      const std::string& defines,
                      std::vector<std::string> entries) {
  SourceUnit unit;
  unit.name = "fused_moe/mx_cuda.cu";
  unit.template_version = version;
  unit.compute_dtype = std::string(compute_dtype);
  unit.text = absl::StrCat(MxPrelude(geometry), "#define KILN_PART ", part,
                           "\n", defines, TemplateText("fused_moe/mx_cuda.cu"));
  unit.headers =
      CudaHeaders({std::begin(kMxCudaHeaders), std::end(kMxCudaHeaders)});
  unit.entries = std::move(entries);
  return unit;
}

class Template : public KernelTemplate {
 public:
  absl::string_view name() const override { return "fused_moe.mx_cuda"; }

  uint32_t version() const override { return 1; }

  Digest sources() const override {
    static const Digest digest = [] {
      std::vector<std::string> files(std::begin(kMxCudaHeaders),
                                     std::end(kMxCudaHeaders));
      for (const char* file :
           {"axes.cc", "fused_moe/grouped_cost.cc", "fused_moe/mx_cuda.cu",
            "fused_moe/op.cc", "fused_moe/op_mx.cc",
            "fused_moe/routed_steps.cc", "fused_moe/template_mx_cuda.cc"}) {
        files.push_back(file);
      }
      return TemplateSourcesDigest(files);
    }();
    return digest;
  }

  Op op() const override { return Op::kFusedMoe; }

  WeightFormat format() const override { return WeightFormat::kTrellisMx; }

  Backend backend() const override { return Backend::kCuda; }

  absl::Status Supports(const RequestGeometry& geometry,
                        const Target& target) const override {
    return CheckServes(
        *this, geometry, target.backend == Backend::kCuda && target.level >= 80,
        absl::StrCat("on sm_80 and later, not on ", target.ToString()));
  }

  ParamSpace Enumerate(const Problem& problem,
                       size_t points_max) const override {
    return MxOrderPoints(
        problem, Axes(problem), points_max,
        [&](const AxisPoint& point) { return Constraint(problem, point); },
        [&](const AxisPoint& point) { return ProductOf(problem, point); });
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
    // A sum's order depends on the number of K slices alone.
    body.numerics_class = absl::StrCat(MxNumericsClass(arm), ".mma.fc1x",
                                       assignment.at("split_fc1"), ".fc2x",
                                       assignment.at("split_fc2"));
    body.tolerance = Tolerance(arm);
    body.deterministic = true;
    body.overlapped = problem.device.target.level >= 90;
    body.params = MxParams(problem.geometry);
    const AxisPoint point(&axes, assignment);
    MxOperands operands;
    operands.scale_bytes = arm == MxArm::kSmallM ? 0 : 4;
    operands.product_shared_bytes = SharedBytes(problem.geometry, point);
    AddMxSteps(problem, point, operands, &body);
    return body;
  }

  std::vector<SourceUnit> MakeUnits(
      const RequestGeometry& geometry, const Target&,
      const Assignment& assignment) const override {
    const std::string arm = MxArmPrelude(assignment);
    return {MxSupportUnit(geometry, version(), "f16", arm),
            MxCudaUnit(
                geometry, version(), "f16", 1,
                arm + AxisPrelude(assignment, {"tokens_tile", "channels_tile",
                                               "k_tile", "warps", "stages"}),
                {"kiln_mx_fc1", "kiln_mx_fc2"})};
  }

 private:
  static std::vector<Axis> Axes(const Problem& problem) {
    std::vector<Axis> axes = MxArmAxes(problem);
    const std::vector<Axis> products = MxProductAxes({64, 128});
    axes.insert(axes.end(), products.begin(), products.end());
    return axes;
  }

  // Empty, or the rule that the point breaks.
  static std::string Constraint(const Problem& problem,
                                const AxisPoint& point) {
    std::string broken = MxArmConstraint(problem, point);
    if (!broken.empty()) return broken;
    broken =
        MxProductRule(problem, point, SharedBytes(problem.geometry, point));
    if (!broken.empty()) return broken;
    return ThreadSumsRule(point);
  }

  // The work of rounding a weight to E4M3 and of a block's scales is added to
  // that of fused_moe.cuda, whose kernels have the same shape; no constant of
  // it has been fitted to these kernels.
  static GroupedProduct ProductOf(const Problem& problem,
                                  const AxisPoint& point) {
    constexpr double kDecodeCycles = 58;
    constexpr double kUnalignedDecodeCycles = 69;  // bits not a multiple of 4
    constexpr double kMmaCycles = 8;
    constexpr double kFoldCycles = 2;
    constexpr double kQuantisedFoldCycles = 5;
    const RequestGeometry& geometry = problem.geometry;
    const int bits = geometry.weights.bits.gate;
    const auto tile = static_cast<double>(point.at("tokens_tile"));
    const auto channels = static_cast<double>(point.at("channels_tile"));
    const auto k_tile = static_cast<double>(point.at("k_tile"));
    GroupedProduct product;
    product.decode_cycles =
        bits % 4 == 0 ? kDecodeCycles : kUnalignedDecodeCycles;
    product.group_cycles =
        kMmaCycles +
        (point.at("activation_bits") == 8 ? kQuantisedFoldCycles : kFoldCycles);
    product.stage_pieces =
        k_tile * channels * bits / 128 + channels / 4 + k_tile * tile / 8;
    product.strip_registers = 8;
    product.shared_bytes = SharedBytes(geometry, point);
    return product;
  }
};

}  // namespace

std::vector<Axis> MxProductAxes(std::vector<int64_t> k_tiles) {
  return {{"tokens_tile", {8, 16, 32, 48, 64, 96, 128}},
          {"channels_tile", {64, 128, 256}},
          {"k_tile", std::move(k_tiles)},
          {"warps", {4, 8}},
          {"stages", {2, 3, 4, 6}},
          {"split_fc1", {1, 2, 4, 8}},
          {"split_fc2", {1, 2, 4}}};
}

std::string MxProductRule(const Problem& problem, const AxisPoint& point,
                          int64_t shared_bytes) {
  const RequestGeometry& geometry = problem.geometry;
  const int64_t channels = point.at("channels_tile");
  if (geometry.intermediate % channels != 0 ||
      geometry.hidden % channels != 0) {
    return absl::StrCat("channels_tile ", channels,
                        " does not divide intermediate ", geometry.intermediate,
                        " and hidden ", geometry.hidden);
  }
  const std::string broken = WarpStripsRule(point);
  if (!broken.empty()) return broken;
  if (point.at("split_fc1") > geometry.hidden / 128 ||
      point.at("split_fc2") > geometry.intermediate / 128) {
    return "more K slices than blocks of 128 input channels";
  }
  return SharedBytesRule(problem, shared_bytes);
}

ParamSpace MxOrderPoints(
    const Problem& problem, const std::vector<Axis>& axes, size_t points_max,
    const std::function<std::string(const AxisPoint&)>& constraint,
    const std::function<GroupedProduct(const AxisPoint&)>& product_of) {
  // Of each tokens_tile, how many the interval's largest m is expected to have.
  std::map<int64_t, double> tiles;
  const RequestGeometry& geometry = problem.geometry;
  const auto cost = [&](const AxisPoint& point) {
    const int64_t tile = point.at("tokens_tile");
    const auto [expected, is_new] = tiles.try_emplace(tile);
    if (is_new) {
      expected->second = FusedMoeTilesExpected(geometry, RowsOf(problem, tile),
                                               problem.interval.m_max);
    }
    GroupedProduct fc1 = product_of(point);
    GroupedProduct fc2 = fc1;
    fc1.inputs = geometry.hidden;
    fc1.outputs = 2 * geometry.intermediate;
    fc1.split = point.at("split_fc1");
    fc2.inputs = geometry.intermediate;
    fc2.outputs = geometry.hidden;
    fc2.split = point.at("split_fc2");
    return GroupedCycles(problem, point, expected->second, fc1, fc2);
  };
  return OrderPoints(axes, {"stages"}, constraint, cost, points_max);
}

SourceUnit MxSupportUnit(const RequestGeometry& geometry, uint32_t version,
                         absl::string_view compute_dtype,
                         const std::string& defines) {
  return MxCudaUnit(geometry, version, compute_dtype, 0, defines,
                    {"kiln_mx_activate", "kiln_mx_combine", "kiln_mx_count",
                     "kiln_mx_route"});
}

void AddMxSteps(const Problem& problem, const AxisPoint& assignment,
                const MxOperands& operands, PlanBody* body) {
  const RequestGeometry& geometry = problem.geometry;
  const uint32_t tile = RowsOf(problem, assignment.at("tokens_tile"));
  const uint64_t terms = MxActivationTerms(problem);
  const auto channels = static_cast<uint32_t>(assignment.at("channels_tile"));
  const auto threads = static_cast<uint32_t>(assignment.at("warps") * 32);
  const auto split1 = static_cast<uint32_t>(assignment.at("split_fc1"));
  const auto split2 = static_cast<uint32_t>(assignment.at("split_fc2"));
  const auto hidden = static_cast<uint32_t>(geometry.hidden);
  const auto inter = static_cast<uint32_t>(geometry.intermediate);
  const auto top_k = static_cast<uint32_t>(geometry.top_k);
  const uint32_t capacity = problem.interval.m_max;
  const uint64_t routes = uint64_t{capacity} * top_k;

  RoutedSteps steps("mx", problem, tile, body);
  const auto& [tiles, totals, rows, positions] = steps.lists();
  const auto scales = [&](uint64_t values) {
    return terms * values / kScaleBlock * operands.scale_bytes;
  };
  const Arg x_values =
      steps.Slice("x_values", operands.value_bytes * terms * hidden * capacity);
  const Arg x_scales =
      steps.Slice("x_scales", scales(uint64_t{hidden} * capacity));
  const Arg fc1 = steps.ProductSlice("fc1", uint64_t{2} * inter, split1);
  const Arg mid_values =
      steps.Slice("mid_values", operands.value_bytes * terms * inter * routes);
  const Arg mid_scales = steps.Slice("mid_scales", scales(inter * routes));
  const Arg fc2 = steps.ProductSlice("fc2", hidden, split2);

  const auto p = [&](MxParam param) { return MxArg(geometry, param); };
  using P = MxParam;
  // Warps that share a chunk of a token's channels, H512 or 128 of them.
  const uint32_t chunk_warps =
      geometry.mx.boundary == MxBoundary::kCoupled ? 4 : 1;
  const uint32_t chunks = hidden / (kWarpChannels * chunk_warps);
  const auto product = [&](uint32_t width, uint32_t split) {
    return GroupedLaunch{
        .blocks = FusedMoeTiles(geometry, tile, width / channels),
        .slices = split,
        .threads = threads,
        .shared_bytes = static_cast<uint32_t>(operands.product_shared_bytes)};
  };
  steps.AddRoute(p(P::kTopkIds), {rows, positions, tiles, totals},
                 {.chunks = chunks,
                  .block_chunks = kRouteWarps,
                  .args = {p(P::kX), p(P::kGateUpSuh), x_values, x_scales}});
  steps.Add("fc1", 1, product(2 * inter, split1),
            {x_values, x_scales, p(P::kW13), p(P::kW13Scale), rows, tiles,
             totals, fc1, Arg::Tokens()});
  steps.AddHelper("activate", WarpsOver(top_k * (inter / kWarpChannels)),
                  {fc1, p(P::kRotations), rows, totals, mid_values, mid_scales,
                   Arg::Tokens(), Arg::U32(split1)});
  steps.Add("fc2", 1, product(hidden, split2),
            {mid_values, mid_scales, p(P::kW2), p(P::kW2Scale), tiles, totals,
             fc2, Arg::Tokens()});
  steps.AddHelper(
      "combine",
      LaunchDim::Of(
          {.mul = chunks, .add = 0, .div = kHelperWarps / chunk_warps}),
      {fc2, p(P::kDownSvh), p(P::kTopkWeights), positions, p(P::kOut),
       Arg::Tokens(), Arg::U32(split2)});
}

const KernelTemplate* FusedMoeMxCudaTemplate() {
  static const auto* const instance = new Template;
  return instance;
}

}  // namespace kiln
