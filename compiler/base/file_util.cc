#include "compiler/base/file_util.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "compiler/base/unfinished_files.h"

namespace kiln {
namespace {

// Closes a file descriptor that was only read.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}

  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }

  int get() const { return fd_; }

 private:
  const int fd_;
};

std::string ParentOf(const std::string& path) {
  // Not at the end: "a/b/" lies in "a".
  const size_t slash = path.rfind('/', path.size() > 1 && path.back() == '/'
                                           ? path.size() - 2
                                           : std::string::npos);
  if (slash == std::string::npos) return ".";
  if (slash == 0) return "/";
  return path.substr(0, slash);
}

// Reads until `contents` is full or the file ends, which cuts it: a file may
// shrink while it is read. False, with errno, after an error.
bool Fill(int fd, std::string* contents) {
  size_t have = 0;
  while (have < contents->size()) {
    const ssize_t got =
        read(fd, contents->data() + have, contents->size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return false;
    if (got == 0) break;
    have += static_cast<size_t>(got);
  }
  contents->resize(have);
  return true;
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

absl::Status SyncFolder(const std::string& path) {
  const FileDescriptor folder(
      open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // EINVAL: this file system has no folder sync.
  if (folder.get() < 0 || (fsync(folder.get()) != 0 && errno != EINVAL)) {
    return ErrnoStatus(errno, "cannot sync the folder", path);
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
    case ELOOP:
    case ENAMETOOLONG:
      return absl::InvalidArgumentError(message);
    case EEXIST:
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
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is not a regular file"));
  }
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size > bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, " has ", size, " bytes, at most ", bytes_max, " are accepted"));
  }
  std::string contents(size, '\0');
  if (!Fill(fd.get(), &contents)) {
    return ErrnoStatus(errno, "cannot read", path);
  }
  return contents;
}

std::string ReadSystemFile(const std::string& path) {
  const FileDescriptor fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) return "";
  std::string contents(8192, '\0');
  if (!Fill(fd.get(), &contents)) return "";
  return contents;
}

PendingFile::PendingFile(const std::string& path) : status_(Open(path)) {}

absl::Status PendingFile::Open(const std::string& path) {
  path_ = path;
  struct stat link;
  if (lstat(path.c_str(), &link) == 0 && S_ISLNK(link.st_mode)) {
    char* const real = realpath(path.c_str(), nullptr);
    if (real == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, " is a symbolic link that cannot be followed: ",
                       std::strerror(errno)));
    }
    path_ = real;
    std::free(real);
  }
  // A rename would replace a device or a pipe by a file.
  struct stat old;
  const bool replaces = stat(path_.c_str(), &old) == 0;
  if (replaces && !S_ISREG(old.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " exists and is not a regular file"));
  }
  // Not mkostemp, which leaves the umask and default permissions out.
  constexpr int kAttempts = 100;
  static std::atomic<uint32_t> count{0};
  UnfinishedFiles& unfinished = TheUnfinishedFiles();
  const std::lock_guard<std::mutex> lock(unfinished.mutex);
  for (int attempt = 0; fd_ < 0 && attempt < kAttempts; ++attempt) {
    temporary_ = absl::StrCat(path_, ".tmp.", getpid(), ".", ++count);
    fd_ =
        open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ < 0 && errno != EEXIST) break;
  }
  if (fd_ < 0) return ErrnoStatus(errno, "cannot create", temporary_);
  unfinished.files.insert(temporary_);
  if (replaces && fchmod(fd_, old.st_mode & 07777) != 0) {
    return ErrnoStatus(errno, "cannot set the mode of", temporary_);
  }
  return absl::OkStatus();
}

PendingFile::~PendingFile() {
  if (fd_ < 0) return;
  close(fd_);
  UnfinishedFiles& unfinished = TheUnfinishedFiles();
  const std::lock_guard<std::mutex> lock(unfinished.mutex);
  unlink(temporary_.c_str());
  unfinished.files.erase(temporary_);
}

absl::Status PendingFile::Append(absl::string_view bytes) {
  if (status_.ok()) status_ = WriteAll(fd_, bytes, temporary_);
  return status_;
}

absl::Status PendingFile::Commit() {
  RETURN_IF_ERROR(status_);
  if (fsync(fd_) != 0) return ErrnoStatus(errno, "cannot sync", temporary_);
  {
    UnfinishedFiles& unfinished = TheUnfinishedFiles();
    const std::lock_guard<std::mutex> lock(unfinished.mutex);
    if (rename(temporary_.c_str(), path_.c_str()) != 0) {
      return ErrnoStatus(errno, "cannot replace", path_);
    }
    unfinished.files.erase(temporary_);
  }
  // The temporary is gone; nothing was written since the sync.
  close(fd_);
  fd_ = -1;
  return SyncFolder(ParentOf(path_));
}

absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view contents) {
  PendingFile file(path);
  RETURN_IF_ERROR(file.Append(contents));
  return file.Commit();
}

absl::Status MakeDirectories(const std::string& path) {
  for (size_t end = 1; end <= path.size(); ++end) {
    if (end != path.size() && path[end] != '/') continue;
    const std::string part = path.substr(0, end);
    if (mkdir(part.c_str(), 0777) != 0) {
      if (errno == EEXIST) continue;
      return ErrnoStatus(errno, "cannot create the folder", part);
    }
    // Or a power cut could take the folder with all that is synced inside.
    RETURN_IF_ERROR(SyncFolder(ParentOf(part)));
  }
  struct stat info;
  if (stat(path.c_str(), &info) != 0) {
    return ErrnoStatus(errno, "cannot stat", path);
  }
  if (!S_ISDIR(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " exists and is not a folder"));
  }
  return absl::OkStatus();
}

}  // namespace kiln
