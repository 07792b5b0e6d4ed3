// What the candidates share that compute fused_moe on CUDA as steps over rows
// sorted by expert: cuda.cu's support kernels, the arena, arguments.

#ifndef KILN_TEMPLATES_FUSED_MOE_CUDA_STEPS_H_
#define KILN_TEMPLATES_FUSED_MOE_CUDA_STEPS_H_

#include <cstdint>

#include "compiler/spec/kernel_template.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/request.h"
#include "templates/fused_moe/routed_steps.h"

namespace kiln {

// Order of the input channels in operand rows; KILN_OPERAND_ORDER of cuda.cu.
enum class OperandOrder { kNatural = 0, kWarpgroup = 1 };

// What steps and support kernels depend on beside the request.
struct GroupedForm {
  OperandOrder order = OperandOrder::kNatural;
  // fc2 adds its rows up in the output; KILN_ATOMIC_SUM of cuda.cu.
  bool atomic_sum = false;
  // kiln_moe_decode of program 1 comes first and hands the products fp16
  // weights; KILN_DECODED of warpgroup.cu.
  bool decoded = false;
};

// cuda.cu, part 0: the same program for all candidates of a form.
SourceUnit GroupedSupportUnit(const RequestGeometry& geometry,
                              uint32_t template_version,
                              const GroupedForm& form);

// Steps, arguments and slices as README.md, "Steps", lists them. Program 0 of
// the candidate is the support unit, program 1 has the products. tile: rows of
// one expert that a product takes at once.
void AddGroupedSteps(const Problem& problem, uint32_t tile,
                     const GroupedLaunch& fc1, const GroupedLaunch& fc2,
                     const GroupedForm& form, PlanBody* body);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_CUDA_STEPS_H_
