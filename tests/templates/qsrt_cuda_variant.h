// One specialisation of templates/fused_moe/qsrt_cuda.cu for the host, compiled
// from a set of macros (see CMakeLists.txt beside it).

#ifndef KILN_TESTS_TEMPLATES_QSRT_CUDA_VARIANT_H_
#define KILN_TESTS_TEMPLATES_QSRT_CUDA_VARIANT_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/templates/gpu_emulator.h"

namespace kiln::testing {

struct QsrtCudaVariant {
  std::string name;
  uint32_t hidden, experts, top_k;
  int other_low, activation;
  bool shared_suh, x_bf16, id_i64;
  int64_t activation_bits, tokens_tile, channels_tile, k_tile, warps, stages,
      codewords, operand_codes;
  bool block_scaled;  // with operand_codes
  std::map<std::string, gpu::Entry> entries;
};

// Every specialisation of this build.
const std::vector<QsrtCudaVariant>& QsrtCudaVariants();

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_QSRT_CUDA_VARIANT_H_
