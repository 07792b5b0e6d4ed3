// fused_moe over QSRT weights: CUDA kernels, in two arms. Experts of the
// codebook sqg_e4m3, each one pair of records of 128 intermediate channels
// whose rates are the expert's own.
//
// Rounding boundaries follow the trellis specification, 4.5 and 4.6. Source for
// sm_80 and later; no header other than Kiln's own. Read
// templates/fused_moe/README.md, "QSRT weights on CUDA", first: it lists every
// entry's parameters, launch rule, shared memory and arena slices.
//
// Prelude (integers):
//   KILN_HIDDEN H (multiple of 128), KILN_EXPERTS E (1..1024), KILN_TOPK
//   (1..32), KILN_OTHER_LOW, KILN_OTHER_HIGH (bits of the records of an expert
//   of mode 1: 2 and 4, or 4 and 3; one of mode 0 has 3 and 3),
//   KILN_ACTIVATION (0 SiLU, 1 SiTU, 2 what `activations` says of the expert),
//   KILN_SHARED_SUH, KILN_X_BF16, KILN_ID_I64 (0 or 1),
//   KILN_ACTIVATION_BITS, the arm: 16 (W4A16) or 8 (W4A8),
//   and KILN_PART: 0 support entries (table, route, rotate, activate, combine),
//   1 fc1 and fc2
//   KILN_OPERAND_CODES (W4A8): 1: the tensor core multiplies E4M3 codes
//   (sm_89, and sm_120 and its family)
// Axes, read by part 1 only:
//   KILN_TOKENS_TILE T     8 or a multiple of 16 up to 128: rows of one expert
//                          per block
//   KILN_CHANNELS_TILE C   64 or 128 output channels per block, of one record;
//                          C >= 16 * KILN_WARPS
//   KILN_K_TILE            64 or 128 input channels per pipeline stage
//   KILN_WARPS             4 or 8
//   KILN_STAGES            2, 3, 4 or 6 buffers of the cp.async ring
//   KILN_CODEWORDS         0: fc1 decodes weights by their ranks, as fc2 does;
//                          1: by a table of all states, which each launch makes
//                          (without codes)
//   KILN_BLOCK_SCALED      with codes, 1: the tensor core takes the scales of
//   32
//                          input channels (sm_120a, sm_121a); 0: it does not
// (C / 16 / warps) * (T / 8) * 4 sums per thread must not exceed 128; with
// codes that is (C / 16 / warps) * (T / 8 * 4 + 20) and 144, and the K tile is
// 128.
//
// Shape of the computation: that of cuda.cu. Weights are the A operand of
// mma.sync.m16n8k16, decoded into the lanes that need them; tokens are N. What
// is multiplied is exact: weights are E4M3, which binary16 and bfloat16 hold.
// W4A16 multiplies binary16. W4A8 multiplies bfloat16, which holds an E4M3
// number times any scale of its block, so that no scale is left to the product;
// or E4M3 codes, as code_product.h says.
// The order of a sum depends on the number of K slices alone: all axes but
// split-K give bit-identical results.

#ifndef KILN_OPERAND_CODES
#define KILN_OPERAND_CODES 0
#endif

#include "cuda/grouped.h"
#include "cuda/ring.h"
#include "cuda/warp.h"
#include "device/activation.h"
#include "device/fragment.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "device/platform.h"
#include "fused_moe/code_row.h"
#include "fused_moe/mx_warp.h"
#include "fused_moe/situ.h"
#include "fused_moe/sqg_fragment.h"
#if KILN_OPERAND_CODES
#include "fused_moe/code_product.h"
#endif

