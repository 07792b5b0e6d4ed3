#include "tuner/racer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/plan_key.h"
#include "tuner/loaded_plan.h"
#include "tuner/verifier.h"

namespace kiln {
namespace {

constexpr uint32_t kDrawsMax = 16;
// Reuse distance of a weight, in multiples of the last-level cache.
constexpr double kColdFactor = 4;
// A device whose clock changes in more blocks than this, as a multiple of those
// that count, has no steady state to be timed in.
constexpr uint32_t kDiscardedPerBlock = 4;
constexpr uint32_t kDiscardedMin = 20;

double Seconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since)
      .count();
}

double Median(std::vector<double> values) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle]
                                : (values[middle - 1] + values[middle]) / 2;
}

// The interval's own cases, and the edges of what lies below it: smaller
// intervals may be merged into this one.
std::vector<VerifyCase> CasesOf(const Interval& interval) {
  std::vector<VerifyCase> cases = VerifyCases(interval);
  if (interval.m_min == 1) return cases;
  for (VerifyCase& test : VerifyCases({1, interval.m_min - 1})) {
    if (test.m != 1 && test.m != interval.m_min - 1) continue;
    test.repeat = false;
    cases.push_back(std::move(test));
  }
  return cases;
}

// Whether the device ran slower for a reason of its own, or at another clock
// at the end than at the start.
bool HasDrifted(const std::optional<ClockState>& before,
                const std::optional<ClockState>& after) {
  // One step of the clock is less.
  constexpr double kSteady = 0.03;
  if (!before.has_value() || !after.has_value()) return false;
  if (before->throttle != 0 || after->throttle != 0) return true;
  const auto [low, high] = std::minmax(before->mhz, after->mhz);
  return high - low > kSteady * high;
}

// Draws that launches of m tokens rotate over, so that the weights they use
// exceed the last-level cache several times: 2 to 16.
uint32_t ColdDraws(OpBench* bench, const OpWork& work, uint32_t m) {
  double expert = 0;
  for (const OpMatrix& matrix : work.matrices) {
    expert += matrix.weights * matrix.bits / 8;
  }
  const double touched =
      expert * static_cast<double>(
                   bench->workload().ActiveExperts(DrawKind::kUniform, 0, m));
  const double wanted =
      kColdFactor * static_cast<double>(bench->device()->profile().l2_bytes) /
      touched;
  return static_cast<uint32_t>(
      std::clamp(std::ceil(wanted), 2.0, static_cast<double>(kDrawsMax)));
}

// Same code, same launches: timing it again would only measure noise.
std::string CodeIdentity(const Contender& contender) {
  CanonicalEncoder encoder("kiln.code/1");
  for (const auto& program : contender.programs) {
    encoder.Hash("binary", program->binary_digest);
  }
  PlanBody body = contender.body;
  body.template_name.clear();
  body.assignment.clear();
  encoder.Hash("launches", CandidateDigest(body, {}));
  return encoder.bytes();
}

// One timed lane of a block.
struct Lane {
  size_t contender = 0;
  std::unique_ptr<Replay> replay;
};

class RaceRunner {
 public:
  RaceRunner(OpBench* bench, const Interval& interval,
             const std::vector<Contender>& contenders,
             const RaceOptions& options)
      : bench_(bench),
        interval_(interval),
        contenders_(contenders),
        options_(options) {
    if (options.earlier != nullptr) {
      KILN_CHECK(options.earlier->timings.size() == contenders.size());
      result_ = *options.earlier;
    }
    result_.timings.resize(contenders.size());
  }

  absl::StatusOr<RaceResult> Run() {
    uint64_t arena_bytes = 0;
    for (const Contender& contender : contenders_) {
      arena_bytes = std::max(arena_bytes, contender.body.arena.bytes);
    }
    RETURN_IF_ERROR(VerifyAll());
    bench_->ClearInputs();
    RETURN_IF_ERROR(bench_->Reserve(interval_.m_max, arena_bytes));
    RETURN_IF_ERROR(TimeAll());
    RETURN_IF_ERROR(bench_->CheckInputs());
    bench_->ClearInputs();
    return std::move(result_);
  }

 private:
  void Report(const std::string& line) {
    if (options_.progress) options_.progress(line);
  }

  void Checkpoint() {
    if (options_.checkpoint) options_.checkpoint(result_);
  }

