// SQLite's view of files, with two system calls fewer in every transaction than
// SQLite's own. Internal to sqlite_db.cc.

#ifndef KILN_CACHE_SQLITE_VFS_H_
#define KILN_CACHE_SQLITE_VFS_H_

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

}  // namespace kiln

#endif  // KILN_CACHE_SQLITE_VFS_H_
