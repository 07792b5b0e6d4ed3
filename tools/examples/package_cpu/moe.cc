// fused_moe, recipe w4a16, EXL3 weights: the example of a kernel package for
// the CPU. Plain loops in binary32, no vectors, one route at a time: written to
// be read. Kiln compiles it with its embedded Clang, behind a prelude of macros
// for the request (KILN_HIDDEN, ...) and the axes (KILN_CHANNELS).
//
// A route is a token and one of its top_k experts. An id outside 0..E-1 makes
// it inactive: nothing is written for it, and nothing is read.
//
// Steps, one block each ("r" is a route, "n" the first of KILN_CHANNELS output
// channels, "t" a token):
//   rotate  [r]     x times suh, H128            -> gate_in, up_in  f32 [R][H]
//   fc1     [r, n]  two products, H128, svh, SiLU, suh, H128
//                                                -> activated       f32 [R][I]
//   fc2     [r, n]  product, H128, svh           -> routed          f32 [R][H]
//   combine [t]     weighted sum in router order -> out             f32 [m][H]
// H128 is the 128-point Hadamard transform. KILN_CHANNELS is a multiple of 128,
// so a block of a product has all that a transform needs.
//
// Every sum runs in one fixed order, so all points give the same bits.

#include "device/activation.h"
#include "device/cpu_builtins.h"
#include "device/cpu_entry.h"
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
constexpr u32 kBlock = kd::kHadamardSize;
constexpr u32 kTile = 16;

static_assert(kChannels % kBlock == 0, "whole Hadamard blocks");

#if KILN_ID_I64
using Id = kd::i64;
#else
using Id = kd::i32;
#endif

// The expert of a route, or kExperts for none.
u32 ExpertOf(const Id* topk_ids, u32 route) {
  const Id id = topk_ids[route];
  return id >= 0 && id < static_cast<Id>(kExperts) ? static_cast<u32>(id)
                                                   : kExperts;
}

float ToFloat(u16 x) {
#if KILN_X_BF16
  return kd::bf16_to_f32(x);
#else
  return kd::f16_to_f32(x);
#endif
}

// Where the row of a table over H begins: one for all experts, or one each.
u64 ScaleRow(u32 expert) {
#if KILN_SHARED_SUH
  return 0;
#else
  return static_cast<u64>(expert) * kHidden;
#endif
}

// out[0 .. kBlock - 1] = x[0 .. rows - 1] times the columns from `column` on of
// one expert's matrix [rows][columns] of native tiles.
template <int K>
void Multiply(const u16* words, u32 rows, u32 columns, u32 column,
              const float* x, float* out) {
  for (u32 n = 0; n < kBlock; ++n) out[n] = 0;
  for (u32 row = 0; row < rows; row += kTile) {
    for (u32 n = 0; n < kBlock; n += kTile) {
      const u64 tile = static_cast<u64>(row / kTile) * (columns / kTile) +
                       (column + n) / kTile;
      const u32* const bits =
          reinterpret_cast<const u32*>(words + tile * kTile * K);
      for (u32 p = 0; p < kd::kTileWeights; ++p) {
        const float weight = kd::f16_to_f32(
            kd::DecodeState<KILN_CODEBOOK>(kd::Window<K>(bits, p)));
        float* const sum = out + n + kd::PositionColumn(p);
        *sum = kd::Fma(weight, x[row + kd::PositionRow(p)], *sum);
      }
    }
  }
}

// The words of one expert's matrix.
template <int K>
const u16* MatrixOf(const u16* weights, u32 expert) {
  return weights + static_cast<u64>(expert) * (kHidden / kTile) *
                       (kInter / kTile) * kTile * K;
}

struct RotateArgs {
  const Id* topk_ids;
  const u16* x;
  const u16* gate_suh;
  const u16* up_suh;
  float* gate_in;
  float* up_in;
};

void Rotate(const RotateArgs& args, u32 route, u32, u32) {
  const u32 expert = ExpertOf(args.topk_ids, route);
  if (expert == kExperts) return;
  const u16* const x = args.x + static_cast<u64>(route / kTopK) * kHidden;
  float* const gate = args.gate_in + static_cast<u64>(route) * kHidden;
  float* const up = args.up_in + static_cast<u64>(route) * kHidden;
  const u64 scale = ScaleRow(expert);
  for (u32 c = 0; c < kHidden; ++c) {
    const float value = ToFloat(x[c]);
    gate[c] = value * kd::f16_to_f32(args.gate_suh[scale + c]);
    up[c] = value * kd::f16_to_f32(args.up_suh[scale + c]);
  }
  for (u32 c = 0; c < kHidden; c += kBlock) {
    kd::Hadamard128(gate + c);
    kd::Hadamard128(up + c);
  }
}

