#include "templates/fused_moe/qsrt_workload.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <memory>
#include <utility>

#include "compiler/base/check.h"
#include "templates/fused_moe/one_term.h"
#include "templates/fused_moe/op.h"
#include "templates/seeded_values.h"

namespace kiln {
namespace {

constexpr uint64_t kStreamWeights = 1;
constexpr uint64_t kStreamScales = 2;
constexpr uint64_t kStreamModes = 3;

// Standard deviation of the values of sqg_e4m3.
constexpr double kWeightSize = 1.5;

// Experts whose modes are all four pairs.
constexpr int64_t kPairsOfModes = 4;

size_t Slot(QsrtParam param) { return static_cast<size_t>(param); }

bool HasActivations(const RequestGeometry& geometry) {
  return geometry.activation == Activation::kPerExpert;
}

uint32_t ParamCount(const RequestGeometry& geometry) {
  return kQsrtParamCount + (HasActivations(geometry) ? 1 : 0);
}

std::vector<uint8_t> RatesOf(const RequestGeometry& geometry,
                             const void* modes) {
  const auto* mode = static_cast<const int32_t*>(modes);
  std::vector<uint8_t> rates;
  for (int64_t e = 0; e < geometry.experts; ++e) {
    rates.push_back(QsrtRate(geometry.qsrt.pairs, mode[e]).byte());
  }
  return rates;
}

}  // namespace

QsrtProblem::QsrtProblem(const RequestGeometry& geometry, uint32_t tokens,
                         std::span<const void* const> slots)
    : rates_fc1_(RatesOf(geometry, slots[Slot(QsrtParam::kModesFc1)])),
      rates_fc2_(RatesOf(geometry, slots[Slot(QsrtParam::kModesFc2)])) {
  KILN_CHECK(slots.size() == ParamCount(geometry));
  const auto halves = [&](QsrtParam param) {
    return static_cast<const uint16_t*>(slots[Slot(param)]);
  };
  FusedMoeProblem& p = problem_;
  p.tokens = tokens;
  p.hidden = geometry.hidden;
  p.intermediate = geometry.intermediate;
  p.experts = geometry.experts;
  p.top_k = geometry.top_k;
  p.codebook = TrellisCodebook::kSqgE4m3;
  p.shared_scales = geometry.weights.shared_scales;
  p.x_dtype = geometry.io_dtype;
  p.id_dtype = geometry.id_dtype;
  p.x = slots[Slot(QsrtParam::kX)];
  p.topk_ids = slots[Slot(QsrtParam::kTopkIds)];
  p.topk_weights =
      static_cast<const float*>(slots[Slot(QsrtParam::kTopkWeights)]);
  p.w_gate = halves(QsrtParam::kWGate);
  p.w_up = halves(QsrtParam::kWUp);
  p.w_down = halves(QsrtParam::kWDown);
  p.gate_suh = halves(QsrtParam::kGateSuh);
  p.up_suh = halves(QsrtParam::kUpSuh);
  p.rotations = halves(QsrtParam::kRotations);
  p.down_svh = halves(QsrtParam::kDownSvh);
  p.rates_fc1 = rates_fc1_.data();
  p.rates_fc2 = rates_fc2_.data();
  if (geometry.activation == Activation::kSitu) {
    p.activation = MoeActivation::kSitu;
  }
  if (!HasActivations(geometry)) return;
  const auto* numbers =
      static_cast<const int32_t*>(slots[Slot(QsrtParam::kActivations)]);
  for (int64_t e = 0; e < geometry.experts; ++e) {
    activations_.push_back(numbers[e] != 0 ? MoeActivation::kSitu
                                           : MoeActivation::kSilu);
  }
  p.expert_activation = activations_.data();
}

QsrtWorkload::QsrtWorkload(const RequestGeometry& geometry, uint64_t seed)
    : RoutedWorkload(geometry, seed, ParamCount(geometry)) {
  const std::vector<uint64_t> bytes = QsrtBytes(geometry, 0);
  const auto seed_of = [&](uint64_t stream, QsrtParam param, uint64_t expert) {
    return MixSeed(seed, stream, Slot(param), expert);
  };
  for (const QsrtParam param :
       {QsrtParam::kWGate, QsrtParam::kWUp, QsrtParam::kWDown}) {
    constants_[Slot(param)] =
        MakeWords(bytes[Slot(param)], seed_of(kStreamWeights, param, 0));
  }
  const auto fill = [&](QsrtParam param, int shift) {
    SplitMix64 random(seed_of(kStreamModes, param, 0));
    for (int64_t e = 0; e < geometry.experts; ++e) {
      const int64_t drawn = static_cast<int64_t>(random.Next() & 1);
      const int64_t number = e < kPairsOfModes ? e >> shift & 1 : drawn;
      AppendBytes(&constants_[Slot(param)], static_cast<int32_t>(number));
    }
  };
  fill(QsrtParam::kModesFc1, 0);
  fill(QsrtParam::kModesFc2, 1);
  if (HasActivations(geometry)) fill(QsrtParam::kActivations, 0);
  // A dot product over n inputs grows by sqrt(n); the scale behind it takes
  // that back.
  const auto fold = [](int64_t inputs) {
    return 1 / (kWeightSize * std::sqrt(static_cast<double>(inputs)));
  };
  const double fc1 = fold(geometry.hidden);
  const double fc2 = fold(kQsrtIntermediate);
  const auto scales = [&](QsrtParam param, double magnitude) {
    constants_[Slot(param)] = MakeScales(bytes[Slot(param)] / 2, magnitude,
                                         seed_of(kStreamScales, param, 0));
  };
  scales(QsrtParam::kGateSuh, 1);
  scales(QsrtParam::kUpSuh, 1);
  SetOneTermScales(static_cast<size_t>(geometry.hidden),
                   &constants_[Slot(QsrtParam::kGateSuh)],
                   &constants_[Slot(QsrtParam::kUpSuh)]);
  scales(QsrtParam::kDownSvh, fc2);
  std::string& rotations = constants_[Slot(QsrtParam::kRotations)];
  for (int64_t e = 0; e < geometry.experts; ++e) {
    const auto expert = static_cast<uint64_t>(e);
    rotations +=
        MakeScales(2 * kQsrtIntermediate, fc1,
                   seed_of(kStreamScales, QsrtParam::kRotations, 2 * expert));
    rotations += MakeScales(
        kQsrtIntermediate, 1,
        seed_of(kStreamScales, QsrtParam::kRotations, 2 * expert + 1));
  }
  for (size_t i = Slot(QsrtParam::kWGate); i <= Slot(QsrtParam::kDownSvh);
       ++i) {
    KILN_CHECK(constants_[i].size() == bytes[i]);
  }
}

double QsrtWorkload::OneTerm(const std::vector<int64_t>& ids, uint32_t token,
                             int64_t channel) const {
  return OneTermValue(geometry(), Constant(Slot(QsrtParam::kGateSuh)), ids,
                      token, channel);
}

std::vector<double> QsrtWorkload::Evaluate(DrawKind kind, uint32_t draw,
                                           const std::vector<int64_t>& rows,
                                           int threads,
                                           ReferenceMode mode) const {
  const auto tokens =
      static_cast<uint32_t>(*std::max_element(rows.begin(), rows.end()) + 1);
  const std::vector<std::string> inputs = TokenInputs(kind, draw, tokens);
  const QsrtProblem problem(geometry(), tokens, Slots(inputs));
  std::vector<double> result(rows.size() * row_width());
  FusedMoeReferenceRows(problem.problem(), rows, mode, result.data(), threads);
  return result;
}

namespace {

std::vector<BufferFill> QsrtBuffers(const RequestGeometry& geometry) {
  const int shrink = -static_cast<int>(std::lround(std::log2(
      kWeightSize * std::sqrt(static_cast<double>(geometry.hidden)))));
  const BufferFill words = {
      .kind = BufferFill::Kind::kWords, .element_bytes = 2, .a = 0xFFFF};
  const auto numbers = [](uint32_t element_bytes, int64_t count) {
    return BufferFill{.kind = BufferFill::Kind::kIndices,
                      .element_bytes = element_bytes,
                      .a = static_cast<uint64_t>(count)};
  };
  const BufferFill modes = numbers(4, 2);
  const BufferFill scales = FloatFill(DType::kF16, -1, true);
  std::vector<BufferFill> out = {
      FloatFill(geometry.io_dtype, -1, true),
      numbers(DTypeBytes(geometry.id_dtype), geometry.experts),
      FloatFill(DType::kF32, -3, false),
      words,
      words,
      words,
      modes,
      modes,
      scales,
      scales,
      FloatFill(DType::kF16, shrink, true),
      scales,
      {.kind = BufferFill::Kind::kNone, .element_bytes = 4},
  };
  if (HasActivations(geometry)) out.push_back(modes);
  KILN_CHECK(out.size() == ParamCount(geometry));
  SetFillBytes(QsrtBytes(geometry, 0), QsrtBytes(geometry, 1), &out);
  return out;
}

// Of an expert of P33: the rates of one of P24 have the same sum, those of
// one of P43 have a sixth more.
OpWork QsrtWork(const RequestGeometry& geometry) {
  const auto hidden = static_cast<double>(geometry.hidden);
  const auto inter = static_cast<double>(kQsrtIntermediate);
  const auto matrix = [&](QsrtParam param) {
    return OpMatrix{.slot = Slot(param), .weights = hidden * inter, .bits = 3};
  };
  OpWork work;
  work.matrices = {matrix(QsrtParam::kWGate), matrix(QsrtParam::kWUp),
                   matrix(QsrtParam::kWDown)};
  // suh of gate and up, the three rotations, svh of down; f16.
  work.scale_bytes = (3 * hidden + 3 * inter) * 2;
  return work;
}

}  // namespace

const OpContract& QsrtContract() {
  static const auto* const contract =
      new RoutedContract({.params = QsrtParams,
                          .buffers = QsrtBuffers,
                          .work = QsrtWork,
                          .workload = MakeWorkloadOf<QsrtWorkload>});
  return *contract;
}

}  // namespace kiln
