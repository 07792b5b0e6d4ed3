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

// A point that was not taken, for people.
struct PlannedReject {
  std::string label;  // "fused_moe.cuda{...}"
  std::string reason;
};

struct IntervalPlan {
  Interval interval;
  // In order of predicted cost; the first is the default.
  std::vector<PlannedCandidate> candidates;
  std::vector<PlannedReject> rejects;  // break a rule of their template
  // Legal points beyond the limit, by predicted rank.
  std::vector<PlannedReject> pruned;
  PlanKey key;
};

// Candidates per interval unless the caller says otherwise.
int DefaultCandidatesMax(Backend backend);

// Plans intervals of one geometry on one device. Program keys are computed once
// per assignment and shared by all intervals. Not thread-safe.
class Planner {
 public:
  // candidates_max: at least 1.
  Planner(const RequestGeometry& geometry, const DeviceProfile& device,
          const Toolchain& toolchain, int candidates_max);

  // Errors: Unimplemented when no template serves the geometry on the target;
  // FailedPrecondition when every point breaks a rule, with the rules.
  absl::StatusOr<IntervalPlan> Plan(const Interval& interval);

 private:
  const std::vector<ProgramKey>& ProgramsOf(const KernelTemplate& from,
                                            const Assignment& assignment);

  RequestGeometry geometry_;
  DeviceProfile device_;
  Toolchain toolchain_;
  size_t candidates_max_;
  std::map<std::pair<std::string, Assignment>, std::vector<ProgramKey>>
      programs_;
};

}  // namespace kiln

#endif  // KILN_TUNER_PLANNER_H_
