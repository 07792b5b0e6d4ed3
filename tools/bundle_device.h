// Which device of this machine a bundle runs on, and what an entry computes
// there.

#ifndef KILN_TOOLS_BUNDLE_DEVICE_H_
#define KILN_TOOLS_BUNDLE_DEVICE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "compiler/spec/request.h"
#include "compiler/spec/target.h"
#include "tools/bundle_view.h"
#include "tuner/device.h"

namespace kiln {

// Opens the device that a section of the bundle is for: the named target, else
// the GPU `ordinal` if there is a section for it, else the CPU.
//   Errors: FailedPrecondition when no section fits, naming those there are.
absl::StatusOr<std::unique_ptr<Device>> OpenDeviceFor(
    const BundleView& bundle, const std::string& wanted_target, int ordinal);

// The request behind an entry of the target's section. NotFound without one.
absl::StatusOr<RequestGeometry> GeometryOf(const BundleView& bundle,
                                           const Target& target,
                                           const std::string& entry);

}  // namespace kiln

#endif  // KILN_TOOLS_BUNDLE_DEVICE_H_
