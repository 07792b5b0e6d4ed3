// The linear op as its callers see it: the parameter block, and what templates
// for all targets have in common.

#ifndef KILN_TEMPLATES_LINEAR_OP_H_
#define KILN_TEMPLATES_LINEAR_OP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/spec/plan.h"
#include "compiler/spec/request.h"

namespace kiln {

// What the caller's parameter block points at, 8 bytes each, in this order; a
// geometry without a bias has no slot for one. K = bits. The weights are the
// native trellis tensors of the format specification (1.7).
enum class LinearParam : uint32_t {
  kX,     // io_dtype [m][in]
  kW,     // i16 [in/16][out/16][16K]
  kSuh,   // f16 [in]
  kSvh,   // f16 [out]
  kBias,  // f16 [out]
  kOut,   // f32 [m][out]; every element is written
};

// Slot of a parameter in the block.
uint32_t LinearSlotOf(const RequestGeometry& geometry, LinearParam param);

// The slots as declarations, in order.
std::vector<ParamDecl> LinearParams(const RequestGeometry& geometry);

// Bytes of each slot's buffer for `tokens` rows.
std::vector<uint64_t> LinearBytes(const RequestGeometry& geometry,
                                  uint32_t tokens);

// The #defines that specialise a source for a geometry, one per line: see the
// head of cpu.cc.
std::string LinearPrelude(const RequestGeometry& geometry);

// Largest relative Frobenius error of an output row against the float64
// oracle. Rounding at the boundaries of recipe w4a16 alone costs 3e-4 to 4e-4
// on random data; a single wrong element of a row of 2048 costs 2e-2.
inline constexpr double kLinearTolerance = 1e-3;

}  // namespace kiln

#endif  // KILN_TEMPLATES_LINEAR_OP_H_
