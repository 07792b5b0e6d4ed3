// The text of schema.sql, and an empty database made of it. Internal to cache/.

#ifndef KILN_CACHE_SCHEMA_H_
#define KILN_CACHE_SCHEMA_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace kiln {

class Database;

// Generated from schema.sql by kiln_embed: name and contents.
const std::vector<std::pair<std::string, std::string>>& CacheSchemaFiles();

const std::string& CacheSchemaSql();

// A private database in memory with the cache's empty tables.
absl::StatusOr<std::unique_ptr<Database>> NewMemoryDatabase();

}  // namespace kiln

#endif  // KILN_CACHE_SCHEMA_H_
