// Which section kiln_modules_load takes, and why it refuses the others.

#include "runtime/section_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/cpu_level.h"
#include "runtime/kiln.h"
#include "tests/support/fake_driver.h"
#include "tests/support/tiny_bundle.h"

namespace kiln {
namespace {

using ::kiln::testing::FakeDriver;
using ::kiln::testing::OpenTiny;
using ::kiln::testing::TinyCpuSection;
using ::kiln::testing::TinyCudaSection;
using ::kiln::testing::TinyKernelBinary;
using ::testing::HasSubstr;

// The same section for another target.
BundleSection For(BundleSection section, const Target& target) {
  section.target = target;
  for (auto& program : section.programs) {
    auto copy = std::make_shared<Program>(*program);
    copy->target = target;
    program = copy;
  }
  for (BundleEntry& entry : section.entries) {
    for (Plan& plan : entry.plans) plan.target = target;
  }
  return section;
}

class SectionChoiceTest : public ::testing::Test {
 protected:
  SectionChoiceTest() {
    FakeDriver::Get().Reset();
    options_.struct_size = sizeof(options_);
    options_.driver = FakeDriver::Get().table();
    options_.cpu_threads = 1;
  }

  // The target of the section that is loaded, or the refusal's name.
  std::string Choose(std::vector<BundleSection> sections) {
    kiln_bundle_t* bundle = OpenTiny(std::move(sections));
    kiln_modules_t* modules = nullptr;
    const kiln_status_t status =
        kiln_modules_load(bundle, &options_, &modules, &error_);
    std::string result = kiln_status_name(status);
    if (status == KILN_STATUS_OK) {
      kiln_modules_info_t info = {};
      info.struct_size = sizeof(info);
      EXPECT_EQ(kiln_modules_info(modules, &info, nullptr), KILN_STATUS_OK);
      result = info.target;
    }
    kiln_modules_unload(modules, nullptr);
    kiln_bundle_close(bundle, nullptr);
    EXPECT_EQ(FakeDriver::Get().live_modules(), 0u);
    return result;
  }

  kiln_load_options_t options_ = {};
  kiln_error_t error_ = {};
};

Target Sm(int level, bool specific) {
  return {.backend = Backend::kCuda, .level = level, .arch_specific = specific};
}

TEST_F(SectionChoiceTest, PrefersTheArchitectureSpecificVariant) {
  const BundleSection cuda = TinyCudaSection();
  EXPECT_EQ(Choose({For(cuda, Sm(90, false)), cuda}), "sm_90a");
  EXPECT_EQ(Choose({For(cuda, Sm(90, false))}), "sm_90");
}

TEST_F(SectionChoiceTest, NeverTakesAnotherCapability) {
  const BundleSection cuda = TinyCudaSection();
  EXPECT_EQ(Choose({For(cuda, Sm(80, false)), For(cuda, Sm(100, true))}),
            "KILN_STATUS_TARGET_MISSING");
  EXPECT_THAT(error_.message, HasSubstr("compute capability 9.0"));
  EXPECT_THAT(error_.message, HasSubstr("sm_100a, sm_80"));
  EXPECT_THAT(error_.message, HasSubstr("kiln prewarm"));
}

TEST_F(SectionChoiceTest, ANamedTargetMustBeTheDevices) {
  const BundleSection cuda = TinyCudaSection();
  options_.target = "sm_90";
  EXPECT_EQ(Choose({For(cuda, Sm(90, false)), cuda}), "sm_90");
  EXPECT_EQ(Choose({cuda}), "KILN_STATUS_TARGET_MISSING");
  options_.target = "sm_80";
  EXPECT_EQ(Choose({For(cuda, Sm(80, false))}), "KILN_STATUS_TARGET_MISMATCH");
  EXPECT_STREQ(error_.message,
               "section sm_80 is for compute capability 8.0, the device has "
               "9.0");
}

TEST_F(SectionChoiceTest, BothBackendsNeedAChoice) {
  const BundleSection cuda = TinyCudaSection();
  const BundleSection cpu = TinyCpuSection(TinyKernelBinary());
  EXPECT_EQ(Choose({cuda, cpu}), "KILN_STATUS_TARGET_AMBIGUOUS");
  EXPECT_THAT(error_.message, HasSubstr("cpu-x86-64-v2, sm_90a"));
  options_.context = FakeDriver::Get().context(0);
  EXPECT_EQ(Choose({cuda, cpu}), "sm_90a");
  options_.context = nullptr;
  options_.target = "cuda";
  EXPECT_EQ(Choose({cuda, cpu}), "sm_90a");
  options_.target = "cpu";
  EXPECT_EQ(Choose({cuda, cpu}), "cpu-x86-64-v2");
  EXPECT_EQ(Choose({cuda}), "KILN_STATUS_TARGET_MISSING");
}

TEST_F(SectionChoiceTest, TakesTheHighestCpuLevelOfTheHost) {
  const uint32_t host = runtime::HostCpuLevel();
  ASSERT_GE(host, 2u) << "this host is older than any target of Kiln";
  const BundleSection cpu = TinyCpuSection(TinyKernelBinary());
  std::vector<BundleSection> sections;
  for (int level = 2; level <= 4; ++level) {
    sections.push_back(For(cpu, {.backend = Backend::kCpu, .level = level}));
  }
  EXPECT_EQ(Choose(sections), "cpu-x86-64-v" + std::to_string(host));
  if (host < 4) {
    EXPECT_EQ(Choose({sections[2]}), "KILN_STATUS_TARGET_MISMATCH");
  }
  options_.target = "cpu-x86-64-v2";
  EXPECT_EQ(Choose(sections), "cpu-x86-64-v2");
}

TEST_F(SectionChoiceTest, HostLevelAgreesWithTheCompilersTarget) {
  const absl::StatusOr<Target> host = HostCpuTarget();
  ASSERT_TRUE(host.ok()) << host.status();
  EXPECT_EQ(host->level, static_cast<int>(runtime::HostCpuLevel()));
}

TEST_F(SectionChoiceTest, AContextForACpuSectionIsRefused) {
  options_.context = FakeDriver::Get().context(0);
  EXPECT_EQ(Choose({TinyCpuSection(TinyKernelBinary())}),
            "KILN_STATUS_INVALID_ARGUMENT");
}

}  // namespace
}  // namespace kiln
