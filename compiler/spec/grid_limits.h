// How many blocks a launch may have.

#ifndef KILN_COMPILER_SPEC_GRID_LIMITS_H_
#define KILN_COMPILER_SPEC_GRID_LIMITS_H_

#include <array>
#include <cstdint>

namespace kiln {

// Per dimension (CUDA C++ Programming Guide, table of compute capabilities);
// the bundle format has the same limits for every target.
inline constexpr std::array<uint64_t, 3> kGridMax = {0x7FFFFFFF, 65535, 65535};

}  // namespace kiln

#endif  // KILN_COMPILER_SPEC_GRID_LIMITS_H_
