// Which fields of two key pre-images differ.

#ifndef KILN_TESTS_COMPILER_SPEC_CANONICAL_DIFFERENCE_H_
#define KILN_TESTS_COMPILER_SPEC_CANONICAL_DIFFERENCE_H_

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "compiler/base/digest.h"

namespace kiln::testing {

// Sorted paths whose values, in order, are not the same in both.
inline std::vector<std::string> DifferingPaths(const std::string& a,
                                               const std::string& b) {
  std::map<std::string, std::vector<std::string>> values[2];
  const std::string* preimages[2] = {&a, &b};
  std::set<std::string> paths;
  for (int side = 0; side < 2; ++side) {
    const auto record = DecodeCanonical(*preimages[side]);
    EXPECT_TRUE(record.ok()) << record.status();
    if (!record.ok()) return {};
    for (const CanonicalField& field : record->fields) {
      values[side][field.path].push_back(field.value);
      paths.insert(field.path);
    }
  }
  std::vector<std::string> differing;
  for (const std::string& path : paths) {
    if (values[0][path] != values[1][path]) differing.push_back(path);
  }
  return differing;
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_COMPILER_SPEC_CANONICAL_DIFFERENCE_H_
