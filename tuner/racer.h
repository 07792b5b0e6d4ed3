// Race: candidates of one interval -> verdicts and timing samples. Verifies
// each candidate, then times the survivors in interleaved blocks as deployed:
// captured launches of the whole plan over rotating token draws, so that
// consecutive launches use other experts' weights and find a cold L2. Who is
// clearly slower leaves early (tuner/race_schedule.h).

#ifndef KILN_TUNER_RACER_H_
#define KILN_TUNER_RACER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/program.h"
#include "tuner/op_bench.h"
#include "tuner/race_schedule.h"

namespace kiln {

// A candidate with its compiled programs.
struct Contender {
  PlanBody body;
  std::vector<std::shared_ptr<const Program>> programs;
  Digest digest;  // CandidateDigest
};

// One timed block of one candidate.
struct BlockTime {
  uint32_t block = 0;
  double ns = 0;  // per launch of the whole plan
};

enum class Outcome {
  kOpen,        // nothing is known yet
  kFinished,    // timed to the end
  kEliminated,  // dropped early: shown slower than a rival, or never timed
                // because the time was over
  kIdentical,   // same binaries and launches as an earlier contender
  kRejected,    // wrong, or refused by the runtime
};

struct Timing {
  Outcome outcome = Outcome::kOpen;
  std::string reason;      // of a reject, or which contender it is identical to
  double worst_error = 0;  // against the oracle
  std::vector<BlockTime> samples;
};

struct RaceResult {
  std::vector<Timing> timings;  // in the order of the contenders
  // NoiseFloorOf the two lanes of the default (of the first right contender
  // when the default is wrong), as a fraction.
  double noise_floor = 0;
  uint64_t launches = 0;
  uint32_t blocks = 0;     // that count
  uint32_t discarded = 0;  // during which the device changed its clock
  double seconds = 0;      // that timing took
  // The contender that is timed twice per block, and its second samples.
  size_t twin = 0;
  std::vector<BlockTime> twin_samples;
};

struct RaceOptions {
  // Seconds that timing may take; verification is not counted.
  double seconds_max = 10;
  ScheduleOptions schedule;
  // Every launch uses the same weights, which then stay in the L2. Otherwise
  // launches rotate over enough weights to find it cold.
  bool warm_l2 = false;
  int oracle_threads = 1;
  // Called with a line for people whenever something was learnt.
  std::function<void(const std::string&)> progress;
  // Called before a contender runs. If the device then fails, the caller knows
  // whom to blame.
  std::function<void(size_t contender)> about_to_run;
  // Called with everything that is known whenever a verdict or a whole block
  // has been added to it.
  std::function<void(const RaceResult&)> checkpoint;
  // What a race of the same contenders on the same inputs had found out when
  // its process ended: the last checkpoint, in which the caller may have
  // rejected contenders. Verdicts are not asked for again, and blocks go on
  // from the last one: each of them is whole, so its lanes were compared under
  // equal conditions. Null: nothing is known. Borrowed.
  const RaceResult* earlier = nullptr;
};

// The first contender is the default: it is timed twice per block, which
// measures the noise floor, and never eliminated. Blocks during which the
// device changed its clock or was throttled do not count.
//   Errors: the device failed, or the machine lacks something
//   (IsWantOfResources). Wrong candidates are Outcome::kRejected.
absl::StatusOr<RaceResult> Race(OpBench* bench, const Interval& interval,
                                const std::vector<Contender>& contenders,
                                const RaceOptions& options);

// Adds uniform draws `first`, `first` + 1, .. of m tokens and returns their
// parameter blocks. Launches that rotate over them find a cold last-level
// cache: the weights they use exceed it several times. With `warm_l2` there is
// one draw, and they find a warm one.
absl::StatusOr<std::vector<std::vector<uint64_t>>> AddColdDraws(OpBench* bench,
                                                                uint32_t first,
                                                                uint32_t m,
                                                                bool warm_l2);

// Whether a failure says that memory, threads or descriptors ran out, and so
// nothing about the candidate that ran.
bool IsWantOfResources(const absl::Status& status);

// Median of the samples; NaN when there are none.
double MedianNs(const std::vector<BlockTime>& samples);

}  // namespace kiln

#endif  // KILN_TUNER_RACER_H_
