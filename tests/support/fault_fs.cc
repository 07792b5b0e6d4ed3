#include "tests/support/fault_fs.h"

#include <fcntl.h>
#include <signal.h>
#include <sqlite3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <map>
#include <mutex>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

// The C library's own functions, as ld --wrap names them.
extern "C" {
int __real_open(const char* path, int flags, ...);
int __real_open64(const char* path, int flags, ...);
int __real_close(int fd);
ssize_t __real_read(int fd, void* data, size_t size);
ssize_t __real_pread(int fd, void* data, size_t size, off_t offset);
ssize_t __real_pread64(int fd, void* data, size_t size, off_t offset);
ssize_t __real_write(int fd, const void* data, size_t size);
ssize_t __real_pwrite64(int fd, const void* data, size_t size, off_t offset);
int __real_ftruncate(int fd, off_t size);
int __real_ftruncate64(int fd, off_t size);
int __real_fsync(int fd);
int __real_fdatasync(int fd);
int __real_fcntl64(int fd, int command, ...);
int __real_rename(const char* from, const char* to);
int __real_unlink(const char* path);
int __real_mkdir(const char* path, mode_t mode);
int __real_sqlite3_step(sqlite3_stmt* statement);
int __real_sqlite3_exec(sqlite3* database, const char* sql,
                        int (*callback)(void*, int, char**, char**),
                        void* argument, char** error);
int __real_sqlite3_prepare_v3(sqlite3* database, const char* sql, int size,
                              unsigned flags, sqlite3_stmt** statement,
                              const char** tail);
int __real_sqlite3_backup_step(sqlite3_backup* backup, int pages);
}

namespace kiln::testing {
namespace {

struct Watched {
  std::string path;
  bool folder = false;
  uint64_t inode = 0;
};

struct State {
  std::mutex mutex;
  std::string root;  // ends with '/'; empty: nothing is watched
  Fault fault = Fault::kNone;
  int64_t nth = 0;
  int64_t calls = 0;
  bool recording = false;
  std::vector<DiskEvent> events;
  std::map<int, Watched> files;
};

State& TheState() {
  static State& state = *new State;
  return state;
}

[[noreturn]] void Die() {
  raise(SIGKILL);
  for (;;) {
  }
}

// `root` itself counts too.
bool IsWatched(const State& state, absl::string_view path) {
  return !state.root.empty() &&
         (absl::StartsWith(path, state.root) ||
          path ==
              absl::string_view(state.root).substr(0, state.root.size() - 1));
}

const Watched* Find(const State& state, int fd) {
  const auto found = state.files.find(fd);
  return found == state.files.end() ? nullptr : &found->second;
}

// Counts a call to the file system; the errno that it has to fail with, or 0.
// `grows` tells calls that a full disk stops.
int Fails(State* state, bool grows) {
  if (state->fault == Fault::kSqliteFail ||
      state->fault == Fault::kSqliteKill) {
    return 0;
  }
  const int64_t call = ++state->calls;
  switch (state->fault) {
    case Fault::kFailOnce:
      return call == state->nth ? EIO : 0;
    case Fault::kFailOn:
      return call >= state->nth ? EIO : 0;
    case Fault::kDiskFull:
      return grows && call >= state->nth ? ENOSPC : 0;
    case Fault::kKill:
      if (call == state->nth) Die();
      return 0;
    case Fault::kTear:
      // A write dies in its own function.
      if (call == state->nth && !grows) Die();
      return 0;
    default:
      return 0;
  }
}

// Calls of SQLite that this thread is inside of. SQLite calls some of its own
// functions in the same way and leaves out checks that it does not need then.
thread_local int sqlite_depth = 0;

// Whether a call to SQLite has to fail.
bool SqliteFails() {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (state.fault != Fault::kSqliteFail && state.fault != Fault::kSqliteKill) {
    return false;
  }
  if (++state.calls != state.nth) return false;
  if (state.fault == Fault::kSqliteKill) Die();
  return true;
}

// Calls `real` unless it has to fail.
template <typename F>
int CallSqlite(const F& real) {
  if (sqlite_depth == 0 && SqliteFails()) return SQLITE_NOMEM;
  ++sqlite_depth;
  const int code = real();
  --sqlite_depth;
  return code;
}

void Record(State* state, DiskEvent event) {
  if (state->recording) state->events.push_back(std::move(event));
}

int Failed(int error) {
  errno = error;
  return -1;
}

int Open(const char* path, int flags, mode_t mode) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (!IsWatched(state, path)) return __real_open64(path, flags, mode);
  const bool creates =
      (flags & O_CREAT) != 0 && access(path, F_OK) != 0 && errno == ENOENT;
  if (const int error = Fails(&state, creates); error != 0) {
    return Failed(error);
  }
  const int fd = __real_open64(path, flags, mode);
  if (state.fault == Fault::kTear && state.calls == state.nth) Die();
  if (fd < 0) return fd;
  struct stat info;
  if (fstat(fd, &info) != 0) return fd;
  Watched& file = state.files[fd];
  file = {.path = path,
          .folder = S_ISDIR(info.st_mode),
          .inode = static_cast<uint64_t>(info.st_ino)};
  if (creates) {
    Record(
        &state,
        {.kind = DiskEvent::Kind::kCreate, .inode = file.inode, .path = path});
  }
  if ((flags & O_TRUNC) != 0 && !creates) {
    Record(&state, {.kind = DiskEvent::Kind::kTruncate, .inode = file.inode});
  }
  return fd;
}

// `offset` is -1 for a write at the file's own position.
ssize_t Write(int fd, const void* data, size_t size, off_t offset) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const Watched* file = Find(state, fd);
  const auto write_now = [&](size_t bytes) {
    return offset < 0 ? __real_write(fd, data, bytes)
                      : __real_pwrite64(fd, data, bytes, offset);
  };
  if (file == nullptr) return write_now(size);
  if (const int error = Fails(&state, true); error != 0) return Failed(error);
  if (state.fault == Fault::kTear && state.calls == state.nth) {
    if (write_now(size / 2) >= 0) Die();
    Die();
  }
  const off_t at = offset >= 0 ? offset : lseek(fd, 0, SEEK_CUR);
  const ssize_t wrote = write_now(size);
  if (wrote > 0) {
    Record(&state, {.kind = DiskEvent::Kind::kWrite,
                    .inode = file->inode,
                    .offset = static_cast<uint64_t>(at),
                    .data = std::string(static_cast<const char*>(data),
                                        static_cast<size_t>(wrote))});
  }
  return wrote;
}

