#include "compiler/spec/kernel_template.h"

#include "compiler/base/status_macros.h"

namespace kiln {

// Out of line: the one place for the vtable.
KernelTemplate::~KernelTemplate() = default;

WeightFormat KernelTemplate::format() const { return WeightFormat::kExl3; }

absl::StatusOr<Candidate> KernelTemplate::Instantiate(
    const Problem& problem, const Assignment& assignment) const {
  Candidate candidate;
  ASSIGN_OR_RETURN(candidate.body, MakeBody(problem, assignment));
  candidate.units =
      MakeUnits(problem.geometry, problem.device.target, assignment);
  return candidate;
}

}  // namespace kiln
