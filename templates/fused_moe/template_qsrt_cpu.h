// fused_moe.qsrt_cpu: qsrt_cpu.cc as a template. Axes: activation_bits (the
// arm, which the interval decides), tokens_tile, channels_tile, k_tile,
// codewords, row_group, threads; see the head of qsrt_cpu.cc.

#ifndef KILN_TEMPLATES_FUSED_MOE_TEMPLATE_QSRT_CPU_H_
#define KILN_TEMPLATES_FUSED_MOE_TEMPLATE_QSRT_CPU_H_

#include "compiler/spec/kernel_template.h"

namespace kiln {

const KernelTemplate* FusedMoeQsrtCpuTemplate();

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_TEMPLATE_QSRT_CPU_H_
