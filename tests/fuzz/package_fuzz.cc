// Any bytes: ParsePackageManifest answers with an error that names a place, or
// with a manifest that its own pins do not change; and every expression of it
// can be evaluated.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "compiler/base/check.h"
#include "templates/package/manifest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<kiln::PackageManifest> manifest =
      kiln::ParsePackageManifest(text, "f");
  if (!manifest.ok()) {
    KILN_CHECK(absl::IsInvalidArgument(manifest.status()));
    KILN_CHECK(absl::StartsWith(manifest.status().message(), "f:"));
    KILN_CHECK(manifest.status().message().size() < 20000);
    return 0;
  }
  KILN_CHECK(manifest->name.find('@') == std::string::npos);
  for (const kiln::PackageFile& file : manifest->files) {
    KILN_CHECK(file.sha256.has_value());
    KILN_CHECK(!absl::StartsWith(file.path, "/"));
    KILN_CHECK(!absl::StrContains(file.path, "../"));
  }
  kiln::ExpressionValues values = kiln::GeometryValues({});
  values["capacity"] = 8;
  values["processors"] = 2;
  for (const kiln::Axis& axis : manifest->axes) {
    values[axis.name] = axis.values.front();
  }
  for (const kiln::Condition& condition : manifest->conditions) {
    condition.Holds(values).status().IgnoreError();
  }
  for (const kiln::PackageStep& step : manifest->steps) {
    for (const kiln::Expression& dim : step.grid) {
      dim.Dim(values).status().IgnoreError();
    }
  }
  for (const kiln::PackageSlice& slice : manifest->arena) {
    slice.bytes.Number(values).status().IgnoreError();
  }
  return 0;
}
