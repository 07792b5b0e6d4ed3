// Instructions of a GPU that kernels issue, one function each: copies to shared
// memory, matrix fragments, the order of a plan's steps. A test that runs
// kernels on the host brings functions of its own in place of this header.
#ifndef KILN_TEMPLATES_CUDA_WARP_H_
#define KILN_TEMPLATES_CUDA_WARP_H_

#include "device/platform.h"

namespace kd {

// First thing in every kernel of a plan whose steps overlap: the next kernel
// may be set up from now on, and this one goes on when all earlier ones have
// ended and what they wrote is visible. Without that launch attribute, or below
// sm_90, it does nothing. Every thread calls it, so that a kernel never ends
// before those it depends on. What earlier steps wrote must not be read through
// parameters that are both const and __restrict__: the compiler may load from
// those at any time.
KILN_FN void BeginStep() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The block's dynamic shared memory, aligned to 16 bytes.
KILN_FN unsigned char* DynamicShared() {
  extern __shared__ uint4 kiln_dynamic_shared[];
  return reinterpret_cast<unsigned char*>(kiln_dynamic_shared);
}

KILN_FN u32 SharedAddress(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes from kOffset bytes behind `from`.
template <u32 kOffset = 0>
KILN_FN void CopyAsync16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1 + %2], 16;" ::"r"(to),
               "l"(from), "n"(kOffset));
}

// Copies kBytes (8 or 16), or writes as many zeros and reads nothing.
template <u32 kBytes>
KILN_FN void CopyAsyncOrZero(u32 to, const void* from, bool copy) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(from), "r"(copy ? 16 : 0));
  } else {
    static_assert(kBytes == 8, "8 or 16 bytes");
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to),
                 "l"(from), "r"(copy ? 8 : 0));
  }
}

KILN_FN void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns when all but this thread's last kPending groups have landed.
template <u32 kPending>
KILN_FN void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ldmatrix: lanes 8i .. 8i + 7 give the addresses of the rows of matrix i; b[i]
// is row l/4, columns 2(l%4), 2(l%4)+1 of it.
KILN_FN void LoadMatrices(u32 from, u32 (&b)[4]) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
      : "r"(from));
}

// d = a x b, binary16 with binary32 sums. Lane l: a[0] row l/4, k 2(l%4) +
// {0, 1}; a[1] row l/4 + 8; a[2], a[3] the same with k + 8; b0, b1 column l/4,
// the same k; d[0], d[1] row l/4, columns 2(l%4) + {0, 1}; d[2], d[3] row
// l/4 + 8.
KILN_FN void MmaFromZero(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1),
        "f"(0.0f));
}

// d += a x b.
KILN_FN void Mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same of bfloat16 numbers.
KILN_FN void MmaBfloat(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Lane l holds row l/4, columns 2(l%4), 2(l%4)+1 of an 8x8 matrix of binary16;
// returns the same of its transpose.
KILN_FN u32 Transpose8x8(u32 v) {
  u32 t;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
  return t;
}

// Two numbers rounded to binary16, the first in the low half.
KILN_FN u32 RoundPair(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Numbers of 16 and 8 bits of a table in shared memory that nobody writes any
// more when `from` is known: not in the order of other statements.
KILN_FN u32 LoadShared16(u32 from) {
  u16 v;
  asm("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from));
  return v;
}

KILN_FN u32 LoadShared8(u32 from) {
  u32 v;
  asm("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(from));
  return v;
}

// Words of shared memory, in the order of other volatile statements.
KILN_FN void LoadShared(u32 from, u32& a) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(a) : "r"(from));
}

KILN_FN void LoadShared(u32 from, u32& a, u32& b) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(a), "=r"(b)
               : "r"(from));
}

KILN_FN void LoadShared(u32 from, u32& a, u32& b, u32& c, u32& d) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(from));
}

}  // namespace kd

#endif  // KILN_TEMPLATES_CUDA_WARP_H_
