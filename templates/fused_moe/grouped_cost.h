// What a product of rows grouped by expert costs on a GPU: the model that
// templates order their candidates by whose kernels have the shape of cuda.cu.

#ifndef KILN_TEMPLATES_FUSED_MOE_GROUPED_COST_H_
#define KILN_TEMPLATES_FUSED_MOE_GROUPED_COST_H_

#include <cstdint>

#include "compiler/spec/kernel_template.h"
#include "templates/axes.h"

namespace kiln {

// One of the two products, and what its kernel does beside the others'.
struct GroupedProduct {
  int64_t inputs = 0;   // k
  int64_t outputs = 0;  // n, gate and up together for fc1
  int64_t split = 1;    // slices of K
  // Issue slots of a warp: to decode a 16 x 16 tile, and of its MMA with 8
  // tokens.
  double decode_cycles = 0;
  double group_cycles = 0;
  double stage_pieces = 0;     // of 16 bytes that a stage copies
  double block_bytes = 0;      // that a block copies before it begins
  double strip_registers = 0;  // for the fragments of a strip of 16 channels
  int64_t shared_bytes = 0;
};

// Cycles of a candidate's products and of their partial sums, less what all
// points share; only the order matters. The point has the axes tokens_tile,
// channels_tile, k_tile, warps and stages.
//   tiles: how many the interval's largest m is expected to have
double GroupedCycles(const Problem& problem, const AxisPoint& point,
                     double tiles, const GroupedProduct& fc1,
                     const GroupedProduct& fc2);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_GROUPED_COST_H_
