#include "templates/fused_moe/template_stream.h"

#include <algorithm>
#include <array>
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

constexpr uint32_t kTokensMax = 64;
constexpr int64_t kThreads = 256;  // of a block of fc1 and fc2
// Input channels of a Hadamard block, the unit in which K is split.
constexpr int64_t kBlock = 128;
// Output channels that a block has at a time, of one matrix.
constexpr int64_t kChannels = 256;

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

// One of the two products, as its axis splits it.
struct Product {
  int64_t depth = 0;     // input channels, k
  int64_t matrices = 1;  // gate and up, or one
  int64_t width = 0;     // output channels of a matrix
  int64_t split = 1;     // blocks that share the K of a result
  int64_t repeat = 1;    // times kChannels that a block serves
  int64_t ctas = 1;      // blocks per SM that registers must allow
  int bits = 0;

  // Blocks side by side; the last of a matrix may have idle warps.
  int64_t columns() const {
    return matrices * ((width + repeat * kChannels - 1) / (repeat * kChannels));
  }

  // 128 blocks of K that one block works on, at most.
  int64_t blocks() const { return (depth / kBlock + split - 1) / split; }
};

Product Fc1(const RequestGeometry& geometry, const AxisPoint& point) {
  return {
      .depth = geometry.hidden,
      .matrices = 2,
      .width = geometry.intermediate,
      .split = point.at("split_fc1"),
      .repeat = point.at("columns_fc1"),
      .ctas = point.at("ctas"),
      .bits = std::max(geometry.weights.bits.gate, geometry.weights.bits.up)};
}

Product Fc2(const RequestGeometry& geometry, const AxisPoint& point) {
  return {.depth = geometry.intermediate,
          .matrices = 1,
          .width = geometry.hidden,
          .split = point.at("split_fc2"),
          .repeat = point.at("columns_fc2"),
          .ctas = point.at("ctas"),
          .bits = geometry.weights.bits.down};
}

// Operand rows; README.md, "Stream".
int64_t DynamicSharedBytes(const Product& product, int64_t sum) {
  const int64_t element = sum == kRounded || sum == kBiased ? 2 : 4;
  return 8 * (product.blocks() * kBlock * element + 16);
}

// An upper bound of what stream.cu declares on its own.
int64_t StaticSharedBytes(const RequestGeometry& geometry,
                          const Product& product, int64_t sum) {
  const bool stats = sum == kBytes || sum == kBiased;
  return 4 * (geometry.experts + 31) + 2 * kTokensMax * geometry.top_k + 1024 +
         12 * RunRows(sum) * (stats ? product.blocks() : int64_t{1});
}

class Template : public KernelTemplate {
 public:
  absl::string_view name() const override { return "fused_moe.stream"; }

  uint32_t version() const override { return 2; }

