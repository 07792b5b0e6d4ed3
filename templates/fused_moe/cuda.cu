// Fused mixture of experts, recipe w4a16, EXL3 trellis weights: CUDA kernels.
//
// Arithmetic: spec "Trellis weight formats and fused-MoE arithmetic" 4.2 and
// 4.5, rounding boundaries included. Source for sm_80 and later; no header
// other than Kiln's own. Read templates/fused_moe/README.md, "CUDA", first: it
// lists every entry's parameters, launch rule, shared memory and arena slices.
//
// Prelude (integers):
//   KILN_HIDDEN H, KILN_INTER I (multiples of 128), KILN_EXPERTS E (1..1024),
//   KILN_TOPK (1..32), KILN_CODEBOOK (0 3inst, 1 mcg, 2 mul1),
//   KILN_BITS_GATE, KILN_BITS_UP, KILN_BITS_DOWN (1..8),
//   KILN_X_BF16, KILN_ID_I64, KILN_SHARED_SUH (0 or 1), and
//   KILN_PART: 0 support entries (route, rotate, activate, combine)
//              1 fc1 and fc2, 2 fc1 alone, 3 fc2 alone
//   KILN_OPERAND_ORDER (part 0): 0 (default) input channels of operands in
//              their order, 1 in that of warpgroup.cu
//   KILN_ATOMIC_SUM (part 0, order 1, shared tables): 1 fc2 adds routes up in
//              `out`, which routing clears; default 0
// Axes, read by parts 1..3 only:
//   KILN_TOKENS_TILE T     8 or a multiple of 16 up to 128: rows of one expert
//                          per block
//   KILN_CHANNELS_TILE C   64, 128 or 256 output channels per block; divides I
//                          (fc1) and H (fc2); C >= 16 * KILN_WARPS
//   KILN_K_TILE            32, 64 or 128 input channels per pipeline stage
//   KILN_WARPS             4 or 8
//   KILN_STAGES            2, 3, 4 or 6 buffers of the cp.async ring
//   KILN_SUM               0 (default): weights are rounded to fp16 as the
//                          codebook says; 3 (MUL1, T 8): 1024 + byte sum is the
//                          operand, and sums get the affine map, unrounded
//                          (cuda/mul1_affine.h)
//   KILN_CTAS              blocks per SM that registers must allow (default 1)
// (C / 16 / warps) * (T / 8) * 4 sums per thread must not exceed 128.
//
// Shape of the computation. Weights are the A operand of
// mma.sync.m16n8k16 (f16 in, f32 sums): the 8 weights that a lane decodes from
// a 16x16 tile are exactly its A fragment, so decoded weights never leave
// registers. Tokens are N. A block owns T rows of one expert, C output
// channels and one slice of K (whole 128 blocks); its warps split the channels.
// So the order in which a sum is formed depends on the number of K slices
// alone: all axes but split-K give bit-identical results.

#include "cuda/grouped.h"
#include "cuda/mul1_affine.h"
#include "cuda/warp.h"
#include "device/activation.h"
#include "device/fragment.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "device/platform.h"
#include "device/trellis.h"

#ifndef KILN_CTAS
#define KILN_CTAS 1
#endif
#ifndef KILN_SUM
#define KILN_SUM 0
#endif
#ifndef KILN_OPERAND_ORDER
#define KILN_OPERAND_ORDER 0
#endif
#ifndef KILN_ATOMIC_SUM
#define KILN_ATOMIC_SUM 0
#endif

