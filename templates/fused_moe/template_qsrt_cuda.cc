#include "templates/fused_moe/template_qsrt_cuda.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "templates/axes.h"
#include "templates/fused_moe/code_target.h"
#include "templates/fused_moe/grouped_cost.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/op_qsrt.h"
#include "templates/fused_moe/routed_steps.h"
#include "templates/registry.h"

namespace kiln {
namespace {

constexpr auto kInter = static_cast<uint32_t>(kQsrtIntermediate);
constexpr uint32_t kBlock = 128;  // H128, and the channels of a record
constexpr uint32_t kRecords = kInter / kBlock;
// The codebook's tables: a 16-bit number for every 16 ranks, or a byte for each
// state of a rate.
constexpr int64_t kRankTableBytes = 8192;
constexpr int64_t kStateTableBytes = 65536;
constexpr int64_t kBitsMax = 4;  // of a record

// Headers of qsrt_cuda.cu beside those of device/.
constexpr const char* kHeaders[] = {"cuda/e4m3.h",
                                    "cuda/grouped.h",
                                    "cuda/ring.h",
                                    "cuda/warp.h",
                                    "fused_moe/code_product.h",
                                    "fused_moe/code_row.h",
                                    "fused_moe/mx_block.h",
                                    "fused_moe/mx_scales.h",
                                    "fused_moe/mx_warp.h",
                                    "fused_moe/situ.h",
                                    "fused_moe/sqg_fragment.h",
                                    "fused_moe/sqg_table.h"};

// Of the table that fc1 reads.
int64_t Fc1TableBytes(const AxisPoint& point) {
  return point.at("codewords") == 1 ? kStateTableBytes : kRankTableBytes;
}

bool HasCodes(const AxisPoint& point) { return point.at("operand_codes") == 1; }

// A table, and a ring of packed weights, with room for those of the highest
// rate, and padded operand rows.
int64_t SharedBytes(int64_t table_bytes, const AxisPoint& point) {
  const int64_t k_tile = point.at("k_tile");
  return table_bytes +
         point.at("stages") *
             (k_tile * point.at("channels_tile") * kBitsMax / 8 +
              point.at("tokens_tile") *
                  (HasCodes(point) ? kCodeStageRowBytes : (k_tile + 8) * 2));
}

// Of a row of an operand of codes, and of its scales behind them: the kernel's
// ScaledRowBytes.
uint64_t ScaledRowBytes(uint64_t channels) {
  return channels + (channels / 32 + 15) / 16 * 16;
}

class Template : public KernelTemplate {
 public:
  absl::string_view name() const override { return "fused_moe.qsrt_cuda"; }

  uint32_t version() const override { return 1; }

  Digest sources() const override {
    static const Digest digest = [] {
      std::vector<std::string> files(std::begin(kHeaders), std::end(kHeaders));
      for (const char* file :
           {"axes.cc", "fused_moe/code_target.cc", "fused_moe/grouped_cost.cc",
            "fused_moe/op.cc", "fused_moe/op_qsrt.cc", "fused_moe/qsrt_cuda.cu",
            "fused_moe/routed_steps.cc", "fused_moe/template_qsrt_cuda.cc"}) {
        files.push_back(file);
      }
      return TemplateSourcesDigest(files);
    }();
    return digest;
  }

  Op op() const override { return Op::kFusedMoe; }

  WeightFormat format() const override { return WeightFormat::kQsrt; }

  Backend backend() const override { return Backend::kCuda; }

  absl::Status Supports(const RequestGeometry& geometry,
                        const Target& target) const override {
    return CheckServes(
        *this, geometry, target.backend == Backend::kCuda && target.level >= 80,
        absl::StrCat("on sm_80 and later, not on ", target.ToString()));
  }

  ParamSpace Enumerate(const Problem& problem,
                       size_t points_max) const override {
    const std::vector<Axis> axes = Axes();
    std::map<int64_t, double> tiles;
    for (const Axis& axis : axes) {
      if (axis.name != "tokens_tile") continue;
      for (const int64_t tile : axis.values) {
        tiles[tile] =
            FusedMoeTilesExpected(problem.geometry, static_cast<uint32_t>(tile),
                                  problem.interval.m_max);
      }
    }
    ParamSpace space = OrderPoints(
        axes, {"stages"},
        [&](const AxisPoint& point) { return Constraint(problem, point); },
        [&](const AxisPoint& point) {
          return Cost(problem, point, tiles.at(point.at("tokens_tile")));
        },
        std::numeric_limits<size_t>::max());
    Alternate(&space.points);
    if (space.points.size() > points_max) space.points.resize(points_max);
    return space;
  }

