// The fused_moe op as its callers see it: the parameter block, and what the
// CPU and CUDA templates have in common.

#ifndef KILN_TEMPLATES_FUSED_MOE_OP_H_
#define KILN_TEMPLATES_FUSED_MOE_OP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/spec/plan.h"
#include "compiler/spec/request.h"

namespace kiln {

// Slots of the caller's parameter block, 8 bytes each, all pointers. H =
// hidden, I = intermediate, E = experts, K = bits of the projection. The
// weights are the native trellis tensors of the format specification (§2.2).
enum class FusedMoeParam : uint32_t {
  kX,            // io_dtype [m][H]
  kTopkIds,      // id_dtype [m][top_k]; active iff 0 <= id < E
  kTopkWeights,  // f32 [m][top_k]
  kWGate,        // i16 [E][H/16][I/16][16K]
  kWUp,          // i16 [E][H/16][I/16][16K]
  kWDown,        // i16 [E][I/16][H/16][16K]
  kGateSuh,      // f16 [E][H], or [1][H] with shared scales
  kUpSuh,        // f16 [E][H], or [1][H] with shared scales
  kRotations,    // f16 [E][3I]: gate_svh, up_svh, down_suh
  kDownSvh,      // f16 [E][H], or [1][H] with shared scales
  kOut,          // f32 [m][H]; every element is written
};
inline constexpr uint32_t kFusedMoeParamCount = 11;

// The slots as declarations, in order.
std::vector<ParamDecl> FusedMoeParams(const RequestGeometry& geometry);

// Argument that passes a slot to a kernel.
inline Arg FusedMoeArg(FusedMoeParam param) {
  return Arg::Param(static_cast<uint64_t>(param));
}

// Bytes of each slot's buffer for `tokens` rows.
std::vector<uint64_t> FusedMoeBytes(const RequestGeometry& geometry,
                                    uint32_t tokens);

// The #defines that specialise a source for a geometry, one per line: see the
// head of cuda.cu and cpu.cc.
std::string FusedMoePrelude(const RequestGeometry& geometry);

// Upper bound of the tiles of `tile` rows of one expert that m tokens make,
// times `blocks`, as a launch dimension: never more than one tile per route,
// nor more than full tiles plus one ragged tile per expert.
LaunchDim FusedMoeTiles(const RequestGeometry& geometry, uint32_t tile,
                        uint32_t blocks);

// The same bound for m = capacity and blocks = 1, as a number.
uint64_t FusedMoeTilesMax(const RequestGeometry& geometry, uint32_t tile,
                          uint32_t capacity);

// Expected number of tiles when m tokens choose experts uniformly; for cost
// models only.
double FusedMoeTilesExpected(const RequestGeometry& geometry, uint32_t tile,
                             uint32_t m);

// Largest relative Frobenius error of an output row against the float64
// oracle. Rounding at the boundaries of recipe w4a16 alone costs 6e-4 to 8e-4
// on random data; a single wrong element of a row of 2048 costs 2e-2.
inline constexpr double kFusedMoeTolerance = 2e-3;

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_OP_H_