namespace {

using kd::kNone;
using kd::kRouteThreads;
using kd::kRouteWarps;
using kd::Row;
using kd::Tile;
using kd::Totals;
using kd::u16;
using kd::u32;
using kd::u64;

constexpr u32 kHidden = KILN_HIDDEN;
constexpr u32 kInter = KILN_INTER;
constexpr u32 kExperts = KILN_EXPERTS;
constexpr u32 kTopK = KILN_TOPK;

static_assert(kHidden % 128 == 0 && kInter % 128 == 0, "H and I: 128 blocks");
static_assert(kExperts >= 1 && kExperts <= 1024, "E in 1..1024");

// ---------------------------------------------------------------------------
// Part 0: everything but the two matrix products.
#if KILN_PART == 0

constexpr u32 kHelperThreads = 128;
constexpr u32 kHelperWarps = kHelperThreads / 32;
// Tiles of an expert share its rows evenly where a product skips units of rows.
constexpr u32 kShareUnit = KILN_OPERAND_ORDER == 0 ? 0 : 32;

#if KILN_ID_I64
using RouteId = long long;
#else
using RouteId = int;
#endif

// Four neighbouring channels of an operand row, the first a multiple of 4.
__device__ __forceinline__ void StoreOperand(u16* row, u32 channel,
                                             const float (&v)[4]) {
  const u32 low = kd::Pack2(v[0], v[1]);
  const u32 high = kd::Pack2(v[2], v[3]);
#if KILN_OPERAND_ORDER == 0
  *reinterpret_cast<uint2*>(row + channel) = make_uint2(low, high);
#else
  // Within 64 channels: pairs 8c + 4h + j lie at 8j + 4h + c.
  const u32 pair = channel / 2 % 32;
  const u32 at = channel / 64 * 32 + pair % 4 * 8 + (pair & 4) + pair / 8;
  u32* pairs = reinterpret_cast<u32*>(row);
  pairs[at] = low;
  pairs[at + 8] = high;
#endif
}

// What one lane needs for one 128 block of one token.
struct RotationInput {
  uint2 x, gate_suh, up_suh;
};

__device__ __forceinline__ RotationInput
LoadRotation(const u16* __restrict__ x, const u16* __restrict__ gate_suh,
             const u16* __restrict__ up_suh, u64 token, u64 table, u32 column) {
  const u64 scale = table * kHidden + column;
  RotationInput input;
  input.x = *reinterpret_cast<const uint2*>(x + token * kHidden + column);
  input.gate_suh = *reinterpret_cast<const uint2*>(gate_suh + scale);
  input.up_suh = *reinterpret_cast<const uint2*>(up_suh + scale);
  return input;
}

// Steps 1 to 3 for one 128 block: both FC1 operands.
__device__ __forceinline__ void Rotate(const RotationInput& input,
                                       u16* __restrict__ gate_operand,
                                       u16* __restrict__ up_operand, u64 to,
                                       u32 column, u32 lane) {
  float value[4], gate[4], up[4];
#if KILN_X_BF16
  const u32 halves[4] = {input.x.x & 0xFFFFu, input.x.x >> 16,
                         input.x.y & 0xFFFFu, input.x.y >> 16};
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    value[i] = kd::f16_to_f32(
        kd::f32_to_f16(kd::bf16_to_f32(static_cast<u16>(halves[i]))));
  }
#else
  kd::Unpack4(input.x, value);
#endif
  kd::Unpack4(input.gate_suh, gate);
  kd::Unpack4(input.up_suh, up);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    gate[i] = kd::f16_to_f32(kd::f32_to_f16(value[i] * gate[i]));
    up[i] = kd::f16_to_f32(kd::f32_to_f16(value[i] * up[i]));
  }
  kd::WarpHadamard128(gate, lane);
  kd::WarpHadamard128(up, lane);
  StoreOperand(gate_operand + to * kHidden, column, gate);
  StoreOperand(up_operand + to * kHidden, column, up);
}

#endif  // KILN_PART == 0

}  // namespace

#if KILN_PART == 0

#if KILN_SHARED_SUH

