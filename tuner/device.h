// Device: the memory and the clock that a race needs. Kernels are launched
// through the runtime's C ABI only; nothing here launches one.

#ifndef KILN_TUNER_DEVICE_H_
#define KILN_TUNER_DEVICE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compiler/spec/device_profile.h"
#include "tuner/launch_watch.h"

struct CUctx_st;
struct CUstream_st;

namespace kiln {

// A recorded sequence of launches that can be run and timed again.
class Replay {
 public:
  virtual ~Replay();
  // Runs the sequence once and returns its duration in nanoseconds. Work
  // enqueued before is finished first.
  virtual absl::StatusOr<double> Run() = 0;
};

inline constexpr uint64_t kPageBytes = 4096;

// What a device says about its speed.
struct ClockState {
  uint32_t mhz = 0;  // of the multiprocessors
  // Set while heat or the power supply slows it down, as the driver's bits. A
  // power limit is none of these: it holds steadily under load.
  uint64_t throttle = 0;
};

// One device. Not thread-safe; every call waits for its own completion unless
// it says otherwise. Errors are Internal with the driver's own name and text;
// after one the device may be unusable.
class Device {
 public:
  virtual ~Device();

  virtual const DeviceProfile& profile() const = 0;

  // Told of everything that waits for a kernel; null, the default, is nobody.
  // Must outlive the device.
  void set_watch(LaunchWatch* watch) { watch_ = watch; }

  LaunchWatch* watch() const { return watch_; }

  // What kiln_modules_load and kiln_launch need; null on the CPU.
  virtual CUctx_st* context() const = 0;
  virtual CUstream_st* stream() const = 0;

  // `bytes` of device memory, 256-byte aligned. Use DeviceBuffer instead.
  //   Errors: ResourceExhausted, naming the size.
  virtual absl::StatusOr<void*> Allocate(uint64_t bytes) = 0;
  // Whether memory of whole pages (kPageBytes) lies between inaccessible ones,
  // so that a program which leaves it ends at once.
  virtual bool fences() const = 0;
  virtual void Free(void* memory) = 0;

  virtual absl::Status CopyIn(void* to, const void* from, uint64_t bytes) = 0;
  virtual absl::Status CopyOut(void* to, const void* from, uint64_t bytes) = 0;
  virtual absl::Status Fill(void* to, uint8_t value, uint64_t bytes) = 0;
  virtual absl::Status Synchronize() = 0;

  // Absent when the device does not say: the CPU, a GPU without NVML.
  virtual std::optional<ClockState> ReadClocks() { return std::nullopt; }

  // Records what `launches` enqueues on stream(). CUDA: stream capture; the
  // replay is one graph launch between two events, behind a gate that opens
  // when all three are enqueued, so that no time of the host is measured. CPU:
  // the function itself is run and timed by the monotonic clock.
  virtual absl::StatusOr<std::unique_ptr<Replay>> Record(
      std::function<absl::Status()> launches) = 0;

 private:
  LaunchWatch* watch_ = nullptr;
};

// Owned device memory. Movable; freed on destruction, before the device.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  static absl::StatusOr<DeviceBuffer> Allocate(Device* device, uint64_t bytes);
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer();

  void* data() const { return data_; }

  uint64_t bytes() const { return bytes_; }

 private:
  Device* device_ = nullptr;
  void* data_ = nullptr;
  uint64_t bytes_ = 0;
};

// This machine's processor as a device for `target`.
absl::StatusOr<std::unique_ptr<Device>> OpenCpuDevice(const Target& target);

// The GPU with the driver's number `ordinal`, on its primary context.
//   target: one that the device runs; its profile then names it. Absent: the
//   architecture-specific one.
//   Errors: FailedPrecondition when there is no driver, no such device, or the
//   device does not run the target.
absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(
    int ordinal, const std::optional<Target>& target = std::nullopt);

// Profiles of all GPUs, by ordinal; empty without a driver or a device. The
// profiles' target is the architecture-specific one where it exists (sm_90a).
std::vector<DeviceProfile> ListCudaDevices();

// Copy of `profile` for a target that the same device runs, such as sm_90 on a
// device that reports sm_90a. FailedPrecondition when it does not.
absl::StatusOr<DeviceProfile> ProfileForTarget(const DeviceProfile& profile,
                                               const Target& target);

}  // namespace kiln

#endif  // KILN_TUNER_DEVICE_H_
