// One specialisation of templates/fused_moe/mx_cpu.cc, compiled by the test
// build's own compiler from a set of macros (see CMakeLists.txt beside it).

#ifndef KILN_TESTS_TEMPLATES_MX_CPU_VARIANT_H_
#define KILN_TESTS_TEMPLATES_MX_CPU_VARIANT_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace kiln::testing {

using MxCpuEntry = void (*)(const void* args, uint32_t bx, uint32_t by,
                            uint32_t bz);

struct MxCpuStep {
  MxCpuEntry run = nullptr;
  uint32_t args_bytes = 0;
};

struct MxCpuVariant {
  std::string name;
  uint32_t hidden, inter, experts, top_k;
  int bits;
  uint32_t limit_bits;
  bool x_bf16, id_i64, coupled;
  int64_t activation_bits, activation_terms, tokens_tile, channels_tile,
      row_group;
  std::map<std::string, MxCpuStep> steps;  // by entry
};

// Every specialisation of this build.
const std::vector<MxCpuVariant>& MxCpuVariants();

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_MX_CPU_VARIANT_H_
