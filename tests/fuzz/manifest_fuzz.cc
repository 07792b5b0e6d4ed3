// Any bytes: ParseManifest answers with an error that names a place, or with a
// manifest whose canonical text is a fixed point.

#include <cstdint>

#include "absl/strings/match.h"
#include "compiler/base/check.h"
#include "compiler/spec/manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<kiln::Manifest> manifest =
      kiln::ParseManifest(text, "f");
  if (!manifest.ok()) {
    KILN_CHECK(absl::IsInvalidArgument(manifest.status()));
    KILN_CHECK(absl::StartsWith(manifest.status().message(), "f:"));
    KILN_CHECK(manifest.status().message().size() < 1000);
    return 0;
  }
  const std::string canonical = kiln::ManifestToJson(*manifest);
  const absl::StatusOr<kiln::Manifest> again =
      kiln::ParseManifest(canonical, "again");
  KILN_CHECK(again.ok());
  KILN_CHECK(kiln::ManifestToJson(*again) == canonical);
  const auto planned = kiln::Canonicalize(*manifest, 0);
  if (!planned.ok()) return 0;
  for (const kiln::PlannedRequest& request : *planned) {
    uint32_t next = 1;
    for (const kiln::Interval& interval : request.intervals) {
      KILN_CHECK(interval.m_min == next && interval.m_max >= interval.m_min);
      next = interval.m_max + 1;
    }
  }
  return 0;
}
