// Compiled once per variant, with the template's macros on the command line
// and KILN_CPU_PREFIX as a prefix of its own.

#include "tests/templates/mx_cpu_variant.h"

#include "templates/fused_moe/mx_cpu.cc"

#define KILN_TEXT_(x) #x
#define KILN_TEXT(x) KILN_TEXT_(x)
#define KILN_STEP(name)                                                \
  {                                                                    \
#name, {                                                           \
      .run = KILN_CPU_SYMBOL(name),                                    \
      .args_bytes = KILN_CPU_JOIN(KILN_CPU_SYMBOL(name), _args_bytes), \
    }                                                                  \
  }

namespace kiln::testing {

MxCpuVariant KILN_CPU_SYMBOL(Variant)();

MxCpuVariant KILN_CPU_SYMBOL(Variant)() {
  return {.name = KILN_TEXT(KILN_CPU_PREFIX),
          .hidden = kHidden,
          .inter = kInter,
          .experts = kExperts,
          .top_k = kTopK,
          .bits = kBits,
          .limit_bits = KILN_LIMIT_BITS,
          .x_bf16 = KILN_X_BF16 != 0,
          .id_i64 = KILN_ID_I64 != 0,
          .coupled = KILN_COUPLED != 0,
          .activation_bits = KILN_ACTIVATION_BITS,
          .activation_terms = KILN_ACTIVATION_TERMS,
          .tokens_tile = kRows,
          .channels_tile = kStrip,
          .row_group = kRowGroup,
          .steps = {KILN_STEP(kiln_mx_cpu_route), KILN_STEP(kiln_mx_cpu_rotate),
                    KILN_STEP(kiln_mx_cpu_fc1), KILN_STEP(kiln_mx_cpu_fc2),
                    KILN_STEP(kiln_mx_cpu_combine)}};
}

}  // namespace kiln::testing
