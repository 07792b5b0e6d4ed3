// Files of this process that are to go unless they are finished, and what a
// process does with them that a signal is about to end.

#ifndef KILN_COMPILER_BASE_UNFINISHED_FILES_H_
#define KILN_COMPILER_BASE_UNFINISHED_FILES_H_

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace kiln {

// Kept by PendingFile and PendingFolder. Its members change, and files appear
// under their names, with the mutex held.
struct UnfinishedFiles {
  struct Folder {
    std::vector<std::string> files;
    std::string made;  // the folder, empty where it was there before

    void Remove() const;
  };

  std::mutex mutex;
  std::set<std::string> files;
  std::map<const void*, Folder> folders;  // by owner
};

UnfinishedFiles& TheUnfinishedFiles();

// Removes what all PendingFiles and PendingFolders of the process would remove,
// and lets none of them do anything more: a thread that tries waits for ever.
void RemoveUnfinishedFiles();

}  // namespace kiln

#endif  // KILN_COMPILER_BASE_UNFINISHED_FILES_H_