  absl::Status VerifyAll() {
    const std::vector<VerifyCase> cases = CasesOf(interval_);
    std::map<std::string, size_t> seen;
    plans_.resize(contenders_.size());
    for (size_t i = 0; i < contenders_.size(); ++i) {
      const Contender& contender = contenders_[i];
      Timing& timing = result_.timings[i];
      const auto [it, first] = seen.emplace(CodeIdentity(contender), i);
      if (!first) {
        timing.outcome = Outcome::kIdentical;
        timing.reason = contenders_[it->second].body.Label();
        continue;
      }
      // Known from an earlier race; what was eliminated runs no more.
      if (timing.outcome == Outcome::kRejected ||
          timing.outcome == Outcome::kEliminated) {
        continue;
      }
      if (options_.about_to_run) options_.about_to_run(i);
      absl::StatusOr<LoadedPlan> loaded =
          LoadedPlan::Load(bench_->device(), bench_->geometry(),
                           interval_.m_max, contender.body, contender.programs);
      if (IsWantOfResources(loaded.status())) return loaded.status();
      if (!loaded.ok()) {
        timing.outcome = Outcome::kRejected;
        timing.reason = std::string(loaded.status().message());
        continue;
      }
      if (timing.outcome == Outcome::kOpen) {
        RETURN_IF_ERROR(VerifyOne(i, cases));
        Checkpoint();
      }
      if (timing.outcome == Outcome::kFinished) {
        plans_[i] = std::make_unique<LoadedPlan>(*std::move(loaded));
      }
    }
    return absl::OkStatus();
  }

  absl::Status VerifyOne(size_t index, const std::vector<VerifyCase>& cases) {
    const Contender& contender = contenders_[index];
    Timing& timing = result_.timings[index];
    const PlanBody zoned = WithArenaZones(contender.body);
    ASSIGN_OR_RETURN(
        const LoadedPlan loaded,
        LoadedPlan::Load(bench_->device(), bench_->geometry(), interval_.m_max,
                         zoned, contender.programs));
    // Exactly what the candidate declares, so that a write past its own arena
    // hits the zone and not the room of a larger one.
    RETURN_IF_ERROR(bench_->Reserve(interval_.m_max, zoned.arena.bytes));
    Report(absl::StrCat("verify ", index + 1, "/", contenders_.size(), " ",
                        contender.body.Label()));
    const absl::StatusOr<VerifyResult> verified =
        Verify(bench_, loaded, zoned, cases, options_.oracle_threads);
    if (!verified.ok()) {
      return Annotate(verified.status(), contender.body.Label());
    }
    result_.launches += verified->launches;
    timing.worst_error = verified->worst_error;
    timing.reason = verified->reason;
    timing.outcome = verified->passed ? Outcome::kFinished : Outcome::kRejected;
    return absl::OkStatus();
  }

  // The lane's recorded launches; the first use warms up: clocks rise, pages
  // and instruction caches fill.
  absl::StatusOr<Replay*> ReplayOf(size_t index) {
    Lane& lane = lanes_[index];
    if (options_.about_to_run) options_.about_to_run(lane.contender);
    if (lane.replay != nullptr) return lane.replay.get();
    const auto launch = [this, plan = plans_[lane.contender].get()] {
      for (const std::vector<uint64_t>& block : params_) {
        RETURN_IF_ERROR(plan->Launch(interval_.m_max, block,
                                     bench_->arena().data(),
                                     bench_->arena().bytes()));
      }
      return absl::OkStatus();
    };
    ASSIGN_OR_RETURN(lane.replay, bench_->device()->Record(launch));
    RETURN_IF_ERROR(lane.replay->Run().status());
    result_.launches += draws_;
    return lane.replay.get();
  }

  // Times the lanes once, in this order.
  absl::StatusOr<std::vector<double>> TimeBlock(
      const std::vector<size_t>& order) {
    std::vector<double> ns(lanes_.size());
    for (const size_t index : order) {
      ASSIGN_OR_RETURN(Replay * replay, ReplayOf(index));
      ASSIGN_OR_RETURN(const double total_ns, replay->Run());
      result_.launches += draws_;
      ns[index] = total_ns / draws_;
    }
    return ns;
  }

