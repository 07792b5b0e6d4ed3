#include "tuner/plan_bench.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "tuner/elimination.h"
#include "tuner/racer.h"

namespace kiln {
namespace {

void AddClock(Device* device, BenchTiming* timing) {
  const std::optional<ClockState> clocks = device->ReadClocks();
  if (!clocks.has_value()) return;
  timing->mhz_min = timing->mhz_min == 0
                        ? clocks->mhz
                        : std::min(timing->mhz_min, clocks->mhz);
  timing->mhz_max = std::max(timing->mhz_max, clocks->mhz);
}

}  // namespace

absl::StatusOr<BenchTiming> TimePlan(OpBench* bench, const LoadedPlan& plan,
                                     uint32_t m, const BenchOptions& options,
                                     const BenchRival& rival) {
  // Draws of a race are other ones.
  constexpr uint32_t kFirstDraw = 500;
  KILN_CHECK(options.blocks >= 2);
  ASSIGN_OR_RETURN(const uint64_t arena_bytes, plan.ArenaBytes());
  bench->ClearInputs();
  RETURN_IF_ERROR(bench->Reserve(m, arena_bytes));
  BenchTiming timing;
  ASSIGN_OR_RETURN(const std::vector<std::vector<uint64_t>> params,
                   AddColdDraws(bench, kFirstDraw, m, options.warm_l2));
  timing.draws = static_cast<uint32_t>(params.size());
  for (uint32_t draw = 0; draw < timing.draws; ++draw) {
    timing.experts += static_cast<double>(bench->workload().ActiveExperts(
                          DrawKind::kUniform, kFirstDraw + draw, m)) /
                      timing.draws;
  }
  ASSIGN_OR_RETURN(
      const std::unique_ptr<Replay> replay,
      bench->device()->Record([&]() -> absl::Status {
        for (const std::vector<uint64_t>& block : params) {
          RETURN_IF_ERROR(plan.Launch(m, block, bench->arena().data(),
                                      bench->arena().bytes()));
        }
        return absl::OkStatus();
      }));
  RETURN_IF_ERROR(replay->Run().status());
  if (rival) RETURN_IF_ERROR(rival(m, timing.draws).status());
  std::vector<BlockTime> own;
  std::vector<BlockTime> theirs;
  std::vector<double> log_ratios;
  for (uint32_t block = 0; block < options.blocks; ++block) {
    AddClock(bench->device(), &timing);
    ASSIGN_OR_RETURN(const double first, replay->Run());
    AddClock(bench->device(), &timing);
    if (rival) {
      ASSIGN_OR_RETURN(const double ns, rival(m, timing.draws));
      theirs.push_back({block, ns});
    }
    AddClock(bench->device(), &timing);
    ASSIGN_OR_RETURN(const double second, replay->Run());
    AddClock(bench->device(), &timing);
    own.push_back({block, first / timing.draws});
    own.push_back({block, second / timing.draws});
    log_ratios.push_back(block % 2 == 0 ? std::log(first / second)
                                        : std::log(second / first));
  }
  timing.ns = MedianNs(own);
  timing.noise_floor = NoiseFloorOf(log_ratios);
  if (rival) timing.rival_ns = MedianNs(theirs);
  return timing;
}

}  // namespace kiln
