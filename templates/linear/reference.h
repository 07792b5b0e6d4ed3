// Host oracle of linear, recipe w4a16: y = x W + bias with one trellis matrix.
// It shares the trellis decoder (templates/device) with kernels and nothing
// else.
//
// Source: trellis format specification, sections 1.1 to 1.7.

#ifndef KILN_TEMPLATES_LINEAR_REFERENCE_H_
#define KILN_TEMPLATES_LINEAR_REFERENCE_H_

#include <cstdint>
#include <span>

#include "compiler/spec/dtype.h"
#include "templates/fused_moe/reference.h"
#include "templates/fused_moe/trellis_codebook.h"

namespace kiln {

// One call of the op. Pointers are host memory, borrowed. Binary16 and bfloat16
// values are bit patterns.
struct LinearProblem {
  int64_t tokens = 0;        // m
  int64_t in_features = 0;   // positive multiple of 128
  int64_t out_features = 0;  // positive multiple of 128
  TrellisCodebook codebook = TrellisCodebook::kMcg;
  int bits = 0;                  // within the codebook's rates
  DType x_dtype = DType::kBf16;  // kBf16 or kF16

  const void* x = nullptr;         // [m][in]
  const uint16_t* w = nullptr;     // [in/16][out/16][16 bits]
  const uint16_t* suh = nullptr;   // [in] binary16
  const uint16_t* svh = nullptr;   // [out] binary16
  const uint16_t* bias = nullptr;  // [out] binary16, or none
};

// Computes the output rows of the listed tokens only, in binary32 but for
// kFloat64, which rounds nothing. Rounding boundaries of the other modes: a
// bfloat16 x to binary16; x suh to binary16; its Hadamard transform, in
// binary32, to binary16; the product's sums to binary32 (as kStaged or
// kSequential says); from there on binary32: the transform, times svh, plus
// bias.
//   rows: token indices in [0, tokens); repeats are allowed.
//   mode: none of w4a8.
//   out: [rows.size()][out_features], row i belongs to token rows[i].
//   threads: at least 1; workers live during the call only.
// Thread-safe. Panics (KILN_CHECK) on a malformed problem.
void LinearReferenceRows(const LinearProblem& problem,
                         std::span<const int64_t> rows, ReferenceMode mode,
                         double* out, int threads);

}  // namespace kiln

#endif  // KILN_TEMPLATES_LINEAR_REFERENCE_H_