  absl::StatusOr<PlanBody> MakeBody(
      const Problem& problem, const Assignment& assignment) const override {
    const std::vector<Axis> axes = Axes();
    RETURN_IF_ERROR(CheckAssignment(axes, assignment));
    const std::string broken =
        Constraint(problem, AxisPoint(&axes, assignment));
    if (!broken.empty()) return absl::InvalidArgumentError(broken);
    ASSIGN_OR_RETURN(const QsrtArm arm,
                     QsrtArmOf(problem.geometry, problem.interval));
    const Target& target = problem.device.target;
    PlanBody body;
    body.template_name = std::string(name());
    body.template_version = version();
    body.assignment = assignment;
    // A sum's order depends on the number of K slices alone.
    const AxisPoint point(&axes, assignment);
    body.numerics_class = absl::StrCat(
        "qsrt.", QsrtArmName(arm),
        HasCodes(point) ? absl::StrCat(".qmma.", CodeSums(target)) : ".mma",
        ".fc1x", assignment.at("split_fc1"), ".fc2x",
        assignment.at("split_fc2"));
    body.tolerance = QsrtTolerance(arm);
    body.deterministic = true;
    body.overlapped = target.level >= 90;
    body.params = QsrtParams(problem.geometry);
    AddSteps(problem, point, &body);
    return body;
  }

  std::vector<SourceUnit> MakeUnits(
      const RequestGeometry& geometry, const Target& target,
      const Assignment& assignment) const override {
    std::vector<std::string> support = {"kiln_qsrt_activate",
                                        "kiln_qsrt_combine", "kiln_qsrt_count"};
    if (!geometry.weights.shared_scales) support.push_back("kiln_qsrt_rotate");
    support.push_back("kiln_qsrt_route");
    // Whether or not this candidate launches it.
    if (assignment.at("operand_codes") == 0) {
      support.push_back("kiln_qsrt_table");
    }
    std::string products =
        AxisPrelude(assignment, {"activation_bits", "operand_codes",
                                 "tokens_tile", "channels_tile", "k_tile",
                                 "warps", "stages", "codewords"});
    if (assignment.at("operand_codes") == 1) {
      absl::StrAppend(&products, "#define KILN_BLOCK_SCALED ",
                      IsBlockScaled(target) ? 1 : 0, "\n");
    }
    return {Unit(geometry, assignment, 0,
                 AxisPrelude(assignment, {"activation_bits", "operand_codes"}),
                 std::move(support)),
            Unit(geometry, assignment, 1, products,
                 {"kiln_qsrt_fc1", "kiln_qsrt_fc2"})};
  }

 private:
  static std::vector<Axis> Axes() {
    return {{"activation_bits", {16, 8}},
            {"operand_codes", {0, 1}},
            {"tokens_tile", {8, 16, 32, 48, 64, 96, 128}},
            {"channels_tile", {64, 128}},
            {"k_tile", {64, 128}},
            {"warps", {4, 8}},
            {"stages", {2, 3, 4, 6}},
            {"codewords", {0, 1}},
            {"split_fc1", {1, 2, 4, 8}},
            {"split_fc2", {1, 2}}};
  }

