// OpenDeviceFor: the device on which a bundle is to be launched.

#ifndef KILN_TOOLS_BUNDLE_DEVICE_H_
#define KILN_TOOLS_BUNDLE_DEVICE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "tools/bundle_view.h"
#include "tuner/device.h"

namespace kiln {

// Opens the device that a section of the bundle is for: the one of
// `wanted_target`, else (empty) the GPU `ordinal` if there is a section for it,
// else the CPU.
//   Errors: InvalidArgument for a target that is none; FailedPrecondition when
//   the bundle has no section for it or this machine no device.
absl::StatusOr<std::unique_ptr<Device>> OpenDeviceFor(
    const BundleView& bundle, const std::string& wanted_target, int ordinal);

}  // namespace kiln

#endif  // KILN_TOOLS_BUNDLE_DEVICE_H_
