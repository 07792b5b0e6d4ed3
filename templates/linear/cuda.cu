// Linear layer over one EXL3 trellis matrix, recipe w4a16: CUDA kernels around
// the matrix product, which is kiln_moe_fc2 of fused_moe/cuda.cu for one expert
// that every token chooses.
//
// Arithmetic: templates/linear/reference.h, rounding boundaries included.
// Source for sm_80 and later; no header other than Kiln's own.
//
// Prelude (integers): KILN_IN, KILN_OUT (multiples of 128), KILN_X_BF16,
// KILN_BIAS (0 or 1).

#include "cuda/grouped.h"
#include "cuda/warp.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "device/platform.h"

namespace {

using kd::Tile;
using kd::Totals;
using kd::u16;
using kd::u32;
using kd::u64;

constexpr u32 kIn = KILN_IN;
constexpr u32 kOut = KILN_OUT;
constexpr u32 kThreads = 128;
constexpr u32 kWarps = kThreads / 32;

static_assert(kIn % 128 == 0 && kOut % 128 == 0, "128 blocks");

}  // namespace

// The product's operand, fp16 [m][in]: one 128 block of one token per warp. The
// first ceil(m / tokens_tile) threads also write the list of tiles. A grid of
// m * in / 128 warps.
extern "C" __global__ void __launch_bounds__(kThreads)
    kiln_linear_rotate(const u16* __restrict__ x, const u16* __restrict__ suh,
                       u16* __restrict__ operand, Tile* __restrict__ tiles,
                       Totals* __restrict__ totals, u32 tokens,
                       u32 tokens_tile) {
  kd::BeginStep();
  constexpr u32 kBlocks = kIn / 128;
  // m * in / 4 threads may be more than 2^32.
  const u64 thread = static_cast<u64>(blockIdx.x) * kThreads + threadIdx.x;
  const u32 count = (tokens + tokens_tile - 1) / tokens_tile;
  if (thread < count) {
    const u32 first = static_cast<u32>(thread) * tokens_tile;
    const u32 left = tokens - first;
    Tile tile;
    tile.expert = 0;
    tile.first = first;
    tile.rows = left < tokens_tile ? left : tokens_tile;
    tile.unused = 0;
    tiles[thread] = tile;
  }
  if (thread == 0) {
    Totals sum;
    sum.tiles = count;
    sum.rows = tokens;
    sum.unused[0] = sum.unused[1] = 0;
    *totals = sum;
  }
  const u32 lane = threadIdx.x % 32;
  const u32 item = blockIdx.x * kWarps + threadIdx.x / 32;
  const u32 token = item / kBlocks;
  if (token >= tokens) return;
  const u32 column = item % kBlocks * 128 + lane * 4;
  const u64 at = static_cast<u64>(token) * kIn + column;
  const uint2 bits = *reinterpret_cast<const uint2*>(x + at);
  float scale[4], value[4];
  kd::Load4(suh + column, scale);
#if KILN_X_BF16
  const u32 halves[4] = {bits.x & 0xFFFFu, bits.x >> 16, bits.y & 0xFFFFu,
                         bits.y >> 16};
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    value[i] = kd::f16_to_f32(
        kd::f32_to_f16(kd::bf16_to_f32(static_cast<u16>(halves[i]))));
  }
#else
  kd::Unpack4(bits, value);
#endif
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    value[i] = kd::f16_to_f32(kd::f32_to_f16(value[i] * scale[i]));
  }
  kd::WarpHadamard128(value, lane);
  *reinterpret_cast<uint2*>(operand + at) =
      make_uint2(kd::Pack2(value[0], value[1]), kd::Pack2(value[2], value[3]));
}

// The sums of the K slices in slice order, transformed, scaled, and the bias:
// one 128 block of one token per warp. A grid of m * out / 128 warps.
//   product: [slices][m][out]
extern "C" __global__ void __launch_bounds__(kThreads)
    kiln_linear_finish(const float* product, const u16* __restrict__ svh,
#if KILN_BIAS
                       const u16* __restrict__ bias,
#endif
                       float* __restrict__ out, u32 tokens, u32 slices) {
  kd::BeginStep();
  constexpr u32 kBlocks = kOut / 128;
  constexpr u32 kAhead = 4;  // slices whose loads overlap
  const u32 lane = threadIdx.x % 32;
  const u32 item = blockIdx.x * kWarps + threadIdx.x / 32;
  const u32 token = item / kBlocks;
  if (token >= tokens) return;
  const u32 column = item % kBlocks * 128 + lane * 4;
  const u64 at = static_cast<u64>(token) * kOut + column;
  const u64 slice = static_cast<u64>(tokens) * kOut;
  const float* from = product + at;
  float value[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (u32 s = 0; s < slices; s += kAhead) {
    float4 part[kAhead];
#pragma unroll
    for (u32 n = 0; n < kAhead; ++n) {
      part[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (s + n < slices) {
        part[n] = *reinterpret_cast<const float4*>(from + n * slice);
      }
    }
#pragma unroll
    for (u32 n = 0; n < kAhead; ++n) {
      value[0] += part[n].x;
      value[1] += part[n].y;
      value[2] += part[n].z;
      value[3] += part[n].w;
    }
    from += kAhead * slice;
  }
  kd::WarpHadamard128(value, lane);
  float scale[4];
  kd::Load4(svh + column, scale);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) value[i] *= scale[i];
#if KILN_BIAS
  float add[4];
  kd::Load4(bias + column, add);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) value[i] += add[i];
#endif
  *reinterpret_cast<float4*>(out + at) =
      make_float4(value[0], value[1], value[2], value[3]);
}
