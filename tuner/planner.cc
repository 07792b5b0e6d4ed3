#include "tuner/planner.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/grid_limits.h"
#include "templates/registry.h"
#include "tuner/cost_model.h"

namespace kiln {
namespace {

// Pruned candidates whose digest is computed; hashing thousands takes longer
// than all else here.
constexpr size_t kPrunedNamed = 64;

// Which targets have templates for the op and format.
std::string ServedOn(const RequestGeometry& geometry) {
  std::vector<absl::string_view> names;
  for (const Backend backend : {Backend::kCpu, Backend::kCuda}) {
    if (!TemplatesFor(geometry, backend).empty()) {
      names.push_back(BackendName(backend));
    }
  }
  if (names.empty()) return "no target has a template for it";
  return absl::StrCat("templates for it are for ",
                      absl::StrJoin(names, " and "), " targets");
}

// Empty, or why no runtime would take the body at m_max tokens.
std::string LimitThatBreaks(const PlanBody& body, uint32_t m_max) {
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

// Those of this build, then the attached ones.
std::vector<const KernelTemplate*> TemplatesOf(
    const RequestGeometry& geometry, Backend backend,
    const AttachedTemplates& attached) {
  std::vector<const KernelTemplate*> templates =
      TemplatesFor(geometry, backend);
  for (const auto& one : attached) {
    if (one->op() == geometry.op && one->format() == geometry.weights.format &&
        one->backend() == backend) {
      templates.push_back(one.get());
    }
  }
  return templates;
}

}  // namespace

struct Planner::BrokenRules {
  std::map<std::string, size_t> points;  // of each rule
  // All arenas above the limit break one rule, which names the least of them.
  size_t large_arenas = 0;
  uint64_t least_arena = UINT64_MAX;

