// Verify: is a loaded candidate right? Nothing is timed before the answer is
// yes.
//
// Each case runs on seeded inputs between red zones, with poisoned output and
// an arena whose contents change from launch to launch. Checked:
//   - rows of uniform draws, as many as are sampled, against the float64 oracle
//     within the candidate's tolerance;
//   - all rows of the other draws against the rounding boundaries that the
//     candidate's numerics class promises (Promise);
//   - every row for poison that was left and for values that are not finite
//     where the answer is; rows behind m, the zones, the gaps of the arena and
//     the inputs for writes;
//   - a repeat for bit-identity when the candidate claims determinism.

#ifndef KILN_TUNER_VERIFIER_H_
#define KILN_TUNER_VERIFIER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/spec/plan.h"
#include "templates/fused_moe/reference.h"
#include "templates/op_workload.h"
#include "tuner/loaded_plan.h"
#include "tuner/op_bench.h"

namespace kiln {

struct VerifyCase {
  DrawKind kind = DrawKind::kUniform;
  uint32_t draw = 0;
  uint32_t m = 1;
  bool repeat = false;         // run twice and compare
  std::vector<uint32_t> rows;  // compared with the oracle, ascending

  // "m=17 ragged draw 1".
  std::string ToString() const;
};

// At most `count` rows of 0..m-1: the first, the last, some around multiples
// of 8 and 16 where tiles end, the rest evenly spread. Ascending.
std::vector<uint32_t> SampleRows(uint32_t m, uint32_t count);

// The rows of a case that the oracle answers for: all distinct tokens of a draw
// that repeats them, else SampleRows.
std::vector<uint32_t> OracleRows(DrawKind kind, uint32_t m, uint32_t count);

// Cases for an interval: its edges and sizes between, all kinds of routes. A
// pure function.
std::vector<VerifyCase> VerifyCases(const Interval& interval);

// What a candidate's results must agree with, beyond its tolerance.
struct Promise {
  // The reference for uniform draws: the float64 oracle, or, where activations
  // are quantised, the rounding boundaries, since what quantising costs would
  // hide what a wrong kernel does.
  ReferenceMode oracle = ReferenceMode::kFloat64;
  // The reference for draws that are not uniform.
  ReferenceMode mode = ReferenceMode::kFloat64;
  // Largest relative Frobenius error of a row against it, and of all finite
  // rows of a case together. 0: bit for bit.
  double row_error_max = 0;
  double case_error_max = 0;
  // Largest such error of a row of a one-term draw, where no order of sums
  // excuses a wrong rounding.
  double one_term_error_max = 0;
  // The same of a row of a uniform draw against `oracle`.
  double tolerance = 0;
  // Equal tokens have equal bits; otherwise sums have no order, and their rows
  // differ by no more than that explains.
  bool bits_repeat = true;
};

// By numerics class. "w4a16.f16.sequential" promises the bits of
// ReferenceMode::kSequential. Other classes of "w4a16.f16." promise the
// rounding boundaries, but not the order of sums, so they may differ from
// ReferenceMode::kStaged where a sum lies next to the middle of two binary16
// values. A value that is rounded to its other neighbour moves a whole block by
// a little, and so some of its neighbours' next roundings: two right kernels
// differ by up to half of what wrong roundings cost, except in one-term draws.
// "mx.w4a16.fold32" and "qsrt.w4a16.sequential" promise the bits of
// kSequential, "mx.w4a8.fold32" and "qsrt.w4a8.sequential" those of
// kSequentialW4A8, "mx.w4a8rp2.fold32" those of kSequentialW4A8Rp2. Classes
// that begin with such a name of mx and go on leave the order of a block's sum
// open, other classes of "qsrt.w4a16." and "qsrt.w4a8." that of all sums: they
// promise the tolerance against kStaged, kStagedW4A8 or kStagedW4A8Rp2. Uniform
// draws of "mx.w4a8.fold32" and "qsrt.w4a8." are held against kStagedW4A8,
// those of all others against the float64 oracle. Of an unknown class only the
// tolerance is known.
Promise PromiseOf(absl::string_view numerics_class, double tolerance,
                  bool deterministic);

// The same candidate with red zones between the slices of its arena: what is
// verified. Its code and launches are those of `body`.
PlanBody WithArenaZones(const PlanBody& body);

struct VerifyResult {
  bool passed = true;
  // Largest relative Frobenius error of a row against the oracle of its
  // promise, and against the promised rounding boundaries.
  double worst_error = 0;
  double worst_staged_error = 0;
  // Least cosine between a row of a uniform draw and that oracle's.
  double worst_cosine = 1;
  double worst_case_error = 0;      // as Promise::case_error_max
  double worst_one_term_error = 0;  // as Promise::one_term_error_max
  std::string reason;  // of a failure: case, what was found and expected
  uint32_t launches = 0;
};

// Checks what a completed launch of `test` left in output and arena, which were
// poisoned before it, and adds to `result`. Returns the output rows 0..m-1.
//   threads: for the oracle, at least 1.
absl::StatusOr<std::vector<float>> CheckOutput(OpBench* bench,
                                               const VerifyCase& test,
                                               const Promise& promise,
                                               int threads,
                                               VerifyResult* result);

// An error status means that the device failed, not that the candidate is
// wrong; the device may then be unusable. Leaves its input sets in the bench,
// where the next candidate finds them.
//   plan: of `body`, which WithArenaZones made; the bench's arena has its size.
//   threads: for the oracle, at least 1.
absl::StatusOr<VerifyResult> Verify(OpBench* bench, const LoadedPlan& plan,
                                    const PlanBody& body,
                                    const std::vector<VerifyCase>& cases,
                                    int threads);

}  // namespace kiln

#endif  // KILN_TUNER_VERIFIER_H_
