// Compiled once per variant, with the template's macros on the command line and
// KILN_PREFIX as a prefix of its own.

#include "tests/templates/qsrt_cuda_variant.h"

#include "device/activation.h"
#include "device/fragment.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "device/platform.h"
#include "fused_moe/code_row.h"
#include "fused_moe/mx_block.h"
#include "fused_moe/mx_scales.h"
#include "fused_moe/situ.h"
#include "fused_moe/sqg_fragment.h"
#include "tests/templates/gpu_intrinsics.h"
// After what replaces the instructions.
#include "cuda/grouped.h"
#include "cuda/ring.h"
#include "fused_moe/code_product.h"
#include "fused_moe/mx_warp.h"

#define KILN_JOIN_(a, b) a##b
#define KILN_JOIN(a, b) KILN_JOIN_(a, b)
#define KILN_TEXT_(x) #x
#define KILN_TEXT(x) KILN_TEXT_(x)
#define kiln_qsrt_table KILN_JOIN(KILN_PREFIX, Table)
#define kiln_qsrt_count KILN_JOIN(KILN_PREFIX, Count)
#define kiln_qsrt_route KILN_JOIN(KILN_PREFIX, Route)
#define kiln_qsrt_rotate KILN_JOIN(KILN_PREFIX, Rotate)
#define kiln_qsrt_fc1 KILN_JOIN(KILN_PREFIX, Fc1)
#define kiln_qsrt_activate KILN_JOIN(KILN_PREFIX, Activate)
#define kiln_qsrt_fc2 KILN_JOIN(KILN_PREFIX, Fc2)
#define kiln_qsrt_combine KILN_JOIN(KILN_PREFIX, Combine)

// The programs of a candidate.
namespace support {
#define KILN_PART 0
#include "templates/fused_moe/qsrt_cuda.cu"
#undef KILN_PART
}  // namespace support

namespace product {
#define KILN_PART 1
#include "templates/fused_moe/qsrt_cuda.cu"
#undef KILN_PART
}  // namespace product

namespace kiln::testing {

QsrtCudaVariant KILN_JOIN(KILN_PREFIX, Variant)();

QsrtCudaVariant KILN_JOIN(KILN_PREFIX, Variant)() {
  return {.name = KILN_TEXT(KILN_PREFIX),
          .hidden = KILN_HIDDEN,
          .experts = KILN_EXPERTS,
          .top_k = KILN_TOPK,
          .other_low = KILN_OTHER_LOW,
          .activation = KILN_ACTIVATION,
          .shared_suh = KILN_SHARED_SUH != 0,
          .x_bf16 = KILN_X_BF16 != 0,
          .id_i64 = KILN_ID_I64 != 0,
          .activation_bits = KILN_ACTIVATION_BITS,
          .tokens_tile = KILN_TOKENS_TILE,
          .channels_tile = KILN_CHANNELS_TILE,
          .k_tile = KILN_K_TILE,
          .warps = KILN_WARPS,
          .stages = KILN_STAGES,
          .codewords = KILN_CODEWORDS,
          .operand_codes = KILN_OPERAND_CODES,
          .block_scaled = KILN_BLOCK_SCALED != 0,
          .entries = {
              {"kiln_qsrt_count", gpu::EntryOf(support::kiln_qsrt_count)},
              {"kiln_qsrt_route", gpu::EntryOf(support::kiln_qsrt_route)},
#if !KILN_OPERAND_CODES
              {"kiln_qsrt_table", gpu::EntryOf(support::kiln_qsrt_table)},
#endif
#if !KILN_SHARED_SUH
              {"kiln_qsrt_rotate", gpu::EntryOf(support::kiln_qsrt_rotate)},
#endif
              {"kiln_qsrt_activate", gpu::EntryOf(support::kiln_qsrt_activate)},
              {"kiln_qsrt_combine", gpu::EntryOf(support::kiln_qsrt_combine)},
              {"kiln_qsrt_fc1", gpu::EntryOf(product::kiln_qsrt_fc1)},
              {"kiln_qsrt_fc2", gpu::EntryOf(product::kiln_qsrt_fc2)}}};
}

}  // namespace kiln::testing
