// JsonScanner: strict JSON read once from front to back, without building a
// tree. Safetensors headers and index files reach tens of megabytes of one
// regular shape; a tree of them would cost more than all the rest of a read.

#ifndef KILN_TEMPLATES_FORMATS_JSON_SCANNER_H_
#define KILN_TEMPLATES_FORMATS_JSON_SCANNER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kiln {

// Notes of a file's writer. Checking one builds a tree, whose nodes take far
// more memory than their text.
inline constexpr uint64_t kScannedValueBytesMax = 1u << 20;

// Borrows the text. Whatever a sequence of its calls accepts up to AtEnd is
// also accepted by ParseJson. Errors are InvalidArgument and name the byte.
class JsonScanner {
 public:
  explicit JsonScanner(absl::string_view text) : text_(text) {}

  // Skips white space, then takes `c` if it comes next.
  bool Take(char c);

  // As Take, an error if something else comes.
  absl::Status Expect(char c);

  // A string. The view points into the text, or into `decoded` when the string
  // has escapes or is not ASCII; the deque never moves its elements.
  absl::StatusOr<absl::string_view> String(std::deque<std::string>* decoded);

  // An integer of 0..2^63-1 without sign, fraction or exponent.
  absl::StatusOr<uint64_t> Unsigned();

  // The text of any value of at most kScannedValueBytesMax, checked by
  // ParseJson.
  absl::StatusOr<absl::string_view> Value();

  // True when only white space is left.
  bool AtEnd();

  absl::Status Error(absl::string_view message) const;

 private:
  void SkipSpace();

  absl::string_view text_;
  size_t at_ = 0;
};

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_JSON_SCANNER_H_
