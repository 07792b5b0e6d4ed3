// fused_moe over TrellisMX weights (NPK-1 streams): CUDA kernels.
//
// Rounding boundaries follow the prepared-weights specification, A.6 and A.9.
// Source for sm_80 and later; no header other than Kiln's own. Read
// templates/fused_moe/README.md, "TrellisMX weights on CUDA", first: it lists
// every entry's parameters, launch rule, shared memory and arena slices.
//
// Prelude (integers):
//   KILN_COUPLED: 1 where H512 and H128 with scales and signs surround the
//   products, 0 where nothing does; then the vectors are null and not read
//   KILN_HIDDEN H (multiple of 512; of 128 without), KILN_INTER I (multiple of
//   128), KILN_EXPERTS E (1..1024), KILN_TOPK (1..32), KILN_BITS K (2..5),
//   KILN_LIMIT_BITS (a binary32), KILN_X_BF16, KILN_ID_I64 (0 or 1),
//   KILN_ACTIVATION_BITS, the arm: 8 ("grouped" and "direct", W4A8) or 16
//   ("smallm", W4A16), KILN_ACTIVATION_TERMS, 1 unless given, 2 of the arm
//   "direct rp2", and KILN_PART: 0 support entries (route, activate, combine),
//   1 fc1 and fc2
//   KILN_OPERAND_CODES (part 0, W4A8 with one term): 0 (default) operands as
//   part 1 reads them, 1 as mx_qmma.cu does
// Axes, read by part 1 only:
//   KILN_TOKENS_TILE T     8 or a multiple of 16 up to 128: terms of rows of
//                          one expert per block
//   KILN_CHANNELS_TILE C   64, 128 or 256 output channels per block; divides I
//                          (fc1) and H (fc2); C >= 16 * KILN_WARPS
//   KILN_K_TILE            64 or 128 input channels per pipeline stage
//   KILN_WARPS             4 or 8
//   KILN_STAGES            2, 3, 4 or 6 buffers of the cp.async ring
// (C / 16 / warps) * (T / 8) * 4 sums per thread must not exceed 128.
//
// Shape of the computation: that of cuda.cu. Weights are the A operand of
// mma.sync.m16n8k16, decoded into the lanes that need them; tokens are N. An
// E4M3 number is a binary16 number, so all arms multiply binary16 exactly:
// operands of W4A8 are E4M3 values, with one scale for 32 of them. A sum runs
// in blocks of 32 input channels, each from zero, times the block's scales and
// added in ascending order. Its order depends on the number of K slices alone:
// all axes but split-K give bit-identical results.
//
// A row of two terms, an E4M3 value and that of what it left, is two columns of
// the MMA, T / 2 rows to a tile: one decoded weight serves both, and their sums
// are added when they are stored.

#include "cuda/grouped.h"
#include "cuda/ring.h"
#include "cuda/warp.h"
#include "device/activation.h"
#include "device/fragment.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "device/platform.h"
#include "fused_moe/code_row.h"
#include "fused_moe/mx_block.h"
#include "fused_moe/mx_boundary.h"
#include "fused_moe/mx_fragment.h"
#include "fused_moe/mx_scales.h"
#include "fused_moe/mx_warp.h"

#ifndef KILN_ACTIVATION_TERMS
#define KILN_ACTIVATION_TERMS 1
#endif
#ifndef KILN_OPERAND_CODES
#define KILN_OPERAND_CODES 0
#endif

namespace {

using kd::kAbsent;
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
constexpr u32 kInter = KILN_INTER;
constexpr u32 kExperts = KILN_EXPERTS;
constexpr u32 kTopK = KILN_TOPK;
constexpr bool kCoupled = KILN_COUPLED != 0;
constexpr bool kQuantised = KILN_ACTIVATION_BITS == 8;
constexpr u32 kTerms = KILN_ACTIVATION_TERMS;

static_assert(kHidden % (kCoupled ? 512 : 128) == 0 && kInter % 128 == 0,
              "H512 and H128; 128 without them");
static_assert(kExperts >= 1 && kExperts <= 1024, "E in 1..1024");
static_assert(KILN_ACTIVATION_BITS == 8 || KILN_ACTIVATION_BITS == 16,
              "activations have 8 or 16 bits");
static_assert(kTerms == 1 || (kTerms == 2 && kQuantised),
              "one term, or two of 8 bits");

}  // namespace

