// Shared core of the CPU kernels: a strip of output columns of x W for the rows
// of a tile, and the rotations around it. Kernel source: included by one kernel
// each, behind its macros, and compiled by the embedded Clang and by tests.
//
// Every sum over input channels runs in ascending order with one fused
// multiply-add per term, so all candidates give identical bits.
//
// Macros:
//   KILN_CODEBOOK       0 (3inst), 1 (mcg), 2 (mul1)
//   KILN_X_BF16         1: x is bfloat16; 0: binary16
//   KILN_TOKENS_TILE    1, 2, 4, 8, 16   rows of a tile, "T"
//   KILN_CHANNELS_TILE  16, 32, 64, ...  output channels of a block, a power
//                       of two
//   KILN_K_TILE         16, 32, 64, 128  input channels between two loads of
//                       the accumulators
//   KILN_UNROLL         1, 2, 4          groups of 16 or 32 output channels
//                       (one or two native tiles) decoded together; at most
//                       KILN_CHANNELS_TILE / group
// Registers: the lane count is 16 where the target has AVX-512 and a block has
// at least 32 channels, else 8. KILN_LANES overrides it (tests).
#ifndef KILN_TEMPLATES_CPU_TRELLIS_PRODUCT_H_
#define KILN_TEMPLATES_CPU_TRELLIS_PRODUCT_H_

#include "device/cpu_builtins.h"
#include "device/cpu_vector.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "device/platform.h"
#include "device/trellis.h"

namespace {

using kd::i32;
using kd::i64;
using kd::u16;
using kd::u32;
using kd::u64;

constexpr int kCodebook = KILN_CODEBOOK;
constexpr u32 kRows = KILN_TOKENS_TILE;
constexpr u32 kStrip = KILN_CHANNELS_TILE;
constexpr u32 kDepth = KILN_K_TILE;

#if defined(KILN_LANES)
constexpr int kLanes = KILN_LANES;
#elif defined(__AVX512F__) && KILN_CHANNELS_TILE >= 32
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

constexpr u32 kGroup = 2 * kLanes;  // output channels decoded together
constexpr u32 kGroupTiles = kLanes / 8;
constexpr u32 kUnroll = KILN_UNROLL;
constexpr u32 kBlock = kd::kHadamardSize;
constexpr u32 kChunk = 512;  // channels of a block of the elementwise steps

static_assert(kRows >= 1 && kRows <= 16, "1 to 16 rows in a tile");
static_assert(kDepth % 16 == 0 && kBlock % kDepth == 0,
              "k tile divides 128 and is a multiple of 16");
static_assert(kStrip % (kGroup * kUnroll) == 0,
              "channel tile is a multiple of what is decoded together");
static_assert(kStrip <= 256, "channel tile bounds the stack");
static_assert(kBlock % (kGroup * kUnroll) == 0,
              "the last strip of a row is whole groups");

using F = kd::F32V<kLanes>;
using U = kd::U32V<kLanes>;

// Native tile rows between a prefetch and its use. The rows of a strip lie a
// whole matrix row apart, which hardware prefetchers do not follow. Measured on
// one core of an AMD EPYC (family 26) with Clang 19 for AVX-512, 2026-11: one
// token, K = 4, weights not in cache: 5 to 10 billion weights per second
// without, 12 with; 4 rows give 11, 16 rows 12.
constexpr u32 kPrefetchRows = 8;

// How the token rows meet the weights: up to this many accumulator vectors
// stay in registers while weights are decoded; more, and decoded weights go
// through a buffer in the first-level cache instead.
#if defined(__AVX512F__)
constexpr u32 kAccumulatorsMax = 16;
constexpr u32 kBufferedRows = 8;
#else
constexpr u32 kAccumulatorsMax = 8;
constexpr u32 kBufferedRows = 4;
#endif
constexpr bool kDirect = 2 * kRows * kUnroll <= kAccumulatorsMax;

// ---- rotations -------------------------------------------------------------

// 128 values of x, rounded to binary16.
KILN_FN void LoadX(const u16* x, float* out) {
  for (u32 c = 0; c < kBlock; c += kLanes) {
#if KILN_X_BF16
    kd::Store(out + c, kd::RoundHalves<kLanes>(kd::LoadBfloats<kLanes>(x + c)));
#else
    kd::Store(out + c, kd::LoadHalves<kLanes>(x + c));
#endif
  }
}

// out[0..127] = v, rounded to binary16.
KILN_FN void StoreHalves(const float* v, u16* out) {
  for (u32 c = 0; c < kBlock; c += kLanes) {
    kd::Store(out + c, kd::ToHalves<kLanes>(kd::Load<F>(v + c)));
  }
}

// [rows][128] to [128][rows].
KILN_FN void StoreTransposed(const u16 (*rows)[kBlock], u16* out) {
  for (u32 c = 0; c < kBlock; ++c) {
    for (u32 row = 0; row < kRows; ++row) out[c * kRows + row] = rows[row][c];
  }
}

// rows[..] of one side: Hadamard of x * suh.
KILN_FN void RotateRow(const float* x, const u16* suh, u16* out) {
  float v[kBlock];
  for (u32 c = 0; c < kBlock; c += kLanes) {
    kd::Store(v + c, kd::RoundHalves<kLanes>(kd::Load<F>(x + c) *
                                             kd::LoadHalves<kLanes>(suh + c)));
  }
  kd::VectorHadamard128<kLanes>(v);
  StoreHalves(v, out);
}

// ---- matrix products -------------------------------------------------------

// Accumulators of a strip: [group][half][row] vectors. Half h of a group holds
// columns 8h .. 8h + 7 of each of its native tiles.
struct Strip {
  F sum[kStrip / kGroup][2][kRows];
};

// One kind of matrix: K bits per weight.
template <int K>
struct Product {
  using Bits = kd::TileBits<K, kLanes>;
  // u32 words of one group, of one native tile row of a strip.
  static constexpr u32 kGroupWords = kd::kTileWords<K> * kGroupTiles;

