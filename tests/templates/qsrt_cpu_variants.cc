// The list of specialisations: KILN_QSRT_CPU_VARIANTS is X(name) for each.

#include "tests/templates/qsrt_cpu_variant.h"

namespace kiln::testing {

#define X(name) QsrtCpuVariant name##Variant();
KILN_QSRT_CPU_VARIANTS
#undef X

const std::vector<QsrtCpuVariant>& QsrtCpuVariants() {
  static const std::vector<QsrtCpuVariant> variants = {
#define X(name) name##Variant(),
      KILN_QSRT_CPU_VARIANTS
#undef X
  };
  return variants;
}

}  // namespace kiln::testing
