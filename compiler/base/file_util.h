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
//   Errors: NotFound, PermissionDenied, InvalidArgument (not a regular file, or
//   larger than bytes_max), Unavailable (I/O).
absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     uint64_t bytes_max);

// The first 8 KiB of a file that the system makes up, as in /proc and /sys;
// empty when it cannot be read. A process may end while its file is read.
std::string ReadSystemFile(const std::string& path);

// A file that appears whole under its name, or not at all: written to a
// temporary file beside it, which Commit syncs and renames; the folder is
// synced too. Without Commit, and when it fails, the old file stands and the
// temporary is removed; only when the sync of the folder fails is the new file
// in place although an error is returned.
//
// A file that is replaced keeps its permissions, a new one has those that the
// umask leaves. A symbolic link stays, and what it points to is replaced.
//   Errors of all calls: InvalidArgument (what exists is no regular file, or a
//   link to nowhere), NotFound (no such folder), PermissionDenied,
//   ResourceExhausted (disk full), Unavailable. Sticky: Commit reports the
//   first.
class PendingFile {
 public:
  explicit PendingFile(const std::string& path);
  PendingFile(const PendingFile&) = delete;
  PendingFile& operator=(const PendingFile&) = delete;
  ~PendingFile();

  absl::Status Append(absl::string_view bytes);
  // Once, as the last call.
  absl::Status Commit();

 private:
  absl::Status Open(const std::string& path);

  std::string path_;  // of the file itself, links resolved
  std::string temporary_;
  int fd_ = -1;
  absl::Status status_;
};

// Writes a PendingFile in one piece.
absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view contents);

// Creates `path` and its parents with the permissions that the umask leaves,
// each synced into its parent. A folder may exist, no file may.
absl::Status MakeDirectories(const std::string& path);

// absl::Status for `errno_value` met while doing `action` to `path`, for
// example "cannot open /x: No such file or directory".
absl::Status ErrnoStatus(int errno_value, absl::string_view action,
                         absl::string_view path);

}  // namespace kiln

#endif  // KILN_COMPILER_BASE_FILE_UTIL_H_
