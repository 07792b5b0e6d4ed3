// One specialisation of templates/fused_moe/qsrt_cpu.cc, compiled by the test
// build's own compiler from a set of macros (see CMakeLists.txt beside it).

#ifndef KILN_TESTS_TEMPLATES_QSRT_CPU_VARIANT_H_
#define KILN_TESTS_TEMPLATES_QSRT_CPU_VARIANT_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace kiln::testing {

using QsrtCpuEntry = void (*)(const void* args, uint32_t bx, uint32_t by,
                              uint32_t bz);

struct QsrtCpuStep {
  QsrtCpuEntry run = nullptr;
  uint32_t args_bytes = 0;
};

struct QsrtCpuVariant {
  std::string name;
  uint32_t hidden, experts, top_k;
  int other_low, activation;
  bool shared_suh, x_bf16, id_i64;
  int64_t activation_bits, tokens_tile, channels_tile, k_tile, codewords,
      row_group;
  std::map<std::string, QsrtCpuStep> steps;  // by entry
};

// Every specialisation of this build.
const std::vector<QsrtCpuVariant>& QsrtCpuVariants();

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_QSRT_CPU_VARIANT_H_
