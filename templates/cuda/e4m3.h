// Instructions for operands of E4M3 codes, one function each, beside those of
// warp.h: for GPUs whose tensor cores multiply E4M3 themselves. A test that
// runs kernels on the host brings functions of its own in place of this header.
#ifndef KILN_TEMPLATES_CUDA_E4M3_H_
#define KILN_TEMPLATES_CUDA_E4M3_H_

#include "device/platform.h"

namespace kd {

// d = a x b of E4M3 codes, four in a register, with binary32 sums; sm_89 and
// later. Lane l: a[0] row l/4, k 4(l%4) + {0, 1, 2, 3}; a[1] row l/4 + 8; a[2],
// a[3] the same with k + 16; b0, b1 column l/4, the same k; d as Mma of warp.h.
KILN_FN void MmaE4m3FromZero(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1),
        "f"(0.0f));
}

// d += a x b, each row of a and column of b times a scale of its own, 2^(byte -
// 127); sm_120a and sm_121a. The scales are byte kByte of the words of some
// lanes: 4r those of row r and of column r, 4r + 1 that of row r + 8.
template <u32 kByte>
KILN_FN void MmaE4m3Scaled(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1,
                           u32 row_scales, u32 column_scales) {
  static_assert(kByte < 4, "a word has four scales");
  asm("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale"
      ".scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, "
      "%10, {%12, 0}, %11, {%12, 0};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1),
        "r"(row_scales), "r"(column_scales), "n"(kByte));
}

// Copies four bytes, the scales of 128 channels, or writes zeros and reads
// nothing.
KILN_FN void CopyAsyncWordOrZero(u32 to, const void* from, bool copy) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to),
               "l"(from), "r"(copy ? 4 : 0));
}

}  // namespace kd

#endif  // KILN_TEMPLATES_CUDA_E4M3_H_
