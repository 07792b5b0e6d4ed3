#include "tools/bundle_device.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "tools/cli.h"

namespace kiln {

absl::StatusOr<std::unique_ptr<Device>> OpenDeviceFor(
    const BundleView& bundle, const std::string& wanted_target, int ordinal) {
  std::vector<Target> targets;
  for (uint32_t s = 0; s < bundle.info().section_count; ++s) {
    ASSIGN_OR_RETURN(const Target target,
                     ParseTarget(bundle.Section(s).target));
    targets.push_back(target);
  }
  const auto has = [&targets](const Target& target) {
    return std::find(targets.begin(), targets.end(), target) != targets.end();
  };
  if (!wanted_target.empty()) {
    ASSIGN_OR_RETURN(const std::vector<Target> wanted,
                     ParseTargets({wanted_target}));
    if (!has(wanted[0])) {
      return absl::FailedPreconditionError(
          absl::StrCat("the bundle has no section for ", wanted[0].ToString(),
                       "; see kiln inspect"));
    }
    if (wanted[0].backend == Backend::kCpu) return OpenCpuDevice(wanted[0]);
    return OpenCudaDevice(ordinal, wanted[0]);
  }
  const std::vector<DeviceProfile> devices = ListCudaDevices();
  if (static_cast<size_t>(ordinal) < devices.size()) {
    Target target = devices[static_cast<size_t>(ordinal)].target;
    if (has(target)) return OpenCudaDevice(ordinal, target);
    target.arch_specific = false;
    if (has(target)) return OpenCudaDevice(ordinal, target);
  }
  std::optional<Target> best;
  const absl::StatusOr<Target> host = HostCpuTarget();
  for (const Target& target : targets) {
    if (target.backend == Backend::kCpu && host.ok() &&
        target.level <= host->level &&
        (!best.has_value() || target.level > best->level)) {
      best = target;
    }
  }
  if (best.has_value()) return OpenCpuDevice(*best);
  std::string sections;
  for (const Target& target : targets) {
    absl::StrAppend(&sections, sections.empty() ? "" : ", ", target.ToString());
  }
  return absl::FailedPreconditionError(
      absl::StrCat("this machine has no device for the bundle: it serves ",
                   sections, devices.empty() ? "; no GPU was found" : ""));
}

absl::StatusOr<RequestGeometry> GeometryOf(const BundleView& bundle,
                                           const Target& target,
                                           const std::string& entry) {
  for (uint32_t s = 0; s < bundle.info().section_count; ++s) {
    if (bundle.Section(s).target != target.ToString()) continue;
    for (uint32_t e = 0; e < bundle.Section(s).entry_count; ++e) {
      if (bundle.Entry(s, e).name == entry) return bundle.Geometry(s, e);
    }
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the bundle has no entry \"", entry, "\" for ",
                   target.ToString(), "; see kiln inspect"));
}

}  // namespace kiln
