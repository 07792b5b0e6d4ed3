// One specialisation of templates/fused_moe/mx_cuda.cu for the host, compiled
// from a set of macros (see CMakeLists.txt beside it).

#ifndef KILN_TESTS_TEMPLATES_MX_CUDA_VARIANT_H_
#define KILN_TESTS_TEMPLATES_MX_CUDA_VARIANT_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/templates/gpu_emulator.h"

namespace kiln::testing {

struct MxCudaVariant {
  std::string name;
  uint32_t hidden, inter, experts, top_k;
  int bits;
  uint32_t limit_bits;
  bool x_bf16, id_i64, coupled;
  int64_t activation_bits, activation_terms, tokens_tile, channels_tile, k_tile,
      warps, stages;
  std::map<std::string, gpu::Entry> entries;
};

// Every specialisation of this build.
const std::vector<MxCudaVariant>& MxCudaVariants();

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_MX_CUDA_VARIANT_H_
