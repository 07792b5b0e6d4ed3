// fused_moe, recipe w4a16, EXL3 weights, on the CPU.
//
// Kernel source: compiled at run time by the embedded Clang for one request
// and one candidate, with a prelude of macros before the text. Rounding
// boundaries follow the trellis specification, 4.5. Every sum over input
// channels runs in ascending order with one fused multiply-add per term, so
// all candidates of this template give identical bits.
//
// Words: R = m * top_k routes. Routes are grouped by expert, stably, into
// tiles of T = KILN_TOKENS_TILE rows; a tile never mixes experts.
//   tiles(m) = min(R, ceil((R + (E - 1) (T - 1)) / T))   upper bound of tiles
//   slot     = tile * T + row in tile
// C is KILN_CHANNELS_TILE, "c512" is ceil(channels / 512).
//
// Steps, in this order. "p" marks a parameter of the op, "a" an arena slice;
// `tokens` is live m.
//   entry                  grid                       arguments
//   kiln_moe_cpu_route     1, 1, 1                    tokens, p topk_ids,
//     a tile_expert, a tile_routes, a route_slot
//   kiln_moe_cpu_rotate    tiles, c512(H), 1          a tile_expert,
//     a tile_routes, p x, p gate_suh, p up_suh, a gate_in, a up_in
//   kiln_moe_cpu_fc1       tiles, ceil(I / C), 2      a tile_expert,
//     p w_gate, p w_up, a gate_in, a up_in, a gate_out, a up_out
//   kiln_moe_cpu_activate  tiles, c512(I), 1          a tile_expert,
//     a tile_routes, p rotations, a gate_out, a up_out, a down_in
//   kiln_moe_cpu_fc2       tiles, ceil(H / C), 1      a tile_expert,
//     p w_down, a down_in, a down_out
//   kiln_moe_cpu_combine   m, c512(H), 1              a tile_expert,
//     a route_slot, p topk_weights, p down_svh, a down_out, p out
//
// tiles as a launch dimension: min(ceil(top_k m / 1),
//   ceil((top_k m + (E - 1) (T - 1)) / T)).
//
// Arena slices for a capacity m, in bytes, n = tiles(m):
//   tile_expert i32 [n]           4 n          expert, -1: tile not in use
//   tile_routes i32 [n][T]        4 n T        route, -1: row not in use
//   route_slot  i32 [R]           4 R          slot, -1: inactive route
//   gate_in     f16 [n][H][T]     2 n T H
//   up_in       f16 [n][H][T]     2 n T H
//   gate_out    f16 [n][T][I]     2 n T I
//   up_out      f16 [n][T][I]     2 n T I
//   down_in     f16 [n][I][T]     2 n T I
//   down_out    f16 [n][T][H]     2 n T H      may share bytes with gate_in
// Nothing is read that the same launch did not write.
//
// Axes:
//   KILN_TOKENS_TILE    1, 2, 4, 8, 16   rows of a tile
//   KILN_CHANNELS_TILE  16, 32, 64, ...  output channels of a block, a power
//                       of two
//   KILN_K_TILE         16, 32, 64, 128  input channels between two loads of
//                       the accumulators
//   KILN_UNROLL         1, 2, 4          groups of 16 or 32 output channels
//                       (one or two native tiles) decoded together; at most
//                       KILN_CHANNELS_TILE / group
// Registers: the lane count is 16 where the target has AVX-512 and a block has
// at least 32 channels, else 8. KILN_LANES overrides it (tests).

#include "device/activation.h"
#include "device/cpu_builtins.h"
#include "device/cpu_entry.h"
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

constexpr u32 kHidden = KILN_HIDDEN;
constexpr u32 kInter = KILN_INTER;
constexpr u32 kExperts = KILN_EXPERTS;
constexpr u32 kTopK = KILN_TOPK;
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

static_assert(kHidden % kBlock == 0 && kInter % kBlock == 0,
              "hidden and intermediate sizes are multiples of 128");
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

