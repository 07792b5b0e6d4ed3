// The fused_moe op over TrellisMX weights as its callers see it: the parameter
// block, and what the arms have in common. Numbers of tiles are those of op.h.

#ifndef KILN_TEMPLATES_FUSED_MOE_OP_MX_H_
#define KILN_TEMPLATES_FUSED_MOE_OP_MX_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/spec/kernel_template.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/request.h"
#include "templates/axes.h"

namespace kiln {

// Slots of the caller's parameter block, 8 bytes each, all pointers. H =
// hidden (multiple of 512; of 128 with the identity boundary), I = intermediate
// (multiple of 128), E = experts, K = bits. From kW13 to kDownSvh they are the
// tensors of one prepared layer, as templates/formats/npk_prepare.h describes
// them. The identity boundary has no vectors: there kOut follows kW2Scale.
enum class MxParam : uint32_t {
  kX,            // io_dtype [m][H]
  kTopkIds,      // id_dtype [m][top_k]; active iff 0 <= id < E
  kTopkWeights,  // f32 [m][top_k]
  kW13,          // i16 [2][E][H/16][I/16][16K]: gate, up
  kW2,           // i16 [E][I/16][H/16][16K]
  // A word holds the scales of 128 input channels of one row, UE8M0, byte b
  // those of channels 32 b ..; rows come in panels of 256.
  kW13Scale,   // u32 [E][2I/256][H/128][256]: gate rows, then up rows
  kW2Scale,    // u32 [E][ceil(H/256)][I/128][256]
  kGateUpSuh,  // f16 [H]
  // f16 [E][6I]: gate_svh, up_svh, down_suh, 2I signs before the activation
  // and I behind it, each +1 or -1.
  kRotations,
  kDownSvh,  // f16 [H]
  kOut,      // f32 [m][H]; every element is written
};
// Of the coupled boundary.
inline constexpr uint32_t kMxParamCount = 11;

// The slot of a parameter that the request has.
uint32_t MxSlot(const RequestGeometry& geometry, MxParam param);

// What a list in the order of MxParam has for the slots of the request.
template <typename T>
std::vector<T> MxSlotsOf(const RequestGeometry& geometry, std::vector<T> all) {
  if (geometry.mx.boundary == MxBoundary::kIdentity) {
    all.erase(all.begin() + static_cast<size_t>(MxParam::kGateUpSuh),
              all.begin() + static_cast<size_t>(MxParam::kOut));
  }
  return all;
}

// The slots as declarations, in order.
std::vector<ParamDecl> MxParams(const RequestGeometry& geometry);

// Argument that passes a slot to a kernel: null for a vector that the request
// does not have.
Arg MxArg(const RequestGeometry& geometry, MxParam param);

// Bytes of each slot's buffer for `tokens` rows.
std::vector<uint64_t> MxBytes(const RequestGeometry& geometry, uint32_t tokens);

// Which arithmetic a plan has in front of both products.
enum class MxArm {
  kSmallM,  // W4A16: activations are binary16
  // W4A8 with the remainder RP2: MXFP8 in two terms, the second of what the
  // first left. The two products of a row with a matrix are summed on their own
  // and added before the result is rounded.
  kDirectRp2,
  kDirect,   // W4A8, as kGrouped
  kGrouped,  // W4A8: activations are MXFP8, E4M3 in blocks of 32
};

// "smallm", "direct rp2", "direct", "grouped".
absl::string_view MxArmName(MxArm arm);

// "mx.w4a16.fold32", "mx.w4a8rp2.fold32", and "mx.w4a8.fold32" of the other
// two: equal bits for every candidate of a class.
absl::string_view MxNumericsClass(MxArm arm);

// The arm of an interval.
//   Errors: InvalidArgument where it has tokens on both sides of the limit.
absl::StatusOr<MxArm> MxArmOf(const RequestGeometry& geometry,
                              const Interval& interval);

// The axes of an interval that say its arm: "activation_bits", 16 or 8, and in
// kDirectRp2 "activation_terms", 2. Points of the other arms have no such axis:
// a remainder that a request has for few tokens changes nothing beyond them.
std::vector<Axis> MxArmAxes(const Problem& problem);

// Empty, or why the point is none of the interval's arm.
std::string MxArmConstraint(const Problem& problem, const AxisPoint& point);

// The #defines of those axes.
std::string MxArmPrelude(const Assignment& assignment);

// Numbers for each channel of an activation: 2 in kDirectRp2, else 1.
uint32_t MxActivationTerms(const Problem& problem);

// The #defines that specialise a source for a geometry, one per line: see the
// head of mx_cpu.cc.
std::string MxPrelude(const RequestGeometry& geometry);

// Largest relative Frobenius error of an output row. Of the small-M arm and of
// the direct one with a remainder against the float64 oracle, where on random
// data binary16 operands and results cost 7e-4 to 9e-4 and two terms of MXFP8
// 1.1e-3 to 1.9e-3. Of the others against ReferenceMode::kStagedW4A8: against
// an oracle that quantises no activation they are 5e-2 to 7e-2 off whatever the
// kernel does; what is left is a sum that falls to the other side of a
// midpoint, and a step of E4M3 that may follow. All are tighter than cosines of
// 0.99995 (0.9998 of one term), which are errors of 1.0e-2 and 2.0e-2.
double MxTolerance(MxArm arm);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_OP_MX_H_
