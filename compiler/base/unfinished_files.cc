#include "compiler/base/unfinished_files.h"

#include <unistd.h>

namespace kiln {

void UnfinishedFiles::Folder::Remove() const {
  for (const std::string& file : files) unlink(file.c_str());
  if (!made.empty()) rmdir(made.c_str());
}

UnfinishedFiles& TheUnfinishedFiles() {
  // Never destroyed: a thread may still use it when the process ends.
  static UnfinishedFiles& unfinished = *new UnfinishedFiles;
  return unfinished;
}

void RemoveUnfinishedFiles() {
  UnfinishedFiles& unfinished = TheUnfinishedFiles();
  unfinished.mutex.lock();  // for good
  for (const std::string& file : unfinished.files) unlink(file.c_str());
  for (const auto& [owner, folder] : unfinished.folders) folder.Remove();
}

}  // namespace kiln
