// The matrix product of cuda.cu, parts 1 to 3, as the host sees it: the axes
// tokens_tile, channels_tile, k_tile, warps, stages and sum. fused_moe.cuda and
// linear.cuda share it.

#ifndef KILN_TEMPLATES_FUSED_MOE_TILE_PRODUCT_H_
#define KILN_TEMPLATES_FUSED_MOE_TILE_PRODUCT_H_

#include <cstdint>
#include <string>

#include "compiler/spec/kernel_template.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/request.h"
#include "templates/axes.h"

namespace kiln {

// How weights are summed; KILN_SUM of cuda.cu, and of stream.cu.
enum TileSum : int64_t { kTileRounded = 0, kTileBiased = 3 };

// Dynamic shared memory of a block, bytes: a ring of packed weights and padded
// operand rows.
//   bits: per weight, the most of any matrix that the kernel reads
int64_t TileProductSharedBytes(const AxisPoint& point, int bits);

// Empty, or the rule that the point breaks, but for those that depend on the
// shape of the product.
std::string TileProductRule(const Problem& problem, Codebook codebook, int bits,
                            const AxisPoint& point);

// "f16", or of sums that axes beside the slices of K make: "biased.warps4".
std::string TileProductClass(const AxisPoint& point);

// Issue slots of a warp to decode a 16 x 16 tile, and of its MMA with 8 tokens.
double TileProductDecodeCycles(const AxisPoint& point, int bits);
double TileProductMmaCycles(const AxisPoint& point);

// The program of a part (1 to 3), without its entries.
//   geometry: what FusedMoePrelude describes to the kernel
SourceUnit TileProductUnit(const RequestGeometry& geometry,
                           uint32_t template_version, int part,
                           const Assignment& assignment);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_TILE_PRODUCT_H_