namespace {

// With shared tables the operands do not depend on the routes: blocks from
// `before` on rotate, a 128 block of a token per warp at a time.
//   out: where routes are added up it is cleared; elsewhere null
__device__ __forceinline__ void RotateTokens(
    u32 before, const u16* __restrict__ x, const u16* __restrict__ gate_suh,
    const u16* __restrict__ up_suh, u16* __restrict__ gate_operand,
    u16* __restrict__ up_operand, [[maybe_unused]] float* __restrict__ out,
    u32 tokens) {
  constexpr u32 kBlocks = kHidden / 128;
  const u32 lane = threadIdx.x % 32;
  kd::ForItems(
      (blockIdx.x - before) * kRouteWarps + threadIdx.x / 32, tokens * kBlocks,
      (gridDim.x - before) * kRouteWarps,
      [&](u32 item) {
        return LoadRotation(x, gate_suh, up_suh, item / kBlocks, 0,
                            item % kBlocks * 128 + lane * 4);
      },
      [&](u32 item, const RotationInput& input) {
        Rotate(input, gate_operand, up_operand, item / kBlocks,
               item % kBlocks * 128 + lane * 4, lane);
        if constexpr (KILN_ATOMIC_SUM != 0) {
          // Items follow each other in `out`.
          reinterpret_cast<float4*>(out)[static_cast<u64>(item) * 32 + lane] =
              make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
      });
}

}  // namespace

#endif  // KILN_SHARED_SUH

// Sorts the routes: by `segments` blocks with shared tables, one or as many as
// kiln_moe_count had, and by all without.
extern "C" __global__ void __launch_bounds__(kRouteThreads)
    kiln_moe_route(const RouteId* __restrict__ ids, const u32* counts,
                   Row* __restrict__ rows, u32* __restrict__ positions,
                   Tile* __restrict__ tiles, Totals* __restrict__ totals,
#if KILN_SHARED_SUH
                   const u16* __restrict__ x, const u16* __restrict__ gate_suh,
                   const u16* __restrict__ up_suh,
                   u16* __restrict__ gate_operand, u16* __restrict__ up_operand,
#if KILN_ATOMIC_SUM
                   float* __restrict__ out,
#endif
#endif
                   u32 tokens,
#if KILN_SHARED_SUH
                   u32 segments,
#endif
                   u32 length, u32 tokens_tile) {
  kd::BeginStep();
#if KILN_SHARED_SUH
#if !KILN_ATOMIC_SUM
  constexpr float* out = nullptr;
#endif
  if (blockIdx.x >= segments) {
    RotateTokens(segments, x, gate_suh, up_suh, gate_operand, up_operand, out,
                 tokens);
    return;
  }
#endif
  kd::PlaceSegment<kExperts, kShareUnit>(ids, counts, rows, positions, tiles,
                                         totals, tokens * kTopK, length,
                                         tokens_tile);
}

#if !KILN_SHARED_SUH

// Per-expert tables: operands per sorted row.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
    kiln_moe_rotate(const u16* __restrict__ x, const u16* __restrict__ gate_suh,
                    const u16* __restrict__ up_suh, const Row* rows,
                    const Totals* totals, u16* __restrict__ gate_operand,
                    u16* __restrict__ up_operand) {
  kd::BeginStep();
  constexpr u32 kBlocks = kHidden / 128;
  const u32 lane = threadIdx.x % 32;
  const u32 item = blockIdx.x * kHelperWarps + threadIdx.x / 32;
  const u32 at = item / kBlocks;
  if (at >= totals->rows) return;
  const u32 column = item % kBlocks * 128 + lane * 4;
  const Row row = rows[at];
  Rotate(
      LoadRotation(x, gate_suh, up_suh, row.route / kTopK, row.expert, column),
      gate_operand, up_operand, at, column, lane);
}

#endif  // !KILN_SHARED_SUH

// Of many routes: what kiln_moe_route sorts them by.
extern "C" __global__ void __launch_bounds__(kRouteThreads)
    kiln_moe_count(const RouteId* __restrict__ ids, u32* __restrict__ counts,
                   u32 tokens, u32 length) {
  kd::BeginStep();
  kd::CountSegment<kExperts>(ids, counts, tokens * kTopK, length);
}

// ---- activation and combining, products in rows ----------------------------
#if KILN_OPERAND_ORDER == 0

// Steps 4 (rounding) to 7: one 128 block of one sorted row per warp.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
    kiln_moe_activate(const void* fc1, const u16* __restrict__ rotations,
                      const Row* rows, const Totals* totals,
                      u16* __restrict__ activated, u32 tokens, u32 slices) {
  kd::BeginStep();
  constexpr u32 kBlocks = kInter / 128;
  const u32 lane = threadIdx.x % 32;
  const u32 item = blockIdx.x * kHelperWarps + threadIdx.x / 32;
  const u32 at = item / kBlocks;
  if (at >= totals->rows) return;
  const u32 column = item % kBlocks * 128 + lane * 4;
  const u16* table =
      rotations + static_cast<u64>(rows[at].expert) * (3 * kInter) + column;
  const u64 slice = static_cast<u64>(tokens) * (kTopK * 2 * kInter);
  const u64 from = static_cast<u64>(at) * (2 * kInter) + column;
  const u64 places[2] = {from, from + kInter};
  float both[2][4], gate_svh[4], up_svh[4], down_suh[4];
  kd::LoadProducts<4>(fc1, places, slice, slices, both);
  float(&gate)[4] = both[0];
  float(&up)[4] = both[1];
  kd::Load4(table, gate_svh);
  kd::Load4(table + kInter, up_svh);
  kd::Load4(table + 2 * kInter, down_suh);
  kd::WarpHadamard128(gate, lane);
  kd::WarpHadamard128(up, lane);
  float value[4];
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const float g = gate[i] * gate_svh[i];
    const float u = up[i] * up_svh[i];
    value[i] = kd::Silu(g) * u * down_suh[i];
  }
  kd::WarpHadamard128(value, lane);
  StoreOperand(activated + static_cast<u64>(at) * kInter, column, value);
}

// Steps 8 (rounding) to 10.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
    kiln_moe_combine(const void* fc2, const u16* __restrict__ down_svh,
                     const float* __restrict__ weights, const u32* positions,
                     const Row* rows, float* __restrict__ out, u32 tokens,
                     u32 slices) {
  kd::BeginStep();
  kd::CombineRoutes<kTopK, kHidden, KILN_SHARED_SUH != 0, kHelperWarps>(
      fc2, down_svh, weights, positions, rows, out, tokens, slices);
}

// ---- the same, products as warpgroup.cu writes them ------------------------
#else

// Where eight neighbouring channels of a sorted row lie in a product: blocks of
// 64 channels, in them rows of 128 bytes whose 16-byte pieces are swizzled by
// the row.
//   total: rows of the product
__device__ __forceinline__ const u16* ProductPiece(const u16* product,
                                                   u32 column, u64 total,
                                                   u32 row) {
  return product + (column / 64 * total + row) * 64 +
         (column / 8 % 8 ^ row % 8) * 8;
}

// Eight neighbouring halves.
__device__ __forceinline__ void Unpack8(const uint4& bits, float* v) {
  const u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    v[2 * i] = kd::f16_to_f32(static_cast<u16>(words[i]));
    v[2 * i + 1] = kd::f16_to_f32(static_cast<u16>(words[i] >> 16));
  }
}

