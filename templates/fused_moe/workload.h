// FusedMoeWorkload: seeded inputs of one fused_moe request and the answers to
// them. FusedMoeContract: what others need to know of the op.

#ifndef KILN_TEMPLATES_FUSED_MOE_WORKLOAD_H_
#define KILN_TEMPLATES_FUSED_MOE_WORKLOAD_H_

#include <cstdint>
#include <vector>

#include "compiler/spec/buffer_fill.h"
#include "compiler/spec/request.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/reference.h"
#include "templates/fused_moe/routed_workload.h"
#include "templates/op_contract.h"

namespace kiln {

// The slots' buffers with what golden replay puts into them: any trellis words,
// numbers of the size that keeps activations of order one, ids of all experts.
std::vector<BufferFill> FusedMoeBuffers(const RequestGeometry& geometry);

// Of every geometry of the op.
const OpContract& FusedMoeContract();

// Not thread-safe.
class FusedMoeWorkload : public RoutedWorkload {
 public:
  // Fills the weights and scales: uniformly random trellis words (every payload
  // is valid) and scales that keep activations of order one. The first 128
  // input scales of gate and up are equal, 1 or -1, for one-term draws.
  FusedMoeWorkload(const RequestGeometry& geometry, uint64_t seed);

  using RoutedWorkload::Constant;

  // Those of kWGate .. kDownSvh are not empty.
  absl::string_view Constant(FusedMoeParam param) const {
    return Constant(static_cast<size_t>(param));
  }

  using Tokens = RoutedTokens::Tokens;
  using RoutedWorkload::MakeTokens;

 private:
  double OneTerm(const std::vector<int64_t>& ids, uint32_t token,
                 int64_t channel) const override;
  // The reference on tokens 0 .. max(rows) of a draw.
  std::vector<double> Evaluate(DrawKind kind, uint32_t draw,
                               const std::vector<int64_t>& rows, int threads,
                               ReferenceMode mode) const override;
};

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_WORKLOAD_H_
