// Kernels that call what the kernels of fused_moe are made of, for
// vector_harness.cc: the text that NVRTC compiles with Kiln's own headers.

#ifndef KILN_TESTS_GPU_VECTOR_KERNELS_H_
#define KILN_TESTS_GPU_VECTOR_KERNELS_H_

#include <string>
#include <vector>

#include "compiler/spec/program.h"
#include "templates/registry.h"

namespace kiln::gpu {

inline constexpr char kVectorKernels[] = R"cuda(
#include "device/fragment.h"
#include "device/platform.h"
#include "fused_moe/mx_fragment.h"
#include "fused_moe/mx_warp.h"
#include "fused_moe/sqg_fragment.h"

using kd::SpanBits;
using kd::u16;
using kd::u32;
using kd::u8;

__device__ __forceinline__ u32 Thread() {
  return blockIdx.x * blockDim.x + threadIdx.x;
}

// ---- decoders: the lane's eight weights in the order of the stream ---------

__device__ __forceinline__ void Unpack(const u32 a[4], u32 out[8]) {
  const u32 pairs[4] = {a[0], a[2], a[1], a[3]};
  KILN_UNROLLED
  for (u32 i = 0; i < 8; ++i) out[i] = pairs[i / 2] >> (16 * (i % 2)) & 0xFFFFu;
}

__device__ __forceinline__ void UnpackCodes(const u32 a[2], u32 out[8]) {
  KILN_UNROLLED
  for (u32 i = 0; i < 8; ++i) out[i] = a[i / 4] >> (8 * (i % 4)) & 0xFFu;
}

template <int CB>
struct Exl3 {
  template <int K>
  static __device__ void Run(const SpanBits& bits, u32 out[8]) {
    u32 a[4];
    kd::DecodeFragment<CB, K>(bits, a);
    Unpack(a, out);
  }
};

struct NpkHalf {
  template <int K>
  static __device__ void Run(const SpanBits& bits, u32 out[8]) {
    u32 a[4];
    kd::DecodeHalfNpkFragment<K>(bits, a);
    Unpack(a, out);
  }
};

struct NpkCodes {
  template <int K>
  static __device__ void Run(const SpanBits& bits, u32 out[8]) {
    u32 a[2];
    kd::DecodeNpkCodes<K>(bits, a);
    UnpackCodes(a, out);
  }
};

__device__ constexpr kd::SqgTable<u16> kHalves =
    kd::MakeSqgTable<u16>(kd::SqgNumber<10>());
__device__ constexpr kd::SqgTable<u16> kBfloats =
    kd::MakeSqgTable<u16>(kd::SqgNumber<7>());
__device__ constexpr kd::SqgTable<u16> kBytes =
    kd::MakeSqgTable<u16>(kd::SqgNumber<3>());
__device__ constexpr kd::SqgTable<u16> kCodes =
    kd::MakeSqgTable<u16>(kd::SqgCode());

template <bool kBfloat>
struct SqgByRank {
  template <int K>
  static __device__ void Run(const SpanBits& bits, u32 out[8]) {
    u32 a[4];
    kd::DecodeSqgFragment<K>(
        bits,
        [](u32 offset) -> u32 {
          return kBfloat ? kBfloats.value[offset / 2]
                         : kHalves.value[offset / 2];
        },
        a);
    Unpack(a, out);
  }
};

struct SqgCodes {
  template <int K>
  static __device__ void Run(const SpanBits& bits, u32 out[8]) {
    u32 a[2];
    kd::DecodeSqgCodes<K>(
        bits, [](u32 offset) -> u32 { return kCodes.value[offset / 2]; }, a);
    UnpackCodes(a, out);
  }
};

template <bool kBfloat>
struct SqgByState {
  template <int K>
  static __device__ void Run(const SpanBits& bits, u32 out[8]) {
    u32 a[4];
    kd::LookUpSqgFragment<K, kBfloat>(
        bits,
        [](u32 state) -> u32 { return kBytes.value[kd::SqgGroupOf<K>(state)]; },
        a);
    Unpack(a, out);
  }
};

// Every state at each of a lane's positions, between bits that are none of its:
// out[position][state], a state per thread.
template <class Decoder, int K>
__device__ void DecodeStates(u16* out) {
  const u32 state = Thread();
  for (u32 index = 0; index < 8; ++index) {
    u32 word[3];
    for (u32 i = 0; i < 3; ++i) {
      const u32 mixed = (state * 8 + index) * 0x9E3779B9u + i * 0x85EBCA6Bu;
      word[i] = (mixed ^ (mixed >> 15)) * 0x2C1B3C6Du;
    }
    const u32 from = (7 - index) * K;
    const u32 shift = from % 32;
    u32* const low = word + from / 32;
    low[0] = (low[0] & ~(0xFFFFu << shift)) | state << shift;
    if (shift > 16) {
      low[1] = (low[1] & ~(0xFFFFu >> (32 - shift))) | state >> (32 - shift);
    }
    u32 weights[8];
    Decoder::template Run<K>(SpanBits{word[0], word[1], word[2]}, weights);
    for (u32 i = 0; i < 8; ++i) {
      if (i == index) out[index * 65536 + state] = static_cast<u16>(weights[i]);
    }
  }
}

// A tile's weights in the order of the stream: one warp.
template <class Decoder, int K>
__device__ void DecodeTile(const u32* tile, u16* out) {
  const u32 lane = threadIdx.x;
  u32 weights[8];
  Decoder::template Run<K>(kd::LoadSpan(tile, kd::FindLaneSpan<K>(lane)),
                           weights);
  for (u32 i = 0; i < 8; ++i) out[8 * lane + i] = static_cast<u16>(weights[i]);
}

#define DECODER(name, K, ...)                                               \
  extern "C" __global__ void states_##name##_##K(u16* out) {                \
    DecodeStates<__VA_ARGS__, K>(out);                                      \
  }                                                                         \
  extern "C" __global__ void tile_##name##_##K(const u32* tile, u16* out) { \
    DecodeTile<__VA_ARGS__, K>(tile, out);                                  \
  }

