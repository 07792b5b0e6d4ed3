// fused_moe over QSRT weights on the CPU, in two arms: experts of the codebook
// sqg_e4m3, each one pair of records of 128 intermediate channels whose rates
// are the expert's own.
//
// Kernel source: compiled at run time by the embedded Clang for one request
// and one candidate, with a prelude of macros before the text. Rounding
// boundaries follow the trellis specification, 4.5 and 4.6. Every sum over
// input channels runs in ascending order with one fused multiply-add per term,
// so all candidates of one arm give identical bits.
//
// KILN_ACTIVATION_BITS is the arm: what both products read is binary16 (16,
// W4A16) or MXFP8, E4M3 in blocks of 32 (8, W4A8).
//
// An expert of mode 0 is P33, 3 bits per weight in both records; one of mode 1
// has KILN_OTHER_LOW bits in channels 0..127 and KILN_OTHER_HIGH in channels
// 128..255. Whatever its mode, a route has one row between the products and one
// behind them.
//
// Words: R = m * top_k routes, in tiles of T = KILN_TOKENS_TILE rows as
// cpu_routes.h says; tiles(m) is the bound that it names. C is
// KILN_CHANNELS_TILE, I is 256, "c512" is ceil(channels / 512). X, the rows of
// operands of x: m where experts share scales (KILN_SHARED_SUH), else tiles(m)
// * T.
//
// Steps, in this order. "p" marks a parameter of the op, "a" an arena slice;
// `tokens` is live m.
//   entry                  grid                    arguments
//   kiln_qsrt_cpu_route    1, 1, 1                 tokens, p topk_ids,
//     p modes_fc1, p modes_fc2, a tile_expert, a tile_routes, a route_slot,
//     a places
//   kiln_qsrt_cpu_table    64, rates, 1            a codewords
//   kiln_qsrt_cpu_rotate   m or tiles, c512(H), 1  a tile_expert,
//     a tile_routes, p x, p gate_suh, p up_suh, a gate_values, a gate_scales,
//     a up_values, a up_scales
//   kiln_qsrt_cpu_fc1      tiles, 2, 1             a tile_expert,
//     a tile_routes, a places, p w_gate, p w_up, p rotations, a gate_values,
//     a gate_scales, a up_values, a up_scales, a mid_values, a mid_scales, then
//     p activations if KILN_ACTIVATION is 2, a codewords if KILN_CODEWORDS
//   kiln_qsrt_cpu_fc2      tiles, ceil(H / C), 1   a tile_expert,
//     a tile_routes, a places, p w_down, p down_svh, a mid_values,
//     a mid_scales, a routed, then a codewords if KILN_CODEWORDS
//   kiln_qsrt_cpu_combine  m, c512(H), 1           a route_slot,
//     p topk_weights, a routed, p out
//
// `table` is there with KILN_CODEWORDS only; rates are those that experts may
// have, 3 from 2 bits on or 2 from 3 bits on. `rotate` runs once for a token or
// once for a route, as above; a block of `fc1` makes one record of gate and up,
// and ends with the activation and the operand of `fc2`.
//
// Arena slices for a capacity m, in bytes, n = tiles(m), v = bytes of a value
// (1 or 2), s = 1 for the arm of 8 bits, else 0:
//   tile_expert i32 [n]          4 n          expert, -1: tile not in use
//   tile_routes i32 [n][T]       4 n T        route, -1: row not in use
//   route_slot  i32 [R]          4 R          slot, -1: inactive route
//   places      u64 [2][E]       16 E         of fc1 and fc2: offset of the
//                                expert in 32-bit words << 1 | mode
//   gate_values, up_values [X][H]           v X H   E4M3 or binary16, each
//   gate_scales, up_scales u8 [X][H/32]     s X H / 32, each
//   mid_values  [n][T][I]        v n T I
//   mid_scales  u8 [n][T][I/32]  s n T I / 32
//   routed      f32 [n][T][H]    4 n T H      behind H128 and down_svh
//   codewords   u16 [rates][65536]   the weight of each state, bfloat16; with
//                                KILN_CODEWORDS
// Nothing is read that the same launch did not write.
//
// KILN_ACTIVATION: 0 SiLU, 1 SiTU, 2 what the expert's number in `activations`
// says, 0 or 1.
//
// Axes:
//   KILN_TOKENS_TILE    1, 2, 4, 8, 16   rows of a tile
//   KILN_CHANNELS_TILE  128, 256         output channels of a block of `fc2`
//   KILN_K_TILE         32, 128          input channels that are decoded at a
//                       time
//   KILN_CODEWORDS      0: weights are decoded by their ranks; 1: by a table of
//                       all states, which each launch makes
//   KILN_ROW_GROUP      1, 2, 4, 8       rows whose sums stay in registers
//                       together; divides the tile
// Registers: the lane count is 16 where the target has AVX-512, else 8.
// KILN_LANES overrides it (tests).

