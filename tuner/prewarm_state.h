// What the stages of one prewarm share. Internal to prewarm.cc and race_stage.

#ifndef KILN_TUNER_PREWARM_STATE_H_
#define KILN_TUNER_PREWARM_STATE_H_

#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tuner/prewarm.h"
#include "tuner/racer.h"

namespace kiln {

class Stopwatch {
 public:
  double Seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() -
                                         begin_)
        .count();
  }

 private:
  std::chrono::steady_clock::time_point begin_ =
      std::chrono::steady_clock::now();
};

// Claims on work. Others that share the cache wait for what is claimed here.
class Claims {
 public:
  explicit Claims(PlanCache* cache) : cache_(*cache) {}

  Claims(const Claims&) = delete;
  Claims& operator=(const Claims&) = delete;

  // What an early end leaves claimed, others may have at once.
  ~Claims();

  // At most `limit` of the keys, in their order; says which.
  absl::StatusOr<std::vector<bool>> Claim(const std::vector<Digest>& keys,
                                          size_t limit);
  // Claims all or none.
  absl::StatusOr<bool> ClaimAll(const std::vector<Digest>& keys);
  // A claim that cannot be given up ends with this process.
  void Release(const std::vector<Digest>& keys);

  // The Put of its key has ended the claim.
  void Forget(const Digest& key) { held_.erase(key); }

  // Renews what is held, when it is time; cheap to call often.
  void Renew();

 private:
  PlanCache& cache_;
  std::set<Digest> held_;
  Stopwatch renewed_;
};

struct PrewarmState {
  PrewarmState(const PrewarmOptions& from, PlanCache* plan_cache,
               ProgressSink* sink)
      : options(from),
        cache(*plan_cache),
        progress(*sink),
        claims(plan_cache) {}

  const TargetContext& ContextOf(size_t index) const {
    return contexts[intervals[index].context];
  }

  // No device takes part: plans are predicted.
  bool OnlyPredicts(const TargetContext& context) const {
    return options.compile_only || context.profile.assumed;
  }

  // A stored plan answers unless it is only predicted and a device is here.
  bool Answers(const Plan& plan, const TargetContext& context) const;

  // Why the cache lacks a program.
  std::string WhyMissing(const Digest& key) const;

  // Reads those of the programs that are not in `programs` yet, all from one
  // snapshot. What the cache lacks stays absent.
  absl::Status LoadPrograms(const std::set<Digest>& keys);

  // The candidate with its loaded programs; NotFound, with the reason, when it
  // cannot run.
  absl::StatusOr<Contender> MakeContender(
      const PlannedCandidate& candidate) const;

  // The plan that `candidate` of an interval would be; without evidence.
  Plan MakePlan(size_t index, const PlannedCandidate& candidate) const;

  void TakeWarnings();

  // Sleeps at least as long as it takes to look ten times.
  static void Wait(double seconds_to_look);

  const PrewarmOptions& options;
  PlanCache& cache;
  ProgressSink& progress;
  PrewarmReport report;
  std::vector<TargetContext> contexts;
  std::vector<ResolvedInterval> intervals;
  std::vector<size_t> missing;           // indices of intervals
  std::map<size_t, IntervalPlan> plans;  // of the missing ones
  std::map<Digest, std::string> rejected_programs;
  std::set<Digest> unfinished;  // of these, what may compile next time
  std::map<Digest, std::shared_ptr<const Program>> programs;
  Claims claims;
};

}  // namespace kiln

#endif  // KILN_TUNER_PREWARM_STATE_H_
