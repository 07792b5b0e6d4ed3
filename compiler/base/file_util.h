// Whole-file reading and atomic writing. Errors name the path and the system's
// own reason.

#ifndef KILN_COMPILER_BASE_FILE_UTIL_H_
#define KILN_COMPILER_BASE_FILE_UTIL_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kiln {

// Reads a regular file of at most `bytes_max` bytes.
//   Errors: NotFound, PermissionDenied, FailedPrecondition (not a regular
//   file), ResourceExhausted (larger than bytes_max), Unavailable (I/O).
absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     uint64_t bytes_max);

// Writes `contents` to `path` so that readers see the old file or the whole new
// one: temporary file beside it, fsync, rename, fsync of the folder. On error
// the old file stands and the temporary is removed; only when the last fsync
// fails is the new file in place although an error is returned.
//   Errors: FailedPrecondition (exists and is not a regular file), NotFound (no
//   such folder), PermissionDenied, ResourceExhausted (disk full), Unavailable.
absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view contents);

// Creates `path` and its parents with mode 0755. An existing folder is fine.
absl::Status MakeDirectories(const std::string& path);

// absl::Status for `errno_value` met while doing `action` to `path`, for
// example "cannot open /x: No such file or directory".
absl::Status ErrnoStatus(int errno_value, absl::string_view action,
                         absl::string_view path);

}  // namespace kiln

#endif  // KILN_COMPILER_BASE_FILE_UTIL_H_
