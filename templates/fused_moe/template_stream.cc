#include "templates/fused_moe/template_stream.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "templates/axes.h"
#include "templates/fused_moe/op.h"
#include "templates/registry.h"

namespace kiln {
namespace {

constexpr uint32_t kTokensMax = 16;
// Warps that share a multiprocessor; stream.cu is compiled to fit so many.
constexpr int64_t kWarpsResident = 24;
// Input channels of a Hadamard block, the unit in which K is split.
constexpr int64_t kBlock = 128;
// Channels of an fc1 block: 128 of gate and the same 128 of up.
constexpr int64_t kFc1Channels = 256;
constexpr int64_t kWarpChannels = 32;

// How weights are summed; KILN_SUM of stream.cu.
enum Sum : int64_t { kRounded = 0, kHalves = 1, kBytes = 2, kBiased = 3 };

absl::string_view SumName(int64_t sum) {
  switch (sum) {
    case kRounded:
      return "f16";
    case kHalves:
      return "halves";
    case kBytes:
      return "bytes2";
    case kBiased:
      return "biased";
    default:
      KILN_UNREACHABLE();
  }
}

// Routes that one block serves at once.
int64_t RunRows(int64_t sum) { return sum == kBytes ? 4 : 8; }

// One of the two products, as its axes split it.
struct Product {
  int64_t depth = 0;     // input channels, k
  int64_t operands = 1;  // gate and up, or one
  int64_t columns = 0;   // blocks side by side
  int64_t channels = 0;  // output channels of a block
  int64_t cluster = 1;
  int64_t warps = 0;
  int bits = 0;

  int64_t groups() const { return warps / (channels / kWarpChannels); }

  // 128 blocks of K that one block works on, at most.
  int64_t blocks() const { return (depth / kBlock + cluster - 1) / cluster; }
};

Product Fc1(const RequestGeometry& geometry, const AxisPoint& point) {
  return {
      .depth = geometry.hidden,
      .operands = 2,
      .columns = geometry.intermediate / kBlock,
      .channels = kFc1Channels,
      .cluster = point.at("cluster_fc1"),
      .warps = point.at("warps_fc1"),
      .bits = std::max(geometry.weights.bits.gate, geometry.weights.bits.up)};
}

Product Fc2(const RequestGeometry& geometry, const AxisPoint& point) {
  const int64_t channels = point.at("channels_fc2");
  return {.depth = geometry.intermediate,
          .operands = 1,
          .columns = geometry.hidden / channels,
          .channels = channels,
          .cluster = point.at("cluster_fc2"),
          .warps = point.at("warps_fc2"),
          .bits = geometry.weights.bits.down};
}

// Operand rows and partial sums; README.md, "Stream".
int64_t DynamicSharedBytes(const Product& product, int64_t sum) {
  const int64_t element = sum == kHalves || sum == kBytes ? 4 : 2;
  // Results that a block of the cluster finishes.
  const int64_t item_channels = product.operands * kBlock;
  const int64_t items =
      (RunRows(sum) * product.channels / item_channels + product.cluster - 1) /
      product.cluster;
  return product.operands * 8 * (product.blocks() * kBlock * element + 16) +
         product.cluster * product.groups() * items * (item_channels + 4) * 4;
}

// An upper bound of what stream.cu declares on its own.
int64_t StaticSharedBytes(const RequestGeometry& geometry,
                          const Product& product, int64_t sum) {
  const bool stats = sum == kBytes || sum == kBiased;
  return 4 * (geometry.experts + 31) + 2 * kTokensMax * geometry.top_k +
         4 * 8 * product.warps + 1024 +
         12 * product.operands * RunRows(sum) *
             (stats ? product.blocks() : int64_t{1});
}

class Template : public KernelTemplate {
 public:
  absl::string_view name() const override { return "fused_moe.stream"; }

  uint32_t version() const override { return 1; }

  Digest sources() const override {
    static const Digest digest = TemplateSourcesDigest(
        {"axes.cc", "fused_moe/op.cc", "fused_moe/stream.cu",
         "fused_moe/template_stream.cc"});
    return digest;
  }

  Op op() const override { return Op::kFusedMoe; }

  Backend backend() const override { return Backend::kCuda; }

  absl::Status Supports(const RequestGeometry& geometry,
                        const Target& target) const override {
    if (geometry.op != Op::kFusedMoe || target.backend != Backend::kCuda ||
        target.level < 80) {
      return absl::UnimplementedError(
          absl::StrCat(name(), " serves fused_moe on sm_80 and later, not on ",
                       target.ToString()));
    }
    return absl::OkStatus();
  }

