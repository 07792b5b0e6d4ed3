// The list of specialisations: KILN_QSRT_CUDA_VARIANTS is X(name) for each.

#include "tests/templates/qsrt_cuda_variant.h"

namespace kiln::testing {

#define X(name) QsrtCudaVariant name##Variant();
KILN_QSRT_CUDA_VARIANTS
#undef X

const std::vector<QsrtCudaVariant>& QsrtCudaVariants() {
  static const std::vector<QsrtCudaVariant> variants = {
#define X(name) name##Variant(),
      KILN_QSRT_CUDA_VARIANTS
#undef X
  };
  return variants;
}

}  // namespace kiln::testing
