// Recheck: is any stored winner slower than the default? Measured again on
// inputs that no race has seen.

#ifndef KILN_TUNER_RECHECK_H_
#define KILN_TUNER_RECHECK_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "cache/plan_cache.h"
#include "compiler/spec/manifest.h"
#include "tuner/prewarm.h"

namespace kiln {

struct RecheckedInterval {
  Target target;
  std::vector<std::string> names;
  Interval interval;
  std::string winner;   // label
  double ratio = 1;     // time of the winner over that of the default
  double margin = 0;    // that counts: SelectionMargin of this measurement
  bool slower = false;  // ratio > 1 + margin
};

struct RecheckReport {
  std::vector<RecheckedInterval> intervals;  // that were measured again
  size_t same = 0;     // intervals whose winner is the default
  size_t skipped = 0;  // without a measured plan, or without this device
  size_t slower = 0;
};

// Races winner against default for every measured interval of the manifest, on
// weights, tokens and routes of another seed. Changes nothing in the cache.
//   Errors: those of the device; Internal when a winner or a default is wrong
//   on the new inputs, naming it.
absl::StatusOr<RecheckReport> Recheck(const Manifest& manifest,
                                      const PrewarmOptions& options,
                                      PlanCache* cache, ProgressSink* progress);

}  // namespace kiln

#endif  // KILN_TUNER_RECHECK_H_