ssize_t Read(int fd, void* data, size_t size, off_t offset) {
  State& state = TheState();
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    if (Find(state, fd) != nullptr) {
      if (const int error = Fails(&state, false); error != 0) {
        return Failed(error);
      }
    }
  }
  return offset < 0 ? __real_read(fd, data, size)
                    : __real_pread64(fd, data, size, offset);
}

int Truncate(int fd, off_t size) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const Watched* file = Find(state, fd);
  if (file == nullptr) return __real_ftruncate64(fd, size);
  if (const int error = Fails(&state, false); error != 0) return Failed(error);
  const int result = __real_ftruncate64(fd, size);
  if (result == 0) {
    Record(&state, {.kind = DiskEvent::Kind::kTruncate,
                    .inode = file->inode,
                    .offset = static_cast<uint64_t>(size)});
  }
  return result;
}

int Sync(int fd, int (*real)(int)) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const Watched* file = Find(state, fd);
  if (file == nullptr) return real(fd);
  if (const int error = Fails(&state, false); error != 0) return Failed(error);
  // No disk is waited for: what a real sync adds cannot be seen without one.
  if (file->folder) {
    Record(&state, {.kind = DiskEvent::Kind::kSyncFolder, .path = file->path});
  } else {
    Record(&state, {.kind = DiskEvent::Kind::kSync, .inode = file->inode});
  }
  return 0;
}

}  // namespace

const char* FaultName(Fault fault) {
  switch (fault) {
    case Fault::kNone:
      return "None";
    case Fault::kFailOnce:
      return "FailOnce";
    case Fault::kFailOn:
      return "FailOn";
    case Fault::kDiskFull:
      return "DiskFull";
    case Fault::kKill:
      return "Kill";
    case Fault::kTear:
      return "Tear";
    case Fault::kSqliteFail:
      return "SqliteFail";
    case Fault::kSqliteKill:
      return "SqliteKill";
  }
  return "";
}

void InjectFault(const std::string& folder, Fault fault, int64_t nth) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.root = folder.empty() ? "" : folder + "/";
  state.fault = fault;
  state.nth = nth;
  state.calls = 0;
}

int64_t CallsCounted() {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  return state.calls;
}

void StartRecording(const std::string& folder) {
  InjectFault(folder, Fault::kNone, 0);
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.recording = true;
  state.events.clear();
}

void RecordMark(int mark) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  Record(&state, {.kind = DiskEvent::Kind::kMark,
                  .offset = static_cast<uint64_t>(mark)});
}