// ---------------------------------------------------------------------------
// Part 0: everything but the two matrix products.
#if KILN_PART == 0

namespace {

constexpr u32 kHelperThreads = 128;
constexpr u32 kHelperWarps = kHelperThreads / 32;
constexpr u32 kQuarter = kd::kHadamardSize;  // channels of one warp
// Channels of one H512; what a warp has where there is none.
constexpr u32 kChunk = kCoupled ? kd::kMxOuter : kQuarter;
constexpr u32 kChunks = kHidden / kChunk;  // of a token

#if KILN_ID_I64
using RouteId = long long;
#else
using RouteId = int;
#endif

// StoreOperand rounds to an operand [rows][kTerms][kDepth] and stores. A warp
// holds 32 kOwn neighbours of row `row`, from `channel` on, lane l those from
// kOwn l on.
#if KILN_OPERAND_CODES

static_assert(kQuantised && kTerms == 1, "codes are those of W4A8, one term");

using Value = u8;  // E4M3
using Scale = u8;  // UE8M0

template <u32 kDepth, u32 kOwn>
__device__ __forceinline__ void StoreOperand(const float (&v)[kOwn], u64 row,
                                             u32 channel, u32 lane,
                                             Value* values, Scale* scales) {
  const u64 first = row * kDepth + channel;
  u8 codes[kOwn];
  const u8 scale = kd::QuantizeToMxfp8(v, codes);
#pragma unroll
  for (u32 i = 0; i < kOwn; i += 4) {
    const u8 four[4] = {codes[i], codes[i + 1], codes[i + 2], codes[i + 3]};
    kd::StoreCodes(four, lane * kOwn + i, values + first);
  }
  if (lane % (kd::kMxBlock / kOwn) == 0) {
    scales[(first + lane * kOwn) / kd::kMxBlock] = scale;
  }
}

#else

using Value = u16;  // binary16
using Scale = float;

template <u32 kOwn>
__device__ __forceinline__ void StoreValues(Value* to, const float (&v)[kOwn]) {
  if constexpr (kOwn == 4) {
    kd::Store4(to, v);
  } else {
#pragma unroll
    for (u32 i = 0; i < kOwn; i += 8) {
      *reinterpret_cast<uint4*>(to + i) = make_uint4(
          kd::Pack2(v[i], v[i + 1]), kd::Pack2(v[i + 2], v[i + 3]),
          kd::Pack2(v[i + 4], v[i + 5]), kd::Pack2(v[i + 6], v[i + 7]));
    }
  }
}

// What a term leaves is exact: its product is, and so is a difference of near
// numbers.
template <u32 kDepth, u32 kOwn>
__device__ __forceinline__ void StoreOperand(const float (&v)[kOwn], u64 row,
                                             u32 channel, u32 lane,
                                             Value* values, Scale* scales) {
  u64 at = row * (kTerms * kDepth) + channel + lane * kOwn;
  if constexpr (!kQuantised) {
    StoreValues(values + at, v);
  } else {
    float rest[kOwn];
#pragma unroll
    for (u32 i = 0; i < kOwn; ++i) rest[i] = v[i];
#pragma unroll
    for (u32 term = 0; term < kTerms; ++term) {
      float rounded[kOwn];
#pragma unroll
      for (u32 i = 0; i < kOwn; ++i) rounded[i] = rest[i];
      const float scale = kd::RoundToMxfp8(rounded);
      StoreValues(values + at, rounded);
      if (lane % (kd::kMxBlock / kOwn) == 0) {
        scales[at / kd::kMxBlock] = scale;
      }
#pragma unroll
      for (u32 i = 0; i < kOwn; ++i) {
        rest[i] = kd::Fma(-rounded[i], scale, rest[i]);
      }
      at += kDepth;
    }
  }
}

#endif  // KILN_OPERAND_CODES

// Neighbouring channels of x or of a table that a lane has of a chunk.
constexpr u32 kOwn = kChunk / 32;

struct alignas(kOwn * 2 < 16 ? kOwn * 2 : 16) OwnHalves {
  uint2 four[kOwn / 4];
};

__device__ __forceinline__ OwnHalves LoadOwn(const u16* from, u32 lane) {
  return *reinterpret_cast<const OwnHalves*>(from + lane * kOwn);
}

// H512, scales of a chunk, H128; nothing where the boundary is the identity.
template <u32 kCount>
__device__ __forceinline__ void BoundBefore(float (&v)[kCount], const u16* suh,
                                            u32 lane) {
  if constexpr (kCoupled) {
    kd::WarpHadamard512(v, lane);
    const OwnHalves scale = LoadOwn(suh, lane);
#pragma unroll
    for (u32 i = 0; i < kCount; i += 4) {
      float four[4];
      kd::Unpack4(scale.four[i / 4], four);
#pragma unroll
      for (u32 j = 0; j < 4; ++j) v[i + j] *= four[j];
    }
    kd::WarpHadamard128Of512(v, lane, kd::HadamardScale());
  }
}

// The operand of fc1, from x. A warp has a chunk at a time; block `block` of
// `blocks` begins with that of its number.
__device__ __forceinline__ void RotateTokens(const u16* __restrict__ x,
                                             const u16* __restrict__ suh,
                                             Value* __restrict__ values,
                                             Scale* __restrict__ scales,
                                             u32 tokens, u32 block,
                                             u32 blocks) {
  const u32 lane = threadIdx.x % 32;
  kd::ForItems(
      block * kRouteWarps + threadIdx.x / 32, tokens * kChunks,
      blocks * kRouteWarps,
      [&](u32 item) {
        return LoadOwn(x + static_cast<u64>(item) * kChunk, lane);
      },
      [&](u32 item, const OwnHalves& halves) {
        const u32 channel = item % kChunks * kChunk;
        float v[kOwn];
#pragma unroll
        for (u32 i = 0; i < kOwn; i += 4) {
          float four[4];
          kd::UnpackX4<KILN_X_BF16 != 0>(halves.four[i / 4], four);
#pragma unroll
          for (u32 j = 0; j < 4; ++j) v[i + j] = four[j];
        }
        BoundBefore(v, suh + channel, lane);
        StoreOperand<kHidden>(v, item / kChunks, channel, lane, values, scales);
      });
}

}  // namespace

