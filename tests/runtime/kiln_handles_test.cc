// Misuse of the C ABI: closed handles, null pointers, structs of another size.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "runtime/kiln.h"
#include "tests/support/fake_driver.h"
#include "tests/support/tiny_bundle.h"

namespace kiln {
namespace {

using ::kiln::testing::FakeDriver;
using ::kiln::testing::OpenTiny;
using ::kiln::testing::TinyCudaSection;
using ::testing::HasSubstr;

class KilnHandlesTest : public ::testing::Test {
 protected:
  KilnHandlesTest() {
    FakeDriver::Get().Reset();
    bundle_ = OpenTiny({TinyCudaSection()});
    options_.struct_size = sizeof(options_);
    options_.driver = FakeDriver::Get().table();
  }

  ~KilnHandlesTest() override { kiln_bundle_close(bundle_, nullptr); }

  kiln_modules_t* Load() {
    kiln_modules_t* modules = nullptr;
    EXPECT_EQ(kiln_modules_load(bundle_, &options_, &modules, &error_),
              KILN_STATUS_OK)
        << error_.message;
    return modules;
  }

  kiln_bundle_t* bundle_ = nullptr;
  kiln_load_options_t options_ = {};
  kiln_error_t error_ = {};
};

TEST_F(KilnHandlesTest, UseAfterCloseIsRefused) {
  kiln_bundle_t* closed = OpenTiny({TinyCudaSection()});
  ASSERT_EQ(kiln_bundle_close(closed, nullptr), KILN_STATUS_OK);
  kiln_bundle_info_t info = {};
  info.struct_size = sizeof(info);
  EXPECT_EQ(kiln_bundle_info(closed, &info, &error_),
            KILN_STATUS_CLOSED_HANDLE);
  EXPECT_THAT(error_.message, HasSubstr("was closed"));
  kiln_modules_t* modules = nullptr;
  EXPECT_EQ(kiln_modules_load(closed, &options_, &modules, &error_),
            KILN_STATUS_CLOSED_HANDLE);
  EXPECT_EQ(kiln_bundle_close(closed, &error_), KILN_STATUS_CLOSED_HANDLE);
}

TEST_F(KilnHandlesTest, UseAfterUnloadIsRefused) {
  kiln_modules_t* modules = Load();
  const kiln_entry_t* entry = nullptr;
  ASSERT_EQ(kiln_entry_find(modules, "moe", 1, &entry, nullptr),
            KILN_STATUS_OK);
  ASSERT_EQ(kiln_modules_unload(modules, nullptr), KILN_STATUS_OK);
  const kiln_entry_t* other = nullptr;
  EXPECT_EQ(kiln_entry_find(modules, "moe", 1, &other, &error_),
            KILN_STATUS_CLOSED_HANDLE);
  EXPECT_EQ(other, nullptr);
  uint64_t bytes = 0;
  EXPECT_EQ(kiln_entry_arena_size(entry, &bytes, nullptr, &error_),
            KILN_STATUS_CLOSED_HANDLE);
  EXPECT_EQ(
      kiln_launch(modules, entry, 1, nullptr, 0, nullptr, 0, nullptr, &error_),
      KILN_STATUS_CLOSED_HANDLE);
  EXPECT_EQ(kiln_modules_unload(modules, &error_), KILN_STATUS_CLOSED_HANDLE);
}

TEST_F(KilnHandlesTest, HandlesAreNeverReused) {
  std::set<kiln_bundle_t*> seen;
  for (int i = 0; i < 10000; ++i) {
    kiln_bundle_t* bundle = nullptr;
    // The cheapest open that can succeed: the same bytes over and over.
    static const std::string bytes = WriteBundle({TinyCudaSection()}).value();
    ASSERT_EQ(kiln_bundle_open_memory(bytes.data(), bytes.size(), nullptr,
                                      &bundle, nullptr),
              KILN_STATUS_OK);
    EXPECT_TRUE(seen.insert(bundle).second);
    ASSERT_EQ(kiln_bundle_close(bundle, nullptr), KILN_STATUS_OK);
  }
}

TEST_F(KilnHandlesTest, AHandleOfAnotherKindIsRefused) {
  kiln_modules_t* modules = Load();
  EXPECT_EQ(
      kiln_bundle_close(reinterpret_cast<kiln_bundle_t*>(modules), &error_),
      KILN_STATUS_CLOSED_HANDLE);
  EXPECT_EQ(
      kiln_modules_unload(reinterpret_cast<kiln_modules_t*>(bundle_), &error_),
      KILN_STATUS_CLOSED_HANDLE);
  int local = 0;
  EXPECT_EQ(
      kiln_modules_unload(reinterpret_cast<kiln_modules_t*>(&local), &error_),
      KILN_STATUS_CLOSED_HANDLE);
  EXPECT_EQ(kiln_modules_unload(modules, nullptr), KILN_STATUS_OK);
}

TEST_F(KilnHandlesTest, NullIsAllowedToBeReleasedAndRefusedElsewhere) {
  EXPECT_EQ(kiln_bundle_close(nullptr, nullptr), KILN_STATUS_OK);
  EXPECT_EQ(kiln_modules_unload(nullptr, nullptr), KILN_STATUS_OK);
  EXPECT_EQ(kiln_modules_load(nullptr, &options_, nullptr, &error_),
            KILN_STATUS_INVALID_ARGUMENT);
  kiln_modules_t* modules = nullptr;
  EXPECT_EQ(kiln_modules_load(nullptr, &options_, &modules, &error_),
            KILN_STATUS_CLOSED_HANDLE);
  EXPECT_THAT(error_.message, HasSubstr("bundle is null"));
  EXPECT_EQ(kiln_bundle_open_memory(nullptr, 5, nullptr, &bundle_, &error_),
            KILN_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kiln_bundle_open_file(nullptr, nullptr, &bundle_, &error_),
            KILN_STATUS_INVALID_ARGUMENT);
  EXPECT_EQ(kiln_bundle_info(bundle_, nullptr, &error_),
            KILN_STATUS_INVALID_ARGUMENT);
}

TEST_F(KilnHandlesTest, ModulesOutliveTheirBundle) {
  kiln_bundle_t* bundle = OpenTiny({TinyCudaSection()});
  kiln_modules_t* modules = nullptr;
  ASSERT_EQ(kiln_modules_load(bundle, &options_, &modules, nullptr),
            KILN_STATUS_OK);
  ASSERT_EQ(kiln_bundle_close(bundle, nullptr), KILN_STATUS_OK);
  const kiln_entry_t* entry = nullptr;
  EXPECT_EQ(kiln_entry_find(modules, "dense", 8, &entry, nullptr),
            KILN_STATUS_OK);
  kiln_plan_info_t info = {};
  info.struct_size = sizeof(info);
  EXPECT_EQ(kiln_entry_plan(entry, &info, nullptr), KILN_STATUS_OK);
  EXPECT_STREQ(info.label, "fused_moe.cuda{tile=8}");
  EXPECT_EQ(kiln_modules_unload(modules, nullptr), KILN_STATUS_OK);
}

TEST_F(KilnHandlesTest, StructsOfAnotherSizeAreRefused) {
  kiln_bundle_info_t info = {};
  for (const uint32_t size : {0u, 4u, uint32_t{sizeof(info)} + 8}) {
    info.struct_size = size;
    EXPECT_EQ(kiln_bundle_info(bundle_, &info, &error_),
              KILN_STATUS_STRUCT_SIZE);
  }
  EXPECT_THAT(error_.message, HasSubstr("kiln_bundle_info_t.struct_size is"));
  options_.struct_size = 8;
  kiln_modules_t* modules = nullptr;
  EXPECT_EQ(kiln_modules_load(bundle_, &options_, &modules, &error_),
            KILN_STATUS_STRUCT_SIZE);
  kiln_open_options_t open = {};
  kiln_bundle_t* bundle = nullptr;
  EXPECT_EQ(kiln_bundle_open_memory("x", 1, &open, &bundle, &error_),
            KILN_STATUS_STRUCT_SIZE);
}

TEST_F(KilnHandlesTest, UnknownFlagsAreRefused) {
  options_.flags = 4;
  kiln_modules_t* modules = nullptr;
  EXPECT_EQ(kiln_modules_load(bundle_, &options_, &modules, &error_),
            KILN_STATUS_INVALID_ARGUMENT);
}

TEST_F(KilnHandlesTest, EveryStatusHasAName) {
  EXPECT_STREQ(kiln_status_name(KILN_STATUS_OK), "KILN_STATUS_OK");
  EXPECT_STREQ(kiln_status_name(KILN_STATUS_ARENA_MISALIGNED),
               "KILN_STATUS_ARENA_MISALIGNED");
  EXPECT_STREQ(kiln_status_name(9999), "KILN_STATUS_UNKNOWN");
}

TEST_F(KilnHandlesTest, VersionIsTheHeadersVersion) {
  uint32_t major = 0;
  uint32_t minor = 9;
  kiln_runtime_version(&major, &minor);
  EXPECT_EQ(major, uint32_t{KILN_RUNTIME_ABI_MAJOR});
  EXPECT_EQ(minor, uint32_t{KILN_RUNTIME_ABI_MINOR});
  kiln_runtime_version(nullptr, nullptr);
}

}  // namespace
}  // namespace kiln
