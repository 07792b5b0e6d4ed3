// Axes that the CPU templates share: those of cpu/trellis_product.h, how many
// threads take part, and rows whose sums stay in registers together.

#ifndef KILN_TEMPLATES_CPU_PRODUCT_AXES_H_
#define KILN_TEMPLATES_CPU_PRODUCT_AXES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/spec/kernel_template.h"
#include "templates/axes.h"

namespace kiln {

// Channels of a block of the elementwise steps; kChunk in
// cpu/trellis_product.h.
inline constexpr int64_t kCpuChunk = 512;

// All processors, or half of them.
std::vector<int64_t> CpuThreads(const Problem& problem);

// Empty, or why row_group does not go with tokens_tile.
std::string CpuRowGroupRule(const AxisPoint& point);

// tokens_tile, channels_tile, k_tile, unroll, threads.
std::vector<Axis> CpuProductAxes(const Problem& problem);

// Those of them that are macros of the kernel.
const std::vector<std::string>& CpuProductMacros();

// Empty, or the rule that the point breaks.
std::string CpuProductConstraint(const Problem& problem,
                                 const AxisPoint& point);

// Seconds on a nominal core; only the order matters.
//   tiles: of tokens_tile rows, expected.
//   weights: that a tile is multiplied with.
//   strip_channels: output channels that strips divide, of the widest step.
double CpuProductCost(const AxisPoint& point, double tiles, double weights,
                      int64_t strip_channels);

}  // namespace kiln

#endif  // KILN_TEMPLATES_CPU_PRODUCT_AXES_H_
