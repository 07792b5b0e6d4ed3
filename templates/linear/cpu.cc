// linear, recipe w4a16, EXL3 weights, on the CPU: y = x W + bias.
//
// Kernel source: compiled at run time by the embedded Clang for one request
// and one candidate, with a prelude of macros before the text. Rounding
// boundaries are those of linear/reference.h. Every sum over input channels
// runs in ascending order with one fused multiply-add per term, so all
// candidates of this template give identical bits.
//
// Words: the tokens are cut into ceil(m / T) tiles of T = KILN_TOKENS_TILE
// rows; row r of tile t is token t T + r. C is KILN_CHANNELS_TILE, "c512" is
// ceil(channels / 512).
//
// Steps, in this order. "p" marks a parameter of the op, "a" an arena slice;
// `tokens` is live m.
//   entry                     grid                        arguments
//   kiln_linear_cpu_rotate    ceil(m / T), c512(in), 1    tokens, p x, p suh,
//     a rotated
//   kiln_linear_cpu_multiply  ceil(m / T), ceil(out / C), 1   p w, a rotated,
//     a sums
//   kiln_linear_cpu_finish    m, c512(out), 1             a sums, p svh,
//     p bias (with KILN_BIAS), p out
//
// Arena slices for a capacity m, in bytes, n = ceil(m / T):
//   rotated  f16 [n][in][T]   2 n T in     rows behind m are zeros
//   sums     f32 [n T][out]   4 n T out
// Nothing is read that the same launch did not write.
//
// Macros besides those of cpu/trellis_product.h:
//   KILN_IN, KILN_OUT   channels, multiples of 128
//   KILN_BITS           per weight, 1 to 8
//   KILN_BIAS           1: there is one
// Axes: KILN_TOKENS_TILE, KILN_CHANNELS_TILE, KILN_K_TILE and KILN_UNROLL.

#include "cpu/trellis_product.h"
#include "device/cpu_entry.h"
#include "device/platform.h"

namespace {

constexpr u32 kIn = KILN_IN;
constexpr u32 kOut = KILN_OUT;

static_assert(kIn % kBlock == 0 && kOut % kBlock == 0,
              "input and output channels are multiples of 128");

// ---- rotate ----------------------------------------------------------------

struct RotateArgs {
  u32 tokens;
  const u16* x;
  const u16* suh;
  u16* rotated;
};

void Rotate(const RotateArgs& args, u32 tile, u32 chunk, u32) {
  const u32 end = (chunk + 1) * kChunk < kIn ? (chunk + 1) * kChunk : kIn;
  for (u32 base = chunk * kChunk; base < end; base += kBlock) {
    u16 rotated[kRows][kBlock];
    for (u32 row = 0; row < kRows; ++row) {
      const u64 token = static_cast<u64>(tile) * kRows + row;
      if (token >= args.tokens) {
        for (u32 c = 0; c < kBlock; ++c) rotated[row][c] = 0;
        continue;
      }
      float x[kBlock];
      LoadX(args.x + token * kIn + base, x);
      RotateRow(x, args.suh + base, rotated[row]);
    }
    StoreTransposed(
        rotated, args.rotated + (static_cast<u64>(tile) * kIn + base) * kRows);
  }
}

// ---- multiply --------------------------------------------------------------

struct MultiplyArgs {
  const u16* w;
  const u16* rotated;
  float* sums;
};

void Multiply(const MultiplyArgs& args, u32 tile, u32 strip_index, u32) {
  const u32 column = strip_index * kStrip;
  const u32 groups = ColumnsOf(kOut, column) / kGroup;
  const u64 first = static_cast<u64>(tile) * kRows;
  Strip strip;
  Product<KILN_BITS>::Run(reinterpret_cast<const u32*>(args.w), kIn, kOut,
                          column, groups, args.rotated + first * kIn, &strip);
  for (u32 row = 0; row < kRows; ++row) {
    float* to = args.sums + (first + row) * kOut + column;
    for (u32 g = 0; g < groups; ++g) {
      for (u32 half = 0; half < 2; ++half) {
        float lanes[kLanes];
        kd::Store(lanes, strip.sum[g][half][row]);
        for (u32 native = 0; native < kGroupTiles; ++native) {
          __builtin_memcpy(to + g * kGroup + native * 16 + half * 8,
                           lanes + native * 8, 8 * sizeof(float));
        }
      }
    }
  }
}

// ---- finish ----------------------------------------------------------------

struct FinishArgs {
  const float* sums;
  const u16* svh;
#if KILN_BIAS
  const u16* bias;
#endif
  float* out;
};

void Finish(const FinishArgs& args, u32 token, u32 chunk, u32) {
  const u32 end = (chunk + 1) * kChunk < kOut ? (chunk + 1) * kChunk : kOut;
  for (u32 base = chunk * kChunk; base < end; base += kBlock) {
    const u64 at = static_cast<u64>(token) * kOut + base;
    float v[kBlock];
    __builtin_memcpy(v, args.sums + at, sizeof v);
    kd::VectorHadamard128<kLanes>(v);
    for (u32 c = 0; c < kBlock; c += kLanes) {
      F y = kd::Load<F>(v + c) * kd::LoadHalves<kLanes>(args.svh + base + c);
#if KILN_BIAS
      y += kd::LoadHalves<kLanes>(args.bias + base + c);
#endif
      kd::Store(args.out + at + c, y);
    }
  }
}

}  // namespace

KILN_CPU_ENTRY(kiln_linear_cpu_rotate, RotateArgs, Rotate)
KILN_CPU_ENTRY(kiln_linear_cpu_multiply, MultiplyArgs, Multiply)
KILN_CPU_ENTRY(kiln_linear_cpu_finish, FinishArgs, Finish)
