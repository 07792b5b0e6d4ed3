// Host oracle of fused_moe, recipe w4a16, EXL3 weights: the arithmetic that
// every candidate is compared with before it is timed. It shares the trellis
// decoder (templates/device) with the kernels and nothing else.
//
// Source: trellis format specification, sections 1 and 4.

#ifndef KILN_TEMPLATES_FUSED_MOE_REFERENCE_H_
#define KILN_TEMPLATES_FUSED_MOE_REFERENCE_H_

#include <cstdint>
#include <span>

#include "compiler/spec/dtype.h"
#include "compiler/spec/request.h"

namespace kiln {

// One call of the op. Pointers are host memory, borrowed, laid out exactly as
// the op's parameter block says, with H = hidden, I = intermediate,
// E = experts. Binary16 and bfloat16 values are bit patterns.
struct FusedMoeProblem {
  int64_t tokens = 0;        // m
  int64_t hidden = 0;        // H, positive multiple of 128
  int64_t intermediate = 0;  // I, positive multiple of 128
  int64_t experts = 0;       // E, at least 1
  int64_t top_k = 0;         // at least 1
  Codebook codebook = Codebook::kMcg;
  Bits bits;                     // each 1..8
  bool shared_scales = false;    // gate_suh, up_suh, down_svh are [1][H]
  DType x_dtype = DType::kBf16;  // kBf16 or kF16
  DType id_dtype = DType::kI32;  // kI32 or kI64

  const void* x = nullptr;              // [m][H]
  const void* topk_ids = nullptr;       // [m][top_k]
  const float* topk_weights = nullptr;  // [m][top_k]
  const uint16_t* w_gate = nullptr;     // [E][H/16][I/16][16 * bits.gate]
  const uint16_t* w_up = nullptr;       // [E][H/16][I/16][16 * bits.up]
  const uint16_t* w_down = nullptr;     // [E][I/16][H/16][16 * bits.down]
  const uint16_t* gate_suh = nullptr;   // [E or 1][H] binary16
  const uint16_t* up_suh = nullptr;     // [E or 1][H] binary16
  // [E][3I] binary16: gate_svh, up_svh, down_suh of each expert.
  const uint16_t* rotations = nullptr;
  const uint16_t* down_svh = nullptr;  // [E or 1][H] binary16

  // Optional: an id indexes this table first and the entry is the expert, or
  // negative for none. Ids outside [0, expert_map_size) are inactive.
  const int32_t* expert_map = nullptr;
  int64_t expert_map_size = 0;
};

enum class ReferenceMode {
  // No rounding between the inputs and the result: binary64 throughout, x,
  // scales and decoded weights at their exact stored values.
  kFloat64,
  // The kernels' rounding boundaries (specification 4.5): a bfloat16 x is
  // rounded to binary16 first. Sums whose order the specification leaves open
  // are taken in binary64 and rounded to binary32 once.
  kStaged,
};

// Computes the output rows of the listed tokens only.
//   rows: token indices in [0, tokens); repeats are allowed.
//   out: [rows.size()][H], row i belongs to token rows[i].
//   threads: at least 1; workers live during the call only.
// Each expert's weights are decoded once per call, however many of the rows
// use it. Thread-safe. Panics (KILN_CHECK) on a malformed problem: callers
// build problems from validated requests.
void FusedMoeReferenceRows(const FusedMoeProblem& problem,
                           std::span<const int64_t> rows, ReferenceMode mode,
                           double* out, int threads);

// Decodes one [k][n] trellis matrix (k, n multiples of 16, `bits` per weight)
// to binary16 bits, row-major. Without scales and rotations.
void DecodeTrellisMatrix(const uint16_t* trellis, int64_t k, int64_t n,
                         int bits, Codebook codebook, uint16_t* out);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_REFERENCE_H_
