#include "cache/file_system.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>

#include <array>
#include <cerrno>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

constexpr uint32_t kFuseMagic = 0x65735546;

// Source: linux/magic.h, and statfs(2) for those that live outside the kernel.
constexpr std::array<std::pair<uint32_t, absl::string_view>, 14> kNetwork = {{
    {0x00006969, "NFS"},
    {0x0000517B, "SMB"},
    {0xFF534D42, "CIFS"},
    {0xFE534D42, "SMB2"},
    {0x0000564C, "NCP"},
    {0x73757245, "Coda"},
    {0x5346414F, "AFS"},
    {0x6B414653, "AFS"},
    {0x00C36400, "Ceph"},
    {0x0BD00BD0, "Lustre"},
    {0x47504653, "GPFS"},
    {0x01021997, "9P"},
    {0x19830326, "BeeGFS"},
    {0xAAD7AAEA, "PanFS"},
}};

// FUSE file systems whose files only this host can open.
constexpr std::array<absl::string_view, 6> kLocalFuse = {
    "fuseblk",     "fuse.fuse-overlayfs", "fuse.mergerfs",
    "fuse.bindfs", "fuse.gocryptfs",      "fuse.encfs"};

constexpr uint64_t kMountInfoBytesMax = 16 << 20;

// Type of the mount that holds device `major:minor`, or empty. The last line
// wins: later mounts hide earlier ones.
// Source: proc(5), /proc/[pid]/mountinfo: field 3 is major:minor, the field
// after " - " is the type.
std::string MountType(absl::string_view mount_info, absl::string_view device) {
  std::string type;
  for (const absl::string_view line : absl::StrSplit(mount_info, '\n')) {
    const std::vector<absl::string_view> halves =
        absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    if (halves.size() != 2) continue;
    const std::vector<absl::string_view> left = absl::StrSplit(halves[0], ' ');
    const std::vector<absl::string_view> right = absl::StrSplit(halves[1], ' ');
    if (left.size() > 2 && left[2] == device) type = std::string(right[0]);
  }
  return type;
}

// proc(5) files report size 0, so they are read by lines until the end.
std::string ReadMountInfo() {
  std::string text;
  FILE* file = std::fopen("/proc/self/mountinfo", "re");
  if (file == nullptr) return text;
  std::array<char, 4096> buffer;
  size_t got = 0;
  while (text.size() < kMountInfoBytesMax &&
         (got = std::fread(buffer.data(), 1, buffer.size(), file)) > 0) {
    text.append(buffer.data(), got);
  }
  std::fclose(file);
  return text;
}

}  // namespace

absl::StatusOr<FileSystemInfo> ProbeFileSystem(const std::string& path) {
  struct statfs info;
  if (statfs(path.c_str(), &info) != 0) {
    return ErrnoStatus(errno, "cannot find the file system of", path);
  }
  FileSystemInfo result;
  result.magic = static_cast<uint32_t>(info.f_type);
  if (result.magic == kFuseMagic) {
    struct stat file;
    if (stat(path.c_str(), &file) != 0) {
      return ErrnoStatus(errno, "cannot stat", path);
    }
    result.type =
        MountType(ReadMountInfo(),
                  absl::StrCat(major(file.st_dev), ":", minor(file.st_dev)));
  }
  return result;
}

std::string NetworkFileSystemName(const FileSystemInfo& info) {
  for (const auto& [magic, name] : kNetwork) {
    if (info.magic == magic) return std::string(name);
  }
  if (info.magic == kFuseMagic &&
      !absl::c_linear_search(kLocalFuse, info.type)) {
    return info.type.empty() ? "FUSE" : absl::StrCat("FUSE (", info.type, ")");
  }
  return "";
}

}  // namespace kiln
