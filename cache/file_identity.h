// Tells a cache from any other file before SQLite opens it: opening some other
// program's database can roll back its journal or create a write-ahead log
// beside it. Internal to cache/.

#ifndef KILN_CACHE_FILE_IDENTITY_H_
#define KILN_CACHE_FILE_IDENTITY_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace kiln {

struct CacheFileState {
  bool exists = false;
  uint64_t bytes = 0;
};

// Looks at the first bytes of `path`. Where they are not those of a cache, but
// the journal of an interrupted write will restore such bytes, those count:
// whatever a power cut left of the first page, SQLite rolls it back.
//   Errors: FailedPrecondition (foreign, another schema, no regular file),
//   DataLoss (fields that no cache has), and those of reading.
absl::StatusOr<CacheFileState> ExamineCacheFile(const std::string& path);

}  // namespace kiln

#endif  // KILN_CACHE_FILE_IDENTITY_H_
