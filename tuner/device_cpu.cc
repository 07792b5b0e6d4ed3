// This machine's processor as a Device.

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/plan.h"
#include "tuner/device.h"

namespace kiln {
namespace {

class CpuReplay : public Replay {
 public:
  explicit CpuReplay(std::function<absl::Status()> launches)
      : launches_(std::move(launches)) {}

  absl::StatusOr<double> Run() override {
    const auto begin = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(launches_());
    const auto end = std::chrono::steady_clock::now();
    return std::chrono::duration<double, std::nano>(end - begin).count();
  }

 private:
  std::function<absl::Status()> launches_;
};

class CpuDevice : public Device {
 public:
  explicit CpuDevice(DeviceProfile profile) : profile_(std::move(profile)) {}

  const DeviceProfile& profile() const override { return profile_; }

  CUctx_st* context() const override { return nullptr; }

  CUstream_st* stream() const override { return nullptr; }

  absl::StatusOr<void*> Allocate(uint64_t bytes) override {
    const uint64_t rounded =
        (bytes + kArenaAlignment) / kArenaAlignment * kArenaAlignment;
    void* memory = std::aligned_alloc(kArenaAlignment, rounded);
    if (memory == nullptr) {
      return absl::ResourceExhaustedError(
          absl::StrCat("cannot allocate ", bytes, " bytes of memory"));
    }
    return memory;
  }

  void Free(void* memory) override { std::free(memory); }

  absl::Status CopyIn(void* to, const void* from, uint64_t bytes) override {
    if (bytes != 0) std::memcpy(to, from, bytes);
    return absl::OkStatus();
  }

  absl::Status CopyOut(void* to, const void* from, uint64_t bytes) override {
    return CopyIn(to, from, bytes);
  }

  absl::Status Fill(void* to, uint8_t value, uint64_t bytes) override {
    if (bytes != 0) std::memset(to, value, bytes);
    return absl::OkStatus();
  }

  absl::Status Synchronize() override { return absl::OkStatus(); }

  absl::StatusOr<std::unique_ptr<Replay>> Record(
      std::function<absl::Status()> launches) override {
    return std::unique_ptr<Replay>(
        std::make_unique<CpuReplay>(std::move(launches)));
  }

 private:
  DeviceProfile profile_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> OpenCpuDevice(const Target& target) {
  ASSIGN_OR_RETURN(DeviceProfile profile, HostCpuProfile(target));
  return std::unique_ptr<Device>(
      std::make_unique<CpuDevice>(std::move(profile)));
}

}  // namespace kiln
