// The random signs of a coupled layer. A file stores one draw for each expert;
// the signs follow from it.
//
// Source: trellis format specification, section 2.3.

#ifndef KILN_TEMPLATES_FORMATS_COUPLED_SIGNS_H_
#define KILN_TEMPLATES_FORMATS_COUPLED_SIGNS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kiln {

// Draws are 0..7; draw 0 is all +1.
inline constexpr uint8_t kSignDrawMax = 7;

// Signs before the activation (two for each intermediate channel) and behind it
// (one for each).
enum class SignAxis : uint64_t { kPre = 1, kPost = 2 };

// The first `count` signs of an axis, each +1 or -1. `count` is the length of
// the whole axis: a rank takes a slice of it and never draws for itself.
//   draw: 0..7.
std::vector<int8_t> CoupledSigns(uint8_t draw, SignAxis axis, size_t count);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_COUPLED_SIGNS_H_
