// Many threads in the runtime at once. Worth most under tools/dev tsan.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "compiler/base/file_util.h"
#include "runtime/kiln.h"
#include "tests/support/golden.h"
#include "tests/support/idle_driver.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_bundle.h"

namespace kiln {
namespace {

using ::kiln::testing::IdleDriver;
using ::kiln::testing::ScratchFolder;
using ::kiln::testing::TinyCpuSection;
using ::kiln::testing::TinyCudaSection;
using ::kiln::testing::TinyKernelBinary;

constexpr int kThreads = 8;
constexpr int kRounds = 200;

class RuntimeThreadsTest : public ::testing::Test {
 protected:
  RuntimeThreadsTest() {
    const std::string bytes =
        WriteBundle({TinyCudaSection(), TinyCpuSection(TinyKernelBinary())})
            .value();
    path_ = folder_.File("tiny.kiln");
    EXPECT_OK(WriteFileAtomically(path_, bytes));
  }

  // Counts what is not as expected; EXPECT in threads is slow under TSan.
  void Want(kiln_status_t expected, kiln_status_t status) {
    if (status != expected) ++wrong_;
  }

  kiln_bundle_t* Open() {
    kiln_bundle_t* bundle = nullptr;
    Want(KILN_STATUS_OK,
         kiln_bundle_open_file(path_.c_str(), nullptr, &bundle, nullptr));
    return bundle;
  }

  kiln_modules_t* Load(const kiln_bundle_t* bundle, const char* target) {
    kiln_load_options_t options = {};
    options.struct_size = sizeof(options);
    options.target = target;
    options.cpu_threads = 2;
    options.driver = &driver_;
    kiln_modules_t* modules = nullptr;
    Want(KILN_STATUS_OK,
         kiln_modules_load(bundle, &options, &modules, nullptr));
    return modules;
  }

  void LaunchCuda(const kiln_modules_t* modules, uint64_t m) {
    const kiln_entry_t* entry = nullptr;
    const uint64_t params[2] = {16, 32};
    Want(KILN_STATUS_OK, kiln_entry_find(modules, "moe", m, &entry, nullptr));
    Want(KILN_STATUS_OK, kiln_launch(modules, entry, m, params, sizeof(params),
                                     reinterpret_cast<void*>(0x100000), 1 << 20,
                                     nullptr, nullptr));
  }

  void InThreads(const std::function<void(int)>& work) {
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong_, 0);
  }

