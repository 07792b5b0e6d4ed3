// A folder of files that stay together or go together.

#ifndef KILN_COMPILER_BASE_PENDING_FOLDER_H_
#define KILN_COMPILER_BASE_PENDING_FOLDER_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kiln {

// Without Commit, the files that At named are removed, and the folder where
// this object made it. What others put there stays.
class PendingFolder {
 public:
  // A new folder, or one that is empty; see status().
  explicit PendingFolder(const std::string& path);
  PendingFolder(const PendingFolder&) = delete;
  PendingFolder& operator=(const PendingFolder&) = delete;
  ~PendingFolder();

  //   Errors: InvalidArgument (a folder with something in it), those of
  //   MakeDirectories.
  const absl::Status& status() const { return status_; }

  // The path of a file in it, which goes with the folder.
  std::string At(absl::string_view name);

  // All files stay.
  void Commit();

 private:
  absl::Status Open();

  const std::string path_;
  absl::Status status_;
};

}  // namespace kiln

#endif  // KILN_COMPILER_BASE_PENDING_FOLDER_H_