  // Fetches what `words` will be kPrefetchRows tile rows later. Past the end
  // of the matrix the hint is wasted and harmless.
  KILN_FN static void PrefetchGroup(const u32* words, u64 row_words) {
    const u64 ahead =
        reinterpret_cast<u64>(words) + kPrefetchRows * row_words * sizeof(u32);
    KILN_UNROLLED
    for (u32 byte = 0; byte < kGroupWords * sizeof(u32); byte += 64) {
      __builtin_prefetch(reinterpret_cast<const void*>(ahead + byte));
    }
  }

  // Row `Row` of the native tiles: acc += weights * a.
  template <int Row, int Half>
  KILN_FN static void MultiplyHalf(const Bits* bits, const F* a,
                                   F (*acc)[2][kRows]) {
    KILN_UNROLLED
    for (u32 g = 0; g < kUnroll; ++g) {
      const F w = kd::DecodeLanes<kCodebook, kLanes>(
          bits[g].template States<Row, Half>());
      KILN_UNROLLED
      for (u32 row = 0; row < kRows; ++row) {
        acc[g][Half][row] = kd::FmaLanes<F>(w, a[row], acc[g][Half][row]);
      }
    }
  }

  template <int Row>
  KILN_FN static void MultiplyRows(const Bits* bits, const float* a,
                                   F (*acc)[2][kRows]) {
    if constexpr (Row < 16) {
      F splat[kRows];
      KILN_UNROLLED
      for (u32 row = 0; row < kRows; ++row) {
        splat[row] = kd::Splat<kLanes>(a[Row * kRows + row]);
      }
      MultiplyHalf<Row, 0>(bits, splat, acc);
      MultiplyHalf<Row, 1>(bits, splat, acc);
      MultiplyRows<Row + 1>(bits, a, acc);
    }
  }

  // Registers only: kDepth rows of kUnroll groups.
  KILN_FN static void Direct(const u32* words, u64 row_words, const float* a,
                             F (*sum)[2][kRows]) {
    F acc[kUnroll][2][kRows];
    KILN_UNROLLED
    for (u32 g = 0; g < kUnroll; ++g) {
      KILN_UNROLLED
      for (u32 i = 0; i < 2 * kRows; ++i) {
        acc[g][i / kRows][i % kRows] = sum[g][i / kRows][i % kRows];
      }
    }
    for (u32 k = 0; k < kDepth; k += 16) {
      Bits bits[kUnroll];
      KILN_UNROLLED
      for (u32 g = 0; g < kUnroll; ++g) {
        PrefetchGroup(words + g * kGroupWords, row_words);
        bits[g].LoadFrom(words + g * kGroupWords);
      }
      MultiplyRows<0>(bits, a + k * kRows, acc);
      words += row_words;
    }
    KILN_UNROLLED
    for (u32 g = 0; g < kUnroll; ++g) {
      KILN_UNROLLED
      for (u32 i = 0; i < 2 * kRows; ++i) {
        sum[g][i / kRows][i % kRows] = acc[g][i / kRows][i % kRows];
      }
    }
  }

