// fused_moe.mx_cuda: mx_cuda.cu as a template. Axes: activation_bits, which is
// the arm, tokens_tile, channels_tile, k_tile, warps, stages, split_fc1,
// split_fc2; see README.md, "TrellisMX weights on CUDA".

#ifndef KILN_TEMPLATES_FUSED_MOE_TEMPLATE_MX_CUDA_H_
#define KILN_TEMPLATES_FUSED_MOE_TEMPLATE_MX_CUDA_H_

#include "compiler/spec/kernel_template.h"

namespace kiln {

const KernelTemplate* FusedMoeMxCudaTemplate();

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_TEMPLATE_MX_CUDA_H_
