// Host oracle of fused_moe: the arithmetic that every candidate is compared
// with before it is timed, for the weights of every trellis container. It
// shares the trellis decoder (templates/device) with the kernels and nothing
// else.
//
// Source: trellis format specification, sections 1 to 4.

#ifndef KILN_TEMPLATES_FUSED_MOE_REFERENCE_H_
#define KILN_TEMPLATES_FUSED_MOE_REFERENCE_H_

#include <cstdint>
#include <span>

#include "compiler/spec/dtype.h"
#include "compiler/spec/request.h"
#include "templates/fused_moe/trellis_codebook.h"
#include "templates/fused_moe/trellis_matrix.h"

namespace kiln {

enum class MoeActivation : uint8_t {
  kSilu,  // g sigmoid(g) u
  kSitu,  // 4 tanh(g / 4) sigmoid(g) 25 tanh(u / 25)
};

// One call of the op. Pointers are host memory, borrowed, laid out exactly as
// the op's parameter block says, with H = hidden, I = intermediate,
// E = experts. Binary16 and bfloat16 values are bit patterns.
struct FusedMoeProblem {
  int64_t tokens = 0;        // m
  int64_t hidden = 0;        // H, positive multiple of 128
  int64_t intermediate = 0;  // I, positive multiple of 128
  int64_t experts = 0;       // E, at least 1
  int64_t top_k = 0;         // at least 1
  TrellisCodebook codebook = TrellisCodebook::kMcg;
  Bits bits;                     // within the codebook's rates
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

  // A layer of pair rates: I is 256 and the rates of expert e are those of byte
  // e of these tables instead of `bits`; experts follow each other without
  // gaps. Gate and up share rates. Both null or both [E].
  const uint8_t* rates_fc1 = nullptr;
  const uint8_t* rates_fc2 = nullptr;

  // A coupled layer: H is a multiple of 512, gate_suh serves both projections
  // and up_suh is not read. `rotations` is [E][6I]: gate_svh, up_svh, down_suh,
  // 2I signs before the activation and I behind it, each +1 or -1.
  bool coupled = false;

  MoeActivation activation = MoeActivation::kSilu;
  // Optional [E]: each expert's own, instead of `activation`.
  const MoeActivation* expert_activation = nullptr;

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
  // As kStaged, but such sums run over ascending input channels in binary32
  // with one fma per term, and the activation is device/activation.h or situ.h
  // on the CPU: bit for bit what cpu.cc and qsrt_cpu.cc in
  // templates/fused_moe promise.
  kSequential,
  // Those of recipe w4a8 (specification 4.6): the same, but both matrix
  // products read MXFP8 in blocks of 32. Only for the codebook sqg_e4m3, whose
  // values are E4M3 numbers.
  kStagedW4A8,
  // As kStagedW4A8 with sums as in kSequential; of TrellisMX as in
  // mx_reference.h.
  kSequentialW4A8,
  // As kStagedW4A8 and kSequentialW4A8, with activations of two terms: the
  // second is MXFP8 of what the first left. Only of TrellisMX, whose direct arm
  // has them; see mx_reference.h.
  kStagedW4A8Rp2,
  kSequentialW4A8Rp2,
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

// The same of a layer that is stored in parts, each with a share of the
// intermediate channels: the parts' results, added in order
// (specification 4.7).
//   parts: at least one; the same inputs, scales, H, E, I and `coupled`.
void FusedMoeReferenceParts(std::span<const FusedMoeProblem> parts,
                            std::span<const int64_t> rows, ReferenceMode mode,
                            double* out, int threads);

// The reference's Hadamard transform, in place, of 128 values, or of the 512
// that a coupled layer mixes. Its own inverse up to rounding.
void ReferenceHadamard(std::span<double> v, ReferenceMode mode);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_REFERENCE_H_
