// Select: stored samples -> winner. A pure function of its input, so a winner
// can be derived again tomorrow, elsewhere, and without a device.

#ifndef KILN_TUNER_SELECTION_H_
#define KILN_TUNER_SELECTION_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "compiler/base/digest.h"

namespace kiln {

// What selection may look at. Only candidates that are right and were timed to
// the end may win.
struct SelectionInput {
  bool eligible = false;
  double median_ns = 0;
  std::string numerics_class;
  uint64_t arena_bytes = 0;
  uint32_t registers = 0;  // largest of the plan's kernels
  Digest key;              // CandidateDigest
};

// Least advantage over the default that counts, as a fraction.
inline constexpr double kSelectionMarginMin = 0.01;

// max(1 %, 3 x noise floor): what counts as equally fast.
double SelectionMargin(double noise_floor);

// What a ratio of two times differs by between two races of the same device,
// as a fraction, however quiet each of them is: memory lies elsewhere. Measured
// on an H200 in three races of 160 blocks: 0.9901, 0.9902, 0.9905.
inline constexpr double kRaceToRaceNoise = 0.0005;

// max(1 % + 2 n, 3 n), where n is the noise floor but at least
// kRaceToRaceNoise: what a challenger has to beat the default by. An advantage
// of 1 % that two equal candidates might also show is none; without this, races
// of a challenger that is just 1 % faster would come out one way or the other.
double DefaultMargin(double noise_floor);

// The winner's index, or nullopt when nothing is eligible. inputs[0] is the
// default: it wins unless the fastest beats it by more than DefaultMargin.
// Among those that beat it and lie within SelectionMargin of the fastest, the
// order is numerics class (that of the default first, then by name), smaller
// arena, fewer registers, lower key.
std::optional<size_t> SelectWinner(const std::vector<SelectionInput>& inputs,
                                   double noise_floor);

}  // namespace kiln

#endif  // KILN_TUNER_SELECTION_H_
