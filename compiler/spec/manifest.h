// Manifest: the wants of one model, schema "kiln.model/1". The parser refuses
// what it does not know; errors name file, line, column, value and rule.

#ifndef KILN_COMPILER_SPEC_MANIFEST_H_
#define KILN_COMPILER_SPEC_MANIFEST_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/spec/request.h"

namespace kiln {

// Limits of a manifest; beyond them is an error that names the limit.
inline constexpr uint64_t kManifestBytesMax = 4u << 20;
inline constexpr int64_t kHiddenMax = 65536;
inline constexpr int64_t kIntermediateMax = 262144;
inline constexpr int64_t kFeaturesMax = 1048576;
inline constexpr int64_t kExpertsMax = 1024;
inline constexpr int64_t kTopKMax = 32;
inline constexpr int64_t kLayersMax = 1024;
inline constexpr int64_t kCapacityMax = 65536;
inline constexpr size_t kCapacitiesMax = 64;
inline constexpr int64_t kSmallMTokensDefault = 16;
// Of the direct arm of TrellisMX, and its default where there is a remainder.
inline constexpr int64_t kDirectTokensMax = 16;
inline constexpr size_t kRequestsMax = 1024;
inline constexpr size_t kNameBytesMax = 128;

struct Manifest {
  std::string name;
  std::vector<Request> requests;  // in the order of the file
};

// Parses and checks a manifest. `file` is only used in messages.
//   Errors: InvalidArgument, "file:line:column: ...".
absl::StatusOr<Manifest> ParseManifest(absl::string_view text,
                                       absl::string_view file);

// Reads `path` and parses it.
absl::StatusOr<Manifest> ReadManifest(const std::string& path);

// The canonical JSON text: fixed key order, every default written out.
// ParseManifest(ManifestToJson(m)) equals m, and the text is a fixed point.
std::string ManifestToJson(const Manifest& manifest);

// One geometry with its capacities. Requests that differ only by name or layers
// share their plans.
struct PlannedRequest {
  RequestGeometry geometry;
  std::vector<std::string> names;    // sorted
  std::vector<uint32_t> capacities;  // ascending, distinct
  std::vector<Interval> intervals;   // one per capacity
};

// Merges equal geometries; the result is sorted by geometry and does not
// depend on the order of the manifest.
//   capacity_max: drops larger capacities; 0 keeps all.
//   Errors: InvalidArgument when a request keeps no capacity, or when two
//   requests of one geometry name different capacities (their intervals would
//   contradict each other).
absl::StatusOr<std::vector<PlannedRequest>> Canonicalize(
    const Manifest& manifest, uint32_t capacity_max);

}  // namespace kiln

#endif  // KILN_COMPILER_SPEC_MANIFEST_H_
