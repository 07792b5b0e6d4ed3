// The list of specialisations: KILN_MX_CUDA_VARIANTS is X(name) for each.

#include "tests/templates/mx_cuda_variant.h"

namespace kiln::testing {

#define X(name) MxCudaVariant name##Variant();
KILN_MX_CUDA_VARIANTS
#undef X

const std::vector<MxCudaVariant>& MxCudaVariants() {
  static const std::vector<MxCudaVariant> variants = {
#define X(name) name##Variant(),
      KILN_MX_CUDA_VARIANTS
#undef X
  };
  return variants;
}

}  // namespace kiln::testing
