// What CUDA kernels of grouped matrix products share: the list of row tiles
// that routing writes and products read, asynchronous copies, the way of sums
// to memory, and how a step waits for the one before it.
//
// CUDA only; no header other than Kiln's own.
#ifndef KILN_TEMPLATES_CUDA_GROUPED_PRODUCT_H_
#define KILN_TEMPLATES_CUDA_GROUPED_PRODUCT_H_

#include "device/platform.h"

namespace kd {

constexpr u32 kNone = 0xFFFFFFFFu;

// One sorted row: the route it came from and the expert that serves it.
struct alignas(8) Row {
  u32 route;
  u32 expert;
};

// A run of consecutive sorted rows of one expert, at most a tile of them.
struct alignas(16) Tile {
  u32 expert;
  u32 first;
  u32 rows;
  u32 unused;
};

struct alignas(16) Totals {
  u32 tiles;
  u32 rows;
  u32 unused[2];
};

// ---- steps of a plan -------------------------------------------------------

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

// ---- copies ----------------------------------------------------------------

KILN_FN u32 SharedAddress(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes from kOffset bytes behind `from`.
template <u32 kOffset = 0>
KILN_FN void CopyAsync16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1 + %2], 16;" ::"r"(to),
               "l"(from), "n"(kOffset));
}

// Copies 16 bytes, or writes 16 zero bytes and reads nothing.
KILN_FN void CopyAsync16OrZero(u32 to, const void* from, bool copy) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
               "l"(from), "r"(copy ? 16 : 0));
}

KILN_FN void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <u32 kPending>
KILN_FN void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// In the order of other volatile statements.
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

// ---- results ---------------------------------------------------------------

// Lane l holds row l/4, columns 2(l%4), 2(l%4)+1 of an 8x8 matrix of fp16;
// returns the same of its transpose.
KILN_FN u32 Transpose8x8(u32 v) {
  u32 t;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
  return t;
}

KILN_FN u32 RoundPair(float low, float high) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Stores the sums of 16 channels x 8 rows as fp16. Sums lie as an MMA leaves
// them: d[0], d[1] are channel lane/4 of rows 2(lane%4) and the next, d[2] and
// d[3] channel lane/4 + 8 of the same. `to` is channel 2(lane%4) of row lane/4,
// stored to only where `store`.
KILN_FN void StoreRounded(const float* d, u16* to, bool store) {
  const u32 low = Transpose8x8(RoundPair(d[0], d[1]));
  const u32 high = Transpose8x8(RoundPair(d[2], d[3]));
  if (store) {
    *reinterpret_cast<u32*>(to) = low;
    *reinterpret_cast<u32*>(to + 8) = high;
  }
}

// Byte address of tile (0, column / 16) of an expert's matrix.
template <int kBits, u32 kDepth, u32 kWidth>
KILN_FN const unsigned char* ExpertTiles(const u16* weights, u32 expert,
                                         u32 column) {
  constexpr u64 kExpertBytes = static_cast<u64>(kDepth) * kWidth * kBits / 8;
  return reinterpret_cast<const unsigned char*>(weights) +
         expert * kExpertBytes + column * (2 * kBits);
}

}  // namespace kd

#endif  // KILN_TEMPLATES_CUDA_GROUPED_PRODUCT_H_
