// The list of specialisations: KILN_CPU_VARIANTS is X(name) for each.

#include "tests/templates/cpu_variant.h"

namespace kiln::testing {

#define X(name) CpuVariant name##Variant();
KILN_CPU_VARIANTS
#undef X

const std::vector<CpuVariant>& CpuVariants() {
  static const std::vector<CpuVariant> variants = {
#define X(name) name##Variant(),
      KILN_CPU_VARIANTS
#undef X
  };
  return variants;
}

}  // namespace kiln::testing
