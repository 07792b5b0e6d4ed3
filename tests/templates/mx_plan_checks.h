// What every CUDA kernel over TrellisMX weights is asked, whatever its products
// are made of. A test runs plans; these say which and what must come out.

#ifndef KILN_TESTS_TEMPLATES_MX_PLAN_CHECKS_H_
#define KILN_TESTS_TEMPLATES_MX_PLAN_CHECKS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "templates/fused_moe/op_mx.h"
#include "templates/fused_moe/reference.h"
#include "tests/templates/gpu_emulator.h"
#include "tests/templates/mx_call.h"
#include "tests/templates/plan_buffers.h"
#include "tests/templates/test_data.h"

namespace kiln::testing {

// Of K, of either product.
struct MxSlices {
  int64_t fc1 = 1;
  int64_t fc2 = 1;
};

// How a plan of a variant is launched, with an arena of `poison`.
struct MxRun {
  uint32_t capacity = 0;
  uint8_t poison = 0xFF;
  MxSlices slices = {};
  gpu::Order order = gpu::Order::kForward;
};

// Gives [m][H].
using MxRunner = std::function<std::vector<float>(const MxCall&, const MxRun&)>;

inline bool EqualBits(const std::vector<float>& a,
                      const std::vector<float>& b) {
  return a.size() == b.size() &&
         std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

template <typename Variant>
void ExpectRoundingBoundaries(const Variant& v, ReferenceMode mode,
                              const MxRunner& run) {
  for (const uint32_t tokens : {1u, 19u}) {
    SCOPED_TRACE("m=" + std::to_string(tokens));
    const MxCall call(GeometryOf(v), tokens, 77 + tokens);
    const std::vector<float> out = run(call, {.capacity = 24});
    const RowError error = WorstRow(out, call.Expected(mode), v.hidden);
    EXPECT_LE(error.relative, 1e-3);
    EXPECT_GE(error.cosine, 0.99995);
    EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](float value) {
      return std::fabs(value) > 0.1f;
    }));
  }
}

template <typename Variant>
void ExpectSlicesAreAdded(const Variant& v, ReferenceMode mode,
                          const MxRunner& run) {
  const MxCall call(GeometryOf(v), 5, 11);
  const MxSlices slices = {.fc1 = 4, .fc2 = v.inter >= 256 ? 2 : 1};
  const std::vector<float> out =
      run(call, {.capacity = 5, .poison = 0x7B, .slices = slices});
  const RowError error = WorstRow(out, call.Expected(mode), v.hidden);
  EXPECT_LE(error.relative, 1e-3);
}

template <typename Variant>
void ExpectNothingUnwrittenIsRead(const Variant& v, const MxRunner& run) {
  const MxCall call(GeometryOf(v), 5, 6);
  const std::vector<float> first = run(call, {.capacity = 12});
  for (const uint8_t poison : {uint8_t{0x00}, uint8_t{0x7B}}) {
    EXPECT_TRUE(
        EqualBits(first, run(call, {.capacity = 12, .poison = poison})));
  }
}

template <typename Variant>
void ExpectTheOrderOfThreadsDoesNotShow(const Variant& v, const MxRunner& run) {
  const MxCall call(GeometryOf(v), 7, 12);
  EXPECT_TRUE(
      EqualBits(run(call, {.capacity = 7}),
                run(call, {.capacity = 7, .order = gpu::Order::kBackward})));
}

// A NaN in x or in a router weight shows in the rows that use it, and in no
// other: tokens 2 and 4 have routes, token 3 has none.
template <typename Variant>
void ExpectNanStaysInTheRowsThatUseIt(const Variant& v, const MxRunner& run) {
  MxCall call(GeometryOf(v), 6, 7);
  const uint32_t k = v.top_k;
  for (uint32_t j = 0; j < k; ++j) {
    call.SetId(call.problem.geometry, 2 * k + j, j % v.experts);
    call.SetId(call.problem.geometry, 3 * k + j, -1);
    call.SetId(call.problem.geometry, 4 * k + j, j == 0 ? 1 : -1);
  }
  const std::vector<float> before = run(call, {.capacity = 6});
  const uint16_t nan = v.x_bf16 ? 0x7FC0 : 0x7E00;
  const float weight = NAN;
  std::string& x = call.at(MxParam::kX);
  std::string& weights = call.at(MxParam::kTopkWeights);
  std::memcpy(x.data() + 2 * (2 * v.hidden + 100), &nan, 2);
  std::memcpy(x.data() + 2 * (3 * v.hidden + 1), &nan, 2);
  // Of routes that are not active.
  std::memcpy(weights.data() + 4 * (3 * k), &weight, 4);
  std::memcpy(weights.data() + 4 * (4 * k + 1), &weight, 4);
  const std::vector<float> after = run(call, {.capacity = 6});
  ExpectNanInItsRowAlone(before, after, v.hidden, 2);
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_MX_PLAN_CHECKS_H_
