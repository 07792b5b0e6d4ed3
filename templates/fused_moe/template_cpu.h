// fused_moe.cpu: cpu.cc as a template. Axes: tokens_tile, channels_tile,
// k_tile, unroll, threads; see the head of cpu.cc.

#ifndef KILN_TEMPLATES_FUSED_MOE_TEMPLATE_CPU_H_
#define KILN_TEMPLATES_FUSED_MOE_TEMPLATE_CPU_H_

#include "compiler/spec/kernel_template.h"

namespace kiln {

const KernelTemplate* FusedMoeCpuTemplate();

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_TEMPLATE_CPU_H_
