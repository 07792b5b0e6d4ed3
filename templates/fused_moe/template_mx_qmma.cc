#include "templates/fused_moe/template_mx_qmma.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "templates/axes.h"
#include "templates/fused_moe/code_target.h"
#include "templates/fused_moe/grouped_cost.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/op_mx.h"
#include "templates/fused_moe/template_mx_cuda.h"
#include "templates/registry.h"

namespace kiln {
namespace {

// Headers of mx_qmma.cu beside those of device/.
constexpr const char* kProductHeaders[] = {
    "cuda/e4m3.h",          "cuda/grouped.h",
    "cuda/ring.h",          "cuda/warp.h",
    "formats/npk_law.h",    "fused_moe/code_product.h",
    "fused_moe/mx_block.h", "fused_moe/mx_fragment.h",
    "fused_moe/mx_scales.h"};

// As template_mx_cuda.h, and PTX states no precision for what the tensor core
// sums: with sums of 14 bits rows of small layers are 1.8e-2 off. It is what
// the cosine 0.9998 that is asked of the arm leaves.
constexpr double kTolerance = 2 * kMxOneTermTolerance;

// Ring of packed weights, a word of scales per channel, and rows of codes with
// 16 bytes behind them, where their scales are.
int64_t SharedBytes(const RequestGeometry& geometry, const AxisPoint& point) {
  const int64_t k_tile = point.at("k_tile");
  const int64_t channels = point.at("channels_tile");
  return point.at("stages") *
         (k_tile * channels * geometry.weights.bits.gate / 8 + channels * 4 +
          point.at("tokens_tile") * kCodeStageRowBytes);
}

class Template : public KernelTemplate {
 public:
  absl::string_view name() const override { return "fused_moe.mx_qmma"; }

  uint32_t version() const override { return 1; }

