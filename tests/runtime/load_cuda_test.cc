// Preflight on CUDA through the fake driver.

#include "runtime/load_cuda.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "runtime/kiln.h"
#include "tests/support/fake_driver.h"
#include "tests/support/tiny_bundle.h"

namespace kiln {
namespace {

using ::kiln::testing::FakeDriver;
using ::kiln::testing::FakeProgram;
using ::kiln::testing::OpenTiny;
using ::kiln::testing::TinyCudaSection;
using ::testing::HasSubstr;

class LoadCudaTest : public ::testing::Test {
 protected:
  LoadCudaTest() {
    fake_.Reset();
    options_.struct_size = sizeof(options_);
    options_.driver = fake_.table();
  }

  // Loads and unloads; the fake driver shows what happened.
  kiln_status_t Load(BundleSection section) {
    kiln_bundle_t* bundle = OpenTiny({std::move(section)});
    kiln_modules_t* modules = nullptr;
    const kiln_status_t status =
        kiln_modules_load(bundle, &options_, &modules, &error_);
    EXPECT_EQ(status == KILN_STATUS_OK, modules != nullptr);
    if (inspect_) inspect_();
    kiln_modules_unload(modules, nullptr);
    kiln_bundle_close(bundle, nullptr);
    EXPECT_EQ(fake_.live_modules(), 0u);
    return status;
  }

  // Replaces the image, and nothing else, of program `index`.
  static void SetImage(BundleSection* section, size_t index,
                       const std::string& image) {
    auto program = std::make_shared<Program>(*section->programs[index]);
    program->binary = image + '\0';
    program->binary_digest = Sha256(program->binary);
    section->programs[index] = program;
  }

  FakeDriver& fake_ = FakeDriver::Get();
  kiln_load_options_t options_ = {};
  kiln_error_t error_ = {};
  std::function<void()> inspect_;
};

TEST_F(LoadCudaTest, LoadsEveryProgramAndKernelEagerly) {
  inspect_ = [&] {
    EXPECT_EQ(fake_.live_modules(), 2u);
    ASSERT_NE(fake_.Find("fc1"), nullptr);
    EXPECT_TRUE(fake_.Find("fc1")->loaded);
    EXPECT_TRUE(fake_.Find("fc2")->loaded);
  };
  EXPECT_EQ(Load(TinyCudaSection()), KILN_STATUS_OK) << error_.message;
}

TEST_F(LoadCudaTest, OptsInToLargeSharedMemoryWhereNeeded) {
  inspect_ = [&] {
    EXPECT_EQ(fake_.Find("fc1")->dynamic_shared_bytes_max, 65536);
    EXPECT_EQ(fake_.Find("fc2")->dynamic_shared_bytes_max, -1);
  };
  EXPECT_EQ(Load(TinyCudaSection()), KILN_STATUS_OK) << error_.message;
}

TEST_F(LoadCudaTest, LeavesTheCurrentContextAlone) {
  options_.context = fake_.context(1);
  fake_.device_attributes[runtime::kDeviceComputeCapabilityMajor] = 9;
  inspect_ = [&] {
    EXPECT_EQ(fake_.current(), fake_.context(0));
    EXPECT_EQ(fake_.context_stack.size(), 1u);
    EXPECT_EQ(fake_.Find("fc1")->module->context, fake_.context(1));
  };
  EXPECT_EQ(Load(TinyCudaSection()), KILN_STATUS_OK) << error_.message;
  EXPECT_EQ(fake_.current(), fake_.context(0));
}

TEST_F(LoadCudaTest, NeedsAContext) {
  fake_.context_stack.clear();
  EXPECT_EQ(Load(TinyCudaSection()), KILN_STATUS_NO_CONTEXT);
}

TEST_F(LoadCudaTest, SaysThatThereIsNoDriver) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library != nullptr) {
    dlclose(library);
    GTEST_SKIP() << "this machine has an NVIDIA driver";
  }
  options_.driver = nullptr;  // the real one
  EXPECT_EQ(Load(TinyCudaSection()), KILN_STATUS_NO_DRIVER);
  EXPECT_THAT(error_.message, HasSubstr("libcuda.so.1"));
}