#include "device/activation.h"
#include "device/cpu_builtins.h"
#include "device/cpu_entry.h"
#include "device/cpu_vector.h"
#include "device/half.h"
#include "device/platform.h"
#include "device/trellis.h"
#include "fused_moe/cpu_operand.h"
#include "fused_moe/cpu_routes.h"
#include "fused_moe/mx_block.h"
#include "fused_moe/situ.h"
#include "fused_moe/sqg_vector.h"

namespace {

using kd::i32;
using kd::i64;
using kd::u16;
using kd::u32;
using kd::u64;
using kd::u8;

constexpr u32 kHidden = KILN_HIDDEN;
constexpr u32 kExperts = KILN_EXPERTS;
constexpr u32 kTopK = KILN_TOPK;
constexpr bool kSharedSuh = KILN_SHARED_SUH != 0;
constexpr u32 kRows = KILN_TOKENS_TILE;
constexpr u32 kStrip = KILN_CHANNELS_TILE;
constexpr u32 kDepth = KILN_K_TILE;
constexpr u32 kRowGroup = KILN_ROW_GROUP;

#if defined(KILN_LANES)
constexpr int kLanes = KILN_LANES;
#elif defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

constexpr u32 kGroup = 2 * kLanes;  // output channels decoded together
constexpr u32 kGroupTiles = kLanes / 8;
constexpr u32 kBlock = kd::kHadamardSize;
constexpr u32 kChunk = 512;      // channels of a block of the elementwise steps
constexpr u32 kRecord = kBlock;  // intermediate channels of one rate
constexpr u32 kInter = 2 * kRecord;

constexpr u32 kTableBlocks = 64;

static_assert(kHidden % kBlock == 0, "the hidden size is a multiple of 128");
static_assert(kRows % kRowGroup == 0, "row groups divide the tile");
static_assert(kStrip == 128 || kStrip == 256, "128 or 256 output channels");
static_assert(kRecord % kDepth == 0 && kDepth % kd::kMxBlock == 0,
              "k tile divides 128 and is a multiple of 32");

using F = kd::F32V<kLanes>;
using Operand = kd::CpuOperand<KILN_ACTIVATION_BITS, kLanes>;
#if KILN_ID_I64
using Routes = kd::CpuRoutes<kExperts, kTopK, kRows, i64>;
#else
using Routes = kd::CpuRoutes<kExperts, kTopK, kRows, i32>;
#endif

// ---- rates -----------------------------------------------------------------

// Bits of a record of an expert of mode 1.
constexpr u32 kOther[2] = {KILN_OTHER_LOW, KILN_OTHER_HIGH};

KILN_FN u32 RecordBits(bool is_other, u32 record) {
  return is_other ? kOther[record] : 3;
}

KILN_FN u32 PairBits(bool is_other) {
  return RecordBits(is_other, 0) + RecordBits(is_other, 1);
}

// The lowest rate that a mode has.
constexpr u32 kLeastBits = kOther[0] == 2 || kOther[1] == 2 ? 2 : 3;

// 32-bit words of one bit of one record of a matrix.
constexpr u64 kRecordWords =
    static_cast<u64>(kHidden / 16) * (kRecord / 16) * 8;

// Where an expert's matrix begins, and its rates.
struct Place {
  u64 word;
  bool is_other;
};

KILN_FN Place PlaceOf(const u64* places, i32 expert) {
  const u64 place = places[expert];
  return {place >> 1, (place & 1) != 0};
}

// Experts follow each other without gaps.
KILN_FN void FindPlaces(const i32* modes, u64* places) {
  u64 word = 0;
  for (u32 e = 0; e < kExperts; ++e) {
    const bool is_other = modes[e] != 0;
    places[e] = word << 1 | (is_other ? 1 : 0);
    word += kRecordWords * PairBits(is_other);
  }
}

// ---- route -----------------------------------------------------------------

struct RouteArgs {
  u32 tokens;
  const void* topk_ids;
  const i32* modes_fc1;
  const i32* modes_fc2;
  i32* tile_expert;
  i32* tile_routes;
  i32* route_slot;
  u64* places;
};

void Route(const RouteArgs& args, u32, u32, u32) {
  Routes::Place(args.tokens, args.topk_ids, args.tile_expert, args.tile_routes,
                args.route_slot);
  FindPlaces(args.modes_fc1, args.places);
  FindPlaces(args.modes_fc2, args.places + kExperts);
}

// ---- table -----------------------------------------------------------------

#if KILN_CODEWORDS
struct TableArgs {
  u16* codewords;
};

void Table(const TableArgs& args, u32 block, u32 rate, u32) {
  constexpr u32 kCount = kd::kSqgStates / kTableBlocks;
  const u32 first = block * kCount;
  u16* table = args.codewords + static_cast<u64>(rate) * kd::kSqgStates;
  if (rate + kLeastBits == 2) {
    kd::FillSqgCodewords<2, kLanes>(first, kCount, table);
  } else if (rate + kLeastBits == 3) {
    kd::FillSqgCodewords<3, kLanes>(first, kCount, table);
  } else {
    kd::FillSqgCodewords<4, kLanes>(first, kCount, table);
  }
}
#endif

// ---- rotate ----------------------------------------------------------------

struct RotateArgs {
  const i32* tile_expert;
  const i32* tile_routes;
  const u16* x;
  const u16* gate_suh;
  const u16* up_suh;
  u8* gate_values;
  u8* gate_scales;
  u8* up_values;
  u8* up_scales;
};

// Row of a scale table that experts may share.
KILN_FN u64 ScaleRow(i32 expert) {
  return kSharedSuh ? 0 : static_cast<u64>(expert) * kHidden;
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

// 128 channels of one side's operand, from `at` of its rows on.
KILN_FN void RotateBlock(const float* x, const u16* suh, u64 at, u8* values,
                         u8* scales) {
  float v[kBlock];
  for (u32 c = 0; c < kBlock; c += kLanes) {
    kd::Store(v + c, kd::RoundHalves<kLanes>(kd::Load<F>(x + c) *
                                             kd::LoadHalves<kLanes>(suh + c)));
  }
  kd::VectorHadamard128<kLanes>(v);
  Operand::Store(v, kBlock, values + at * Operand::kBytes,
                 scales + at / kd::kMxBlock);
}

// One row of both operands, channels base .. base + 127.
KILN_FN void RotateRow(const RotateArgs& args, u64 token, u64 scale_row,
                       u64 row, u32 base) {
  float x[kBlock];
  LoadX(args.x + token * kHidden + base, x);
  const u64 at = row * kHidden + base;
  RotateBlock(x, args.gate_suh + scale_row + base, at, args.gate_values,
              args.gate_scales);
  RotateBlock(x, args.up_suh + scale_row + base, at, args.up_values,
              args.up_scales);
}

KILN_FN u32 ChunkEnd(u32 chunk) {
  return (chunk + 1) * kChunk < kHidden ? (chunk + 1) * kChunk : kHidden;
}

// `x` is a token where experts share scales, else a tile.
void Rotate(const RotateArgs& args, u32 x, u32 chunk, u32) {
  if constexpr (kSharedSuh) {
    for (u32 base = chunk * kChunk; base < ChunkEnd(chunk); base += kBlock) {
      RotateRow(args, x, 0, x, base);
    }
  } else {
    const i32 expert = args.tile_expert[x];
    if (expert < 0) return;
    for (u32 slot = x * kRows; slot < (x + 1) * kRows; ++slot) {
      const i32 route = args.tile_routes[slot];
      if (route < 0) continue;
      const u64 token = static_cast<u32>(route) / kTopK;
      for (u32 base = chunk * kChunk; base < ChunkEnd(chunk); base += kBlock) {
        RotateRow(args, token, ScaleRow(expert), slot, base);
      }
    }
  }
}

// ---- matrix products -------------------------------------------------------

// The rows of a tile: where each one's operand begins; null for a row that is
// not in use, which counts as zeros.
struct Rows {
  const u8* values[kRows];
  const u8* scales[kRows];
};

// Accumulators of up to 256 output channels: [group][half][row]. Half h of a
// group holds columns 8h .. 8h + 7 of each of its native tiles.
struct Sums {
  F sum[256 / kGroup][2][kRows];
};

KILN_FN void Clear(u32 columns, Sums* sums) {
  for (u32 g = 0; g < columns / kGroup; ++g) {
    for (u32 row = 0; row < kRows; ++row) {
      sums->sum[g][0][row] = sums->sum[g][1][row] = F{};
    }
  }
}

// codewords: the table of K; not read without KILN_CODEWORDS.
template <int K>
KILN_FN F Decode(kd::U32V<kLanes> states,
                 [[maybe_unused]] const u16* codewords) {
#if KILN_CODEWORDS
  return kd::LookUpSqgLanes<kLanes>(states, codewords);
#else
  return kd::DecodeSqgLanes<K, kLanes>(states);
#endif
}

template <int K, int Row = 0>
KILN_FN void DecodeRows(const kd::TileBits<K, kLanes>& bits,
                        const u16* codewords, F (*out)[2]) {
  if constexpr (Row < 16) {
    out[Row][0] = Decode<K>(bits.template States<Row, 0>(), codewords);
    out[Row][1] = Decode<K>(bits.template States<Row, 1>(), codewords);
    DecodeRows<K, Row + 1>(bits, codewords, out);
  }
}

// sum[half][row] += kDepth input channels of one group.
//   a: [row][kDepth].
KILN_FN void MultiplyGroup(const F (*weights)[2], const float* a,
                           F (*sum)[kRows]) {
  for (u32 first = 0; first < kRows; first += kRowGroup) {
    F acc[2][kRowGroup];
    KILN_UNROLLED
    for (u32 row = 0; row < kRowGroup; ++row) {
      acc[0][row] = sum[0][first + row];
      acc[1][row] = sum[1][first + row];
    }
    for (u32 k = 0; k < kDepth; ++k) {
      const F w0 = weights[k][0];
      const F w1 = weights[k][1];
      KILN_UNROLLED
      for (u32 row = 0; row < kRowGroup; ++row) {
        const F x = kd::Splat<kLanes>(a[(first + row) * kDepth + k]);
        acc[0][row] = kd::FmaLanes<F>(w0, x, acc[0][row]);
        acc[1][row] = kd::FmaLanes<F>(w1, x, acc[1][row]);
      }
    }
    KILN_UNROLLED
    for (u32 row = 0; row < kRowGroup; ++row) {
      sum[0][first + row] = acc[0][row];
      sum[1][first + row] = acc[1][row];
    }
  }
}

// A part of a matrix of one rate.
struct Part {
  const u32* words;   // of its first native tile
  u64 row_words;      // between native tiles of neighbouring rows
  u32 bits;           // 2, 3 or 4
  u32 first_channel;  // of the operands, of its first row
  u32 channels;       // input channels: a multiple of 128
  u32 columns;        // output channels: 128 or 256
};

template <int K>
void AddPart(const Part& w, const u16* codewords, const Rows& rows,
             Sums* sums) {
  constexpr u32 kGroupWords = kd::kTileWords<K> * kGroupTiles;
  const u32* words = w.words;
  for (u32 k = 0; k < w.channels; k += kDepth) {
    float a[kRows * kDepth];
    for (u32 row = 0; row < kRows; ++row) {
      float* to = a + row * kDepth;
      if (rows.values[row] == nullptr) {
        for (u32 i = 0; i < kDepth; ++i) to[i] = 0.0f;
        continue;
      }
      for (u32 i = 0; i < kDepth; i += kd::kMxBlock) {
        Operand::LoadBlock(rows.values[row], rows.scales[row],
                           w.first_channel + k + i, to + i);
      }
    }
    for (u32 g = 0; g < w.columns / kGroup; ++g) {
      F weights[kDepth][2];
      for (u32 i = 0; i < kDepth / 16; ++i) {
        kd::TileBits<K, kLanes> bits;
        bits.LoadFrom(words + i * w.row_words + g * kGroupWords);
        DecodeRows<K>(bits, codewords, weights + 16 * i);
      }
      MultiplyGroup(weights, a, sums->sum[g]);
    }
    words += kDepth / 16 * w.row_words;
  }
}

// sums += rows * w.
//   codewords: as in the arena, or null.
KILN_FN void Add(const Part& w, const u16* codewords, const Rows& rows,
                 Sums* sums) {
  if (codewords != nullptr) {
    codewords += static_cast<u64>(w.bits - kLeastBits) * kd::kSqgStates;
  }
  // Only rates that a mode has are compiled.
  if (w.bits == 3) {
    AddPart<3>(w, codewords, rows, sums);
  } else if (w.bits == 2) {
    AddPart<kLeastBits>(w, codewords, rows, sums);
  } else {
    AddPart<4>(w, codewords, rows, sums);
  }
}

// out[0 .. columns) of one row: its sums, rounded to binary16.
KILN_FN void StoreSums(const Sums& sums, u32 row, u32 columns, float* out) {
  for (u32 g = 0; g < columns / kGroup; ++g) {
    for (u32 half = 0; half < 2; ++half) {
      float lanes[kLanes];
      kd::Store(lanes, kd::RoundHalves<kLanes>(sums.sum[g][half][row]));
      for (u32 tile = 0; tile < kGroupTiles; ++tile) {
        __builtin_memcpy(out + g * kGroup + tile * 16 + half * 8,
                         lanes + tile * 8, 8 * sizeof(float));
      }
    }
  }
}

// v[0..127] = Hadamard(v) * scale.
KILN_FN void RotateAndScale(const u16* scale, float* v) {
  kd::VectorHadamard128<kLanes>(v);
  for (u32 c = 0; c < kBlock; c += kLanes) {
    kd::Store(v + c, kd::Load<F>(v + c) * kd::LoadHalves<kLanes>(scale + c));
  }
}

// ---- fc1 -------------------------------------------------------------------

struct Fc1Args {
  const i32* tile_expert;
  const i32* tile_routes;
  const u64* places;
  const u16* w_gate;
  const u16* w_up;
  const u16* rotations;
  const u8* gate_values;
  const u8* gate_scales;
  const u8* up_values;
  const u8* up_scales;
  u8* mid_values;
  u8* mid_scales;
#if KILN_ACTIVATION == 2
  const i32* activations;
#endif
#if KILN_CODEWORDS
  const u16* codewords;
#endif
};

// The tables of an argument block, or null.
template <class Args>
KILN_FN const u16* CodewordsOf([[maybe_unused]] const Args& args) {
#if KILN_CODEWORDS
  return args.codewords;
#else
  return nullptr;
#endif
}

KILN_FN bool IsSitu([[maybe_unused]] const Fc1Args& args,
                    [[maybe_unused]] i32 expert) {
#if KILN_ACTIVATION == 2
  return args.activations[expert] != 0;
#else
  return KILN_ACTIVATION == 1;
#endif
}

// Operands of x for the rows of a tile.
KILN_FN Rows RowsOfX(const i32* tile_routes, u32 tile, const u8* values,
                     const u8* scales) {
  Rows rows;
  for (u32 row = 0; row < kRows; ++row) {
    const u32 slot = tile * kRows + row;
    const i32 route = tile_routes[slot];
    const u64 index = route < 0    ? 0
                      : kSharedSuh ? static_cast<u32>(route) / kTopK
                                   : slot;
    const u64 at = index * kHidden;
    rows.values[row] = route < 0 ? nullptr : values + at * Operand::kBytes;
    rows.scales[row] = scales + at / kd::kMxBlock;
  }
  return rows;
}

// One record of one projection, from its first native tile on.
KILN_FN Part RecordOf(const u16* w, const Place& place, u32 record) {
  const u32 before = record == 0 ? 0 : RecordBits(place.is_other, 0);
  Part part;
  part.words = reinterpret_cast<const u32*>(w) + place.word +
               before * (kRecord / 16) * 8;
  part.row_words = PairBits(place.is_other) * (kRecord / 16) * 8;
  part.bits = RecordBits(place.is_other, record);
  part.first_channel = 0;
  part.channels = kHidden;
  part.columns = kRecord;
  return part;
}

// The operand of `fc2` in 128 channels of one route.
KILN_FN void Activate(const u16* tables, u32 channel, bool is_situ, float* gate,
                      float* up) {
  RotateAndScale(tables + channel, gate);
  RotateAndScale(tables + kInter + channel, up);
  for (u32 c = 0; c < kBlock; ++c) {
    gate[c] = is_situ ? kd::Situ(gate[c], up[c]) : kd::Silu(gate[c]) * up[c];
  }
  const u16* down_suh = tables + 2 * kInter + channel;
  for (u32 c = 0; c < kBlock; c += kLanes) {
    kd::Store(gate + c,
              kd::Load<F>(gate + c) * kd::LoadHalves<kLanes>(down_suh + c));
  }
  kd::VectorHadamard128<kLanes>(gate);
}

void Fc1(const Fc1Args& args, u32 tile, u32 record, u32) {
  const i32 expert = args.tile_expert[tile];
  if (expert < 0) return;
  const Place place = PlaceOf(args.places, expert);
  Sums gates;
  Clear(kRecord, &gates);
  Add(RecordOf(args.w_gate, place, record), CodewordsOf(args),
      RowsOfX(args.tile_routes, tile, args.gate_values, args.gate_scales),
      &gates);
  Sums ups;
  Clear(kRecord, &ups);
  Add(RecordOf(args.w_up, place, record), CodewordsOf(args),
      RowsOfX(args.tile_routes, tile, args.up_values, args.up_scales), &ups);
  const u16* tables = args.rotations + static_cast<u64>(expert) * 3 * kInter;
  for (u32 row = 0; row < kRows; ++row) {
    const u32 slot = tile * kRows + row;
    if (args.tile_routes[slot] < 0) continue;
    float gate[kBlock];
    float up[kBlock];
    StoreSums(gates, row, kRecord, gate);
    StoreSums(ups, row, kRecord, up);
    Activate(tables, record * kRecord, IsSitu(args, expert), gate, up);
    const u64 at = static_cast<u64>(slot) * kInter + record * kRecord;
    Operand::Store(gate, kBlock, args.mid_values + at * Operand::kBytes,
                   args.mid_scales + at / kd::kMxBlock);
  }
}

// ---- fc2 -------------------------------------------------------------------

struct Fc2Args {
  const i32* tile_expert;
  const i32* tile_routes;
  const u64* places;
  const u16* w_down;
  const u16* down_svh;
  const u8* mid_values;
  const u8* mid_scales;
  float* routed;
#if KILN_CODEWORDS
  const u16* codewords;
#endif
};

void Fc2(const Fc2Args& args, u32 tile, u32 strip, u32) {
  const i32 expert = args.tile_expert[tile];
  if (expert < 0) return;
  const Place place = PlaceOf(args.places + kExperts, expert);
  Rows rows;
  for (u32 row = 0; row < kRows; ++row) {
    const u32 slot = tile * kRows + row;
    const u64 at = static_cast<u64>(slot) * kInter;
    rows.values[row] = args.tile_routes[slot] < 0
                           ? nullptr
                           : args.mid_values + at * Operand::kBytes;
    rows.scales[row] = args.mid_scales + at / kd::kMxBlock;
  }
  const u32 column = strip * kStrip;
  const u32 columns = kHidden - column < kStrip ? kHidden - column : kStrip;
  Sums sums;
  Clear(columns, &sums);
  const u32* words = reinterpret_cast<const u32*>(args.w_down) + place.word;
  for (u32 record = 0; record < 2; ++record) {
    Part part;
    part.bits = RecordBits(place.is_other, record);
    part.words = words + column / 16 * part.bits * 8;
    part.row_words = static_cast<u64>(kHidden / 16) * part.bits * 8;
    part.first_channel = record * kRecord;
    part.channels = kRecord;
    part.columns = columns;
    Add(part, CodewordsOf(args), rows, &sums);
    words += kRecordWords * part.bits;
  }
  const u16* svh = args.down_svh + ScaleRow(expert) + column;
  for (u32 row = 0; row < kRows; ++row) {
    const u32 slot = tile * kRows + row;
    if (args.tile_routes[slot] < 0) continue;
    float* to = args.routed + static_cast<u64>(slot) * kHidden + column;
    StoreSums(sums, row, columns, to);
    for (u32 c = 0; c < columns; c += kBlock) RotateAndScale(svh + c, to + c);
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
  for (u32 base = chunk * kChunk; base < ChunkEnd(chunk); base += kBlock) {
    F sum[kBlock / kLanes] = {};
    for (u32 j = 0; j < kTopK; ++j) {
      const u64 route = static_cast<u64>(token) * kTopK + j;
      const i32 slot = args.route_slot[route];
      if (slot < 0) continue;
      const F weight = kd::Splat<kLanes>(args.topk_weights[route]);
      const float* row = args.routed +
                         static_cast<u64>(static_cast<u32>(slot)) * kHidden +
                         base;
      for (u32 i = 0; i < kBlock / kLanes; ++i) {
        sum[i] = kd::FmaLanes<F>(kd::Load<F>(row + i * kLanes), weight, sum[i]);
      }
    }
    float* out = args.out + static_cast<u64>(token) * kHidden + base;
    for (u32 i = 0; i < kBlock / kLanes; ++i) {
      kd::Store(out + i * kLanes, sum[i]);
    }
  }
}

}  // namespace

KILN_CPU_ENTRY(kiln_qsrt_cpu_route, RouteArgs, Route)
#if KILN_CODEWORDS
KILN_CPU_ENTRY(kiln_qsrt_cpu_table, TableArgs, Table)
#endif
KILN_CPU_ENTRY(kiln_qsrt_cpu_rotate, RotateArgs, Rotate)
KILN_CPU_ENTRY(kiln_qsrt_cpu_fc1, Fc1Args, Fc1)
KILN_CPU_ENTRY(kiln_qsrt_cpu_fc2, Fc2Args, Fc2)
KILN_CPU_ENTRY(kiln_qsrt_cpu_combine, CombineArgs, Combine)
