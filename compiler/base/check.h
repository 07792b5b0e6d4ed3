// KILN_CHECK and KILN_UNREACHABLE: programmer errors only, on in every build.
// User input, file contents and driver results never reach a KILN_CHECK; they
// return absl::Status.

#ifndef KILN_COMPILER_BASE_CHECK_H_
#define KILN_COMPILER_BASE_CHECK_H_

namespace kiln::internal {
// Prints "file:line: check failed: text" to stderr and aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const char* text);
}  // namespace kiln::internal

#define KILN_CHECK(condition)   \
  (static_cast<bool>(condition) \
       ? static_cast<void>(0)   \
       : ::kiln::internal::CheckFailed(__FILE__, __LINE__, #condition))

#define KILN_UNREACHABLE() \
  ::kiln::internal::CheckFailed(__FILE__, __LINE__, "unreachable")

#endif  // KILN_COMPILER_BASE_CHECK_H_