TEST_F(LoadCudaTest, RefusesAnOlderDriver) {
  fake_.driver_version = 12030;
  EXPECT_EQ(Load(TinyCudaSection()), KILN_STATUS_DRIVER_TOO_OLD);
  EXPECT_THAT(error_.message, HasSubstr("needs CUDA driver 12.4"));
  EXPECT_THAT(error_.message, HasSubstr("has 12.3"));
  fake_.driver_version = 12080;
  BundleSection newer = TinyCudaSection();
  newer.driver_version_min = 13000;
  EXPECT_EQ(Load(newer), KILN_STATUS_DRIVER_TOO_OLD);
  EXPECT_THAT(error_.message, HasSubstr("needs CUDA driver 13.0"));
}

TEST_F(LoadCudaTest, RefusesAnotherParameterLayout) {
  const struct {
    const char* name;
    const char* image;
    const char* message;
  } cases[] = {
      {"Fewer", "fc2 0:8 8:4 16:8\n", "only 3 parameters in its binary"},
      {"Offset", "fc2 0:8 8:4 12:8 24:8\n",
       "parameter 2 has 8 bytes at offset 12"},
      {"Bytes", "fc2 0:8 8:8 16:8 24:8\n",
       "parameter 1 has 8 bytes at offset 8 in its binary, bundle declares 4"},
  };

  for (const auto& c : cases) {
    BundleSection section = TinyCudaSection();
    SetImage(&section, 1, c.image);
    EXPECT_EQ(Load(section), KILN_STATUS_PARAMETER_LAYOUT) << c.name;
    EXPECT_THAT(error_.message, HasSubstr(c.message)) << c.name;
  }
}

TEST_F(LoadCudaTest, RefusesAProgramWithoutItsKernel) {
  BundleSection section = TinyCudaSection();
  SetImage(&section, 1, "other 0:8\n");
  EXPECT_EQ(Load(section), KILN_STATUS_KERNEL_MISSING);
  EXPECT_THAT(error_.message, HasSubstr("cuModuleGetFunction for 'fc2' failed: "
                                        "CUDA_ERROR_NOT_FOUND (500)"));
  EXPECT_EQ(error_.driver_code, 500);
}

TEST_F(LoadCudaTest, RefusesAnImageTheDriverRefuses) {
  BundleSection section = TinyCudaSection();
  SetImage(&section, 0, "fc1 nonsense\n");
  EXPECT_EQ(Load(section), KILN_STATUS_PROGRAM_REFUSED);
  EXPECT_EQ(error_.driver_code, 200);
}

TEST_F(LoadCudaTest, ChecksDeviceLimitsBeforeServing) {
  const struct {
    int attribute;
    int value;
    const char* message;
  } cases[] = {
      {runtime::kDeviceMaxThreadsPerBlock, 64, "block of 128 threads"},
      {runtime::kDeviceMaxBlockDimX, 100, "block.x is 128"},
      {runtime::kDeviceMaxGridDimX, 15, "grid.x is 16 at m 64"},
      {runtime::kDeviceMaxSharedBytesOptin, 66559,
       "shared memory of 66560 bytes, the device's limit is 66559"},
  };

  for (const auto& c : cases) {
    fake_.Reset();
    fake_.device_attributes[c.attribute] = c.value;
    EXPECT_EQ(Load(TinyCudaSection()), KILN_STATUS_DEVICE_LIMIT) << c.message;
    EXPECT_THAT(error_.message, HasSubstr(c.message));
    EXPECT_THAT(error_.message, HasSubstr("entry '"));
  }
}

TEST_F(LoadCudaTest, RefusesABlockTheKernelCannotRun) {
  BundleSection section = TinyCudaSection();
  SetImage(&section, 1, "fc2 0:8 8:4 16:8 24:8 threads=96\n");
  EXPECT_EQ(Load(section), KILN_STATUS_DEVICE_LIMIT);
  EXPECT_THAT(error_.message, HasSubstr("block of 128 threads"));
}

