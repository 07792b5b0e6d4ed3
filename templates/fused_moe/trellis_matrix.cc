#include "templates/fused_moe/trellis_matrix.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "compiler/base/check.h"
#include "device/trellis.h"

namespace kiln {
namespace {

constexpr int64_t kBlock = kRecordChannels;
constexpr int64_t kTilesPerBlock = kBlock / kTileEdge;

// Row-major element index of each stream position.
const std::array<uint8_t, 256>& ElementOfPosition() {
  static const std::array<uint8_t, 256> map = [] {
    std::array<uint8_t, 256> m{};
    for (uint32_t p = 0; p < 256; ++p) {
      m[p] =
          static_cast<uint8_t>(kd::PositionRow(p) * 16 + kd::PositionColumn(p));
    }
    return m;
  }();
  return map;
}

// The states of one tile, in stream order. Payloads are only 2-byte aligned as
// far as this function is concerned.
template <int K>
void TileStates(const uint16_t* payload, uint16_t states[256]) {
  uint32_t words[kd::kTileWords<K>];
  std::memcpy(words, payload, sizeof words);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    uint32_t lane_states[8];
    kd::LaneStates<K>(words, lane, lane_states);
    for (uint32_t j = 0; j < 8; ++j) {
      states[8 * lane + j] = static_cast<uint16_t>(lane_states[j]);
    }
  }
}

using TileStatesFn = void (*)(const uint16_t*, uint16_t*);

TileStatesFn TileStatesOf(int bits) {
  static constexpr TileStatesFn kTable[8] = {
      TileStates<1>, TileStates<2>, TileStates<3>, TileStates<4>,
      TileStates<5>, TileStates<6>, TileStates<7>, TileStates<8>};
  KILN_CHECK(bits >= 1 && bits <= 8);
  return kTable[bits - 1];
}

struct Tile {
  const uint16_t* words;
  int bits;
};

// Tile (a, b) counts from the top left, in tiles.
Tile TileAt(const TrellisMatrix& w, int64_t a, int64_t b) {
  const int64_t columns = w.n / kTileEdge;
  if (w.records == TrellisMatrix::Records::kNone) {
    return {w.words + (a * columns + b) * kTileEdge * w.bits, w.bits};
  }
  const int64_t low_words = kTileEdge * w.pair.low;
  const int64_t high_words = kTileEdge * w.pair.high;
  if (w.records == TrellisMatrix::Records::kColumns) {
    const uint16_t* row =
        w.words + a * kTilesPerBlock * (low_words + high_words);
    if (b < kTilesPerBlock) return {row + b * low_words, w.pair.low};
    return {
        row + kTilesPerBlock * low_words + (b - kTilesPerBlock) * high_words,
        w.pair.high};
  }
  if (a < kTilesPerBlock) {
    return {w.words + (a * columns + b) * low_words, w.pair.low};
  }
  return {w.words + kTilesPerBlock * columns * low_words +
              ((a - kTilesPerBlock) * columns + b) * high_words,
          w.pair.high};
}

void CheckMatrix(const TrellisMatrix& w) {
  KILN_CHECK(w.k > 0 && w.k % kTileEdge == 0);
  KILN_CHECK(w.n > 0 && w.n % kTileEdge == 0);
  KILN_CHECK(w.records != TrellisMatrix::Records::kColumns ||
             w.n == kPairChannels);
  KILN_CHECK(w.records != TrellisMatrix::Records::kRows ||
             w.k == kPairChannels);
}

using Double4 = double __attribute__((vector_size(32)));

// acc[0..127] += sum over 16 rows of x[k] * w[k][0..127].
inline __attribute__((always_inline)) void AccumulateBody(
    const double x[16], const double w[16][kBlock], double* acc) {
  constexpr int64_t kGroup = 16;
  for (int64_t n = 0; n < kBlock; n += kGroup) {
    Double4 a[kGroup / 4];
    std::memcpy(a, acc + n, sizeof a);
    for (int64_t k = 0; k < kTileEdge; ++k) {
      Double4 row[kGroup / 4];
      std::memcpy(row, &w[k][n], sizeof row);
      for (int64_t i = 0; i < kGroup / 4; ++i) a[i] += row[i] * x[k];
    }
    std::memcpy(acc + n, a, sizeof a);
  }
}

void AccumulatePortable(const double x[16], const double w[16][kBlock],
                        double* acc) {
  AccumulateBody(x, w, acc);
}

// The same in binary32, one fma per term in ascending order.
void AccumulatePortable(const float x[16], const float w[16][kBlock],
                        float* acc) {
  for (int64_t k = 0; k < kTileEdge; ++k) {
    for (int64_t n = 0; n < kBlock; ++n) {
      acc[n] = std::fma(w[k][n], x[k], acc[n]);
    }
  }
}

template <class T>
using AccumulateFn = void (*)(const T*, const T (*)[kBlock], T*);

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void AccumulateAvx2(
    const double x[16], const double w[16][kBlock], double* acc) {
  AccumulateBody(x, w, acc);
}

__attribute__((target("avx2,fma"))) void AccumulateAvx2(
    const float x[16], const float w[16][kBlock], float* acc) {
  constexpr int64_t kGroup = 64;
  for (int64_t n = 0; n < kBlock; n += kGroup) {
    __m256 a[kGroup / 8];
    for (int64_t i = 0; i < kGroup / 8; ++i) {
      a[i] = _mm256_loadu_ps(acc + n + 8 * i);
    }
    for (int64_t k = 0; k < kTileEdge; ++k) {
      const __m256 splat = _mm256_set1_ps(x[k]);
      for (int64_t i = 0; i < kGroup / 8; ++i) {
        a[i] = _mm256_fmadd_ps(_mm256_loadu_ps(&w[k][n + 8 * i]), splat, a[i]);
      }
    }
    for (int64_t i = 0; i < kGroup / 8; ++i) {
      _mm256_storeu_ps(acc + n + 8 * i, a[i]);
    }
  }
}
#endif

template <class T>
AccumulateFn<T> ChooseAccumulate() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return AccumulateAvx2;
  }
