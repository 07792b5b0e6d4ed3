// What a CUDA kernel's file is compiled with to run under gpu_emulator.h: the
// words of the language, and in place of cuda/warp.h and cuda/e4m3.h
// functions of the same names. What an instruction does to the registers of a
// warp is written from the PTX manual, not from the kernels.

#ifndef KILN_TESTS_TEMPLATES_GPU_INTRINSICS_H_
#define KILN_TESTS_TEMPLATES_GPU_INTRINSICS_H_

#include <array>
#include <cstring>

#include "device/hadamard.h"
#include "device/half.h"
#include "device/platform.h"
#include "tests/templates/gpu_emulator.h"

#define KILN_TEMPLATES_CUDA_WARP_H_
#define KILN_TEMPLATES_CUDA_E4M3_H_
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct uint2 {
  unsigned int x, y;
};

struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};

struct alignas(16) float4 {
  float x, y, z, w;
};

inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }

inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z,
                        unsigned int w) {
  return {x, y, z, w};
}

inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}

#define threadIdx ::kiln::testing::gpu::thread_index
#define blockIdx ::kiln::testing::gpu::block_index
#define gridDim ::kiln::testing::gpu::grid_size

inline void __syncthreads() { kiln::testing::gpu::Barrier(); }

template <typename T>
T __shfl_sync(unsigned int, T v, unsigned int source) {
  return kiln::testing::gpu::Gather(v)[source % 32];
}

template <typename T>
T __shfl_xor_sync(unsigned int, T v, unsigned int mask) {
  return kiln::testing::gpu::Gather(v)[threadIdx.x % 32 ^ mask];
}

inline unsigned int __ballot_sync(unsigned int, bool predicate) {
  unsigned int mask = 0;
  const auto all = kiln::testing::gpu::Gather(predicate);
  for (unsigned int lane = 0; lane < 32; ++lane) {
    mask |= all[lane] ? 1u << lane : 0u;
  }
  return mask;
}

// Lanes whose value is this one's.
inline unsigned int __match_any_sync(unsigned int, unsigned int v) {
  unsigned int mask = 0;
  const auto all = kiln::testing::gpu::Gather(v);
  for (unsigned int lane = 0; lane < 32; ++lane) {
    mask |= all[lane] == v ? 1u << lane : 0u;
  }
  return mask;
}

inline void __syncwarp() { kiln::testing::gpu::Gather(0); }

inline unsigned int __popc(unsigned int v) {
  return static_cast<unsigned int>(__builtin_popcount(v));
}

inline void atomicAdd(unsigned int* to, unsigned int v) { *to += v; }

namespace kd {

// Through the form for one thread, which has the same bits.
inline void WarpHadamard128(float v[4], u32 lane) {
  const auto all =
      kiln::testing::gpu::Gather(std::array<float, 4>{v[0], v[1], v[2], v[3]});
  float values[kHadamardSize];
  std::memcpy(values, all.data(), sizeof values);
  Hadamard128(values);
  std::memcpy(v, values + 4 * lane, 4 * sizeof(float));
}

// ---- cuda/warp.h -----------------------------------------------------------

// Every step runs to its end before the next begins.
inline void BeginStep() {}

inline unsigned char* DynamicShared() {
  return kiln::testing::gpu::Shared(0, 0);
}

inline u32 SharedAddress(const void* p) {
  return static_cast<u32>(static_cast<const unsigned char*>(p) -
                          DynamicShared());
}

template <u32 kOffset = 0>
void CopyAsync16(u32 to, const void* from) {
  kiln::testing::gpu::CopyLater(
      to, static_cast<const unsigned char*>(from) + kOffset, 16);
}

template <u32 kBytes>
void CopyAsyncOrZero(u32 to, const void* from, bool copy) {
  kiln::testing::gpu::CopyLater(to, copy ? from : nullptr, kBytes);
}

inline void CommitCopies() { kiln::testing::gpu::Commit(); }

template <u32 kPending>
void WaitCopies() {
  kiln::testing::gpu::WaitForAllBut(kPending);
}

// ld.shared.u8.
inline u32 LoadShared8(u32 from) {
  return *kiln::testing::gpu::Shared(from, 1);
}

// ld.shared.u16.
inline u32 LoadShared16(u32 from) {
  u16 v;
  std::memcpy(&v, kiln::testing::gpu::Shared(from, sizeof v), sizeof v);
  return v;
}

// ldmatrix.sync.aligned.m8n8.x4.shared.b16.
void LoadMatrices(u32 from, u32 (&b)[4]);

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32. The sum of 16 products and
// what it is added to is rounded toward zero once.
void Mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

// The same of bf16.bf16.
void MmaBfloat(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

inline void MmaFromZero(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  d[0] = d[1] = d[2] = d[3] = 0.0f;
  Mma(d, a, b0, b1);
}

// movmatrix.sync.aligned.m8n8.trans.b16.
u32 Transpose8x8(u32 v);

// cvt.rn.f16x2.f32.
inline u32 RoundPair(float low, float high) {
  return static_cast<u32>(f32_to_f16(low)) | static_cast<u32>(f32_to_f16(high))
                                                 << 16;
}

// ---- cuda/e4m3.h -----------------------------------------------------------

inline void CopyAsyncWordOrZero(u32 to, const void* from, bool copy) {
  kiln::testing::gpu::CopyLater(to, copy ? from : nullptr, 4);
}

// How many significant bits the sums have that MMAs of E4M3 form; cut off
// behind them. 24, all of a binary32, if no test says otherwise: the manual
// states no number.
extern u32 e4m3_sum_bits;

// mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32, of which `d` is zero
// before.
void MmaE4m3FromZero(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);

// mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X
// .f32.e4m3.e4m3.f32.ue8m0 with both bytes `byte` and both threads 0.
void MmaE4m3ScaledBy(u32 byte, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                     u32 row_scales, u32 column_scales);

template <u32 kByte>
void MmaE4m3Scaled(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                   u32 row_scales, u32 column_scales) {
  MmaE4m3ScaledBy(kByte, d, a, b0, b1, row_scales, column_scales);
}

}  // namespace kd

#endif  // KILN_TESTS_TEMPLATES_GPU_INTRINSICS_H_
