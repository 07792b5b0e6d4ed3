#include "compiler/spec/device_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

// CUDA C++ Programming Guide, technical specifications per compute capability:
// shared memory per multiprocessor and per block, in KiB.
TEST(AssumedProfileTest, HasThePublishedSharedMemory) {
  const struct {
    const char* target;
    int64_t sm_kib;
    int64_t block_kib;
  } cases[] = {
      {"sm_80", 164, 163},  {"sm_86", 100, 99},   {"sm_87", 164, 163},
      {"sm_89", 100, 99},   {"sm_90", 228, 227},  {"sm_90a", 228, 227},
      {"sm_100", 228, 227}, {"sm_103", 228, 227}, {"sm_120", 100, 99},
      {"sm_121", 100, 99},
  };

  for (const auto& c : cases) {
    ASSERT_OK_AND_ASSIGN(const Target target, ParseTarget(c.target));
    const DeviceProfile profile = AssumedProfile(target);
    EXPECT_TRUE(profile.assumed);
    EXPECT_EQ(profile.compute_capability, target.level) << c.target;
    EXPECT_EQ(profile.shared_bytes_per_sm, c.sm_kib * 1024) << c.target;
    EXPECT_EQ(profile.shared_bytes_max, c.block_kib * 1024) << c.target;
    EXPECT_EQ(profile.registers_per_sm, 65536) << c.target;
    EXPECT_EQ(profile.threads_per_block_max, 1024) << c.target;
    EXPECT_GT(profile.multiprocessors, 0) << c.target;
  }
}

TEST(HostCpuProfileTest, DescribesThisProcessor) {
  ASSERT_OK_AND_ASSIGN(const Target host, HostCpuTarget());
  ASSERT_OK_AND_ASSIGN(const DeviceProfile profile, HostCpuProfile(host));
  EXPECT_FALSE(profile.assumed);
  EXPECT_EQ(profile.target, host);
  EXPECT_GT(profile.multiprocessors, 0);
  EXPECT_THAT(profile.processor, HasSubstr("-"));
  EXPECT_EQ(profile.compute_capability, 0);
}

TEST(HostCpuProfileTest, RefusesALevelThatThisProcessorLacks) {
  ASSERT_OK_AND_ASSIGN(const Target host, HostCpuTarget());
  Target above = host;
  ++above.level;
  EXPECT_THAT(
      HostCpuProfile(above),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr(above.ToString()), HasSubstr(host.ToString()))));
  EXPECT_THAT(HostCpuProfile({.backend = Backend::kCuda, .level = 80}),
              StatusIs(absl::StatusCode::kFailedPrecondition));
}

}  // namespace
}  // namespace kiln