namespace {

using kd::i32;
using kd::kNone;
using kd::kRouteThreads;
using kd::kRouteWarps;
using kd::Row;
using kd::Tile;
using kd::Totals;
using kd::u16;
using kd::u32;
using kd::u64;
using kd::u8;

constexpr u32 kHidden = KILN_HIDDEN;
constexpr u32 kExperts = KILN_EXPERTS;
constexpr u32 kTopK = KILN_TOPK;
constexpr bool kQuantised = KILN_ACTIVATION_BITS == 8;
constexpr u32 kRecord = kd::kHadamardSize;  // intermediate channels of one rate
constexpr u32 kInter = 2 * kRecord;

// Bits of the two records of an expert of mode 1, and whether 2 is among them.
constexpr u32 kOtherLow = KILN_OTHER_LOW;
constexpr u32 kOtherHigh = KILN_OTHER_HIGH;
constexpr bool kHasTwoBits = kOtherLow == 2 || kOtherHigh == 2;
// Tables of all states are there for each rate from the lowest on.
[[maybe_unused]] constexpr u32 kBitsMin = kHasTwoBits ? 2 : 3;

static_assert(kHidden % 128 == 0, "H128");
static_assert(kExperts >= 1 && kExperts <= 1024, "E in 1..1024");
static_assert(KILN_ACTIVATION_BITS == 8 || KILN_ACTIVATION_BITS == 16,
              "activations have 8 or 16 bits");
static_assert(kQuantised || !KILN_OPERAND_CODES, "codes are those of W4A8");

// What an operand is made of: with codes bytes, a row of kDepth channels has
// ScaledRowBytes(kDepth); otherwise kDepth numbers.
#if KILN_OPERAND_CODES
using Value = u8;
#else
using Value = u16;
#endif

}  // namespace

// ---------------------------------------------------------------------------
// Part 0: everything but the two matrix products.
#if KILN_PART == 0

namespace {

constexpr u32 kHelperThreads = 128;
constexpr u32 kHelperWarps = kHelperThreads / 32;
constexpr u32 kBlocks = kHidden / 128;  // of a row, one for a warp

#if KILN_ID_I64
using RouteId = long long;
#else
using RouteId = int;
#endif

// StoreOperand rounds to a row of an operand and stores: binary16, in the arm
// of 8 bits then MXFP8, as codes and scales or as the bfloat16 numbers that its
// blocks stand for. A warp holds 128 neighbours, lane l those from 4l on, of
// which `column` is the first.
#if KILN_OPERAND_CODES

template <u32 kDepth>
__device__ __forceinline__ void StoreOperand(const float (&v)[4],
                                             Value* operand, u64 row,
                                             u32 column) {
  float rounded[4];
#pragma unroll
  for (u32 i = 0; i < 4; ++i) rounded[i] = kd::round_f16(v[i]);
  u8 codes[4];
  const u8 scale = kd::QuantizeToMxfp8(rounded, codes);
  Value* to = operand + row * kd::ScaledRowBytes(kDepth);
  kd::StoreCodes(codes, column, to);
  if (column % kd::kMxBlock == 0) to[kDepth + column / kd::kMxBlock] = scale;
}

#else

template <u32 kDepth>
__device__ __forceinline__ void StoreOperand(const float (&v)[4],
                                             Value* operand, u64 row,
                                             u32 column) {
  Value* to = operand + row * kDepth + column;
  if constexpr (!kQuantised) {
    kd::Store4(to, v);
  } else {
    float rounded[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) rounded[i] = kd::round_f16(v[i]);
    const float scale = kd::RoundToMxfp8(rounded);
    u32 bits[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) bits[i] = kd::FloatBits(rounded[i] * scale);
    *reinterpret_cast<uint2*>(to) =
        make_uint2(bits[0] >> 16 | (bits[1] & 0xFFFF0000u),
                   bits[2] >> 16 | (bits[3] & 0xFFFF0000u));
  }
}

#endif  // KILN_OPERAND_CODES

// The lane's four of a 128 block of x, counted over all tokens.
__device__ __forceinline__ uint2 LoadBits4(const u16* __restrict__ x, u64 block,
                                           u32 lane) {
  return *reinterpret_cast<const uint2*>(x + block * 128 + lane * 4);
}

// One 128 block of both operands of fc1: four of x of a token, times the input
// scales of a row of the tables, H128.
//   column: the lane's first channel
__device__ __forceinline__ void Rotate(uint2 x,
                                       const u16* __restrict__ gate_suh,
                                       const u16* __restrict__ up_suh,
                                       u64 table, u64 to, u32 column, u32 lane,
                                       Value* gate_operand, Value* up_operand) {
  float gate[4];
  kd::UnpackX4<KILN_X_BF16 != 0>(x, gate);
  float up[4] = {gate[0], gate[1], gate[2], gate[3]};
  kd::Scale4(gate_suh + table * kHidden + column, gate);
  kd::Scale4(up_suh + table * kHidden + column, up);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    gate[i] = kd::round_f16(gate[i]);
    up[i] = kd::round_f16(up[i]);
  }
  kd::WarpHadamard128(gate, lane);
  kd::WarpHadamard128(up, lane);
  StoreOperand<kHidden>(gate, gate_operand, to, column);
  StoreOperand<kHidden>(up, up_operand, to, column);
}

