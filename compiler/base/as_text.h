// The bytes of numbers in memory, as the text that files and digests take.

#ifndef KILN_COMPILER_BASE_AS_TEXT_H_
#define KILN_COMPILER_BASE_AS_TEXT_H_

#include <ranges>

#include "absl/strings/string_view.h"

namespace kiln {

// Of a span, vector or array; valid as long as its elements are.
template <std::ranges::contiguous_range Range>
absl::string_view AsText(const Range& values) {
  return {reinterpret_cast<const char*>(std::ranges::data(values)),
          std::ranges::size(values) * sizeof(*std::ranges::data(values))};
}

}  // namespace kiln

#endif  // KILN_COMPILER_BASE_AS_TEXT_H_