  // Points of all ways to decode in turn, each in its order: which is faster is
  // for a race to say, however short the prefix that it takes.
  static void Alternate(std::vector<Assignment>* points) {
    // How many of its way come before a point.
    std::map<std::pair<int64_t, int64_t>, size_t> counts;
    std::vector<std::pair<size_t, Assignment>> turns;
    for (Assignment& point : *points) {
      const size_t turn =
          counts[{point.at("codewords"), point.at("operand_codes")}]++;
      turns.emplace_back(turn, std::move(point));
    }
    std::stable_sort(
        turns.begin(), turns.end(),
        [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t i = 0; i < turns.size(); ++i) {
      (*points)[i] = std::move(turns[i].second);
    }
  }

  // Empty, or the rule that the point breaks.
  static std::string Constraint(const Problem& problem,
                                const AxisPoint& point) {
    std::string broken = QsrtArmConstraint(problem, point);
    if (!broken.empty()) return broken;
    const QsrtArm arm = *QsrtArmOf(problem.geometry, problem.interval);
    if (point.at("codewords") == 1 && HasCodes(point)) {
      return "codewords 1 is a table of numbers, operand_codes 1 needs codes";
    }
    if (HasCodes(point) && arm != QsrtArm::kW4A8) {
      return absl::StrCat("operand_codes 1 is of the w4a8 arm, not of the ",
                          QsrtArmName(arm), " arm");
    }
    const Target& target = problem.device.target;
    if (HasCodes(point) && !MultipliesE4m3(target)) {
      return absl::StrCat("operand_codes 1: the tensor cores of ",
                          target.ToString(), " do not multiply E4M3");
    }
    if (HasCodes(point) && point.at("k_tile") != kCodeDepth) {
      return absl::StrCat("operand_codes 1 has a k_tile of ", kCodeDepth,
                          ", not of ", point.at("k_tile"));
    }
    broken = WarpStripsRule(point);
    if (!broken.empty()) return broken;
    broken = HasCodes(point) ? CodeRegistersRule(point.at("channels_tile") /
                                                     16 / point.at("warps"),
                                                 point.at("tokens_tile"))
                             : ThreadSumsRule(point);
    if (!broken.empty()) return broken;
    if (point.at("split_fc1") > problem.geometry.hidden / kBlock) {
      return "more K slices than blocks of 128 input channels";
    }
    return SharedBytesRule(problem, SharedBytes(Fc1TableBytes(point), point));
  }

  // What sqg_e4m3 costs to decode is added to the work of fused_moe.cuda, whose
  // kernels have the same shape: by instructions as they are counted, and for
  // the table of all states by what its look-ups take of shared memory. No
  // constant has been fitted to these kernels. An MMA of codes counts as half
  // of one of bfloat16 for each of its two tiles, and scaling its result is
  // added. Records have 3 bits on average, or a little more.
  //   tiles: how many the interval's largest m is expected to have.
  static double Cost(const Problem& problem, const AxisPoint& point,
                     double tiles) {
    constexpr double kRankCycles = 115;
    constexpr double kStateCycles = 85;
    constexpr double kTableStepCycles = 4000;  // a launch, and making tables
    constexpr double kMmaCycles = 8;
    constexpr double kCodeMmaCycles = 4;
    constexpr double kFoldCycles = 5;
    constexpr double kBits = 3;
    const bool has_codes = HasCodes(point);
    const auto tile = static_cast<double>(point.at("tokens_tile"));
    const auto channels = static_cast<double>(point.at("channels_tile"));
    const auto k_tile = static_cast<double>(point.at("k_tile"));
    const auto product = [&](int64_t inputs, int64_t outputs, int64_t split,
                             double decode_cycles, int64_t table_bytes) {
      GroupedProduct p;
      p.inputs = inputs;
      p.outputs = outputs;
      p.split = split;
      p.decode_cycles = decode_cycles;
      p.group_cycles = !has_codes ? kMmaCycles
                       : IsBlockScaled(problem.device.target)
                           ? kCodeMmaCycles
                           : kCodeMmaCycles + kFoldCycles;
      p.stage_pieces = k_tile * channels * kBits / 128 +
                       k_tile * tile / (has_codes ? 16 : 8);
      p.block_bytes = static_cast<double>(table_bytes);
      p.strip_registers = has_codes ? 8 : 4;
      p.shared_bytes = SharedBytes(table_bytes, point);
      return p;
    };
    const bool by_state = point.at("codewords") == 1;
    const int64_t hidden = problem.geometry.hidden;
    return GroupedCycles(
               problem, point, tiles,
               product(hidden, int64_t{2} * kInter, point.at("split_fc1"),
                       by_state ? kStateCycles : kRankCycles,
                       Fc1TableBytes(point)),
               product(kInter, hidden, point.at("split_fc2"), kRankCycles,
                       kRankTableBytes)) +
           (by_state ? kTableStepCycles : 0);
  }

  SourceUnit Unit(const RequestGeometry& geometry, const Assignment& assignment,
                  int part, const std::string& axes,
                  std::vector<std::string> entries) const {
    SourceUnit unit;
    unit.name = "fused_moe/qsrt_cuda.cu";
    unit.template_version = version();
    unit.compute_dtype = assignment.at("operand_codes") == 1     ? "e4m3"
                         : assignment.at("activation_bits") == 8 ? "bf16"
                                                                 : "f16";
    unit.text =
        absl::StrCat(QsrtPrelude(geometry), "#define KILN_PART ", part, "\n",
                     axes, TemplateText("fused_moe/qsrt_cuda.cu"));
    unit.headers = CudaHeaders({std::begin(kHeaders), std::end(kHeaders)});
    unit.entries = std::move(entries);
    return unit;
  }

  // Steps, arguments and slices as README.md, "QSRT weights on CUDA", lists
  // them.
  static void AddSteps(const Problem& problem, const AxisPoint& point,
                       PlanBody* body) {
    const RequestGeometry& geometry = problem.geometry;
    const auto tile = static_cast<uint32_t>(point.at("tokens_tile"));
    const auto channels = static_cast<uint32_t>(point.at("channels_tile"));
    const auto threads = static_cast<uint32_t>(point.at("warps") * 32);
    const auto split1 = static_cast<uint32_t>(point.at("split_fc1"));
    const auto split2 = static_cast<uint32_t>(point.at("split_fc2"));
    const bool shared = geometry.weights.shared_scales;
    const auto hidden = static_cast<uint32_t>(geometry.hidden);
    const auto experts = static_cast<uint32_t>(geometry.experts);
    const auto top_k = static_cast<uint32_t>(geometry.top_k);
    const uint32_t capacity = problem.interval.m_max;
    const uint64_t routes = uint64_t{capacity} * top_k;

    RoutedSteps steps("qsrt", problem, tile, body);
    const auto& [tiles, totals, rows, positions] = steps.lists();
    const auto row_bytes = [&](uint64_t numbers) {
      return HasCodes(point) ? ScaledRowBytes(numbers) : 2 * numbers;
    };
    const uint64_t operand = row_bytes(hidden) * (shared ? capacity : routes);
    const Arg places = steps.Slice("places", uint64_t{8} * experts);
    const Arg gate = steps.Slice("gate_operand", operand);
    const Arg up = steps.Slice("up_operand", operand);
    const Arg fc1 = steps.ProductSlice("fc1", uint64_t{2} * kInter, split1);
    const Arg mid = steps.Slice("mid_operand", row_bytes(kInter) * routes);
    const Arg fc2 = steps.ProductSlice("fc2", hidden, split2);
    const bool by_state = point.at("codewords") == 1;
    const uint32_t rates = QsrtRates(geometry);
    Arg codewords;
    if (by_state) {
      codewords = steps.Slice("codewords", uint64_t{kStateTableBytes} * rates);
    }

    const auto p = QsrtArg;
    using P = QsrtParam;
    const auto product = [&](uint32_t width, uint32_t split,
                             int64_t table_bytes) {
      return GroupedLaunch{
          .blocks = FusedMoeTiles(geometry, tile, width / channels),
          .slices = split,
          .threads = threads,
          .shared_bytes =
              static_cast<uint32_t>(SharedBytes(table_bytes, point))};
    };
    if (by_state) {
      steps.Add(
          "table", 0,
          {.blocks = LaunchDim::Constant(kStateTableBytes / kRouteThreads),
           .slices = rates,
           .threads = kRouteThreads},
          {codewords});
    }
    const uint32_t blocks = hidden / kBlock;
    TokenRotation rotation;
    if (shared) {  // a 128 block per warp
      rotation = {.chunks = blocks,
                  .block_chunks = kRouteWarps,
                  .args = {p(P::kX), p(P::kGateSuh), p(P::kUpSuh), gate, up}};
    }
    steps.AddRoute(p(P::kTopkIds),
                   {p(P::kModesFc1), p(P::kModesFc2), rows, positions, tiles,
                    totals, places},
                   rotation);
    if (!shared) {
      steps.AddHelper(
          "rotate", WarpsOver(top_k * blocks),
          {p(P::kX), p(P::kGateSuh), p(P::kUpSuh), rows, totals, gate, up});
    }
    std::vector<Arg> fc1_args = {gate, up,    p(P::kWGate), p(P::kWUp),
                                 rows, tiles, totals,       places};
    if (by_state) fc1_args.push_back(codewords);
    fc1_args.push_back(fc1);
    fc1_args.push_back(Arg::Tokens());
    steps.Add("fc1", 1, product(2 * kInter, split1, Fc1TableBytes(point)),
              std::move(fc1_args));
    std::vector<Arg> activate = {fc1, p(P::kRotations)};
    if (geometry.activation == Activation::kPerExpert) {
      activate.push_back(p(P::kActivations));
    }
    activate.insert(activate.end(),
                    {rows, totals, mid, Arg::Tokens(), Arg::U32(split1)});
    steps.AddHelper("activate", WarpsOver(top_k * kRecords),
                    std::move(activate));
    steps.Add("fc2", 1, product(hidden, split2, kRankTableBytes),
              {mid, p(P::kWDown), tiles, totals, places, fc2, Arg::Tokens()});
    steps.AddHelper("combine", WarpsOver(blocks),
                    {fc2, p(P::kDownSvh), p(P::kTopkWeights), positions, rows,
                     p(P::kOut), Arg::Tokens(), Arg::U32(split2)});
  }
};

}  // namespace

const KernelTemplate* FusedMoeQsrtCudaTemplate() {
  static const auto* const instance = new Template;
  return instance;
}

}  // namespace kiln
