// One specialisation of templates/fused_moe/cpu.cc, compiled by the test
// build's own compiler from a set of macros (see CMakeLists.txt beside it).

#ifndef KILN_TESTS_TEMPLATES_CPU_VARIANT_H_
#define KILN_TESTS_TEMPLATES_CPU_VARIANT_H_

#include <cstdint>
#include <string>
#include <vector>

namespace kiln::testing {

using CpuEntry = void (*)(const void* args, uint32_t bx, uint32_t by,
                          uint32_t bz);

struct CpuStep {
  CpuEntry run = nullptr;
  uint32_t args_bytes = 0;
};

struct CpuVariant {
  std::string name;
  uint32_t hidden, inter, experts, top_k;
  int codebook, bits_gate, bits_up, bits_down;
  bool x_bf16, id_i64, shared_scales;
  uint32_t tokens_tile, channels_tile;
  CpuStep route, rotate, fc1, activate, fc2, combine;
};

// Every specialisation of this build.
const std::vector<CpuVariant>& CpuVariants();

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_CPU_VARIANT_H_
