// Attach: kernel packages of the command line -> templates that compete with
// those of this build. Everything about a package is refused here, before
// anything is compiled or stored.

#ifndef KILN_TUNER_ATTACH_H_
#define KILN_TUNER_ATTACH_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compiler/spec/kernel_template.h"
#include "templates/package/package.h"

namespace kiln {

// Inspects the binaries of a package with its own compiler: they are for the
// targets that the manifest says, have exactly the declared entries, and take
// the arguments that the steps pass.
//   Errors: InvalidArgument, with the file, what was found and what was
//   expected.
absl::Status CheckPackageBinaries(const Package& package);

// The package in `folder`, read and checked in full.
//   Errors: those of ReadPackage and CheckPackageBinaries.
absl::StatusOr<Package> ReadCheckedPackage(const std::string& folder);

// Templates of the packages in `folders`, in their order.
//   Errors: those of ReadCheckedPackage; InvalidArgument for a name that a
//   template of this build or another of the packages has.
absl::StatusOr<std::vector<std::shared_ptr<const KernelTemplate>>>
AttachPackages(const std::vector<std::string>& folders);

}  // namespace kiln

#endif  // KILN_TUNER_ATTACH_H_
