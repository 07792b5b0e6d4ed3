#include "templates/fused_moe/template_warpgroup.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/plan.h"
#include "templates/axes.h"
#include "templates/fused_moe/cuda_steps.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/routed_steps.h"
#include "templates/registry.h"

namespace kiln {
namespace {

constexpr int64_t kChannels = 128;  // output channels of a block
constexpr int64_t kDepthStep = 64;  // input channels of a step of the ring
// Steps in the ring, of packed weights and of decoded ones.
constexpr int64_t kStages = 4;
constexpr int64_t kDecodedStages = 3;
constexpr int kDecodedBits = 16;
constexpr uint32_t kThreads = 384;  // two warpgroups multiply, one copies
constexpr int64_t kTwoBlocksTokensMax = 64;
constexpr double kUnitRows = 32;           // of an MMA: a multiple of it
constexpr double kPartialTokensMax = 256;  // beyond it a tile is always whole
// Below it cuda.cu is faster whatever the axes are.
constexpr int64_t kRoutesPerExpertMin = 8;
constexpr int64_t kDecodedRoutesPerExpertMin = 1024;

// One of the two matrix products.
struct Product {
  int64_t inputs = 0;   // k
  int64_t outputs = 0;  // n, gate and up together for fc1
  int bits = 0;
};

Product Fc1(const RequestGeometry& geometry) {
  const Bits& bits = geometry.weights.bits;
  return {geometry.hidden, 2 * geometry.intermediate,
          std::max(bits.gate, bits.up)};
}

Product Fc2(const RequestGeometry& geometry) {
  return {geometry.intermediate, geometry.hidden, geometry.weights.bits.down};
}

// Rows that a warpgroup passes on through shared memory at once; then those of
// fp32 sums that fc2 adds up.
int64_t ResultRows(int64_t tile) { return tile <= 128 ? 32 : 64; }

constexpr int64_t kAddedRows = 32;

// The ring of operand rows, weights and barriers.
int64_t RingBytes(const Product& product, const AxisPoint& point) {
  const bool decoded = point.at("decoded") != 0;
  const int64_t bits = decoded ? kDecodedBits : product.bits;
  return (decoded ? kDecodedStages : kStages) *
         (point.at("tokens_tile") * kDepthStep * 2 +
          4 * (2 * kChannels * bits + 32) + 16);
}

int64_t Fc1SharedBytes(const RequestGeometry& geometry,
                       const AxisPoint& point) {
  const int64_t tile = point.at("tokens_tile");
  return RingBytes(Fc1(geometry), point) + 2 * 2 * ResultRows(tile) * 128;
}

// With sums in fp32, and weight and token of the tile's rows, where fc2 adds
// them up.
int64_t Fc2SharedBytes(const RequestGeometry& geometry,
                       const AxisPoint& point) {
  const int64_t tile = point.at("tokens_tile");
  return RingBytes(Fc2(geometry), point) +
         (point.at("atomic_sum") != 0
              ? 2 * 2 * kAddedRows * (64 * 4 + 16) + 2 * 8 * tile
              : 2 * 2 * ResultRows(tile) * 128);
}

class Template : public KernelTemplate {
 public:
  absl::string_view name() const override { return "fused_moe.warpgroup"; }

  uint32_t version() const override { return 3; }

  Digest sources() const override {
    static const Digest digest = TemplateSourcesDigest(
        {"axes.cc", "cuda/grouped.h", "cuda/mul1_affine.h", "cuda/warp.h",
         "fused_moe/cuda.cu", "fused_moe/cuda_steps.cc", "fused_moe/op.cc",
         "fused_moe/routed_steps.cc", "fused_moe/template_warpgroup.cc",
         "fused_moe/warpgroup.cu"});
    return digest;
  }

  Op op() const override { return Op::kFusedMoe; }

  Backend backend() const override { return Backend::kCuda; }

  absl::Status Supports(const RequestGeometry& geometry,
                        const Target& target) const override {
    if (geometry.op != Op::kFusedMoe || target.backend != Backend::kCuda ||
        target.level != 90 || !target.arch_specific) {
      return absl::UnimplementedError(absl::StrCat(
          name(), " serves fused_moe on sm_90a, not on ", target.ToString()));
    }
    return absl::OkStatus();
  }

