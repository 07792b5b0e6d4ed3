#include "templates/op_contract.h"

#include "compiler/base/check.h"
#include "templates/fused_moe/mx_workload.h"
#include "templates/fused_moe/workload.h"
#include "templates/linear/workload.h"

namespace kiln {

const OpContract& ContractOf(const RequestGeometry& geometry) {
  switch (geometry.op) {
    case Op::kFusedMoe:
      return geometry.weights.format == WeightFormat::kTrellisMx
                 ? MxContract()
                 : FusedMoeContract();
    case Op::kLinear:
      return LinearContract();
  }
  KILN_UNREACHABLE();
}

}  // namespace kiln
