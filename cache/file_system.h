// What the cache must know before it writes: the kind of file system below a
// folder.

#ifndef KILN_CACHE_FILE_SYSTEM_H_
#define KILN_CACHE_FILE_SYSTEM_H_

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

}  // namespace kiln

#endif  // KILN_CACHE_FILE_SYSTEM_H_
