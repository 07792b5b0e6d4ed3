// Which section of a bundle this device or host loads. Exact matches only.

#ifndef KILN_RUNTIME_SECTION_CHOICE_H_
#define KILN_RUNTIME_SECTION_CHOICE_H_

#include <stdint.h>

#include "runtime/bundle_reader.h"
#include "runtime/module_set.h"

namespace kiln::runtime {

// Decides the backend from options.target, options.context and the sections
// there are.
//   Errors: TARGET_MISSING, TARGET_AMBIGUOUS.
kiln_status_t ChooseBackend(const BundleView& view, const LoadOptions& options,
                            bool* cuda, kiln_error_t* error);

// The section for a device of compute capability `capability` (10 * major +
// minor).
//   Errors: TARGET_MISSING, TARGET_MISMATCH.
kiln_status_t ChooseCudaSection(const BundleView& view,
                                const LoadOptions& options, uint32_t capability,
                                const kiln_format_section_t** section,
                                kiln_error_t* error);

// The section for this host.
//   Errors: TARGET_MISSING, TARGET_MISMATCH; INVALID_ARGUMENT if a context was
//   given.
kiln_status_t ChooseCpuSection(const BundleView& view,
                               const LoadOptions& options,
                               const kiln_format_section_t** section,
                               kiln_error_t* error);

}  // namespace kiln::runtime

#endif  // KILN_RUNTIME_SECTION_CHOICE_H_
