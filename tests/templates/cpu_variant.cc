// Compiled once per variant, with the template's macros on the command line
// and KILN_CPU_PREFIX as a prefix of its own.

#include "tests/templates/cpu_variant.h"

#include "templates/fused_moe/cpu.cc"

#define KILN_TEXT_(x) #x
#define KILN_TEXT(x) KILN_TEXT_(x)
#define KILN_STEP(name)                                             \
  {                                                                 \
    .run = KILN_CPU_SYMBOL(name),                                   \
    .args_bytes = KILN_CPU_JOIN(KILN_CPU_SYMBOL(name), _args_bytes) \
  }

namespace kiln::testing {

CpuVariant KILN_CPU_SYMBOL(Variant)();

CpuVariant KILN_CPU_SYMBOL(Variant)() {
  return {.name = KILN_TEXT(KILN_CPU_PREFIX),
          .hidden = kHidden,
          .inter = kInter,
          .experts = kExperts,
          .top_k = kTopK,
          .codebook = KILN_CODEBOOK,
          .bits_gate = KILN_BITS_GATE,
          .bits_up = KILN_BITS_UP,
          .bits_down = KILN_BITS_DOWN,
          .x_bf16 = KILN_X_BF16 != 0,
          .id_i64 = KILN_ID_I64 != 0,
          .shared_scales = KILN_SHARED_SUH != 0,
          .tokens_tile = kRows,
          .channels_tile = kStrip,
          .route = KILN_STEP(kiln_moe_cpu_route),
          .rotate = KILN_STEP(kiln_moe_cpu_rotate),
          .fc1 = KILN_STEP(kiln_moe_cpu_fc1),
          .activate = KILN_STEP(kiln_moe_cpu_activate),
          .fc2 = KILN_STEP(kiln_moe_cpu_fc2),
          .combine = KILN_STEP(kiln_moe_cpu_combine)};
}

}  // namespace kiln::testing
