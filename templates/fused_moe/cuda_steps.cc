#include "templates/fused_moe/cuda_steps.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/route_segments.h"
#include "templates/registry.h"

namespace kiln {
namespace {

constexpr uint32_t kHelperThreads = 128;
constexpr uint32_t kDecodeThreads = 256;
constexpr uint32_t kHelperWarps = kHelperThreads / 32;

}  // namespace

SourceUnit GroupedSupportUnit(const RequestGeometry& geometry,
                              uint32_t template_version,
                              const GroupedForm& form) {
  SourceUnit unit;
  unit.name = "fused_moe/cuda.cu";
  unit.template_version = template_version;
  unit.compute_dtype = "f16";
  unit.text =
      absl::StrCat(FusedMoePrelude(geometry),
                   "#define KILN_PART 0\n#define KILN_OPERAND_ORDER ",
                   static_cast<int>(form.order), "\n#define KILN_ATOMIC_SUM ",
                   form.atomic_sum ? 1 : 0, "\n", TemplateText(unit.name));
  unit.headers =
      CudaHeaders({"cuda/grouped.h", "cuda/mul1_affine.h", "cuda/warp.h"});
  unit.entries = {"kiln_moe_activate"};
  if (!form.atomic_sum) unit.entries.push_back("kiln_moe_combine");
  unit.entries.push_back("kiln_moe_count");
  if (form.atomic_sum) unit.entries.push_back("kiln_moe_finish");
  if (!geometry.weights.shared_scales) {
    unit.entries.push_back("kiln_moe_rotate");
  }
  unit.entries.push_back("kiln_moe_route");
  return unit;
}

void AddGroupedSteps(const RequestGeometry& geometry, uint32_t capacity,
                     uint32_t tile, const GroupedLaunch& fc1,
                     const GroupedLaunch& fc2, const GroupedForm& form,
                     PlanBody* body) {
  const bool shared = geometry.weights.shared_scales;
  const auto hidden = static_cast<uint32_t>(geometry.hidden);
  const auto inter = static_cast<uint32_t>(geometry.intermediate);
  const auto experts = static_cast<uint32_t>(geometry.experts);
  const auto top_k = static_cast<uint32_t>(geometry.top_k);
  const uint64_t routes = uint64_t{capacity} * top_k;

  const auto slice = [body](absl::string_view name, uint64_t bytes) {
    return Arg::Arena(body->arena.Add(name, bytes));
  };
  const uint64_t operand = uint64_t{2} * hidden * (shared ? capacity : routes);
  const Arg tiles =
      slice("tiles", 16 * FusedMoeTilesMax(geometry, tile, capacity));
  const Arg totals = slice("totals", 16);
  const Arg rows = slice("rows", 8 * routes);
  const Arg positions = slice("positions", 4 * routes);
  const Arg gate = slice("gate_operand", operand);
  const Arg up = slice("up_operand", operand);
  // Rounded to fp16, or one fp32 partial sum for each slice of K.
  const auto product = [&slice, routes](absl::string_view name, uint32_t width,
                                        uint32_t slices) {
    return slice(name, (slices == 1 ? uint64_t{2} : uint64_t{4} * slices) *
                           width * routes);
  };
  const Arg fc1_sums = product("fc1", 2 * inter, fc1.slices);
  const Arg activated = slice("activated", uint64_t{2} * inter * routes);
  const Arg fc2_sums = form.atomic_sum ? FusedMoeArg(FusedMoeParam::kOut)
                                       : product("fc2", hidden, fc2.slices);

  const auto p = FusedMoeArg;
  using P = FusedMoeParam;
  const LaunchDim one = LaunchDim::Constant(1);
  const auto warps_over = [](uint32_t per_token) {
    return LaunchDim::Of({.mul = per_token, .add = 0, .div = kHelperWarps});
  };
  const auto add = [body](absl::string_view label, uint32_t program,
                          const LaunchDim& x, const LaunchDim& y,
                          uint32_t block, uint32_t shared_bytes,
                          std::vector<Arg> args) {
    Step step;
    step.label = std::string(label);
    step.program = program;
    step.entry = absl::StrCat("kiln_moe_", label);
    step.grid = {x, y, LaunchDim::Constant(1)};
    step.block = {block, 1, 1};
    step.dynamic_shared_bytes = shared_bytes;
    step.args = std::move(args);
    body->steps.push_back(std::move(step));
  };
  Arg w_gate = p(P::kWGate), w_up = p(P::kWUp), w_down = p(P::kWDown);
  if (form.decoded) {
    const uint64_t matrix = uint64_t{2} * experts * hidden * inter;
    const Arg decoded[] = {slice("decoded_gate", matrix),
                           slice("decoded_up", matrix),
                           slice("decoded_down", matrix)};
    add("decode", 1,
        LaunchDim::Constant(experts * (hidden / 64) * (inter / 128)),
        LaunchDim::Constant(3), kDecodeThreads, 0,
        {w_gate, w_up, w_down, decoded[0], decoded[1], decoded[2]});
    w_gate = decoded[0];
    w_up = decoded[1];
    w_down = decoded[2];
  }
  // Routes are sorted by one block, or by one for each segment of many; then
  // blocks beyond these rotate the tokens if tables are shared, two 128 blocks
  // per warp.
  const RouteSegments segments = RouteSegmentsOf(routes);
  Arg counts = Arg::U64(0);
  if (segments.counted()) {
    counts = slice("counts", segments.counts_bytes(experts));
    add("count", 0, segments.counting_blocks(top_k), one, kRouteThreads, 0,
        {p(P::kTopkIds), counts, Arg::Tokens(), Arg::U32(segments.length)});
  }
  std::vector<Arg> route = {p(P::kTopkIds), counts, rows,
                            positions,      tiles,  totals};
  if (shared) {
    route.insert(route.end(),
                 {p(P::kX), p(P::kGateSuh), p(P::kUpSuh), gate, up});
    if (form.atomic_sum) route.push_back(p(P::kOut));
  }
  route.push_back(Arg::Tokens());
  if (shared) route.push_back(Arg::U32(segments.count));
  route.insert(route.end(), {Arg::U32(segments.length), Arg::U32(tile)});
  add("route", 0,
      shared ? LaunchDim::Of({.mul = hidden / 128,
                              .add = 2 * kRouteWarps * segments.count,
                              .div = 2 * kRouteWarps})
             : LaunchDim::Constant(segments.count),
      one, kRouteThreads, RouteSharedBytes(experts), std::move(route));
  if (!shared) {
    add("rotate", 0, warps_over(top_k * (hidden / 128)), one, kHelperThreads, 0,
        {p(P::kX), p(P::kGateSuh), p(P::kUpSuh), rows, totals, gate, up});
  }
  add("fc1", 1, fc1.blocks, LaunchDim::Constant(fc1.slices), fc1.threads,
      fc1.shared_bytes,
      {gate, up, w_gate, w_up, rows, tiles, totals, fc1_sums, Arg::Tokens()});
  // A warp activates a 128 block of one row, or of eight, and combines one of
  // one token, or two.
  const bool natural = form.order == OperandOrder::kNatural;
  const LaunchDim activate = natural
                                 ? warps_over(top_k * (inter / 128))
                                 : LaunchDim::Of({.mul = top_k * (inter / 128),
                                                  .add = 7 * (inter / 128),
                                                  .div = 8 * kHelperWarps});
  const LaunchDim combine =
      natural ? warps_over(hidden / 128)
              : LaunchDim::Of(
                    {.mul = hidden / 128, .add = 0, .div = 2 * kHelperWarps});
  add("activate", 0, activate, one, kHelperThreads, 0,
      {fc1_sums, p(P::kRotations), rows, totals, activated, Arg::Tokens(),
       Arg::U32(fc1.slices)});
  std::vector<Arg> fc2_args = {activated, w_down, tiles, totals};
  if (form.atomic_sum) {
    fc2_args.insert(fc2_args.end(), {rows, p(P::kTopkWeights)});
  }
  fc2_args.push_back(fc2_sums);
  if (!form.atomic_sum) fc2_args.push_back(Arg::Tokens());
  add("fc2", 1, fc2.blocks, LaunchDim::Constant(fc2.slices), fc2.threads,
      fc2.shared_bytes, fc2_args);
  if (form.atomic_sum) {
    add("finish", 0, combine, one, kHelperThreads, 0,
        {p(P::kDownSvh), p(P::kOut), Arg::Tokens()});
    return;
  }
  add("combine", 0, combine, one, kHelperThreads, 0,
      {fc2_sums, p(P::kDownSvh), p(P::kTopkWeights), positions, rows,
       p(P::kOut), Arg::Tokens(), Arg::U32(fc2.slices)});
}

}  // namespace kiln
