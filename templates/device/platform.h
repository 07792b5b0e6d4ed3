// Names every device header and kernel relies on: integer types, the function
// qualifier, bit casts, loop unrolling.
//
// Compiled unchanged by NVRTC (which sees no include path), by the embedded
// Clang (-ffreestanding) and by g++ in tests and references, so nothing under
// device/ may include a system or toolkit header.
#ifndef KILN_DEVICE_PLATFORM_H_
#define KILN_DEVICE_PLATFORM_H_

// KILN_ON_CUDA: the code is being compiled for an NVIDIA GPU.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define KILN_ON_CUDA 1
#define KILN_FN __device__ __forceinline__
#else
#define KILN_ON_CUDA 0
#define KILN_FN inline __attribute__((always_inline))
#endif

// KILN_UNROLLED asks for full unrolling of the loop that follows it.
#if defined(__clang__) || KILN_ON_CUDA
#define KILN_UNROLLED _Pragma("unroll")
#else
#define KILN_UNROLLED _Pragma("GCC unroll 128")
#endif

namespace kd {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i16 = short;
using i32 = int;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8,
              "fixed-width types are the ones every Kiln target has");

KILN_FN u32 FloatBits(float v) {
#if KILN_ON_CUDA
  return __float_as_uint(v);
#else
  return __builtin_bit_cast(u32, v);
#endif
}

KILN_FN float BitsFloat(u32 v) {
#if KILN_ON_CUDA
  return __uint_as_float(v);
#else
  return __builtin_bit_cast(float, v);
#endif
}

// One rounding. The CPU form is a plain expression inside the compiler
// builtin: every CPU target Kiln generates code for has the instruction.
KILN_FN float Fma(float a, float b, float c) {
#if KILN_ON_CUDA
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

}  // namespace kd

#endif  // KILN_DEVICE_PLATFORM_H_