// Blocks beyond those that sort the routes rotate and round x.
extern "C" __global__ void __launch_bounds__(kRouteThreads)
    kiln_mx_route(const RouteId* __restrict__ ids, const u32* counts,
                  Row* __restrict__ rows, u32* __restrict__ positions,
                  Tile* __restrict__ tiles, Totals* __restrict__ totals,
                  const u16* __restrict__ x, const u16* __restrict__ suh,
                  Value* __restrict__ x_values, Scale* __restrict__ x_scales,
                  u32 tokens, u32 segments, u32 length, u32 tokens_tile) {
  kd::BeginStep();
  if (blockIdx.x < segments) {
    kd::PlaceSegment<kExperts, 0>(ids, counts, rows, positions, tiles, totals,
                                  tokens * kTopK, length, tokens_tile);
  } else {
    RotateTokens(x, suh, x_values, x_scales, tokens, blockIdx.x - segments,
                 gridDim.x - segments);
  }
}

// Of many routes: what kiln_mx_route sorts them by.
extern "C" __global__ void __launch_bounds__(kRouteThreads)
    kiln_mx_count(const RouteId* __restrict__ ids, u32* __restrict__ counts,
                  u32 tokens, u32 length) {
  kd::BeginStep();
  kd::CountSegment<kExperts>(ids, counts, tokens * kTopK, length);
}

