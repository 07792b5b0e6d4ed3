// fused_moe on CUDA for at most 64 tokens: stream.cu as candidates.

#ifndef KILN_TEMPLATES_FUSED_MOE_TEMPLATE_STREAM_H_
#define KILN_TEMPLATES_FUSED_MOE_TEMPLATE_STREAM_H_

#include "compiler/spec/kernel_template.h"

namespace kiln {

const KernelTemplate* FusedMoeStreamTemplate();

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_TEMPLATE_STREAM_H_
