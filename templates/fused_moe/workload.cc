#include "templates/fused_moe/workload.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>

#include "compiler/base/check.h"
#include "templates/device/hadamard.h"
#include "templates/device/half.h"

namespace kiln {
namespace {

// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
// generators", OOPSLA 2014).
class SplitMix64 {
 public:
  explicit SplitMix64(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }

  // In [0, 1).
  double Unit() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

  // In [0, bound); the bias of at most bound / 2^64 does not matter here.
  uint64_t Below(uint64_t bound) { return Next() % bound; }

 private:
  uint64_t state_;
};

// Independent streams of one seed.
uint64_t Mix(uint64_t seed, uint64_t a, uint64_t b, uint64_t c) {
  SplitMix64 random(seed ^ (a * 0xD1B54A32D192ED03u));
  SplitMix64 second(random.Next() ^ (b * 0x8CB92BA72F3D8DD7u));
  SplitMix64 third(second.Next() ^ (c * 0xAEF17502108EF2D9u));
  return third.Next();
}

constexpr uint64_t kStreamWeights = 1;
constexpr uint64_t kStreamScales = 2;
constexpr uint64_t kStreamRoutes = 3;
constexpr uint64_t kStreamTokens = 4;
constexpr uint64_t kStreamPopular = 5;

uint64_t Kind(Routing routing) { return static_cast<uint64_t>(routing); }

template <class T>
void Append(std::string* out, T value) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void AppendHalf(std::string* out, double value) {
  Append(out, kd::f32_to_f16(static_cast<float>(value)));
}

// As bfloat16 or binary16, to nearest even.
void AppendNarrow(std::string* out, float value, bool bf16) {
  if (!bf16) return AppendHalf(out, value);
  const uint32_t word = kd::FloatBits(value);
  Append(out,
         std::isfinite(value)
             ? static_cast<uint16_t>((word + 0x7FFF + ((word >> 16) & 1)) >> 16)
             : static_cast<uint16_t>(word >> 16));
}

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

// Signed scales around `magnitude`, as EXL3 stores them: the random sign of the
// incoherence rotation is folded in.
std::string MakeScales(uint64_t count, double magnitude, uint64_t seed) {
  SplitMix64 random(seed);
  std::string out;
  out.reserve(count * 2);
  for (uint64_t i = 0; i < count; ++i) {
    const double spread = 0.75 + 0.5 * random.Unit();
    const double sign = (random.Next() & 1) != 0 ? 1 : -1;
    AppendHalf(&out, sign * spread * magnitude);
  }
  return out;
}

std::string MakeWords(uint64_t bytes, uint64_t seed) {
  SplitMix64 random(seed);
  std::string out(bytes, '\0');
  for (uint64_t at = 0; at < bytes; at += 8) {
    const uint64_t word = random.Next();
    std::memcpy(out.data() + at, &word, std::min<uint64_t>(8, bytes - at));
  }
  return out;
}

// Floats of magnitude [2^exponent, 2^(exponent + 1)) with any mantissa.
BufferFill Floats(DType dtype, int exponent, bool with_sign) {
  int mantissa_bits = 23;
  int bias = 127;
  int sign_bit = 31;
  if (dtype == DType::kF16) {
    mantissa_bits = 10;
    bias = 15;
    sign_bit = 15;
  } else if (dtype == DType::kBf16) {
    mantissa_bits = 7;
    sign_bit = 15;
  }
  BufferFill fill;
  fill.kind = BufferFill::Kind::kWords;
  fill.element_bytes = DTypeBytes(dtype);
  fill.a = (uint64_t{1} << mantissa_bits) - 1;
  if (with_sign) fill.a |= uint64_t{1} << sign_bit;
  fill.b = static_cast<uint64_t>(bias + exponent) << mantissa_bits;
  return fill;
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
  const BufferFill scales = Floats(DType::kF16, -1, true);
  std::vector<BufferFill> out = {
      Floats(geometry.io_dtype, -1, true),
      ids,
      Floats(DType::kF32, -3, false),
      words,
      words,
      words,
      scales,
      scales,
      Floats(DType::kF16, shrink, true),
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
    : geometry_(geometry), seed_(seed), constants_(kFusedMoeParamCount) {
  const std::vector<uint64_t> bytes = FusedMoeBytes(geometry, 0);
  const auto slot = [](FusedMoeParam param) {
    return static_cast<size_t>(param);
  };
  for (const FusedMoeParam param :
       {FusedMoeParam::kWGate, FusedMoeParam::kWUp, FusedMoeParam::kWDown}) {
    constants_[slot(param)] = MakeWords(
        bytes[slot(param)], Mix(seed, kStreamWeights, slot(param), 0));
  }
  // Decoded weights have about unit variance, so a dot product over n inputs
  // grows by sqrt(n); the output-side scale takes that back.
  const double fc1 = 1 / std::sqrt(static_cast<double>(geometry.hidden));
  const double fc2 = 1 / std::sqrt(static_cast<double>(geometry.intermediate));
  const auto scales = [&](FusedMoeParam param, double magnitude) {
    constants_[slot(param)] =
        MakeScales(bytes[slot(param)] / 2, magnitude,
                   Mix(seed, kStreamScales, slot(param), 0));
  };
  scales(FusedMoeParam::kGateSuh, 1);
  scales(FusedMoeParam::kUpSuh, 1);
  SetFirstBlocks(static_cast<size_t>(geometry.hidden),
                 &constants_[slot(FusedMoeParam::kGateSuh)],
                 &constants_[slot(FusedMoeParam::kUpSuh)]);
  scales(FusedMoeParam::kDownSvh, fc2);
  // [gate_svh | up_svh | down_suh] per expert: two magnitudes in one table.
  SplitMix64 random(
      Mix(seed, kStreamScales, slot(FusedMoeParam::kRotations), 0));
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

absl::string_view RoutingName(Routing routing) {
  switch (routing) {
    case Routing::kUniform:
      return "uniform";
    case Routing::kRagged:
      return "ragged";
    case Routing::kZipf:
      return "zipf";
    case Routing::kHot:
      return "hot";
    case Routing::kExtreme:
      return "extreme";
    case Routing::kOneTerm:
      return "one-term";
  }
  KILN_UNREACHABLE();
}

absl::string_view FusedMoeWorkload::Constant(FusedMoeParam param) const {
  return constants_[static_cast<size_t>(param)];
}

std::vector<int64_t> FusedMoeWorkload::RoutesOf(Routing routing, uint32_t draw,
                                                uint32_t token) const {
  const auto experts = static_cast<size_t>(geometry_.experts);
  const auto top_k = static_cast<size_t>(geometry_.top_k);
  token = FirstAlike(routing, token);
  SplitMix64 random(
      Mix(seed_, kStreamRoutes + (Kind(routing) << 8), draw, token));
  if (routing == Routing::kZipf) {
    return ZipfRoutes(Permutation(experts, Mix(seed_, kStreamPopular, draw, 0)),
                      top_k, &random);
  }
  if (routing == Routing::kHot || routing == Routing::kExtreme ||
      routing == Routing::kOneTerm) {
    std::vector<int64_t> hot =
        Permutation(experts, Mix(seed_, kStreamPopular, draw, 0));
    hot.resize(top_k);
    const std::vector<int64_t> order = Permutation(top_k, random.Next());
    std::vector<int64_t> ids(top_k);
    for (size_t j = 0; j < top_k; ++j) {
      ids[j] = hot[static_cast<size_t>(order[j])];
    }
    if (routing == Routing::kOneTerm) {
      for (size_t j = 0; j < top_k; ++j) {
        if (j != token % top_k) ids[j] = -1;
      }
    }
    if (routing == Routing::kExtreme) {
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
  if (routing == Routing::kUniform) return ids;
  // One distinct token is fully inactive; of the rest, one route in five is
  // inactive and one in five repeats the token's first expert.
  const bool dead = token == kDeadToken;
  const int64_t outside[] = {
      -1,
      geometry_.experts,
      -geometry_.experts,
      INT32_MAX,
      INT32_MIN,
      geometry_.id_dtype == DType::kI64 ? (int64_t{1} << 32) : -2};
  for (size_t j = 0; j < top_k; ++j) {
    const uint64_t kind = random.Below(5);
    // The inactive token goes through the list from its end, so that the id
    // which looks active in 32 bits is in every draw that has such a token.
    const size_t at = dead ? std::size(outside) - 1 - j % std::size(outside)
                           : random.Below(std::size(outside));
    const int64_t other = outside[at];
    if (dead || kind == 0) {
      ids[j] = other;
    } else if (kind == 1) {
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
  const int64_t table = geometry_.weights.shared_scales ? 0 : expert;
  uint16_t scale = 0;
  std::memcpy(&scale,
              Constant(FusedMoeParam::kGateSuh).data() +
                  (table * geometry_.hidden + channel) * 2,
              2);
  // A power of two near sqrt(hidden / 128), so that gates are of order one.
  const double size = std::exp2(
      std::round(0.5 * std::log2(static_cast<double>(geometry_.hidden) /
                                 kd::kHadamardSize)));
  return minus != (scale >> 15 != 0) ? -size : size;
}

void FusedMoeWorkload::AppendToken(Routing routing, uint32_t draw,
                                   uint32_t token, Tokens* out) const {
  const bool bf16 = geometry_.io_dtype == DType::kBf16;
  token = FirstAlike(routing, token);
  SplitMix64 random(
      Mix(seed_, kStreamTokens + (Kind(routing) << 8), draw, token));
  const std::vector<int64_t> ids = RoutesOf(routing, draw, token);
  ExtremeToken extreme;
  if (routing == Routing::kExtreme) extreme = kExtremeTokens[token];
  const double magnitude = MagnitudeOf(extreme.size, geometry_.intermediate);
  for (int64_t c = 0; c < geometry_.hidden; ++c) {
    // Sum of three uniforms: bell-shaped, variance one, bounded by 3.
    double value = 2 * (random.Unit() + random.Unit() + random.Unit() - 1.5);
    value *= magnitude;  // zeros keep their signs
    if (routing == Routing::kOneTerm) value = OneTermValue(ids, token, c);
    // One channel of a late block, or all of a token without routes.
    if (extreme.dead || c == geometry_.hidden - 5) value += extreme.poison;
    AppendNarrow(&out->x, static_cast<float>(value), bf16);
  }
  double sum = 0;
  std::vector<double> weights;
  for (int64_t j = 0; j < geometry_.top_k; ++j) {
    weights.push_back(0.1 + random.Unit());
    sum += weights.back();
  }
  for (size_t j = 0; j < ids.size(); ++j) {
    auto weight = static_cast<float>(weights[j] / sum * extreme.weight);
    if (extreme.dead || (extreme.nan_weights && ids[j] < 0)) {
      weight = std::numeric_limits<float>::quiet_NaN();
    }
    Append(&out->topk_weights, weight);
    if (geometry_.id_dtype == DType::kI64) {
      Append(&out->topk_ids, ids[j]);
    } else {
      Append(&out->topk_ids, static_cast<int32_t>(ids[j]));
    }
  }
}

FusedMoeWorkload::Tokens FusedMoeWorkload::MakeTokens(Routing routing,
                                                      uint32_t draw,
                                                      uint32_t tokens) const {
  Tokens out;
  for (uint32_t t = 0; t < tokens; ++t) AppendToken(routing, draw, t, &out);
  return out;
}

int64_t FusedMoeWorkload::ActiveExperts(Routing routing, uint32_t draw,
                                        uint32_t tokens) const {
  std::set<int64_t> active;
  for (uint32_t t = 0; t < tokens; ++t) {
    for (const int64_t id : RoutesOf(routing, draw, t)) {
      if (id >= 0 && id < geometry_.experts) active.insert(id);
    }
    if (static_cast<int64_t>(active.size()) == geometry_.experts) break;
  }
  return static_cast<int64_t>(active.size());
}

std::vector<double> FusedMoeWorkload::Evaluate(Routing routing, uint32_t draw,
                                               const std::vector<int64_t>& rows,
                                               int threads,
                                               ReferenceMode mode) const {
  const auto tokens =
      static_cast<uint32_t>(*std::max_element(rows.begin(), rows.end()) + 1);
  const Tokens inputs = MakeTokens(routing, draw, tokens);
  const auto half = [this](FusedMoeParam param) {
    return reinterpret_cast<const uint16_t*>(Constant(param).data());
  };
  FusedMoeProblem problem;
  problem.tokens = tokens;
  problem.hidden = geometry_.hidden;
  problem.intermediate = geometry_.intermediate;
  problem.experts = geometry_.experts;
  problem.top_k = geometry_.top_k;
  problem.codebook = geometry_.weights.codebook;
  problem.bits = geometry_.weights.bits;
  problem.shared_scales = geometry_.weights.shared_scales;
  problem.x_dtype = geometry_.io_dtype;
  problem.id_dtype = geometry_.id_dtype;
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
                             static_cast<size_t>(geometry_.hidden));
  FusedMoeReferenceRows(problem, rows, mode, result.data(), threads);
  return result;
}

std::vector<double> FusedMoeWorkload::Expected(Routing routing, uint32_t draw,
                                               std::span<const uint32_t> rows,
                                               int threads,
                                               ReferenceMode mode) {
  const auto width = static_cast<size_t>(geometry_.hidden);
  const auto key = [&](uint32_t row) {
    return RowKey{routing, draw, mode, FirstAlike(routing, row)};
  };
  std::vector<int64_t> missing;
  for (const uint32_t row : rows) {
    const int64_t first = key(row).row;
    if (expected_.count(key(row)) == 0 &&
        std::find(missing.begin(), missing.end(), first) == missing.end()) {
      missing.push_back(first);
    }
  }
  if (!missing.empty()) {
    const std::vector<double> result =
        Evaluate(routing, draw, missing, threads, mode);
    for (size_t i = 0; i < missing.size(); ++i) {
      const auto begin =
          result.begin() + static_cast<std::ptrdiff_t>(i * width);
      expected_[key(static_cast<uint32_t>(missing[i]))] = std::vector<double>(
          begin, begin + static_cast<std::ptrdiff_t>(width));
    }
  }
  std::vector<double> out;
  out.reserve(rows.size() * width);
  for (const uint32_t row : rows) {
    const std::vector<double>& values = expected_.at(key(row));
    out.insert(out.end(), values.begin(), values.end());
  }
  return out;
}

}  // namespace kiln
