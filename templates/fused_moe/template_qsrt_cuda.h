// fused_moe.qsrt_cuda: qsrt_cuda.cu as a template. Axes: activation_bits (the
// arm, which the interval decides), tokens_tile, channels_tile, k_tile, warps,
// stages, codewords, split_fc1, split_fc2; see README.md, "QSRT weights on
// CUDA".

#ifndef KILN_TEMPLATES_FUSED_MOE_TEMPLATE_QSRT_CUDA_H_
#define KILN_TEMPLATES_FUSED_MOE_TEMPLATE_QSRT_CUDA_H_

#include "compiler/spec/kernel_template.h"

namespace kiln {

const KernelTemplate* FusedMoeQsrtCudaTemplate();

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_TEMPLATE_QSRT_CUDA_H_