// Where each expert's words are: places[e] is how many experts of mode 1 come
// before it, << 1 | whether it is one; those of fc1 first, then those of fc2.
// By one block.
__device__ __forceinline__ void FindPlaces(const i32* __restrict__ modes_fc1,
                                           const i32* __restrict__ modes_fc2,
                                           u32* __restrict__ places) {
  static_assert(kExperts <= kRouteThreads, "a thread for each expert");
  __shared__ u32 others[kRouteWarps];
  const u32 expert = threadIdx.x;
  const u32 lane = expert % 32;
  const u32 warp = expert / 32;
  // Whether the expert has mode 1: in fc1 the lower half, in fc2 the upper one.
  u32 is_other = 0;
  if (expert < kExperts) {
    is_other = (modes_fc1[expert] != 0 ? 1u : 0u) |
               (modes_fc2[expert] != 0 ? 1u << 16 : 0u);
  }
  const u32 upto = kd::WarpScan(is_other, lane);
  if (lane == 31) others[warp] = upto;
  __syncthreads();
  const u32 before =
      upto - is_other + kd::WarpSum(lane < warp ? others[lane] : 0);
  if (expert < kExperts) {
    places[expert] = (before & 0xFFFFu) << 1 | (is_other & 1u);
    places[kExperts + expert] = before >> 16 << 1 | is_other >> 16;
  }
}

}  // namespace

// Of many routes: what kiln_qsrt_route sorts them by.
extern "C" __global__ void __launch_bounds__(kRouteThreads)
    kiln_qsrt_count(const RouteId* __restrict__ ids, u32* __restrict__ counts,
                    u32 tokens, u32 length) {
  kd::BeginStep();
  kd::CountSegment<kExperts>(ids, counts, tokens * kTopK, length);
}

#if !KILN_OPERAND_CODES

namespace {

__device__ constexpr kd::SqgTable<u16> kBytes =
    kd::MakeSqgTable<u16>(kd::SqgNumber<3>());

}  // namespace

// The bytes of all states, one for each thread; block y: rate.
extern "C" __global__ void __launch_bounds__(kRouteThreads)
    kiln_qsrt_table(u8* __restrict__ codewords) {
  kd::BeginStep();
  const u32 state = blockIdx.x * kRouteThreads + threadIdx.x;
  const u32 bits = kBitsMin + blockIdx.y;
  const u32 group = bits == 3   ? kd::SqgGroupOf<3>(state)
                    : bits == 2 ? kd::SqgGroupOf<2>(state)
                                : kd::SqgGroupOf<4>(state);
  codewords[blockIdx.y * kd::kSqgStates + state] =
      static_cast<u8>(kBytes.value[group]);
}

#endif  // !KILN_OPERAND_CODES

// Sorts the routes. With shared tables the operands do not depend on them:
// blocks beyond `segments` that sort rotate, a 128 block of a token per warp at
// a time.
extern "C" __global__ void __launch_bounds__(kRouteThreads)
    kiln_qsrt_route(const RouteId* __restrict__ ids, const u32* counts,
                    const i32* __restrict__ modes_fc1,
                    const i32* __restrict__ modes_fc2, Row* __restrict__ rows,
                    u32* __restrict__ positions, Tile* __restrict__ tiles,
                    Totals* __restrict__ totals, u32* __restrict__ places,
#if KILN_SHARED_SUH
                    const u16* __restrict__ x, const u16* __restrict__ gate_suh,
                    const u16* __restrict__ up_suh,
                    Value* __restrict__ gate_operand,
                    Value* __restrict__ up_operand,
#endif
                    u32 tokens,
#if KILN_SHARED_SUH
                    u32 segments,
#endif
                    u32 length, u32 tokens_tile) {
  kd::BeginStep();
#if KILN_SHARED_SUH
  if (blockIdx.x >= segments) {
    const u32 lane = threadIdx.x % 32;
    // Items follow each other in x.
    kd::ForItems((blockIdx.x - segments) * kRouteWarps + threadIdx.x / 32,
                 tokens * kBlocks, (gridDim.x - segments) * kRouteWarps,
                 [&](u32 item) { return LoadBits4(x, item, lane); },
                 [&](u32 item, uint2 bits) {
                   Rotate(bits, gate_suh, up_suh, 0, item / kBlocks,
                          item % kBlocks * 128 + lane * 4, lane, gate_operand,
                          up_operand);
                 });
    return;
  }
#endif
  kd::PlaceSegment<kExperts, 0>(ids, counts, rows, positions, tiles, totals,
                                tokens * kTopK, length, tokens_tile);
  if (blockIdx.x == 0) FindPlaces(modes_fc1, modes_fc2, places);
}

