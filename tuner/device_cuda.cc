// An NVIDIA GPU as a Device: memory, stream, events and graphs of the CUDA
// Driver API, opened at run time so that one binary works with and without a
// driver. Prototypes are declared here: building needs no toolkit.
// Source: CUDA Driver API reference 13.0.

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "tuner/device.h"
#include "tuner/nvml.h"

namespace kiln {
namespace {

using CuResult = int;
using CuDevice = int;
using CuAddress = unsigned long long;
using CuEvent = void*;
using CuGraph = void*;
using CuGraphExec = void*;
using CuUuid = std::array<char, 16>;  // CUuuid is a struct of one char[16]

constexpr int kAttributeThreadsPerBlock = 1;
constexpr int kAttributeMultiprocessors = 16;
constexpr int kAttributeL2Bytes = 38;
constexpr int kAttributeMajor = 75;
constexpr int kAttributeMinor = 76;
constexpr int kAttributeSharedPerSm = 81;
constexpr int kAttributeRegistersPerSm = 82;
constexpr int kAttributeSharedOptin = 97;
constexpr uint64_t kPinnedBytes = 4u << 20;
constexpr unsigned kStreamNonBlocking = 1;
constexpr int kCaptureThreadLocal = 1;

// Symbol, and parameters of the function.
#define KILN_CUDA_SYMBOLS(X)                                                  \
  X(cuInit, (unsigned))                                                       \
  X(cuDriverGetVersion, (int*))                                               \
  X(cuGetErrorName, (CuResult, const char**))                                 \
  X(cuGetErrorString, (CuResult, const char**))                               \
  X(cuDeviceGetCount, (int*))                                                 \
  X(cuDeviceGet, (CuDevice*, int))                                            \
  X(cuDeviceGetName, (char*, int, CuDevice))                                  \
  X(cuDeviceGetAttribute, (int*, int, CuDevice))                              \
  X(cuDeviceTotalMem_v2, (size_t*, CuDevice))                                 \
  X(cuDeviceGetPCIBusId, (char*, int, CuDevice))                              \
  X(cuDeviceGetUuid_v2, (CuUuid*, CuDevice))                                  \
  X(cuDevicePrimaryCtxRetain, (CUctx_st**, CuDevice))                         \
  X(cuDevicePrimaryCtxRelease_v2, (CuDevice))                                 \
  X(cuCtxSetCurrent, (CUctx_st*))                                             \
  X(cuMemAlloc_v2, (CuAddress*, size_t))                                      \
  X(cuMemFree_v2, (CuAddress))                                                \
  X(cuMemAllocHost_v2, (void**, size_t))                                      \
  X(cuMemFreeHost, (void*))                                                   \
  X(cuMemcpyHtoDAsync_v2, (CuAddress, const void*, size_t, CUstream_st*))     \
  X(cuMemcpyDtoHAsync_v2, (void*, CuAddress, size_t, CUstream_st*))           \
  X(cuMemsetD8Async, (CuAddress, unsigned char, size_t, CUstream_st*))        \
  X(cuStreamCreate, (CUstream_st**, unsigned))                                \
  X(cuStreamDestroy_v2, (CUstream_st*))                                       \
  X(cuStreamSynchronize, (CUstream_st*))                                      \
  X(cuStreamBeginCapture_v2, (CUstream_st*, int))                             \
  X(cuStreamEndCapture, (CUstream_st*, CuGraph*))                             \
  X(cuGraphInstantiateWithFlags, (CuGraphExec*, CuGraph, unsigned long long)) \
  X(cuGraphUpload, (CuGraphExec, CUstream_st*))                               \
  X(cuGraphLaunch, (CuGraphExec, CUstream_st*))                               \
  X(cuGraphExecDestroy, (CuGraphExec))                                        \
  X(cuGraphDestroy, (CuGraph))                                                \
  X(cuEventCreate, (CuEvent*, unsigned))                                      \
  X(cuEventRecord, (CuEvent, CUstream_st*))                                   \
  X(cuEventQuery, (CuEvent))                                                  \
  X(cuLaunchHostFunc, (CUstream_st*, void (*)(void*), void*))                 \
  X(cuEventElapsedTime, (float*, CuEvent, CuEvent))                           \
  X(cuEventDestroy_v2, (CuEvent))

struct Driver {
#define KILN_DECLARE(name, parameters) CuResult(*name) parameters = nullptr;
  KILN_CUDA_SYMBOLS(KILN_DECLARE)
#undef KILN_DECLARE
};

// The driver, all symbols or none; kept open for the life of the process.
absl::StatusOr<const Driver*> OpenDriver() {
  static std::once_flag once;
  static Driver driver;
  static absl::Status status;
  std::call_once(once, [] {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      status = absl::FailedPreconditionError(
          "no CUDA driver: libcuda.so.1 is not installed on this machine");
      return;
    }
#define KILN_RESOLVE(name, parameters)                                         \
  driver.name =                                                                \
      reinterpret_cast<CuResult(*) parameters>(dlsym(library, #name));         \
  if (driver.name == nullptr && status.ok()) {                                 \
    status = absl::FailedPreconditionError("libcuda.so.1 lacks " #name         \
                                           "; a driver of CUDA 12.4 or later " \
                                           "is needed");                       \
  }
    KILN_CUDA_SYMBOLS(KILN_RESOLVE)
#undef KILN_RESOLVE
    if (!status.ok()) return;
    const CuResult result = driver.cuInit(0);
    if (result != 0) {
      const char* name = nullptr;
      driver.cuGetErrorName(result, &name);
      status = absl::FailedPreconditionError(absl::StrCat(
          "cuInit: ", name != nullptr ? name : absl::StrCat(result),
          "; no usable GPU"));
    }
  });
  if (!status.ok()) return status;
  return &driver;
}

absl::Status Check(const Driver& driver, CuResult result,
                   absl::string_view call) {
  if (result == 0) return absl::OkStatus();
  const char* name = nullptr;
  const char* text = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &text);
  const std::string message =
      absl::StrCat(call, ": ", name != nullptr ? name : "unknown error", " (",
                   result, "): ", text != nullptr ? text : "");
  constexpr CuResult kOutOfMemory = 2;
  return result == kOutOfMemory ? absl::ResourceExhaustedError(message)
                                : absl::InternalError(message);
}

#define KILN_CUDA(call, ...) \
  RETURN_IF_ERROR(Check(driver_, driver_.call(__VA_ARGS__), #call))

CuAddress Address(const void* pointer) {
  return reinterpret_cast<CuAddress>(pointer);
}

absl::StatusOr<DeviceProfile> ReadProfile(const Driver& driver_,
                                          CuDevice device) {
  DeviceProfile profile;
  std::array<char, 256> name{};
  KILN_CUDA(cuDeviceGetName, name.data(), static_cast<int>(name.size() - 1),
            device);
  profile.name = name.data();
  KILN_CUDA(cuDeviceGetPCIBusId, name.data(), static_cast<int>(name.size() - 1),
            device);
  profile.pci_bus_id = name.data();
  CuUuid uuid{};
  KILN_CUDA(cuDeviceGetUuid_v2, &uuid, device);
  profile.uuid =
      absl::BytesToHexString(absl::string_view(uuid.data(), uuid.size()));
  const auto attribute = [&](int which) -> absl::StatusOr<int> {
    int value = 0;
    KILN_CUDA(cuDeviceGetAttribute, &value, which, device);
    return value;
  };
  ASSIGN_OR_RETURN(const int major, attribute(kAttributeMajor));
  ASSIGN_OR_RETURN(const int minor, attribute(kAttributeMinor));
  ASSIGN_OR_RETURN(profile.multiprocessors,
                   attribute(kAttributeMultiprocessors));
  ASSIGN_OR_RETURN(profile.l2_bytes, attribute(kAttributeL2Bytes));
  ASSIGN_OR_RETURN(profile.shared_bytes_max, attribute(kAttributeSharedOptin));
  ASSIGN_OR_RETURN(profile.shared_bytes_per_sm,
                   attribute(kAttributeSharedPerSm));
  ASSIGN_OR_RETURN(profile.registers_per_sm,
                   attribute(kAttributeRegistersPerSm));
  ASSIGN_OR_RETURN(profile.threads_per_block_max,
                   attribute(kAttributeThreadsPerBlock));
  size_t memory = 0;
  KILN_CUDA(cuDeviceTotalMem_v2, &memory, device);
  // Boards of one kind differ by the megabytes that firmware keeps.
  constexpr size_t kClass = size_t{16} << 30;
  profile.memory_gib = static_cast<int>((memory + kClass - 1) / kClass * 16);
  KILN_CUDA(cuDriverGetVersion, &profile.driver_version);
  profile.compute_capability = major * 10 + minor;
  profile.target = {.backend = Backend::kCuda,
                    .level = profile.compute_capability,
                    .arch_specific = profile.compute_capability >= 90};
  // The driver names a slice like "NVIDIA H200 MIG 1g.18gb".
  const size_t mig = profile.name.find(" MIG ");
  if (mig != std::string::npos) profile.mig = profile.name.substr(mig + 5);
  return profile;
}

// Holds a stream back until the host has enqueued everything behind it. What is
// timed then starts when the one before it ends, not when the host gets to it.
class StreamGate {
 public:
  StreamGate() = default;

  // Opens: a stream that is held for ever would hang whoever waits for it.
  ~StreamGate() { Open(); }

  StreamGate(const StreamGate&) = delete;
  StreamGate& operator=(const StreamGate&) = delete;

  absl::Status Close(const Driver& driver_, CUstream_st* stream) {
    KILN_CUDA(cuLaunchHostFunc, stream, &StreamGate::Hold, this);
    closed_ = true;
    return absl::OkStatus();
  }

  // Opens, and waits until the stream has passed: the gate may go away then.
  void Open() {
    if (!std::exchange(closed_, false)) return;
    open_.store(true, std::memory_order_release);
    while (!passed_.load(std::memory_order_acquire)) std::this_thread::yield();
  }

 private:
  // Runs on a thread of the driver, in the stream's order.
  static void Hold(void* self) {
    auto* gate = static_cast<StreamGate*>(self);
    while (!gate->open_.load(std::memory_order_acquire)) {
      std::this_thread::yield();
    }
    gate->passed_.store(true, std::memory_order_release);
  }

  bool closed_ = false;
  std::atomic<bool> open_ = false;
  std::atomic<bool> passed_ = false;
};

class CudaReplay : public Replay {
 public:
  CudaReplay(const Driver& driver, CUstream_st* stream, LaunchWatch* watch)
      : driver_(driver), stream_(stream), watch_(watch) {}

  ~CudaReplay() override {
    if (exec_ != nullptr) driver_.cuGraphExecDestroy(exec_);
    if (graph_ != nullptr) driver_.cuGraphDestroy(graph_);
    if (begin_ != nullptr) driver_.cuEventDestroy_v2(begin_);
    if (end_ != nullptr) driver_.cuEventDestroy_v2(end_);
  }

  CudaReplay(const CudaReplay&) = delete;
  CudaReplay& operator=(const CudaReplay&) = delete;

  absl::Status Capture(const std::function<absl::Status()>& launches) {
    KILN_CUDA(cuEventCreate, &begin_, 0);
    KILN_CUDA(cuEventCreate, &end_, 0);
    KILN_CUDA(cuStreamBeginCapture_v2, stream_, kCaptureThreadLocal);
    const absl::Status launched = launches();
    // The capture must end either way, or the stream stays unusable.
    const CuResult ended = driver_.cuStreamEndCapture(stream_, &graph_);
    RETURN_IF_ERROR(launched);
    RETURN_IF_ERROR(Check(driver_, ended, "cuStreamEndCapture"));
    KILN_CUDA(cuGraphInstantiateWithFlags, &exec_, graph_, 0);
    KILN_CUDA(cuGraphUpload, exec_, stream_);
    KILN_CUDA(cuStreamSynchronize, stream_);
    return absl::OkStatus();
  }

  absl::StatusOr<double> Run() override {
    const RunningLaunch running(watch_);
    KILN_CUDA(cuStreamSynchronize, stream_);
    {
      StreamGate gate;
      RETURN_IF_ERROR(gate.Close(driver_, stream_));
      KILN_CUDA(cuEventRecord, begin_, stream_);
      KILN_CUDA(cuGraphLaunch, exec_, stream_);
      KILN_CUDA(cuEventRecord, end_, stream_);
      // The sample is one only if nothing of it ran while the host enqueued.
      constexpr CuResult kNotReady = 600;
      const CuResult begun = driver_.cuEventQuery(begin_);
      if (begun != kNotReady) {
        RETURN_IF_ERROR(Check(driver_, begun, "cuEventQuery"));
        return absl::InternalError(
            "the stream ran past a closed gate: times would include the host");
      }
    }
    KILN_CUDA(cuStreamSynchronize, stream_);
    float milliseconds = 0;
    KILN_CUDA(cuEventElapsedTime, &milliseconds, begin_, end_);
    return static_cast<double>(milliseconds) * 1e6;
  }

 private:
  const Driver& driver_;
  CUstream_st* stream_;
  LaunchWatch* watch_;
  CuGraph graph_ = nullptr;
  CuGraphExec exec_ = nullptr;
  CuEvent begin_ = nullptr;
  CuEvent end_ = nullptr;
};

class CudaDevice : public Device {
 public:
  explicit CudaDevice(const Driver& driver) : driver_(driver) {}

  ~CudaDevice() override {
    if (stream_ != nullptr) driver_.cuStreamDestroy_v2(stream_);
    for (void* half : pinned_) {
      if (half != nullptr) driver_.cuMemFreeHost(half);
    }
    if (context_ != nullptr) driver_.cuDevicePrimaryCtxRelease_v2(device_);
  }

  absl::Status Open(int ordinal, const std::optional<Target>& target) {
    int count = 0;
    KILN_CUDA(cuDeviceGetCount, &count);
    if (ordinal < 0 || ordinal >= count) {
      return absl::FailedPreconditionError(
          absl::StrCat("GPU ", ordinal, " does not exist: the driver lists ",
                       count, " (0..", count - 1, ")"));
    }
    KILN_CUDA(cuDeviceGet, &device_, ordinal);
    ASSIGN_OR_RETURN(profile_, ReadProfile(driver_, device_));
    if (target.has_value()) {
      ASSIGN_OR_RETURN(profile_, ProfileForTarget(profile_, *target));
    }
    nvml_ = FindNvmlDevice(profile_.pci_bus_id);
    KILN_CUDA(cuDevicePrimaryCtxRetain, &context_, device_);
    KILN_CUDA(cuCtxSetCurrent, context_);
    KILN_CUDA(cuStreamCreate, &stream_, kStreamNonBlocking);
    for (void*& half : pinned_) {
      KILN_CUDA(cuMemAllocHost_v2, &half, kPinnedBytes);
    }
    return absl::OkStatus();
  }

  const DeviceProfile& profile() const override { return profile_; }

  CUctx_st* context() const override { return context_; }

  CUstream_st* stream() const override { return stream_; }

  bool fences() const override { return false; }

  absl::StatusOr<void*> Allocate(uint64_t bytes) override {
    CuAddress address = 0;
    const absl::Status status =
        Check(driver_, driver_.cuMemAlloc_v2(&address, bytes != 0 ? bytes : 1),
              "cuMemAlloc");
    if (!status.ok()) {
      return Annotate(status, absl::StrCat("allocating ", bytes, " bytes"));
    }
    return reinterpret_cast<void*>(address);
  }

  void Free(void* memory) override { driver_.cuMemFree_v2(Address(memory)); }

  absl::Status CopyIn(void* to, const void* from, uint64_t bytes) override {
    if (bytes == 0) return absl::OkStatus();
    KILN_CUDA(cuMemcpyHtoDAsync_v2, Address(to), from, bytes, stream_);
    return Synchronize();
  }

  // By way of pinned memory, which the device writes several times faster than
  // pages that may move: one half fills while the other is emptied.
  absl::Status CopyOut(void* to, const void* from, uint64_t bytes) override {
    uint64_t arrived = 0;
    uint64_t asked = 0;
    size_t half = 0;
    const auto ask = [&]() -> absl::Status {
      const uint64_t count = std::min(kPinnedBytes, bytes - asked);
      if (count == 0) return absl::OkStatus();
      KILN_CUDA(cuMemcpyDtoHAsync_v2, pinned_[half],
                Address(static_cast<const char*>(from) + asked), count,
                stream_);
      asked += count;
      half = 1 - half;
      return absl::OkStatus();
    };
    RETURN_IF_ERROR(ask());
    while (arrived < bytes) {
      RETURN_IF_ERROR(Synchronize());
      const uint64_t count = asked - arrived;
      const void* filled = pinned_[1 - half];
      RETURN_IF_ERROR(ask());
      std::memcpy(static_cast<char*>(to) + arrived, filled, count);
      arrived += count;
    }
    return absl::OkStatus();
  }

  absl::Status Fill(void* to, uint8_t value, uint64_t bytes) override {
    if (bytes == 0) return absl::OkStatus();
    KILN_CUDA(cuMemsetD8Async, Address(to), value, bytes, stream_);
    return Synchronize();
  }

  absl::Status Synchronize() override {
    const RunningLaunch running(watch());
    KILN_CUDA(cuStreamSynchronize, stream_);
    return absl::OkStatus();
  }

  std::optional<ClockState> ReadClocks() override {
    constexpr uint64_t kSlowed = kThrottleHardwareSlowdown |
                                 kThrottleThermalSoftware |
                                 kThrottleThermalHardware | kThrottlePowerBrake;
    if (!nvml_.ok()) return std::nullopt;
    const int mhz = nvml_->SmClockMhz();
    if (mhz <= 0) return std::nullopt;
    return ClockState{.mhz = static_cast<uint32_t>(mhz),
                      .throttle = nvml_->ThrottleReasons() & kSlowed};
  }

  absl::StatusOr<std::unique_ptr<Replay>> Record(
      std::function<absl::Status()> launches) override {
    auto replay = std::make_unique<CudaReplay>(driver_, stream_, watch());
    RETURN_IF_ERROR(replay->Capture(launches));
    return std::unique_ptr<Replay>(std::move(replay));
  }

 private:
  // Its clocks; an error where the library does not tell.
  absl::StatusOr<NvmlDevice> nvml_ = absl::UnavailableError("not opened");
  const Driver& driver_;
  CuDevice device_ = 0;
  CUctx_st* context_ = nullptr;
  CUstream_st* stream_ = nullptr;
  std::array<void*, 2> pinned_ = {};  // kPinnedBytes each
  DeviceProfile profile_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(
    int ordinal, const std::optional<Target>& target) {
  ASSIGN_OR_RETURN(const Driver* driver, OpenDriver());
  auto device = std::make_unique<CudaDevice>(*driver);
  RETURN_IF_ERROR(device->Open(ordinal, target));
  return std::unique_ptr<Device>(std::move(device));
}

std::vector<DeviceProfile> ListCudaDevices() {
  std::vector<DeviceProfile> profiles;
  const absl::StatusOr<const Driver*> driver = OpenDriver();
  int count = 0;
  if (!driver.ok() || (*driver)->cuDeviceGetCount(&count) != 0) {
    return profiles;
  }
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CuDevice device = 0;
    if ((*driver)->cuDeviceGet(&device, ordinal) != 0) continue;
    absl::StatusOr<DeviceProfile> profile = ReadProfile(**driver, device);
    if (profile.ok()) profiles.push_back(*std::move(profile));
  }
  return profiles;
}

}  // namespace kiln