#endif
  return AccumulatePortable;
}

}  // namespace

int64_t TrellisMatrix::word_count() const {
  const int64_t tiles = k / kTileEdge * (n / kTileEdge);
  if (records == Records::kNone) return tiles * kTileEdge * bits;
  return tiles / 2 * kTileEdge * (pair.low + pair.high);
}

void DecodeTrellisMatrix(const TrellisMatrix& matrix, uint16_t* out) {
  CheckMatrix(matrix);
  const std::array<uint8_t, 256>& element = ElementOfPosition();
  for (int64_t a = 0; a < matrix.k / kTileEdge; ++a) {
    for (int64_t b = 0; b < matrix.n / kTileEdge; ++b) {
      const Tile tile = TileAt(matrix, a, b);
      const std::vector<uint16_t>& value =
          TrellisTableOf(matrix.codebook, tile.bits).bits;
      uint16_t states[256];
      TileStatesOf(tile.bits)(tile.words, states);
      for (size_t p = 0; p < 256; ++p) {
        out[(a * kTileEdge + element[p] / 16) * matrix.n + b * kTileEdge +
            element[p] % 16] = value[states[p]];
      }
    }
  }
}

template <class T>
void MultiplyTrellisBlock(const TrellisMatrix& matrix, int64_t block,
                          const double* x, int64_t count, double* y) {
  CheckMatrix(matrix);
  KILN_CHECK(block >= 0 && (block + 1) * kBlock <= matrix.n);
  static const AccumulateFn<T> accumulate = ChooseAccumulate<T>();
  const std::array<uint8_t, 256>& element = ElementOfPosition();
  std::vector<T> acc(static_cast<size_t>(count * kBlock), T{0});
  alignas(64) T rows[kTileEdge][kBlock];
  for (int64_t a = 0; a < matrix.k / kTileEdge; ++a) {
    for (int64_t b = 0; b < kTilesPerBlock; ++b) {
      const Tile tile = TileAt(matrix, a, block * kTilesPerBlock + b);
      const std::vector<float>& value =
          TrellisTableOf(matrix.codebook, tile.bits).value;
      uint16_t states[256];
      TileStatesOf(tile.bits)(tile.words, states);
      for (size_t p = 0; p < 256; ++p) {
        rows[element[p] / 16][b * kTileEdge + element[p] % 16] =
            value[states[p]];
      }
    }
    for (int64_t r = 0; r < count; ++r) {
      T terms[kTileEdge];
      for (int64_t k = 0; k < kTileEdge; ++k) {
        terms[k] = static_cast<T>(x[r * matrix.k + a * kTileEdge + k]);
      }
      accumulate(terms, rows, acc.data() + static_cast<size_t>(r * kBlock));
    }
  }
  for (int64_t r = 0; r < count; ++r) {
    std::copy_n(acc.data() + r * kBlock, kBlock,
                y + r * matrix.n + block * kBlock);
  }
}

template void MultiplyTrellisBlock<double>(const TrellisMatrix&, int64_t,
                                           const double*, int64_t, double*);
template void MultiplyTrellisBlock<float>(const TrellisMatrix&, int64_t,
                                          const double*, int64_t, double*);

}  // namespace kiln
