#include "templates/formats/encoder_tile.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "compiler/base/check.h"

namespace kiln {
namespace {

// Position p of the tile of state s with e in its K low bits. Its successor
// keeps the low 16 - K bits, the prefix u = s mod 2^(16 - K). With
// M_p[u] = least cost of positions 0..p over paths whose state at p has prefix
// u, and s = h 2^(16 - K) + u for h in 0..2^K - 1,
//
//   M_p[u] = min over h of  M_(p-1)[s >> K] + (x_p - value[s])^2.
//
// The loop below goes over u in blocks and, inside, over h.

// A block is four vectors wide, so that four minima are taken side by side.

constexpr float kNever = 1e30f;
constexpr size_t kVectors = 4;
constexpr size_t kLanesMax = 16;

template <size_t kLanes>
struct Simd;

template <>
struct Simd<4> {
  using Float = float __attribute__((vector_size(16)));
};

template <>
struct Simd<8> {
  using Float = float __attribute__((vector_size(32)));
};

template <>
struct Simd<16> {
  using Float = float __attribute__((vector_size(64)));
};

// Vector `kIndex` of a block: lane i is the cost in front of the block's state
// kIndex * kLanes + i. Whole vectors are loaded, which those that follow share.
//   row: of the block's first state.
template <int K, size_t kLanes, size_t kIndex, size_t... kLane>
inline __attribute__((always_inline)) void LoadCosts(
    const float* row, typename Simd<kLanes>::Float* costs,
    std::index_sequence<kLane...>) {
  constexpr size_t kFirst = (kIndex * kLanes >> K) / kLanes * kLanes;
  typename Simd<kLanes>::Float loaded;
  std::memcpy(&loaded, row + kFirst, sizeof(loaded));
  *costs = __builtin_shufflevector(
      loaded, loaded, ((kIndex * kLanes + kLane) >> K) - kFirst...);
}

// One state for each lane of a vector of a block.
template <int K, size_t kLanes, size_t kIndex>
inline __attribute__((always_inline)) void Relax(
    const float* values, const float* row, float x,
    typename Simd<kLanes>::Float* best) {
  using Float = typename Simd<kLanes>::Float;
  Float value;
  std::memcpy(&value, values + kIndex * kLanes, sizeof(value));
  const Float error = x - value;
  Float cost = error * error;
  if constexpr (size_t{1} << K >= kLanes) {
    cost += row[kIndex * kLanes >> K];
  } else {
    Float costs;
    LoadCosts<K, kLanes, kIndex>(row, &costs,
                                 std::make_index_sequence<kLanes>());
    cost += costs;
  }
  *best = cost < *best ? cost : *best;
}

// The vectors of a block are an index sequence and no loop: their places are
// constants, so that the minima stay in registers.
//   values: in the order in which this reads them.
template <int K, size_t kLanes, size_t... kVector>
inline __attribute__((always_inline)) void StepBlocks(
    const float* values, const float* before, float x, float* after,
    std::index_sequence<kVector...>) {
  using Float = typename Simd<kLanes>::Float;
  constexpr size_t kPrefixes = size_t{1} << (16 - K);
  constexpr size_t kBlock = kVectors * kLanes;
  for (size_t u = 0; u < kPrefixes; u += kBlock) {
    Float best[kVectors];
    ((best[kVector] = kNever - Float{}), ...);
    // A block is a multiple of 2^K states or lies within one.
    const float* row = before + (u >> K);
    for (size_t h = 0; h < size_t{1} << K; ++h) {
      (Relax<K, kLanes, kVector>(values, row, x, &best[kVector]), ...);
      values += kBlock;
      row += kPrefixes >> K;
    }
    (std::memcpy(after + u + kVector * kLanes, &best[kVector], sizeof(Float)),
     ...);
  }
}

template <int K, size_t kLanes>
inline __attribute__((always_inline)) void StepBody(const float* values,
                                                    const float* before,
                                                    float x, float* after) {
  StepBlocks<K, kLanes>(values, before, x, after,
                        std::make_index_sequence<kVectors>());
}

template <int K>
void StepPortable(const float* values, const float* before, float x,
                  float* after) {
  StepBody<K, 4>(values, before, x, after);
}

#if defined(__x86_64__)
template <int K>
__attribute__((target("avx2"))) void StepAvx2(const float* values,
                                              const float* before, float x,
                                              float* after) {
  StepBody<K, 8>(values, before, x, after);
}

template <int K>
__attribute__((target("avx512f"))) void StepAvx512(const float* values,
                                                   const float* before, float x,
                                                   float* after) {
  StepBody<K, 16>(values, before, x, after);
}
#endif

// Lanes of one vector of a level.
size_t LanesOf(EncoderLevel level) {
  return level == EncoderLevel::kAvx512 ? 16
         : level == EncoderLevel::kAvx2 ? 8
                                        : 4;
}

using StepFn = void (*)(const float*, const float*, float, float*);

template <int K>
StepFn StepOf(EncoderLevel level) {
#if defined(__x86_64__)
  if (level == EncoderLevel::kAvx512) return StepAvx512<K>;
  if (level == EncoderLevel::kAvx2) return StepAvx2<K>;
#endif
  return StepPortable<K>;
}

StepFn StepOf(int bits, EncoderLevel level) {
  using Choose = StepFn (*)(EncoderLevel);
  static constexpr Choose kTable[8] = {StepOf<1>, StepOf<2>, StepOf<3>,
                                       StepOf<4>, StepOf<5>, StepOf<6>,
                                       StepOf<7>, StepOf<8>};
  return kTable[bits - 1](level);
}

}  // namespace

EncoderLevel BestEncoderLevel() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return EncoderLevel::kAvx512;
  if (__builtin_cpu_supports("avx2")) return EncoderLevel::kAvx2;
#endif
  return EncoderLevel::kPortable;
}

