#include "compiler/spec/device_profile.h"

#include <cpuid.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

// Vendor, family, model and stepping as CPUID leaf 1 gives them.
std::string ProcessorId() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(0, &a, &b, &c, &d)) return "unknown";
  std::string vendor;
  for (const unsigned part : {b, d, c}) {
    for (int i = 0; i < 4; ++i) {
      vendor.push_back(static_cast<char>((part >> (8 * i)) & 0xFF));
    }
  }
  if (!__get_cpuid(1, &a, &b, &c, &d)) return vendor;
  unsigned family = (a >> 8) & 15;
  unsigned model = (a >> 4) & 15;
  if (family == 6 || family == 15) model |= ((a >> 16) & 15) << 4;
  if (family == 15) family += (a >> 20) & 255;
  return absl::StrCat(vendor, "-", family, "-", model, "-", a & 15);
}

// Processors that this process may use: a container's limit, not the host's.
int UsableProcessors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

}  // namespace

void DeviceProfile::Encode(CanonicalEncoder* encoder) const {
  encoder->Begin("device")
      .Text("target", target.ToString())
      .Flag("assumed", assumed)
      .Number("compute_capability", compute_capability)
      .Text("processor", processor)
      .Number("multiprocessors", multiprocessors)
      .Number("memory_gib", memory_gib)
      .Number("l2_bytes", l2_bytes)
      .Text("mig", mig)
      .Number("driver_version", driver_version)
      .End();
}

std::string DeviceProfile::Describe() const {
  std::string text =
      absl::StrCat(name, ", ", target.ToString(), ", ", multiprocessors,
                   target.backend == Backend::kCpu ? " threads" : " SMs");
  if (memory_gib > 0) absl::StrAppend(&text, ", ", memory_gib, " GiB");
  absl::StrAppend(&text, ", L2 ", l2_bytes >> 20, " MiB");
  if (!mig.empty()) absl::StrAppend(&text, ", MIG ", mig);
  if (driver_version > 0) absl::StrAppend(&text, ", driver ", driver_version);
  return text;
}

DeviceProfile AssumedProfile(const Target& target) {
  DeviceProfile profile;
  profile.target = target;
  profile.assumed = true;
  profile.threads_per_block_max = 1024;
  if (target.backend == Backend::kCpu) {
    profile.multiprocessors = 1;
    return profile;
  }
  profile.compute_capability = target.level;
  profile.registers_per_sm = 65536;
  const bool large = target.level == 90 || target.level / 10 == 10;
  const bool ampere = target.level == 80 || target.level == 87;
  const int64_t kib = large ? 228 : ampere ? 164 : 100;
  profile.shared_bytes_per_sm = kib * 1024;
  profile.shared_bytes_max = (kib - 1) * 1024;
  // A representative board per generation: only predictions depend on it.
  profile.multiprocessors = target.level == 80        ? 108
                            : target.level == 90      ? 132
                            : target.level / 10 == 10 ? 148
                            : target.level / 10 == 12 ? 188
                                                      : 84;
  return profile;
}

absl::StatusOr<DeviceProfile> HostCpuProfile(const Target& target) {
  ASSIGN_OR_RETURN(const Target host, HostCpuTarget());
  if (target.backend != Backend::kCpu || target.level > host.level) {
    return absl::FailedPreconditionError(absl::StrCat("target ",
                                                      target.ToString(),
                                                      " cannot run here: this "
                                                      "processor is ",
                                                      host.ToString()));
  }
  DeviceProfile profile;
  profile.target = target;
  profile.processor = ProcessorId();
  profile.multiprocessors = UsableProcessors();
  profile.l2_bytes = std::max<int64_t>(
      {sysconf(_SC_LEVEL3_CACHE_SIZE), sysconf(_SC_LEVEL2_CACHE_SIZE), 0});
  profile.threads_per_block_max = 1;
  profile.name = "CPU";
  return profile;
}

}  // namespace kiln
