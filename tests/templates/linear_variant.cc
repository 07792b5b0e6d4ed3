// Compiled once per variant, with the template's macros on the command line
// and KILN_CPU_PREFIX as a prefix of its own.

#include "tests/templates/linear_variant.h"

#include "templates/linear/cpu.cc"

#define KILN_TEXT_(x) #x
#define KILN_TEXT(x) KILN_TEXT_(x)
#define KILN_STEP(name)                                             \
  {                                                                 \
    .run = KILN_CPU_SYMBOL(name),                                   \
    .args_bytes = KILN_CPU_JOIN(KILN_CPU_SYMBOL(name), _args_bytes) \
  }

namespace kiln::testing {

LinearVariant KILN_CPU_SYMBOL(Variant)();

LinearVariant KILN_CPU_SYMBOL(Variant)() {
  return {.name = KILN_TEXT(KILN_CPU_PREFIX),
          .in = kIn,
          .out = kOut,
          .codebook = KILN_CODEBOOK,
          .bits = KILN_BITS,
          .x_bf16 = KILN_X_BF16 != 0,
          .bias = KILN_BIAS != 0,
          .tokens_tile = kRows,
          .channels_tile = kStrip,
          .rotate = KILN_STEP(kiln_linear_cpu_rotate),
          .multiply = KILN_STEP(kiln_linear_cpu_multiply),
          .finish = KILN_STEP(kiln_linear_cpu_finish)};
}

}  // namespace kiln::testing
