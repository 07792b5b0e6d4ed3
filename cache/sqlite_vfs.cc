#include "cache/sqlite_vfs.h"

#include <sqlite3.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"

namespace kiln {
namespace {

// The change counter and what else of the header SQLite reads, in one call of
// just this form, when a transaction begins.
constexpr int kVersionBytes = 16;
constexpr sqlite3_int64 kVersionOffset = 24;
constexpr sqlite3_int64 kUnknown = -1;

// Lies behind SQLite's own object of an open database.
struct KnownState {
  char version[kVersionBytes] = {};  // as last read
  bool current = false;              // read in the transaction that is open
  sqlite3_int64 size = kUnknown;     // of the file at that version
  bool lock_free = false;            // the transaction that is open has no lock
};

// Of this thread.
thread_local LockFreeReads* lock_free_reads = nullptr;

// Written once, by SqliteVfsName and the first Open.
sqlite3_vfs* system_vfs = nullptr;
const sqlite3_io_methods* system_methods = nullptr;
sqlite3_io_methods methods;

KnownState* KnownOf(sqlite3_file* file) {
  return reinterpret_cast<KnownState*>(reinterpret_cast<char*>(file) +
                                       system_vfs->szOsFile);
}

int Refused() {
  if (lock_free_reads != nullptr) lock_free_reads->Refuse();
  // Not SQLITE_BUSY: there is nothing to wait for.
  return SQLITE_LOCKED;
}

// Whether the file has the version of the last transaction under a lock.
bool IsUnchanged(sqlite3_file* file) {
  const KnownState* known = KnownOf(file);
  if (known->size == kUnknown) return false;
  char version[kVersionBytes];
  return system_methods->xRead(file, version, kVersionBytes, kVersionOffset) ==
             SQLITE_OK &&
         std::memcmp(version, known->version, kVersionBytes) == 0;
}

int Lock(sqlite3_file* file, int level) {
  KnownState* known = KnownOf(file);
  if (known->lock_free) {
    return level == SQLITE_LOCK_SHARED ? SQLITE_OK : Refused();
  }
  if (level != SQLITE_LOCK_SHARED || lock_free_reads == nullptr ||
      !IsUnchanged(file)) {
    return system_methods->xLock(file, level);
  }
  known->lock_free = true;
  known->current = true;
  lock_free_reads->set_open(true);
  return SQLITE_OK;
}

int Unlock(sqlite3_file* file, int level) {
  KnownState* known = KnownOf(file);
  if (level == SQLITE_LOCK_NONE) known->current = false;
  if (!known->lock_free) return system_methods->xUnlock(file, level);
  if (level == SQLITE_LOCK_NONE) {
    known->lock_free = false;
    if (lock_free_reads != nullptr) lock_free_reads->set_open(false);
  }
  return SQLITE_OK;
}

// Asked about a journal that is there: one that somebody still writes is none
// to be rolled back.
int CheckReservedLock(sqlite3_file* file, int* reserved) {
  if (!KnownOf(file)->lock_free) {
    return system_methods->xCheckReservedLock(file, reserved);
  }
  *reserved = 1;
  return SQLITE_OK;
}

int Read(sqlite3_file* file, void* bytes, int count, sqlite3_int64 offset) {
  KnownState* known = KnownOf(file);
  const bool is_version = count == kVersionBytes && offset == kVersionOffset;
  if (known->lock_free) {
    if (!is_version) return Refused();
    std::memcpy(bytes, known->version, kVersionBytes);
    return SQLITE_OK;
  }
  const int code = system_methods->xRead(file, bytes, count, offset);
  if (!is_version) return code;
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

int FileSize(sqlite3_file* file, sqlite3_int64* size) {
  KnownState* known = KnownOf(file);
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
  methods.xLock = Lock;
  methods.xUnlock = Unlock;
  methods.xCheckReservedLock = CheckReservedLock;
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
    *KnownOf(file) = KnownState();
    file->pMethods = &methods;
  }
  return code;
}

int Access(sqlite3_vfs*, const char* name, int flags, int* result) {
  // Without a lock nothing is rolled back, so no journal is looked for either.
  if (flags == SQLITE_ACCESS_EXISTS &&
      (absl::EndsWith(name, "-wal") ||
       (absl::EndsWith(name, "-journal") && lock_free_reads != nullptr &&
        lock_free_reads->open()))) {
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
  vfs->szOsFile += static_cast<int>(sizeof(KnownState));
  vfs->xOpen = Open;
  vfs->xAccess = Access;
  return sqlite3_vfs_register(vfs, /*makeDflt=*/0) == SQLITE_OK;
}

}  // namespace

LockFreeReads::LockFreeReads() {
  KILN_CHECK(lock_free_reads == nullptr);
  lock_free_reads = this;
}

LockFreeReads::~LockFreeReads() { lock_free_reads = nullptr; }

const char* SqliteVfsName() {
  static sqlite3_vfs vfs;
  static const bool registered = Register(&vfs);
  KILN_CHECK(registered);
  return vfs.zName;
}

absl::StatusOr<std::string> ReadDatabaseHeader(const std::string& path,
                                               size_t size) {
  SqliteVfsName();  // sets system_vfs
  const auto memory =
      std::make_unique<char[]>(static_cast<size_t>(system_vfs->szOsFile));
  auto* file = reinterpret_cast<sqlite3_file*>(memory.get());
  const auto failed = [&](absl::string_view action) {
    return ErrnoStatus(system_vfs->xGetLastError(system_vfs, 0, nullptr),
                       action, path);
  };
  if (system_vfs->xOpen(system_vfs, path.c_str(), file,
                        SQLITE_OPEN_READONLY | SQLITE_OPEN_MAIN_DB,
                        nullptr) != SQLITE_OK) {
    return failed("cannot open");
  }
  std::string bytes(size, '\0');
  sqlite3_int64 file_bytes = 0;
  int code = file->pMethods->xFileSize(file, &file_bytes);
  if (code == SQLITE_OK) {
    bytes.resize(std::min(size, static_cast<size_t>(file_bytes)));
    code = file->pMethods->xRead(file, bytes.data(),
                                 static_cast<int>(bytes.size()), 0);
  }
  absl::StatusOr<std::string> result = std::move(bytes);
  // Cut short since: the rest is zeros.
  if (code != SQLITE_OK && code != SQLITE_IOERR_SHORT_READ) {
    result = failed("cannot read");
  }
  file->pMethods->xClose(file);
  return result;
}

}  // namespace kiln
