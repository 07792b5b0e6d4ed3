#include "tuner/device.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"

namespace kiln {

Replay::~Replay() = default;
Device::~Device() = default;

absl::StatusOr<DeviceBuffer> DeviceBuffer::Allocate(Device* device,
                                                    uint64_t bytes) {
  DeviceBuffer buffer;
  ASSIGN_OR_RETURN(buffer.data_, device->Allocate(bytes));
  buffer.device_ = device;
  buffer.bytes_ = bytes;
  return buffer;
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : device_(std::exchange(other.device_, nullptr)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ != nullptr) device_->Free(data_);
}

absl::StatusOr<DeviceProfile> ProfileForTarget(const DeviceProfile& profile,
                                               const Target& target) {
  if (target.backend != profile.target.backend ||
      target.level != profile.target.level) {
    return absl::FailedPreconditionError(
        absl::StrCat("target ", target.ToString(), " cannot run on ",
                     profile.name, " (", profile.target.ToString(), ")"));
  }
  DeviceProfile result = profile;
  result.target = target;
  return result;
}

}  // namespace kiln