  Digest sources() const override {
    static const Digest digest = [] {
      std::vector<std::string> files(std::begin(kMxCudaHeaders),
                                     std::end(kMxCudaHeaders));
      for (const char* file :
           {"axes.cc", "cuda/e4m3.h", "fused_moe/code_product.h",
            "fused_moe/code_target.cc", "fused_moe/grouped_cost.cc",
            "fused_moe/mx_cuda.cu", "fused_moe/mx_qmma.cu", "fused_moe/op.cc",
            "fused_moe/op_mx.cc", "fused_moe/routed_steps.cc",
            "fused_moe/template_mx_cuda.cc", "fused_moe/template_mx_qmma.cc"}) {
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
        *this, geometry, MultipliesE4m3(target),
        absl::StrCat("where tensor cores multiply E4M3, on sm_89 and on sm_120 "
                     "and its family, not on ",
                     target.ToString()));
  }

  ParamSpace Enumerate(const Problem& problem,
                       size_t points_max) const override {
    return MxOrderPoints(
        problem, Axes(), points_max,
        [&](const AxisPoint& point) { return Constraint(problem, point); },
        [&](const AxisPoint& point) { return ProductOf(problem, point); });
  }

  absl::StatusOr<PlanBody> MakeBody(
      const Problem& problem, const Assignment& assignment) const override {
    const std::vector<Axis> axes = Axes();
    RETURN_IF_ERROR(CheckAssignment(axes, assignment));
    const AxisPoint point(&axes, assignment);
    const std::string broken = Constraint(problem, point);
    if (!broken.empty()) return absl::InvalidArgumentError(broken);
    const Target& target = problem.device.target;
    PlanBody body;
    body.template_name = std::string(name());
    body.template_version = version();
    body.assignment = assignment;
    // How many input channels the tensor core sums by itself; beyond those a
    // sum's order depends on the number of K slices alone.
    body.numerics_class = absl::StrCat("mx.w4a8.qmma.", CodeSums(target),
                                       ".fc1x", assignment.at("split_fc1"),
                                       ".fc2x", assignment.at("split_fc2"));
    body.tolerance = kTolerance;
    body.deterministic = true;
    body.overlapped = target.level >= 90;
    body.params = MxParams(problem.geometry);
    MxOperands operands;
    operands.value_bytes = 1;
    operands.scale_bytes = 1;
    operands.product_shared_bytes = SharedBytes(problem.geometry, point);
    AddMxSteps(problem, point, operands, &body);
    return body;
  }

  std::vector<SourceUnit> MakeUnits(
      const RequestGeometry& geometry, const Target& target,
      const Assignment& assignment) const override {
    SourceUnit products;
    products.name = "fused_moe/mx_qmma.cu";
    products.template_version = version();
    products.compute_dtype = "e4m3";
    products.text =
        absl::StrCat(MxPrelude(geometry), "#define KILN_BLOCK_SCALED ",
                     IsBlockScaled(target) ? 1 : 0, "\n",
                     AxisPrelude(assignment, {"tokens_tile", "channels_tile",
                                              "k_tile", "warps", "stages"}),
                     TemplateText(products.name));
    products.headers =
        CudaHeaders({std::begin(kProductHeaders), std::end(kProductHeaders)});
    products.entries = {"kiln_mx_fc1", "kiln_mx_fc2"};
    return {MxSupportUnit(geometry, version(), "e4m3",
                          "#define KILN_ACTIVATION_BITS 8\n"
                          "#define KILN_OPERAND_CODES 1\n"),
            std::move(products)};
  }

 private:
  static std::vector<Axis> Axes() { return MxProductAxes({kCodeDepth}); }

  // Empty, or the rule that the point breaks.
  static std::string Constraint(const Problem& problem,
                                const AxisPoint& point) {
    const RequestGeometry& geometry = problem.geometry;
    const absl::StatusOr<MxArm> arm = MxArmOf(geometry, problem.interval);
    if (!arm.ok()) return std::string(arm.status().message());
    if (*arm != MxArm::kGrouped && *arm != MxArm::kDirect) {
      return absl::StrCat("the interval is that of the ", MxArmName(*arm),
                          " arm; E4M3 products serve W4A8 with one term");
    }
    std::string broken =
        MxProductRule(problem, point, SharedBytes(geometry, point));
    if (!broken.empty()) return broken;
    return CodeRegistersRule(point.at("channels_tile") / 16 / point.at("warps"),
                             point.at("tokens_tile"));
  }

  // The model of fused_moe.cuda, whose kernels have the same shape. Decoding is
  // that of mx_cuda.cu less the instructions that ptxas saves; an MMA counts as
  // half of one of binary16 for each of its two tiles. Nothing has been fitted
  // to a device.
  static GroupedProduct ProductOf(const Problem& problem,
                                  const AxisPoint& point) {
    constexpr double kDecodeCycles = 46;
    constexpr double kUnalignedDecodeCycles = 57;  // bits not a multiple of 4
    constexpr double kMmaCycles = 4;
    constexpr double kFoldCycles = 5;
    const RequestGeometry& geometry = problem.geometry;
    const int bits = geometry.weights.bits.gate;
    const auto tile = static_cast<double>(point.at("tokens_tile"));
    const auto channels = static_cast<double>(point.at("channels_tile"));
    const auto k_tile = static_cast<double>(point.at("k_tile"));
    GroupedProduct product;
    product.decode_cycles =
        bits % 4 == 0 ? kDecodeCycles : kUnalignedDecodeCycles;
    product.group_cycles =
        kMmaCycles + (IsBlockScaled(problem.device.target) ? 0 : kFoldCycles);
    product.stage_pieces =
        k_tile * channels * bits / 128 + channels / 4 + k_tile * tile / 16;
    product.strip_registers = 16;
    product.shared_bytes = SharedBytes(geometry, point);
    return product;
  }
};

}  // namespace

const KernelTemplate* FusedMoeMxQmmaTemplate() {
  static const auto* const instance = new Template;
  return instance;
}

}  // namespace kiln
