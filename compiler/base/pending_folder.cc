#include "compiler/base/pending_folder.h"

#include <sys/stat.h>

#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "compiler/base/unfinished_files.h"

namespace kiln {

PendingFolder::PendingFolder(const std::string& path) : path_(path) {
  status_ = Open();
}

absl::Status PendingFolder::Open() {
  struct stat info;
  const bool made = stat(path_.c_str(), &info) != 0;
  RETURN_IF_ERROR(MakeDirectories(path_));
  std::error_code error;
  const bool empty = std::filesystem::is_empty(path_, error);
  if (error) return ErrnoStatus(error.value(), "cannot read the folder", path_);
  if (!empty) {
    // What lies there would become part of the result.
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": must be an empty folder, or a new one"));
  }
  UnfinishedFiles& unfinished = TheUnfinishedFiles();
  const std::lock_guard<std::mutex> lock(unfinished.mutex);
  unfinished.folders[this] = {.files = {}, .made = made ? path_ : ""};
  return absl::OkStatus();
}

PendingFolder::~PendingFolder() {
  UnfinishedFiles& unfinished = TheUnfinishedFiles();
  const std::lock_guard<std::mutex> lock(unfinished.mutex);
  const auto own = unfinished.folders.find(this);
  if (own == unfinished.folders.end()) return;
  own->second.Remove();
  unfinished.folders.erase(own);
}

std::string PendingFolder::At(absl::string_view name) {
  std::string path = absl::StrCat(path_, "/", name);
  UnfinishedFiles& unfinished = TheUnfinishedFiles();
  const std::lock_guard<std::mutex> lock(unfinished.mutex);
  const auto own = unfinished.folders.find(this);
  if (own != unfinished.folders.end()) own->second.files.push_back(path);
  return path;
}

void PendingFolder::Commit() {
  UnfinishedFiles& unfinished = TheUnfinishedFiles();
  const std::lock_guard<std::mutex> lock(unfinished.mutex);
  unfinished.folders.erase(this);
}

}  // namespace kiln
