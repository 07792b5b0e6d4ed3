#include "templates/fused_moe/workload.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <set>

#include "compiler/base/check.h"
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

void AppendHalf(std::string* out, double value) {
  const kd::u16 bits = kd::f32_to_f16(static_cast<float>(value));
  out->append(reinterpret_cast<const char*>(&bits), 2);
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

}  // namespace

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

absl::string_view FusedMoeWorkload::Constant(FusedMoeParam param) const {
  return constants_[static_cast<size_t>(param)];
}

std::vector<int64_t> FusedMoeWorkload::RoutesOf(Routing routing, uint32_t draw,
                                                uint32_t token) const {
  SplitMix64 random(Mix(seed_, kStreamRoutes,
                        draw * 2 + (routing == Routing::kRagged ? 1u : 0u),
                        token));
  const auto experts = static_cast<size_t>(geometry_.experts);
  const auto top_k = static_cast<size_t>(geometry_.top_k);
  std::vector<int64_t> pool(experts);
  std::iota(pool.begin(), pool.end(), 0);
  std::vector<int64_t> ids(top_k);
  for (size_t j = 0; j < top_k; ++j) {
    std::swap(pool[j], pool[j + random.Below(experts - j)]);
    ids[j] = pool[j];
  }
  if (routing == Routing::kUniform) return ids;
  // About one token in eight is fully inactive; of the rest, one route in five
  // is inactive and one in five repeats the token's first expert.
  const bool dead = token % 8 == 5;
  const int64_t outside[] = {
      -1,
      geometry_.experts,
      -geometry_.experts,
      INT32_MAX,
      INT32_MIN,
      geometry_.id_dtype == DType::kI64 ? (int64_t{1} << 32) : -2};
  for (size_t j = 0; j < top_k; ++j) {
    const uint64_t kind = random.Below(5);
    // Inactive tokens go through the list from its end, so that the id which
    // looks active in 32 bits is in every draw that has such a token.
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

FusedMoeWorkload::Tokens FusedMoeWorkload::MakeTokens(Routing routing,
                                                      uint32_t draw,
                                                      uint32_t tokens) const {
  Tokens out;
  const bool bf16 = geometry_.io_dtype == DType::kBf16;
  for (uint32_t t = 0; t < tokens; ++t) {
    SplitMix64 random(Mix(seed_, kStreamTokens, draw, t));
    for (int64_t c = 0; c < geometry_.hidden; ++c) {
      // Sum of three uniforms: bell-shaped, variance one, bounded by 3.
      const double value =
          2 * (random.Unit() + random.Unit() + random.Unit() - 1.5);
      const auto narrow = static_cast<float>(value);
      uint16_t bits = 0;
      if (bf16) {
        uint32_t word = 0;
        std::memcpy(&word, &narrow, 4);
        // Round to nearest even; values are finite and small.
        bits =
            static_cast<uint16_t>((word + 0x7FFF + ((word >> 16) & 1)) >> 16);
      } else {
        bits = kd::f32_to_f16(narrow);
      }
      out.x.append(reinterpret_cast<const char*>(&bits), 2);
    }
    double sum = 0;
    std::vector<double> weights;
    for (int64_t j = 0; j < geometry_.top_k; ++j) {
      weights.push_back(0.1 + random.Unit());
      sum += weights.back();
    }
    const std::vector<int64_t> ids = RoutesOf(routing, draw, t);
    for (size_t j = 0; j < ids.size(); ++j) {
      const auto weight = static_cast<float>(weights[j] / sum);
      out.topk_weights.append(reinterpret_cast<const char*>(&weight), 4);
      if (geometry_.id_dtype == DType::kI64) {
        out.topk_ids.append(reinterpret_cast<const char*>(&ids[j]), 8);
      } else {
        const auto id = static_cast<int32_t>(ids[j]);
        out.topk_ids.append(reinterpret_cast<const char*>(&id), 4);
      }
    }
  }
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

std::vector<double> FusedMoeWorkload::Expected(Routing routing, uint32_t draw,
                                               std::span<const uint32_t> rows,
                                               int threads) {
  const auto width = static_cast<size_t>(geometry_.hidden);
  const auto key = [&](uint32_t row) {
    return std::pair{std::pair{routing, draw}, row};
  };
  std::vector<int64_t> missing;
  uint32_t tokens = 0;
  for (const uint32_t row : rows) {
    if (expected_.count(key(row)) != 0) continue;
    if (std::find(missing.begin(), missing.end(), row) == missing.end()) {
      missing.push_back(row);
      tokens = std::max(tokens, row + 1);
    }
  }
  if (!missing.empty()) {
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
    std::vector<double> result(missing.size() * width);
    FusedMoeReferenceRows(problem, missing, ReferenceMode::kFloat64,
                          result.data(), threads);
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
