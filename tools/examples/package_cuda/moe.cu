// fused_moe, recipe w4a16, EXL3 weights: the example of a kernel package for
// CUDA. One thread per output channel, binary32, no tensor cores: written to be
// read. Kiln compiles it with NVRTC, behind a prelude of macros for the request
// (KILN_HIDDEN, ...) and the axes (KILN_CHANNELS).
//
// A route is a token and one of its top_k experts. An id outside 0..E-1 makes
// it inactive: nothing is written for it, and nothing is read.
//
// Steps, one block of KILN_CHANNELS threads each ("r" is a route, "n" the first
// of KILN_CHANNELS channels, "t" a token):
//   rotate  [r, n]  x times suh, H128            -> gate_in, up_in  f32 [R][H]
//   fc1     [r, n]  two products, H128, svh, SiLU, suh, H128
//                                                -> activated       f32 [R][I]
//   fc2     [r, n]  product, H128, svh           -> routed          f32 [R][H]
//   combine [t, n]  weighted sum in router order -> out             f32 [m][H]
// H128 is the 128-point Hadamard transform. KILN_CHANNELS is a multiple of 128,
// so a block has all that a transform needs.

#include "device/activation.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "device/platform.h"
#include "device/trellis.h"

namespace {

using kd::u16;
using kd::u32;
using kd::u64;

constexpr u32 kHidden = KILN_HIDDEN;
constexpr u32 kInter = KILN_INTER;
constexpr u32 kExperts = KILN_EXPERTS;
constexpr u32 kTopK = KILN_TOPK;
constexpr u32 kChannels = KILN_CHANNELS;
constexpr u32 kTile = 16;

static_assert(kChannels % kd::kHadamardSize == 0, "whole Hadamard blocks");

#if KILN_ID_I64
using Id = kd::i64;
#else
using Id = kd::i32;
#endif

// The expert of a route, or kExperts for none.
__device__ u32 ExpertOf(const Id* topk_ids, u32 route) {
  const Id id = topk_ids[route];
  return id >= 0 && id < static_cast<Id>(kExperts) ? static_cast<u32>(id)
                                                   : kExperts;
}

__device__ float ToFloat(u16 x) {
#if KILN_X_BF16
  return kd::bf16_to_f32(x);
#else
  return kd::f16_to_f32(x);
#endif
}

// Where the row of a table over H begins: one for all experts, or one each.
__device__ u64 ScaleRow(u32 expert) {
#if KILN_SHARED_SUH
  return 0;
#else
  return static_cast<u64>(expert) * kHidden;
#endif
}

// The transform over the 128 neighbours of a thread, one value each. All
// threads of the block take part.
__device__ float Hadamard(float value) {
  __shared__ float values[kChannels];
  const u32 self = threadIdx.x;
  for (u32 stride = 1; stride < kd::kHadamardSize; stride *= 2) {
    __syncthreads();
    values[self] = value;
    __syncthreads();
    const float partner = values[self ^ stride];
    value = (self & stride) != 0 ? partner - value : value + partner;
  }
  return value * kd::HadamardScale();
}

// x[0 .. rows - 1] times one column of an expert's matrix [rows][columns] of
// native tiles, over ascending rows.
template <int K>
__device__ float Multiply(const u16* weights, u32 expert, u32 rows, u32 columns,
                          u32 column, const float* x) {
  const u64 tiles = static_cast<u64>(rows / kTile) * (columns / kTile);
  const u16* tile = weights + (expert * tiles + column / kTile) * kTile * K;
  float sum = 0;
  for (u32 row = 0; row < rows; row += kTile) {
    const u32* const words = reinterpret_cast<const u32*>(tile);
    for (u32 k = 0; k < kTile; ++k) {
      const u32 p = kd::ElementPosition(k, column % kTile);
      const float weight = kd::f16_to_f32(
          kd::DecodeState<KILN_CODEBOOK>(kd::Window<K>(words, p)));
      sum = kd::Fma(weight, x[row + k], sum);
    }
    tile += static_cast<u64>(columns / kTile) * kTile * K;
  }
  return sum;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kChannels)
    example_moe_rotate(const Id* topk_ids, const u16* x, const u16* gate_suh,
                       const u16* up_suh, float* gate_in, float* up_in) {
  const u32 route = blockIdx.x;
  const u32 channel = blockIdx.y * kChannels + threadIdx.x;
  const u32 expert = ExpertOf(topk_ids, route);
  if (expert == kExperts) return;  // the whole block
  const u64 scale = ScaleRow(expert) + channel;
  const float value =
      ToFloat(x[static_cast<u64>(route / kTopK) * kHidden + channel]);
  const u64 at = static_cast<u64>(route) * kHidden + channel;
  gate_in[at] = Hadamard(value * kd::f16_to_f32(gate_suh[scale]));
  up_in[at] = Hadamard(value * kd::f16_to_f32(up_suh[scale]));
}

extern "C" __global__ void __launch_bounds__(kChannels)
    example_moe_fc1(const Id* topk_ids, const u16* w_gate, const u16* w_up,
                    const u16* rotations, const float* gate_in,
                    const float* up_in, float* activated) {
  const u32 route = blockIdx.x;
  const u32 channel = blockIdx.y * kChannels + threadIdx.x;
  const u32 expert = ExpertOf(topk_ids, route);
  if (expert == kExperts) return;  // the whole block
  const u64 row = static_cast<u64>(route) * kHidden;
  const u16* const gate_svh = rotations + static_cast<u64>(expert) * 3 * kInter;
  const u16* const up_svh = gate_svh + kInter;
  const u16* const down_suh = up_svh + kInter;
  const float gate =
      Hadamard(Multiply<KILN_BITS_GATE>(w_gate, expert, kHidden, kInter,
                                        channel, gate_in + row)) *
      kd::f16_to_f32(gate_svh[channel]);
  const float up = Hadamard(Multiply<KILN_BITS_UP>(
                       w_up, expert, kHidden, kInter, channel, up_in + row)) *
                   kd::f16_to_f32(up_svh[channel]);
  activated[static_cast<u64>(route) * kInter + channel] =
      Hadamard(kd::Silu(gate) * up * kd::f16_to_f32(down_suh[channel]));
}

extern "C" __global__ void __launch_bounds__(kChannels)
    example_moe_fc2(const Id* topk_ids, const u16* w_down, const u16* down_svh,
                    const float* activated, float* routed) {
  const u32 route = blockIdx.x;
  const u32 channel = blockIdx.y * kChannels + threadIdx.x;
  const u32 expert = ExpertOf(topk_ids, route);
  if (expert == kExperts) return;  // the whole block
  const float sum = Hadamard(
      Multiply<KILN_BITS_DOWN>(w_down, expert, kInter, kHidden, channel,
                               activated + static_cast<u64>(route) * kInter));
  routed[static_cast<u64>(route) * kHidden + channel] =
      sum * kd::f16_to_f32(down_svh[ScaleRow(expert) + channel]);
}

extern "C" __global__ void __launch_bounds__(kChannels)
    example_moe_combine(const Id* topk_ids, const float* topk_weights,
                        const float* routed, float* out) {
  const u32 token = blockIdx.x;
  const u32 channel = blockIdx.y * kChannels + threadIdx.x;
  float sum = 0;
  for (u32 j = 0; j < kTopK; ++j) {
    const u32 route = token * kTopK + j;
    if (ExpertOf(topk_ids, route) == kExperts) continue;
    sum = kd::Fma(topk_weights[route],
                  routed[static_cast<u64>(route) * kHidden + channel], sum);
  }
  out[static_cast<u64>(token) * kHidden + channel] = sum;
}
