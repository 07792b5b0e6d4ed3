#include "tuner/race_schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "compiler/base/check.h"
#include "tuner/selection.h"

namespace kiln {

RaceSchedule::RaceSchedule(size_t lanes, std::vector<size_t> contenders,
                           const ScheduleOptions& options)
    : lanes_(lanes),
      slots_(contenders.size()),
      slot_of_(lanes),
      reference_(contenders.at(0)),
      options_(options),
      eliminator_(contenders.size(), options.error),
      waiting_(std::move(contenders)),
      dropped_(lanes),
      blocks_of_(lanes),
      log_ratios_(lanes) {
  KILN_CHECK(options_.batch_max >= 2 && options_.blocks_max >= 1 &&
             options_.blocks_unsettled_max >= options_.blocks_max);
  for (size_t slot = 0; slot < slots_; ++slot) {
    slot_of_.at(waiting_[slot]) = slot;
  }
  NextBatch();
}

void RaceSchedule::NextBatch() {
  // Newcomers must come in, however many are still there.
  const size_t room = options_.batch_max > active_.size()
                          ? options_.batch_max - active_.size()
                          : 0;
  const size_t count =
      std::min(waiting_.size(), std::max(room, (options_.batch_max + 3) / 4));
  const auto end = waiting_.begin() + static_cast<std::ptrdiff_t>(count);
  active_.insert(active_.end(), waiting_.begin(), end);
  waiting_.erase(waiting_.begin(), end);
  batch_blocks_ = 0;
}

std::vector<size_t> RaceSchedule::NextBlock() {
  if (waiting_.empty()) {
    if (batch_blocks_ >= options_.blocks_unsettled_max) return {};
    const bool over =
        batch_blocks_ >= options_.blocks_max || (HasEnough() && IsDecided());
    if (over && IsSettled()) return {};
  }
  std::vector<size_t> order = active_;
  order.push_back(twin());
  const uint32_t turn = offered_++;
  std::rotate(
      order.begin(),
      order.begin() + static_cast<std::ptrdiff_t>(turn / 2 % order.size()),
      order.end());
  if (turn % 2 == 1) std::reverse(order.begin(), order.end());
  return order;
}

void RaceSchedule::AddEvidence(const std::vector<double>& ns) {
  KILN_CHECK(ns.size() == lanes_ + 1);
  // Margin and spread are those of the blocks before this one.
  const double margin = SelectionMargin(noise_floor());
  const double spread = SpreadOf(twin_ratios_);
  std::vector<double> slots(slots_);
  for (size_t contender = 0; contender < lanes_; ++contender) {
    if (!(ns[contender] > 0)) continue;
    slots[slot_of_[contender]] = ns[contender];
    ++blocks_of_[contender];
    if (ns[reference_] > 0) {
      log_ratios_[contender].push_back(
          std::log(ns[contender] / ns[reference_]));
    }
  }
  eliminator_.AddBlock(slots, margin, spread);
  if (ns[reference_] > 0 && ns[twin()] > 0) {
    twin_ratios_.push_back(std::log(ns[reference_] / ns[twin()]));
  }
}

void RaceSchedule::DropSlower() {
  std::erase_if(active_, [&](size_t contender) {
    if (IsKept(contender)) return false;
    if (!eliminator_.IsSlower(slot_of_[contender])) return false;
    dropped_[contender] = 1;
    return true;
  });
}

void RaceSchedule::Add(const std::vector<double>& ns) {
  AddEvidence(ns);
  ++blocks_;
  ++batch_blocks_;
  const bool batch_ends =
      !waiting_.empty() && batch_blocks_ >= options_.batch_blocks;
  if (batch_ends) {
    const size_t fastest = Fastest();
    if (!IsKept(fastest)) champions_.push_back(fastest);
  }
  DropSlower();
  if (batch_ends) NextBatch();
}

void RaceSchedule::Restore(
    const std::map<uint32_t, std::vector<double>>& blocks) {
  KILN_CHECK(offered_ == 0);
  for (const auto& [number, ns] : blocks) {
    AddEvidence(ns);
    blocks_ = number + 1;
  }
  offered_ = blocks_;
  // Whoever has been timed is in; the others wait as before.
  waiting_.insert(waiting_.begin(), active_.begin(), active_.end());
  active_.clear();
  std::vector<size_t> untimed;
  for (const size_t contender : waiting_) {
    const bool in = contender == reference_ || blocks_of_[contender] > 0;
    (in ? active_ : untimed).push_back(contender);
  }
  waiting_ = std::move(untimed);
  batch_blocks_ = options_.blocks_unsettled_max;
  for (const size_t contender : active_) {
    batch_blocks_ = std::min(batch_blocks_, blocks_of_[contender]);
  }
  DropSlower();
}

bool RaceSchedule::IsDropped(size_t contender) const {
  return dropped_.at(contender) != 0;
}

bool RaceSchedule::HasEnough() const {
  return std::all_of(active_.begin(), active_.end(), [&](size_t contender) {
    return blocks_of_[contender] >= options_.blocks_min;
  });
}

bool RaceSchedule::IsKept(size_t contender) const {
  return contender == reference_ ||
         std::find(champions_.begin(), champions_.end(), contender) !=
             champions_.end();
}

// Nothing that further blocks could change: the reference is alone, or slower
// than the only other one.
bool RaceSchedule::IsDecided() const {
  size_t rivals = 0;
  size_t rival = reference_;
  for (const size_t contender : active_) {
    // A champion that was beaten stays in, but decides nothing any more.
    if (contender == reference_ || eliminator_.IsSlower(slot_of_[contender])) {
      continue;
    }
    ++rivals;
    rival = contender;
  }
  if (rivals == 0) return true;
  return rivals == 1 &&
         eliminator_.IsSlowerThan(slot_of_[reference_], slot_of_[rival]);
}

// No time that may still decide lies within two noise floors of a margin.
bool RaceSchedule::IsSettled() const {
  const double noise = std::max(noise_floor(), kRaceToRaceNoise);
  const auto is_near = [noise](double log_ratio, double margin) {
    return std::abs(log_ratio - std::log1p(margin)) < 2 * noise;
  };
  const double best = MedianLogRatio(Fastest());
  if (is_near(-best, DefaultMargin(noise))) return false;
  return std::none_of(active_.begin(), active_.end(), [&](size_t contender) {
    return contender != reference_ &&
           !eliminator_.IsSlower(slot_of_[contender]) &&
           (is_near(MedianLogRatio(contender) - best, SelectionMargin(noise)) ||
            is_near(-MedianLogRatio(contender), DefaultMargin(noise)));
  });
}

double RaceSchedule::MedianLogRatio(size_t contender) const {
  std::vector<double> values = log_ratios_[contender];
  if (values.empty()) return std::numeric_limits<double>::infinity();
  const auto middle =
      values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

size_t RaceSchedule::Fastest() const {
  return *std::min_element(active_.begin(), active_.end(),
                           [&](size_t a, size_t b) {
                             return MedianLogRatio(a) < MedianLogRatio(b);
                           });
}

}  // namespace kiln