  absl::Status TimeAll() {
    std::vector<size_t> right;
    for (size_t i = 0; i < contenders_.size(); ++i) {
      lanes_.push_back({.contender = i, .replay = nullptr});
      if (result_.timings[i].outcome == Outcome::kFinished) right.push_back(i);
    }
    if (right.empty()) return absl::OkStatus();
    // Draws of the race are not those of the verifier.
    constexpr uint32_t kFirstDraw = 100;
    ASSIGN_OR_RETURN(params_, AddColdDraws(bench_, kFirstDraw, interval_.m_max,
                                           options_.warm_l2));
    draws_ = static_cast<uint32_t>(params_.size());
    RaceSchedule schedule(contenders_.size(), right, options_.schedule);
    lanes_.push_back({.contender = schedule.reference(), .replay = nullptr});
    Resume(&schedule);
    const auto begin = std::chrono::steady_clock::now();
    // What an earlier race of the same contenders took counts.
    const double before_seconds = result_.seconds;
    for (;;) {
      const std::vector<size_t> order = schedule.NextBlock();
      if (order.empty()) break;
      if (schedule.HasEnough() &&
          before_seconds + Seconds(begin) > options_.seconds_max) {
        break;
      }
      // Making and warming lanes must not fall into a block.
      for (const size_t index : order) {
        RETURN_IF_ERROR(ReplayOf(index).status());
      }
      const std::optional<ClockState> before = bench_->device()->ReadClocks();
      ASSIGN_OR_RETURN(const std::vector<double> ns, TimeBlock(order));
      if (HasDrifted(before, bench_->device()->ReadClocks())) {
        ++result_.discarded;
        if (result_.discarded >
            kDiscardedMin + kDiscardedPerBlock * schedule.blocks()) {
          return absl::UnavailableError(absl::StrCat(
              "the device changed its clock or was throttled during ",
              result_.discarded, " blocks of a race, only ", schedule.blocks(),
              " count; let it cool down or lock its clock (nvidia-smi "
              "--lock-gpu-clocks), then run the same command again"));
        }
        continue;
      }
      Keep(schedule, order, ns);
      const size_t active = schedule.active();
      schedule.Add(ns);
      result_.blocks = schedule.blocks();
      result_.noise_floor = schedule.noise_floor();
      result_.seconds = before_seconds + Seconds(begin);
      Checkpoint();
      if (schedule.active() != active || schedule.blocks() % 8 == 0) {
        Report(absl::StrFormat("race block %d, %d in, %.1f us, floor %.2f %%",
                               schedule.blocks(), schedule.active(),
                               BestNs() / 1e3, 100 * schedule.noise_floor()));
      }
    }
    for (const size_t i : right) {
      Timing& timing = result_.timings[i];
      if (schedule.IsTimed(i) && !schedule.IsDropped(i)) continue;
      timing.outcome = Outcome::kEliminated;
      if (!schedule.IsTimed(i)) timing.reason = "the time to race was over";
    }
    result_.noise_floor = schedule.noise_floor();
    result_.blocks = schedule.blocks();
    result_.seconds = before_seconds + Seconds(begin);
    return absl::OkStatus();
  }

  // Goes on from the whole blocks of an earlier race.
  void Resume(RaceSchedule* schedule) {
    // Earlier samples of another twin say nothing about this one.
    if (result_.twin != schedule->reference()) result_.twin_samples.clear();
    result_.twin = schedule->reference();
    std::map<uint32_t, std::vector<double>> blocks;
    const auto add = [&](const std::vector<BlockTime>& samples, size_t lane) {
      for (const BlockTime& sample : samples) {
        std::vector<double>& ns = blocks[sample.block];
        ns.resize(lanes_.size());
        ns[lane] = sample.ns;
      }
    };
    for (size_t i = 0; i < contenders_.size(); ++i) {
      if (result_.timings[i].outcome != Outcome::kFinished) continue;
      add(result_.timings[i].samples, i);
    }
    add(result_.twin_samples, schedule->twin());
    if (!blocks.empty()) schedule->Restore(blocks);
  }

  // The second lane of the reference serves the noise floor alone.
  void Keep(const RaceSchedule& schedule, const std::vector<size_t>& order,
            const std::vector<double>& ns) {
    for (const size_t index : order) {
      std::vector<BlockTime>& samples = index == schedule.twin()
                                            ? result_.twin_samples
                                            : result_.timings[index].samples;
      samples.push_back({.block = schedule.blocks(), .ns = ns[index]});
    }
  }

  double BestNs() const {
    double best = std::numeric_limits<double>::infinity();
    for (const Timing& timing : result_.timings) {
      if (!timing.samples.empty()) {
        best = std::min(best, MedianNs(timing.samples));
      }
    }
    return best;
  }

  OpBench* bench_;
  const Interval& interval_;
  const std::vector<Contender>& contenders_;
  const RaceOptions& options_;
  RaceResult result_;
  uint32_t draws_ = 0;
  std::vector<std::vector<uint64_t>> params_;       // by draw
  std::vector<std::unique_ptr<LoadedPlan>> plans_;  // by contender; or null
  std::vector<Lane> lanes_;  // by contender, then the second of the reference
};

}  // namespace

absl::StatusOr<std::vector<std::vector<uint64_t>>> AddColdDraws(OpBench* bench,
                                                                uint32_t first,
                                                                uint32_t m,
                                                                bool warm_l2) {
  const OpWork work = bench->contract().Work(bench->geometry());
  const uint32_t draws = warm_l2 ? 1 : ColdDraws(bench, work, m);
  std::vector<std::vector<uint64_t>> params;
  for (uint32_t draw = 0; draw < draws; ++draw) {
    ASSIGN_OR_RETURN(const size_t set,
                     bench->AddInputs(DrawKind::kUniform, first + draw, m));
    if (work.reads_all_weights && draw > 0) {
      RETURN_IF_ERROR(bench->CopyWeights(set));
    }
    params.push_back(bench->Params(set));
  }
  return params;
}

bool IsWantOfResources(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsUnavailable(status);
}

double MedianNs(const std::vector<BlockTime>& samples) {
  std::vector<double> values;
  values.reserve(samples.size());
  for (const BlockTime& sample : samples) values.push_back(sample.ns);
  return Median(std::move(values));
}

absl::StatusOr<RaceResult> Race(OpBench* bench, const Interval& interval,
                                const std::vector<Contender>& contenders,
                                const RaceOptions& options) {
  KILN_CHECK(!contenders.empty());
  return RaceRunner(bench, interval, contenders, options).Run();
}

}  // namespace kiln