  ParamSpace Enumerate(const Problem& problem,
                       size_t points_max) const override {
    const std::vector<Axis> axes = Axes();
    std::map<int64_t, double> tiles;
    for (const int64_t tile : axes.front().values) {
      tiles[tile] =
          FusedMoeTilesExpected(problem.geometry, static_cast<uint32_t>(tile),
                                problem.interval.m_max);
    }
    return OrderPoints(
        axes, {"ctas"},
        [&](const AxisPoint& point) { return Constraint(problem, point); },
        [&](const AxisPoint& point) {
          return Cost(problem, point, tiles.at(point.at("tokens_tile")));
        },
        points_max);
  }

  absl::StatusOr<PlanBody> MakeBody(
      const Problem& problem, const Assignment& assignment) const override {
    const std::vector<Axis> axes = Axes();
    RETURN_IF_ERROR(CheckAssignment(axes, assignment));
    const AxisPoint point(&axes, assignment);
    const std::string broken = Constraint(problem, point);
    if (!broken.empty()) return absl::InvalidArgumentError(broken);
    const RequestGeometry& geometry = problem.geometry;
    PlanBody body;
    body.template_name = std::string(name());
    body.template_version = version();
    body.assignment = assignment;
    // Sums run over k in ascending steps whatever the axes are; those of routes
    // have no order where they meet in memory.
    const bool atomic_sum = point.at("atomic_sum") != 0;
    body.numerics_class =
        atomic_sum ? "w4a16.f16.wgmma.atomic_sum" : "w4a16.f16.wgmma";
    body.tolerance = kFusedMoeTolerance;
    body.deterministic = !atomic_sum;
    body.overlapped = true;
    body.params = FusedMoeParams(geometry);
    // As many blocks as the device holds at once; each takes its share of
    // tiles.
    const auto launch = [&](int64_t shared_bytes) {
      GroupedLaunch result;
      result.blocks = LaunchDim::Constant(static_cast<uint32_t>(
          std::max(1, problem.device.multiprocessors) * point.at("ctas")));
      result.threads = kThreads;
      result.shared_bytes = static_cast<uint32_t>(shared_bytes);
      return result;
    };
    AddGroupedSteps(
        problem, static_cast<uint32_t>(point.at("tokens_tile")),
        launch(Fc1SharedBytes(geometry, point)),
        launch(Fc2SharedBytes(geometry, point)),
        {OperandOrder::kWarpgroup, atomic_sum, point.at("decoded") != 0},
        &body);
    return body;
  }

  std::vector<SourceUnit> MakeUnits(
      const RequestGeometry& geometry, const Target&,
      const Assignment& assignment) const override {
    SourceUnit products;
    products.name = "fused_moe/warpgroup.cu";
    products.template_version = version();
    products.compute_dtype = "f16";
    products.text = absl::StrCat(
        FusedMoePrelude(geometry),
        AxisPrelude(assignment,
                    {"tokens_tile", "ctas", "decoded", "atomic_sum"}),
        TemplateText(products.name));
    products.headers = CudaHeaders({"cuda/grouped.h", "cuda/warp.h"});
    if (assignment.at("decoded") != 0) {
      products.entries.push_back("kiln_moe_decode");
    }
    products.entries.insert(products.entries.end(),
                            {"kiln_moe_fc1", "kiln_moe_fc2"});
    return {GroupedSupportUnit(
                geometry, version(),
                {OperandOrder::kWarpgroup, assignment.at("atomic_sum") != 0}),
            std::move(products)};
  }

 private:
  static std::vector<Axis> Axes() {
    return {{"tokens_tile", {32, 64, 96, 128, 160, 192, 224, 256, 288, 320}},
            {"ctas", {1, 2}},
            {"decoded", {0, 1}},
            {"atomic_sum", {0, 1}}};
  }

