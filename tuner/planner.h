// Planner: one request and one interval on one device -> the candidates worth
// compiling, in order, with the keys of their programs. Pure; asks no cache, no
// compiler and no device.

#ifndef KILN_TUNER_PLANNER_H_
#define KILN_TUNER_PLANNER_H_

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compiler/spec/kernel_template.h"
#include "compiler/spec/manifest.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/plan_key.h"
#include "compiler/spec/program.h"
#include "compiler/spec/target.h"
#include "tuner/ceilings.h"

namespace kiln {

struct PlannedCandidate {
  const KernelTemplate* kernel_template = nullptr;
  PlanBody body;
  std::vector<ProgramKey> programs;  // Step::program indexes this
  Digest digest;                     // CandidateDigest
};

// A legal candidate that does not race.
struct PrunedCandidate {
  std::string label;  // PlanBody::Label()
  // CandidateDigest without programs, as none was made; of the first 64 only.
  Digest body;
  std::string numerics_class;
  uint64_t arena_bytes = 0;
  std::string reason;  // starts with kPrunedPrefix
};

struct IntervalPlan {
  Interval interval;
  // By template, in the order of the registry and then as they were attached,
  // and by predicted cost; the first is the default.
  std::vector<PlannedCandidate> candidates;
  // Points that break a rule of their template, by rule.
  std::vector<RejectedPoints> rejects;
  // Legal points that were left out, in order of predicted cost.
  std::vector<PrunedCandidate> pruned;
};

// Candidates per interval and template unless the caller says otherwise.
int DefaultCandidatesMax(Backend backend);

// As many as to leave none out.
inline constexpr int kAllCandidates = 1 << 20;

// Templates that were attached for a run: those of kernel packages.
using AttachedTemplates = std::vector<std::shared_ptr<const KernelTemplate>>;

// How candidates are chosen.
struct PlannerOptions {
  int candidates_max = 1;  // per interval, at least 1
  // Scratch that a candidate may ask for.
  uint64_t arena_bytes_max = kArenaBytesMax;
  // Of the device; the cost model leaves nothing out without them.
  std::optional<Ceilings> ceilings = std::nullopt;
  bool warm_l2 = false;  // how they will be timed
  // The numerics class that an interval keeps; empty or absent: any.
  std::map<Interval, std::string> numerics = {};
  // Compete with the templates of this build, and come after them. The cost
  // model does not know them and leaves none of their points out.
  AttachedTemplates attached = {};
};

// Whether there are templates for the ops of all requests on all targets, in
// this build or attached.
//   Errors: Unimplemented, naming the first request that there is none for.
absl::Status CheckOpsServed(const Manifest& manifest,
                            const std::vector<Target>& targets,
                            const AttachedTemplates& attached = {});

// Plans intervals of one geometry on one device. Program keys are computed once
// per assignment and shared by all intervals. Not thread-safe.
class Planner {
 public:
  Planner(const RequestGeometry& geometry, const DeviceProfile& device,
          const Toolchain& toolchain, const PlannerOptions& options);

  // Key of the interval's plan. Needs no enumeration, so that a stored plan is
  // found without planning.
  PlanKey KeyOf(const Interval& interval) const;

  // The candidates.
  //   Errors: Unimplemented when no template serves the geometry on the target;
  //   FailedPrecondition when every point breaks a rule, with the rules.
  absl::StatusOr<IntervalPlan> Plan(const Interval& interval);

  // Why a template, of this build or not, offers no candidate in the interval:
  // distinct reasons; none when it offers one.
  std::vector<std::string> WhyIdle(const KernelTemplate& from,
                                   const Interval& interval) const;

 private:
  const std::vector<ProgramKey>& ProgramsOf(const KernelTemplate& from,
                                            const Assignment& assignment);
  const std::string& NumericsOf(const Interval& interval) const;

  // A point that its template allows.
  struct LegalPoint {
    const Assignment* assignment = nullptr;
    PlanBody body;
    std::string pruned;  // why it does not race; empty when it does
  };

  // Rules that keep points out of a race.
  struct BrokenRules;

  // Why a body may not race whatever it costs, or empty.
  std::string ReasonAgainst(const PlanBody& body,
                            const Interval& interval) const;
  // Whether a body may race; if not, adds why.
  bool MayRace(const PlanBody& body, const Interval& interval,
               BrokenRules* broken) const;
  // Sets `pruned` of the points, which are in the order of their template.
  // by_model: the cost model takes part.
  void Prune(const Problem& problem, bool by_model,
             std::vector<LegalPoint>* points) const;

  RequestGeometry geometry_;
  DeviceProfile device_;
  AttachedTemplates attached_;                    // kept alive
  std::vector<const KernelTemplate*> templates_;  // for op and backend
  size_t in_tree_ = 0;                            // the first so many
  CandidateSpace space_;
  std::map<Interval, std::string> numerics_;
  // What the cost model goes by; absent when it leaves nothing out.
  std::optional<Ceilings> model_;
  std::map<std::pair<std::string, Assignment>, std::vector<ProgramKey>>
      programs_;
};

}  // namespace kiln

#endif  // KILN_TUNER_PLANNER_H_
