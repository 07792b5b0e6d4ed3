// Package: a kernel package as it was read from its folder, every file of it
// compared with the SHA-256 that its manifest pins. What was compared is what
// is used: the bytes are kept, no file is opened a second time.

#ifndef KILN_TEMPLATES_PACKAGE_PACKAGE_H_
#define KILN_TEMPLATES_PACKAGE_PACKAGE_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/base/digest.h"
#include "templates/package/manifest.h"

namespace kiln {

// Name of the manifest in a package's folder.
inline constexpr absl::string_view kPackageManifestName = "package.json";

// Largest file of a package and all of them together, in bytes.
inline constexpr uint64_t kPackageFileBytesMax = uint64_t{64} << 20;
inline constexpr uint64_t kPackageBytesMax = uint64_t{256} << 20;

struct Package {
  std::string folder;  // for messages only
  PackageManifest manifest;
  std::map<std::string, std::string> files;  // bytes by path
  // Over the manifest's bytes, which pin those of the files. A package is
  // another one as soon as a byte of it differs.
  Digest digest;

  // "acme.scalar@HEX" with all 64 digits: names the package wherever the name
  // of a template stands.
  std::string TemplateName() const;
};

// Reads and checks the package in `folder`.
//   Errors: NotFound for a file that is not there; DataLoss for one whose
//   bytes are not the pinned ones; InvalidArgument for a malformed manifest, a
//   path through a symbolic link, something that is no regular file or too
//   large, and a source that includes what the package does not pin.
absl::StatusOr<Package> ReadPackage(const std::string& folder);

// The manifest of the package in `folder`, and its text with the SHA-256 of
// every file as it is now. Writes nothing.
//   Errors: those of ReadPackage but DataLoss.
absl::StatusOr<std::string> PinnedManifestText(const std::string& folder);

// Why a source includes something that is neither in `headers` nor one of
// Kiln's device headers; empty when it does not. Conditional inclusion counts.
std::string WhyBadInclude(absl::string_view source,
                          const std::vector<std::string>& headers);

}  // namespace kiln

#endif  // KILN_TEMPLATES_PACKAGE_PACKAGE_H_
