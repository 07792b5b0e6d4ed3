#include "templates/fused_moe/workload.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "compiler/base/check.h"
#include "templates/device/hadamard.h"
#include "templates/seeded_values.h"

namespace kiln {
namespace {

constexpr uint64_t kStreamWeights = 1;
constexpr uint64_t kStreamScales = 2;
constexpr uint64_t kStreamRoutes = 3;
constexpr uint64_t kStreamTokens = 4;
constexpr uint64_t kStreamPopular = 5;

uint64_t Number(DrawKind kind) { return static_cast<uint64_t>(kind); }

// Gives the first Hadamard block of each row of both tables the same values, 1
// or -1.
void SetFirstBlocks(size_t hidden, std::string* gate, std::string* up) {
  for (size_t row = 0; row < gate->size(); row += hidden * 2) {
    for (size_t at = row; at < row + kd::kHadamardSize * 2; at += 2) {
      uint16_t bits = 0;
      std::memcpy(&bits, gate->data() + at, 2);
      bits = (bits & 0x8000u) | 0x3C00u;
      std::memcpy(gate->data() + at, &bits, 2);
      std::memcpy(up->data() + at, &bits, 2);
    }
  }
}

// ---- kinds of draws --------------------------------------------------------

// The token of a ragged draw that has no active route.
constexpr uint32_t kDeadToken = 5;

enum class Size { kUsual, kLarge, kHuge, kSmall, kZero };

// What is special about a token of an extreme draw.
struct ExtremeToken {
  Size size = Size::kUsual;
  double weight = 1;         // factor of its router weights
  double poison = 0;         // added to one channel
  bool dead = false;         // no active route, all channels poisoned
  bool nan_weights = false;  // every second route inactive, with a NaN weight
};

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

constexpr ExtremeToken kExtremeTokens[kDistinctTokens] = {
    {.size = Size::kLarge},
    {.size = Size::kSmall},
    {.nan_weights = true},
    {.poison = kNan},
    {.weight = 0x1p40},
    {.poison = kNan, .dead = true},
    {.size = Size::kZero},
    {.poison = -kInfinity},
    {.weight = -1},
    {.size = Size::kHuge, .nan_weights = true},
    {.weight = 0},
    {.size = Size::kSmall, .weight = 0x1p-40},
    {},
};

// Factor of x that makes gates of that size. An activation is about 0.7 times
// the square of a gate, and a sum of the down projection grows by
// sqrt(intermediate): its standard deviation is 65504 / `headroom`, where 65504
// is the largest binary16.
double Magnitude(int64_t intermediate, double headroom) {
  return std::sqrt(
      65504 / (headroom * 0.7 * std::sqrt(static_cast<double>(intermediate))));
}

double MagnitudeOf(Size size, int64_t intermediate) {
  switch (size) {
    case Size::kUsual:
      return 1;
    case Size::kLarge:
      return Magnitude(intermediate, 28);
    case Size::kHuge:  // some results are infinite
      return Magnitude(intermediate, 7);
    case Size::kSmall:
      return 0x1p-6;
    case Size::kZero:
      return 0;
  }
  KILN_UNREACHABLE();
}

// 0 .. count-1 in a random order.
std::vector<int64_t> Permutation(size_t count, uint64_t seed) {
  SplitMix64 random(seed);
  std::vector<int64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  for (size_t i = 0; i + 1 < count; ++i) {
    std::swap(order[i], order[i + random.Below(count - i)]);
  }
  return order;
}

// top_k distinct experts; popular[r] has weight 1 / (r + 1) among those that
// are left.
std::vector<int64_t> ZipfRoutes(const std::vector<int64_t>& popular,
                                size_t top_k, SplitMix64* random) {
  std::vector<double> weight(popular.size());
  for (size_t r = 0; r < weight.size(); ++r) {
    weight[r] = 1 / static_cast<double>(r + 1);
  }
  std::vector<int64_t> ids;
  while (ids.size() < top_k) {
    double at =
        random->Unit() * std::accumulate(weight.begin(), weight.end(), 0.0);
    size_t chosen = popular.size();
    for (size_t r = 0; r < weight.size() && at >= 0; ++r) {
      if (weight[r] == 0) continue;
      chosen = r;
      at -= weight[r];
    }
    ids.push_back(popular[chosen]);
    weight[chosen] = 0;
  }
  return ids;
}

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
  const std::vector<uint64_t> none = FusedMoeBytes(geometry, 0);
  const std::vector<uint64_t> one = FusedMoeBytes(geometry, 1);
  for (size_t i = 0; i < out.size(); ++i) {
    out[i].bytes = none[i];
    out[i].bytes_per_token = one[i] - none[i];
  }
  return out;
}

FusedMoeWorkload::FusedMoeWorkload(const RequestGeometry& geometry,
                                   uint64_t seed)
    : OpWorkload(geometry, geometry.hidden),
      seed_(seed),
      constants_(kFusedMoeParamCount) {
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
  SetFirstBlocks(static_cast<size_t>(geometry.hidden),
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

absl::string_view FusedMoeWorkload::Constant(size_t slot) const {
  return constants_[slot];
}

std::vector<int64_t> FusedMoeWorkload::RoutesOf(DrawKind kind, uint32_t draw,
                                                uint32_t token) const {
  const auto experts = static_cast<size_t>(geometry().experts);
  const auto top_k = static_cast<size_t>(geometry().top_k);
  token = FirstAlike(kind, token);
  SplitMix64 random(
      MixSeed(seed_, kStreamRoutes + (Number(kind) << 8), draw, token));
  if (kind == DrawKind::kZipf) {
    return ZipfRoutes(
        Permutation(experts, MixSeed(seed_, kStreamPopular, draw, 0)), top_k,
        &random);
  }
  if (kind == DrawKind::kHot || kind == DrawKind::kExtreme ||
      kind == DrawKind::kOneTerm) {
    std::vector<int64_t> hot =
        Permutation(experts, MixSeed(seed_, kStreamPopular, draw, 0));
    hot.resize(top_k);
    const std::vector<int64_t> order = Permutation(top_k, random.Next());
    std::vector<int64_t> ids(top_k);
    for (size_t j = 0; j < top_k; ++j) {
      ids[j] = hot[static_cast<size_t>(order[j])];
    }
    if (kind == DrawKind::kOneTerm) {
      for (size_t j = 0; j < top_k; ++j) {
        if (j != token % top_k) ids[j] = -1;
      }
    }
    if (kind == DrawKind::kExtreme) {
      const ExtremeToken& extreme = kExtremeTokens[token];
      for (size_t j = 0; j < top_k; ++j) {
        if (extreme.dead || (extreme.nan_weights && j % 2 == 1)) ids[j] = -1;
      }
    }
    return ids;
  }
  std::vector<int64_t> pool(experts);
  std::iota(pool.begin(), pool.end(), 0);
  std::vector<int64_t> ids(top_k);
  for (size_t j = 0; j < top_k; ++j) {
    std::swap(pool[j], pool[j + random.Below(experts - j)]);
    ids[j] = pool[j];
  }
  if (kind == DrawKind::kUniform) return ids;
  // One distinct token is fully inactive; of the rest, one route in five is
  // inactive and one in five repeats the token's first expert.
  const bool dead = token == kDeadToken;
  const int64_t outside[] = {
      -1,
      geometry().experts,
      -geometry().experts,
      INT32_MAX,
      INT32_MIN,
      geometry().id_dtype == DType::kI64 ? (int64_t{1} << 32) : -2};
  for (size_t j = 0; j < top_k; ++j) {
    const uint64_t what = random.Below(5);
    // The inactive token goes through the list from its end, so that the id
    // which looks active in 32 bits is in every draw that has such a token.
    const size_t at = dead ? std::size(outside) - 1 - j % std::size(outside)
                           : random.Below(std::size(outside));
    const int64_t other = outside[at];
    if (dead || what == 0) {
      ids[j] = other;
    } else if (what == 1) {
      ids[j] = pool[0];
    }
  }
  return ids;
}

double FusedMoeWorkload::OneTermValue(const std::vector<int64_t>& ids,
                                      uint32_t token, int64_t channel) const {
  if (channel >= kd::kHadamardSize) return 0;
  // Row r of the Hadamard matrix has the sign (-1)^popcount(r and c) in column
  // c; it is rotated into channel r alone.
  const uint32_t row = (token * 37 + 11) % kd::kHadamardSize;
  const bool minus =
      std::popcount(row & static_cast<uint32_t>(channel)) % 2 == 1;
  const int64_t expert = *std::max_element(ids.begin(), ids.end());
  const int64_t table = geometry().weights.shared_scales ? 0 : expert;
  uint16_t scale = 0;
  std::memcpy(&scale,
              Constant(FusedMoeParam::kGateSuh).data() +
                  (table * geometry().hidden + channel) * 2,
              2);
  // A power of two near sqrt(hidden / 128), so that gates are of order one.
  const double size = std::exp2(
      std::round(0.5 * std::log2(static_cast<double>(geometry().hidden) /
                                 kd::kHadamardSize)));
  return minus != (scale >> 15 != 0) ? -size : size;
}

void FusedMoeWorkload::AppendToken(DrawKind kind, uint32_t draw, uint32_t token,
                                   Tokens* out) const {
  const bool bf16 = geometry().io_dtype == DType::kBf16;
  token = FirstAlike(kind, token);
  SplitMix64 random(
      MixSeed(seed_, kStreamTokens + (Number(kind) << 8), draw, token));
  const std::vector<int64_t> ids = RoutesOf(kind, draw, token);
  ExtremeToken extreme;
  if (kind == DrawKind::kExtreme) extreme = kExtremeTokens[token];
  const double magnitude = MagnitudeOf(extreme.size, geometry().intermediate);
  for (int64_t c = 0; c < geometry().hidden; ++c) {
    double value = random.Bell() * magnitude;  // zeros keep their signs
    if (kind == DrawKind::kOneTerm) value = OneTermValue(ids, token, c);
    // One channel of a late block, or all of a token without routes.
    if (extreme.dead || c == geometry().hidden - 5) value += extreme.poison;
    AppendNarrow(&out->x, static_cast<float>(value), bf16);
  }
  double sum = 0;
  std::vector<double> weights;
  for (int64_t j = 0; j < geometry().top_k; ++j) {
    weights.push_back(0.1 + random.Unit());
    sum += weights.back();
  }
  for (size_t j = 0; j < ids.size(); ++j) {
    auto weight = static_cast<float>(weights[j] / sum * extreme.weight);
    if (extreme.dead || (extreme.nan_weights && ids[j] < 0)) {
      weight = std::numeric_limits<float>::quiet_NaN();
    }
    AppendBytes(&out->topk_weights, weight);
    if (geometry().id_dtype == DType::kI64) {
      AppendBytes(&out->topk_ids, ids[j]);
    } else {
      AppendBytes(&out->topk_ids, static_cast<int32_t>(ids[j]));
    }
  }
}

FusedMoeWorkload::Tokens FusedMoeWorkload::MakeTokens(DrawKind kind,
                                                      uint32_t draw,
                                                      uint32_t tokens) const {
  Tokens out;
  for (uint32_t t = 0; t < tokens; ++t) AppendToken(kind, draw, t, &out);
  return out;
}

std::vector<std::string> FusedMoeWorkload::TokenInputs(DrawKind kind,
                                                       uint32_t draw,
                                                       uint32_t tokens) const {
  Tokens made = MakeTokens(kind, draw, tokens);
  std::vector<std::string> slots(kFusedMoeParamCount);
  const auto slot = [&slots](FusedMoeParam param) -> std::string& {
    return slots[static_cast<size_t>(param)];
  };
  slot(FusedMoeParam::kX) = std::move(made.x);
  slot(FusedMoeParam::kTopkIds) = std::move(made.topk_ids);
  slot(FusedMoeParam::kTopkWeights) = std::move(made.topk_weights);
  return slots;
}

int64_t FusedMoeWorkload::ActiveExperts(DrawKind kind, uint32_t draw,
                                        uint32_t tokens) const {
  std::set<int64_t> active;
  for (uint32_t t = 0; t < tokens; ++t) {
    for (const int64_t id : RoutesOf(kind, draw, t)) {
      if (id >= 0 && id < geometry().experts) active.insert(id);
    }
    if (static_cast<int64_t>(active.size()) == geometry().experts) break;
  }
  return static_cast<int64_t>(active.size());
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

class Contract : public OpContract {
 public:
  std::vector<ParamDecl> Params(
      const RequestGeometry& geometry) const override {
    return FusedMoeParams(geometry);
  }

  std::vector<BufferFill> Buffers(
      const RequestGeometry& geometry) const override {
    return FusedMoeBuffers(geometry);
  }

  OpWork Work(const RequestGeometry& geometry) const override {
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
    // x in 16 bits, the result in 32.
    work.token_bytes = hidden * (2 + 4);
    work.routes = static_cast<double>(geometry.top_k);
    return work;
  }

  double TilesExpected(const RequestGeometry& geometry, uint32_t tile,
                       uint32_t m) const override {
    return FusedMoeTilesExpected(geometry, tile, m);
  }

  uint64_t TilesMax(const RequestGeometry& geometry, uint32_t tile,
                    uint32_t m) const override {
    return FusedMoeTilesMax(geometry, tile, m);
  }

  std::unique_ptr<OpWorkload> MakeWorkload(const RequestGeometry& geometry,
                                           uint64_t seed) const override {
    return std::make_unique<FusedMoeWorkload>(geometry, seed);
  }
};

}  // namespace

const OpContract& FusedMoeContract() {
  static const auto* const contract = new Contract;
  return *contract;
}

}  // namespace kiln