  ScratchFolder folder_;
  std::string path_;
  kiln_driver_t driver_ = IdleDriver();
  std::atomic<int> wrong_{0};
};

TEST_F(RuntimeThreadsTest, EachMayOpenLoadLaunchAndCloseItsOwn) {
  InThreads([this](int thread) {
    for (int round = 0; round < kRounds; ++round) {
      kiln_bundle_t* bundle = Open();
      kiln_modules_t* modules = Load(bundle, "cuda");
      if (round % 2 == 0) kiln_bundle_close(bundle, nullptr);
      LaunchCuda(modules, static_cast<uint64_t>((thread + round) % 64 + 1));
      Want(KILN_STATUS_OK, kiln_modules_unload(modules, nullptr));
      Want(KILN_STATUS_CLOSED_HANDLE, kiln_modules_unload(modules, nullptr));
      Want(round % 2 == 0 ? KILN_STATUS_CLOSED_HANDLE : KILN_STATUS_OK,
           kiln_bundle_close(bundle, nullptr));
    }
  });
}

TEST_F(RuntimeThreadsTest, AllMayReadAndLoadFromOneBundle) {
  kiln_bundle_t* bundle = Open();
  InThreads([&](int) {
    for (int round = 0; round < kRounds; ++round) {
      kiln_plan_info_t plan = {};
      plan.struct_size = sizeof(plan);
      Want(KILN_STATUS_OK, kiln_bundle_plan(bundle, 1, 1, 2, &plan, nullptr));
      if (plan.m_max != 64) ++wrong_;
      kiln_modules_t* modules = Load(bundle, "cuda");
      LaunchCuda(modules, 7);
      Want(KILN_STATUS_OK, kiln_modules_unload(modules, nullptr));
    }
  });
  kiln_bundle_close(bundle, nullptr);
}

TEST_F(RuntimeThreadsTest, AllMayLaunchFromOneModulesSet) {
  kiln_bundle_t* bundle = Open();
  kiln_modules_t* cuda = Load(bundle, "cuda");
  kiln_modules_t* cpu = Load(bundle, "cpu");
  kiln_bundle_close(bundle, nullptr);
  InThreads([&](int thread) {
    const size_t width = kiln::testing::kTinyWidth;
    std::vector<float> x(3 * width, static_cast<float>(thread + 1));
    std::vector<char> memory((1 << 16) + 256);
    char* arena = memory.data();
    while (reinterpret_cast<uintptr_t>(arena) % 256 != 0) ++arena;
    for (int round = 0; round < kRounds; ++round) {
      LaunchCuda(cuda, static_cast<uint64_t>(round % 64 + 1));
      const kiln_entry_t* entry = nullptr;
      Want(KILN_STATUS_OK, kiln_entry_find(cpu, "sumsq", 3, &entry, nullptr));
      float out[3] = {};
      const void* params[2] = {x.data(), out};
      Want(KILN_STATUS_OK, kiln_launch(cpu, entry, 3, params, sizeof(params),
                                       arena, 1 << 16, nullptr, nullptr));
      for (const float value : out) {
        if (value != x[0] * x[0] * static_cast<float>(width)) ++wrong_;
      }
    }
  });
  kiln_modules_unload(cuda, nullptr);
  kiln_modules_unload(cpu, nullptr);
}

// Handles of a set that another thread has closed: refused, whoever took the
// place since.
TEST_F(RuntimeThreadsTest, StaleHandlesAreRefusedWhileOthersComeAndGo) {
  kiln_bundle_t* bundle = Open();
  kiln_modules_t* stale = Load(bundle, "cuda");
  const kiln_entry_t* entry = nullptr;
  ASSERT_EQ(kiln_entry_find(stale, "moe", 1, &entry, nullptr), KILN_STATUS_OK);
  kiln_modules_unload(stale, nullptr);
  InThreads([&](int thread) {
    const uint64_t params[2] = {16, 32};
    for (int round = 0; round < kRounds; ++round) {
      if (thread % 2 == 0) {
        kiln_modules_t* modules = Load(bundle, "cuda");
        Want(KILN_STATUS_OK, kiln_modules_unload(modules, nullptr));
        continue;
      }
      const kiln_entry_t* found = nullptr;
      Want(KILN_STATUS_CLOSED_HANDLE,
           kiln_entry_find(stale, "moe", 1, &found, nullptr));
      Want(KILN_STATUS_CLOSED_HANDLE,
           kiln_launch(stale, entry, 1, params, sizeof(params), nullptr, 0,
                       nullptr, nullptr));
      Want(KILN_STATUS_CLOSED_HANDLE, kiln_modules_unload(stale, nullptr));
    }
  });
  kiln_bundle_close(bundle, nullptr);
}

// However many threads close one handle, one of them does.
TEST_F(RuntimeThreadsTest, OneOfManyClosesWins) {
  for (int round = 0; round < 50; ++round) {
    kiln_bundle_t* bundle = Open();
    kiln_modules_t* modules = Load(bundle, "cuda");
    std::atomic<int> unloaded{0};
    std::atomic<int> closed{0};
    InThreads([&](int) {
      if (kiln_modules_unload(modules, nullptr) == KILN_STATUS_OK) ++unloaded;
      if (kiln_bundle_close(bundle, nullptr) == KILN_STATUS_OK) ++closed;
    });
    EXPECT_EQ(unloaded, 1);
    EXPECT_EQ(closed, 1);
  }
}

}  // namespace
}  // namespace kiln
