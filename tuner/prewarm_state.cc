#include "tuner/prewarm_state.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

// A claim on work is renewed long before it ends; the end matters only where an
// owner hangs or cannot be looked at from here.
constexpr int64_t kLeaseSeconds = 600;
constexpr double kRenewSeconds = 60;
constexpr std::chrono::milliseconds kPollInterval(50);

}  // namespace

Claims::~Claims() {
  if (!held_.empty()) Release({held_.begin(), held_.end()});
}

absl::StatusOr<std::vector<bool>> Claims::Claim(const std::vector<Digest>& keys,
                                                size_t limit) {
  ASSIGN_OR_RETURN(const std::vector<bool> claimed,
                   cache_.AcquireLeases(keys, kLeaseSeconds, limit));
  for (size_t i = 0; i < keys.size(); ++i) {
    if (claimed[i]) held_.insert(keys[i]);
  }
  return claimed;
}

absl::StatusOr<bool> Claims::ClaimAll(const std::vector<Digest>& keys) {
  ASSIGN_OR_RETURN(const std::vector<bool> claimed, Claim(keys, keys.size()));
  if (std::find(claimed.begin(), claimed.end(), false) == claimed.end()) {
    return true;
  }
  Release(keys);
  return false;
}

void Claims::Release(const std::vector<Digest>& keys) {
  std::vector<Digest> held;
  for (const Digest& key : keys) {
    if (held_.erase(key) != 0) held.push_back(key);
  }
  cache_.ReleaseLeases(held).IgnoreError();
}

void Claims::Renew() {
  if (renewed_.Seconds() < kRenewSeconds || held_.empty()) return;
  renewed_ = Stopwatch();
  const std::vector<Digest> keys(held_.begin(), held_.end());
  cache_.RenewLeases(keys, kLeaseSeconds).IgnoreError();
}

bool PrewarmState::Answers(const Plan& plan,
                           const TargetContext& context) const {
  return plan.evidence.state == PlanState::kMeasured || OnlyPredicts(context);
}

std::string PrewarmState::WhyMissing(const Digest& key) const {
  const auto reject = rejected_programs.find(key);
  return reject != rejected_programs.end()
             ? reject->second
             : absl::StrCat("program ", key.Short(), " is not in the cache");
}

absl::Status PrewarmState::LoadPrograms(const std::set<Digest>& keys) {
  std::vector<Digest> absent;
  for (const Digest& key : keys) {
    if (programs.find(key) == programs.end()) absent.push_back(key);
  }
  ASSIGN_OR_RETURN(std::vector<std::optional<Program>> found,
                   cache.FindPrograms(absent));
  for (size_t i = 0; i < absent.size(); ++i) {
    if (!found[i].has_value()) continue;
    programs[absent[i]] = std::make_shared<const Program>(*std::move(found[i]));
  }
  return absl::OkStatus();
}

absl::StatusOr<Contender> PrewarmState::MakeContender(
    const PlannedCandidate& candidate) const {
  Contender contender;
  contender.body = candidate.body;
  contender.digest = candidate.digest;
  for (const ProgramKey& key : candidate.programs) {
    const auto loaded = programs.find(key.digest);
    if (loaded == programs.end()) {
      return absl::NotFoundError(WhyMissing(key.digest));
    }
    contender.programs.push_back(loaded->second);
  }
  return contender;
}

Plan PrewarmState::MakePlan(size_t index,
                            const PlannedCandidate& candidate) const {
  const ResolvedInterval& resolved = intervals[index];
  Plan plan;
  plan.geometry = resolved.geometry;
  plan.target = contexts[resolved.context].target;
  plan.interval = resolved.interval;
  plan.body = candidate.body;
  for (const ProgramKey& key : candidate.programs) {
    plan.programs.push_back(key.digest);
  }
  plan.evidence.candidates =
      static_cast<uint32_t>(plans.at(index).candidates.size());
  return plan;
}

void PrewarmState::TakeWarnings() {
  for (const std::string& warning : cache.TakeWarnings()) {
    progress.Note(absl::StrCat("cache: ", warning));
  }
}

void PrewarmState::Wait(double seconds_to_look) {
  std::this_thread::sleep_for(
      kPollInterval + std::chrono::duration<double>(9 * seconds_to_look));
}

}  // namespace kiln
