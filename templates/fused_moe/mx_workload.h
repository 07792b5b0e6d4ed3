// MxWorkload: seeded inputs of one fused_moe request over TrellisMX weights and
// the answers to them. MxContract: what others need to know of the op.

#ifndef KILN_TEMPLATES_FUSED_MOE_MX_WORKLOAD_H_
#define KILN_TEMPLATES_FUSED_MOE_MX_WORKLOAD_H_

#include <cstdint>
#include <vector>

#include "compiler/spec/request.h"
#include "templates/fused_moe/op_mx.h"
#include "templates/fused_moe/routed_workload.h"
#include "templates/op_contract.h"

namespace kiln {

// Of every geometry of fused_moe over weights of trellis_mx.
const OpContract& MxContract();

// Not thread-safe. References: the modes of MxExpert.
class MxWorkload : public RoutedWorkload {
 public:
  // Fills the weights: random streams, block scales of 1/4 to 2, tables that
  // keep activations of order one, the signs of draws 0..7 by turns. The first
  // 128 input scales are 1, for one-term draws. With the identity boundary
  // block scales do what the tables would.
  MxWorkload(const RequestGeometry& geometry, uint64_t seed);

 private:
  double OneTerm(const std::vector<int64_t>& ids, uint32_t token,
                 int64_t channel) const override;
  std::vector<double> Evaluate(DrawKind kind, uint32_t draw,
                               const std::vector<int64_t>& rows, int threads,
                               ReferenceMode mode) const override;
};

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_MX_WORKLOAD_H_
