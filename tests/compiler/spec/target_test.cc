#include "compiler/spec/target.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::StatusIs;
using ::testing::HasSubstr;

TEST(ParseTargetTest, IsTheInverseOfToString) {
  for (const char* text :
       {"sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_90a", "sm_100",
        "sm_100a", "sm_103", "sm_103a", "sm_120", "sm_120a", "sm_121",
        "sm_121a", "cpu-x86-64-v2", "cpu-x86-64-v3", "cpu-x86-64-v4"}) {
    ASSERT_OK_AND_ASSIGN(const Target target, ParseTarget(text));
    EXPECT_EQ(target.ToString(), text);
  }
}

TEST(ParseTargetTest, KeepsTheSuffixApart) {
  ASSERT_OK_AND_ASSIGN(const Target plain, ParseTarget("sm_90"));
  ASSERT_OK_AND_ASSIGN(const Target specific, ParseTarget("sm_90a"));
  EXPECT_NE(plain, specific);
  EXPECT_EQ(plain.level, specific.level);
  EXPECT_EQ(plain.backend, Backend::kCuda);
}

TEST(ParseTargetTest, RefusesEverythingElseAndListsWhatItKnows) {
  for (const char* text : {"",
                           "sm",
                           "sm_",
                           "sm_9",
                           "sm_090",
                           "sm_+90",
                           "sm_90 ",
                           " sm_90",
                           "SM_90",
                           "sm_90aa",
                           "sm_90f",
                           "sm_80a",
                           "sm_75",
                           "sm_-90",
                           "sm_9999999999999",
                           "compute_90",
                           "cpu",
                           "cpu-x86-64-v1",
                           "cpu-x86-64-v5",
                           "cpu-x86-64-v03",
                           "cpu-x86-64-v",
                           "cpu-arm64",
                           "x86-64-v3"}) {
    EXPECT_THAT(ParseTarget(text), StatusIs(absl::StatusCode::kInvalidArgument,
                                            HasSubstr("sm_120a")))
        << text;
  }
}

TEST(HostCpuTargetTest, IsATargetOfItsOwnSpelling) {
  ASSERT_OK_AND_ASSIGN(const Target host, HostCpuTarget());
  EXPECT_EQ(host.backend, Backend::kCpu);
  ASSERT_OK_AND_ASSIGN(const Target parsed, ParseTarget(host.ToString()));
  EXPECT_EQ(parsed, host);
}

TEST(HostCpuTargetTest, AgreesWithTheCompilersView) {
  ASSERT_OK_AND_ASSIGN(const Target host, HostCpuTarget());
  // The compiler's runtime asks CPUID on its own.
  const bool v3 = __builtin_cpu_supports("avx2") &&
                  __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi2");
  EXPECT_EQ(host.level >= 3, v3);
  const bool v4 = __builtin_cpu_supports("avx512f") &&
                  __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl");
  EXPECT_EQ(host.level >= 4, v3 && v4);
}

TEST(BackendNameTest, Names) {
  EXPECT_EQ(BackendName(Backend::kCuda), "cuda");
  EXPECT_EQ(BackendName(Backend::kCpu), "cpu");
}

}  // namespace
}  // namespace kiln