TEST_F(LoadCudaTest, PredictedAndUnqualifiedPlansNeedConsent) {
  BundleSection section = TinyCudaSection();
  section.entries[0].plans[1].evidence = Evidence{};
  EXPECT_EQ(Load(section), KILN_STATUS_PREDICTED_PLANS);
  EXPECT_THAT(error_.message, HasSubstr("kiln prewarm --target sm_90a"));
  options_.flags = KILN_LOAD_ALLOW_PREDICTED;
  EXPECT_EQ(Load(section), KILN_STATUS_OK);
  section.unqualified_templates = {"fused_moe.cuda"};
  EXPECT_EQ(Load(section), KILN_STATUS_UNQUALIFIED_PLANS);
  options_.flags |= KILN_LOAD_ALLOW_UNQUALIFIED;
  EXPECT_EQ(Load(section), KILN_STATUS_OK);
}

// Fails the n-th driver call for every n, until a run has no failure left.
TEST_F(LoadCudaTest, EveryFailingCallLeavesNothingBehind) {
  options_.context = fake_.context(1);
  kiln_bundle_t* bundle = OpenTiny({TinyCudaSection()});
  constexpr int kUnknown = 999;
  int failures = 0;
  for (int n = 1;; ++n) {
    ASSERT_LT(n, 1000);
    fake_.Reset();
    fake_.FailCall(n, kUnknown);
    kiln_modules_t* modules = nullptr;
    error_ = {};
    const kiln_status_t status =
        kiln_modules_load(bundle, &options_, &modules, &error_);
    const bool failed = fake_.failed();
    if (!failed) {
      EXPECT_EQ(status, KILN_STATUS_OK) << error_.message;
      kiln_modules_unload(modules, nullptr);
      break;
    }
    ++failures;
    EXPECT_NE(status, KILN_STATUS_OK) << fake_.calls().back();
    EXPECT_EQ(error_.driver_code, kUnknown) << error_.message;
    EXPECT_EQ(modules, nullptr);
    EXPECT_EQ(fake_.live_modules(), 0u) << error_.message;
    ASSERT_EQ(fake_.context_stack.size(), 1u) << error_.message;
    EXPECT_EQ(fake_.current(), fake_.context(0));
    // A second try works.
    EXPECT_EQ(kiln_modules_load(bundle, &options_, &modules, &error_),
              KILN_STATUS_OK)
        << error_.message;
    EXPECT_EQ(kiln_modules_unload(modules, &error_), KILN_STATUS_OK);
    EXPECT_EQ(fake_.live_modules(), 0u);
  }
  EXPECT_GT(failures, 30);
  kiln_bundle_close(bundle, nullptr);
}

TEST_F(LoadCudaTest, EveryFailingCallOfUnloadIsReportedAndReleasesAll) {
  options_.context = fake_.context(1);
  kiln_bundle_t* bundle = OpenTiny({TinyCudaSection()});
  for (int n = 1;; ++n) {
    ASSERT_LT(n, 100);
    fake_.Reset();
    kiln_modules_t* modules = nullptr;
    ASSERT_EQ(kiln_modules_load(bundle, &options_, &modules, &error_),
              KILN_STATUS_OK);
    fake_.ClearLog();
    fake_.FailCall(n, 999);
    const kiln_status_t status = kiln_modules_unload(modules, &error_);
    EXPECT_EQ(kiln_modules_unload(modules, nullptr), KILN_STATUS_CLOSED_HANDLE);
    EXPECT_EQ(fake_.live_modules(), 0u);
    if (!fake_.failed()) {
      EXPECT_EQ(status, KILN_STATUS_OK);
      break;
    }
    EXPECT_EQ(status, KILN_STATUS_DRIVER);
    EXPECT_EQ(fake_.context_stack.size(), 1u);
  }
  kiln_bundle_close(bundle, nullptr);
}

}  // namespace
}  // namespace kiln
