#include "tuner/device_lock.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

std::string Name(const char* test) {
  return absl::StrCat("test-", getpid(), "-", test);
}

TEST(DeviceLockTest, IsHeldOnceAndGivenUpWithTheObject) {
  const std::string name = Name("once");
  EXPECT_EQ(DeviceLock::Holder(name), std::nullopt);
  {
    ASSERT_OK_AND_ASSIGN(std::optional<DeviceLock> first,
                         DeviceLock::TryAcquire(name));
    ASSERT_TRUE(first.has_value());
    ASSERT_OK_AND_ASSIGN(std::optional<DeviceLock> second,
                         DeviceLock::TryAcquire(name));
    EXPECT_FALSE(second.has_value());
    EXPECT_EQ(DeviceLock::Holder(name), getpid());
    ASSERT_OK_AND_ASSIGN(std::optional<DeviceLock> other,
                         DeviceLock::TryAcquire(Name("other")));
    EXPECT_TRUE(other.has_value()) << "another device";
    // Moving keeps it held.
    const DeviceLock moved = *std::move(first);
    first.reset();
    ASSERT_OK_AND_ASSIGN(second, DeviceLock::TryAcquire(name));
    EXPECT_FALSE(second.has_value());
  }
  ASSERT_OK_AND_ASSIGN(std::optional<DeviceLock> again,
                       DeviceLock::TryAcquire(name));
  EXPECT_TRUE(again.has_value());
}

TEST(DeviceLockTest, AHolderThatIsKilledGivesItUp) {
  const std::string name = Name("killed");
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto lock = DeviceLock::TryAcquire(name);
    const char held = lock.ok() && lock->has_value() ? 'y' : 'n';
    if (write(ready[1], &held, 1) == 1) pause();
    _exit(0);
  }
  ASSERT_GT(child, 0);
  char held = 0;
  ASSERT_EQ(read(ready[0], &held, 1), 1);
  EXPECT_EQ(held, 'y');
  ASSERT_OK_AND_ASSIGN(std::optional<DeviceLock> lock,
                       DeviceLock::TryAcquire(name));
  EXPECT_FALSE(lock.has_value());
  EXPECT_EQ(DeviceLock::Holder(name), child);
  kill(child, SIGKILL);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  ASSERT_OK_AND_ASSIGN(lock, DeviceLock::TryAcquire(name));
  EXPECT_TRUE(lock.has_value());
  close(ready[0]);
  close(ready[1]);
}

TEST(DeviceLockTest, DevicesHaveNamesOfTheirOwn) {
  DeviceProfile gpu;
  gpu.target = {.backend = Backend::kCuda, .level = 90, .arch_specific = true};
  gpu.uuid = "00112233445566778899aabbccddeeff";
  DeviceProfile cpu;
  cpu.target = {.backend = Backend::kCpu, .level = 3};
  EXPECT_EQ(DeviceLockName(gpu), gpu.uuid);
  EXPECT_NE(DeviceLockName(cpu), DeviceLockName(gpu));
}

}  // namespace
}  // namespace kiln
