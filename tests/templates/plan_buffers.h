// The buffers around a run of a plan, and what a NaN in a token may do to it.

#ifndef KILN_TESTS_TEMPLATES_PLAN_BUFFERS_H_
#define KILN_TESTS_TEMPLATES_PLAN_BUFFERS_H_

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "compiler/spec/plan.h"
#include "device/half.h"

namespace kiln::testing {

// Bytes of one value, of which the first is aligned as an arena is.
class PoisonedArena {
 public:
  PoisonedArena(uint64_t bytes, uint8_t poison)
      : storage_(bytes + kArenaAlignment, poison) {}

  uint8_t* data() {
    const auto at = reinterpret_cast<uintptr_t>(storage_.data());
    return storage_.data() +
           (kArenaAlignment - at % kArenaAlignment) % kArenaAlignment;
  }

 private:
  std::vector<uint8_t> storage_;
};

// Rows of an output, all NaN, with a guard row on both sides.
class GuardedRows {
 public:
  GuardedRows(size_t rows, size_t width)
      : width_(width), values_((rows + 2) * width, NAN) {}

  float* data() { return values_.data() + width_; }

  // The rows; the guards must be as they were.
  std::vector<float> Take() const {
    for (size_t i = 0; i < width_; ++i) {
      EXPECT_TRUE(std::isnan(values_[i]));
      EXPECT_TRUE(std::isnan(values_[values_.size() - 1 - i]));
    }
    const auto guard = static_cast<ptrdiff_t>(width_);
    return std::vector<float>(values_.begin() + guard, values_.end() - guard);
  }

 private:
  size_t width_;
  std::vector<float> values_;
};

// Results of a call before and after a NaN was put into token `token`: that row
// is NaN throughout, every other has the bits that it had.
inline void ExpectNanInItsRowAlone(const std::vector<float>& before,
                                   const std::vector<float>& after,
                                   size_t width, size_t token) {
  ASSERT_EQ(before.size(), after.size());
  for (size_t i = 0; i < after.size(); ++i) {
    if (i / width == token) {
      ASSERT_TRUE(std::isnan(after[i])) << i;
    } else {
      ASSERT_EQ(kd::FloatBits(after[i]), kd::FloatBits(before[i])) << i;
    }
  }
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_PLAN_BUFFERS_H_
