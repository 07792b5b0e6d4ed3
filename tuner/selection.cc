#include "tuner/selection.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace kiln {

double SelectionMargin(double noise_floor) {
  return std::max(kSelectionMarginMin, 3 * noise_floor);
}

double DefaultMargin(double noise_floor) {
  const double noise = std::max(noise_floor, kRaceToRaceNoise);
  return std::max(kSelectionMarginMin + 2 * noise, 3 * noise);
}

std::optional<size_t> SelectWinner(const std::vector<SelectionInput>& inputs,
                                   double noise_floor) {
  double best = std::numeric_limits<double>::infinity();
  for (const SelectionInput& input : inputs) {
    if (input.eligible) best = std::min(best, input.median_ns);
  }
  if (best == std::numeric_limits<double>::infinity()) return std::nullopt;
  const double margin = 1 + SelectionMargin(noise_floor);
  const double default_margin = 1 + DefaultMargin(noise_floor);
  const bool has_default = !inputs.empty() && inputs[0].eligible;
  if (has_default && inputs[0].median_ns <= best * default_margin) return 0;
  const auto order = [&inputs](size_t index) {
    const SelectionInput& input = inputs[index];
    return std::tuple(input.numerics_class != inputs[0].numerics_class,
                      input.numerics_class, input.arena_bytes, input.registers,
                      input.key);
  };
  std::optional<size_t> winner;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].eligible || inputs[i].median_ns > best * margin) continue;
    if (has_default &&
        inputs[i].median_ns * default_margin >= inputs[0].median_ns) {
      continue;
    }
    if (!winner.has_value() || order(i) < order(*winner)) winner = i;
  }
  return winner;
}

}  // namespace kiln
