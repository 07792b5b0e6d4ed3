// NamesIn: what a test's folder holds.

#ifndef KILN_TESTS_SUPPORT_NAMES_IN_H_
#define KILN_TESTS_SUPPORT_NAMES_IN_H_

#include <filesystem>
#include <string>
#include <vector>

namespace kiln::testing {

inline std::vector<std::string> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  return names;
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_NAMES_IN_H_
