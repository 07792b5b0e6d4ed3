// fused_moe.mx_cpu: mx_cpu.cc as a template. Axes: activation_bits, which is
// the arm, tokens_tile, channels_tile, row_group, threads; see the head of
// mx_cpu.cc.

#ifndef KILN_TEMPLATES_FUSED_MOE_TEMPLATE_MX_CPU_H_
#define KILN_TEMPLATES_FUSED_MOE_TEMPLATE_MX_CPU_H_

#include "compiler/spec/kernel_template.h"

namespace kiln {

const KernelTemplate* FusedMoeMxCpuTemplate();

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_TEMPLATE_MX_CPU_H_