  template <int Row>
  KILN_FN static void DecodeRows(const Bits& bits, F (*out)[2]) {
    if constexpr (Row < 16) {
      out[Row][0] =
          kd::DecodeLanes<kCodebook, kLanes>(bits.template States<Row, 0>());
      out[Row][1] =
          kd::DecodeLanes<kCodebook, kLanes>(bits.template States<Row, 1>());
      DecodeRows<Row + 1>(bits, out);
    }
  }

  // Through a buffer: one group, all rows.
  KILN_FN static void Buffered(const u32* words, u64 row_words, const float* a,
                               F (*sum)[kRows]) {
    F weights[kDepth][2];
    for (u32 k = 0; k < kDepth; k += 16) {
      PrefetchGroup(words, row_words);
      Bits bits;
      bits.LoadFrom(words);
      DecodeRows<0>(bits, weights + k);
      words += row_words;
    }
    constexpr u32 kPart = kRows < kBufferedRows ? kRows : kBufferedRows;
    for (u32 first = 0; first < kRows; first += kPart) {
      F acc[2][kPart];
      KILN_UNROLLED
      for (u32 row = 0; row < kPart; ++row) {
        acc[0][row] = sum[0][first + row];
        acc[1][row] = sum[1][first + row];
      }
      for (u32 k = 0; k < kDepth; ++k) {
        const F w0 = weights[k][0];
        const F w1 = weights[k][1];
        KILN_UNROLLED
        for (u32 row = 0; row < kPart; ++row) {
          const F splat = kd::Splat<kLanes>(a[k * kRows + first + row]);
          acc[0][row] = kd::FmaLanes<F>(w0, splat, acc[0][row]);
          acc[1][row] = kd::FmaLanes<F>(w1, splat, acc[1][row]);
        }
      }
      KILN_UNROLLED
      for (u32 row = 0; row < kPart; ++row) {
        sum[0][first + row] = acc[0][row];
        sum[1][first + row] = acc[1][row];
      }
    }
  }

  // strip = a * W over all k. W is [k/16][n/16] native tiles; a is [k][T]
  // binary16. The strip begins at column `column` and has `groups` groups.
  static void Run(const u32* w, u32 k_size, u32 n_size, u32 column, u32 groups,
                  const u16* a, Strip* strip) {
    for (u32 g = 0; g < groups; ++g) {
      for (u32 row = 0; row < kRows; ++row) {
        strip->sum[g][0][row] = strip->sum[g][1][row] = F{};
      }
    }
    const u64 row_words = static_cast<u64>(n_size / 16) * kd::kTileWords<K>;
    const u32* words = w + (column / 16) * kd::kTileWords<K>;
    for (u32 k = 0; k < k_size; k += kDepth) {
      float depth[kDepth * kRows];
      for (u32 i = 0; i < kDepth * kRows; i += kLanes) {
        kd::Store(depth + i, kd::LoadHalves<kLanes>(a + k * kRows + i));
      }
      if constexpr (kDirect) {
        for (u32 g = 0; g < groups; g += kUnroll) {
          Direct(words + g * kGroupWords, row_words, depth, strip->sum + g);
        }
      } else {
        for (u32 g = 0; g < groups; ++g) {
          Buffered(words + g * kGroupWords, row_words, depth, strip->sum[g]);
        }
      }
      words += kDepth / 16 * row_words;
    }
  }
};

// Columns of a strip, of which the last of a matrix may have fewer.
KILN_FN u32 ColumnsOf(u32 n_size, u32 column) {
  return n_size - column < kStrip ? n_size - column : kStrip;
}

}  // namespace

#endif  // KILN_TEMPLATES_CPU_TRELLIS_PRODUCT_H_
