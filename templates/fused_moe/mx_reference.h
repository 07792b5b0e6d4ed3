// Host oracle of fused_moe over TrellisMX weights: the arithmetic that every
// candidate is compared with. It shares the state law (formats/npk_law.h) and
// the activation's definition with the kernels and nothing else.
//
// Source: prepared-weights specification, sections A.6 and A.9.

#ifndef KILN_TEMPLATES_FUSED_MOE_MX_REFERENCE_H_
#define KILN_TEMPLATES_FUSED_MOE_MX_REFERENCE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "compiler/spec/request.h"
#include "templates/fused_moe/op_mx.h"
#include "templates/fused_moe/reference.h"

namespace kiln {

// E4M3 values of one matrix's stream, row-major [out][in], without scales.
//   stream: [in/16][out/16][8 bits] words, little-endian.
std::vector<double> DecodeNpkStream(const uint8_t* stream, int bits, size_t out,
                                    size_t in);

// One expert between the rows of x and the sum of its token's routes.
//
// Modes: kFloat64 rounds nothing and quantises no activation. kStaged is the
// small-M arm, kStagedW4A8 the grouped one, kStagedW4A8Rp2 the direct one with
// its remainder: x to binary16, transforms and scales in binary32, binary16 or
// MXFP8 in one or two terms in front of each product, its result to binary16,
// routes in order in binary32; sums of products, whose order is open, in
// binary64. kSequential, kSequentialW4A8 and kSequentialW4A8Rp2 are the same
// with the sums of mx_cpu.cc, bit for bit.
class MxExpert {
 public:
  // Binary16 bits and decoded weights, scales applied. Without a boundary
  // (`suh` empty) the other tables are empty too.
  struct Weights {
    std::vector<double> gate;     // [I][H]
    std::vector<double> up;       // [I][H]
    std::vector<double> down;     // [H][I]
    std::vector<uint16_t> suh;    // [H]
    std::vector<uint16_t> inner;  // [3I]: gate_svh, up_svh, down_suh
    std::vector<uint16_t> signs;  // [3I]: 2I before the activation, I behind
    std::vector<uint16_t> svh;    // [H]
  };

  //   limit: of gate and up; infinity for none.
  MxExpert(Weights weights, double limit, ReferenceMode mode);

  // From a token's row to the expert's, in front of its router weight.
  std::vector<double> Run(std::vector<double> a) const;

 private:
  std::vector<double> Boundary(const std::vector<double>& gate,
                               const std::vector<double>& up) const;

  Weights w_;
  double limit_;
  ReferenceMode mode_;
};

// x as the op reads it: rounded to binary16 but for kFloat64.
double MxInput(double x, ReferenceMode mode);

// Adds weight * route to `sum`, as the mode rounds.
void MxAddRoute(double weight, std::span<const double> route,
                ReferenceMode mode, std::span<double> sum);

// The H512 behind the sum of the routes, of the coupled boundary.
void MxFinish(ReferenceMode mode, std::span<double> sum);

// One call over prepared tensors. Slots are those of MxSlot; pointers are host
// memory, borrowed.
struct MxProblem {
  RequestGeometry geometry;
  int64_t tokens = 0;
  const void* slots[kMxParamCount] = {};  // the output's is not read

  const void* slot(MxParam param) const {
    return slots[MxSlot(geometry, param)];
  }
};

// Output rows [rows.size()][H] of the listed tokens. Each expert that they use
// is decoded once.
//   threads: at least 1.
// Thread-safe.
void MxReferenceRows(const MxProblem& problem, std::span<const int64_t> rows,
                     ReferenceMode mode, double* out, int threads);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_MX_REFERENCE_H_