#if !KILN_SHARED_SUH

// Per-expert tables: operands per sorted row.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
    kiln_qsrt_rotate(const u16* __restrict__ x,
                     const u16* __restrict__ gate_suh,
                     const u16* __restrict__ up_suh, const Row* rows,
                     const Totals* totals, Value* __restrict__ gate_operand,
                     Value* __restrict__ up_operand) {
  kd::BeginStep();
  const u32 lane = threadIdx.x % 32;
  const u32 item = blockIdx.x * kHelperWarps + threadIdx.x / 32;
  const u32 at = item / kBlocks;
  if (at >= totals->rows) return;
  const Row row = rows[at];
  const u64 block =
      static_cast<u64>(row.route / kTopK) * kBlocks + item % kBlocks;
  Rotate(LoadBits4(x, block, lane), gate_suh, up_suh, row.expert, at,
         item % kBlocks * 128 + lane * 4, lane, gate_operand, up_operand);
}

#endif  // !KILN_SHARED_SUH

// Between the products: one record of one sorted row per warp.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
    kiln_qsrt_activate(const void* fc1, const u16* __restrict__ rotations,
#if KILN_ACTIVATION == 2
                       const i32* __restrict__ activations,
#endif
                       const Row* rows, const Totals* totals,
                       Value* __restrict__ mid_operand, u32 tokens,
                       u32 slices) {
  kd::BeginStep();
  const u32 lane = threadIdx.x % 32;
  const u32 item = blockIdx.x * kHelperWarps + threadIdx.x / 32;
  const u32 at = item / 2;
  if (at >= totals->rows) return;
  const u32 expert = rows[at].expert;
#if KILN_ACTIVATION == 2
  const bool is_situ = activations[expert] != 0;
#else
  constexpr bool is_situ = KILN_ACTIVATION == 1;
#endif
  const u32 column = item % 2 * kRecord + lane * 4;
  const u16* table =
      rotations + static_cast<u64>(expert) * (3 * kInter) + column;
  const u64 slice = static_cast<u64>(tokens) * (kTopK * 2 * kInter);
  const u64 from = static_cast<u64>(at) * (2 * kInter) + column;
  const u64 places[2] = {from, from + kInter};
  float both[2][4];
  kd::LoadProducts<4>(fc1, places, slice, slices, both);
#pragma unroll
  for (u32 side = 0; side < 2; ++side) {
    kd::WarpHadamard128(both[side], lane);
    kd::Scale4(table + side * kInter, both[side]);
  }
  float value[4];
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    value[i] = is_situ ? kd::Situ(both[0][i], both[1][i])
                       : kd::Silu(both[0][i]) * both[1][i];
  }
  kd::Scale4(table + 2 * kInter, value);
  kd::WarpHadamard128(value, lane);
  StoreOperand<kInter>(value, mid_operand, at, column);
}

// Behind the products.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
    kiln_qsrt_combine(const void* fc2, const u16* __restrict__ down_svh,
                      const float* __restrict__ weights, const u32* positions,
                      const Row* rows, float* __restrict__ out, u32 tokens,
                      u32 slices) {
  kd::BeginStep();
  kd::CombineRoutes<kTopK, kHidden, KILN_SHARED_SUH != 0, kHelperWarps>(
      fc2, down_svh, weights, positions, rows, out, tokens, slices);
}

#endif  // KILN_PART == 0

// ---------------------------------------------------------------------------
// Part 1: the matrix products.
#if KILN_PART == 1

