#include "tuner/planner.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "templates/registry.h"

namespace kiln {

int DefaultCandidatesMax(Backend backend) {
  switch (backend) {
    case Backend::kCuda:
      return 16;
    case Backend::kCpu:
      return 6;
  }
  KILN_UNREACHABLE();
}

Planner::Planner(const RequestGeometry& geometry, const DeviceProfile& device,
                 const Toolchain& toolchain, int candidates_max)
    : geometry_(geometry),
      device_(device),
      toolchain_(toolchain),
      candidates_max_(static_cast<size_t>(candidates_max)) {
  KILN_CHECK(candidates_max >= 1);
}

const std::vector<ProgramKey>& Planner::ProgramsOf(
    const KernelTemplate& from, const Assignment& assignment) {
  const auto [it, inserted] =
      programs_.emplace(std::pair{std::string(from.name()), assignment},
                        std::vector<ProgramKey>{});
  if (inserted) {
    for (const SourceUnit& unit :
         from.MakeUnits(geometry_, device_.target, assignment)) {
      it->second.push_back(MakeProgramKey(unit, device_.target, toolchain_));
    }
  }
  return it->second;
}

absl::StatusOr<IntervalPlan> Planner::Plan(const Interval& interval) {
  const Problem problem = {geometry_, interval, device_};
  IntervalPlan plan;
  plan.interval = interval;
  std::vector<std::string> unsupported;
  for (const KernelTemplate* from :
       TemplatesFor(geometry_.op, device_.target.backend)) {
    const absl::Status supports = from->Supports(geometry_, device_.target);
    if (!supports.ok()) {
      unsupported.emplace_back(supports.message());
      continue;
    }
    const ParamSpace space = from->Enumerate(problem);
    for (const RejectedPoint& point : space.rejects) {
      plan.rejects.push_back(
          {absl::StrCat(from->name(), "{", AssignmentText(point.assignment),
                        "}"),
           point.reason});
    }
    for (size_t rank = 0; rank < space.points.size(); ++rank) {
      const Assignment& assignment = space.points[rank];
      if (rank >= candidates_max_) {
        plan.pruned.push_back(
            {absl::StrCat(from->name(), "{", AssignmentText(assignment), "}"),
             absl::StrCat("predicted rank ", rank + 1, " of ",
                          space.points.size(), ", limit ", candidates_max_)});
        continue;
      }
      PlannedCandidate candidate;
      candidate.kernel_template = from;
      ASSIGN_OR_RETURN(candidate.body, from->MakeBody(problem, assignment));
      candidate.programs = ProgramsOf(*from, assignment);
      std::vector<Digest> digests;
      for (const ProgramKey& key : candidate.programs) {
        digests.push_back(key.digest);
      }
      candidate.digest = CandidateDigest(candidate.body, digests);
      plan.candidates.push_back(std::move(candidate));
    }
  }
  if (plan.candidates.empty()) {
    if (plan.rejects.empty()) {
      return absl::UnimplementedError(absl::StrCat(
          "no template serves ", geometry_.ToString(), " on ",
          device_.target.ToString(), unsupported.empty() ? "" : ": ",
          absl::StrJoin(unsupported, "; ")));
    }
    std::set<std::string> reasons;
    for (const PlannedReject& reject : plan.rejects) {
      if (reasons.size() < 5) reasons.insert(reject.reason);
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "no candidate is legal for ", geometry_.ToString(), " m ",
        interval.m_min, "..", interval.m_max, " on ", device_.target.ToString(),
        ": ", absl::StrJoin(reasons, "; ")));
  }
  std::vector<Digest> candidates;
  for (const PlannedCandidate& candidate : plan.candidates) {
    candidates.push_back(candidate.digest);
  }
  plan.key = MakePlanKey(geometry_, interval, device_,
                         CandidateSpaceDigest(std::move(candidates)));
  return plan;
}

}  // namespace kiln