KILN_FN u32 TileBound(u32 tokens) {
  const u64 routes = static_cast<u64>(tokens) * kTopK;
  const u64 packed =
      (routes + static_cast<u64>(kExperts) * (kRows - 1)) / kRows;
  return static_cast<u32>(routes < packed ? routes : packed);
}

// ---- route -----------------------------------------------------------------

struct RouteArgs {
  u32 tokens;
  const void* topk_ids;
  i32* tile_expert;
  i32* tile_routes;
  i32* route_slot;
};

// The expert of a route, or -1.
KILN_FN i32 ExpertOf(const void* ids, u64 route) {
#if KILN_ID_I64
  const i64 id = static_cast<const i64*>(ids)[route];
#else
  const i64 id = static_cast<const i32*>(ids)[route];
#endif
  return id >= 0 && id < static_cast<i64>(kExperts) ? static_cast<i32>(id) : -1;
}

void Route(const RouteArgs& args, u32, u32, u32) {
  const u64 routes = static_cast<u64>(args.tokens) * kTopK;
  u32 next_slot[kExperts] = {};
  for (u64 r = 0; r < routes; ++r) {
    const i32 expert = ExpertOf(args.topk_ids, r);
    if (expert >= 0) ++next_slot[expert];
  }
  u32 tiles = 0;
  for (u32 e = 0; e < kExperts; ++e) {
    const u32 count = next_slot[e];
    next_slot[e] = tiles * kRows;
    for (u32 row = 0; row < count; row += kRows) {
      args.tile_expert[tiles++] = static_cast<i32>(e);
    }
  }
  for (u64 i = 0; i < static_cast<u64>(tiles) * kRows; ++i) {
    args.tile_routes[i] = -1;
  }
  for (u32 tile = tiles; tile < TileBound(args.tokens); ++tile) {
    args.tile_expert[tile] = -1;
  }
  for (u64 r = 0; r < routes; ++r) {
    const i32 expert = ExpertOf(args.topk_ids, r);
    if (expert < 0) {
      args.route_slot[r] = -1;
      continue;
    }
    const u32 slot = next_slot[expert]++;
    args.tile_routes[slot] = static_cast<i32>(r);
    args.route_slot[r] = static_cast<i32>(slot);
  }
}

// ---- rotate ----------------------------------------------------------------

struct RotateArgs {
  const i32* tile_expert;
  const i32* tile_routes;
  const u16* x;
  const u16* gate_suh;
  const u16* up_suh;
  u16* gate_in;
  u16* up_in;
};

// Row of a scale table that experts may share.
KILN_FN u64 ScaleRow(i32 expert) {
#if KILN_SHARED_SUH
  return static_cast<u64>(expert) * 0;
#else
  return static_cast<u64>(expert) * kHidden;
#endif
}

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

