// One specialisation of templates/linear/cpu.cc, compiled by the test build's
// own compiler from a set of macros (see CMakeLists.txt beside it).

#ifndef KILN_TESTS_TEMPLATES_LINEAR_VARIANT_H_
#define KILN_TESTS_TEMPLATES_LINEAR_VARIANT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tests/templates/cpu_variant.h"

namespace kiln::testing {

struct LinearVariant {
  std::string name;
  uint32_t in, out;
  int codebook, bits;
  bool x_bf16, bias;
  uint32_t tokens_tile, channels_tile;
  CpuStep rotate, multiply, finish;
};

// Every specialisation of this build.
const std::vector<LinearVariant>& LinearVariants();

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_LINEAR_VARIANT_H_