TileEncoder::TileEncoder(std::span<const float> alphabet, int bits,
                         EncoderLevel level)
    : bits_(bits), alphabet_(alphabet.begin(), alphabet.end()) {
  KILN_CHECK(alphabet.size() == kTileStates);
  KILN_CHECK(bits >= 1 && bits <= 8);
  step_ = StepOf(bits, level);
  prefixes_ = size_t{1} << (16 - bits);
  stride_ = prefixes_ + kLanesMax;  // the last load of a row may pass its end
  costs_.assign((kTileSize + 1) * stride_, 0.0f);
  ordered_.reserve(kTileStates);
  const size_t block = kVectors * LanesOf(level);
  for (size_t u = 0; u < prefixes_; u += block) {
    for (size_t h = 0; h < size_t{1} << bits; ++h) {
      const float* run = alphabet_.data() + h * prefixes_ + u;
      ordered_.insert(ordered_.end(), run, run + block);
    }
  }
}

void TileEncoder::RunForward(const float* target) {
  for (size_t p = 0; p < kTileSize; ++p) {
    step_(ordered_.data(), Costs(p), target[p], Costs(p + 1));
  }
}

void TileEncoder::RunBack(const float* target, size_t end, size_t first,
                          TileStates* states) {
  size_t prefix = end;
  for (size_t p = kTileSize; p-- > first;) {
    const float* before = Costs(p);
    float best = 0;
    size_t best_state = kTileStates;
    for (size_t h = 0; h < size_t{1} << bits_; ++h) {
      const size_t s = h * prefixes_ + prefix;
      const float error = target[p] - alphabet_[s];
      const float cost = error * error + before[s >> bits_];
      if (best_state != kTileStates && cost >= best) continue;
      best = cost;
      best_state = s;
    }
    (*states)[p] = static_cast<uint16_t>(best_state);
    prefix = best_state >> bits_;
  }
}

void TileEncoder::Forward(const TileValues& target) {
  std::fill_n(Costs(0), prefixes_, 0.0f);
  RunForward(target.data());
}

TileStates TileEncoder::Encode(const TileValues& target) {
  constexpr size_t kHalf = kTileSize / 2;
  TileValues turned;
  std::rotate_copy(target.begin(), target.begin() + kHalf, target.end(),
                   turned.begin());
  Forward(turned);
  TileStates states;
  const float* last = Costs(kTileSize);
  RunBack(turned.data(),
          static_cast<size_t>(std::min_element(last, last + prefixes_) - last),
          kHalf, &states);
  // What comes before turned[128], the tile's first position.
  const size_t seam = states[kHalf] >> bits_;
  std::fill_n(Costs(0), prefixes_, kNever);
  Costs(0)[seam] = 0;
  RunForward(target.data());
  RunBack(target.data(), seam, 0, &states);
  return states;
}

void PackTile(const TileStates& states, int bits, std::span<uint16_t> words) {
  KILN_CHECK(words.size() == static_cast<size_t>(16 * bits));
  std::fill(words.begin(), words.end(), uint16_t{0});
  size_t at = 0;  // bit of the stream
  for (const uint16_t state : states) {
    for (int bit = bits - 1; bit >= 0; --bit, ++at) {
      // Most significant first in 32-bit words, which are stored little-endian.
      const size_t half = at / 16 ^ 1;
      words[half] = static_cast<uint16_t>(words[half] | (state >> bit & 1)
                                                            << (15 - at % 16));
    }
  }
}

}  // namespace kiln
