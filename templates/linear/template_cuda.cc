#include "templates/linear/template_cuda.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "templates/axes.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/tile_product.h"
#include "templates/linear/op.h"
#include "templates/registry.h"

namespace kiln {
namespace {

constexpr uint32_t kHelperThreads = 128;  // of rotate and finish
constexpr uint32_t kHelperWarps = kHelperThreads / 32;

// The layer as FC2 of one expert that every token chooses: what the product
// kernel of fused_moe/cuda.cu is made for.
RequestGeometry AsExpert(const RequestGeometry& geometry) {
  const LinearShape& shape = geometry.linear;
  RequestGeometry expert;
  expert.hidden = shape.out_features;
  expert.intermediate = shape.in_features;
  expert.experts = 1;
  expert.top_k = 1;
  expert.io_dtype = geometry.io_dtype;
  expert.weights.codebook = geometry.weights.codebook;
  expert.weights.bits = {shape.bits, shape.bits, shape.bits};
  return expert;
}

class Template : public KernelTemplate {
 public:
  absl::string_view name() const override { return "linear.cuda"; }

  uint32_t version() const override { return 2; }

  Digest sources() const override {
    static const Digest digest = TemplateSourcesDigest(
        {"axes.cc", "cuda/grouped.h", "cuda/mul1_affine.h", "cuda/warp.h",
         "fused_moe/cuda.cu", "fused_moe/op.cc", "fused_moe/tile_product.cc",
         "linear/cuda.cu", "linear/op.cc", "linear/template_cuda.cc"});
    return digest;
  }

  Op op() const override { return Op::kLinear; }

  Backend backend() const override { return Backend::kCuda; }

  absl::Status Supports(const RequestGeometry& geometry,
                        const Target& target) const override {
    if (geometry.op != Op::kLinear || target.backend != Backend::kCuda ||
        target.level < 80) {
      return absl::UnimplementedError(
          absl::StrCat(name(), " serves linear on sm_80 and later, not on ",
                       target.ToString()));
    }
    return absl::OkStatus();
  }

  ParamSpace Enumerate(const Problem& problem,
                       size_t points_max) const override {
    const std::vector<Axis> axes = Axes();
    return OrderPoints(
        axes, {"stages"},
        [&](const AxisPoint& point) { return Constraint(problem, point); },
        [&](const AxisPoint& point) { return Cost(problem, point); },
        points_max);
  }

  absl::StatusOr<PlanBody> MakeBody(
      const Problem& problem, const Assignment& assignment) const override {
    const std::vector<Axis> axes = Axes();
    RETURN_IF_ERROR(CheckAssignment(axes, assignment));
    const AxisPoint point(&axes, assignment);
    const std::string broken = Constraint(problem, point);
    if (!broken.empty()) return absl::InvalidArgumentError(broken);
    PlanBody body;
    body.template_name = std::string(name());
    body.template_version = version();
    body.assignment = assignment;
    body.numerics_class = absl::StrCat("w4a16.", TileProductClass(point), ".x",
                                       point.at("split"));
    body.tolerance = kLinearTolerance;
    body.deterministic = true;
    body.overlapped = problem.device.target.level >= 90;
    body.params = LinearParams(problem.geometry);
    AddSteps(problem, point, &body);
    return body;
  }

  std::vector<SourceUnit> MakeUnits(
      const RequestGeometry& geometry, const Target&,
      const Assignment& assignment) const override {
    SourceUnit around;
    around.name = "linear/cuda.cu";
    around.template_version = version();
    around.compute_dtype = "f16";
    around.text =
        absl::StrCat(LinearPrelude(geometry), TemplateText(around.name));
    around.headers = CudaHeaders({"cuda/grouped.h", "cuda/warp.h"});
    around.entries = {"kiln_linear_finish", "kiln_linear_rotate"};
    SourceUnit product =
        TileProductUnit(AsExpert(geometry), version(), 3, assignment);
    product.entries = {"kiln_moe_fc2"};
    return {std::move(around), std::move(product)};
  }

 private:
  static std::vector<Axis> Axes() {
    return {{"tokens_tile", {8, 16, 32, 64, 128}},
            {"channels_tile", {64, 128, 256}},
            {"k_tile", {32, 64, 128}},
            {"warps", {4, 8}},
            {"stages", {2, 3, 4, 6}},
            // At least two: the product kernel rounds to fp16 where K is whole.
            {"split", {2, 4, 8, 16}},
            {"sum", {kTileRounded, kTileBiased}}};
  }

  // Empty, or the rule that the point breaks.
  static std::string Constraint(const Problem& problem,
                                const AxisPoint& point) {
    const LinearShape& shape = problem.geometry.linear;
    const int64_t channels = point.at("channels_tile");
    if (shape.out_features % channels != 0) {
      return absl::StrCat("channels_tile ", channels,
                          " does not divide out_features ", shape.out_features);
    }
    // Two slices always: one of them is empty where K is one block.
    if (point.at("split") > std::max<int64_t>(2, shape.in_features / 128)) {
      return "more K slices than blocks of 128 input channels";
    }
    return TileProductRule(problem, problem.geometry.weights.codebook,
                           shape.bits, point);
  }

