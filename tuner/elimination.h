// Elimination: which contenders of a race may be dropped before its end. Pure
// statistics; the racer feeds it block by block.
//
// Within a block all contenders meet the same conditions, so what counts is the
// logarithm of the ratio of two times of one block. Contender i is dropped once
// it is shown slower than a rival j by more than the margin:
//
//   Y    = log(t_i / t_j) - log(1 + margin) of one block, within -clip .. clip
//   E_ij = mean over c of the product over blocks of 1 + c Y / clip,
//          c = 0.98, 0.5, 0.25, 0.1, 0.04
//
// Limited on both sides, a time that the machine disturbed speaks against a
// contender no louder than against its rivals.
//
// While the expected Y given the blocks before is at most 0, E_ij is a
// non-negative supermartingale that starts at 1, whatever the distribution is
// and however clip and margin follow the blocks before. By Ville's inequality
// it ever reaches 1/a with probability at most a, so looking after each block
// costs nothing. Summed over the K - 1 rivals and compared with (K - 1) /
// error: a contender that is within the margin of every rival, such as the
// fastest, is dropped in at most `error` of all races.
//
// Source: I. Waudby-Smith, A. Ramdas, "Estimating means of bounded random
// variables by betting", J. R. Stat. Soc. B 86 (2024), section 4 (capital
// processes). J. Ville, "Étude critique de la notion de collectif" (1939).

#ifndef KILN_TUNER_ELIMINATION_H_
#define KILN_TUNER_ELIMINATION_H_

#include <array>
#include <cstddef>
#include <vector>

#include "absl/types/span.h"

namespace kiln {

// Share of races in which the fastest contender may be dropped.
inline constexpr double kEliminationError = 0.01;

// Not thread-safe.
class Eliminator {
 public:
  // contenders: at least 1. error: within (0, 1).
  Eliminator(size_t contenders, double error);

  // Adds one block.
  //   ns: time of each contender; 0 for those that were not timed.
  //   margin: the fraction that counts, known before the block ran.
  //   spread: of log(t_i / t_j) of equal contenders, from the blocks before;
  //     negative while unknown.
  void AddBlock(absl::Span<const double> ns, double margin, double spread);

  // Whether `contender` was ever shown slower than some rival.
  bool IsSlower(size_t contender) const;

  // Whether it was ever shown slower than this rival, at the same error.
  bool IsSlowerThan(size_t contender, size_t rival) const;

 private:
  static constexpr std::array<double, 5> kBets = {0.98, 0.5, 0.25, 0.1, 0.04};

  // E_ij: one factor per bet, as it stands.
  struct Pair {
    std::array<double, kBets.size()> capital = {1, 1, 1, 1, 1};
    double Value() const;
  };

  Pair& At(size_t i, size_t j) { return pairs_[i * count_ + j]; }

  const Pair& At(size_t i, size_t j) const { return pairs_[i * count_ + j]; }

  size_t count_;
  double threshold_;  // (K - 1) / error
  std::vector<Pair> pairs_;
  std::vector<char> slower_;       // by contender
  std::vector<char> slower_than_;  // by contender and rival
};

// Spread of log ratios of two lanes of one contender: 1.4826 times the median
// of their absolute values, which a few disturbed blocks do not move. Negative
// with fewer than three.
double SpreadOf(std::vector<double> log_ratios);

// What two sets of samples of one contender differ by, as a fraction: the
// larger of the ratio of paired medians and the standard error of such a
// median. 0 with fewer than two.
double NoiseFloorOf(std::vector<double> log_ratios);

}  // namespace kiln

#endif  // KILN_TUNER_ELIMINATION_H_