// Between the products: 128 neurons of one sorted row per warp. Coupled ones
// are two halves of 64, each 128 values: atoms of 32 of gate and up in turn.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
    kiln_mx_activate(const void* fc1, const u16* __restrict__ rotations,
                     const Row* rows, const Totals* totals,
                     Value* __restrict__ mid_values,
                     Scale* __restrict__ mid_scales, u32 tokens, u32 slices) {
  kd::BeginStep();
  constexpr u32 kBlocks = kInter / kQuarter;
  const u32 lane = threadIdx.x % 32;
  const u32 item = blockIdx.x * kHelperWarps + threadIdx.x / 32;
  const u32 at = item / kBlocks;
  if (at >= totals->rows) return;
  const u32 first = item % kBlocks * kQuarter;
  const u64 row = static_cast<u64>(at) * (2 * kInter);
  const u64 slice = static_cast<u64>(tokens) * (kTopK * 2 * kInter);
  const float limit = kd::BitsFloat(KILN_LIMIT_BITS);
  float v[4];
  float r[2][4];
  if constexpr (kCoupled) {
    const kd::MxTables tables =
        kd::MxTablesOf(rotations, rows[at].expert, kInter);
    // The lane's four values of a half, in order: up or gate, and from which
    // channel on.
    const bool is_up = lane / 8 % 2 != 0;
    const u32 channel = first + lane / 16 * kd::kMxAtom + lane % 8 * 4;
    const u64 from = row + (is_up ? kInter : 0) + channel;
    const u64 places[2] = {from, from + 64};
    kd::LoadProducts<4>(fc1, places, slice, slices, r);
    const u16* svh = (is_up ? tables.up_svh : tables.gate_svh) + channel;
    const u16* signs = tables.pre_signs + 2 * first + lane * 4;
    float neuron[2][2];
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      kd::WarpHadamard128(r[half], lane);
      kd::Scale4(svh + 64 * half, r[half]);
      kd::WarpHadamard128(r[half], lane);
      kd::Scale4(signs + 128 * half, r[half]);
      neuron[half][0] = kd::MxActivate(r[half][0], r[half][1], limit);
      neuron[half][1] = kd::MxActivate(r[half][2], r[half][3], limit);
    }
    // Lane l has neurons 2l, 2l + 1 of both halves and needs 4l .. 4l + 3 of
    // all.
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 source = lane % 16 * 2 + i / 2;
      const float low = __shfl_sync(0xFFFFFFFFu, neuron[0][i % 2], source);
      const float high = __shfl_sync(0xFFFFFFFFu, neuron[1][i % 2], source);
      v[i] = lane < 16 ? low : high;
    }
    kd::Scale4(tables.post_signs + first + lane * 4, v);
    kd::WarpHadamard128(v, lane);
    kd::Scale4(tables.down_suh + first + lane * 4, v);
    kd::WarpHadamard128(v, lane);
  } else {
    const u64 gate = row + first + lane * 4;
    const u64 places[2] = {gate, gate + kInter};
    kd::LoadProducts<4>(fc1, places, slice, slices, r);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) v[i] = kd::MxActivate(r[0][i], r[1][i], limit);
  }
  StoreOperand<kInter>(v, at, first, lane, mid_values, mid_scales);
}

