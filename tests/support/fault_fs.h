// Stands between the program under test and the C library: makes the n-th call
// to the file system or to SQLite fail, kills the process there, or records
// what was written and synced, so that a power cut can be replayed.
//
// Linking kiln::fault_fs redirects the calls (ld --wrap) of everything that is
// linked statically, SQLite included, so what is tested is what ships. Calls on
// other folders pass.

#ifndef KILN_TESTS_SUPPORT_FAULT_FS_H_
#define KILN_TESTS_SUPPORT_FAULT_FS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace kiln::testing {

enum class Fault {
  kNone,
  kFailOnce,    // the n-th call reports an I/O error and does nothing
  kFailOn,      // so do all after it
  kDiskFull,    // from the n-th call on, whatever creates or writes fails
  kKill,        // SIGKILL instead of the n-th call
  kTear,        // SIGKILL in the middle of it, where it is a write
  kSqliteFail,  // the n-th call of SQLite reports want of memory
  kSqliteKill,  // SIGKILL instead of the n-th call of SQLite
};

inline constexpr Fault kFaults[] = {
    Fault::kFailOnce, Fault::kFailOn,     Fault::kDiskFull,  Fault::kKill,
    Fault::kTear,     Fault::kSqliteFail, Fault::kSqliteKill};

// "FailOnce".
const char* FaultName(Fault fault);

// Counts calls from now on, starting with 1. File system: open, create, read,
// write, truncate, sync, rename, unlink, mkdir and lock, of files under
// `folder`. SQLite: prepare, step, exec, backup. Thread-safe.
void InjectFault(const std::string& folder, Fault fault, int64_t nth);

// Calls since InjectFault that its fault counts.
int64_t CallsCounted();

// One change to the file system, or a mark of the test.
struct DiskEvent {
  enum class Kind {
    kCreate,      // of `path`, as file `inode`
    kMakeFolder,  // of `path`
    kWrite,       // `data` at `offset` of `inode`
    kTruncate,    // of `inode` to `offset` bytes
    kSync,        // of `inode`
    kSyncFolder,  // of `path`
    kRename,      // of `path` to `to`
    kUnlink,      // of `path`
    kMark,        // `offset` is the mark
  };

  Kind kind = Kind::kMark;
  uint64_t inode = 0;
  uint64_t offset = 0;
  std::string path = {};
  std::string to = {};
  std::string data = {};
};

// Records what happens under `folder` from now on.
void StartRecording(const std::string& folder);
void RecordMark(int mark);
std::vector<DiskEvent> StopRecording();

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_FAULT_FS_H_
