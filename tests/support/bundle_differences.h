// Sections that differ in one field, for tests of what compares bundles.

#ifndef KILN_TESTS_SUPPORT_BUNDLE_DIFFERENCES_H_
#define KILN_TESTS_SUPPORT_BUNDLE_DIFFERENCES_H_

#include <functional>
#include <string>
#include <vector>

#include "compiler/bundle_writer.h"

namespace kiln::testing {

struct BundleDifference {
  const char* name;  // of the field, as CheckBundleMatches says it
  std::function<void(BundleSection*)> apply;
};

// Of TinyCudaSection: every field that a section holds. Some results are no
// section that WriteBundle would take.
const std::vector<BundleDifference>& BundleDifferences();

// Calls `visit` with every bundle that the reader accepts and that differs from
// `bytes` in one place under a right root: two bits of each byte of the tables
// changed, and each text of a record replaced by several other strings. `table`
// is where: KILN_FORMAT_TABLE_*.
void ForEachAcceptedChange(
    const std::string& bytes,
    const std::function<void(const std::string& changed, uint32_t table,
                             size_t offset)>& visit);

}  // namespace kiln::testing

#endif  // KILN_TESTS_SUPPORT_BUNDLE_DIFFERENCES_H_
