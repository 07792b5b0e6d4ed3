#include "tuner/device_lock.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

constexpr int kBacklog = 128;

struct Address {
  sockaddr_un un{};
  socklen_t bytes = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&un); }
};

// An abstract name starts with a zero byte and ends with the length.
Address AddressOf(const std::string& name) {
  Address address;
  address.un.sun_family = AF_UNIX;
  const std::string full = absl::StrCat("kiln-race/", name);
  const size_t length = std::min(full.size(), sizeof(address.un.sun_path) - 1);
  std::copy_n(full.data(), length, address.un.sun_path + 1);
  address.bytes =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return address;
}

}  // namespace

std::string DeviceLockName(const DeviceProfile& profile) {
  return profile.target.backend == Backend::kCpu ? "cpu" : profile.uuid;
}

absl::StatusOr<std::optional<DeviceLock>> DeviceLock::TryAcquire(
    const std::string& name) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return ErrnoStatus(errno, "cannot create a socket to lock", name);
  DeviceLock lock(fd);
  const Address address = AddressOf(name);
  if (bind(fd, address.get(), address.bytes) != 0) {
    if (errno == EADDRINUSE) return std::optional<DeviceLock>();
    return ErrnoStatus(errno, "cannot lock device", name);
  }
  // So that others can ask who holds it.
  if (listen(fd, kBacklog) != 0) {
    return ErrnoStatus(errno, "cannot lock device", name);
  }
  return std::optional<DeviceLock>(std::move(lock));
}

std::optional<int> DeviceLock::Holder(const std::string& name) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return std::nullopt;
  const DeviceLock closer(fd);
  const Address address = AddressOf(name);
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (connect(fd, address.get(), address.bytes) != 0 ||
      getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0 ||
      peer.pid <= 0) {
    return std::nullopt;
  }
  return peer.pid;
}

DeviceLock::DeviceLock(DeviceLock&& other) noexcept
    : socket_(std::exchange(other.socket_, -1)) {}

DeviceLock& DeviceLock::operator=(DeviceLock&& other) noexcept {
  std::swap(socket_, other.socket_);
  return *this;
}

DeviceLock::~DeviceLock() {
  if (socket_ >= 0) close(socket_);
}

}  // namespace kiln
