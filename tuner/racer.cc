#include "tuner/racer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

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
// A contender this much slower than the best is dropped after a few blocks.
constexpr uint32_t kEliminateAfter = 3;
constexpr double kEliminateFirst = 1.30;
constexpr double kEliminateLater = 1.10;

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
  std::vector<double> values;
  bool second = false;  // of two lanes of one contender
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
    const std::vector<VerifyCase> cases = VerifyCases(interval_);
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

  // Enough draws that their weights together exceed the cache several times.
  uint32_t DrawCount() {
    const RequestGeometry& geometry = bench_->geometry();
    const std::vector<uint64_t> bytes = FusedMoeBytes(geometry, 1);
    const auto slot = [&bytes](FusedMoeParam param) {
      return static_cast<double>(bytes[static_cast<size_t>(param)]);
    };
    const double expert =
        (slot(FusedMoeParam::kWGate) + slot(FusedMoeParam::kWUp) +
         slot(FusedMoeParam::kWDown)) /
        static_cast<double>(geometry.experts);
    const double touched =
        expert * static_cast<double>(bench_->workload().ActiveExperts(
                     Routing::kUniform, 0, interval_.m_max));
    const double wanted =
        kColdFactor *
        static_cast<double>(bench_->device()->profile().l2_bytes) / touched;
    return static_cast<uint32_t>(
        std::clamp(std::ceil(wanted), 2.0, static_cast<double>(kDrawsMax)));
  }

  absl::Status MakeLanes() {
    draws_ = DrawCount();
    std::vector<std::vector<uint64_t>> params;
    std::vector<size_t> sets;
    for (uint32_t draw = 0; draw < draws_; ++draw) {
      // Draws of the race are not those of the verifier.
      ASSIGN_OR_RETURN(
          const size_t set,
          bench_->AddInputs(Routing::kUniform, 100 + draw, interval_.m_max));
      sets.push_back(set);
    }
    for (const size_t set : sets) params.push_back(bench_->Params(set));
    const auto add = [&](size_t contender, bool second) -> absl::Status {
      Lane lane;
      lane.contender = contender;
      lane.second = second;
      const LoadedPlan* plan = plans_[contender].get();
      OpBench* bench = bench_;
      const uint32_t m = interval_.m_max;
      ASSIGN_OR_RETURN(
          lane.replay,
          bench_->device()->Record([plan, bench, params, m]() -> absl::Status {
            for (const std::vector<uint64_t>& block : params) {
              RETURN_IF_ERROR(plan->Launch(m, block, bench->arena().data(),
                                           bench->arena().bytes()));
            }
            return absl::OkStatus();
          }));
      for (const BlockTime& sample :
           second ? result_.twin_samples : result_.timings[contender].samples) {
        lane.values.push_back(sample.ns);
      }
      lanes_.push_back(std::move(lane));
      return absl::OkStatus();
    };
    for (size_t i = 0; i < contenders_.size(); ++i) {
      if (result_.timings[i].outcome != Outcome::kFinished) continue;
      RETURN_IF_ERROR(add(i, false));
      // The noise floor comes from timing one contender twice: the default, or
      // the first that is right when the default is not.
      if (lanes_.size() == 1) {
        // Earlier samples of another twin say nothing about this one.
        if (result_.twin != i) result_.twin_samples.clear();
        result_.twin = i;
        RETURN_IF_ERROR(add(i, true));
      }
    }
    return absl::OkStatus();
  }

  // The block after the last one that an earlier race finished.
  uint32_t NextBlock() const {
    uint32_t next = 0;
    for (const Lane& lane : lanes_) {
      if (lane.second) continue;
      const std::vector<BlockTime>& samples =
          result_.timings[lane.contender].samples;
      if (!samples.empty()) next = std::max(next, samples.back().block + 1);
    }
    return next;
  }

  // One sample of every lane, starting at another lane each time and in the
  // other direction every second time.
  absl::Status Block(uint32_t block) {
    std::vector<size_t> order(lanes_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::rotate(
        order.begin(),
        order.begin() + static_cast<std::ptrdiff_t>(block / 2 % order.size()),
        order.end());
    if (block % 2 == 1) std::reverse(order.begin(), order.end());
    for (const size_t index : order) {
      Lane& lane = lanes_[index];
      if (options_.about_to_run) options_.about_to_run(lane.contender);
      ASSIGN_OR_RETURN(const double total_ns, lane.replay->Run());
      result_.launches += draws_;
      const double ns = total_ns / draws_;
      lane.values.push_back(ns);
      // A second lane only serves the noise floor.
      (lane.second ? result_.twin_samples
                   : result_.timings[lane.contender].samples)
          .push_back({.block = block, .ns = ns});
    }
    return absl::OkStatus();
  }

  void Eliminate(double factor) {
    double best = std::numeric_limits<double>::infinity();
    for (const Lane& lane : lanes_) best = std::min(best, Median(lane.values));
    std::erase_if(lanes_, [&](const Lane& lane) {
      const bool slow =
          lane.contender != result_.twin && Median(lane.values) > factor * best;
      if (slow) {
        result_.timings[lane.contender].outcome = Outcome::kEliminated;
      }
      return slow;
    });
    Report(absl::StrFormat("race %d left, best %.1f us", lanes_.size(),
                           best / 1e3));
  }

  absl::Status TimeAll() {
    RETURN_IF_ERROR(MakeLanes());
    if (lanes_.empty()) return absl::OkStatus();
    // Warm-up: clocks rise, pages and instruction caches fill.
    for (Lane& lane : lanes_) {
      if (options_.about_to_run) options_.about_to_run(lane.contender);
      RETURN_IF_ERROR(lane.replay->Run().status());
      result_.launches += draws_;
    }
    const auto begin = std::chrono::steady_clock::now();
    for (uint32_t block = NextBlock(); block < options_.blocks_max; ++block) {
      if (block >= options_.blocks_min &&
          Seconds(begin) > options_.seconds_max) {
        break;
      }
      RETURN_IF_ERROR(Block(block));
      if (block + 1 == kEliminateAfter) Eliminate(kEliminateFirst);
      if (block + 1 == options_.blocks_min) Eliminate(kEliminateLater);
      Checkpoint();
    }
    MeasureNoise();
    return absl::OkStatus();
  }

  void MeasureNoise() {
    double first = 0;
    double second = 0;
    for (const Lane& lane : lanes_) {
      if (lane.contender != result_.twin) continue;
      (lane.second ? second : first) = Median(lane.values);
    }
    if (first > 0 && second > 0) {
      result_.noise_floor = std::abs(first / second - 1);
    }
  }

  OpBench* bench_;
  const Interval& interval_;
  const std::vector<Contender>& contenders_;
  const RaceOptions& options_;
  RaceResult result_;
  uint32_t draws_ = 0;
  std::vector<std::unique_ptr<LoadedPlan>> plans_;  // by contender; or null
  std::vector<Lane> lanes_;
};

}  // namespace

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
