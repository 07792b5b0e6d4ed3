// This machine's processor as a Device.

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/available_memory.h"
#include "compiler/base/status_macros.h"
#include "tuner/device.h"

namespace kiln {
namespace {

constexpr uint64_t kFenceBytes = uint64_t{64} << 20;

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

  // Whole pages with address space around them that faults when it is touched:
  // enough for the weights of a neighbouring expert.
  absl::StatusOr<void*> Allocate(uint64_t bytes) override {
    RETURN_IF_ERROR(CheckMemoryFor("a buffer of a launch", bytes));
    const uint64_t usable =
        std::max<uint64_t>(1, (bytes + kPageBytes - 1) / kPageBytes) *
        kPageBytes;
    const uint64_t all = usable + 2 * kFenceBytes;
    void* const fenced =
        mmap(nullptr, all, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    const auto exhausted = [bytes, all] {
      return absl::ResourceExhaustedError(absl::StrCat(
          "cannot allocate ", bytes, " bytes of memory in ", all,
          " bytes of address space, which catch accesses beside them; the "
          "system, or the limit of the process (ulimit -v), gives no more"));
    };
    if (fenced == MAP_FAILED) return exhausted();
    void* const memory = static_cast<char*>(fenced) + kFenceBytes;
    if (mprotect(memory, usable, PROT_READ | PROT_WRITE) != 0) {
      munmap(fenced, all);
      return exhausted();
    }
    mapped_[memory] = usable;
    return memory;
  }

  void Free(void* memory) override {
    const auto it = mapped_.find(memory);
    if (it == mapped_.end()) return;
    munmap(static_cast<char*>(memory) - kFenceBytes,
           it->second + 2 * kFenceBytes);
    mapped_.erase(it);
  }

  bool fences() const override { return true; }

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
  std::map<void*, uint64_t> mapped_;  // usable bytes
};

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> OpenCpuDevice(const Target& target) {
  ASSIGN_OR_RETURN(DeviceProfile profile, HostCpuProfile(target));
  return std::unique_ptr<Device>(
      std::make_unique<CpuDevice>(std::move(profile)));
}

}  // namespace kiln
