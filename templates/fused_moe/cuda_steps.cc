#include "templates/fused_moe/cuda_steps.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "templates/fused_moe/op.h"
#include "templates/registry.h"

namespace kiln {
namespace {

constexpr uint32_t kDecodeThreads = 256;

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

void AddGroupedSteps(const Problem& problem, uint32_t tile,
                     const GroupedLaunch& fc1, const GroupedLaunch& fc2,
                     const GroupedForm& form, PlanBody* body) {
  const RequestGeometry& geometry = problem.geometry;
  const uint32_t capacity = problem.interval.m_max;
  const bool shared = geometry.weights.shared_scales;
  const auto hidden = static_cast<uint32_t>(geometry.hidden);
  const auto inter = static_cast<uint32_t>(geometry.intermediate);
  const auto experts = static_cast<uint32_t>(geometry.experts);
  const auto top_k = static_cast<uint32_t>(geometry.top_k);
  const uint64_t routes = uint64_t{capacity} * top_k;

  RoutedSteps steps("moe", problem, tile, body);
  const auto& [tiles, totals, rows, positions] = steps.lists();
  const uint64_t operand = uint64_t{2} * hidden * (shared ? capacity : routes);
  const Arg gate = steps.Slice("gate_operand", operand);
  const Arg up = steps.Slice("up_operand", operand);
  const Arg fc1_sums =
      steps.ProductSlice("fc1", uint64_t{2} * inter, fc1.slices);
  const Arg activated = steps.Slice("activated", uint64_t{2} * inter * routes);
  const Arg fc2_sums = form.atomic_sum
                           ? FusedMoeArg(FusedMoeParam::kOut)
                           : steps.ProductSlice("fc2", hidden, fc2.slices);

  const auto p = FusedMoeArg;
  using P = FusedMoeParam;
  Arg w_gate = p(P::kWGate), w_up = p(P::kWUp), w_down = p(P::kWDown);
  if (form.decoded) {
    const uint64_t matrix = uint64_t{2} * experts * hidden * inter;
    const Arg decoded[] = {steps.Slice("decoded_gate", matrix),
                           steps.Slice("decoded_up", matrix),
                           steps.Slice("decoded_down", matrix)};
    steps.Add(
        "decode", 1,
        {.blocks = LaunchDim::Constant(experts * (hidden / 64) * (inter / 128)),
         .slices = 3,
         .threads = kDecodeThreads},
        {w_gate, w_up, w_down, decoded[0], decoded[1], decoded[2]});
    w_gate = decoded[0];
    w_up = decoded[1];
    w_down = decoded[2];
  }
  // With shared tables blocks of route rotate the tokens, a warp 128 channels.
  TokenRotation rotation;
  if (shared) {
    rotation = {.chunks = hidden / 128,
                .block_chunks = kRouteWarps,
                .args = {p(P::kX), p(P::kGateSuh), p(P::kUpSuh), gate, up}};
    if (form.atomic_sum) rotation.args.push_back(p(P::kOut));
  }
  steps.AddRoute(p(P::kTopkIds), {rows, positions, tiles, totals}, rotation);
  if (!shared) {
    steps.AddHelper(
        "rotate", WarpsOver(top_k * (hidden / 128)),
        {p(P::kX), p(P::kGateSuh), p(P::kUpSuh), rows, totals, gate, up});
  }
  steps.Add(
      "fc1", 1, fc1,
      {gate, up, w_gate, w_up, rows, tiles, totals, fc1_sums, Arg::Tokens()});
  // A warp activates a 128 block of one row, or of eight, and combines one of
  // one token, or two.
  const bool natural = form.order == OperandOrder::kNatural;
  const LaunchDim activate = natural
                                 ? WarpsOver(top_k * (inter / 128))
                                 : LaunchDim::Of({.mul = top_k * (inter / 128),
                                                  .add = 7 * (inter / 128),
                                                  .div = 8 * kHelperWarps});
  const LaunchDim combine =
      natural ? WarpsOver(hidden / 128)
              : LaunchDim::Of(
                    {.mul = hidden / 128, .add = 0, .div = 2 * kHelperWarps});
  steps.AddHelper("activate", activate,
                  {fc1_sums, p(P::kRotations), rows, totals, activated,
                   Arg::Tokens(), Arg::U32(fc1.slices)});
  std::vector<Arg> fc2_args = {activated, w_down, tiles, totals};
  if (form.atomic_sum) {
    fc2_args.insert(fc2_args.end(), {rows, p(P::kTopkWeights)});
  }
  fc2_args.push_back(fc2_sums);
  if (!form.atomic_sum) fc2_args.push_back(Arg::Tokens());
  steps.Add("fc2", 1, fc2, std::move(fc2_args));
  if (form.atomic_sum) {
    steps.AddHelper("finish", combine,
                    {p(P::kDownSvh), p(P::kOut), Arg::Tokens()});
    return;
  }
  steps.AddHelper("combine", combine,
                  {fc2_sums, p(P::kDownSvh), p(P::kTopkWeights), positions,
                   rows, p(P::kOut), Arg::Tokens(), Arg::U32(fc2.slices)});
}

}  // namespace kiln
