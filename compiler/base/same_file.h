// IsSameFile: whether writing one file would replace another.

#ifndef KILN_COMPILER_BASE_SAME_FILE_H_
#define KILN_COMPILER_BASE_SAME_FILE_H_

#include <filesystem>
#include <string>
#include <system_error>

namespace kiln {

// True when both exist and are one file, links followed.
inline bool IsSameFile(const std::string& a, const std::string& b) {
  std::error_code error;
  return std::filesystem::equivalent(a, b, error) && !error;
}

}  // namespace kiln

#endif  // KILN_COMPILER_BASE_SAME_FILE_H_
