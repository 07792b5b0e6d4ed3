// kiln package: check a kernel package, and pin the files of one.

#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "tools/cli.h"
#include "tuner/attach.h"

namespace kiln {
namespace {

using Json = nlohmann::ordered_json;

Json ToJson(const Package& package) {
  const PackageManifest& manifest = package.manifest;
  Json out;
  out["name"] = manifest.name;
  out["version"] = manifest.version;
  out["digest"] = package.digest.ToHex();
  out["template"] = package.TemplateName();
  out["op"] = std::string(OpName(manifest.op));
  out["backend"] = std::string(BackendName(manifest.backend));
  out["compiler"] = manifest.own_compiler ? "own" : "kiln";
  out["deterministic"] = manifest.deterministic;
  out["points"] = PackagePoints(manifest.axes).size();
  out["axes"] = Json::object();
  for (const Axis& axis : manifest.axes) out["axes"][axis.name] = axis.values;
  out["files"] = Json::object();
  for (const auto& [path, bytes] : package.files) {
    out["files"][path] = Sha256(bytes).ToHex();
  }
  out["steps"] = Json::array();
  for (const PackageStep& step : manifest.steps) {
    out["steps"].push_back({{"label", step.label}, {"entry", step.entry}});
  }
  return out;
}

void Print(const Package& package) {
  const PackageManifest& manifest = package.manifest;
  std::printf("%s version %u, digest %s\n", manifest.name.c_str(),
              manifest.version, package.digest.ToHex().c_str());
  std::printf("op %s on %s, compiled by %s, %s, %zu points\n",
              std::string(OpName(manifest.op)).c_str(),
              std::string(BackendName(manifest.backend)).c_str(),
              manifest.own_compiler ? "its own compiler" : "Kiln",
              manifest.deterministic ? "deterministic" : "repeats may differ",
              PackagePoints(manifest.axes).size());
  for (const Axis& axis : manifest.axes) {
    std::printf("  axis %s: %s\n", axis.name.c_str(),
                absl::StrJoin(axis.values, ", ").c_str());
  }
  for (const PackageStep& step : manifest.steps) {
    std::printf("  step %s: %s[%s]\n", step.label.c_str(), step.entry.c_str(),
                absl::StrCat(step.grid[0].text(), ", ", step.grid[1].text(),
                             ", ", step.grid[2].text())
                    .c_str());
  }
  for (const auto& [path, bytes] : package.files) {
    std::printf("  %s  %s, %zu bytes\n", Sha256(bytes).ToHex().c_str(),
                path.c_str(), bytes.size());
  }
}

}  // namespace

absl::StatusOr<int> RunPackageCheck(const GlobalOptions& global,
                                    const PackageCommand& command) {
  ASSIGN_OR_RETURN(const Package package, ReadCheckedPackage(command.folder));
  if (global.json) {
    PrintJson(ToJson(package), 1);
  } else {
    Print(package);
  }
  return kExitDone;
}

absl::StatusOr<int> RunPackagePin(const GlobalOptions& global,
                                  const PackageCommand& command) {
  ASSIGN_OR_RETURN(const std::string text, PinnedManifestText(command.folder));
  RETURN_IF_ERROR(WriteFileAtomically(
      absl::StrCat(command.folder, "/", kPackageManifestName), text));
  return RunPackageCheck(global, command);
}

}  // namespace kiln
