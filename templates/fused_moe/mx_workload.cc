#include "templates/fused_moe/mx_workload.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "compiler/base/check.h"
#include "templates/formats/coupled_signs.h"
#include "templates/fused_moe/mx_reference.h"
#include "templates/fused_moe/op.h"
#include "templates/seeded_values.h"

namespace kiln {
namespace {

constexpr uint64_t kStreamWeights = 1;
constexpr uint64_t kStreamScales = 2;

// Standard deviation of NPK-1's values, 2.49, times the root mean square of the
// block scales below.
constexpr double kWeightSize = 2.49 * 1.15;
// 1/4, 1/2, 1, 2.
constexpr uint8_t kLeastScale = 125;
constexpr uint64_t kScales = 4;

constexpr size_t kInner = 128;
constexpr size_t kOuter = 512;
constexpr uint16_t kHalfOne = 0x3C00;
constexpr uint16_t kHalfMinusOne = 0xBC00;

size_t Slot(MxParam param) { return static_cast<size_t>(param); }

// How much a dot product with weights of these scales grows over n inputs.
double GrowthOf(int64_t inputs) {
  return kWeightSize * std::sqrt(static_cast<double>(inputs));
}

//   shift: of the exponent
std::string MakeBlockScales(uint64_t bytes, uint64_t seed, int shift) {
  SplitMix64 random(seed);
  std::string out(bytes, '\0');
  for (char& byte : out) {
    byte = static_cast<char>(kLeastScale + shift +
                             static_cast<int>(random.Below(kScales)));
  }
  return out;
}

void AppendSigns(std::string* out, const std::vector<int8_t>& signs) {
  for (const int8_t sign : signs) {
    AppendBytes(out, sign > 0 ? kHalfOne : kHalfMinusOne);
  }
}

// Channel of x whose H512, scaled by ones in the first 128, is one row of H128
// there and zero elsewhere, so that the H128 behind it leaves one channel: four
// equal numbers, one in each quarter of the first 512. Without transforms one
// channel is there from the beginning.
double OneTermValue(const RequestGeometry& geometry, uint32_t token,
                    int64_t channel) {
  const bool coupled = geometry.mx.boundary == MxBoundary::kCoupled;
  if (channel >= static_cast<int64_t>(coupled ? kOuter : kInner)) return 0;
  const uint32_t row = (token * 37 + 11) % kInner;
  if (static_cast<size_t>(channel) % kInner != row) return 0;
  // A power of two that makes gates of order one: the one channel, rotated
  // twice this, stands for `hidden` bell-shaped ones of size one.
  return std::exp2(
      std::round(0.5 * std::log2(static_cast<double>(geometry.hidden)) -
                 (coupled ? 1 : 0)));
}

}  // namespace

MxWorkload::MxWorkload(const RequestGeometry& geometry, uint64_t seed)
    : RoutedWorkload(geometry, seed, MxSlot(geometry, MxParam::kOut) + 1) {
  const std::vector<uint64_t> bytes = MxBytes(geometry, 0);
  const auto weights_seed = [&](MxParam param) {
    return MixSeed(seed, kStreamWeights, Slot(param), 0);
  };
  const auto scales_seed = [&](MxParam param, uint64_t expert) {
    return MixSeed(seed, kStreamScales, Slot(param), expert);
  };
  for (const MxParam param : {MxParam::kW13, MxParam::kW2}) {
    constants_[Slot(param)] =
        MakeWords(bytes[Slot(param)], weights_seed(param));
  }
  // The scale behind a dot product takes back how much it grows.
  const bool coupled = geometry.mx.boundary == MxBoundary::kCoupled;
  for (const auto& [param, inputs] :
       {std::pair{MxParam::kW13Scale, geometry.hidden},
        {MxParam::kW2Scale, geometry.intermediate}}) {
    const int shift =
        coupled ? 0
                : -static_cast<int>(std::lround(std::log2(GrowthOf(inputs))));
    constants_[Slot(param)] =
        MakeBlockScales(bytes[Slot(param)], weights_seed(param), shift);
  }
  for (size_t i = Slot(MxParam::kW13); i <= Slot(MxParam::kW2Scale); ++i) {
    KILN_CHECK(constants_[i].size() == bytes[i]);
  }
  if (!coupled) return;
  const auto hidden = static_cast<uint64_t>(geometry.hidden);
  const auto inter = static_cast<uint64_t>(geometry.intermediate);
  const double fold1 = 1 / GrowthOf(geometry.hidden);
  const double fold2 = 1 / GrowthOf(geometry.intermediate);
  std::string& suh = constants_[Slot(MxParam::kGateUpSuh)];
  suh = MakeScales(hidden, 1, scales_seed(MxParam::kGateUpSuh, 0));
  for (size_t c = 0; c < kInner; ++c) {
    std::memcpy(suh.data() + 2 * c, &kHalfOne, sizeof(kHalfOne));
  }
  constants_[Slot(MxParam::kDownSvh)] =
      MakeScales(hidden, fold2, scales_seed(MxParam::kDownSvh, 0));
  std::string& rotations = constants_[Slot(MxParam::kRotations)];
  for (int64_t e = 0; e < geometry.experts; ++e) {
    const auto expert = static_cast<uint64_t>(e);
    rotations += MakeScales(2 * inter, fold1,
                            scales_seed(MxParam::kRotations, 2 * expert));
    rotations +=
        MakeScales(inter, 1, scales_seed(MxParam::kRotations, 2 * expert + 1));
    // Begins at 1: draw 0 has no sign.
    const auto draw = static_cast<uint8_t>((e + 1) % (kSignDrawMax + 1));
    AppendSigns(&rotations, CoupledSigns(draw, SignAxis::kPre, 2 * inter));
    AppendSigns(&rotations, CoupledSigns(draw, SignAxis::kPost, inter));
  }
  for (size_t i = Slot(MxParam::kGateUpSuh); i <= Slot(MxParam::kDownSvh);
       ++i) {
    KILN_CHECK(constants_[i].size() == bytes[i]);
  }
}

double MxWorkload::OneTerm(const std::vector<int64_t>&, uint32_t token,
                           int64_t channel) const {
  return OneTermValue(geometry(), token, channel);
}

std::vector<double> MxWorkload::Evaluate(DrawKind kind, uint32_t draw,
                                         const std::vector<int64_t>& rows,
                                         int threads,
                                         ReferenceMode mode) const {
  const auto tokens =
      static_cast<uint32_t>(*std::max_element(rows.begin(), rows.end()) + 1);
  const std::vector<std::string> inputs = TokenInputs(kind, draw, tokens);
  MxProblem problem;
  problem.geometry = geometry();
  problem.tokens = tokens;
  const std::vector<const void*> slots = Slots(inputs);
  std::copy(slots.begin(), slots.end(), problem.slots);
  std::vector<double> result(rows.size() * row_width());
  MxReferenceRows(problem, rows, mode, result.data(), threads);
  return result;
}

namespace {

std::vector<BufferFill> MxBuffers(const RequestGeometry& geometry) {
  const auto words = [](uint32_t element_bytes, uint64_t mask, uint64_t set) {
    return BufferFill{.kind = BufferFill::Kind::kWords,
                      .element_bytes = element_bytes,
                      .a = mask,
                      .b = set};
  };
  // Scales and signs share a table, so both get the same numbers: the square of
  // their size takes back the growth of the products in front of them.
  const double growth = std::log2(GrowthOf(geometry.hidden));
  const int shrink = -static_cast<int>(std::lround(growth / 2));
  const BufferFill stream = words(2, 0xFFFF, 0);
  // 2^-3 .. 1. Without tables block scales shrink in their place, by powers of
  // 4, as the low bit is random.
  const auto halves = static_cast<uint64_t>(std::lround(growth / 2));
  const BufferFill scales = geometry.mx.boundary == MxBoundary::kCoupled
                                ? words(1, 3, 0x7C)
                                : words(1, 1, 0x7E - 2 * halves);
  std::vector<BufferFill> out = {
      FloatFill(geometry.io_dtype, -1, true),
      {.kind = BufferFill::Kind::kIndices,
       .element_bytes = DTypeBytes(geometry.id_dtype),
       .a = static_cast<uint64_t>(geometry.experts)},
      FloatFill(DType::kF32, -3, false),
      stream,
      stream,
      scales,
      scales,
      FloatFill(DType::kF16, -1, true),
      FloatFill(DType::kF16, shrink, true),
      FloatFill(DType::kF16, -1, true),
      {.kind = BufferFill::Kind::kNone, .element_bytes = 4},
  };
  KILN_CHECK(out.size() == kMxParamCount);
  out = MxSlotsOf(geometry, std::move(out));
  SetFillBytes(MxBytes(geometry, 0), MxBytes(geometry, 1), &out);
  return out;
}

OpWork MxWork(const RequestGeometry& geometry) {
  const auto hidden = static_cast<double>(geometry.hidden);
  const auto inter = static_cast<double>(geometry.intermediate);
  const int bits = geometry.weights.bits.gate;
  OpWork work;
  work.matrices = {
      {.slot = Slot(MxParam::kW13),
       .weights = 2 * hidden * inter,
       .bits = bits},
      {.slot = Slot(MxParam::kW2), .weights = hidden * inter, .bits = bits}};
  // One byte for 32 weights, and six tables of I where there are; f16.
  work.scale_bytes = 3 * hidden * inter / 32;
  if (geometry.mx.boundary == MxBoundary::kCoupled) {
    work.scale_bytes += 6 * inter * 2;
  }
  return work;
}

}  // namespace

const OpContract& MxContract() {
  static const auto* const contract =
      new RoutedContract({.params = MxParams,
                          .buffers = MxBuffers,
                          .work = MxWork,
                          .workload = MakeWorkloadOf<MxWorkload>});
  return *contract;
}

}  // namespace kiln
