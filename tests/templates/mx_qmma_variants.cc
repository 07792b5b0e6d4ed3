// The list of specialisations: KILN_MX_QMMA_VARIANTS is X(name) for each.

#include "tests/templates/mx_qmma_variant.h"

namespace kiln::testing {

#define X(name) MxQmmaVariant name##Variant();
KILN_MX_QMMA_VARIANTS
#undef X

const std::vector<MxQmmaVariant>& MxQmmaVariants() {
  static const std::vector<MxQmmaVariant> variants = {
#define X(name) name##Variant(),
      KILN_MX_QMMA_VARIANTS
#undef X
  };
  return variants;
}

}  // namespace kiln::testing
