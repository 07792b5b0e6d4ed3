// fused_moe.cuda: cuda.cu as a template. Axes: tokens_tile, channels_tile,
// k_tile, warps, stages, split_fc1, split_fc2; see README.md, "CUDA".

#ifndef KILN_TEMPLATES_FUSED_MOE_TEMPLATE_CUDA_H_
#define KILN_TEMPLATES_FUSED_MOE_TEMPLATE_CUDA_H_

#include "compiler/spec/kernel_template.h"

namespace kiln {

const KernelTemplate* FusedMoeCudaTemplate();

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_TEMPLATE_CUDA_H_
