// Planner: one request and one interval on one device -> the candidates worth
// compiling, in order, with the keys of their programs. Pure; asks no cache, no
// compiler and no device.

#ifndef KILN_TUNER_PLANNER_H_
#define KILN_TUNER_PLANNER_H_

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/spec/kernel_template.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/plan_key.h"
#include "compiler/spec/program.h"

namespace kiln {

struct PlannedCandidate {
  const KernelTemplate* kernel_template = nullptr;
  PlanBody body;
  std::vector<ProgramKey> programs;  // Step::program indexes this
  Digest digest;                     // CandidateDigest
};

struct IntervalPlan {
  Interval interval;
  // By template, in the order of the registry, and by predicted cost; the first
  // is the default.
  std::vector<PlannedCandidate> candidates;
  // Points that break a rule of their template, and legal points that were left
  // out because more than the limit were predicted to be faster.
  std::vector<RejectedPoints> rejects;
  size_t left_out = 0;
};

// Candidates per interval and template unless the caller says otherwise.
int DefaultCandidatesMax(Backend backend);

// Plans intervals of one geometry on one device. Program keys are computed once
// per assignment and shared by all intervals. Not thread-safe.
class Planner {
 public:
  // candidates_max: at least 1.
  Planner(const RequestGeometry& geometry, const DeviceProfile& device,
          const Toolchain& toolchain, int candidates_max);

  // Key of the interval's plan. Needs no enumeration, so that a stored plan is
  // found without planning.
  PlanKey KeyOf(const Interval& interval) const;

  // The candidates.
  //   Errors: Unimplemented when no template serves the geometry on the target;
  //   FailedPrecondition when every point breaks a rule, with the rules.
  absl::StatusOr<IntervalPlan> Plan(const Interval& interval);

 private:
  const std::vector<ProgramKey>& ProgramsOf(const KernelTemplate& from,
                                            const Assignment& assignment);

  RequestGeometry geometry_;
  DeviceProfile device_;
  CandidateSpace space_;
  std::map<std::pair<std::string, Assignment>, std::vector<ProgramKey>>
      programs_;
};

}  // namespace kiln

#endif  // KILN_TUNER_PLANNER_H_
