#include "templates/package/package.h"

#include <sys/stat.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "templates/registry.h"

namespace kiln {
namespace {

std::string PathOf(const std::string& folder, absl::string_view file) {
  return absl::StrCat(folder, absl::EndsWith(folder, "/") ? "" : "/", file);
}

// No part of a file's path below the folder may be a symbolic link: it could
// lead outside, and to another file tomorrow.
absl::Status CheckNoLinks(const std::string& folder, absl::string_view file) {
  std::string path = folder;
  for (const absl::string_view part : absl::StrSplit(file, '/')) {
    path = PathOf(path, part);
    struct stat info;
    if (lstat(path.c_str(), &info) != 0) return absl::OkStatus();
    if (S_ISLNK(info.st_mode)) {
      return absl::InvalidArgumentError(
          absl::StrCat(path,
                       " is a symbolic link; a package consists of "
                       "regular files in its own folder: put a copy "
                       "there"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadMember(const std::string& folder,
                                       absl::string_view file,
                                       uint64_t bytes_max) {
  RETURN_IF_ERROR(CheckNoLinks(folder, file));
  return ReadFile(PathOf(folder, file), bytes_max);
}

// The bytes of all files that the manifest lists.
absl::StatusOr<std::map<std::string, std::string>> ReadFiles(
    const std::string& folder, const PackageManifest& manifest) {
  std::map<std::string, std::string> files;
  uint64_t bytes = 0;
  for (const PackageFile& file : manifest.files) {
    absl::StatusOr<std::string> contents =
        ReadMember(folder, file.path, kPackageFileBytesMax);
    if (!contents.ok()) {
      return Annotate(contents.status(),
                      absl::StrCat("package ", manifest.name));
    }
    bytes += contents->size();
    if (bytes > kPackageBytesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("package ", manifest.name, " has more than ",
                       kPackageBytesMax, " bytes"));
    }
    files[file.path] = *std::move(contents);
  }
  return files;
}

absl::Status CheckDigests(const Package& package) {
  for (const PackageFile& file : package.manifest.files) {
    const Digest found = Sha256(package.files.at(file.path));
    if (file.sha256 == found) continue;
    return absl::DataLossError(absl::StrCat(
        "package ", package.manifest.name, ": ",
        PathOf(package.folder, file.path), " has SHA-256 ", found.ToHex(),
        ", the manifest pins ", file.sha256->ToHex(), " (",
        kPackageManifestName, ":", file.line,
        "); restore the file, or, if you changed it yourself, run kiln "
        "package pin ",
        package.folder));
  }
  return absl::OkStatus();
}

absl::Status CheckIncludes(const Package& package) {
  if (package.manifest.own_compiler) return absl::OkStatus();
  std::vector<std::string> names;
  for (const auto& [path, text] : package.files) names.push_back(path);
  for (const auto& [path, text] : package.files) {
    const std::string why = WhyBadInclude(text, names);
    if (!why.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("package ", package.manifest.name, ": ",
                       PathOf(package.folder, path), ":", why));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::string Package::TemplateName() const {
  return absl::StrCat(manifest.name, "@", digest.ToHex());
}

std::string WhyBadInclude(absl::string_view source,
                          const std::vector<std::string>& headers) {
  static const auto* const kDirectives =
      new std::set<std::string>{"include", "include_next", "import", "embed"};
  // Line ends that a backslash hides keep their lines in the count.
  const std::string spliced =
      absl::StrReplaceAll(source, {{"\\\r\n", "\x01"}, {"\\\n", "\x01"}});
  size_t number = 0;
  for (const absl::string_view raw : absl::StrSplit(spliced, '\n')) {
    ++number;
    const size_t line = number;
    number += static_cast<size_t>(std::count(raw.begin(), raw.end(), '\x01'));
    const std::string text = absl::StrReplaceAll(raw, {{"\x01", ""}});
    absl::string_view rest = absl::StripAsciiWhitespace(text);
    if (!absl::ConsumePrefix(&rest, "#") && !absl::ConsumePrefix(&rest, "%:")) {
      continue;
    }
    rest = absl::StripLeadingAsciiWhitespace(rest);
    const size_t end = static_cast<size_t>(
        std::find_if(rest.begin(), rest.end(),
                     [](char c) {
                       return !absl::ascii_isalpha(
                                  static_cast<unsigned char>(c)) &&
                              c != '_';
                     }) -
        rest.begin());
    if (kDirectives->count(std::string(rest.substr(0, end))) == 0) continue;
    rest = absl::StripAsciiWhitespace(rest.substr(end));
    // "NAME", perhaps with a comment behind it.
    std::string name;
    if (absl::ConsumePrefix(&rest, "\"")) {
      name = std::string(rest.substr(0, rest.find('"')));
    }
    const bool known =
        std::find(headers.begin(), headers.end(), name) != headers.end() ||
        std::any_of(DeviceHeaders().begin(), DeviceHeaders().end(),
                    [&](const auto& header) { return header.first == name; });
    if (known) continue;
    return absl::StrCat(line, ": includes ", absl::StripAsciiWhitespace(text),
                        "; a source may include, in quotes, files of its own "
                        "package and Kiln's device headers");
  }
  return "";
}

absl::StatusOr<Package> ReadPackage(const std::string& folder) {
  Package package;
  package.folder = folder;
  ASSIGN_OR_RETURN(
      const std::string text,
      ReadMember(folder, kPackageManifestName, kPackageManifestBytesMax));
  ASSIGN_OR_RETURN(
      package.manifest,
      ParsePackageManifest(text, PathOf(folder, kPackageManifestName)));
  ASSIGN_OR_RETURN(package.files, ReadFiles(folder, package.manifest));
  RETURN_IF_ERROR(CheckDigests(package));
  RETURN_IF_ERROR(CheckIncludes(package));
  CanonicalEncoder encoder("kiln.package/1");
  encoder.Hash("manifest", Sha256(text));
  for (const auto& [path, bytes] : package.files) {
    encoder.Hash(path, Sha256(bytes));
  }
  package.digest = encoder.digest();
  return package;
}

absl::StatusOr<std::string> PinnedManifestText(const std::string& folder) {
  ASSIGN_OR_RETURN(
      const std::string text,
      ReadMember(folder, kPackageManifestName, kPackageManifestBytesMax));
  const std::string name = PathOf(folder, kPackageManifestName);
  ASSIGN_OR_RETURN(const PackageManifest manifest,
                   ParseUnpinnedPackageManifest(text, name));
  ASSIGN_OR_RETURN(const auto files, ReadFiles(folder, manifest));
  std::vector<Digest> digests;
  for (const PackageFile& file : manifest.files) {
    digests.push_back(Sha256(files.at(file.path)));
  }
  std::string pinned = PinPackageManifest(text, manifest, digests);
  // A value may be written in a way that cannot be replaced in place.
  const absl::StatusOr<PackageManifest> again =
      ParsePackageManifest(pinned, name);
  bool same = again.ok() && again->files.size() == digests.size();
  for (size_t i = 0; same && i < digests.size(); ++i) {
    same = again->files[i].sha256 == digests[i];
  }
  if (!same) {
    return absl::InvalidArgumentError(
        absl::StrCat(name,
                     ": a \"sha256\" is written with escapes; write \"\" "
                     "in its place"));
  }
  return pinned;
}

}  // namespace kiln
