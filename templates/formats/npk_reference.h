// Host oracle of a fused expert layer over an NPK-1 sidecar: that of
// templates/fused_moe/mx_reference.h over a file's tensors instead of prepared
// ones, with or without a boundary.
//
// Source: prepared-weights specification, sections A.6 and A.9.5; trellis
// format specification, section 4.6.

#ifndef KILN_TEMPLATES_FORMATS_NPK_REFERENCE_H_
#define KILN_TEMPLATES_FORMATS_NPK_REFERENCE_H_

#include <cstdint>
#include <span>

#include "templates/formats/npk.h"
#include "templates/fused_moe/reference.h"

namespace kiln {

// One call. Pointers are host memory, borrowed.
struct NpkProblem {
  const NpkSidecar* weights = nullptr;  // one rank's
  int64_t tokens = 0;                   // m
  int64_t top_k = 0;
  const uint16_t* x = nullptr;          // bfloat16 [m][H]
  const int32_t* topk_ids = nullptr;    // [m][top_k]
  const float* topk_weights = nullptr;  // [m][top_k]
  // Optional, as in FusedMoeProblem.
  const int32_t* expert_map = nullptr;
  int64_t expert_map_size = 0;
};

// The rank's output rows of the listed tokens; those of all ranks add up to the
// layer's.
//   mode: one of MxExpert's.
//   out: [rows.size()][H], in front of the rounding to bfloat16.
// Thread-safe.
void NpkReferenceRows(const NpkProblem& problem, std::span<const int64_t> rows,
                      ReferenceMode mode, double* out);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_NPK_REFERENCE_H_
