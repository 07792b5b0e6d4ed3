// fused_moe over TrellisMX weights (NPK-1 streams) on the CPU.
//
// Kernel source: compiled at run time by the embedded Clang for one request
// and one candidate, with a prelude of macros before the text. Rounding
// boundaries follow the prepared-weights specification, A.6: transforms and
// scales in binary32, results of products in binary16.
//
// KILN_COUPLED is 1 where H512 and H128 with scales and signs surround the
// products, 0 where nothing does; then the vectors are null and not read.
//
// KILN_ACTIVATION_BITS is the arm. 8 ("grouped" and "direct", W4A8): what both
// products read is MXFP8, E4M3 in blocks of 32. 16 ("smallm", W4A16): the same
// values as binary16. KILN_ACTIVATION_TERMS, 1 unless given: with 2 ("direct
// rp2") a second MXFP8 number holds what the first left of a value. A sum over
// input channels runs in blocks of 32: each block from zero in ascending order
// with one fused multiply-add per E4M3 weight, then times the block's scales
// and added to the sum. Two terms are two such sums, which are added at the
// end. So all candidates of one arm give identical bits.
//
// Words: R = m * top_k routes. Routes are grouped by expert, stably, into tiles
// of T = KILN_TOKENS_TILE rows; a tile never mixes experts.
//   tiles(m) = min(R, ceil((R + (E - 1) (T - 1)) / T))   upper bound of tiles
//   slot     = tile * T + row in tile
// C is KILN_CHANNELS_TILE, B the channels of a block of rotate and combine:
// 512, of the identity boundary 128.
//
// Steps, in this order. "p" marks a parameter of the op, "a" an arena slice;
// `tokens` is live m.
//   entry                grid                    arguments
//   kiln_mx_cpu_route    1, 1, 1                 tokens, p topk_ids,
//     a tile_expert, a tile_routes, a route_slot
//   kiln_mx_cpu_rotate   m, H / B, 1             p x, p gate_up_suh,
//     a x_values, a x_scales
//   kiln_mx_cpu_fc1      tiles, ceil(I / C), 1   a tile_expert, a tile_routes,
//     p w13, p w13_scale, p rotations, a x_values, a x_scales, a mid_values,
//     a mid_scales
//   kiln_mx_cpu_fc2      tiles, ceil(H / C), 1   a tile_expert, a tile_routes,
//     p w2, p w2_scale, p down_svh, a mid_values, a mid_scales, a routed
//   kiln_mx_cpu_combine  m, H / B, 1             a route_slot, p topk_weights,
//     a routed, p out
//
// `rotate` quantises a token once for all its routes, in the pass that rotates
// it; `fc1` ends with the boundary and quantises its result.
//
// Arena slices for a capacity m, in bytes, n = tiles(m), v = bytes of a value
// (1 or 2), s = 1 for the arms of 8 bits, else 0, t = terms:
//   tile_expert i32 [n]        4 n          expert, -1: tile not in use
//   tile_routes i32 [n][T]     4 n T        route, -1: row not in use
//   route_slot  i32 [R]        4 R          slot, -1: inactive route
//   x_values    [m][t][H]      v t m H      E4M3 or binary16
//   x_scales    u8 [m][t][H/32]      s t m H / 32
//   mid_values  [n][T][t][I]   v t n T I
//   mid_scales  u8 [n][T][t][I/32]   s t n T I / 32
//   routed      f32 [n][T][H]  4 n T H      behind H128 and down_svh
// Nothing is read that the same launch did not write.
//
// Axes:
//   KILN_TOKENS_TILE    1, 2, 4, 8, 16   rows of a tile
//   KILN_CHANNELS_TILE  128, 256         output channels of a block
//   KILN_ROW_GROUP      1, 2, 4, 8       rows whose sums stay in registers
//                       together; divides the tile. A term is such a row.
// Registers: the lane count is 16 where the target has AVX-512, else 8.
// KILN_LANES overrides it (tests).

#include "device/cpu_builtins.h"
#include "device/cpu_entry.h"
#include "device/cpu_vector.h"
#include "device/half.h"
#include "device/platform.h"
#include "device/trellis.h"
#include "fused_moe/mx_block.h"
#include "fused_moe/mx_boundary.h"
#include "fused_moe/mx_vector.h"

#if !defined(KILN_ACTIVATION_TERMS)
#define KILN_ACTIVATION_TERMS 1
#endif