void Rotate(const RotateArgs& args, u32 tile, u32 chunk, u32) {
  const i32 expert = args.tile_expert[tile];
  if (expert < 0) return;
  const u32 end =
      (chunk + 1) * kChunk < kHidden ? (chunk + 1) * kChunk : kHidden;
  for (u32 base = chunk * kChunk; base < end; base += kBlock) {
    u16 gate[kRows][kBlock];
    u16 up[kRows][kBlock];
    for (u32 row = 0; row < kRows; ++row) {
      const i32 route = args.tile_routes[tile * kRows + row];
      if (route < 0) {
        for (u32 c = 0; c < kBlock; ++c) gate[row][c] = up[row][c] = 0;
        continue;
      }
      const u64 token = static_cast<u32>(route) / kTopK;
      float x[kBlock];
      LoadX(args.x + token * kHidden + base, x);
      const u64 scale = ScaleRow(expert) + base;
      RotateRow(x, args.gate_suh + scale, gate[row]);
      RotateRow(x, args.up_suh + scale, up[row]);
    }
    const u64 at = (static_cast<u64>(tile) * kHidden + base) * kRows;
    StoreTransposed(gate, args.gate_in + at);
    StoreTransposed(up, args.up_in + at);
  }
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

  // strip += a * W over all k. W is one expert's [k/16][n/16] native tiles;
  // the strip begins at column `column` and has `groups` groups.
  static void Run(const u32* w, u32 k_size, u32 n_size, u32 column, u32 groups,
                  const u16* a, Strip* strip) {
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

// out[row][column ..] = a * W, rounded to binary16.
template <int K>
KILN_FN void MultiplyStrip(const u16* w, i32 expert, u32 k_size, u32 n_size,
                           u32 strip_index, const u16* a, u16* out) {
  const u32 column = strip_index * kStrip;
  const u32 columns = n_size - column < kStrip ? n_size - column : kStrip;
  const u64 expert_words =
      static_cast<u64>(k_size / 16) * (n_size / 16) * kd::kTileWords<K>;
  Strip strip;
  for (u32 g = 0; g < columns / kGroup; ++g) {
    for (u32 row = 0; row < kRows; ++row) {
      strip.sum[g][0][row] = strip.sum[g][1][row] = F{};
    }
  }
  Product<K>::Run(
      reinterpret_cast<const u32*>(w) + static_cast<u64>(expert) * expert_words,
      k_size, n_size, column, columns / kGroup, a, &strip);
  for (u32 row = 0; row < kRows; ++row) {
    u16* to = out + static_cast<u64>(row) * n_size + column;
    for (u32 g = 0; g < columns / kGroup; ++g) {
      for (u32 half = 0; half < 2; ++half) {
        u16 lanes[kLanes];
        kd::Store(lanes, kd::ToHalves<kLanes>(strip.sum[g][half][row]));
        for (u32 tile = 0; tile < kGroupTiles; ++tile) {
          __builtin_memcpy(to + g * kGroup + tile * 16 + half * 8,
                           lanes + tile * 8, 8 * sizeof(u16));
        }
      }
    }
  }
}

struct Fc1Args {
  const i32* tile_expert;
  const u16* w_gate;
  const u16* w_up;
  const u16* gate_in;
  const u16* up_in;
  u16* gate_out;
  u16* up_out;
};

void Fc1(const Fc1Args& args, u32 tile, u32 strip, u32 side) {
  const i32 expert = args.tile_expert[tile];
  if (expert < 0) return;
  const u64 in = static_cast<u64>(tile) * kRows * kHidden;
  const u64 out = static_cast<u64>(tile) * kRows * kInter;
  if (side == 0) {
    MultiplyStrip<KILN_BITS_GATE>(args.w_gate, expert, kHidden, kInter, strip,
                                  args.gate_in + in, args.gate_out + out);
  } else {
    MultiplyStrip<KILN_BITS_UP>(args.w_up, expert, kHidden, kInter, strip,
                                args.up_in + in, args.up_out + out);
  }
}

struct Fc2Args {
  const i32* tile_expert;
  const u16* w_down;
  const u16* down_in;
  u16* down_out;
};

void Fc2(const Fc2Args& args, u32 tile, u32 strip, u32) {
  const i32 expert = args.tile_expert[tile];
  if (expert < 0) return;
  MultiplyStrip<KILN_BITS_DOWN>(
      args.w_down, expert, kInter, kHidden, strip,
      args.down_in + static_cast<u64>(tile) * kRows * kInter,
      args.down_out + static_cast<u64>(tile) * kRows * kHidden);
}

// ---- activate --------------------------------------------------------------

struct ActivateArgs {
  const i32* tile_expert;
  const i32* tile_routes;
  const u16* rotations;
  const u16* gate_out;
  const u16* up_out;
  u16* down_in;
};

// v[0..127] = Hadamard(from) * scale.
KILN_FN void LoadRotated(const u16* from, const u16* scale, float* v) {
  for (u32 c = 0; c < kBlock; c += kLanes) {
    kd::Store(v + c, kd::LoadHalves<kLanes>(from + c));
  }
  kd::VectorHadamard128<kLanes>(v);
  for (u32 c = 0; c < kBlock; c += kLanes) {
    kd::Store(v + c, kd::Load<F>(v + c) * kd::LoadHalves<kLanes>(scale + c));
  }
}

void Activate(const ActivateArgs& args, u32 tile, u32 chunk, u32) {
  const i32 expert = args.tile_expert[tile];
  if (expert < 0) return;
  const u16* gate_svh = args.rotations + static_cast<u64>(expert) * 3 * kInter;
  const u16* up_svh = gate_svh + kInter;
  const u16* down_suh = up_svh + kInter;
  const u32 end = (chunk + 1) * kChunk < kInter ? (chunk + 1) * kChunk : kInter;
  for (u32 base = chunk * kChunk; base < end; base += kBlock) {
    u16 result[kRows][kBlock];
    for (u32 row = 0; row < kRows; ++row) {
      if (args.tile_routes[tile * kRows + row] < 0) {
        for (u32 c = 0; c < kBlock; ++c) result[row][c] = 0;
        continue;
      }
      const u64 at = (static_cast<u64>(tile) * kRows + row) * kInter + base;
      float gate[kBlock];
      float up[kBlock];
      LoadRotated(args.gate_out + at, gate_svh + base, gate);
      LoadRotated(args.up_out + at, up_svh + base, up);
      for (u32 c = 0; c < kBlock; ++c) gate[c] = kd::Silu(gate[c]) * up[c];
      for (u32 c = 0; c < kBlock; c += kLanes) {
        kd::Store(gate + c, kd::Load<F>(gate + c) *
                                kd::LoadHalves<kLanes>(down_suh + base + c));
      }
      kd::VectorHadamard128<kLanes>(gate);
      StoreHalves(gate, result[row]);
    }
    StoreTransposed(
        result,
        args.down_in + (static_cast<u64>(tile) * kInter + base) * kRows);
  }
}

// ---- combine ---------------------------------------------------------------

struct CombineArgs {
  const i32* tile_expert;
  const i32* route_slot;
  const float* topk_weights;
  const u16* down_svh;
  const u16* down_out;
  float* out;
};

void Combine(const CombineArgs& args, u32 token, u32 chunk, u32) {
  const u32 end =
      (chunk + 1) * kChunk < kHidden ? (chunk + 1) * kChunk : kHidden;
  for (u32 base = chunk * kChunk; base < end; base += kBlock) {
    F sum[kBlock / kLanes] = {};
    for (u32 j = 0; j < kTopK; ++j) {
      const u64 route = static_cast<u64>(token) * kTopK + j;
      const i32 slot = args.route_slot[route];
      if (slot < 0) continue;
      const i32 expert = args.tile_expert[static_cast<u32>(slot) / kRows];
      const F weight = kd::Splat<kLanes>(args.topk_weights[route]);
      float v[kBlock];
      LoadRotated(args.down_out + static_cast<u64>(slot) * kHidden + base,
                  args.down_svh + ScaleRow(expert) + base, v);
      for (u32 i = 0; i < kBlock / kLanes; ++i) {
        sum[i] = kd::FmaLanes<F>(kd::Load<F>(v + i * kLanes), weight, sum[i]);
      }
    }
    float* out = args.out + static_cast<u64>(token) * kHidden + base;
    for (u32 i = 0; i < kBlock / kLanes; ++i) {
      kd::Store(out + i * kLanes, sum[i]);
    }
  }
}

}  // namespace

KILN_CPU_ENTRY(kiln_moe_cpu_route, RouteArgs, Route)
KILN_CPU_ENTRY(kiln_moe_cpu_rotate, RotateArgs, Rotate)
KILN_CPU_ENTRY(kiln_moe_cpu_fc1, Fc1Args, Fc1)
KILN_CPU_ENTRY(kiln_moe_cpu_activate, ActivateArgs, Activate)
KILN_CPU_ENTRY(kiln_moe_cpu_fc2, Fc2Args, Fc2)
KILN_CPU_ENTRY(kiln_moe_cpu_combine, CombineArgs, Combine)
