// The fused_moe op over QSRT weights as its callers see it: the parameter
// block, and what the arms have in common. Numbers of tiles are those of op.h.

#ifndef KILN_TEMPLATES_FUSED_MOE_OP_QSRT_H_
#define KILN_TEMPLATES_FUSED_MOE_OP_QSRT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/spec/kernel_template.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/request.h"
#include "templates/axes.h"
#include "templates/fused_moe/trellis_matrix.h"

namespace kiln {

// Slots of the caller's parameter block, 8 bytes each, all pointers. H =
// hidden, I = 256, E = experts. From kWGate to kDownSvh they are the tensors of
// one part that `kiln prepare` wrote (templates/formats/prepare.h). Experts
// follow each other without gaps in a matrix's words; one with rates of low and
// high bits has 8 H (low + high) words of each matrix.
enum class QsrtParam : uint32_t {
  kX,            // io_dtype [m][H]
  kTopkIds,      // id_dtype [m][top_k]; active iff 0 <= id < E
  kTopkWeights,  // f32 [m][top_k]
  kWGate,        // i16, by expert [H/16]{low [8][16 low], high [8][16 high]}
  kWUp,          // the same
  kWDown,        // i16, by expert low [8][H/16][16 low], high the same
  // i32 [E]: 0 for P33, 1 for the request's other kind; of gate and up, and of
  // down.
  kModesFc1,
  kModesFc2,
  kGateSuh,    // f16 [E][H], or [1][H] with shared scales
  kUpSuh,      // f16 [E][H], or [1][H] with shared scales
  kRotations,  // f16 [E][3I]: gate_svh, up_svh, down_suh
  kDownSvh,    // f16 [E][H], or [1][H] with shared scales
  kOut,        // f32 [m][H]; every element is written
  // i32 [E]: 0 for SiLU, 1 for SiTU. Only of requests whose activation is
  // per_expert.
  kActivations,
};
// Without kActivations.
inline constexpr uint32_t kQsrtParamCount = 13;

// Channels of a part's intermediate axis: two records.
inline constexpr int64_t kQsrtIntermediate = kPairChannels;

// The slots as declarations, in order.
std::vector<ParamDecl> QsrtParams(const RequestGeometry& geometry);

// Argument that passes a slot to a kernel.
inline Arg QsrtArg(QsrtParam param) {
  return Arg::Param(static_cast<uint64_t>(param));
}

// Bytes of each slot's buffer for `tokens` rows, with as many words as experts
// of the larger kind have.
std::vector<uint64_t> QsrtBytes(const RequestGeometry& geometry,
                                uint32_t tokens);

// The rates of an expert of mode 0 or 1.
PairRate QsrtRate(PairKinds pairs, int mode);

// How many rates experts may have, from the lowest to 4.
uint32_t QsrtRates(const RequestGeometry& geometry);

// Which arithmetic a plan has in front of both products.
enum class QsrtArm {
  kW4A16,  // activations are binary16
  kW4A8,   // activations are MXFP8, E4M3 in blocks of 32
};

// "w4a16", "w4a8".
absl::string_view QsrtArmName(QsrtArm arm);

// "qsrt.w4a16.sequential", "qsrt.w4a8.sequential": equal bits for every
// candidate of an arm.
absl::string_view QsrtNumericsClass(QsrtArm arm);

// The arm of an interval.
//   Errors: InvalidArgument where it has tokens on both sides of the limit.
absl::StatusOr<QsrtArm> QsrtArmOf(const RequestGeometry& geometry,
                                  const Interval& interval);

// Empty, or why a point's activation_bits, 16 or 8, are not those of the
// interval's arm.
std::string QsrtArmConstraint(const Problem& problem, const AxisPoint& point);

// The #defines that specialise a source for a geometry, one per line: see the
// head of qsrt_cpu.cc.
std::string QsrtPrelude(const RequestGeometry& geometry);

// Largest relative Frobenius error of an output row: of w4a16 against the
// float64 oracle, of w4a8 against ReferenceMode::kStagedW4A8, since an oracle
// that quantises no activation is some 5e-2 off whatever the kernel does. A sum
// that falls to the other side of a midpoint of binary16 now and then moves one
// of a route's 256 operands to its neighbour in E4M3: an eighth of it, up to
// 1e-2 of the route's row.
double QsrtTolerance(QsrtArm arm);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_OP_QSRT_H_