namespace {

using kd::i32;
using kd::i64;
using kd::u16;
using kd::u32;
using kd::u64;
using kd::u8;

constexpr u32 kHidden = KILN_HIDDEN;
constexpr u32 kInter = KILN_INTER;
constexpr u32 kExperts = KILN_EXPERTS;
constexpr u32 kTopK = KILN_TOPK;
constexpr int kBits = KILN_BITS;
constexpr u32 kRows = KILN_TOKENS_TILE;
constexpr u32 kStrip = KILN_CHANNELS_TILE;
constexpr u32 kRowGroup = KILN_ROW_GROUP;
constexpr bool kCoupled = KILN_COUPLED != 0;
constexpr bool kQuantised = KILN_ACTIVATION_BITS == 8;
constexpr u32 kValueBytes = KILN_ACTIVATION_BITS / 8;
constexpr u32 kTerms = KILN_ACTIVATION_TERMS;
constexpr u32 kOperands = kRows * kTerms;  // rows that a tile multiplies

#if defined(KILN_LANES)
constexpr int kLanes = KILN_LANES;
#elif defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

constexpr u32 kGroup = 2 * kLanes;  // output channels decoded together
constexpr u32 kGroupTiles = kLanes / 8;
constexpr u32 kGroupWords = kd::kTileWords<kBits> * kGroupTiles;
constexpr u32 kBlock = kd::kHadamardSize;
constexpr u32 kFold = kd::kMxBlock;  // input channels of one scale
constexpr u32 kChunk = kCoupled ? kd::kMxOuter : kBlock;

static_assert(kHidden % kChunk == 0 && kInter % kBlock == 0,
              "hidden is a multiple of 512 (of 128 with the identity "
              "boundary), intermediate one of 128");
static_assert(KILN_ACTIVATION_BITS == 8 || KILN_ACTIVATION_BITS == 16,
              "activations have 8 or 16 bits");
static_assert(kTerms == 1 || (kTerms == 2 && kQuantised),
              "one term, or two of 8 bits");
static_assert(kRows % kRowGroup == 0, "row groups divide the tile");
static_assert(kStrip == 128 || kStrip == 256, "128 or 256 output channels");

using F = kd::F32V<kLanes>;
using U = kd::U32V<kLanes>;

KILN_FN float Limit() { return kd::BitsFloat(KILN_LIMIT_BITS); }

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

// ---- operands of products --------------------------------------------------

// Rounds `count` values, a multiple of 32, to channels of row `row` of an
// operand [rows][kTerms][kDepth], from `channel` on.
template <u32 kDepth>
KILN_FN void StoreOperand(const float* v, u32 count, u64 row, u32 channel,
                          u8* values, u8* scales) {
  const u64 first = row * (kTerms * kDepth) + channel;
  if constexpr (kQuantised) {
    for (u32 b = 0; b < count; b += kFold) {
      const float* from = v + b;
      float rest[kFold];
      for (u32 term = 0; term < kTerms; ++term) {
        const u64 at = first + term * kDepth + b;
        scales[at / kFold] = kd::QuantizeMxBlock(from, values + at);
        if (term + 1 == kTerms) break;
        const float scale = kd::Ue8m0ToFloat(scales[at / kFold]);
        for (u32 i = 0; i < kFold; ++i) {
          rest[i] = from[i] - kd::E4m3ToFloat(values[at + i]) * scale;
        }
        from = rest;
      }
    }
  } else {
    for (u32 i = 0; i < count; i += kLanes) {
      kd::Store(values + (first + i) * kValueBytes,
                kd::ToHalves<kLanes>(kd::Load<F>(v + i)));
    }
  }
}

// What a tile multiplies, its rows' terms in turn: where each begins; null for
// a row that is not in use, which counts as zeros.
struct Rows {
  const u8* values[kOperands];
  const u8* scales[kOperands];

  // Row `row` of the tile is row `at` of an operand [rows][kTerms][depth].
  KILN_FN void Set(u32 row, u64 at, u32 depth, const u8* from_values,
                   const u8* from_scales) {
    for (u32 term = 0; term < kTerms; ++term) {
      const u64 first = (at * kTerms + term) * depth;
      values[row * kTerms + term] = from_values + first * kValueBytes;
      scales[row * kTerms + term] = from_scales + first / kFold;
    }
  }

  KILN_FN void Clear(u32 row) {
    for (u32 term = 0; term < kTerms; ++term) {
      values[row * kTerms + term] = scales[row * kTerms + term] = nullptr;
    }
  }