// H128 and down_svh of each route, their sum in router order with explicit fma,
// then H512: 128 channels of one token per warp, one chunk per block. Inactive
// routes add nothing.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
    kiln_mx_combine(const void* fc2, const u16* __restrict__ down_svh,
                    const float* __restrict__ weights, const u32* positions,
                    float* __restrict__ out, u32 tokens, u32 slices) {
  kd::BeginStep();
  const u32 lane = threadIdx.x % 32;
  const u32 warp = threadIdx.x / 32;
  const u32 item = kCoupled ? blockIdx.x : blockIdx.x * kHelperWarps + warp;
  const u32 token = item / kChunks;
  if (token >= tokens) return;
  const u32 chunk = item % kChunks * kChunk;
  const u32 column = chunk + (kCoupled ? warp * kQuarter : 0) + lane * 4;
  const u64 slice = static_cast<u64>(tokens) * (kTopK * kHidden);
  const kd::LaneRoute own =
      kd::LoadLaneRoute<kTopK>(positions, weights, token, lane);
  float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  kd::SumRoutes<kTopK, kHidden>(
      fc2, own, column, slice, slices,
      [&](u32, float(&value)[4]) {
        if constexpr (kCoupled) {
          kd::WarpHadamard128(value, lane);
          kd::Scale4(down_svh + column, value);
        }
      },
      sum);
  float* row = out + static_cast<u64>(token) * kHidden;
  if constexpr (kCoupled) {
    __shared__ float4 shared[kChunk / 4];
    kd::WarpHadamard128(sum, lane);
    shared[warp * (kQuarter / 4) + lane] =
        make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    const float* at = reinterpret_cast<const float*>(shared) + threadIdx.x;
    float four[4] = {at[0], at[kQuarter], at[2 * kQuarter], at[3 * kQuarter]};
    kd::Hadamard4(four);
    float* to = row + chunk + threadIdx.x;
#pragma unroll
    for (u32 q = 0; q < 4; ++q) to[q * kQuarter] = four[q] * 0.5f;
  } else {
    *reinterpret_cast<float4*>(row + column) =
        make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
}

#endif  // KILN_PART == 0

// ---------------------------------------------------------------------------
// Part 1: the matrix products.
#if KILN_PART == 1

namespace {

constexpr int kBits = KILN_BITS;
constexpr u32 kTokens = KILN_TOKENS_TILE;
constexpr u32 kChannels = KILN_CHANNELS_TILE;
constexpr u32 kDepthTile = KILN_K_TILE;
constexpr u32 kWarps = KILN_WARPS;
constexpr u32 kStages = KILN_STAGES;
constexpr u32 kThreads = kWarps * 32;

constexpr u32 kStrips = kChannels / 16;        // 16-channel strips per block
constexpr u32 kWarpStrips = kStrips / kWarps;  // and per warp
constexpr u32 kTokenGroups = kTokens / 8;      // of 8 MMA columns
constexpr u32 kFolds = kDepthTile / kd::kMxBlock;  // blocks of 32 per stage
constexpr u32 kStagesPerBlock = 128 / kDepthTile;  // of 128 input channels
using OperandTile = kd::OperandTile<kThreads, kTokens, kDepthTile>;
constexpr u32 kRowHalves = OperandTile::kRowHalves;

// The columns of a tile: kTermRows of first terms, as many of second ones, and
// so on, so that one lane has the sums of both terms of a row in neighbouring
// groups, or where there is but one group, two lanes that are two apart.
constexpr u32 kTermRows = kTerms == 1 || kTokens >= 16 ? 8 : 4;

// Row of the tile that is column `column`, and its row in an operand of terms
// whose row `row` holds the tile's.
__device__ __forceinline__ u32 RowOfColumn(u32 column) {
  return kTerms == 1
             ? column
             : column / (2 * kTermRows) * kTermRows + column % kTermRows;
}

__device__ __forceinline__ u32 TermOfColumn(u32 row, u32 column) {
  return kTerms == 1 ? row : row * kTerms + column / kTermRows % kTerms;
}

// A stage of the ring: packed weights, a word of scales per output channel,
// operand rows, and of W4A8 the scales of each row.
constexpr u32 kWeightBytes = kDepthTile * kChannels * kBits / 8;
constexpr u32 kScaleBytes = kChannels * 4;
constexpr u32 kRowScaleBytes = kQuantised ? kFolds * 4 : 0;
constexpr u32 kScalesAt = kWeightBytes;
constexpr u32 kOperandAt = kScalesAt + kScaleBytes;
constexpr u32 kRowScalesAt = kOperandAt + OperandTile::kBytes;
constexpr u32 kStageBytes = kRowScalesAt + kTokens * kRowScaleBytes;

static_assert(kTokens == 8 || kTokens % 16 == 0, "T: 8 or a multiple of 16");
static_assert(kDepthTile == 64 || kDepthTile == 128, "K tile: 64 or 128");
static_assert(kStrips % kWarps == 0, "C must be at least 16 * warps");
static_assert(256 % kChannels == 0, "C divides a panel of scales");
static_assert(kStages >= 2, "at least two stages");
static_assert(
    kTokens <= kThreads && kScaleBytes / 16 <= kThreads,
    "a thread copies at most one row's scales and one piece of words");
static_assert(kWarpStrips * kTokenGroups * 4 <= 128, "too many sums per lane");

using Sums = float[kWarpStrips][kTokenGroups][4];

// What a block multiplies.
struct Factors {
  const unsigned char* weights;  // the block's first tile in K16 row 0
  const u32* scales;        // the block's words of the first 128 input channels
  const u16* operand;       // [rows][terms][K]
  const float* row_scales;  // [rows][terms][K / 32], W4A8
};

// Terms of rows that this thread copies, kNone beyond the tile.
struct Sources {
  OperandTile operand;
  u32 scales;
};

// Copies stage `stage` of weights and their scales to buffer `to`.
template <u32 kWidth>
__device__ __forceinline__ void CopyWeights(const Factors& factors, u32 stage,
                                            u32 to) {
  // A K16 row of the block's tiles is contiguous in memory.
  constexpr u64 kRowBytes = static_cast<u64>(kWidth) * 2 * kBits;
  constexpr u32 kRows = kDepthTile / 16;
  kd::CopyRows<kThreads, kChannels * kBits / 8, kRows>(
      factors.weights + stage * (kRowBytes * kRows), kRowBytes, to);
  if (threadIdx.x < kScaleBytes / 16) {
    kd::CopyAsync16(to + kScalesAt + threadIdx.x * 16,
                    factors.scales +
                        static_cast<u64>(stage / kStagesPerBlock) * 256 +
                        threadIdx.x * 4);
  }
}

// The same of the operand.
template <u32 kDepth>
__device__ __forceinline__ void CopyOperand(const Factors& factors,
                                            const Sources& sources, u32 stage,
                                            u32 to) {
  sources.operand.template Copy<kDepth>(factors.operand, stage * kDepthTile,
                                        to + kOperandAt);
  if constexpr (kQuantised) {
    if (threadIdx.x < kTokens) {
      const bool copy = sources.scales != kNone;
      kd::CopyAsyncOrZero<kRowScaleBytes>(
          to + kRowScalesAt + threadIdx.x * kRowScaleBytes,
          factors.row_scales + stage * kFolds +
              static_cast<u64>(copy ? sources.scales : 0) *
                  (kDepth / kd::kMxBlock),
          copy);
    }
  }
}

// sum += one block of 32 input channels, times its scales, which are powers of
// two.
__device__ __forceinline__ void AddFold(const float (&fold)[4],
                                        const float (&weight_scale)[2],
                                        const float (&row_scale)[2],
                                        float (&sum)[4]) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    if constexpr (kQuantised) {
      sum[i] = kd::Fma(fold[i] * weight_scale[i / 2], row_scale[i % 2], sum[i]);
    } else {
      sum[i] = kd::Fma(fold[i], weight_scale[i / 2], sum[i]);
    }
  }
}

