// RaceSchedule: which contenders the next block of a race times, in which
// order, and when the race is over. Pure: knows no device and no clock, so that
// its error rate can be simulated.
//
// A block times every contender that is still in and the reference twice, one
// after the other; the order starts at another lane each time and is reversed
// every second time. What was shown slower (tuner/elimination.h) leaves. More
// contenders than fit one batch come in later batches, next to the reference,
// the champion and everybody else who is still in.

#ifndef KILN_TUNER_RACE_SCHEDULE_H_
#define KILN_TUNER_RACE_SCHEDULE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/types/span.h"
#include "tuner/elimination.h"

namespace kiln {

struct ScheduleOptions {
  double error = kEliminationError;
  // Blocks of the last batch: never fewer, unless the caller stops; not more,
  // unless a time lies so close to a margin of selection that noise could
  // change the winner.
  uint32_t blocks_min = 5;
  uint32_t blocks_max = 40;
  uint32_t blocks_unsettled_max = 160;  // then; at least blocks_max
  uint32_t batch_blocks = 8;            // of each batch before it
  size_t batch_max = 32;  // contenders in a batch, unless more are still in
};

// Not thread-safe.
class RaceSchedule {
 public:
  // `contenders` take part, of 0..lanes-1, in this order; the first is the
  // reference. At least one.
  RaceSchedule(size_t lanes, std::vector<size_t> contenders,
               const ScheduleOptions& options);

  // Second lane of the reference: the number of all contenders.
  size_t twin() const { return lanes_; }

  size_t reference() const { return reference_; }

  // Lanes of the next block in the order in which they are to be timed, or
  // empty when the race is over.
  std::vector<size_t> NextBlock();

  // Adds the block that NextBlock named: nanoseconds by lane, twin() included;
  // 0 for the others. A block that does not count is not added.
  void Add(const std::vector<double>& ns);

  // Goes on where an earlier race stopped: its blocks by number, each as Add
  // takes it; 0 for lanes that were not timed. Before the first NextBlock.
  void Restore(const std::map<uint32_t, std::vector<double>>& blocks);

  // Whether the contender left the race before its end.
  bool IsDropped(size_t contender) const;

  // Whether it has been timed at all.
  bool IsTimed(size_t contender) const { return blocks_of_.at(contender) != 0; }

  // Whether every contender that is in has its fewest blocks. Those of later
  // batches are not in yet.
  bool HasEnough() const;

  size_t active() const { return active_.size(); }

  // Contenders that were the fastest at the end of a batch. They and the
  // reference are never dropped.
  const std::vector<size_t>& champions() const { return champions_; }

  double noise_floor() const { return NoiseFloorOf(twin_ratios_); }

  // Number of the next block; those before it count.
  uint32_t blocks() const { return blocks_; }

 private:
  bool IsKept(size_t contender) const;
  bool IsDecided() const;
  bool IsSettled() const;
  double MedianLogRatio(size_t contender) const;
  size_t Fastest() const;
  void NextBatch();
  void AddEvidence(const std::vector<double>& ns);
  void DropSlower();

  size_t lanes_;
  size_t slots_ = 0;  // contenders that take part, as the eliminator counts
  std::vector<size_t> slot_of_;  // by contender
  size_t reference_;
  ScheduleOptions options_;
  Eliminator eliminator_;
  std::vector<size_t> active_;   // reference first, then in order of entry
  std::vector<size_t> waiting_;  // for a later batch, in order
  std::vector<size_t> champions_;
  std::vector<char> dropped_;
  std::vector<uint32_t> blocks_of_;              // by contender
  std::vector<std::vector<double>> log_ratios_;  // to the reference
  std::vector<double> twin_ratios_;              // log, reference to its twin
  uint32_t offered_ = 0;                         // blocks named so far
  uint32_t blocks_ = 0;                          // and added
  uint32_t batch_blocks_ = 0;                    // of these, in this batch
};

}  // namespace kiln

#endif  // KILN_TUNER_RACE_SCHEDULE_H_
