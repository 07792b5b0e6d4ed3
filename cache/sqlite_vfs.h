// SQLite's view of files, with two system calls fewer in every transaction than
// SQLite's own, and five more in a look-up of what is in memory. Internal.

#ifndef KILN_CACHE_SQLITE_VFS_H_
#define KILN_CACHE_SQLITE_VFS_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"

namespace kiln {

// The name to open databases with. It is the system's file system, locks
// included, except that
//   - there are no write-ahead logs. SQLite would look for one each time, and
//     read whatever lies there under that name; a cache has none, or its header
//     says so and it is refused (file_identity.h).
//   - the size of a database is asked for when the file has changed. SQLite
//     reads its change counter each time, and trusts the pages it has in memory
//     for as long as that is the same; here the size is one thing more.
const char* SqliteVfsName();

// The first `size` bytes of a database, fewer where it ends before. To close a
// file drops all locks that the process has on it, those of its transactions in
// other threads too; SQLite, which knows of them, closes this one when they are
// gone. So databases are not to be read by other means.
//   Errors: those of ErrnoStatus, with the path.
absl::StatusOr<std::string> ReadDatabaseHeader(const std::string& path,
                                               size_t size);

// While one lives, reading transactions of its thread take no lock where the
// database's change counter is the one of the last transaction that did. All
// pages that SQLite has in memory are then those of the last commit: SQLite
// moves the counter in each commit before the commit counts, and what an
// interrupted one left behind does not bear this counter, or has not been read.
// So a transaction that needs these pages alone sees that commit whole,
// whatever a writer does meanwhile. One that needs another page fails, and
// refused() is true: the caller then reads again without this object.
// Not to be nested, nor to begin an explicit transaction, which would outlive
// it; writing fails in such a transaction.
class LockFreeReads {
 public:
  LockFreeReads();
  ~LockFreeReads();
  LockFreeReads(const LockFreeReads&) = delete;
  LockFreeReads& operator=(const LockFreeReads&) = delete;

  bool refused() const { return refused_; }

  // For the file system: a transaction without a lock is open; it was refused.
  bool open() const { return open_; }

  void set_open(bool open) { open_ = open; }

  void Refuse() { refused_ = true; }

 private:
  bool open_ = false;
  bool refused_ = false;
};

// The result of `read`, a function of one reading transaction: without a lock
// where that suffices, else called once more and with one.
template <typename Read>
auto LookUp(const Read& read) {
  {
    LockFreeReads lock_free;
    auto result = read();
    if (!lock_free.refused()) return result;
  }
  return read();
}

}  // namespace kiln

#endif  // KILN_CACHE_SQLITE_VFS_H_
