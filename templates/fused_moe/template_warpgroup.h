// fused_moe on Hopper for many tokens: warpgroup.cu as candidates.

#ifndef KILN_TEMPLATES_FUSED_MOE_TEMPLATE_WARPGROUP_H_
#define KILN_TEMPLATES_FUSED_MOE_TEMPLATE_WARPGROUP_H_

#include "compiler/spec/kernel_template.h"

namespace kiln {

const KernelTemplate* FusedMoeWarpgroupTemplate();

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_TEMPLATE_WARPGROUP_H_