__device__ __forceinline__ void Load8(const u16* from, float* v) {
  Unpack8(*reinterpret_cast<const uint4*>(from), v);
}

// v *= what lane c of four holds of a table's 128 block; see QuadHadamard128.
__device__ __forceinline__ void ScaleQuad(const u16* table, u32 c,
                                          float (&v)[32]) {
#pragma unroll
  for (u32 j = 0; j < 4; ++j) {
    float scale[8];
    Load8(table + (j * 4 + c) * 8, scale);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) v[j * 8 + i] *= scale[i];
  }
}

// Stores a 128 block of an operand row, of which lane c of four holds its part,
// in the order of StoreOperand.
__device__ __forceinline__ void StoreQuad(u16* block, u32 c,
                                          const float (&v)[32], bool store) {
  // Lanes c and c ^ 2 exchange halves: one gets pairs of the first 64 channels,
  // the other of the last. A lane has pairs 8w + 4(c % 2) + p of them where w
  // is c / 2 and 2 + c / 2, its partner the rest.
  u32 pairs[2][2][4];  // of 64 channels, of w, p
#pragma unroll
  for (u32 i = 0; i < 16; ++i) {
    pairs[i / 8][i / 4 % 2][i % 4] = kd::Pack2(v[2 * i], v[2 * i + 1]);
  }
  const bool upper = c >= 2;
#pragma unroll
  for (u32 p = 0; p < 4; ++p) {
    u32 words[4];
#pragma unroll
    for (u32 t = 0; t < 2; ++t) {
      const u32 own = upper ? pairs[1][t][p] : pairs[0][t][p];
      const u32 other = __shfl_xor_sync(
          0xFFFFFFFFu, upper ? pairs[0][t][p] : pairs[1][t][p], 2);
      words[2 * t] = upper ? other : own;
      words[2 * t + 1] = upper ? own : other;
    }
    if (store) {
      *reinterpret_cast<uint4*>(block + c / 2 * 64 + p * 16 + c % 2 * 8) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// Steps 4 (rounding) to 7: one 128 block of eight sorted rows per warp, of one
// row per four lanes. K is not split.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
    kiln_moe_activate(const u16* fc1, const u16* __restrict__ rotations,
                      const Row* rows, const Totals* totals,
                      u16* __restrict__ activated, u32 tokens, u32) {
  kd::BeginStep();
  constexpr u32 kBlocks = kInter / 128;
  const u32 lane = threadIdx.x % 32;
  const u32 c = lane % 4;
  const u32 warp = blockIdx.x * kHelperWarps + threadIdx.x / 32;
  const u32 first = warp / kBlocks * 8;
  const u32 live = totals->rows;
  if (first >= live) return;
  // Lanes of rows beyond the last one work on it again.
  const bool store = first + lane / 4 < live;
  const u32 at = store ? first + lane / 4 : live - 1;
  const u32 column = warp % kBlocks * 128;
  const u64 total = static_cast<u64>(tokens) * kTopK;
  const u16* table =
      rotations + static_cast<u64>(rows[at].expert) * (3 * kInter) + column;
  float gate[32], up[32];
#pragma unroll
  for (u32 j = 0; j < 4; ++j) {
    const u32 channel = column + (j * 4 + c) * 8;
    Load8(ProductPiece(fc1, channel, total, at), gate + j * 8);
    Load8(ProductPiece(fc1, kInter + channel, total, at), up + j * 8);
  }
  kd::QuadHadamard128(gate, lane);
  ScaleQuad(table, c, gate);
  kd::QuadHadamard128(up, lane);
  ScaleQuad(table + kInter, c, up);
#pragma unroll
  for (u32 i = 0; i < 32; ++i) gate[i] = kd::Silu(gate[i]) * up[i];
  ScaleQuad(table + 2 * kInter, c, gate);
  kd::QuadHadamard128(gate, lane);
  StoreQuad(activated + static_cast<u64>(at) * kInter + column, c, gate, store);
}

#if KILN_ATOMIC_SUM

// What is left of step 10 where fc2 has added the routes up: one 128 block of
// one token per 16 lanes.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
    kiln_moe_finish(const u16* __restrict__ down_svh, float* out, u32 tokens) {
  kd::BeginStep();
  constexpr u32 kBlocks = kHidden / 128;
  const u32 lane = threadIdx.x % 32;
  const u32 warp_item = (blockIdx.x * kHelperWarps + threadIdx.x / 32) * 2;
  const u32 item = warp_item + lane / 16;
  const u32 items = tokens * kBlocks;
  if (warp_item >= items) return;
  float4* at = reinterpret_cast<float4*>(out + static_cast<u64>(item) * 128 +
                                         lane % 16 * 8);
  float4 low = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  float4 high = low;
  if (item < items) {
    low = at[0];
    high = at[1];
  }
  float sum[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  float svh[8];
  Load8(down_svh + item % kBlocks * 128 + lane % 16 * 8, svh);
  kd::HalfWarpHadamard128(sum, lane);
#pragma unroll
  for (u32 i = 0; i < 8; ++i) sum[i] *= svh[i];
  if (item >= items) return;
  at[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  at[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
}

#else

// Steps 8 (rounding) to 10, as above: one 128 block of one token per 16 lanes.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
    kiln_moe_combine(const u16* fc2, const u16* __restrict__ down_svh,
                     const float* __restrict__ weights, const u32* positions,
                     const Row* rows, float* __restrict__ out, u32 tokens,
                     u32) {
  kd::BeginStep();
  constexpr u32 kBlocks = kHidden / 128;
  constexpr u32 kAtOnce = kTopK < 8 ? kTopK : 8;  // routes loaded together
  const u32 lane = threadIdx.x % 32;
  const u32 own = lane % 16;
  const u32 item =
      (blockIdx.x * kHelperWarps + threadIdx.x / 32) * 2 + lane / 16;
  const bool store = item / kBlocks < tokens;
  if ((item - lane / 16) / kBlocks >= tokens) return;
  // Lanes beyond the last token work on it again.
  const u32 token = store ? item / kBlocks : tokens - 1;
  const u32 column = item % kBlocks * 128 + own * 8;
  const u64 total = static_cast<u64>(tokens) * kTopK;
  float sum[8] = {};
#pragma unroll 1
  for (u32 base = 0; base < kTopK; base += kAtOnce) {
    // Lane j holds what belongs to route j of these.
    u32 own_row = kNone;
    float own_weight = 0.0f;
    if (own < kAtOnce && base + own < kTopK) {
      const u64 route = static_cast<u64>(token) * kTopK + base + own;
      own_row = positions[route];
      own_weight = weights[route];
    }
#if !KILN_SHARED_SUH
    const u32 own_expert = own_row != kNone ? rows[own_row].expert : 0;
#endif
    uint4 bits[kAtOnce];
#pragma unroll
    for (u32 j = 0; j < kAtOnce; ++j) {
      const u32 row = __shfl_sync(0xFFFFFFFFu, own_row, j, 16);
      bits[j] = make_uint4(0, 0, 0, 0);
      if (row != kNone) {
        bits[j] = *reinterpret_cast<const uint4*>(
            ProductPiece(fc2, column, total, row));
      }
    }
#pragma unroll
    for (u32 j = 0; j < kAtOnce; ++j) {
      const bool active = __shfl_sync(0xFFFFFFFFu, own_row, j, 16) != kNone;
      const float weight = __shfl_sync(0xFFFFFFFFu, own_weight, j, 16);
      float value[8];
      Unpack8(bits[j], value);
#if !KILN_SHARED_SUH
      const u32 expert = __shfl_sync(0xFFFFFFFFu, own_expert, j, 16);
      float svh[8];
      Load8(down_svh + static_cast<u64>(expert) * kHidden + column, svh);
      kd::HalfWarpHadamard128(value, lane);
#pragma unroll
      for (u32 i = 0; i < 8; ++i) value[i] *= svh[i];
#endif
      if (!active) continue;
#pragma unroll
      for (u32 i = 0; i < 8; ++i) sum[i] = kd::Fma(weight, value[i], sum[i]);
    }
  }
#if KILN_SHARED_SUH
  float svh[8];
  Load8(down_svh + column, svh);
  kd::HalfWarpHadamard128(sum, lane);
#pragma unroll
  for (u32 i = 0; i < 8; ++i) sum[i] *= svh[i];
#endif
  if (!store) return;
  float4* to = reinterpret_cast<float4*>(
      out + static_cast<u64>(token) * kHidden + column);
  to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
}

#endif  // KILN_ATOMIC_SUM

#endif  // KILN_OPERAND_ORDER

#endif  // KILN_PART == 0

// ---------------------------------------------------------------------------
// Parts 1 to 3: the matrix products.
#if KILN_PART != 0

namespace {

constexpr u32 kTokens = KILN_TOKENS_TILE;
constexpr u32 kChannels = KILN_CHANNELS_TILE;
constexpr u32 kDepthTile = KILN_K_TILE;
constexpr u32 kWarps = KILN_WARPS;
constexpr u32 kStages = KILN_STAGES;
constexpr u32 kThreads = kWarps * 32;

constexpr u32 kDepthSteps = kDepthTile / 16;   // mma steps per stage
constexpr u32 kStrips = kChannels / 16;        // 16-channel strips per block
constexpr u32 kWarpStrips = kStrips / kWarps;  // and per warp
constexpr u32 kTokenGroups = kTokens / 8;      // mma columns
// Operand rows are padded by 16 bytes: the 8 rows of an ldmatrix then lie in
// 8 different 16-byte bank groups.
constexpr u32 kRowHalves = kDepthTile + 8;
constexpr u32 kOperandBytes = kTokens * kRowHalves * 2;
// 16-byte pieces of an operand row; a thread always copies the same piece.
constexpr u32 kRowPieces = kDepthTile / 8;
constexpr u32 kRowsAtOnce = kThreads / kRowPieces;
constexpr u32 kRowCopies = (kTokens + kRowsAtOnce - 1) / kRowsAtOnce;

static_assert(kTokens == 8 || kTokens % 16 == 0, "T: 8 or a multiple of 16");
static_assert(kDepthTile % 32 == 0 && 128 % kDepthTile == 0,
              "K tile: 32, 64 or 128");
static_assert(kStrips % kWarps == 0, "C must be at least 16 * warps");
static_assert(kStages >= 2, "at least two stages");
static_assert(kWarpStrips * kTokenGroups * 4 <= 128, "too many sums per lane");

constexpr bool kBiased = KILN_SUM == 3;
static_assert(KILN_SUM == 0 || (kBiased && KILN_CODEBOOK == 2 && kTokens == 8),
              "a sum mode of another codebook or of 8 rows");

template <u32 kBits>
constexpr u32 kWeightBytes = kDepthTile* kChannels* kBits / 8;

// ---- one block of a grouped product ----------------------------------------

using Sums = float[kWarpStrips][kTokenGroups][4];
// Sums of the operand alone, which biased products need: of the steps of K that
// are this warp's turn, as an MMA leaves them, equal in all channels.
using RowSums = float[4];

template <int kBits>
__device__ __forceinline__ void Decode(const kd::SpanBits& bits, u32 (&a)[4]) {
  if constexpr (kBiased) {
    kd::DecodeBiased<kBits>(bits, a);
  } else {
    kd::DecodeFragment<KILN_CODEBOOK, kBits>(bits, a);
  }
}

// Copies stage `stage` of the weights to the start of buffer `to`.
template <int kBits, u32 kWidth>
__device__ __forceinline__ void CopyWeights(
    const unsigned char* __restrict__ weights, u32 stage, u32 to) {
  // A K16 row of the block's tiles is contiguous in memory.
  constexpr u32 kPieces = kChannels * kBits / 8;
  constexpr u64 kRowBytes = static_cast<u64>(kWidth) * 2 * kBits;
  constexpr u32 kAll = kPieces * kDepthSteps;
  const unsigned char* from = weights + stage * (kRowBytes * kDepthSteps);
#pragma unroll
  for (u32 base = 0; base < kAll; base += kThreads) {
    const u32 piece = base + threadIdx.x;
    if (kAll % kThreads == 0 || piece < kAll) {
      kd::CopyAsync16(to + piece * 16, from + (piece / kPieces) * kRowBytes +
                                           piece % kPieces * 16);
    }
  }
}

// The same of the operand, behind the weights.
template <int kBits, u32 kDepth>
__device__ __forceinline__ void CopyOperand(const u16* __restrict__ operand,
                                            const u32 (&source)[kRowCopies],
                                            u32 stage, u32 to) {
  const u32 column = threadIdx.x % kRowPieces * 8;
  const u32 row = threadIdx.x / kRowPieces;
  const u16* first = operand + stage * kDepthTile + column;
  to += kWeightBytes<kBits> + (row * kRowHalves + column) * 2;
#pragma unroll
  for (u32 i = 0; i < kRowCopies; ++i) {
    if (kTokens % kRowsAtOnce == 0 || row + i * kRowsAtOnce < kTokens) {
      const bool copy = source[i] != kNone;
      kd::CopyAsyncOrZero<16>(
          to + i * (kRowsAtOnce * kRowHalves * 2),
          first + static_cast<u64>(copy ? source[i] : 0) * kDepth, copy);
    }
  }
}

// turn: which of kWarps neighbouring steps this warp adds rows of.
template <int kBits>
__device__ __forceinline__ void ComputeStage(const unsigned char* stage,
                                             const kd::LaneSpan<kBits>& span,
                                             u32 rows, u32 turn, Sums& sums,
                                             RowSums& row_sums) {
  const u32 lane = threadIdx.x % 32;
  const u32* tiles = reinterpret_cast<const u32*>(stage) +
                     threadIdx.x / 32 * (kWarpStrips * 8 * kBits);
  // ldmatrix: lanes 8i..8i+7 name the rows of matrix i. T = 8: 8 tokens by
  // 32 k, two steps at once; otherwise 16 tokens by 16 k.
  const u32 token = kTokens == 8 ? lane % 8 : lane % 8 + lane / 16 * 8;
  const u32 column = (kTokens == 8 ? lane / 8 : lane / 8 % 2) * 8;
  const u32 operand = kd::SharedAddress(stage) + kWeightBytes<kBits> +
                      (token * kRowHalves + column) * 2;
  u32 b[4];
#pragma unroll
  for (u32 step = 0; step < kDepthSteps; ++step) {
    u32 a[kWarpStrips][4];
#pragma unroll
    for (u32 i = 0; i < kWarpStrips; ++i) {
      const u32* tile = tiles + (step * kStrips + i) * kd::kTileWords<kBits>;
      Decode<kBits>(kd::LoadSpan(tile, span), a[i]);
    }
    if constexpr (kTokens == 8) {
      if (step % 2 == 0) kd::LoadMatrices(operand + step * 32, b);
      const u32 b0 = b[step % 2 * 2], b1 = b[step % 2 * 2 + 1];
      if (kBiased && step % kWarps == turn) {
        constexpr u32 kOnes = 0x3C003C00u;
        constexpr u32 ones[4] = {kOnes, kOnes, kOnes, kOnes};
        kd::Mma(row_sums, ones, b0, b1);
      }
#pragma unroll
      for (u32 i = 0; i < kWarpStrips; ++i) kd::Mma(sums[i][0], a[i], b0, b1);
    } else {
#pragma unroll
      for (u32 g = 0; g < kTokenGroups; g += 2) {
        if (g != 0 && g * 8 >= rows) continue;
        kd::LoadMatrices(operand + step * 32 + g * (8 * kRowHalves * 2), b);
#pragma unroll
        for (u32 i = 0; i < kWarpStrips; ++i) {
          kd::Mma(sums[i][g], a[i], b[0], b[1]);
        }
        if (g * 8 + 8 >= rows) continue;
#pragma unroll
        for (u32 i = 0; i < kWarpStrips; ++i) {
          kd::Mma(sums[i][g + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
}

// The affine map of biased products. All warps call it after the last stage.
//   shared: of kWarps rows of 8 sums, in the ring
__device__ __forceinline__ void ApplyAffine(const RowSums& row_sums,
                                            unsigned char* shared, Sums& sums) {
  const u32 lane = threadIdx.x % 32;
  float2* const pairs = reinterpret_cast<float2*>(shared);
  __syncthreads();  // nobody reads the ring any more
  if (lane < 4) {
    pairs[threadIdx.x / 32 * 4 + lane] = make_float2(row_sums[0], row_sums[1]);
  }
  __syncthreads();
  float rest[2] = {0.0f, 0.0f};
#pragma unroll
  for (u32 w = 0; w < kWarps; ++w) {
    const float2 some = pairs[w * 4 + lane % 4];
    rest[0] += some.x;
    rest[1] += some.y;
  }
#pragma unroll
  for (u32 i = 0; i < kWarpStrips; ++i) {
#pragma unroll
    for (u32 d = 0; d < 4; ++d) {
      sums[i][0][d] = kd::Fma(sums[i][0][d], kd::kBiasedScale,
                              rest[d % 2] * kd::kBiasedOffset);
    }
  }
}

// sums = this block's slice of operand x weights.
//   weights: byte address of the block's first tile in the expert's K16 row 0
//   source: operand rows that this thread copies, kNone beyond the tile
template <int kBits, u32 kDepth, u32 kWidth, u32 kStageBytes>
__device__ __forceinline__ void Multiply(
    const unsigned char* __restrict__ weights, const u16* __restrict__ operand,
    const u32 (&source)[kRowCopies], u32 rows, unsigned char* shared,
    Sums& sums) {
  static_assert(kWidth % kChannels == 0, "C must divide the width");
  constexpr u32 kStagesPerBlock = 128 / kDepthTile;
  constexpr u32 kBlocks = kDepth / 128;
  const u32 begin = kBlocks * blockIdx.y / gridDim.y * kStagesPerBlock;
  const u32 end = kBlocks * (blockIdx.y + 1) / gridDim.y * kStagesPerBlock;
  const kd::LaneSpan<kBits> span = kd::FindLaneSpan<kBits>(threadIdx.x % 32);
  const u32 ring = kd::SharedAddress(shared);

  // Weights first: the rows to copy may not be known yet.
#pragma unroll
  for (u32 s = 0; s < kStages - 1; ++s) {
    if (begin + s < end) {
      CopyWeights<kBits, kWidth>(weights, begin + s, ring + s * kStageBytes);
    }
  }
#pragma unroll
  for (u32 s = 0; s < kStages - 1; ++s) {
    if (begin + s < end) {
      CopyOperand<kBits, kDepth>(operand, source, begin + s,
                                 ring + s * kStageBytes);
    }
    kd::CommitCopies();
  }
  RowSums row_sums = {};
  u32 slot = 0;
#pragma unroll 1
  for (u32 stage = begin; stage < end; ++stage) {
    kd::WaitCopies<kStages - 2>();
    // Stage `stage` has landed for every thread, and the buffer of the stage
    // before it is free.
    __syncthreads();
    const u32 free_slot = slot == 0 ? kStages - 1 : slot - 1;
    if (stage + kStages - 1 < end) {
      const u32 to = ring + free_slot * kStageBytes;
      CopyWeights<kBits, kWidth>(weights, stage + kStages - 1, to);
      CopyOperand<kBits, kDepth>(operand, source, stage + kStages - 1, to);
    }
    kd::CommitCopies();
    ComputeStage<kBits>(shared + slot * kStageBytes, span, rows,
                        (threadIdx.x / 32 - stage * kDepthSteps) % kWarps, sums,
                        row_sums);
    slot = slot == kStages - 1 ? 0 : slot + 1;
  }
  if constexpr (kBiased) ApplyAffine(row_sums, shared, sums);
}

}  // namespace

#if KILN_PART == 1 || KILN_PART == 2

// Step 4. Block x: tile x / (2I / C) and C of the 2I channels gate | up;
// block y: slice of K.
extern "C" __global__ void __launch_bounds__(kThreads, KILN_CTAS)
    kiln_moe_fc1(const u16* gate_operand, const u16* up_operand,
                 const u16* __restrict__ w_gate, const u16* __restrict__ w_up,
                 const Row* rows, const Tile* tiles, const Totals* totals,
                 void* __restrict__ fc1, u32 tokens) {
  kd::BeginStep();
  constexpr u32 kBlocks = 2 * kInter / kChannels;
  constexpr u32 kBitsMax =
      KILN_BITS_GATE > KILN_BITS_UP ? KILN_BITS_GATE : KILN_BITS_UP;
  constexpr u32 kStageBytes = kWeightBytes<kBitsMax> + kOperandBytes;
  const u32 index = blockIdx.x / kBlocks;
  // Read before it is known to exist; still inside the arena.
  const Tile tile = tiles[index];
  if (index >= totals->tiles) return;
  const u32 column = blockIdx.x % kBlocks * kChannels;
  const bool is_up = column >= kInter;
  const u32 inner = is_up ? column - kInter : column;

  u32 source[kRowCopies];
#pragma unroll
  for (u32 i = 0; i < kRowCopies; ++i) {
    const u32 row = threadIdx.x / kRowPieces + i * kRowsAtOnce;
    source[i] = kNone;
    if (row < tile.rows) {
#if KILN_SHARED_SUH
      source[i] = rows[tile.first + row].route / kTopK;
#else
      source[i] = tile.first + row;
#endif
    }
  }
  Sums sums = {};
  unsigned char* shared = kd::DynamicShared();
  const u16* operand = is_up ? up_operand : gate_operand;
#if KILN_BITS_GATE == KILN_BITS_UP
  Multiply<KILN_BITS_GATE, kHidden, kInter, kStageBytes>(
      kd::ExpertTiles<KILN_BITS_GATE, kHidden, kInter>(is_up ? w_up : w_gate,
                                                       tile.expert, inner),
      operand, source, tile.rows, shared, sums);
#else
  if (is_up) {
    Multiply<KILN_BITS_UP, kHidden, kInter, kStageBytes>(
        kd::ExpertTiles<KILN_BITS_UP, kHidden, kInter>(w_up, tile.expert,
                                                       inner),
        operand, source, tile.rows, shared, sums);
  } else {
    Multiply<KILN_BITS_GATE, kHidden, kInter, kStageBytes>(
        kd::ExpertTiles<KILN_BITS_GATE, kHidden, kInter>(w_gate, tile.expert,
                                                         inner),
        operand, source, tile.rows, shared, sums);
  }
#endif
  kd::StoreSums<2 * kInter, 1>(sums, fc1, static_cast<u64>(tokens) * kTopK,
                               tile.first, tile.rows, column);
}

#endif

#if KILN_PART == 1 || KILN_PART == 3

// Step 8. Block x: tile x / (H / C) and C of the H channels; block y: slice
// of K.
extern "C" __global__ void __launch_bounds__(kThreads, KILN_CTAS)
    kiln_moe_fc2(const u16* activated, const u16* __restrict__ w_down,
                 const Tile* tiles, const Totals* totals,
                 void* __restrict__ fc2, u32 tokens) {
  kd::BeginStep();
  constexpr u32 kBlocks = kHidden / kChannels;
  constexpr u32 kStageBytes = kWeightBytes<KILN_BITS_DOWN> + kOperandBytes;
  const u32 index = blockIdx.x / kBlocks;
  // Read before it is known to exist; still inside the arena.
  const Tile tile = tiles[index];
  if (index >= totals->tiles) return;
  const u32 column = blockIdx.x % kBlocks * kChannels;
  u32 source[kRowCopies];
#pragma unroll
  for (u32 i = 0; i < kRowCopies; ++i) {
    const u32 row = threadIdx.x / kRowPieces + i * kRowsAtOnce;
    source[i] = row < tile.rows ? tile.first + row : kNone;
  }
  Sums sums = {};
  Multiply<KILN_BITS_DOWN, kInter, kHidden, kStageBytes>(
      kd::ExpertTiles<KILN_BITS_DOWN, kInter, kHidden>(w_down, tile.expert,
                                                       column),
      activated, source, tile.rows, kd::DynamicShared(), sums);
  kd::StoreSums<kHidden, 1>(sums, fc2, static_cast<u64>(tokens) * kTopK,
                            tile.first, tile.rows, column);
}

#endif

#endif  // KILN_PART != 0
