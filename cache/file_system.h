// What the cache must know about files before it trusts them: the kind of file
// system below a folder, and a file's stamp for the memo table.

#ifndef KILN_CACHE_FILE_SYSTEM_H_
#define KILN_CACHE_FILE_SYSTEM_H_

#include <compare>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kiln {

struct FileSystemInfo {
  // f_type of statfs(2), see linux/magic.h.
  uint32_t magic = 0;
  // Type as in /proc/self/mountinfo, for example "fuse.sshfs". Only filled in
  // for FUSE, where the magic number does not tell.
  std::string type = {};
};

// Finds out what `path` lies on. Injectable, because a test has no NFS server.
using FileSystemProbe =
    std::function<absl::StatusOr<FileSystemInfo>(const std::string& path)>;

// statfs(2), and mountinfo for FUSE.
absl::StatusOr<FileSystemInfo> ProbeFileSystem(const std::string& path);

// Name of the network file system, or empty for a local one. Locks of different
// hosts may not see each other there, and then two writers destroy the file.
// FUSE counts as a network file system unless it is a known local one.
std::string NetworkFileSystemName(const FileSystemInfo& info);

// Identity of a file's contents as far as stat(2) can tell.
struct FileStamp {
  std::string path = {};
  int64_t size = 0;
  int64_t mtime_ns = 0;
  int64_t ctime_ns = 0;  // moves when a file is replaced with its old mtime
  int64_t device = 0;
  int64_t inode = 0;

  auto operator<=>(const FileStamp&) const = default;
};

// Errors: NotFound, PermissionDenied, FailedPrecondition (no regular file).
absl::StatusOr<FileStamp> StampFile(const std::string& path);

}  // namespace kiln

#endif  // KILN_CACHE_FILE_SYSTEM_H_
