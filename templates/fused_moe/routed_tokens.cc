#include "templates/fused_moe/routed_tokens.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "compiler/base/check.h"
#include "templates/seeded_values.h"

namespace kiln {
namespace {

constexpr uint64_t kStreamRoutes = 3;
constexpr uint64_t kStreamTokens = 4;
constexpr uint64_t kStreamPopular = 5;

uint64_t Number(DrawKind kind) { return static_cast<uint64_t>(kind); }

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

std::vector<int64_t> RoutedTokens::RoutesOf(DrawKind kind, uint32_t draw,
                                            uint32_t token) const {
  const auto experts = static_cast<size_t>(geometry_.experts);
  const auto top_k = static_cast<size_t>(geometry_.top_k);
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
      geometry_.experts,
      -geometry_.experts,
      INT32_MAX,
      INT32_MIN,
      geometry_.id_dtype == DType::kI64 ? (int64_t{1} << 32) : -2};
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

void RoutedTokens::AppendToken(DrawKind kind, uint32_t draw, uint32_t token,
                               const OneTermValue& one_term,
                               Tokens* out) const {
  const bool bf16 = geometry_.io_dtype == DType::kBf16;
  token = FirstAlike(kind, token);
  SplitMix64 random(
      MixSeed(seed_, kStreamTokens + (Number(kind) << 8), draw, token));
  const std::vector<int64_t> ids = RoutesOf(kind, draw, token);
  ExtremeToken extreme;
  if (kind == DrawKind::kExtreme) extreme = kExtremeTokens[token];
  const double magnitude = MagnitudeOf(extreme.size, geometry_.intermediate);
  for (int64_t c = 0; c < geometry_.hidden; ++c) {
    double value = random.Bell() * magnitude;  // zeros keep their signs
    if (kind == DrawKind::kOneTerm) value = one_term(ids, token, c);
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
    AppendBytes(&out->topk_weights, weight);
    if (geometry_.id_dtype == DType::kI64) {
      AppendBytes(&out->topk_ids, ids[j]);
    } else {
      AppendBytes(&out->topk_ids, static_cast<int32_t>(ids[j]));
    }
  }
}

RoutedTokens::Tokens RoutedTokens::Make(DrawKind kind, uint32_t draw,
                                        uint32_t tokens,
                                        const OneTermValue& one_term) const {
  Tokens out;
  for (uint32_t t = 0; t < tokens; ++t) {
    AppendToken(kind, draw, t, one_term, &out);
  }
  return out;
}

int64_t RoutedTokens::ActiveExperts(DrawKind kind, uint32_t draw,
                                    uint32_t tokens) const {
  std::set<int64_t> active;
  for (uint32_t t = 0; t < tokens; ++t) {
    for (const int64_t id : RoutesOf(kind, draw, t)) {
      if (id >= 0 && id < geometry_.experts) active.insert(id);
    }
    if (static_cast<int64_t>(active.size()) == geometry_.experts) break;
  }
  return static_cast<int64_t>(active.size());
}

}  // namespace kiln
