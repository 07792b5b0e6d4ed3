// PlanBench: the time of one loaded plan, as deployed: captured launches that
// find a cold L2, interleaved with a rival's where there is one.

#ifndef KILN_TUNER_PLAN_BENCH_H_
#define KILN_TUNER_PLAN_BENCH_H_

#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "tuner/loaded_plan.h"
#include "tuner/op_bench.h"

namespace kiln {

struct BenchOptions {
  uint32_t blocks = 15;  // at least 2
  bool warm_l2 = false;  // every launch uses the same weights
};

struct BenchTiming {
  double ns = 0;           // median per launch
  double noise_floor = 0;  // fraction; NoiseFloorOf two lanes of the plan
  double experts = 0;      // active, mean over the draws
  uint32_t draws = 0;
  double rival_ns = 0;  // median of the rival; 0 without one
  // Clock of the multiprocessors before and after each launch, the least and
  // the most; 0 where the device does not say.
  uint32_t mhz_min = 0;
  uint32_t mhz_max = 0;
};

// A rival is timed once per block between the plan's two lanes: it returns
// nanoseconds per call for the same m and as many draws.
using BenchRival =
    std::function<absl::StatusOr<double>(uint32_t m, uint32_t draws)>;

// Times `plan`, which was found for m, on uniform draws. Replaces the bench's
// inputs.
absl::StatusOr<BenchTiming> TimePlan(OpBench* bench, const LoadedPlan& plan,
                                     uint32_t m, const BenchOptions& options,
                                     const BenchRival& rival);

}  // namespace kiln

#endif  // KILN_TUNER_PLAN_BENCH_H_