struct Fc1Args {
  const Id* topk_ids;
  const u16* w_gate;
  const u16* w_up;
  const u16* rotations;
  const float* gate_in;
  const float* up_in;
  float* activated;
};

void Fc1(const Fc1Args& args, u32 route, u32 chunk, u32) {
  const u32 expert = ExpertOf(args.topk_ids, route);
  if (expert == kExperts) return;
  const u64 row = static_cast<u64>(route) * kHidden;
  const u16* const gate_svh =
      args.rotations + static_cast<u64>(expert) * 3 * kInter;
  const u16* const up_svh = gate_svh + kInter;
  const u16* const down_suh = up_svh + kInter;
  float* const out = args.activated + static_cast<u64>(route) * kInter;
  for (u32 n = 0; n < kChannels; n += kBlock) {
    const u32 column = chunk * kChannels + n;
    float gate[kBlock];
    float up[kBlock];
    Multiply<KILN_BITS_GATE>(MatrixOf<KILN_BITS_GATE>(args.w_gate, expert),
                             kHidden, kInter, column, args.gate_in + row, gate);
    Multiply<KILN_BITS_UP>(MatrixOf<KILN_BITS_UP>(args.w_up, expert), kHidden,
                           kInter, column, args.up_in + row, up);
    kd::Hadamard128(gate);
    kd::Hadamard128(up);
    for (u32 c = 0; c < kBlock; ++c) {
      const float g = gate[c] * kd::f16_to_f32(gate_svh[column + c]);
      const float u = up[c] * kd::f16_to_f32(up_svh[column + c]);
      gate[c] = kd::Silu(g) * u * kd::f16_to_f32(down_suh[column + c]);
    }
    kd::Hadamard128(gate);
    for (u32 c = 0; c < kBlock; ++c) out[column + c] = gate[c];
  }
}

struct Fc2Args {
  const Id* topk_ids;
  const u16* w_down;
  const u16* down_svh;
  const float* activated;
  float* routed;
};

void Fc2(const Fc2Args& args, u32 route, u32 chunk, u32) {
  const u32 expert = ExpertOf(args.topk_ids, route);
  if (expert == kExperts) return;
  const float* const x = args.activated + static_cast<u64>(route) * kInter;
  float* const out = args.routed + static_cast<u64>(route) * kHidden;
  const u16* const svh = args.down_svh + ScaleRow(expert);
  for (u32 n = 0; n < kChannels; n += kBlock) {
    const u32 column = chunk * kChannels + n;
    float* const y = out + column;
    Multiply<KILN_BITS_DOWN>(MatrixOf<KILN_BITS_DOWN>(args.w_down, expert),
                             kInter, kHidden, column, x, y);
    kd::Hadamard128(y);
    for (u32 c = 0; c < kBlock; ++c) y[c] *= kd::f16_to_f32(svh[column + c]);
  }
}

struct CombineArgs {
  const Id* topk_ids;
  const float* topk_weights;
  const float* routed;
  float* out;
};

void Combine(const CombineArgs& args, u32 token, u32, u32) {
  float* const out = args.out + static_cast<u64>(token) * kHidden;
  for (u32 c = 0; c < kHidden; ++c) out[c] = 0;
  for (u32 j = 0; j < kTopK; ++j) {
    const u32 route = token * kTopK + j;
    if (ExpertOf(args.topk_ids, route) == kExperts) continue;
    const float weight = args.topk_weights[route];
    const float* const y = args.routed + static_cast<u64>(route) * kHidden;
    for (u32 c = 0; c < kHidden; ++c) out[c] = kd::Fma(weight, y[c], out[c]);
  }
}

}  // namespace

KILN_CPU_ENTRY(example_moe_rotate, RotateArgs, Rotate)
KILN_CPU_ENTRY(example_moe_fc1, Fc1Args, Fc1)
KILN_CPU_ENTRY(example_moe_fc2, Fc2Args, Fc2)
KILN_CPU_ENTRY(example_moe_combine, CombineArgs, Combine)
