#include "templates/fused_moe/workload.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "compiler/base/check.h"
#include "templates/fused_moe/one_term.h"
#include "templates/seeded_values.h"

namespace kiln {
namespace {

constexpr uint64_t kStreamWeights = 1;
constexpr uint64_t kStreamScales = 2;

}  // namespace

std::vector<BufferFill> FusedMoeBuffers(const RequestGeometry& geometry) {
  // A dot product of n terms of order one grows by sqrt(n).
  const int shrink = -static_cast<int>(
      std::lround(std::log2(std::sqrt(static_cast<double>(geometry.hidden)))));
  const BufferFill words = {
      .kind = BufferFill::Kind::kWords, .element_bytes = 2, .a = 0xffff};
  const BufferFill ids = {.kind = BufferFill::Kind::kIndices,
                          .element_bytes = DTypeBytes(geometry.id_dtype),
                          .a = static_cast<uint64_t>(geometry.experts)};
  const BufferFill scales = FloatFill(DType::kF16, -1, true);
  std::vector<BufferFill> out = {
      FloatFill(geometry.io_dtype, -1, true),
      ids,
      FloatFill(DType::kF32, -3, false),
      words,
      words,
      words,
      scales,
      scales,
      FloatFill(DType::kF16, shrink, true),
      scales,
      {.kind = BufferFill::Kind::kNone, .element_bytes = 4},
  };
  KILN_CHECK(out.size() == kFusedMoeParamCount);
  SetFillBytes(FusedMoeBytes(geometry, 0), FusedMoeBytes(geometry, 1), &out);
  return out;
}

FusedMoeWorkload::FusedMoeWorkload(const RequestGeometry& geometry,
                                   uint64_t seed)
    : RoutedWorkload(geometry, seed, kFusedMoeParamCount) {
  const std::vector<uint64_t> bytes = FusedMoeBytes(geometry, 0);
  const auto slot = [](FusedMoeParam param) {
    return static_cast<size_t>(param);
  };
  for (const FusedMoeParam param :
       {FusedMoeParam::kWGate, FusedMoeParam::kWUp, FusedMoeParam::kWDown}) {
    constants_[slot(param)] = MakeWords(
        bytes[slot(param)], MixSeed(seed, kStreamWeights, slot(param), 0));
  }
  // Decoded weights have about unit variance, so a dot product over n inputs
  // grows by sqrt(n); the output-side scale takes that back.
  const double fc1 = 1 / std::sqrt(static_cast<double>(geometry.hidden));
  const double fc2 = 1 / std::sqrt(static_cast<double>(geometry.intermediate));
  const auto scales = [&](FusedMoeParam param, double magnitude) {
    constants_[slot(param)] =
        MakeScales(bytes[slot(param)] / 2, magnitude,
                   MixSeed(seed, kStreamScales, slot(param), 0));
  };
  scales(FusedMoeParam::kGateSuh, 1);
  scales(FusedMoeParam::kUpSuh, 1);
  SetOneTermScales(static_cast<size_t>(geometry.hidden),
                   &constants_[slot(FusedMoeParam::kGateSuh)],
                   &constants_[slot(FusedMoeParam::kUpSuh)]);
  scales(FusedMoeParam::kDownSvh, fc2);
  // [gate_svh | up_svh | down_suh] per expert: two magnitudes in one table.
  SplitMix64 random(
      MixSeed(seed, kStreamScales, slot(FusedMoeParam::kRotations), 0));
  std::string& rotations = constants_[slot(FusedMoeParam::kRotations)];
  rotations.reserve(bytes[slot(FusedMoeParam::kRotations)]);
  for (int64_t e = 0; e < geometry.experts; ++e) {
    for (int64_t c = 0; c < 3 * geometry.intermediate; ++c) {
      const double magnitude = c < 2 * geometry.intermediate ? fc1 : 1.0;
      const double spread = 0.75 + 0.5 * random.Unit();
      const double sign = (random.Next() & 1) != 0 ? 1 : -1;
      AppendHalf(&rotations, sign * spread * magnitude);
    }
  }
}

double FusedMoeWorkload::OneTerm(const std::vector<int64_t>& ids,
                                 uint32_t token, int64_t channel) const {
  return OneTermValue(geometry(), Constant(FusedMoeParam::kGateSuh), ids, token,
                      channel);
}

std::vector<double> FusedMoeWorkload::Evaluate(DrawKind kind, uint32_t draw,
                                               const std::vector<int64_t>& rows,
                                               int threads,
                                               ReferenceMode mode) const {
  const auto tokens =
      static_cast<uint32_t>(*std::max_element(rows.begin(), rows.end()) + 1);
  const Tokens inputs = MakeTokens(kind, draw, tokens);
  const auto half = [this](FusedMoeParam param) {
    return reinterpret_cast<const uint16_t*>(Constant(param).data());
  };
  FusedMoeProblem problem;
  problem.tokens = tokens;
  problem.hidden = geometry().hidden;
  problem.intermediate = geometry().intermediate;
  problem.experts = geometry().experts;
  problem.top_k = geometry().top_k;
  problem.codebook = geometry().weights.codebook;
  problem.bits = geometry().weights.bits;
  problem.shared_scales = geometry().weights.shared_scales;
  problem.x_dtype = geometry().io_dtype;
  problem.id_dtype = geometry().id_dtype;
  problem.x = inputs.x.data();
  problem.topk_ids = inputs.topk_ids.data();
  problem.topk_weights =
      reinterpret_cast<const float*>(inputs.topk_weights.data());
  problem.w_gate = half(FusedMoeParam::kWGate);
  problem.w_up = half(FusedMoeParam::kWUp);
  problem.w_down = half(FusedMoeParam::kWDown);
  problem.gate_suh = half(FusedMoeParam::kGateSuh);
  problem.up_suh = half(FusedMoeParam::kUpSuh);
  problem.rotations = half(FusedMoeParam::kRotations);
  problem.down_svh = half(FusedMoeParam::kDownSvh);
  std::vector<double> result(rows.size() *
                             static_cast<size_t>(geometry().hidden));
  FusedMoeReferenceRows(problem, rows, mode, result.data(), threads);
  return result;
}

namespace {

OpWork FusedMoeWork(const RequestGeometry& geometry) {
  const auto hidden = static_cast<double>(geometry.hidden);
  const auto intermediate = static_cast<double>(geometry.intermediate);
  const Bits& bits = geometry.weights.bits;
  const auto matrix = [&](FusedMoeParam param, int rate) {
    return OpMatrix{.slot = static_cast<uint64_t>(param),
                    .weights = hidden * intermediate,
                    .bits = rate};
  };
  OpWork work;
  work.matrices = {matrix(FusedMoeParam::kWGate, bits.gate),
                   matrix(FusedMoeParam::kWUp, bits.up),
                   matrix(FusedMoeParam::kWDown, bits.down)};
  // suh of gate and up, the three rotations, svh of down; f16.
  work.scale_bytes = (3 * hidden + 3 * intermediate) * 2;
  return work;
}

}  // namespace

const OpContract& FusedMoeContract() {
  static const auto* const contract =
      new RoutedContract({.params = FusedMoeParams,
                          .buffers = FusedMoeBuffers,
                          .work = FusedMoeWork,
                          .workload = MakeWorkloadOf<FusedMoeWorkload>});
  return *contract;
}

}  // namespace kiln
