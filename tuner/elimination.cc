#include "tuner/elimination.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "compiler/base/check.h"

namespace kiln {
namespace {

// Clip of log ratios: a multiple of their spread, so that most of a Gaussian
// passes whole; the least one, and the one while the spread is unknown.
constexpr double kClipSpreads = 2;
constexpr double kClipMin = 0.01;
constexpr double kClipUnknown = 0.05;

// Standard deviation of a Gaussian as a multiple of its median absolute value.
constexpr double kSigmaPerMedian = 1.4826;

double MedianOf(std::vector<double>* values) {
  std::sort(values->begin(), values->end());
  const size_t middle = values->size() / 2;
  return values->size() % 2 == 1
             ? (*values)[middle]
             : ((*values)[middle - 1] + (*values)[middle]) / 2;
}

}  // namespace

double Eliminator::Pair::Value() const {
  return std::accumulate(capital.begin(), capital.end(), 0.0) /
         static_cast<double>(capital.size());
}

Eliminator::Eliminator(size_t contenders, double error)
    : count_(contenders),
      threshold_(static_cast<double>(contenders - 1) / error),
      pairs_(contenders * contenders),
      slower_(contenders),
      slower_than_(contenders * contenders) {
  KILN_CHECK(contenders >= 1 && error > 0 && error < 1);
}

void Eliminator::AddBlock(absl::Span<const double> ns, double margin,
                          double spread) {
  KILN_CHECK(ns.size() == count_);
  const double clip =
      spread < 0 ? kClipUnknown : std::max(kClipMin, kClipSpreads * spread);
  const double delta = std::log1p(margin);
  for (size_t i = 0; i < count_; ++i) {
    double sum = 0;
    for (size_t j = 0; j < count_; ++j) {
      if (i == j) continue;
      Pair& pair = At(i, j);
      if (ns[i] > 0 && ns[j] > 0) {
        const double y =
            std::clamp(std::log(ns[i] / ns[j]) - delta, -clip, clip);
        for (size_t k = 0; k < kBets.size(); ++k) {
          pair.capital[k] *= 1 + kBets[k] * y / clip;
        }
      }
      const double value = pair.Value();
      sum += value;
      if (value >= threshold_) slower_than_[i * count_ + j] = 1;
    }
    if (count_ > 1 && sum >= threshold_) slower_[i] = 1;
  }
}

bool Eliminator::IsSlower(size_t contender) const {
  return slower_.at(contender) != 0;
}

bool Eliminator::IsSlowerThan(size_t contender, size_t rival) const {
  return slower_than_.at(contender * count_ + rival) != 0;
}

double SpreadOf(std::vector<double> log_ratios) {
  if (log_ratios.size() < 3) return -1;
  for (double& value : log_ratios) value = std::abs(value);
  return kSigmaPerMedian * MedianOf(&log_ratios);
}

double NoiseFloorOf(std::vector<double> log_ratios) {
  if (log_ratios.size() < 2) return 0;
  const auto count = static_cast<double>(log_ratios.size());
  const double median = MedianOf(&log_ratios);
  for (double& value : log_ratios) value = std::abs(value - median);
  // A median's standard error is sqrt(pi / 2) of a mean's, for a Gaussian.
  const double error = std::sqrt(std::numbers::pi / 2) * kSigmaPerMedian *
                       MedianOf(&log_ratios) / std::sqrt(count);
  return std::max(std::expm1(std::abs(median)), error);
}

}  // namespace kiln
