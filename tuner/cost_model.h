// Cost model: candidates whose least time on the device is clearly beyond that
// of the best are left out of the race. Pure.
//
//   time = max(bytes, (decode + mma) * waves)
//
// bytes, decode and mma come from the device's ceilings and what the candidate
// does: a tile of an expert's rows decodes all its weights once and multiplies
// them with every row of the tile, empty rows included. waves is by how much a
// step takes longer because its blocks do not fill the last round.

#ifndef KILN_TUNER_COST_MODEL_H_
#define KILN_TUNER_COST_MODEL_H_

#include <string>

#include "compiler/spec/kernel_template.h"
#include "compiler/spec/plan.h"
#include "tuner/ceilings.h"

namespace kiln {

// Experts that m tokens are expected to use when they choose uniformly.
double ExpectedExperts(const RequestGeometry& geometry, uint32_t m);

// A candidate is left out when its predicted time exceeds the best prediction
// by more than this factor; inside it, the order of its template counts.
inline constexpr double kPruneFactor = 1.5;

struct Prediction {
  Floor floor;       // in units of the ceilings
  double waves = 1;  // at least 1

  double Time() const;

  // "decode", "mma" or "bytes".
  absl::string_view Bound() const { return floor.Bound(); }
};

// ceilings: Ceilings::Rounded of the device, not empty.
Prediction Predict(const Problem& problem, const PlanBody& body,
                   const Ceilings& ceilings);

// "pruned: decode takes 2.1 x the best prediction, beyond 1.5 x".
std::string PruneReason(const Prediction& prediction, double best);

// How the reason of every candidate starts that was left out of a race.
inline constexpr absl::string_view kPrunedPrefix = "pruned: ";

}  // namespace kiln

#endif  // KILN_TUNER_COST_MODEL_H_