  KILN_FN bool Has(u32 row) const { return values[row * kTerms] != nullptr; }
};

// 32 channels of a row, from `channel` on, without their scale.
KILN_FN void LoadBlock(const u8* values, u32 channel, float* out) {
  const u8* at = values + static_cast<u64>(channel) * kValueBytes;
  for (u32 i = 0; i < kFold; ++i) {
    if constexpr (kQuantised) {
      out[i] = kd::E4m3ToFloat(at[i]);
    } else {
      u16 half;
      __builtin_memcpy(&half, at + 2 * i, sizeof half);
      out[i] = kd::f16_to_f32(half);
    }
  }
}

// ---- rotate ----------------------------------------------------------------

struct RotateArgs {
  const u16* x;
  const u16* suh;
  u8* values;
  u8* scales;
};

void Rotate(const RotateArgs& args, u32 token, u32 chunk, u32) {
  const u32 base = chunk * kChunk;
  const u64 row = static_cast<u64>(token) * kHidden + base;
  float v[kChunk];
  for (u32 i = 0; i < kChunk; ++i) {
#if KILN_X_BF16
    v[i] = kd::round_f16(kd::bf16_to_f32(args.x[row + i]));
#else
    v[i] = kd::f16_to_f32(args.x[row + i]);
#endif
  }
  if constexpr (kCoupled) {
    kd::Hadamard512(v);
    for (u32 i = 0; i < kChunk; i += kBlock) {
      kd::ScaleBy(args.suh + base + i, v + i);
      kd::Hadamard128(v + i);
    }
  }
  StoreOperand<kHidden>(v, kChunk, token, base, args.values, args.scales);
}

// ---- matrix products -------------------------------------------------------

// Accumulators of a strip: [group][half][operand]. Half h of a group holds
// columns 8h .. 8h + 7 of each of its native tiles.
struct Strip {
  F sum[kStrip / kGroup][2][kOperands];
};

// One expert's matrix.
struct Matrix {
  const u32* words;   // [k/16][n/16] native tiles
  const u32* scales;  // panels of 256 rows, [k/128][256]
  u32 k_size;
  u32 n_size;
  u32 first_row;  // of the scales: what row column 0 is
};

template <int Row>
KILN_FN void DecodeRows(const kd::TileBits<kBits, kLanes>& bits, F (*out)[2]) {
  if constexpr (Row < 16) {
    out[Row][0] = kd::DecodeNpkLanes<kLanes>(bits.template States<Row, 0>());
    out[Row][1] = kd::DecodeNpkLanes<kLanes>(bits.template States<Row, 1>());
    DecodeRows<Row + 1>(bits, out);
  }
}

// Scale words of half a group, as its weights lie in the lanes.
KILN_FN U ScaleWords(const Matrix& w, u32 k, u32 column, u32 half) {
  u32 words[kLanes];
  KILN_UNROLLED
  for (u32 tile = 0; tile < kGroupTiles; ++tile) {
    const u32 row = w.first_row + column + tile * 16 + half * 8;
    const u64 at =
        (static_cast<u64>(row / 256) * (w.k_size / 128) + k / 128) * 256 +
        row % 256;
    __builtin_memcpy(words + tile * 8, w.scales + at, 8 * sizeof(u32));
  }
  return kd::Load<U>(words);
}

// sum[half][row] += one block of 32 input channels of one group.
//   a: [row][32]; a_scale: [row].
KILN_FN void AddFold(const F (*weights)[2], const F* w_scale, const float* a,
                     const float* a_scale, F (*sum)[kOperands]) {
  for (u32 first = 0; first < kOperands; first += kRowGroup) {
    F fold[2][kRowGroup] = {};
    for (u32 k = 0; k < kFold; ++k) {
      const F w0 = weights[k][0];
      const F w1 = weights[k][1];
      KILN_UNROLLED
      for (u32 row = 0; row < kRowGroup; ++row) {
        const F x = kd::Splat<kLanes>(a[(first + row) * kFold + k]);
        fold[0][row] = kd::FmaLanes<F>(w0, x, fold[0][row]);
        fold[1][row] = kd::FmaLanes<F>(w1, x, fold[1][row]);
      }
    }
    KILN_UNROLLED
    for (u32 row = 0; row < kRowGroup; ++row) {
      KILN_UNROLLED
      for (u32 half = 0; half < 2; ++half) {
        // Both scales are powers of two: the products are exact.
        const F part = fold[half][row] * w_scale[half];
        F* to = &sum[half][first + row];
        if constexpr (kQuantised) {
          *to = kd::FmaLanes<F>(part, kd::Splat<kLanes>(a_scale[first + row]),
                                *to);
        } else {
          *to = *to + part;
        }
      }
    }
  }
}

// out[row][0 .. columns) = rows * W of the columns from `column` on, rounded to
// binary16; out has rows of kStrip.
void Multiply(const Matrix& w, u32 column, u32 columns, const Rows& rows,
              float* out) {
  Strip strip;
  for (u32 g = 0; g < columns / kGroup; ++g) {
    for (u32 row = 0; row < kOperands; ++row) {
      strip.sum[g][0][row] = strip.sum[g][1][row] = F{};
    }
  }
  const u64 row_words = static_cast<u64>(w.n_size / 16) * kd::kTileWords<kBits>;
  for (u32 k = 0; k < w.k_size; k += kFold) {
    float a[kOperands * kFold];
    float a_scale[kOperands];
    for (u32 row = 0; row < kOperands; ++row) {
      a_scale[row] = 1.0f;
      if (rows.values[row] == nullptr) {
        for (u32 i = 0; i < kFold; ++i) a[row * kFold + i] = 0.0f;
        continue;
      }
      LoadBlock(rows.values[row], k, a + row * kFold);
      if constexpr (kQuantised) {
        a_scale[row] = kd::Ue8m0ToFloat(rows.scales[row][k / kFold]);
      }
    }
    const u32* words =
        w.words + k / 16 * row_words + column / 16 * kd::kTileWords<kBits>;
    for (u32 g = 0; g < columns / kGroup; ++g) {
      F weights[kFold][2];
      for (u32 half_fold = 0; half_fold < 2; ++half_fold) {
        kd::TileBits<kBits, kLanes> bits;
        bits.LoadFrom(words + half_fold * row_words + g * kGroupWords);
        DecodeRows<0>(bits, weights + 16 * half_fold);
      }
      F w_scale[2];
      for (u32 half = 0; half < 2; ++half) {
        w_scale[half] = kd::ScaleLanes<kLanes>(
            ScaleWords(w, k, column + g * kGroup, half), k % 128 / kFold);
      }
      AddFold(weights, w_scale, a, a_scale, strip.sum[g]);
    }
  }
  for (u32 row = 0; row < kRows; ++row) {
    float* to = out + row * kStrip;
    for (u32 g = 0; g < columns / kGroup; ++g) {
      for (u32 half = 0; half < 2; ++half) {
        const F* terms = strip.sum[g][half] + row * kTerms;
        F sum = terms[0];
        if constexpr (kTerms == 2) sum = sum + terms[1];
        float lanes[kLanes];
        kd::Store(lanes, kd::RoundHalves<kLanes>(sum));
        for (u32 tile = 0; tile < kGroupTiles; ++tile) {
          __builtin_memcpy(to + g * kGroup + tile * 16 + half * 8,
                           lanes + tile * 8, 8 * sizeof(float));
        }
      }
    }
  }
}

KILN_FN u32 ColumnsOf(u32 column, u32 n_size) {
  return n_size - column < kStrip ? n_size - column : kStrip;
}

constexpr u64 kMatrixWords =
    static_cast<u64>(kHidden / 16) * (kInter / 16) * kd::kTileWords<kBits>;
// Words of one matrix; rows come in panels of 256.
constexpr u64 kGateScaleWords = static_cast<u64>(kHidden / 128) * kInter;
constexpr u64 kDownScaleWords =
    static_cast<u64>((kHidden + 255) / 256 * 256) * (kInter / 128);

// ---- fc1 -------------------------------------------------------------------

struct Fc1Args {
  const i32* tile_expert;
  const i32* tile_routes;
  const u16* w13;
  const u32* w13_scale;
  const u16* rotations;
  const u8* x_values;
  const u8* x_scales;
  u8* mid_values;
  u8* mid_scales;
};

void Fc1(const Fc1Args& args, u32 tile, u32 strip, u32) {
  const i32 expert = args.tile_expert[tile];
  if (expert < 0) return;
  Rows rows;
  for (u32 row = 0; row < kRows; ++row) {
    const i32 route = args.tile_routes[tile * kRows + row];
    if (route < 0) {
      rows.Clear(row);
      continue;
    }
    rows.Set(row, static_cast<u32>(route) / kTopK, kHidden, args.x_values,
             args.x_scales);
  }
  const u64 e = static_cast<u32>(expert);
  const u32 column = strip * kStrip;
  const u32 columns = ColumnsOf(column, kInter);
  const u32* words = reinterpret_cast<const u32*>(args.w13);
  Matrix w;
  w.words = words + e * kMatrixWords;
  w.scales = args.w13_scale + e * 2 * kGateScaleWords;
  w.k_size = kHidden;
  w.n_size = kInter;
  w.first_row = 0;
  float gate[kRows * kStrip];
  Multiply(w, column, columns, rows, gate);
  w.words = words + (kExperts + e) * kMatrixWords;
  w.first_row = kInter;
  float up[kRows * kStrip];
  Multiply(w, column, columns, rows, up);
  for (u32 row = 0; row < kRows; ++row) {
    if (!rows.Has(row)) continue;
    for (u32 c = 0; c < columns; c += kBlock) {
      const float* g = gate + row * kStrip + c;
      const float* u = up + row * kStrip + c;
      float mid[kBlock];
      if constexpr (kCoupled) {
        kd::MxBoundary128(kd::MxTablesOf(args.rotations, e, kInter), column + c,
                          Limit(), g, u, mid);
      } else {
        for (u32 i = 0; i < kBlock; ++i) {
          mid[i] = kd::MxActivate(g[i], u[i], Limit());
        }
      }
      StoreOperand<kInter>(mid, kBlock, static_cast<u64>(tile) * kRows + row,
                           column + c, args.mid_values, args.mid_scales);
    }
  }
}

// ---- fc2 -------------------------------------------------------------------

struct Fc2Args {
  const i32* tile_expert;
  const i32* tile_routes;
  const u16* w2;
  const u32* w2_scale;
  const u16* down_svh;
  const u8* mid_values;
  const u8* mid_scales;
  float* routed;
};

void Fc2(const Fc2Args& args, u32 tile, u32 strip, u32) {
  const i32 expert = args.tile_expert[tile];
  if (expert < 0) return;
  Rows rows;
  for (u32 row = 0; row < kRows; ++row) {
    const u32 slot = tile * kRows + row;
    if (args.tile_routes[slot] < 0) {
      rows.Clear(row);
      continue;
    }
    rows.Set(row, slot, kInter, args.mid_values, args.mid_scales);
  }
  const u64 e = static_cast<u32>(expert);
  const u32 column = strip * kStrip;
  const u32 columns = ColumnsOf(column, kHidden);
  Matrix w;
  w.words = reinterpret_cast<const u32*>(args.w2) + e * kMatrixWords;
  w.scales = args.w2_scale + e * kDownScaleWords;
  w.k_size = kInter;
  w.n_size = kHidden;
  w.first_row = 0;
  float d[kRows * kStrip];
  Multiply(w, column, columns, rows, d);
  for (u32 row = 0; row < kRows; ++row) {
    if (!rows.Has(row)) continue;
    float* to =
        args.routed + (static_cast<u64>(tile) * kRows + row) * kHidden + column;
    for (u32 c = 0; c < columns; c += kBlock) {
      float* v = d + row * kStrip + c;
      if constexpr (kCoupled) {
        kd::Hadamard128(v);
        kd::ScaleBy(args.down_svh + column + c, v);
      }
      __builtin_memcpy(to + c, v, kBlock * sizeof(float));
    }
  }
}

// ---- combine ---------------------------------------------------------------

struct CombineArgs {
  const i32* route_slot;
  const float* topk_weights;
  const float* routed;
  float* out;
};

// Routes in the router's order, in binary32.
void Combine(const CombineArgs& args, u32 token, u32 chunk, u32) {
  const u32 base = chunk * kChunk;
  float sum[kChunk];
  for (u32 i = 0; i < kChunk; ++i) sum[i] = 0.0f;
  for (u32 j = 0; j < kTopK; ++j) {
    const u64 route = static_cast<u64>(token) * kTopK + j;
    const i32 slot = args.route_slot[route];
    if (slot < 0) continue;
    const float weight = args.topk_weights[route];
    const float* row =
        args.routed + static_cast<u64>(static_cast<u32>(slot)) * kHidden + base;
    for (u32 i = 0; i < kChunk; ++i) {
      sum[i] = kd::Fma(row[i], weight, sum[i]);
    }
  }
  if constexpr (kCoupled) kd::Hadamard512(sum);
  __builtin_memcpy(args.out + static_cast<u64>(token) * kHidden + base, sum,
                   sizeof sum);
}

}  // namespace

KILN_CPU_ENTRY(kiln_mx_cpu_route, RouteArgs, Route)
KILN_CPU_ENTRY(kiln_mx_cpu_rotate, RotateArgs, Rotate)
KILN_CPU_ENTRY(kiln_mx_cpu_fc1, Fc1Args, Fc1)
KILN_CPU_ENTRY(kiln_mx_cpu_fc2, Fc2Args, Fc2)
KILN_CPU_ENTRY(kiln_mx_cpu_combine, CombineArgs, Combine)
