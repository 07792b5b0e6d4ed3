#include "tuner/planner.h"

#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "templates/registry.h"

namespace kiln {
namespace {

// Blocks of a launch (CUDA C++ Programming Guide, table of compute
// capabilities); the bundle format has the same limits for every target.
constexpr uint64_t kGridMax[3] = {0x7FFFFFFF, 65535, 65535};

// Empty, or why no runtime would take the body at m_max tokens.
std::string LimitThatBreaks(const PlanBody& body, uint32_t m_max) {
  if (body.arena.bytes > kArenaBytesMax) {
    return absl::StrCat("an arena of ", body.arena.bytes,
                        " bytes exceeds the limit of ", kArenaBytesMax);
  }
  for (const Step& step : body.steps) {
    for (size_t d = 0; d < step.grid.size(); ++d) {
      const uint64_t blocks = step.grid[d].Evaluate(m_max);
      if (blocks > kGridMax[d]) {
        return absl::StrCat("grid dimension ", d, " of step ", step.label,
                            " is ", blocks, ", the limit is ", kGridMax[d]);
      }
    }
  }
  return "";
}

}  // namespace

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
    : geometry_(geometry), device_(device) {
  KILN_CHECK(candidates_max >= 1);
  space_.toolchain = toolchain;
  space_.candidates_max = candidates_max;
  for (const KernelTemplate* from :
       TemplatesFor(geometry.op, device.target.backend)) {
    space_.templates.push_back(
        {std::string(from->name()), from->version(), from->sources()});
  }
}

PlanKey Planner::KeyOf(const Interval& interval) const {
  return MakePlanKey(geometry_, interval, device_, space_);
}

const std::vector<ProgramKey>& Planner::ProgramsOf(
    const KernelTemplate& from, const Assignment& assignment) {
  const auto [it, inserted] =
      programs_.emplace(std::pair{std::string(from.name()), assignment},
                        std::vector<ProgramKey>{});
  if (inserted) {
    for (const SourceUnit& unit :
         from.MakeUnits(geometry_, device_.target, assignment)) {
      it->second.push_back(
          MakeProgramKey(unit, device_.target, space_.toolchain));
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
    const ParamSpace space =
        from->Enumerate(problem, static_cast<size_t>(space_.candidates_max));
    plan.rejects.insert(plan.rejects.end(), space.rejects.begin(),
                        space.rejects.end());
    plan.left_out += space.legal - space.points.size();
    for (const Assignment& assignment : space.points) {
      PlannedCandidate candidate;
      candidate.kernel_template = from;
      ASSIGN_OR_RETURN(candidate.body, from->MakeBody(problem, assignment));
      const std::string broken =
          LimitThatBreaks(candidate.body, interval.m_max);
      if (!broken.empty()) {
        plan.rejects.push_back({.reason = broken, .count = 1});
        continue;
      }
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
    std::vector<std::string> reasons;
    for (const RejectedPoints& reject : plan.rejects) {
      if (reasons.size() < 5) reasons.push_back(reject.reason);
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "no candidate is legal for ", geometry_.ToString(), " m ",
        interval.m_min, "..", interval.m_max, " on ", device_.target.ToString(),
        ": ", absl::StrJoin(reasons, "; ")));
  }
  return plan;
}

}  // namespace kiln
