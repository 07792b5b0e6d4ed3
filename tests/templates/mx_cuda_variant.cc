// Compiled once per variant, with the template's macros on the command line and
// KILN_PREFIX as a prefix of its own.

#include "tests/templates/mx_cuda_variant.h"

#include "device/activation.h"
#include "device/fragment.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "device/platform.h"
#include "fused_moe/code_row.h"
#include "fused_moe/mx_block.h"
#include "fused_moe/mx_boundary.h"
#include "fused_moe/mx_fragment.h"
#include "fused_moe/mx_scales.h"
#include "tests/templates/gpu_intrinsics.h"
// After what replaces the instructions.
#include "cuda/grouped.h"
#include "cuda/ring.h"
#include "fused_moe/mx_warp.h"

#define KILN_JOIN_(a, b) a##b
#define KILN_JOIN(a, b) KILN_JOIN_(a, b)
#define KILN_TEXT_(x) #x
#define KILN_TEXT(x) KILN_TEXT_(x)
#define kiln_mx_count KILN_JOIN(KILN_PREFIX, Count)
#define kiln_mx_route KILN_JOIN(KILN_PREFIX, Route)
#define kiln_mx_fc1 KILN_JOIN(KILN_PREFIX, Fc1)
#define kiln_mx_activate KILN_JOIN(KILN_PREFIX, Activate)
#define kiln_mx_fc2 KILN_JOIN(KILN_PREFIX, Fc2)
#define kiln_mx_combine KILN_JOIN(KILN_PREFIX, Combine)

// The programs of a candidate.
namespace support {
#define KILN_PART 0
#include "templates/fused_moe/mx_cuda.cu"
#undef KILN_PART
}  // namespace support

namespace product {
#define KILN_PART 1
#include "templates/fused_moe/mx_cuda.cu"
#undef KILN_PART
}  // namespace product

namespace kiln::testing {

MxCudaVariant KILN_JOIN(KILN_PREFIX, Variant)();

MxCudaVariant KILN_JOIN(KILN_PREFIX, Variant)() {
  return {
      .name = KILN_TEXT(KILN_PREFIX),
      .hidden = KILN_HIDDEN,
      .inter = KILN_INTER,
      .experts = KILN_EXPERTS,
      .top_k = KILN_TOPK,
      .bits = KILN_BITS,
      .limit_bits = KILN_LIMIT_BITS,
      .x_bf16 = KILN_X_BF16 != 0,
      .id_i64 = KILN_ID_I64 != 0,
      .coupled = KILN_COUPLED != 0,
      .activation_bits = KILN_ACTIVATION_BITS,
      .activation_terms = KILN_ACTIVATION_TERMS,
      .tokens_tile = KILN_TOKENS_TILE,
      .channels_tile = KILN_CHANNELS_TILE,
      .k_tile = KILN_K_TILE,
      .warps = KILN_WARPS,
      .stages = KILN_STAGES,
      .entries = {{"kiln_mx_count", gpu::EntryOf(support::kiln_mx_count)},
                  {"kiln_mx_route", gpu::EntryOf(support::kiln_mx_route)},
                  {"kiln_mx_activate", gpu::EntryOf(support::kiln_mx_activate)},
                  {"kiln_mx_combine", gpu::EntryOf(support::kiln_mx_combine)},
                  {"kiln_mx_fc1", gpu::EntryOf(product::kiln_mx_fc1)},
                  {"kiln_mx_fc2", gpu::EntryOf(product::kiln_mx_fc2)}}};
}

}  // namespace kiln::testing
