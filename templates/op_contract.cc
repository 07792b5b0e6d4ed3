#include "templates/op_contract.h"

#include "compiler/base/check.h"
#include "templates/fused_moe/mx_workload.h"
#include "templates/fused_moe/qsrt_workload.h"
#include "templates/fused_moe/workload.h"
#include "templates/linear/workload.h"

namespace kiln {
namespace {

const OpContract& MoeContract(WeightFormat format) {
  switch (format) {
    case WeightFormat::kExl3:
      return FusedMoeContract();
    case WeightFormat::kTrellisMx:
      return MxContract();
    case WeightFormat::kQsrt:
      return QsrtContract();
  }
  KILN_UNREACHABLE();
}

}  // namespace

const OpContract& ContractOf(const RequestGeometry& geometry) {
  switch (geometry.op) {
    case Op::kFusedMoe:
      return MoeContract(geometry.weights.format);
    case Op::kLinear:
      return LinearContract();
  }
  KILN_UNREACHABLE();
}

}  // namespace kiln
