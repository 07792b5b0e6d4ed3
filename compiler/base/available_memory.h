// How much memory is left, and what to say when it is too little.

#ifndef KILN_COMPILER_BASE_AVAILABLE_MEMORY_H_
#define KILN_COMPILER_BASE_AVAILABLE_MEMORY_H_

#include <cstdint>
#include <exception>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kiln {

// Bytes that can be had without swapping: the system's estimate, and what the
// control group leaves.
uint64_t AvailableMemoryBytes();

// ResourceExhausted when `bytes` for `what` are more than can be had, with both
// numbers. More than there is must not be asked for: the system may give it,
// and end the process when it is touched.
absl::Status CheckMemoryFor(absl::string_view what, uint64_t bytes);

// ResourceExhausted for an exception of the standard library: Kiln throws
// nothing itself; memory or threads may run out.
absl::Status ExhaustedStatus(const std::exception& error);

}  // namespace kiln

#endif  // KILN_COMPILER_BASE_AVAILABLE_MEMORY_H_
