#include "tuner/nvml.h"

#include <dlfcn.h>

#include <array>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

using NvmlResult = int;

constexpr NvmlResult kSuccess = 0;
constexpr NvmlResult kInsufficientSize = 7;
constexpr int kClockSm = 1;
constexpr int kClockMemory = 2;
constexpr int kTemperatureGpu = 0;
constexpr unsigned kProcessesMax = 1024;

// nvmlProcessInfo_t of the third version of the call.
struct ProcessInfo {
  unsigned pid;
  unsigned long long used_bytes;
  unsigned gpu_instance;
  unsigned compute_instance;
};

// Symbol, and parameters of the function.
#define KILN_NVML_SYMBOLS(X)                                       \
  X(nvmlInit_v2, ())                                               \
  X(nvmlSystemGetNVMLVersion, (char*, unsigned))                   \
  X(nvmlDeviceGetHandleByPciBusId_v2, (const char*, NvmlHandle**)) \
  X(nvmlDeviceGetClockInfo, (NvmlHandle*, int, unsigned*))         \
  X(nvmlDeviceGetMaxClockInfo, (NvmlHandle*, int, unsigned*))      \
  X(nvmlDeviceGetCurrentClocksEventReasons,                        \
    (NvmlHandle*, unsigned long long*))                            \
  X(nvmlDeviceGetTemperature, (NvmlHandle*, int, unsigned*))       \
  X(nvmlDeviceGetPowerUsage, (NvmlHandle*, unsigned*))             \
  X(nvmlDeviceGetComputeRunningProcesses_v3,                       \
    (NvmlHandle*, unsigned*, ProcessInfo*))

struct Library {
#define KILN_DECLARE(name, parameters) NvmlResult(*name) parameters = nullptr;
  KILN_NVML_SYMBOLS(KILN_DECLARE)
#undef KILN_DECLARE
};

// The library, started, all symbols or none; kept open for the life of the
// process.
absl::StatusOr<const Library*> OpenLibrary() {
  static std::once_flag once;
  static Library library;
  static absl::Status status;
  std::call_once(once, [] {
    void* handle = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      status = absl::UnavailableError(
          "no NVML: libnvidia-ml.so.1 is not installed on this machine");
      return;
    }
#define KILN_RESOLVE(name, parameters)                                        \
  library.name =                                                              \
      reinterpret_cast<NvmlResult(*) parameters>(dlsym(handle, #name));       \
  if (library.name == nullptr && status.ok()) {                               \
    status =                                                                  \
        absl::UnavailableError("libnvidia-ml.so.1 lacks " #name               \
                               "; a driver of CUDA 12.4 or later is needed"); \
  }
    KILN_NVML_SYMBOLS(KILN_RESOLVE)
#undef KILN_RESOLVE
    if (!status.ok()) return;
    const NvmlResult result = library.nvmlInit_v2();
    if (result != kSuccess) {
      status = absl::FailedPreconditionError(
          absl::StrCat("nvmlInit fails with code ", result));
    }
  });
  if (!status.ok()) return status;
  return &library;
}

// Of a device that exists, so the library is open.
const Library& Opened() { return **OpenLibrary(); }

}  // namespace

std::string ThrottleText(uint64_t reasons) {
  static constexpr std::array<std::pair<uint64_t, const char*>, 9> kNames = {{
      {kThrottleIdle, "idle"},
      {kThrottleApplicationClocks, "application clocks"},
      {kThrottlePowerCap, "power cap"},
      {kThrottleHardwareSlowdown, "hardware slowdown"},
      {kThrottleSyncBoost, "sync boost"},
      {kThrottleThermalSoftware, "thermal (software)"},
      {kThrottleThermalHardware, "thermal (hardware)"},
      {kThrottlePowerBrake, "power brake"},
      {kThrottleDisplayClocks, "display clocks"},
  }};
  std::vector<std::string> words;
  for (const auto& [bit, name] : kNames) {
    if ((reasons & bit) != 0) words.push_back(name);
    reasons &= ~bit;
  }
  if (reasons != 0) words.push_back(absl::StrCat("0x", absl::Hex(reasons)));
  return words.empty() ? "none" : absl::StrJoin(words, ", ");
}

int NvmlDevice::SmClockMhz() const {
  unsigned value = 0;
  return Opened().nvmlDeviceGetClockInfo(handle_, kClockSm, &value) == kSuccess
             ? static_cast<int>(value)
             : -1;
}

uint64_t NvmlDevice::ThrottleReasons() const {
  unsigned long long reasons = 0;
  return Opened().nvmlDeviceGetCurrentClocksEventReasons(handle_, &reasons) ==
                 kSuccess
             ? reasons
             : 0;
}

GpuState NvmlDevice::State() const {
  const Library& library = Opened();
  GpuState state;
  const auto take = [](NvmlResult result, unsigned value) {
    return result == kSuccess ? static_cast<int>(value) : -1;
  };
  unsigned value = 0;
  NvmlResult result =
      library.nvmlDeviceGetMaxClockInfo(handle_, kClockSm, &value);
  state.sm_clock_max_mhz = take(result, value);
  result = library.nvmlDeviceGetClockInfo(handle_, kClockMemory, &value);
  state.memory_clock_mhz = take(result, value);
  result = library.nvmlDeviceGetTemperature(handle_, kTemperatureGpu, &value);
  state.temperature_c = take(result, value);
  result = library.nvmlDeviceGetPowerUsage(handle_, &value);
  state.power_mw = take(result, value);
  state.sm_clock_mhz = SmClockMhz();
  state.throttle_reasons = ThrottleReasons();
  return state;
}

absl::StatusOr<std::vector<uint32_t>> NvmlDevice::ComputeProcesses() const {
  std::vector<ProcessInfo> infos(64);
  for (;;) {
    auto count = static_cast<unsigned>(infos.size());
    const NvmlResult result = Opened().nvmlDeviceGetComputeRunningProcesses_v3(
        handle_, &count, infos.data());
    if (result == kInsufficientSize && infos.size() < kProcessesMax) {
      infos.resize(2 * infos.size());
      continue;
    }
    if (result != kSuccess) {
      return absl::UnavailableError(absl::StrCat(
          "NVML does not tell who computes on the GPU: code ", result));
    }
    std::vector<uint32_t> processes;
    for (unsigned i = 0; i < count && i < infos.size(); ++i) {
      processes.push_back(infos[i].pid);
    }
    return processes;
  }
}

absl::StatusOr<NvmlDevice> FindNvmlDevice(absl::string_view pci_bus_id) {
  ASSIGN_OR_RETURN(const Library* library, OpenLibrary());
  const std::string address(pci_bus_id);
  NvmlHandle* handle = nullptr;
  const NvmlResult result =
      library->nvmlDeviceGetHandleByPciBusId_v2(address.c_str(), &handle);
  if (result != kSuccess) {
    return absl::NotFoundError(absl::StrCat("NVML does not know the GPU at ",
                                            address, ": code ", result));
  }
  return NvmlDevice(handle);
}

absl::StatusOr<std::string> NvmlVersion() {
  ASSIGN_OR_RETURN(const Library* library, OpenLibrary());
  std::array<char, 128> version{};
  const NvmlResult result = library->nvmlSystemGetNVMLVersion(
      version.data(), static_cast<unsigned>(version.size() - 1));
  if (result != kSuccess) {
    return absl::FailedPreconditionError(
        absl::StrCat("NVML does not tell its version: code ", result));
  }
  return std::string(version.data());
}

}  // namespace kiln
