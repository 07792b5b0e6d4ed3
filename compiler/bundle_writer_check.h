// What the bundle writer demands of its input, before it writes a byte.

#ifndef KILN_COMPILER_BUNDLE_WRITER_CHECK_H_
#define KILN_COMPILER_BUNDLE_WRITER_CHECK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/bundle_writer.h"

namespace kiln {

// ResourceExhausted, naming `what`, for a count above its maximum.
absl::Status CheckCount(absl::string_view what, uint64_t count, uint64_t max);

// The next multiple of `alignment`.
inline uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

// Compares the layout of the arguments that a step passes with what the binary
// declares. InvalidArgument, with both, where they differ.
absl::Status CheckArgs(const Step& step, const Kernel& kernel, Backend backend);

// Whether the plan's template has no qualification for the section's target.
bool IsUnqualified(const BundleSection& section, const Plan& plan);

// A section after sorting: programs by build digest, each once and used.
struct SortedSection {
  const BundleSection* section = nullptr;
  std::string target;
  std::vector<std::shared_ptr<const Program>> programs;
  std::vector<const BundleEntry*> entries;
};

// Sorts entries and plans in place, checks everything that WriteBundle
// promises to check of one section, and keeps the programs that plans name.
absl::StatusOr<SortedSection> SortSection(BundleSection* section,
                                          const BundleOptions& options);

}  // namespace kiln

#endif  // KILN_COMPILER_BUNDLE_WRITER_CHECK_H_
