// linear on CUDA targets, recipe w4a16: the kernels of cuda.cu around the
// matrix product of fused_moe/cuda.cu.

#ifndef KILN_TEMPLATES_LINEAR_TEMPLATE_CUDA_H_
#define KILN_TEMPLATES_LINEAR_TEMPLATE_CUDA_H_

#include "compiler/spec/kernel_template.h"

namespace kiln {

// Lives for the whole process.
const KernelTemplate* LinearCudaTemplate();

}  // namespace kiln

#endif  // KILN_TEMPLATES_LINEAR_TEMPLATE_CUDA_H_
