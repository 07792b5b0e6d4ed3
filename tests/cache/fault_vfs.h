// Makes the n-th call of SQLite to the file system fail, or kills the process
// there. Sits between SQLite and its own "unix" layer, so that the cache under
// test is the one that ships.

#ifndef KILN_TESTS_CACHE_FAULT_VFS_H_
#define KILN_TESTS_CACHE_FAULT_VFS_H_

#include <cstdint>

namespace kiln::testing {

enum class Fault {
  kNone,
  kFailOnce,  // the n-th call reports an error and does nothing
  kFailOn,    // so do all after it
  kDiskFull,  // from the n-th call on, whatever grows or writes a file fails
  kKill,      // SIGKILL instead of the n-th call
  kTear,      // SIGKILL in the middle of it, where it is a write
};

// Calls are counted from 1: open, delete, read, write, truncate, sync, lock.
// The first use makes the layer SQLite's default, for this process and its
// later children.
void InjectFault(Fault fault, int64_t nth);

// Calls since InjectFault.
int64_t FileCalls();

}  // namespace kiln::testing

#endif  // KILN_TESTS_CACHE_FAULT_VFS_H_