  // Empty, or the rule that the point breaks.
  static std::string Constraint(const Problem& problem,
                                const AxisPoint& point) {
    const RequestGeometry& geometry = problem.geometry;
    const int64_t routes = int64_t{problem.interval.m_max} * geometry.top_k;
    if (routes < kRoutesPerExpertMin * geometry.experts) {
      return absl::StrCat("fewer than ", kRoutesPerExpertMin,
                          " routes per expert leave warpgroup MMAs empty");
    }
    if (point.at("atomic_sum") != 0) {
      if (geometry.deterministic) {
        return "atomic_sum differs between repeats, and the request is "
               "deterministic";
      }
      if (!geometry.weights.shared_scales) {
        return "atomic_sum needs one table of scales behind the sum of the "
               "routes, not one for each expert";
      }
    }
    if (point.at("decoded") != 0 &&
        routes < kDecodedRoutesPerExpertMin * geometry.experts) {
      return absl::StrCat("fewer than ", kDecodedRoutesPerExpertMin,
                          " routes per expert do not pay for decoding all "
                          "weights ahead");
    }
    const int64_t ctas = point.at("ctas");
    if (ctas > 1 && point.at("tokens_tile") > kTwoBlocksTokensMax) {
      return absl::StrCat("tokens_tile ", point.at("tokens_tile"),
                          " leaves no registers for a second block; at most ",
                          kTwoBlocksTokensMax);
    }
    const int64_t shared = std::max(Fc1SharedBytes(geometry, point),
                                    Fc2SharedBytes(geometry, point));
    const std::string broken = SharedBytesRule(problem, shared);
    if (!broken.empty()) return broken;
    if (ctas * (shared + 1024) > problem.device.shared_bytes_per_sm) {
      return absl::StrCat(ctas, " blocks of ", shared,
                          " B exceed the shared memory of a multiprocessor");
    }
    return "";
  }

  // In proportion to the cycles of the two products; only the order matters.
  // tiles: how many the interval's largest m is expected to have.
  static double Cost(const Problem& problem, const AxisPoint& point,
                     double tiles) {
    // As measured at m = 2048 and 4096: less to combine, but more to wait for.
    constexpr double kAtomicSumFactor = 1.06;
    return (ProductCost(problem, point, tiles, Fc1(problem.geometry)) +
            ProductCost(problem, point, tiles, Fc2(problem.geometry))) *
           (point.at("atomic_sum") != 0 ? kAtomicSumFactor : 1.0);
  }

  // Constants: fitted to cycles of the products on an H200 at m = 2000 to 4096.
  static double ProductCost(const Problem& problem, const AxisPoint& point,
                            double tiles, const Product& product) {
    // Of a step: decoding, which hides part of the MMAs; the rest of these; and
    // what an item costs beside its steps.
    constexpr double kStepCycles = 560;
    constexpr double kUnalignedStepCycles = 670;  // bits not a multiple of 4
    constexpr double kMmaFactor = 0.62;
    constexpr double kItemCycles = 2400;
    constexpr double kTwoBlocksFactor = 0.92;  // they hide each other's waiting
    const auto tile = static_cast<double>(point.at("tokens_tile"));
    const auto ctas = static_cast<double>(point.at("ctas"));
    const double rows = static_cast<double>(problem.interval.m_max) *
                        static_cast<double>(problem.geometry.top_k);
    // Units that hold rows, of a tile; the last one is half empty.
    const double live =
        tile > kPartialTokensMax
            ? tile / kUnitRows
            : std::clamp(rows / tiles / kUnitRows + 0.5, 1.0, tile / kUnitRows);
    // Two warpgroups, four k-tiles.
    const double multiply = 2 * 4 * live * kUnitRows / 2;
    const double step =
        (product.bits % 4 == 0 ? kStepCycles : kUnalignedStepCycles) +
        kMmaFactor * multiply;
    const double item =
        static_cast<double>(product.inputs / kDepthStep) * step + kItemCycles;
    const double waves = tiles *
                         static_cast<double>(product.outputs / kChannels) /
                         (std::max(1, problem.device.multiprocessors) * ctas);
    return item * ctas * (ctas > 1 ? kTwoBlocksFactor : 1.0) *
           std::max(1.0, std::ceil(waves));
  }
};

}  // namespace

const KernelTemplate* FusedMoeWarpgroupTemplate() {
  static const auto* const instance = new Template;
  return instance;
}

}  // namespace kiln
