#include "tests/cache/fault_vfs.h"

#include <signal.h>
#include <sqlite3.h>

#include <cstring>
#include <new>

#include "compiler/base/check.h"

namespace kiln::testing {
namespace {

Fault fault = Fault::kNone;
int64_t nth = 0;
int64_t calls = 0;

// Layout that SQLite allocates: this, then the file of the layer below.
struct File {
  sqlite3_file base;
  sqlite3_file* real;
};

sqlite3_vfs* Below() { return sqlite3_vfs_find("unix"); }

sqlite3_file* RealOf(sqlite3_file* file) {
  return reinterpret_cast<File*>(file)->real;
}

[[noreturn]] void Die() {
  raise(SIGKILL);
  for (;;) {
  }
}

// Counts a call; true when it has to fail. `writes` tells calls that a full
// disk stops.
bool Fails(bool writes) {
  ++calls;
  switch (fault) {
    case Fault::kNone:
      return false;
    case Fault::kFailOnce:
      return calls == nth;
    case Fault::kFailOn:
      return calls >= nth;
    case Fault::kDiskFull:
      return writes && calls >= nth;
    case Fault::kKill:
      if (calls == nth) Die();
      return false;
    case Fault::kTear:
      // A write dies in its own function.
      if (calls == nth && !writes) Die();
      return false;
  }
  return false;
}

int Close(sqlite3_file* file) {
  sqlite3_file* real = RealOf(file);
  return real->pMethods->xClose(real);
}

int Read(sqlite3_file* file, void* out, int size, sqlite3_int64 offset) {
  if (Fails(false)) return SQLITE_IOERR_READ;
  sqlite3_file* real = RealOf(file);
  return real->pMethods->xRead(real, out, size, offset);
}

int Write(sqlite3_file* file, const void* data, int size,
          sqlite3_int64 offset) {
  const bool fails = Fails(true);
  if (fails)
    return fault == Fault::kDiskFull ? SQLITE_FULL : SQLITE_IOERR_WRITE;
  sqlite3_file* real = RealOf(file);
  if (fault == Fault::kTear && calls == nth) {
    real->pMethods->xWrite(real, data, size / 2, offset);
    Die();
  }
  return real->pMethods->xWrite(real, data, size, offset);
}

int Truncate(sqlite3_file* file, sqlite3_int64 size) {
  if (Fails(false)) return SQLITE_IOERR_TRUNCATE;
  sqlite3_file* real = RealOf(file);
  return real->pMethods->xTruncate(real, size);
}

int Sync(sqlite3_file* file, int flags) {
  if (Fails(false)) return SQLITE_IOERR_FSYNC;
  sqlite3_file* real = RealOf(file);
  return real->pMethods->xSync(real, flags);
}

int FileSize(sqlite3_file* file, sqlite3_int64* size) {
  sqlite3_file* real = RealOf(file);
  return real->pMethods->xFileSize(real, size);
}

int Lock(sqlite3_file* file, int level) {
  if (Fails(false)) return SQLITE_IOERR_LOCK;
  sqlite3_file* real = RealOf(file);
  return real->pMethods->xLock(real, level);
}

int Unlock(sqlite3_file* file, int level) {
  sqlite3_file* real = RealOf(file);
  return real->pMethods->xUnlock(real, level);
}

int CheckReservedLock(sqlite3_file* file, int* result) {
  sqlite3_file* real = RealOf(file);
  return real->pMethods->xCheckReservedLock(real, result);
}

int FileControl(sqlite3_file* file, int op, void* argument) {
  sqlite3_file* real = RealOf(file);
  return real->pMethods->xFileControl(real, op, argument);
}

int SectorSize(sqlite3_file* file) {
  sqlite3_file* real = RealOf(file);
  return real->pMethods->xSectorSize(real);
}

int DeviceCharacteristics(sqlite3_file* file) {
  sqlite3_file* real = RealOf(file);
  return real->pMethods->xDeviceCharacteristics(real);
}

const sqlite3_io_methods kMethods = {
    .iVersion = 1,
    .xClose = Close,
    .xRead = Read,
    .xWrite = Write,
    .xTruncate = Truncate,
    .xSync = Sync,
    .xFileSize = FileSize,
    .xLock = Lock,
    .xUnlock = Unlock,
    .xCheckReservedLock = CheckReservedLock,
    .xFileControl = FileControl,
    .xSectorSize = SectorSize,
    .xDeviceCharacteristics = DeviceCharacteristics,
    .xShmMap = nullptr,
    .xShmLock = nullptr,
    .xShmBarrier = nullptr,
    .xShmUnmap = nullptr,
    .xFetch = nullptr,
    .xUnfetch = nullptr,
};

int OpenFile(sqlite3_vfs*, const char* name, sqlite3_file* file, int flags,
             int* out_flags) {
  file->pMethods = nullptr;
  if (Fails(false)) return SQLITE_CANTOPEN;
  File* wrapped = new (file) File;
  wrapped->base.pMethods = nullptr;
  wrapped->real = reinterpret_cast<sqlite3_file*>(wrapped + 1);
  std::memset(static_cast<void*>(wrapped->real), 0,
              static_cast<size_t>(Below()->szOsFile));
  const int code =
      Below()->xOpen(Below(), name, wrapped->real, flags, out_flags);
  if (wrapped->real->pMethods != nullptr) wrapped->base.pMethods = &kMethods;
  return code;
}

int Delete(sqlite3_vfs*, const char* name, int sync) {
  if (Fails(false)) return SQLITE_IOERR_DELETE;
  return Below()->xDelete(Below(), name, sync);
}

void Register() {
  static sqlite3_vfs layer = *Below();
  static const bool once = [] {
    layer.zName = "kiln-fault";
    layer.pNext = nullptr;
    layer.szOsFile = static_cast<int>(sizeof(File)) + Below()->szOsFile;
    layer.xOpen = OpenFile;
    layer.xDelete = Delete;
    return sqlite3_vfs_register(&layer, 1) == SQLITE_OK;
  }();
  KILN_CHECK(once);
}

}  // namespace

void InjectFault(Fault new_fault, int64_t new_nth) {
  Register();
  fault = new_fault;
  nth = new_nth;
  calls = 0;
}

int64_t FileCalls() { return calls; }

}  // namespace kiln::testing