// Adds a stage to sums of half the weights.
//   first_fold: block of 32 within its 128 input channels.
//   columns: groups from this one on are left out.
__device__ __forceinline__ void ComputeStage(const unsigned char* stage,
                                             const kd::LaneSpan<kBits>& span,
                                             u32 first_fold, u32 columns,
                                             Sums& sums) {
  const u32 lane = threadIdx.x % 32;
  const u32 strip = threadIdx.x / 32 * kWarpStrips;
  const u32* tiles =
      reinterpret_cast<const u32*>(stage) + strip * kd::kTileWords<kBits>;
  const u32* words =
      reinterpret_cast<const u32*>(stage + kScalesAt) + strip * 16 + lane / 4;
  const float* row_scales =
      reinterpret_cast<const float*>(stage + kRowScalesAt) +
      lane % 4 * 2 * kFolds;
  // ldmatrix: T = 8 takes 8 tokens by 32 k, otherwise 16 tokens by 16 k.
  const u32 token = kTokens == 8 ? lane % 8 : lane % 8 + lane / 16 * 8;
  const u32 column = (kTokens == 8 ? lane / 8 : lane / 8 % 2) * 8;
  const u32 operand =
      kd::SharedAddress(stage) + kOperandAt + (token * kRowHalves + column) * 2;
#pragma unroll
  for (u32 fold = 0; fold < kFolds; ++fold) {
    u32 a[2][kWarpStrips][4];
    float weight_scale[kWarpStrips][2];
#pragma unroll
    for (u32 i = 0; i < kWarpStrips; ++i) {
#pragma unroll
      for (u32 step = 0; step < 2; ++step) {
        const u32* tile =
            tiles + ((2 * fold + step) * kStrips + i) * kd::kTileWords<kBits>;
        kd::DecodeHalfNpkFragment<kBits>(kd::LoadSpan(tile, span), a[step][i]);
      }
      weight_scale[i][0] = kd::MxWordScale(words[i * 16], first_fold + fold);
      weight_scale[i][1] =
          kd::MxWordScale(words[i * 16 + 8], first_fold + fold);
    }
#pragma unroll
    for (u32 g = 0; g < kTokenGroups; g += 2) {
      if (g != 0 && g * 8 >= columns) continue;
      constexpr u32 kAtOnce = kTokens == 8 ? 1 : 2;
      // b[n][2s], b[n][2s + 1]: group g + n, input channels from 16 s on.
      u32 b[2][4];
      if constexpr (kTokens == 8) {
        kd::LoadMatrices(operand + fold * 64, b[0]);
      } else {
        u32 loaded[2][4];
#pragma unroll
        for (u32 step = 0; step < 2; ++step) {
          kd::LoadMatrices(
              operand + fold * 64 + step * 32 + g * (8 * kRowHalves * 2),
              loaded[step]);
#pragma unroll
          for (u32 n = 0; n < 2; ++n) {
            b[n][2 * step] = loaded[step][2 * n];
            b[n][2 * step + 1] = loaded[step][2 * n + 1];
          }
        }
      }
#pragma unroll
      for (u32 n = 0; n < kAtOnce; ++n) {
        float row_scale[2] = {1.0f, 1.0f};
        if constexpr (kQuantised) {
          row_scale[0] = row_scales[(g + n) * 8 * kFolds + fold];
          row_scale[1] = row_scales[((g + n) * 8 + 1) * kFolds + fold];
        }
#pragma unroll
        for (u32 i = 0; i < kWarpStrips; ++i) {
          float d[4];
          kd::MmaFromZero(d, a[0][i], b[n][0], b[n][1]);
          kd::Mma(d, a[1][i], b[n][2], b[n][3]);
          AddFold(d, weight_scale[i], row_scale, sums[i][g + n]);
        }
      }
    }
  }
}