namespace {

constexpr u32 kTokens = KILN_TOKENS_TILE;
constexpr u32 kChannels = KILN_CHANNELS_TILE;
constexpr u32 kDepthTile = KILN_K_TILE;
constexpr u32 kWarps = KILN_WARPS;
constexpr u32 kStages = KILN_STAGES;
constexpr u32 kThreads = kWarps * 32;
// Per SM. With 1 ptxas takes as many registers as one block may have; with 0,
// no bound, large tiles of codes spill a few.
constexpr u32 kBlocksMin = KILN_OPERAND_CODES && kTokens > 16 ? 1 : 0;

constexpr u32 kDepthSteps = kDepthTile / 16;   // mma steps per stage
constexpr u32 kStrips = kChannels / 16;        // 16-channel strips per block
constexpr u32 kWarpStrips = kStrips / kWarps;  // and per warp
constexpr u32 kTokenGroups = kTokens / 8;      // mma columns
constexpr u32 kStagesPerBlock = 128 / kDepthTile;  // of 128 input channels
#if KILN_OPERAND_CODES
using OperandTile = kd::CodeTile<kThreads, kTokens>;
#else
using OperandTile = kd::OperandTile<kThreads, kTokens, kDepthTile>;
constexpr u32 kRowHalves = OperandTile::kRowHalves;
#endif

constexpr u32 kBitsMax = 4;

// Shared memory: a table of the codebook, then the stages of the ring. Each is
// packed weights, with room for the highest rate, and operand rows.
constexpr u32 kWeightBytes = kDepthTile * kChannels * kBitsMax / 8;
constexpr u32 kStageBytes = kWeightBytes + OperandTile::kBytes;

static_assert(kTokens == 8 || kTokens % 16 == 0, "T: 8 or a multiple of 16");
static_assert(kDepthTile == 64 || kDepthTile == 128, "K tile: 64 or 128");
static_assert(kRecord % kChannels == 0, "C divides a record");
static_assert(kStrips % kWarps == 0, "C must be at least 16 * warps");
static_assert(kStages >= 2, "at least two stages");
#if KILN_OPERAND_CODES
static_assert(kDepthTile == kd::kCodeDepth, "what a word of scales is for");
static_assert(kWarpStrips * (kTokenGroups * 4 + 20) <= 144,
              "too many registers per lane");
#else
static_assert(kWarpStrips * kTokenGroups * 4 <= 128, "too many sums per lane");
#endif
static_assert(kOtherLow + kOtherHigh >= 6, "no expert is shorter than P33");
static_assert(!KILN_CODEWORDS || !KILN_OPERAND_CODES,
              "a table of all states is for numbers");

// What operands are: codes, bfloat16 or binary16.
#if KILN_OPERAND_CODES
using Number = kd::SqgCode;
#else
using Number = kd::SqgNumber<kQuantised ? 7 : 10>;
#endif
__device__ constexpr kd::SqgTable<u16> kTable = kd::MakeSqgTable<u16>(Number());

__device__ __forceinline__ const unsigned char* TableByRank() {
  return reinterpret_cast<const unsigned char*>(kTable.value);
}

using Sums = float[kWarpStrips][kTokenGroups][4];

// Where an expert's matrix begins, and the rates of its records.
struct Matrix {
  const unsigned char* bytes;
  u32 bits[2];
};

__device__ __forceinline__ Matrix MatrixOf(const u16* __restrict__ words,
                                           u32 expert, u32 place) {
  // Of one bit of one record.
  constexpr u64 kBitBytes = static_cast<u64>(kHidden) * kRecord / 8;
  const u64 bits = static_cast<u64>(expert) * 6 +
                   (place >> 1) * (kOtherLow + kOtherHigh - 6);
  const bool is_other = (place & 1) != 0;
  return {reinterpret_cast<const unsigned char*>(words) + bits * kBitBytes,
          {is_other ? kOtherLow : 3, is_other ? kOtherHigh : 3}};
}

// A block's tiles of one rate, from the first K16 row of that rate on.
struct Part {
  const unsigned char* tiles;
  u32 row_bytes;  // between K16 rows
  u32 bits;       // 2, 3 or 4
};

// Copies the packed weights of K16 rows from `row` on to `to`.
template <u32 kBits>
__device__ __forceinline__ void CopyTiles(const Part& part, u32 row, u32 to) {
  // A K16 row of the block's tiles is contiguous in memory.
  kd::CopyRows<kThreads, kChannels * kBits / 8, kDepthSteps>(
      part.tiles + static_cast<u64>(row) * part.row_bytes, part.row_bytes, to);
}

// A table in shared memory and how weights are decoded by it.
struct ByRank {
  static constexpr u32 kBytes = kd::kSqgTableBytes;
  static constexpr int kTimes = 1;  // what sums lack

