// DeviceLock: at most one race at a time on a device of this machine, whatever
// caches and users the races belong to.

#ifndef KILN_TUNER_DEVICE_LOCK_H_
#define KILN_TUNER_DEVICE_LOCK_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "compiler/spec/device_profile.h"

namespace kiln {

// What is locked: a GPU or a slice of one; all processors together.
std::string DeviceLockName(const DeviceProfile& profile);

// Held while the object lives, and given up with the process however it ends:
// the lock is a name in the kernel's abstract socket space, so there is no file
// that could stay behind, belong to another user or lie in another cache.
// Containers with networks of their own do not see each other's locks.
class DeviceLock {
 public:
  // The lock, or nullopt when somebody holds it.
  //   Errors: of the system.
  static absl::StatusOr<std::optional<DeviceLock>> TryAcquire(
      const std::string& name);

  // Process id of the holder of `name`; nullopt when there is none or it cannot
  // be told.
  static std::optional<int> Holder(const std::string& name);

  DeviceLock(DeviceLock&& other) noexcept;
  DeviceLock& operator=(DeviceLock&& other) noexcept;
  ~DeviceLock();

 private:
  explicit DeviceLock(int socket) : socket_(socket) {}

  int socket_;
};

}  // namespace kiln

#endif  // KILN_TUNER_DEVICE_LOCK_H_