  Digest sources() const override {
    static const Digest digest = TemplateSourcesDigest(
        {"axes.cc", "cuda/mul1_affine.h", "cuda/warp.h", "fused_moe/op.cc",
         "fused_moe/stream.cu", "fused_moe/template_stream.cc"});
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
    return OrderPoints(
        // Every mode races with its best points.
        axes, {"split_fc1", "columns_fc1", "split_fc2", "columns_fc2", "ctas"},
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
    const RequestGeometry& geometry = problem.geometry;
    const Product fc1 = Fc1(geometry, point);
    const Product fc2 = Fc2(geometry, point);
    PlanBody body;
    body.template_name = std::string(name());
    body.template_version = version();
    body.assignment = assignment;
    // The order of a sum depends on how K is split, its terms on the mode.
    body.numerics_class =
        absl::StrCat("w4a16.", SumName(point.at("sum")), ".stream.fc1x",
                     fc1.split, ".fc2x", fc2.split);
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
    const Product fc1 = Fc1(geometry, point);
    const Product fc2 = Fc2(geometry, point);
    const auto define = [](absl::string_view axis, int64_t value) {
      return absl::StrCat("#define KILN_", axis, " ", value, "\n");
    };
    const auto axes_of = [&](const Product& product) {
      return absl::StrCat(define("SUM", sum), define("SPLIT", product.split),
                          define("COLUMNS", product.repeat),
                          define("CTAS", product.ctas));
    };
    return {
        Unit(geometry, 1, "kiln_stream_fc1", axes_of(fc1)),
        Unit(geometry, 2, "kiln_stream_fc2",
             axes_of(fc2) + define("SLICES", fc1.split)),
        Unit(geometry, 3, "kiln_stream_combine", define("SLICES", fc2.split))};
  }

 private:
  static std::vector<Axis> Axes() {
    return {{"sum", {kRounded, kHalves, kBytes, kBiased}},
            {"split_fc1", {1, 2, 4, 8, 16}},
            {"columns_fc1", {1, 2, 3, 4}},
            {"split_fc2", {1, 2, 3, 4, 6, 8}},
            {"columns_fc2", {1, 2, 4, 8}},
            {"ctas", {3, 4}}};
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
    if (sum != kRounded && mul1 != (sum == kBytes || sum == kBiased)) {
      return absl::StrCat("sum mode ", SumName(sum),
                          " is made for another codebook");
    }
    const Product fc1 = Fc1(geometry, point);
    const Product fc2 = Fc2(geometry, point);
    for (const Product& product : {fc1, fc2}) {
      if (product.split > product.depth / kBlock) {
        return "more K slices than blocks of 128 input channels";
      }
      if ((product.width + kChannels - 1) / kChannels % product.repeat != 0) {
        return absl::StrCat("columns ", product.repeat,
                            " do not divide those of ", product.width,
                            " channels, ", kChannels, " at a time");
      }
      const std::string broken = SharedBytesRule(
          problem, DynamicSharedBytes(product, sum) +
                       StaticSharedBytes(geometry, product, sum));
      if (!broken.empty()) return broken;
    }
    return "";
  }

  // Cycles; only the order matters. Constants fitted to 2,048 timings on an
  // H200 (H2048 I768 E128, MCG and MUL1 K4, 1 to 64 tokens; H7168 I256 E256,
  // MUL1 K4, 1 and 8), from which they are 6 % off; of the points timed there
  // the best is at most 1 % faster than the best of the first five of its mode.
  static double Cost(const Problem& problem, const AxisPoint& point) {
    // A warp's instructions for the operands of a 128 block of a row.
    constexpr double kRotateCycles = 180;
    constexpr double kActivateCycles = 300;
    const RequestGeometry& geometry = problem.geometry;
    const int64_t sum = point.at("sum");
    return ProductCost(problem, Fc1(geometry, point), sum, kRotateCycles) +
           ProductCost(problem, Fc2(geometry, point), sum, kActivateCycles);
  }

  static double ProductCost(const Problem& problem, const Product& product,
                            int64_t sum, double operand_cycles) {
    // Issue slots of a warp for one 16 x 16 tile, by mode, with its MMAs, which
    // do not overlap with anything; and how long it takes a lone warp.
    constexpr double kTileCycles[] = {57, 47, 43, 50};
    constexpr double kRoundedMul1Cycles = 53;  // where mode 0 of others has 57
    constexpr double kUnalignedCycles = 9;     // bits not 4 or 8
    constexpr double kTileLatency = 140;
    // Four blocks of a multiprocessor have fewer registers each.
    constexpr double kSpillFactor = 1.02;
    constexpr double kStoreCycles = 50;    // of a warp, for a row of sums
    constexpr double kStartCycles = 2600;  // of a block
    // What part of the last, partly filled wave is lost: blocks take unequal
    // time, so the next ones start before all of a wave have ended.
    constexpr double kTailLoss = 0.14;
    constexpr double kWarps = kThreads / 32;
    constexpr double kWarpTiles = kChannels / kWarps / 16;
    const RequestGeometry& geometry = problem.geometry;
    const double runs = FusedMoeTilesExpected(
        geometry, static_cast<uint32_t>(RunRows(sum)), problem.interval.m_max);
    const double rows = std::clamp(
        problem.interval.m_max * static_cast<double>(geometry.top_k) / runs,
        1.0, static_cast<double>(RunRows(sum)));
    const double processors = std::max(1, problem.device.multiprocessors);
    const auto shared =
        static_cast<double>(DynamicSharedBytes(product, sum) + 4096);
    const double resident = std::max(
        1.0,
        std::min(
            static_cast<double>(product.ctas),
            std::floor(static_cast<double>(problem.device.shared_bytes_per_sm) /
                       shared)));
    const double decode =
        sum == 0 && geometry.weights.codebook == Codebook::kMul1
            ? kRoundedMul1Cycles
            : kTileCycles[sum];
    const double tile =
        (decode + (product.bits % 4 == 0 ? 0 : kUnalignedCycles)) *
        (product.ctas == 4 ? kSpillFactor : 1.0);
    const auto blocks_of_k = static_cast<double>(product.blocks());
    const double tiles = blocks_of_k * (kBlock / 16) * kWarpTiles *
                         static_cast<double>(product.repeat);
    const double operands = rows * blocks_of_k / kWarps;  // of a warp
    const double issue =
        operands * operand_cycles + tiles * tile +
        rows * kStoreCycles * static_cast<double>(product.repeat);
    const auto wave = [&](double blocks) {
      return kStartCycles +
             std::max(blocks * kWarps / 4 * issue, tiles * kTileLatency);
    };
    const double waves =
        runs * static_cast<double>(product.columns() * product.split) /
        (processors * resident);
    if (waves < 1) return wave(std::max(1.0, std::ceil(waves * resident)));
    return wave(resident) * (waves + kTailLoss * (std::ceil(waves) - waves));
  }

  SourceUnit Unit(const RequestGeometry& geometry, int part,
                  absl::string_view entry, absl::string_view axes) const {
    SourceUnit unit;
    unit.name = "fused_moe/stream.cu";
    unit.template_version = version();
    unit.compute_dtype = "f16";
    unit.text =
        absl::StrCat(FusedMoePrelude(geometry), "#define KILN_PART ", part,
                     "\n", axes, TemplateText("fused_moe/stream.cu"));
    unit.headers = CudaHeaders({"cuda/mul1_affine.h", "cuda/warp.h"});
    unit.entries = {std::string(entry)};
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
    const Arg fc1_sums = Arg::Arena(arena.Add(
        "fc1", 8 * inter * routes * static_cast<uint64_t>(fc1.split)));
    const Arg fc2_sums = Arg::Arena(arena.Add(
        "fc2", 4 * hidden * routes * static_cast<uint64_t>(fc2.split)));

    // A block looks for further runs, so the grid need not hold all that there
    // could be: a few more than are likely.
    const auto likely = static_cast<uint32_t>(
        std::ceil(FusedMoeTilesExpected(
                      geometry, static_cast<uint32_t>(RunRows(sum)), capacity) *
                      1.05 +
                  2));
    LaunchDim runs = LaunchDim::Constant(likely);
    runs.a = {.mul = static_cast<uint32_t>(geometry.top_k), .add = 0, .div = 1};

    const auto add = [&](absl::string_view label, std::array<LaunchDim, 2> grid,
                         int64_t threads, int64_t shared,
                         std::vector<Arg> args) {
      Step step;
      step.label = std::string(label);
      step.program = static_cast<uint32_t>(body->steps.size());
      step.entry = absl::StrCat("kiln_stream_", label);
      step.grid = {grid[0], grid[1], LaunchDim::Constant(1)};
      step.block = {static_cast<uint32_t>(threads), 1, 1};
      step.dynamic_shared_bytes = static_cast<uint32_t>(shared);
      step.args = std::move(args);
      body->steps.push_back(std::move(step));
    };
    const auto columns = [](const Product& product) {
      return LaunchDim::Constant(
          static_cast<uint32_t>(product.split * product.columns()));
    };
    const auto p = FusedMoeArg;
    using P = FusedMoeParam;
    add("fc1", {columns(fc1), runs}, kThreads, DynamicSharedBytes(fc1, sum),
        {p(P::kTopkIds), p(P::kX), p(P::kGateSuh), p(P::kUpSuh), p(P::kWGate),
         p(P::kWUp), fc1_sums, Arg::Tokens()});
    add("fc2", {columns(fc2), runs}, kThreads, DynamicSharedBytes(fc2, sum),
        {p(P::kTopkIds), fc1_sums, p(P::kRotations), p(P::kWDown), fc2_sums,
         Arg::Tokens()});
    const LaunchDim blocks = LaunchDim::Of(
        {.mul = static_cast<uint32_t>(hidden / kBlock), .add = 0, .div = 1});
    add("combine", {blocks, LaunchDim::Constant(1)},
        32 * std::min<int64_t>(geometry.top_k, 8), 0,
        {p(P::kTopkIds), p(P::kTopkWeights), fc2_sums, p(P::kDownSvh),
         p(P::kOut), Arg::Tokens()});
  }
};

}  // namespace

const KernelTemplate* FusedMoeStreamTemplate() {
  static const auto* const instance = new Template;
  return instance;
}

}  // namespace kiln