  u32 table;  // its address

#if KILN_OPERAND_CODES
  template <int kBits>
  __device__ __forceinline__ void Decode(const kd::SpanBits& bits,
                                         u32 (&codes)[2]) const {
    kd::DecodeSqgCodes<kBits>(
        bits, [this](u32 offset) { return kd::LoadShared8(table + offset); },
        codes);
  }
#else
  template <int kBits>
  __device__ __forceinline__ void Decode(const kd::SpanBits& bits,
                                         u32 (&a)[4]) const {
    kd::DecodeSqgFragment<kBits>(
        bits, [this](u32 offset) { return kd::LoadShared16(table + offset); },
        a);
  }
#endif
};

#if KILN_CODEWORDS
struct ByState {
  static constexpr u32 kBytes = kd::kSqgStates;
  static constexpr int kTimes = kQuantised ? 1 : kd::kSqgByteTimes;

  u32 table;

  template <int kBits>
  __device__ __forceinline__ void Decode(const kd::SpanBits& bits,
                                         u32 (&a)[4]) const {
    kd::LookUpSqgFragment<kBits, kQuantised>(
        bits, [this](u32 state) { return kd::LoadShared8(table + state); }, a);
  }
};

using Fc1Decoder = ByState;
#else
using Fc1Decoder = ByRank;
#endif

// AddStage adds a stage to the sums.
#if KILN_OPERAND_CODES

template <int kBits, class Decoder>
__device__ __forceinline__ void AddStage(const Decoder& decoder,
                                         const unsigned char* stage, u32 rows,
                                         Sums& sums) {
  constexpr u32 kTileWords = kd::kTileWords<kBits>;
  const kd::LaneSpan<kBits> span = kd::FindLaneSpan<kBits>(threadIdx.x % 32);
  const u32* tiles = reinterpret_cast<const u32*>(stage) +
                     threadIdx.x / 32 * (kWarpStrips * kTileWords);
  kd::StripScales<KILN_BLOCK_SCALED != 0> scales[kWarpStrips];
#pragma unroll
  for (u32 i = 0; i < kWarpStrips; ++i) scales[i].SetOne();
#pragma unroll 1
  for (u32 fold = 0; fold < kDepthTile / kd::kMxBlock; fold += kd::kCodeFolds) {
    u32 a[kd::kCodeFolds][kWarpStrips][4];
#pragma unroll
    for (u32 i = 0; i < kWarpStrips; ++i) {
#pragma unroll
      for (u32 half = 0; half < 2 * kd::kCodeFolds; ++half) {
        const u32* tile =
            tiles + ((2 * fold + half) * kStrips + i) * kTileWords;
        u32 codes[2];
        decoder.template Decode<kBits>(kd::LoadSpan(tile, span), codes);
        a[half / 2][i][half % 2 * 2] = codes[0];
        a[half / 2][i][half % 2 * 2 + 1] = codes[1];
      }
    }
    kd::AddCodes<OperandTile>(a, scales, stage + kWeightBytes, fold, rows,
                              sums);
  }
}

#else

template <int kBits, class Decoder>
__device__ __forceinline__ void AddStage(const Decoder& decoder,
                                         const unsigned char* stage, u32 rows,
                                         Sums& sums) {
  const u32 lane = threadIdx.x % 32;
  const kd::LaneSpan<kBits> span = kd::FindLaneSpan<kBits>(lane);
  const u32* tiles = reinterpret_cast<const u32*>(stage) +
                     threadIdx.x / 32 * (kWarpStrips * kd::kTileWords<kBits>);
  // ldmatrix: T = 8 takes 8 tokens by 32 k, two steps at once; otherwise 16
  // tokens by 16 k.
  const u32 token = kTokens == 8 ? lane % 8 : lane % 8 + lane / 16 * 8;
  const u32 column = (kTokens == 8 ? lane / 8 : lane / 8 % 2) * 8;
  const u32 operand = kd::SharedAddress(stage) + kWeightBytes +
                      (token * kRowHalves + column) * 2;
  const auto multiply = [](float(&d)[4], const u32(&a)[4], u32 b0, u32 b1) {
    if constexpr (kQuantised) {
      kd::MmaBfloat(d, a, b0, b1);
    } else {
      kd::Mma(d, a, b0, b1);
    }
  };
  u32 b[4];
#pragma unroll
  for (u32 step = 0; step < kDepthSteps; ++step) {
    u32 a[kWarpStrips][4];
#pragma unroll
    for (u32 i = 0; i < kWarpStrips; ++i) {
      const u32* tile = tiles + (step * kStrips + i) * kd::kTileWords<kBits>;
      decoder.template Decode<kBits>(kd::LoadSpan(tile, span), a[i]);
    }
    if constexpr (kTokens == 8) {
      if (step % 2 == 0) kd::LoadMatrices(operand + step * 32, b);
#pragma unroll
      for (u32 i = 0; i < kWarpStrips; ++i) {
        multiply(sums[i][0], a[i], b[step % 2 * 2], b[step % 2 * 2 + 1]);
      }
    } else {
#pragma unroll
      for (u32 g = 0; g < kTokenGroups; g += 2) {
        if (g != 0 && g * 8 >= rows) continue;
        kd::LoadMatrices(operand + step * 32 + g * (8 * kRowHalves * 2), b);
#pragma unroll
        for (u32 i = 0; i < kWarpStrips; ++i) {
          multiply(sums[i][g], a[i], b[0], b[1]);
          multiply(sums[i][g + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
}

#endif  // KILN_OPERAND_CODES

// What a block multiplies: kParts parts of equally many input channels, one
// behind the other, and an operand of rows of kDepth.
template <u32 kDepth, u32 kParts, class Decoder>
struct Product {
  // Of a part, counted through all parts.
  static constexpr u32 kPartStages = kDepth / kParts / kDepthTile;

  Part parts[kParts];
  const unsigned char* table;  // of the decoder
  const Value* operand;
  OperandTile rows;

  __device__ __forceinline__ Part PartOf(u32 stage) const {
    return kParts == 1 || stage < kPartStages ? parts[0] : parts[kParts - 1];
  }

  // The packed weights of a stage; only rates that experts have are compiled.
  __device__ __forceinline__ void CopyWeights(u32 stage, u32 to) const {
    const Part part = PartOf(stage);
    const u32 row = stage % kPartStages * kDepthSteps;
    if (part.bits == 3) {
      CopyTiles<3>(part, row, to);
    } else if (kHasTwoBits && part.bits == 2) {
      CopyTiles<kHasTwoBits ? 2 : 3>(part, row, to);
    } else {
      CopyTiles<4>(part, row, to);
    }
  }

  __device__ __forceinline__ void CopyOperand(u32 stage, u32 to) const {
#if KILN_OPERAND_CODES
    constexpr u32 kRowBytes = kd::ScaledRowBytes(kDepth);
    rows.template Copy<kRowBytes, kRowBytes / 4>(
        operand, reinterpret_cast<const u32*>(operand + kDepth), stage,
        to + kWeightBytes);
#else
    rows.template Copy<kDepth>(operand, stage * kDepthTile, to + kWeightBytes);
#endif
  }

  // sums = this block's slice of operand x weights.
  //   live: rows of the tile
  __device__ __forceinline__ void Multiply(u32 live, Sums& sums) const {
    constexpr u32 kBlocks = kDepth / 128;
    const u32 begin = kBlocks * blockIdx.y / gridDim.y * kStagesPerBlock;
    const u32 end = kBlocks * (blockIdx.y + 1) / gridDim.y * kStagesPerBlock;
    const unsigned char* shared = kd::DynamicShared();
    const unsigned char* stages = shared + Decoder::kBytes;
    const Decoder decoder = {kd::SharedAddress(shared)};
    const u32 ring = decoder.table + Decoder::kBytes;

    // The table lands with the first stage.
    kd::CopyRows<kThreads, Decoder::kBytes / 16, 1>(table, 0, decoder.table);
    kd::RunRing<kStages>(
        begin, end,
        [&](u32 stage, u32 slot) {
          CopyWeights(stage, ring + slot * kStageBytes);
        },
        [&](u32 stage, u32 slot) {
          CopyOperand(stage, ring + slot * kStageBytes);
        },
        [&](u32 stage, u32 slot) {
          const unsigned char* at = stages + slot * kStageBytes;
          const u32 bits = PartOf(stage).bits;
          if (bits == 3) {
            AddStage<3>(decoder, at, live, sums);
          } else if (kHasTwoBits && bits == 2) {
            AddStage<kHasTwoBits ? 2 : 3>(decoder, at, live, sums);
          } else {
            AddStage<4>(decoder, at, live, sums);
          }
        });
  }
};

}  // namespace

// Block x: tile x / (2I / C) and C of the 2I channels gate | up, all of one
// record; block y: slice of K.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksMin)
    kiln_qsrt_fc1(const Value* gate_operand, const Value* up_operand,
                  const u16* __restrict__ w_gate, const u16* __restrict__ w_up,
                  [[maybe_unused]] const Row* rows, const Tile* tiles,
                  const Totals* totals, const u32* places,
#if KILN_CODEWORDS
                  const u8* codewords,
#endif
                  void* __restrict__ fc1, u32 tokens) {
  kd::BeginStep();
  constexpr u32 kBlocks = 2 * kInter / kChannels;
  const u32 index = blockIdx.x / kBlocks;
  if (index >= totals->tiles) return;
  const Tile tile = tiles[index];
  const u32 column = blockIdx.x % kBlocks * kChannels;
  const bool is_up = column >= kInter;
  const bool is_high = column % kInter >= kRecord;

  Product<kHidden, 1, Fc1Decoder> product;
  const Matrix matrix =
      MatrixOf(is_up ? w_up : w_gate, tile.expert, places[tile.expert]);
  // A K16 row is the tiles of the low record, then those of the high one; a bit
  // of 16 x 128 weights has 256 bytes.
  Part& part = product.parts[0];
  part.bits = is_high ? matrix.bits[1] : matrix.bits[0];
  part.row_bytes = 256 * (matrix.bits[0] + matrix.bits[1]);
  part.tiles = matrix.bytes + (is_high ? 256 * matrix.bits[0] : 0) +
               column % kRecord * 2 * part.bits;
#if KILN_CODEWORDS
  product.table = codewords + (part.bits - kBitsMin) * kd::kSqgStates;
#else
  product.table = TableByRank();
#endif
  product.operand = is_up ? up_operand : gate_operand;
  product.rows.Find(tile.rows, [&](u32 row) {
#if KILN_SHARED_SUH
    return rows[tile.first + row].route / kTopK;
#else
    return tile.first + row;
#endif
  });
  Sums sums = {};
  product.Multiply(tile.rows, sums);
  kd::StoreSums<2 * kInter, Fc1Decoder::kTimes>(
      sums, fc1, static_cast<u64>(tokens) * kTopK, tile.first, tile.rows,
      column);
}

// Block x: tile x / (H / C) and C of the H channels; block y: slice of K.
extern "C" __global__ void __launch_bounds__(kThreads, kBlocksMin)
    kiln_qsrt_fc2(const Value* mid_operand, const u16* __restrict__ w_down,
                  const Tile* tiles, const Totals* totals, const u32* places,
                  void* __restrict__ fc2, u32 tokens) {
  kd::BeginStep();
  constexpr u32 kBlocks = kHidden / kChannels;
  const u32 index = blockIdx.x / kBlocks;
  if (index >= totals->tiles) return;
  const Tile tile = tiles[index];
  const u32 column = blockIdx.x % kBlocks * kChannels;

  Product<kInter, 2, ByRank> product;
  const Matrix matrix =
      MatrixOf(w_down, tile.expert, places[kExperts + tile.expert]);
  // All of the low record, then all of the high one.
  const unsigned char* record = matrix.bytes;
#pragma unroll
  for (u32 r = 0; r < 2; ++r) {
    Part& part = product.parts[r];
    part.bits = matrix.bits[r];
    part.row_bytes = kHidden * 2 * part.bits;
    part.tiles = record + column * 2 * part.bits;
    record += static_cast<u64>(kRecord / 16) * part.row_bytes;
  }
  product.table = TableByRank();
  product.operand = mid_operand;
  product.rows.Find(tile.rows, [&](u32 row) { return tile.first + row; });
  Sums sums = {};
  product.Multiply(tile.rows, sums);
  kd::StoreSums<kHidden, ByRank::kTimes>(sums, fc2,
                                         static_cast<u64>(tokens) * kTopK,
                                         tile.first, tile.rows, column);
}

#endif  // KILN_PART == 1