// sums = half of this block's slice of operand x weights.
template <u32 kDepth, u32 kWidth>
__device__ __forceinline__ void Multiply(const Factors& factors,
                                         const Sources& sources, u32 columns,
                                         Sums& sums) {
  static_assert(kWidth % kChannels == 0, "C must divide the width");
  constexpr u32 kBlocks = kDepth / 128;
  const u32 begin = kBlocks * blockIdx.y / gridDim.y * kStagesPerBlock;
  const u32 end = kBlocks * (blockIdx.y + 1) / gridDim.y * kStagesPerBlock;
  const kd::LaneSpan<kBits> span = kd::FindLaneSpan<kBits>(threadIdx.x % 32);
  const unsigned char* shared = kd::DynamicShared();
  const u32 ring = kd::SharedAddress(shared);

  kd::RunRing<kStages>(
      begin, end,
      [&](u32 stage, u32 slot) {
        CopyWeights<kWidth>(factors, stage, ring + slot * kStageBytes);
      },
      [&](u32 stage, u32 slot) {
        CopyOperand<kDepth>(factors, sources, stage, ring + slot * kStageBytes);
      },
      [&](u32 stage, u32 slot) {
        ComputeStage(shared + slot * kStageBytes, span,
                     stage % kStagesPerBlock * kFolds, columns, sums);
      });
}

// What this thread copies of a tile's rows.
//   operand_row(row): of the operand, of row `row` of the tile.
template <class OperandRow>
__device__ __forceinline__ Sources FindSources(const Tile& tile,
                                               OperandRow operand_row) {
  const auto source = [&](u32 column) {
    const u32 row = RowOfColumn(column);
    return row < tile.rows ? TermOfColumn(operand_row(row), column) : kNone;
  };
  Sources sources;
#pragma unroll
  for (u32 i = 0; i < OperandTile::kCopies; ++i) {
    sources.operand.source[i] = source(OperandTile::RowOf(i));
  }
  sources.scales = kQuantised ? source(threadIdx.x) : kNone;
  return sources;
}

