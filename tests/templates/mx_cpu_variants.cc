// The list of specialisations: KILN_MX_CPU_VARIANTS is X(name) for each.

#include "tests/templates/mx_cpu_variant.h"

namespace kiln::testing {

#define X(name) MxCpuVariant name##Variant();
KILN_MX_CPU_VARIANTS
#undef X

const std::vector<MxCpuVariant>& MxCpuVariants() {
  static const std::vector<MxCpuVariant> variants = {
#define X(name) name##Variant(),
      KILN_MX_CPU_VARIANTS
#undef X
  };
  return variants;
}

}  // namespace kiln::testing
