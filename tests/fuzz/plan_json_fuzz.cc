// Any bytes: PlanFromJson answers with DataLoss, or with a valid plan that
// survives a round trip.

#include <cstdint>

#include "compiler/base/check.h"
#include "compiler/spec/plan.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<kiln::Plan> plan = kiln::PlanFromJson(text);
  if (!plan.ok()) {
    KILN_CHECK(absl::IsDataLoss(plan.status()));
    return 0;
  }
  KILN_CHECK(kiln::ValidatePlan(*plan).ok());
  const absl::StatusOr<kiln::Plan> again =
      kiln::PlanFromJson(kiln::PlanToJson(*plan));
  KILN_CHECK(again.ok() && *again == *plan);
  return 0;
}
