// linear.cpu: cpu.cc as a template. Axes: those of cpu/product_axes.h.

#ifndef KILN_TEMPLATES_LINEAR_TEMPLATE_CPU_H_
#define KILN_TEMPLATES_LINEAR_TEMPLATE_CPU_H_

#include "compiler/spec/kernel_template.h"

namespace kiln {

const KernelTemplate* LinearCpuTemplate();

}  // namespace kiln

#endif  // KILN_TEMPLATES_LINEAR_TEMPLATE_CPU_H_
