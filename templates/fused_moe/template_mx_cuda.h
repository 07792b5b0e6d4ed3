// fused_moe.mx_cuda: mx_cuda.cu as a template. Axes: activation_bits, which is
// the arm, tokens_tile, channels_tile, k_tile, warps, stages, split_fc1,
// split_fc2; see README.md, "TrellisMX weights on CUDA".

#ifndef KILN_TEMPLATES_FUSED_MOE_TEMPLATE_MX_CUDA_H_
#define KILN_TEMPLATES_FUSED_MOE_TEMPLATE_MX_CUDA_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "compiler/spec/kernel_template.h"
#include "compiler/spec/plan.h"
#include "templates/axes.h"
#include "templates/fused_moe/grouped_cost.h"

namespace kiln {

const KernelTemplate* FusedMoeMxCudaTemplate();

// ---- what template_mx_qmma.cc shares ---------------------------------------

// Largest relative Frobenius error of an output row of W4A8 with one term
// against ReferenceMode::kStagedW4A8. A result of fc1 next to the middle of two
// binary16 numbers may be rounded to the other one; an operand of fc2 may then
// move by one step of E4M3, an eighth of itself. One such step is up to 5e-3 of
// a row (intermediate 128, one route); not to quantise at all is 5e-2.
inline constexpr double kMxOneTermTolerance = 1e-2;

// Headers of mx_cuda.cu beside those of device/.
inline constexpr const char* kMxCudaHeaders[] = {"cuda/grouped.h",
                                                 "cuda/ring.h",
                                                 "cuda/warp.h",
                                                 "formats/npk_law.h",
                                                 "fused_moe/code_row.h",
                                                 "fused_moe/mx_block.h",
                                                 "fused_moe/mx_boundary.h",
                                                 "fused_moe/mx_fragment.h",
                                                 "fused_moe/mx_scales.h",
                                                 "fused_moe/mx_warp.h"};

// Part 0 of mx_cuda.cu.
//   defines: of the arm, and of how the products read their operands
SourceUnit MxSupportUnit(const RequestGeometry& geometry, uint32_t version,
                         absl::string_view compute_dtype,
                         const std::string& defines);

// The axes of the products: tokens_tile, channels_tile, k_tile, warps, stages,
// split_fc1 and split_fc2.
std::vector<Axis> MxProductAxes(std::vector<int64_t> k_tiles);

// Empty, or the rule of both templates that a point of these axes breaks.
//   shared_bytes: dynamic, of a block of either product
std::string MxProductRule(const Problem& problem, const AxisPoint& point,
                          int64_t shared_bytes);

// OrderPoints by GroupedCycles.
//   product_of: what both products of a point have in common
ParamSpace MxOrderPoints(
    const Problem& problem, const std::vector<Axis>& axes, size_t points_max,
    const std::function<std::string(const AxisPoint&)>& constraint,
    const std::function<GroupedProduct(const AxisPoint&)>& product_of);

// How the two products read their operands.
struct MxOperands {
  uint32_t value_bytes = 2;          // of a number
  uint32_t scale_bytes = 0;          // of the scale of 32; 0 without scales
  int64_t product_shared_bytes = 0;  // dynamic, of a block of either product
};

// Steps, arguments and slices as README.md, "TrellisMX weights on CUDA", lists
// them. The point has the axes tokens_tile, channels_tile, warps, split_fc1 and
// split_fc2. Program 0 of the candidate is part 0 of mx_cuda.cu, program 1 has
// kiln_mx_fc1 and kiln_mx_fc2.
void AddMxSteps(const Problem& problem, const AxisPoint& point,
                const MxOperands& operands, PlanBody* body);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_TEMPLATE_MX_CUDA_H_