std::vector<DiskEvent> StopRecording() {
  InjectFault("", Fault::kNone, 0);
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.recording = false;
  return std::move(state.events);
}

// What ld --wrap calls instead of the C library and SQLite.
extern "C" {

int __wrap_open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const auto mode = static_cast<mode_t>(va_arg(arguments, unsigned));
  va_end(arguments);
  return Open(path, flags, mode);
}

int __wrap_open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const auto mode = static_cast<mode_t>(va_arg(arguments, unsigned));
  va_end(arguments);
  return Open(path, flags, mode);
}

int __wrap_close(int fd) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.files.erase(fd);
  return __real_close(fd);
}

ssize_t __wrap_read(int fd, void* data, size_t size) {
  return Read(fd, data, size, -1);
}

ssize_t __wrap_pread(int fd, void* data, size_t size, off_t offset) {
  return Read(fd, data, size, offset);
}

ssize_t __wrap_pread64(int fd, void* data, size_t size, off_t offset) {
  return Read(fd, data, size, offset);
}

ssize_t __wrap_write(int fd, const void* data, size_t size) {
  return Write(fd, data, size, -1);
}

ssize_t __wrap_pwrite64(int fd, const void* data, size_t size, off_t offset) {
  return Write(fd, data, size, offset);
}

int __wrap_ftruncate(int fd, off_t size) { return Truncate(fd, size); }

int __wrap_ftruncate64(int fd, off_t size) { return Truncate(fd, size); }

int __wrap_fsync(int fd) { return Sync(fd, __real_fsync); }

int __wrap_fdatasync(int fd) { return Sync(fd, __real_fdatasync); }

int __wrap_fcntl64(int fd, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  void* const argument = va_arg(arguments, void*);
  va_end(arguments);
  const bool locks =
      (command == F_SETLK || command == F_SETLKW) &&
      static_cast<const struct flock*>(argument)->l_type != F_UNLCK;
  if (locks) {
    State& state = TheState();
    const std::lock_guard<std::mutex> lock(state.mutex);
    if (Find(state, fd) != nullptr) {
      if (const int error = Fails(&state, false); error != 0) {
        return Failed(error);
      }
    }
  }
  return __real_fcntl64(fd, command, argument);
}

int __wrap_rename(const char* from, const char* to) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (!IsWatched(state, from)) return __real_rename(from, to);
  if (const int error = Fails(&state, false); error != 0) return Failed(error);
  const int result = __real_rename(from, to);
  if (result == 0) {
    Record(&state, {.kind = DiskEvent::Kind::kRename, .path = from, .to = to});
  }
  return result;
}

int __wrap_unlink(const char* path) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (!IsWatched(state, path)) return __real_unlink(path);
  if (const int error = Fails(&state, false); error != 0) return Failed(error);
  const int result = __real_unlink(path);
  if (result == 0) {
    Record(&state, {.kind = DiskEvent::Kind::kUnlink, .path = path});
  }
  return result;
}

int __wrap_mkdir(const char* path, mode_t mode) {
  State& state = TheState();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (!IsWatched(state, path)) return __real_mkdir(path, mode);
  if (const int error = Fails(&state, true); error != 0) return Failed(error);
  const int result = __real_mkdir(path, mode);
  if (state.fault == Fault::kTear && state.calls == state.nth) Die();
  if (result == 0) {
    Record(&state, {.kind = DiskEvent::Kind::kMakeFolder, .path = path});
  }
  return result;
}

int __wrap_sqlite3_step(sqlite3_stmt* statement) {
  return CallSqlite([&] { return __real_sqlite3_step(statement); });
}

int __wrap_sqlite3_exec(sqlite3* database, const char* sql,
                        int (*callback)(void*, int, char**, char**),
                        void* argument, char** error) {
  return CallSqlite([&] {
    return __real_sqlite3_exec(database, sql, callback, argument, error);
  });
}

int __wrap_sqlite3_prepare_v3(sqlite3* database, const char* sql, int size,
                              unsigned flags, sqlite3_stmt** statement,
                              const char** tail) {
  *statement = nullptr;
  return CallSqlite([&] {
    return __real_sqlite3_prepare_v3(database, sql, size, flags, statement,
                                     tail);
  });
}

int __wrap_sqlite3_backup_step(sqlite3_backup* backup, int pages) {
  return CallSqlite([&] { return __real_sqlite3_backup_step(backup, pages); });
}

}  // extern "C"

}  // namespace kiln::testing
