// RETURN_IF_ERROR, ASSIGN_OR_RETURN and Annotate: the packaged Abseil has
// absl::Status but none of these.

#ifndef KILN_COMPILER_BASE_STATUS_MACROS_H_
#define KILN_COMPILER_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace kiln {

// Returns `status` with "context: " put before its message; the code is kept.
// An OK status is returned unchanged.
inline absl::Status Annotate(const absl::Status& status,
                             absl::string_view context) {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(context, ": ", status.message()));
}

}  // namespace kiln

#define KILN_STATUS_CONCAT_INNER_(a, b) a##b
#define KILN_STATUS_CONCAT_(a, b) KILN_STATUS_CONCAT_INNER_(a, b)

#define RETURN_IF_ERROR(expression)              \
  do {                                           \
    ::absl::Status kiln_status_ = (expression);  \
    if (!kiln_status_.ok()) return kiln_status_; \
  } while (false)

#define ASSIGN_OR_RETURN(lhs, expression)                                    \
  KILN_ASSIGN_OR_RETURN_IMPL_(KILN_STATUS_CONCAT_(kiln_statusor_, __LINE__), \
                              lhs, expression)

#define KILN_ASSIGN_OR_RETURN_IMPL_(statusor, lhs, expression) \
  auto statusor = (expression);                                \
  if (!statusor.ok()) return std::move(statusor).status();     \
  lhs = std::move(statusor).value()

#endif  // KILN_COMPILER_BASE_STATUS_MACROS_H_
