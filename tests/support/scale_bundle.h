// A section of small programs that really run on compute capability 9.0, from
// tests/data/runtime/scale_sm_90a.cubin.

#ifndef KILN_TESTS_SUPPORT_SCALE_BUNDLE_H_
#define KILN_TESTS_SUPPORT_SCALE_BUNDLE_H_

#include <cstdint>

#include "compiler/bundle_writer.h"

namespace kiln::testing {

inline constexpr uint32_t kScaleWidth = 96;
inline constexpr uint32_t kScaleCapacity = 64;

// Entries "scale1000", "scale1001", ..., one for each of `copies` programs:
//   out[t][i] = 2 * x[t][i] + 5 + 1, i < kScaleWidth
// for 1..kScaleCapacity tokens, in two steps. All programs hold the same
// binary, or (`distinct`, at most 65536) one whose last constant differs by
// some units in its last place.
BundleSection ScaleSection(int copies, bool distinct = false);

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_SCALE_BUNDLE_H_