// Stores a block's sums of half the weights, a row's terms added.
//   total: rows of a slice
template <u32 kWidth>
__device__ __forceinline__ void Store(const Sums& sums, void* product,
                                      u64 total, const Tile& tile, u32 column) {
  if constexpr (kTerms == 1) {
    kd::StoreSums<kWidth, 2>(sums, product, total, tile.first, tile.rows,
                             column);
  } else {
    constexpr u32 kGroups = kTokens == 8 ? 1 : kTokenGroups / 2;
    float rows[kWarpStrips][kGroups][4];
#pragma unroll
    for (u32 i = 0; i < kWarpStrips; ++i) {
#pragma unroll
      for (u32 g = 0; g < kGroups; ++g) {
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
          if constexpr (kTokens == 8) {
            // Columns 4 .. 7 are in the lanes whose number has bit 1.
            rows[i][g][e] =
                sums[i][g][e] + __shfl_xor_sync(0xFFFFFFFFu, sums[i][g][e], 2);
          } else {
            rows[i][g][e] = sums[i][2 * g][e] + sums[i][2 * g + 1][e];
          }
        }
      }
    }
    kd::StoreSums<kWidth, 2>(rows, product, total, tile.first, tile.rows,
                             column);
  }
}

}  // namespace

// Block x: tile x / (2I / C) and C of the 2I channels gate | up; block y: slice
// of K.
extern "C" __global__ void __launch_bounds__(kThreads)
    kiln_mx_fc1(const u16* x_values, const float* x_scales,
                const u16* __restrict__ w13, const u32* __restrict__ w13_scale,
                const Row* rows, const Tile* tiles, const Totals* totals,
                void* __restrict__ fc1, u32 tokens) {
  kd::BeginStep();
  constexpr u32 kBlocks = 2 * kInter / kChannels;
  const u32 index = blockIdx.x / kBlocks;
  if (index >= totals->tiles) return;
  const Tile tile = tiles[index];
  const u32 column = blockIdx.x % kBlocks * kChannels;
  const bool is_up = column >= kInter;

  const Sources sources = FindSources(
      tile, [&](u32 row) { return rows[tile.first + row].route / kTopK; });
  Factors factors;
  factors.weights = kd::ExpertTiles<kBits, kHidden, kInter>(
      w13, (is_up ? kExperts : 0) + tile.expert,
      is_up ? column - kInter : column);
  factors.scales =
      kd::MxExpertScales<kHidden, 2 * kInter>(w13_scale, tile.expert, column);
  factors.operand = x_values;
  factors.row_scales = x_scales;
  Sums sums = {};
  Multiply<kHidden, kInter>(factors, sources, tile.rows * kTerms, sums);
  Store<2 * kInter>(sums, fc1, static_cast<u64>(tokens) * kTopK, tile, column);
}

// Block x: tile x / (H / C) and C of the H channels; block y: slice of K.
extern "C" __global__ void __launch_bounds__(kThreads)
    kiln_mx_fc2(const u16* mid_values, const float* mid_scales,
                const u16* __restrict__ w2, const u32* __restrict__ w2_scale,
                const Tile* tiles, const Totals* totals, void* __restrict__ fc2,
                u32 tokens) {
  kd::BeginStep();
  constexpr u32 kBlocks = kHidden / kChannels;
  const u32 index = blockIdx.x / kBlocks;
  if (index >= totals->tiles) return;
  const Tile tile = tiles[index];
  const u32 column = blockIdx.x % kBlocks * kChannels;

  const Sources sources =
      FindSources(tile, [&](u32 row) { return tile.first + row; });
  Factors factors;
  factors.weights =
      kd::ExpertTiles<kBits, kInter, kHidden>(w2, tile.expert, column);
  factors.scales =
      kd::MxExpertScales<kInter, kHidden>(w2_scale, tile.expert, column);
  factors.operand = mid_values;
  factors.row_scales = mid_scales;
  Sums sums = {};
  Multiply<kInter, kHidden>(factors, sources, tile.rows * kTerms, sums);
  Store<kHidden>(sums, fc2, static_cast<u64>(tokens) * kTopK, tile, column);
}

#endif  // KILN_PART == 1