#define DECODERS_2_TO_4(name, ...) \
  DECODER(name, 2, __VA_ARGS__)    \
  DECODER(name, 3, __VA_ARGS__)    \
  DECODER(name, 4, __VA_ARGS__)

#define DECODERS_2_TO_5(name, ...)   \
  DECODERS_2_TO_4(name, __VA_ARGS__) \
  DECODER(name, 5, __VA_ARGS__)

#define DECODERS_1_TO_8(name, ...)   \
  DECODER(name, 1, __VA_ARGS__)      \
  DECODERS_2_TO_5(name, __VA_ARGS__) \
  DECODER(name, 6, __VA_ARGS__)      \
  DECODER(name, 7, __VA_ARGS__)      \
  DECODER(name, 8, __VA_ARGS__)

DECODERS_1_TO_8(3inst, Exl3<kd::kCodebook3Inst>)
DECODERS_1_TO_8(mcg, Exl3<kd::kCodebookMcg>)
DECODERS_1_TO_8(mul1, Exl3<kd::kCodebookMul1>)
DECODERS_2_TO_5(npk_half, NpkHalf)
DECODERS_2_TO_5(npk_codes, NpkCodes)
DECODERS_2_TO_4(sqg_half, SqgByRank<false>)
DECODERS_2_TO_4(sqg_bfloat, SqgByRank<true>)
DECODERS_2_TO_4(sqg_codes, SqgCodes)
DECODERS_2_TO_4(sqg_look_up_half, SqgByState<false>)
DECODERS_2_TO_4(sqg_look_up_bfloat, SqgByState<true>)

// ---- MXFP8 -----------------------------------------------------------------

// A lane has kOwn neighbours; scale and power are what each lane is given.
template <u32 kOwn>
__device__ void Quantise(const float* x, u8* codes, u8* scale, float* rounded,
                         float* power) {
  const u32 thread = Thread();
  float v[kOwn];
  u8 own[kOwn];
  for (u32 i = 0; i < kOwn; ++i) v[i] = x[thread * kOwn + i];
  scale[thread] = kd::QuantizeToMxfp8(v, own);
  power[thread] = kd::RoundToMxfp8(v);
  for (u32 i = 0; i < kOwn; ++i) {
    codes[thread * kOwn + i] = own[i];
    rounded[thread * kOwn + i] = v[i];
  }
}

extern "C" __global__ void quantise_4(const float* x, u8* codes, u8* scale,
                                      float* rounded, float* power) {
  Quantise<4>(x, codes, scale, rounded, power);
}

extern "C" __global__ void quantise_16(const float* x, u8* codes, u8* scale,
                                       float* rounded, float* power) {
  Quantise<16>(x, codes, scale, rounded, power);
}

// A thread has a block.
extern "C" __global__ void quantise_32(const float* x, u8* codes, u8* scale,
                                       float* rounded, float* power) {
  const u32 thread = Thread();
  u8 own[kd::kMxBlock];
  scale[thread] = kd::QuantizeMxBlock(x + thread * kd::kMxBlock, own);
  power[thread] = kd::Ue8m0ToFloat(scale[thread]);
  for (u32 i = 0; i < kd::kMxBlock; ++i) {
    codes[thread * kd::kMxBlock + i] = own[i];
    rounded[thread * kd::kMxBlock + i] = kd::E4m3ToFloat(own[i]);
  }
}

// The value of each code, the code of that value, and each power.
extern "C" __global__ void codes(float* values, u8* again, float* powers) {
  const u8 code = static_cast<u8>(threadIdx.x);
  values[code] = kd::E4m3ToFloat(code);
  again[code] = kd::FloatToE4m3(values[code]);
  powers[code] = kd::Ue8m0ToFloat(code);
}

// ---- Hadamard transforms: one warp, 512 numbers ----------------------------

template <class Transform>
__device__ void InAWarp(const float* x, float* y, Transform transform) {
  const u32 lane = threadIdx.x;
  float v[16];
  for (u32 i = 0; i < 16; ++i) v[i] = x[16 * lane + i];
  transform(v, lane);
  for (u32 i = 0; i < 16; ++i) y[16 * lane + i] = v[i];
}

extern "C" __global__ void hadamard_128(const float* x, float* y) {
  InAWarp(x, y, [](float(&v)[16], u32 lane) {
    kd::WarpHadamard128Of512(v, lane, kd::HadamardScale());
  });
}

extern "C" __global__ void hadamard_512(const float* x, float* y) {
  InAWarp(x, y, [](float(&v)[16], u32 lane) { kd::WarpHadamard512(v, lane); });
}
)cuda";

inline SourceUnit VectorUnit() {
  SourceUnit unit;
  unit.name = "vector_kernels.cu";
  unit.text = kVectorKernels;
  unit.headers =
      CudaHeaders({"formats/npk_law.h", "fused_moe/mx_block.h",
                   "fused_moe/mx_fragment.h", "fused_moe/mx_warp.h",
                   "fused_moe/sqg_fragment.h", "fused_moe/sqg_table.h"});
  return unit;
}

}  // namespace kiln::gpu

#endif  // KILN_TESTS_GPU_VECTOR_KERNELS_H_