  // Cycles of the product and of its partial sums; only the order matters. The
  // constants are those of fused_moe.cuda's products on an H200, rounded; they
  // were not fitted to this op.
  static double Cost(const Problem& problem, const AxisPoint& point) {
    constexpr double kStageCycles = 16;  // barrier
    constexpr double kCopyCycles = 31;   // of 16 bytes
    constexpr double kWaveCycles = 280;
    constexpr double kBytesPerCycle = 28;  // of one multiprocessor
    const LinearShape& shape = problem.geometry.linear;
    const DeviceProfile& device = problem.device;
    const auto m = static_cast<double>(problem.interval.m_max);
    const auto tile = static_cast<double>(point.at("tokens_tile"));
    const auto channels = static_cast<double>(point.at("channels_tile"));
    const auto warps = static_cast<double>(point.at("warps"));
    const auto k_tile = static_cast<double>(point.at("k_tile"));
    const auto split = static_cast<double>(point.at("split"));
    const double strips = channels / 16 / warps;
    const double slice =
        std::ceil(static_cast<double>(shape.in_features) / 128 / split) * 128;
    const double copies =
        (k_tile * channels * shape.bits / 128 + k_tile * tile / 8) /
        (warps * 32);
    const double live = std::min(tile, std::ceil(m / 16) * 16);
    const double per_warp =
        slice / 16 * strips *
            (TileProductDecodeCycles(point, shape.bits) +
             TileProductMmaCycles(point) * live / 8) +
        slice / k_tile * (kStageCycles + kCopyCycles * copies);

    const double processors = std::max(1, device.multiprocessors);
    const double blocks = std::ceil(m / tile) *
                          static_cast<double>(shape.out_features) / channels *
                          split;
    const double registers = 48 + 4 * strips + strips * tile / 2;
    const double resident = std::clamp(
        std::floor(
            std::min({static_cast<double>(device.shared_bytes_per_sm) /
                          static_cast<double>(
                              TileProductSharedBytes(point, shape.bits) + 1024),
                      static_cast<double>(device.registers_per_sm) /
                          (warps * 32 * registers),
                      2048 / (warps * 32)})),
        1.0, 32.0);
    const double in_flight = std::min(resident, std::ceil(blocks / processors));
    // Warps of one of the four sub-cores share its issue slots.
    const double wave =
        per_warp * std::max(1.0, in_flight * warps / 4) + kWaveCycles;
    const double waves = std::max(1.0, blocks / (processors * in_flight));
    const double partial_bytes =
        m * static_cast<double>(shape.out_features) * 8 * split;
    return wave * waves + partial_bytes / (processors * kBytesPerCycle);
  }

  // Steps, arguments and slices as the heads of the two sources list them.
  static void AddSteps(const Problem& problem, const AxisPoint& point,
                       PlanBody* body) {
    const RequestGeometry& geometry = problem.geometry;
    const LinearShape& shape = geometry.linear;
    const RequestGeometry expert = AsExpert(geometry);
    const auto in = static_cast<uint32_t>(shape.in_features);
    const auto out = static_cast<uint32_t>(shape.out_features);
    const auto tile = static_cast<uint32_t>(point.at("tokens_tile"));
    const auto channels = static_cast<uint32_t>(point.at("channels_tile"));
    const auto split = static_cast<uint32_t>(point.at("split"));
    const uint64_t capacity = problem.interval.m_max;

    const auto slice = [body](absl::string_view name, uint64_t bytes) {
      return Arg::Arena(body->arena.Add(name, bytes));
    };
    const Arg tiles = slice(
        "tiles", 16 * FusedMoeTilesMax(expert, tile, problem.interval.m_max));
    const Arg totals = slice("totals", 16);
    const Arg operand = slice("operand", 2 * capacity * in);
    const Arg product = slice("product", 4 * capacity * out * split);

    const auto p = [&geometry](LinearParam param) {
      return Arg::Param(LinearSlotOf(geometry, param));
    };
    using P = LinearParam;
    const auto add = [body](absl::string_view label, uint32_t program,
                            absl::string_view entry, LaunchDim x, LaunchDim y,
                            uint32_t block, uint32_t shared_bytes,
                            std::vector<Arg> args) {
      Step step;
      step.label = std::string(label);
      step.program = program;
      step.entry = std::string(entry);
      step.grid = {x, y, LaunchDim::Constant(1)};
      step.block = {block, 1, 1};
      step.dynamic_shared_bytes = shared_bytes;
      step.args = std::move(args);
      body->steps.push_back(std::move(step));
    };
    const LaunchDim one = LaunchDim::Constant(1);
    const auto warps_over = [](uint32_t per_token) {
      return LaunchDim::Of({.mul = per_token, .add = 0, .div = kHelperWarps});
    };
    add("rotate", 0, "kiln_linear_rotate", warps_over(in / 128), one,
        kHelperThreads, 0,
        {p(P::kX), p(P::kSuh), operand, tiles, totals, Arg::Tokens(),
         Arg::U32(tile)});
    add("product", 1, "kiln_moe_fc2",
        FusedMoeTiles(expert, tile, out / channels), LaunchDim::Constant(split),
        static_cast<uint32_t>(point.at("warps") * 32),
        static_cast<uint32_t>(TileProductSharedBytes(point, shape.bits)),
        {operand, p(P::kW), tiles, totals, product, Arg::Tokens()});
    std::vector<Arg> finish = {product, p(P::kSvh)};
    if (shape.bias) finish.push_back(p(P::kBias));
    for (const Arg& arg : {p(P::kOut), Arg::Tokens(), Arg::U32(split)}) {
      finish.push_back(arg);
    }
    add("finish", 0, "kiln_linear_finish", warps_over(out / 128), one,
        kHelperThreads, 0, std::move(finish));
  }
};

}  // namespace

const KernelTemplate* LinearCudaTemplate() {
  static const auto* const instance = new Template;
  return instance;
}

}  // namespace kiln
