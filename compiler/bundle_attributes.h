// The fields of a request's geometry as a bundle stores them, and back, so that
// a tool can rebuild the request from the file alone.

#ifndef KILN_COMPILER_BUNDLE_ATTRIBUTES_H_
#define KILN_COMPILER_BUNDLE_ATTRIBUTES_H_

#include <vector>

#include "absl/status/statusor.h"
#include "compiler/base/digest.h"
#include "compiler/spec/request.h"

namespace kiln {

// Every field of RequestGeometry::Encode in its order, without the name of the
// outer group: {"op", "fused_moe"}, {"hidden", "2048"}, ...
std::vector<CanonicalField> GeometryAttributes(const RequestGeometry& geometry);

// The inverse. InvalidArgument for a missing, unknown, repeated, misplaced or
// unreadable field.
absl::StatusOr<RequestGeometry> GeometryFromAttributes(
    const std::vector<CanonicalField>& attributes);

}  // namespace kiln

#endif  // KILN_COMPILER_BUNDLE_ATTRIBUTES_H_
