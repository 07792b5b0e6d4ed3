#include "cache/sqlite_vfs.h"

#include <sqlite3.h>

#include <cstring>

#include "absl/strings/match.h"
#include "compiler/base/check.h"

namespace kiln {
namespace {

// The change counter and what else of the header SQLite reads, in one call of
// just this form, when a transaction begins.
constexpr int kVersionBytes = 16;
constexpr sqlite3_int64 kVersionOffset = 24;
constexpr sqlite3_int64 kUnknown = -1;

// Lies behind SQLite's own object of an open database.
struct KnownSize {
  char version[kVersionBytes] = {};  // as last read
  bool current = false;              // read under the lock that is held
  sqlite3_int64 size = kUnknown;     // of the file at that version
};

// Written once, by SqliteVfsName and the first Open.
sqlite3_vfs* system_vfs = nullptr;
const sqlite3_io_methods* system_methods = nullptr;
sqlite3_io_methods methods;

KnownSize* KnownOf(sqlite3_file* file) {
  return reinterpret_cast<KnownSize*>(reinterpret_cast<char*>(file) +
                                      system_vfs->szOsFile);
}

int Read(sqlite3_file* file, void* bytes, int count, sqlite3_int64 offset) {
  const int code = system_methods->xRead(file, bytes, count, offset);
  if (count != kVersionBytes || offset != kVersionOffset) return code;
  KnownSize* known = KnownOf(file);
  known->current = code == SQLITE_OK;
  if (!known->current ||
      std::memcmp(known->version, bytes, kVersionBytes) != 0) {
    known->size = kUnknown;
  }
  if (known->current) std::memcpy(known->version, bytes, kVersionBytes);
  return code;
}

int Write(sqlite3_file* file, const void* bytes, int count,
          sqlite3_int64 offset) {
  KnownOf(file)->size = kUnknown;
  return system_methods->xWrite(file, bytes, count, offset);
}

int Truncate(sqlite3_file* file, sqlite3_int64 size) {
  KnownOf(file)->size = kUnknown;
  return system_methods->xTruncate(file, size);
}

int Unlock(sqlite3_file* file, int level) {
  if (level == SQLITE_LOCK_NONE) KnownOf(file)->current = false;
  return system_methods->xUnlock(file, level);
}

int FileSize(sqlite3_file* file, sqlite3_int64* size) {
  KnownSize* known = KnownOf(file);
  if (known->current && known->size != kUnknown) {
    *size = known->size;
    return SQLITE_OK;
  }
  const int code = system_methods->xFileSize(file, size);
  if (known->current && code == SQLITE_OK) known->size = *size;
  return code;
}

bool TakeMethods(const sqlite3_io_methods* from) {
  system_methods = from;
  methods = *from;
  methods.xRead = Read;
  methods.xWrite = Write;
  methods.xTruncate = Truncate;
  methods.xUnlock = Unlock;
  methods.xFileSize = FileSize;
  return true;
}

int Open(sqlite3_vfs*, const char* name, sqlite3_file* file, int flags,
         int* flags_out) {
  const int code = system_vfs->xOpen(system_vfs, name, file, flags, flags_out);
  if (code != SQLITE_OK || (flags & SQLITE_OPEN_MAIN_DB) == 0) return code;
  static const bool taken = TakeMethods(file->pMethods);
  // SQLite may lock otherwise on another file system; then all is left as it
  // is.
  if (taken && file->pMethods == system_methods) {
    *KnownOf(file) = KnownSize();
    file->pMethods = &methods;
  }
  return code;
}

int Access(sqlite3_vfs*, const char* name, int flags, int* result) {
  if (flags == SQLITE_ACCESS_EXISTS && absl::EndsWith(name, "-wal")) {
    *result = 0;
    return SQLITE_OK;
  }
  return system_vfs->xAccess(system_vfs, name, flags, result);
}

bool Register(sqlite3_vfs* vfs) {
  // Its count of allocated bytes, which nobody asks for, takes a lock at each
  // of the dozens of allocations of a look-up. Refused, and that is no harm,
  // where SQLite is in use already.
  sqlite3_config(SQLITE_CONFIG_MEMSTATUS, 0);
  system_vfs = sqlite3_vfs_find(nullptr);
  *vfs = *system_vfs;
  vfs->zName = "kiln";
  vfs->pNext = nullptr;
  vfs->szOsFile += static_cast<int>(sizeof(KnownSize));
  vfs->xOpen = Open;
  vfs->xAccess = Access;
  return sqlite3_vfs_register(vfs, /*makeDflt=*/0) == SQLITE_OK;
}

}  // namespace

const char* SqliteVfsName() {
  static sqlite3_vfs vfs;
  static const bool registered = Register(&vfs);
  KILN_CHECK(registered);
  return vfs.zName;
}

}  // namespace kiln
