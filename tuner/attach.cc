#include "tuner/attach.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "compiler/bundle_writer_check.h"
#include "compiler/elf_inspect.h"
#include "templates/package/package_template.h"
#include "templates/registry.h"

namespace kiln {
namespace {

// What a step passes, as far as its layout goes.
Step LayoutOf(const PackageStep& from) {
  Step step;
  step.label = from.label;
  step.entry = from.entry;
  for (const PackageArg& arg : from.args) step.args.push_back({arg.kind, 0});
  return step;
}

absl::Status CheckBinary(const Package& package, size_t index,
                         const PackageBinary& binary) {
  const PackageManifest& manifest = package.manifest;
  Program program;
  ASSIGN_OR_RETURN(program.kernels,
                   InspectProgram(package.files.at(binary.file), binary.target,
                                  manifest.programs[index].entries));
  for (const PackageStep& from : manifest.steps) {
    if (from.program != index) continue;
    const Step step = LayoutOf(from);
    // The inspector has found every entry.
    RETURN_IF_ERROR(Annotate(
        CheckArgs(step, *program.FindKernel(step.entry), manifest.backend),
        absl::StrCat("step ", step.label)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckPackageBinaries(const Package& package) {
  const std::vector<PackageProgram>& programs = package.manifest.programs;
  for (size_t i = 0; i < programs.size(); ++i) {
    for (const PackageBinary& binary : programs[i].binaries) {
      RETURN_IF_ERROR(
          Annotate(CheckBinary(package, i, binary),
                   absl::StrCat("package ", package.manifest.name, ": ",
                                package.folder, "/", binary.file)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Package> ReadCheckedPackage(const std::string& folder) {
  ASSIGN_OR_RETURN(Package package, ReadPackage(folder));
  if (FindTemplate(package.manifest.name) != nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("package ", package.manifest.name, " in ", folder,
                     " has the name of a template of this build; choose "
                     "another \"name\""));
  }
  RETURN_IF_ERROR(CheckPackageBinaries(package));
  return package;
}

absl::StatusOr<std::vector<std::shared_ptr<const KernelTemplate>>>
AttachPackages(const std::vector<std::string>& folders) {
  std::vector<std::shared_ptr<const KernelTemplate>> attached;
  std::map<std::string, std::string> folder_of;  // by name
  for (const std::string& folder : folders) {
    ASSIGN_OR_RETURN(Package package, ReadCheckedPackage(folder));
    const auto [other, first] =
        folder_of.emplace(package.manifest.name, folder);
    if (!first) {
      return absl::InvalidArgumentError(absl::StrCat(
          "package ", package.manifest.name, " is attached from ",
          other->second, " and from ", folder, "; attach one of them"));
    }
    attached.push_back(MakePackageTemplate(std::move(package)));
  }
  return attached;
}

}  // namespace kiln
