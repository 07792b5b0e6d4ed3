// fused_moe.mx_qmma: the W4A8 arm of TrellisMX weights on tensor cores that
// multiply E4M3, mx_qmma.cu as a template. Axes: tokens_tile, channels_tile,
// k_tile, warps, stages, split_fc1, split_fc2; see README.md, "E4M3 tensor
// cores".

#ifndef KILN_TEMPLATES_FUSED_MOE_TEMPLATE_MX_QMMA_H_
#define KILN_TEMPLATES_FUSED_MOE_TEMPLATE_MX_QMMA_H_

#include "compiler/spec/kernel_template.h"

namespace kiln {

const KernelTemplate* FusedMoeMxQmmaTemplate();

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_TEMPLATE_MX_QMMA_H_
