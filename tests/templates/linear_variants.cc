// The list of specialisations: KILN_LINEAR_VARIANTS is X(name) for each.

#include "tests/templates/linear_variant.h"

namespace kiln::testing {

#define X(name) LinearVariant name##Variant();
KILN_LINEAR_VARIANTS
#undef X

const std::vector<LinearVariant>& LinearVariants() {
  static const std::vector<LinearVariant> variants = {
#define X(name) name##Variant(),
      KILN_LINEAR_VARIANTS
#undef X
  };
  return variants;
}

}  // namespace kiln::testing
