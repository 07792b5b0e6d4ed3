// Nvml: what NVIDIA's management library says about the GPUs of this machine,
// clocks and throttling above all. The library is opened at run time; without
// it a race still works and only knows less.
// Source: NVML API reference 13.0.

#ifndef KILN_TUNER_NVML_H_
#define KILN_TUNER_NVML_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kiln {

struct NvmlHandle;

// Bits of GpuState::throttle_reasons.
inline constexpr uint64_t kThrottleIdle = 0x1;
inline constexpr uint64_t kThrottleApplicationClocks = 0x2;
inline constexpr uint64_t kThrottlePowerCap = 0x4;
inline constexpr uint64_t kThrottleHardwareSlowdown = 0x8;
inline constexpr uint64_t kThrottleSyncBoost = 0x10;
inline constexpr uint64_t kThrottleThermalSoftware = 0x20;
inline constexpr uint64_t kThrottleThermalHardware = 0x40;
inline constexpr uint64_t kThrottlePowerBrake = 0x80;
inline constexpr uint64_t kThrottleDisplayClocks = 0x100;

// "power cap, thermal (hardware)"; "none" without a bit.
std::string ThrottleText(uint64_t reasons);

// What a GPU does now. -1 where the GPU does not tell, as slices of a GPU do.
struct GpuState {
  int sm_clock_mhz = -1;
  int sm_clock_max_mhz = -1;
  int memory_clock_mhz = -1;
  int temperature_c = -1;
  int power_mw = -1;
  uint64_t throttle_reasons = 0;
};

// One GPU. Copyable; valid for the life of the process. Calls are thread-safe.
class NvmlDevice {
 public:
  NvmlDevice() = default;

  GpuState State() const;

  // Clock and throttling alone, for use between timed blocks: two calls of some
  // microseconds each.
  int SmClockMhz() const;
  uint64_t ThrottleReasons() const;

  // Process ids, as the host of a container numbers them, that have a compute
  // context on the GPU.
  //   Errors: Unavailable where the library does not tell.
  absl::StatusOr<std::vector<uint32_t>> ComputeProcesses() const;

 private:
  friend absl::StatusOr<NvmlDevice> FindNvmlDevice(absl::string_view);

  explicit NvmlDevice(NvmlHandle* handle) : handle_(handle) {}

  NvmlHandle* handle_ = nullptr;
};

// The GPU at a PCI address as the CUDA driver writes it, "0000:18:00.0".
//   Errors: Unavailable without the library, FailedPrecondition when it refuses
//   to start, NotFound for an address that it does not know.
absl::StatusOr<NvmlDevice> FindNvmlDevice(absl::string_view pci_bus_id);

// Version of the library, "13.580.82.07".
//   Errors: those of FindNvmlDevice.
absl::StatusOr<std::string> NvmlVersion();

}  // namespace kiln

#endif  // KILN_TUNER_NVML_H_
