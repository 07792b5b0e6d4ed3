// CheckBundleMatches: reopens the bytes of a bundle through the runtime's own
// reader and compares every field with what was meant.

#ifndef KILN_TUNER_BUNDLE_CHECK_H_
#define KILN_TUNER_BUNDLE_CHECK_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "compiler/bundle_writer.h"

namespace kiln {

// `bytes` is what WriteBundle made of `sections`.
//   Errors: Internal, naming the section, entry, plan and field that differ,
//   with both values; or the reader's own refusal.
absl::Status CheckBundleMatches(absl::string_view bytes,
                                const std::vector<BundleSection>& sections);

}  // namespace kiln

#endif  // KILN_TUNER_BUNDLE_CHECK_H_
