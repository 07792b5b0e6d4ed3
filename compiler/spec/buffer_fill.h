// BufferFill: how large the buffer behind a parameter slot is, and which values
// golden replay puts into it. Whoever fills it needs to know nothing of the op.

#ifndef KILN_COMPILER_SPEC_BUFFER_FILL_H_
#define KILN_COMPILER_SPEC_BUFFER_FILL_H_

#include <compare>
#include <cstdint>

namespace kiln {

struct BufferFill {
  enum class Kind : uint32_t {
    kNone = 0,     // an output: nothing is put into it
    kWords = 1,    // (random & a) | b
    kIndices = 2,  // random mod a; b is 0
  };

  Kind kind = Kind::kNone;
  uint32_t element_bytes = 1;  // 1, 2, 4 or 8
  // The buffer for m tokens has bytes + bytes_per_token * m bytes; both are
  // multiples of element_bytes.
  uint64_t bytes = 0;
  uint64_t bytes_per_token = 0;
  uint64_t a = 0;  // both fit an element
  uint64_t b = 0;

  auto operator<=>(const BufferFill&) const = default;
};

}  // namespace kiln

#endif  // KILN_COMPILER_SPEC_BUFFER_FILL_H_