  ParamSpace Enumerate(const Problem& problem,
                       size_t points_max) const override {
    const std::vector<Axis> axes = Axes();
    const double runs =
        FusedMoeTilesExpected(problem.geometry, 8, problem.interval.m_max);
    return OrderPoints(
        // Every mode races with its best points.
        axes,
        {"cluster_fc1", "warps_fc1", "channels_fc2", "cluster_fc2",
         "warps_fc2"},
        [&](const AxisPoint& point) { return Constraint(problem, point); },
        [&](const AxisPoint& point) { return Cost(problem, point, runs); },
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
    const Product fc1 = Fc1(geometry, point);
    const Product fc2 = Fc2(geometry, point);
    PlanBody body;
    body.template_name = std::string(name());
    body.template_version = version();
    body.assignment = assignment;
    // The order of a sum depends on how K is split, its terms on the mode.
    body.numerics_class = absl::StrCat(
        "w4a16.", SumName(point.at("sum")), ".stream.fc1x", fc1.cluster, "x",
        fc1.groups(), ".fc2x", fc2.cluster, "x", fc2.groups());
    body.tolerance = kFusedMoeTolerance;
    body.deterministic = true;
    body.overlapped = problem.device.target.level >= 90;
    body.params = FusedMoeParams(geometry);
    AddSteps(problem, point, &body);
    return body;
  }

  std::vector<SourceUnit> MakeUnits(
      const RequestGeometry& geometry, const Target&,
      const Assignment& assignment) const override {
    const std::vector<Axis> axes = Axes();
    const AxisPoint point(&axes, assignment);
    const int64_t sum = point.at("sum");
    return {Unit(geometry, 1, Fc1(geometry, point), sum),
            Unit(geometry, 2, Fc2(geometry, point), sum)};
  }

 private:
  static std::vector<Axis> Axes() {
    return {{"sum", {kRounded, kHalves, kBytes, kBiased}},
            {"cluster_fc1", {1, 2, 4, 8}},
            {"warps_fc1", {8, 16}},
            {"channels_fc2", {128, 256}},
            {"cluster_fc2", {1, 2, 4}},
            {"warps_fc2", {8, 16}}};
  }

  // Empty, or the rule that the point breaks.
  static std::string Constraint(const Problem& problem,
                                const AxisPoint& point) {
    const RequestGeometry& geometry = problem.geometry;
    if (problem.interval.m_max > kTokensMax) {
      return absl::StrCat("streams serve at most ", kTokensMax, " tokens");
    }
    const int64_t sum = point.at("sum");
    const bool mul1 = geometry.weights.codebook == Codebook::kMul1;
    if (sum != kRounded && mul1 == (sum == kHalves)) {
      return absl::StrCat("sum mode ", SumName(sum),
                          " is made for another codebook");
    }
    const Product fc1 = Fc1(geometry, point);
    const Product fc2 = Fc2(geometry, point);
    if (problem.device.target.level < 90 &&
        (fc1.cluster != 1 || fc2.cluster != 1)) {
      return "clusters need sm_90";
    }
    if (geometry.hidden % fc2.channels != 0) {
      return absl::StrCat("channels_fc2 ", fc2.channels,
                          " does not divide hidden ", geometry.hidden);
    }
    for (const Product& product : {fc1, fc2}) {
      if (product.cluster * product.groups() > product.depth / kBlock) {
        return "more K slices than blocks of 128 input channels";
      }
      const int64_t shared = DynamicSharedBytes(product, sum) +
                             StaticSharedBytes(geometry, product, sum);
      if (shared > problem.device.shared_bytes_max) {
        return absl::StrCat("shared memory ", shared, " B exceeds the ",
                            problem.device.shared_bytes_max,
                            " B of a block on ",
                            problem.device.target.ToString());
      }
    }
    return "";
  }

  // Cycles; only the order matters.
  static double Cost(const Problem& problem, const AxisPoint& point,
                     double runs) {
    const RequestGeometry& geometry = problem.geometry;
    const int64_t sum = point.at("sum");
    return ProductCost(problem, Fc1(geometry, point), sum, runs) +
           ProductCost(problem, Fc2(geometry, point), sum, runs);
  }

  // Constants: kTileCycles read off the harness's timings on an H200; the
  // others fitted to a race of 96 points there (OLMoE, 3INST K4), where the
  // best point is among the model's first five of its mode for m = 1 to 16.
  static double ProductCost(const Problem& problem, const Product& product,
                            int64_t sum, double runs) {
    // Issue slots of a warp for one 16 x 16 tile, by mode, with its MMAs, which
    // do not overlap with anything; and how long it takes a lone warp.
    constexpr double kTileCycles[] = {54, 48, 46, 50};
    constexpr double kUnalignedCycles = 9;  // bits not 4 or 8
    constexpr double kTileLatency = 260;
    // Routing, rotation, reduction: of a block; and what a cluster adds.
    constexpr double kBlockCycles = 6000;
    constexpr double kClusterCycles = 220;
    // Part of the blocks that fit beside each other in clusters of 4 and more.
    constexpr double kClusterFill = 0.8;
    // What part of the last, partly filled wave is lost: blocks take unequal
    // time, so the next ones start before all of a wave have ended.
    constexpr double kTailLoss = 0.4;
    const auto cluster = static_cast<double>(product.cluster);
    const auto warps = static_cast<double>(product.warps);
    const double processors = std::max(1, problem.device.multiprocessors);
    const auto shared =
        static_cast<double>(DynamicSharedBytes(product, sum) + 4096);
    const double resident = std::max(
        1.0,
        std::min(
            static_cast<double>(kWarpsResident / product.warps),
            std::floor(static_cast<double>(problem.device.shared_bytes_per_sm) /
                       shared)));
    const double tile =
        kTileCycles[sum] + (product.bits % 4 == 0 ? 0 : kUnalignedCycles);
    const double tiles =
        std::ceil(static_cast<double>(product.depth / kBlock) /
                  static_cast<double>(product.cluster * product.groups())) *
        (kBlock / 16 * kWarpChannels / 16);
    const auto wave = [&](double blocks) {
      return kBlockCycles + kClusterCycles * cluster +
             tiles * std::max(blocks * warps / 4 * tile, kTileLatency);
    };
    const double waves =
        runs * static_cast<double>(product.columns * product.cluster) /
        (processors * resident * (product.cluster >= 4 ? kClusterFill : 1.0));
    if (waves < 1) return wave(std::max(1.0, std::ceil(waves * resident)));
    return wave(resident) * (waves + kTailLoss * (std::ceil(waves) - waves));
  }

  SourceUnit Unit(const RequestGeometry& geometry, int part,
                  const Product& product, int64_t sum) const {
    SourceUnit unit;
    unit.name = "fused_moe/stream.cu";
    unit.template_version = version();
    unit.compute_dtype = "f16";
    unit.text = FusedMoePrelude(geometry);
    const auto define = [&unit](absl::string_view axis, int64_t value) {
      absl::StrAppend(&unit.text, "#define KILN_", axis, " ", value, "\n");
    };
    define("PART", part);
    define("SUM", sum);
    define("CLUSTER", product.cluster);
    if (part == 2) define("CHANNELS", product.channels);
    define("WARPS", product.warps);
    define("CTAS", kWarpsResident / product.warps);
    unit.text += TemplateText("fused_moe/stream.cu");
    unit.headers = CudaHeaders({});
    unit.entries = {absl::StrCat("kiln_stream_fc", part)};
    return unit;
  }

  // Steps, arguments and slices as README.md, "Stream", lists them.
  static void AddSteps(const Problem& problem, const AxisPoint& point,
                       PlanBody* body) {
    const RequestGeometry& geometry = problem.geometry;
    const int64_t sum = point.at("sum");
    const Product fc1 = Fc1(geometry, point);
    const Product fc2 = Fc2(geometry, point);
    const auto hidden = static_cast<uint64_t>(geometry.hidden);
    const auto inter = static_cast<uint64_t>(geometry.intermediate);
    const uint32_t capacity = problem.interval.m_max;
    const uint64_t routes =
        uint64_t{capacity} * static_cast<uint64_t>(geometry.top_k);

    ArenaLayout& arena = body->arena;
    const Arg activated =
        Arg::Arena(arena.Add("activated", 2 * inter * routes));
    const Arg routed = Arg::Arena(arena.Add("routed", 4 * hidden * routes));
    const Arg arrivals =
        Arg::Arena(arena.Add("arrivals", 4 * capacity * (hidden / kBlock)));

    // A block looks for further runs, so the grid need not hold all that there
    // could be: a few more than are likely.
    const auto likely = static_cast<uint32_t>(
        std::ceil(FusedMoeTilesExpected(
                      geometry, static_cast<uint32_t>(RunRows(sum)), capacity) *
                      1.05 +
                  2));
    LaunchDim runs = LaunchDim::Constant(likely);
    runs.a = {.mul = static_cast<uint32_t>(geometry.top_k), .add = 0, .div = 1};

    const auto add = [&](absl::string_view label, uint32_t program,
                         const Product& product, std::vector<Arg> args) {
      Step step;
      step.label = std::string(label);
      step.program = program;
      step.entry = absl::StrCat("kiln_stream_", label);
      step.grid = {LaunchDim::Constant(static_cast<uint32_t>(product.cluster *
                                                             product.columns)),
                   runs, LaunchDim::Constant(1)};
      step.block = {static_cast<uint32_t>(product.warps * 32), 1, 1};
      step.dynamic_shared_bytes =
          static_cast<uint32_t>(DynamicSharedBytes(product, sum));
      step.args = std::move(args);
      body->steps.push_back(std::move(step));
    };
    const auto p = FusedMoeArg;
    using P = FusedMoeParam;
    add("fc1", 0, fc1,
        {p(P::kTopkIds), p(P::kX), p(P::kGateSuh), p(P::kUpSuh), p(P::kWGate),
         p(P::kWUp), p(P::kRotations), activated, arrivals, p(P::kOut),
         Arg::Tokens()});
    add("fc2", 1, fc2,
        {p(P::kTopkIds), p(P::kTopkWeights), activated, p(P::kWDown),
         p(P::kDownSvh), routed, arrivals, p(P::kOut), Arg::Tokens()});
  }
};

}  // namespace

const KernelTemplate* FusedMoeStreamTemplate() {
  static const auto* const instance = new Template;
  return instance;
}

}  // namespace kiln
