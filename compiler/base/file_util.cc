#include "compiler/base/file_util.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

// Owns a file descriptor; Close reports the error that the destructor drops.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}

  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }

  int get() const { return fd_; }

  int Close() {
    const int result = close(fd_);
    fd_ = -1;
    return result;
  }

 private:
  int fd_;
};

std::string ParentOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  if (slash == 0) return "/";
  return path.substr(0, slash);
}

absl::Status WriteAll(int fd, absl::string_view contents,
                      const std::string& path) {
  while (!contents.empty()) {
    const ssize_t wrote = write(fd, contents.data(), contents.size());
    if (wrote < 0) {
      if (errno == EINTR) continue;
      return ErrnoStatus(errno, "cannot write", path);
    }
    contents.remove_prefix(static_cast<size_t>(wrote));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ErrnoStatus(int errno_value, absl::string_view action,
                         absl::string_view path) {
  const std::string message =
      absl::StrCat(action, " ", path, ": ", std::strerror(errno_value));
  switch (errno_value) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(message);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(message);
    case ENOSPC:
    case EDQUOT:
      return absl::ResourceExhaustedError(message);
    case EISDIR:
    case EEXIST:
    case ELOOP:
      return absl::FailedPreconditionError(message);
    default:
      return absl::UnavailableError(message);
  }
}

absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     uint64_t bytes_max) {
  // Opening a pipe must not wait for its writer; it is refused below.
  FileDescriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (fd.get() < 0) return ErrnoStatus(errno, "cannot open", path);
  struct stat info;
  if (fstat(fd.get(), &info) != 0) {
    return ErrnoStatus(errno, "cannot stat", path);
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is not a regular file"));
  }
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size > bytes_max) {
    return absl::ResourceExhaustedError(absl::StrCat(
        path, " has ", size, " bytes, at most ", bytes_max, " are accepted"));
  }
  std::string contents(size, '\0');
  size_t have = 0;
  while (have < contents.size()) {
    const ssize_t got =
        read(fd.get(), contents.data() + have, contents.size() - have);
    if (got < 0) {
      if (errno == EINTR) continue;
      return ErrnoStatus(errno, "cannot read", path);
    }
    if (got == 0) break;  // shrank while it was read
    have += static_cast<size_t>(got);
  }
  contents.resize(have);
  return contents;
}

absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view contents) {
  // A rename would replace a device or a pipe by a file.
  struct stat old;
  if (stat(path.c_str(), &old) == 0 && !S_ISREG(old.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " exists and is not a regular file"));
  }
  const std::string parent = ParentOf(path);
  std::string temporary = absl::StrCat(path, ".tmp.XXXXXX");
  FileDescriptor fd(mkostemp(temporary.data(), O_CLOEXEC));
  if (fd.get() < 0) return ErrnoStatus(errno, "cannot create", temporary);
  const auto finish = [&]() -> absl::Status {
    RETURN_IF_ERROR(WriteAll(fd.get(), contents, temporary));
    if (fchmod(fd.get(), 0644) != 0) {
      return ErrnoStatus(errno, "cannot set the mode of", temporary);
    }
    if (fsync(fd.get()) != 0) {
      return ErrnoStatus(errno, "cannot sync", temporary);
    }
    if (fd.Close() != 0) return ErrnoStatus(errno, "cannot close", temporary);
    if (rename(temporary.c_str(), path.c_str()) != 0) {
      return ErrnoStatus(errno, "cannot replace", path);
    }
    return absl::OkStatus();
  };
  if (absl::Status status = finish(); !status.ok()) {
    unlink(temporary.c_str());
    return status;
  }
  FileDescriptor folder(
      open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // EINVAL: this file system has no folder sync.
  if (folder.get() < 0 || (fsync(folder.get()) != 0 && errno != EINVAL)) {
    return ErrnoStatus(errno, "cannot sync the folder", parent);
  }
  return absl::OkStatus();
}

absl::Status MakeDirectories(const std::string& path) {
  for (size_t end = 1; end <= path.size(); ++end) {
    if (end != path.size() && path[end] != '/') continue;
    const std::string part = path.substr(0, end);
    if (mkdir(part.c_str(), 0755) == 0 || errno == EEXIST) continue;
    return ErrnoStatus(errno, "cannot create the folder", part);
  }
  struct stat info;
  if (stat(path.c_str(), &info) != 0) {
    return ErrnoStatus(errno, "cannot stat", path);
  }
  if (!S_ISDIR(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " exists and is not a folder"));
  }
  return absl::OkStatus();
}

}  // namespace kiln
