// AnnotateOnce: a path in front of a message that does not name it.

#ifndef KILN_COMPILER_BASE_ANNOTATE_ONCE_H_
#define KILN_COMPILER_BASE_ANNOTATE_ONCE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "compiler/base/status_macros.h"

namespace kiln {

// Annotate with the path of a file or folder, unless the message names it
// already, or a file in it, as errors of reading and writing do.
inline absl::Status AnnotateOnce(const absl::Status& status,
                                 absl::string_view path) {
  for (const char* end : {":", "/", " "}) {
    const std::string named = absl::StrCat(path, end);
    if (absl::StartsWith(status.message(), named) ||
        absl::StrContains(status.message(), absl::StrCat(" ", named))) {
      return status;
    }
  }
  return Annotate(status, path);
}

}  // namespace kiln

#endif  // KILN_COMPILER_BASE_ANNOTATE_ONCE_H_