  void NameArenas(uint64_t arena_bytes_max) {
    if (large_arenas == 0) return;
    points[absl::StrCat("an arena of ", least_arena,
                        " bytes or more exceeds the limit of ",
                        arena_bytes_max)] = large_arenas;
  }
};

int DefaultCandidatesMax(Backend backend) {
  switch (backend) {
    case Backend::kCuda:
      return 16;
    case Backend::kCpu:
      return 6;
  }
  KILN_UNREACHABLE();
}

absl::Status CheckOpsServed(const Manifest& manifest,
                            const std::vector<Target>& targets,
                            const AttachedTemplates& attached) {
  for (const Request& request : manifest.requests) {
    const RequestGeometry& geometry = request.geometry;
    const WeightFormat format = geometry.weights.format;
    for (const Target& target : targets) {
      if (!TemplatesOf(geometry, target.backend, attached).empty()) continue;
      return absl::UnimplementedError(absl::StrCat(
          "no template of this build serves op ", OpName(geometry.op),
          format == WeightFormat::kExl3
              ? ""
              : absl::StrCat(" over weights of ", WeightFormatName(format)),
          " on ", target.ToString(), ", which request \"", request.name,
          "\" is for; ", ServedOn(geometry),
          "; take such requests out of the manifest, or use a build that has a "
          "template for them"));
    }
  }
  return absl::OkStatus();
}

Planner::Planner(const RequestGeometry& geometry, const DeviceProfile& device,
                 const Toolchain& toolchain, const PlannerOptions& options)
    : geometry_(geometry),
      device_(device),
      attached_(options.attached),
      templates_(
          TemplatesOf(geometry, device.target.backend, options.attached)),
      in_tree_(TemplatesFor(geometry, device.target.backend).size()),
      numerics_(options.numerics) {
  KILN_CHECK(options.candidates_max >= 1);
  space_.toolchain = toolchain;
  space_.candidates_max = options.candidates_max;
  space_.arena_bytes_max = options.arena_bytes_max;
  space_.warm_l2 = options.warm_l2;
  // Who wants all candidates gets them.
  if (options.ceilings.has_value() && options.candidates_max < kAllCandidates) {
    space_.balance = options.ceilings->Balance();
    if (!space_.balance.empty()) model_ = options.ceilings->Rounded();
  }
  for (const KernelTemplate* from : templates_) {
    space_.templates.push_back(
        {std::string(from->name()), from->version(), from->sources()});
  }
}

const std::string& Planner::NumericsOf(const Interval& interval) const {
  static const auto* const kAny = new std::string;
  const auto found = numerics_.find(interval);
  return found == numerics_.end() ? *kAny : found->second;
}

PlanKey Planner::KeyOf(const Interval& interval) const {
  CandidateSpace space = space_;
  space.numerics_class = NumericsOf(interval);
  return MakePlanKey(geometry_, interval, device_, space);
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

std::string Planner::ReasonAgainst(const PlanBody& body,
                                   const Interval& interval) const {
  const std::string& numerics = NumericsOf(interval);
  if (!numerics.empty() && body.numerics_class != numerics) {
    return absl::StrCat("numerics class ", body.numerics_class,
                        " is not admitted: ", numerics, " is to be kept");
  }
  if ((!numerics.empty() || geometry_.deterministic) && !body.deterministic) {
    return absl::StrCat("numerics class ", body.numerics_class,
                        " is not admitted: repeats may differ");
  }
  return LimitThatBreaks(body, interval.m_max);
}

bool Planner::MayRace(const PlanBody& body, const Interval& interval,
                      BrokenRules* broken) const {
  const std::string reason = ReasonAgainst(body, interval);
  if (!reason.empty()) {
    ++broken->points[reason];
    return false;
  }
  if (body.arena.bytes <= space_.arena_bytes_max) return true;
  broken->least_arena = std::min(broken->least_arena, body.arena.bytes);
  ++broken->large_arenas;
  return false;
}

void Planner::Prune(const Problem& problem, bool by_model,
                    std::vector<LegalPoint>* points) const {
  if (by_model && model_.has_value()) {
    std::vector<Prediction> predictions;
    double best = std::numeric_limits<double>::infinity();
    for (const LegalPoint& point : *points) {
      predictions.push_back(Predict(problem, point.body, *model_));
      best = std::min(best, predictions.back().Time());
    }
    // The first is the default, which always competes.
    for (size_t i = 1; i < points->size(); ++i) {
      if (predictions[i].Time() > kPruneFactor * best) {
        (*points)[i].pruned = PruneReason(predictions[i], best);
      }
    }
  }
  int room = space_.candidates_max;
  for (LegalPoint& point : *points) {
    if (!point.pruned.empty()) continue;
    if (--room >= 0) continue;
    point.pruned = absl::StrCat(kPrunedPrefix, space_.candidates_max,
                                " candidates are predicted to be faster");
  }
}

std::vector<std::string> Planner::WhyIdle(const KernelTemplate& from,
                                          const Interval& interval) const {
  const Problem problem = {geometry_, interval, device_};
  const absl::Status supports = from.Supports(geometry_, device_.target);
  if (!supports.ok()) return {std::string(supports.message())};
  const ParamSpace space = from.Enumerate(problem, kAllCandidates);
  BrokenRules broken;
  for (const RejectedPoints& reject : space.rejects) {
    broken.points[reject.reason] += reject.count;
  }
  for (const Assignment& assignment : space.points) {
    const absl::StatusOr<PlanBody> body = from.MakeBody(problem, assignment);
    if (!body.ok()) {
      ++broken.points[std::string(body.status().message())];
    } else if (MayRace(*body, interval, &broken)) {
      return {};
    }
  }
  broken.NameArenas(space_.arena_bytes_max);
  std::vector<std::string> reasons;
  for (const auto& [reason, count] : broken.points) reasons.push_back(reason);
  return reasons;
}

absl::StatusOr<IntervalPlan> Planner::Plan(const Interval& interval) {
  const Problem problem = {geometry_, interval, device_};
  IntervalPlan plan;
  plan.interval = interval;
  std::vector<std::string> unsupported;
  BrokenRules broken;
  for (size_t index = 0; index < templates_.size(); ++index) {
    const KernelTemplate* const from = templates_[index];
    const absl::Status supports = from->Supports(geometry_, device_.target);
    if (!supports.ok()) {
      unsupported.emplace_back(supports.message());
      continue;
    }
    const ParamSpace space = from->Enumerate(problem, kAllCandidates);
    plan.rejects.insert(plan.rejects.end(), space.rejects.begin(),
                        space.rejects.end());
    std::vector<LegalPoint> points;
    for (const Assignment& assignment : space.points) {
      LegalPoint point;
      point.assignment = &assignment;
      ASSIGN_OR_RETURN(point.body, from->MakeBody(problem, assignment));
      if (MayRace(point.body, interval, &broken)) {
        points.push_back(std::move(point));
      }
    }
    Prune(problem, index < in_tree_, &points);
    for (LegalPoint& point : points) {
      if (!point.pruned.empty()) {
        plan.pruned.push_back({.label = point.body.Label(),
                               .body = plan.pruned.size() < kPrunedNamed
                                           ? CandidateDigest(point.body, {})
                                           : Digest(),
                               .numerics_class = point.body.numerics_class,
                               .arena_bytes = point.body.arena.bytes,
                               .reason = std::move(point.pruned)});
        continue;
      }
      PlannedCandidate candidate;
      candidate.kernel_template = from;
      candidate.body = std::move(point.body);
      candidate.programs = ProgramsOf(*from, *point.assignment);
      std::vector<Digest> digests;
      for (const ProgramKey& key : candidate.programs) {
        digests.push_back(key.digest);
      }
      candidate.digest = CandidateDigest(candidate.body, digests);
      plan.candidates.push_back(std::move(candidate));
    }
  }
  broken.NameArenas(space_.arena_bytes_max);
  // What was asked for comes before what the templates cannot do.
  std::vector<RejectedPoints> rejects;
  for (const auto& [reason, count] : broken.points) {
    rejects.push_back({.reason = reason, .count = count});
  }
  rejects.insert(rejects.end(), plan.rejects.begin(), plan.rejects.end());
  plan.rejects = std::move(rejects);
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
