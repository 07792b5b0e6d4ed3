// Verify: is a loaded candidate right? Nothing is timed before the answer is
// yes.
//
// Each case runs on seeded inputs with output and arena poisoned (0xFF: NaN),
// red zones around both. Checked: sampled rows against the float64 oracle
// within the candidate's tolerance; every other row for poison that was left
// and for values that are not finite; rows past m for writes; the zones; the
// inputs for writes; a repeat for bit-identity when the candidate claims
// determinism. The repeat starts from an arena of zeros: 0xFF bytes read as -1,
// which a kernel that forgets to clear its tables may take for "no route".

#ifndef KILN_TUNER_VERIFIER_H_
#define KILN_TUNER_VERIFIER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/spec/plan.h"
#include "tuner/loaded_plan.h"
#include "tuner/op_bench.h"

namespace kiln {

struct VerifyCase {
  Routing routing = Routing::kUniform;
  uint32_t draw = 0;
  uint32_t m = 1;
  bool repeat = false;         // run twice and compare
  std::vector<uint32_t> rows;  // compared with the oracle, ascending

  // "m=17 ragged routes, draw 1".
  std::string ToString() const;
};

// At most `count` rows of 0..m-1: the first, the last, some around multiples
// of 8 and 16 where tiles end, the rest evenly spread. Ascending.
std::vector<uint32_t> SampleRows(uint32_t m, uint32_t count);

// Cases for an interval: its edges and sizes between, uniform and ragged
// routes. A pure function.
std::vector<VerifyCase> VerifyCases(const Interval& interval);

struct VerifyResult {
  bool passed = true;
  double worst_error = 0;  // largest relative Frobenius error of a row
  std::string reason;      // of a failure: case, what was found and expected
  uint32_t launches = 0;
};

// Checks what a completed launch of `test` left in output and arena, which were
// poisoned before it, and adds to `result`. Returns the output rows 0..m-1.
//   threads: for the oracle, at least 1.
absl::StatusOr<std::vector<float>> CheckOutput(OpBench* bench,
                                               const VerifyCase& test,
                                               double tolerance, int threads,
                                               VerifyResult* result);

// An error status means that the device failed, not that the candidate is
// wrong; the device may then be unusable. Leaves its input sets in the bench,
// where the next candidate finds them.
//   threads: for the oracle, at least 1.
absl::StatusOr<VerifyResult> Verify(OpBench* bench, const LoadedPlan& plan,
                                    const PlanBody& body,
                                    const std::vector<VerifyCase>& cases,
                                    int threads);

}  // namespace kiln

#endif  // KILN_TUNER_VERIFIER_H_
