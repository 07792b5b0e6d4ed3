// Finding and launching, on both backends.

#include "runtime/launch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "runtime/kiln.h"
#include "tests/support/fake_driver.h"
#include "tests/support/tiny_bundle.h"

namespace kiln {
namespace {

using ::kiln::testing::FakeDriver;
using ::kiln::testing::FakeLaunch;
using ::kiln::testing::kTinyWidth;
using ::kiln::testing::OpenTiny;
using ::kiln::testing::TinyCpuSection;
using ::kiln::testing::TinyCudaSection;
using ::kiln::testing::TinyKernelBinary;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

template <typename T>
T At(const FakeLaunch& launch, size_t offset) {
  T value = {};
  EXPECT_LE(offset + sizeof(T), launch.params.size());
  std::memcpy(&value, launch.params.data() + offset, sizeof(T));
  return value;
}

void* Address(uint64_t value) { return reinterpret_cast<void*>(value); }

class CudaLaunchTest : public ::testing::Test {
 protected:
  CudaLaunchTest() {
    fake_.Reset();
    bundle_ = OpenTiny({TinyCudaSection()});
    options_.struct_size = sizeof(options_);
    options_.driver = fake_.table();
    EXPECT_EQ(kiln_modules_load(bundle_, &options_, &modules_, &error_),
              KILN_STATUS_OK)
        << error_.message;
    fake_.ClearLog();
  }

  ~CudaLaunchTest() override {
    kiln_modules_unload(modules_, nullptr);
    kiln_bundle_close(bundle_, nullptr);
  }

  const kiln_entry_t* Find(const char* name, uint64_t m) {
    const kiln_entry_t* entry = nullptr;
    status_ = kiln_entry_find(modules_, name, m, &entry, &error_);
    return entry;
  }

  kiln_status_t Launch(const kiln_entry_t* entry, uint64_t m) {
    return kiln_launch(modules_, entry, m, params_, sizeof(params_), arena_,
                       arena_bytes_, stream_, &error_);
  }

  FakeDriver& fake_ = FakeDriver::Get();
  kiln_load_options_t options_ = {};
  kiln_bundle_t* bundle_ = nullptr;
  kiln_modules_t* modules_ = nullptr;
  kiln_error_t error_ = {};
  kiln_status_t status_ = KILN_STATUS_OK;
  uint64_t params_[2] = {0x1000, 0x2000};
  void* arena_ = Address(0x100000);
  size_t arena_bytes_ = 1 << 20;
  CUstream_st* stream_ = reinterpret_cast<CUstream_st*>(0x77);
};

TEST_F(CudaLaunchTest, FindsThePlanWhoseIntervalContainsM) {
  const struct {
    uint64_t m;
    uint32_t m_min;
  } cases[] = {{0, 1}, {1, 1}, {2, 2}, {3, 2}, {4, 2}, {5, 5}, {64, 5}};

  for (const auto& c : cases) {
    kiln_plan_info_t info = {};
    info.struct_size = sizeof(info);
    ASSERT_EQ(kiln_entry_plan(Find("moe", c.m), &info, &error_),
              KILN_STATUS_OK);
    EXPECT_EQ(info.m_min, c.m_min) << c.m;
  }
}

TEST_F(CudaLaunchTest, NeverFindsANeighbour) {
  EXPECT_EQ(Find("moe", 65), nullptr);
  EXPECT_EQ(status_, KILN_STATUS_TOKENS_OUT_OF_RANGE);
  EXPECT_THAT(
      error_.message,
      AllOf(HasSubstr("entry 'moe' (fused_moe): m 65 is above its capacity 64"),
            HasSubstr("declared intervals 1..1, 2..4, 5..64"),
            HasSubstr("target sm_90a"),
            HasSubstr("kiln prewarm MANIFEST --target sm_90a"),
            HasSubstr("kiln freeze")));
  kiln_bundle_info_t info = {};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kiln_bundle_info(bundle_, &info, nullptr), KILN_STATUS_OK);
  Digest root;
  std::memcpy(root.bytes.data(), info.root, 32);
  EXPECT_THAT(error_.message, HasSubstr("bundle " + root.Short()));
  EXPECT_EQ(Find("moe", ~uint64_t{0}), nullptr);
  EXPECT_EQ(Find("moe", (uint64_t{1} << 32) + 1), nullptr);
}

TEST_F(CudaLaunchTest, AnUnknownEntryNamesTheOnesThereAre) {
  EXPECT_EQ(Find("mo", 1), nullptr);
  EXPECT_EQ(status_, KILN_STATUS_ENTRY_NOT_FOUND);
  EXPECT_THAT(error_.message,
              AllOf(HasSubstr("no entry 'mo'"), HasSubstr("'dense', 'moe'")));
}

TEST_F(CudaLaunchTest, EnqueuesEveryStepWithItsArguments) {
  ASSERT_EQ(Launch(Find("moe", 37), 37), KILN_STATUS_OK) << error_.message;
  ASSERT_EQ(fake_.launches().size(), 2u);
  const FakeLaunch& fc1 = fake_.launches()[0];
  EXPECT_EQ(fc1.kernel, "fc1");
  EXPECT_THAT(fc1.grid, ElementsAre(10, 8, 1));
  EXPECT_THAT(fc1.block, ElementsAre(128, 1, 1));
  EXPECT_EQ(fc1.shared_bytes, 65536u);
  EXPECT_EQ(fc1.stream, stream_);
  EXPECT_EQ(At<uint64_t>(fc1, 0), 0x1000u);
  EXPECT_EQ(At<uint64_t>(fc1, 8), 0x100000u + 64 * 64);
  EXPECT_EQ(At<uint32_t>(fc1, 16), 37u);
  EXPECT_EQ(At<uint32_t>(fc1, 20), 77u);
  const FakeLaunch& fc2 = fake_.launches()[1];
  EXPECT_THAT(fc2.grid, ElementsAre(32, 1, 1));
  EXPECT_EQ(At<uint64_t>(fc2, 0), 0x100000u);
  EXPECT_EQ(At<uint32_t>(fc2, 8), 37u);
  EXPECT_EQ(At<uint64_t>(fc2, 16), 0x2000u);
  EXPECT_EQ(At<uint64_t>(fc2, 24), 0x1122334455667788u);
}

TEST_F(CudaLaunchTest, MakesNoDriverCallsButTheLaunches) {
  const kiln_entry_t* entry = Find("moe", 3);
  ASSERT_EQ(Launch(entry, 3), KILN_STATUS_OK);
  EXPECT_THAT(fake_.calls(), ElementsAre("cuCtxGetCurrent", "cuLaunchKernel",
                                         "cuLaunchKernel"));
}

// Only a step behind another of the same call may overlap: what the first one
// follows is not ours.
TEST(OverlappedLaunchTest, EveryStepButTheFirstMayStartEarly) {
  FakeDriver& fake = FakeDriver::Get();
  for (const bool overlapped : {false, true}) {
    fake.Reset();
    BundleSection section = TinyCudaSection();
    for (BundleEntry& entry : section.entries) {
      for (Plan& plan : entry.plans) plan.body.overlapped = overlapped;
    }
    kiln_bundle_t* bundle = OpenTiny({section});
    kiln_load_options_t options = {};
    options.struct_size = sizeof(options);
    options.driver = fake.table();
    kiln_modules_t* modules = nullptr;
    kiln_error_t error = {};
    ASSERT_EQ(kiln_modules_load(bundle, &options, &modules, &error),
              KILN_STATUS_OK)
        << error.message;
    const kiln_entry_t* entry = nullptr;
    ASSERT_EQ(kiln_entry_find(modules, "moe", 37, &entry, &error),
              KILN_STATUS_OK);
    fake.ClearLog();
    const uint64_t params[2] = {0x1000, 0x2000};
    ASSERT_EQ(kiln_launch(modules, entry, 37, params, sizeof(params),
                          Address(0x100000), 1 << 20, nullptr, &error),
              KILN_STATUS_OK)
        << error.message;
    EXPECT_THAT(fake.calls(), ElementsAre("cuCtxGetCurrent", "cuLaunchKernel",
                                          overlapped ? "cuLaunchKernelEx"
                                                     : "cuLaunchKernel"));
    ASSERT_EQ(fake.launches().size(), 2u);
    EXPECT_FALSE(fake.launches()[0].overlapped);
    EXPECT_EQ(fake.launches()[1].overlapped, overlapped);
    EXPECT_THAT(fake.launches()[1].grid, ElementsAre(32, 1, 1));
    EXPECT_EQ(At<uint32_t>(fake.launches()[1], 8), 37u);
    kiln_modules_unload(modules, nullptr);
    kiln_bundle_close(bundle, nullptr);
  }
}

TEST(OverlappedLaunchTest, EveryFailingCallIsReportedAndTheNextLaunchWorks) {
  FakeDriver& fake = FakeDriver::Get();
  fake.Reset();
  BundleSection section = TinyCudaSection();
  section.entries[0].plans[2].body.overlapped = true;
  kiln_bundle_t* bundle = OpenTiny({section});
  kiln_load_options_t options = {};
  options.struct_size = sizeof(options);
  options.driver = fake.table();
  kiln_modules_t* modules = nullptr;
  ASSERT_EQ(kiln_modules_load(bundle, &options, &modules, nullptr),
            KILN_STATUS_OK);
  const kiln_entry_t* entry = nullptr;
  ASSERT_EQ(kiln_entry_find(modules, "moe", 37, &entry, nullptr),
            KILN_STATUS_OK);
  const uint64_t params[2] = {0x1000, 0x2000};
  kiln_error_t error = {};
  std::vector<std::string> failures;
  for (int n = 1;; ++n) {
    ASSERT_LT(n, 20);
    fake.ClearLog();
    fake.FailCall(n, 2);
    const kiln_status_t status =
        kiln_launch(modules, entry, 37, params, sizeof(params),
                    Address(0x100000), 1 << 20, nullptr, &error);
    if (!fake.failed()) {
      EXPECT_EQ(status, KILN_STATUS_OK);
      break;
    }
    failures.push_back(fake.calls().back());
    EXPECT_EQ(status, KILN_STATUS_DRIVER);
    EXPECT_EQ(error.driver_code, 2);
    EXPECT_THAT(error.message, HasSubstr(failures.back() + " failed"));
  }
  EXPECT_THAT(failures, ElementsAre("cuCtxGetCurrent", "cuLaunchKernel",
                                    "cuLaunchKernelEx"));
  kiln_modules_unload(modules, nullptr);
  kiln_bundle_close(bundle, nullptr);
}

TEST_F(CudaLaunchTest, WorksWhileAnotherContextIsCurrent) {
  fake_.context_stack = {fake_.context(1)};
  ASSERT_EQ(Launch(Find("moe", 3), 3), KILN_STATUS_OK);
  EXPECT_EQ(fake_.launches()[0].current, fake_.context(0));
  EXPECT_EQ(fake_.current(), fake_.context(1));
  EXPECT_EQ(fake_.context_stack.size(), 1u);
}

TEST_F(CudaLaunchTest, ZeroTokensDoNothingAndLookAtNothing) {
  EXPECT_EQ(kiln_launch(modules_, Find("moe", 0), 0, nullptr, 0, nullptr, 0,
                        stream_, &error_),
            KILN_STATUS_OK);
  EXPECT_TRUE(fake_.calls().empty());
}

TEST_F(CudaLaunchTest, Row39RefusesTokensOutsideTheInterval) {
  const kiln_entry_t* entry = Find("moe", 2);
  for (const uint64_t m : {uint64_t{1}, uint64_t{5}}) {
    EXPECT_EQ(Launch(entry, m), KILN_STATUS_TOKENS_OUT_OF_RANGE);
    EXPECT_THAT(error_.message,
                AllOf(HasSubstr("outside this plan's interval 2..4"),
                      HasSubstr("call kiln_entry_find")));
  }
  EXPECT_EQ(Launch(entry, 65), KILN_STATUS_TOKENS_OUT_OF_RANGE);
  EXPECT_THAT(error_.message, HasSubstr("above its capacity 64"));
  EXPECT_TRUE(fake_.launches().empty());
}

TEST_F(CudaLaunchTest, Row21And38ArenaMistakesAreThreeDifferentErrors) {
  const kiln_entry_t* entry = Find("moe", 64);
  uint64_t bytes = 0;
  uint64_t alignment = 0;
  ASSERT_EQ(kiln_entry_arena_size(entry, &bytes, &alignment, &error_),
            KILN_STATUS_OK);
  EXPECT_EQ(bytes, 5120u);
  EXPECT_EQ(alignment, 256u);
  arena_bytes_ = 5119;
  EXPECT_EQ(Launch(entry, 64), KILN_STATUS_ARENA_SHORT);
  EXPECT_STREQ(error_.message,
               "entry 'moe' (fused_moe): arena has 5119 bytes, the plan needs "
               "5120");
  arena_bytes_ = 5120;
  EXPECT_EQ(Launch(entry, 64), KILN_STATUS_OK);
  arena_ = Address(0x100010);
  EXPECT_EQ(Launch(entry, 64), KILN_STATUS_ARENA_MISALIGNED);
  EXPECT_THAT(error_.message, HasSubstr("misaligned by 16 bytes"));
  arena_ = nullptr;
  EXPECT_EQ(Launch(entry, 64), KILN_STATUS_ARENA_MISSING);
  EXPECT_EQ(fake_.launches().size(), 2u);
}

TEST_F(CudaLaunchTest, Row40ParameterMistakesAreThreeDifferentErrors) {
  const kiln_entry_t* entry = Find("moe", 64);
  EXPECT_EQ(kiln_launch(modules_, entry, 64, nullptr, 16, arena_, arena_bytes_,
                        stream_, &error_),
            KILN_STATUS_PARAMS_MISSING);
  EXPECT_EQ(kiln_launch(modules_, entry, 64, params_, 15, arena_, arena_bytes_,
                        stream_, &error_),
            KILN_STATUS_PARAMS_SHORT);
  EXPECT_THAT(error_.message, HasSubstr("15 bytes, the plan reads 16"));
  params_[1] = 0;
  EXPECT_EQ(Launch(entry, 64), KILN_STATUS_PARAM_NULL);
  EXPECT_THAT(error_.message, HasSubstr("parameter 1 'out' is null"));
}

// Row 18 of the fail-closed table of the formats (templates/formats/README.md).
TEST_F(CudaLaunchTest, Row18RefusesAMisalignedParameter) {
  const kiln_entry_t* entry = Find("moe", 64);
  ASSERT_EQ(Launch(entry, 64), KILN_STATUS_OK);
  const size_t launches = fake_.launches().size();
  for (const uint64_t past : {1, 2, 8, 15}) {
    params_[1] = 0x2000 + past;
    EXPECT_EQ(Launch(entry, 64), KILN_STATUS_PARAM_MISALIGNED);
    EXPECT_EQ(error_.message,
              "entry 'moe' (fused_moe): parameter 1 'out' is misaligned by " +
                  std::to_string(past) + " bytes, it must be a multiple of 16");
  }
  EXPECT_EQ(fake_.launches().size(), launches);
  params_[1] = 0x2010;
  EXPECT_EQ(Launch(entry, 64), KILN_STATUS_OK);
}

TEST_F(CudaLaunchTest, AnEntryOfOtherModulesIsRefused) {
  kiln_modules_t* other = nullptr;
  ASSERT_EQ(kiln_modules_load(bundle_, &options_, &other, &error_),
            KILN_STATUS_OK);
  const kiln_entry_t* entry = Find("moe", 1);
  EXPECT_EQ(kiln_launch(other, entry, 1, params_, 16, arena_, arena_bytes_,
                        stream_, &error_),
            KILN_STATUS_ENTRY_FOREIGN);
  kiln_modules_unload(other, nullptr);
}

TEST_F(CudaLaunchTest, EveryFailingCallIsReportedAndTheNextLaunchWorks) {
  const kiln_entry_t* entry = Find("moe", 3);
  fake_.context_stack = {fake_.context(1)};
  int failures = 0;
  for (int n = 1;; ++n) {
    ASSERT_LT(n, 20);
    fake_.ClearLog();
    fake_.FailCall(n, 2);
    const kiln_status_t status = Launch(entry, 3);
    ASSERT_EQ(fake_.context_stack.size(), 1u);
    EXPECT_EQ(fake_.current(), fake_.context(1));
    if (!fake_.failed()) {
      EXPECT_EQ(status, KILN_STATUS_OK);
      break;
    }
    ++failures;
    EXPECT_EQ(status, KILN_STATUS_DRIVER);
    EXPECT_EQ(error_.driver_code, 2);
    EXPECT_THAT(error_.message, HasSubstr("CUDA_ERROR_OUT_OF_MEMORY (2)"));
  }
  EXPECT_EQ(failures, 5);  // get, push, launch, launch, pop
}

TEST_F(CudaLaunchTest, AFailedLaunchNamesEntryStepAndTokens) {
  fake_.FailCall(3, 2);
  EXPECT_EQ(Launch(Find("moe", 3), 3), KILN_STATUS_DRIVER);
  EXPECT_THAT(error_.message,
              AllOf(HasSubstr("entry 'moe' (fused_moe): m 3, step 1 'fc2'"),
                    HasSubstr("cuLaunchKernel failed")));
}

TEST_F(CudaLaunchTest, ParameterLayoutIsReported) {
  const kiln_entry_t* entry = Find("moe", 1);
  uint32_t count = 0;
  uint32_t bytes = 0;
  ASSERT_EQ(kiln_entry_params(entry, &count, &bytes, &error_), KILN_STATUS_OK);
  EXPECT_EQ(count, 2u);
  EXPECT_EQ(bytes, 16u);
  kiln_param_info_t info = {};
  info.struct_size = sizeof(info);
  ASSERT_EQ(kiln_entry_param(entry, 0, &info, &error_), KILN_STATUS_OK);
  EXPECT_STREQ(info.name, "x");
  EXPECT_EQ(kiln_entry_param(entry, 2, &info, &error_),
            KILN_STATUS_INVALID_ARGUMENT);
}

TEST(StepTest, AStepWithAnEmptyGridIsSkipped) {
  FakeDriver& fake = FakeDriver::Get();
  fake.Reset();
  BundleSection section = TinyCudaSection();
  // floor((m - 1) / 4) would be negative at m = 1; ceil((0 * m + 0) / 1) is the
  // way to write an empty step.
  section.entries[0].plans[0].body.steps[0].grid[1] =
      LaunchDim::Of({.mul = 0, .add = 0, .div = 1});
  kiln_bundle_t* bundle = OpenTiny({section});
  kiln_load_options_t options = {};
  options.struct_size = sizeof(options);
  options.driver = fake.table();
  kiln_modules_t* modules = nullptr;
  ASSERT_EQ(kiln_modules_load(bundle, &options, &modules, nullptr),
            KILN_STATUS_OK);
  const kiln_entry_t* entry = nullptr;
  ASSERT_EQ(kiln_entry_find(modules, "moe", 1, &entry, nullptr),
            KILN_STATUS_OK);
  const uint64_t params[2] = {16, 32};
  EXPECT_EQ(kiln_launch(modules, entry, 1, params, 16, Address(0x100000), 4096,
                        nullptr, nullptr),
            KILN_STATUS_OK);
  ASSERT_EQ(fake.launches().size(), 1u);
  EXPECT_EQ(fake.launches()[0].kernel, "fc2");
  kiln_modules_unload(modules, nullptr);
  kiln_bundle_close(bundle, nullptr);
}

// Entries of one model differ in a digit or two, wherever it stands.
TEST(HashNameTest, NamesThatDifferInADigitSpreadOverTheBuckets) {
  for (const char* form : {"scale%03d", "layer%03d.moe", "%03d", "moe%d",
                           "model.layers.%d.mlp.experts"}) {
    std::set<uint64_t> buckets;
    for (int i = 0; i < 256; ++i) {
      char name[64];
      std::snprintf(name, sizeof(name), form, i);
      size_t bytes = 0;
      buckets.insert(runtime::HashName(name, &bytes) % 512);
      EXPECT_EQ(bytes, std::strlen(name));
    }
    // A random function hits 512 (1 - exp(-1/2)) = 201.
    EXPECT_GE(buckets.size(), 180u) << form;
  }
}

// A name may end where memory ends; what lies behind it changes nothing.
TEST(HashNameTest, ReadsNothingBehindThePageAndHashesTheNameAlone) {
  constexpr size_t kPage = 4096;
  auto* pages =
      static_cast<char*>(mmap(nullptr, 2 * kPage, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(pages, MAP_FAILED);
  ASSERT_EQ(mprotect(pages + kPage, kPage, PROT_NONE), 0);
  std::set<uint64_t> hashes;
  for (size_t length = 0; length <= 50; ++length) {
    const std::string name = std::string("model.layers.17.mlp.experts.")
                                 .substr(0, std::min<size_t>(length, 28)) +
                             std::string(length > 28 ? length - 28 : 0, 'x');
    std::set<uint64_t> of_this_name;
    for (const size_t offset : {kPage - length - 1, size_t{64}, size_t{77}}) {
      for (const char around : {'?', '\0'}) {
        std::memset(pages, around, kPage);
        std::memcpy(pages + offset, name.c_str(), length + 1);
        size_t bytes = 0;
        of_this_name.insert(runtime::HashName(pages + offset, &bytes));
        EXPECT_EQ(bytes, length);
      }
    }
    EXPECT_EQ(of_this_name.size(), 1u) << name;
    hashes.insert(*of_this_name.begin());
  }
  EXPECT_EQ(hashes.size(), 51u);
  munmap(pages, 2 * kPage);
}

TEST(ManyIntervalsTest, TheMessageShowsTheFirstOnesAndTheLast) {
  FakeDriver& fake = FakeDriver::Get();
  fake.Reset();
  BundleSection section = TinyCudaSection();
  const Plan model = section.entries[1].plans[0];
  section.entries.resize(2);
  section.entries[1].plans.clear();
  for (uint32_t m = 1; m <= 300; ++m) {
    Plan plan = model;
    plan.interval = {m, m};
    section.entries[1].plans.push_back(plan);
  }
  kiln_bundle_t* bundle = OpenTiny({section});
  kiln_load_options_t options = {};
  options.struct_size = sizeof(options);
  options.driver = fake.table();
  kiln_modules_t* modules = nullptr;
  ASSERT_EQ(kiln_modules_load(bundle, &options, &modules, nullptr),
            KILN_STATUS_OK);
  for (uint32_t m = 1; m <= 300; ++m) {
    const kiln_entry_t* entry = nullptr;
    ASSERT_EQ(kiln_entry_find(modules, "dense", m, &entry, nullptr),
              KILN_STATUS_OK);
    kiln_plan_info_t info = {};
    info.struct_size = sizeof(info);
    ASSERT_EQ(kiln_entry_plan(entry, &info, nullptr), KILN_STATUS_OK);
    EXPECT_EQ(info.m_min, m);
  }
  const kiln_entry_t* entry = nullptr;
  kiln_error_t error = {};
  EXPECT_EQ(kiln_entry_find(modules, "dense", 301, &entry, &error),
            KILN_STATUS_TOKENS_OUT_OF_RANGE);
  EXPECT_THAT(error.message, AllOf(HasSubstr("1..1, 2..2, 3..3, 4..4, 5..5, "
                                             "6..6, ..., 300..300; bundle"),
                                   HasSubstr("and kiln freeze")));
  kiln_modules_unload(modules, nullptr);
  kiln_bundle_close(bundle, nullptr);
}

class CpuLaunchTest : public ::testing::Test {
 protected:
  explicit CpuLaunchTest(
      BundleSection section = TinyCpuSection(TinyKernelBinary())) {
    bundle_ = OpenTiny({std::move(section)});
    kiln_load_options_t options = {};
    options.struct_size = sizeof(options);
    options.cpu_threads = 3;
    EXPECT_EQ(kiln_modules_load(bundle_, &options, &modules_, &error_),
              KILN_STATUS_OK)
        << error_.message;
  }

  ~CpuLaunchTest() override {
    kiln_modules_unload(modules_, nullptr);
    kiln_bundle_close(bundle_, nullptr);
  }

  // Launches the sums of m seeded rows and compares with a plain loop.
  void LaunchAndCheck(uint32_t m, uint32_t seed) {
    std::vector<float> x(size_t{m} * kTinyWidth);
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = static_cast<float>((i * 7 + seed) % 13) - 6;
    }
    std::vector<float> out(m + 1, -1);
    const kiln_entry_t* entry = nullptr;
    kiln_error_t error = {};
    ASSERT_EQ(kiln_entry_find(modules_, "sumsq", m, &entry, &error),
              KILN_STATUS_OK)
        << error.message;
    uint64_t bytes = 0;
    ASSERT_EQ(kiln_entry_arena_size(entry, &bytes, nullptr, &error),
              KILN_STATUS_OK);
    void* arena = std::aligned_alloc(256, bytes);
    std::memset(arena, 0xff, bytes);
    const void* params[2] = {x.data(), out.data()};
    EXPECT_EQ(kiln_launch(modules_, entry, m, params, sizeof(params), arena,
                          bytes, nullptr, &error),
              KILN_STATUS_OK)
        << error.message;
    std::free(arena);
    for (uint32_t t = 0; t < m; ++t) {
      float expected = 0;
      for (uint32_t i = 0; i < kTinyWidth; ++i) {
        const float v = x[t * kTinyWidth + i];
        expected += v * v;
      }
      ASSERT_EQ(out[t], expected) << "row " << t << " of " << m;
    }
    EXPECT_EQ(out[m], -1);
  }

  kiln_bundle_t* bundle_ = nullptr;
  kiln_modules_t* modules_ = nullptr;
  kiln_error_t error_ = {};
};

TEST_F(CpuLaunchTest, RunsAPlanAndGivesTheRightResult) {
  for (const uint32_t m : {1u, 2u, 3u, 17u, 255u, 256u}) LaunchAndCheck(m, m);
}

TEST_F(CpuLaunchTest, StepsAreSeparatedByABarrier) {
  // The second step reads rows that other threads wrote in the first.
  for (uint32_t round = 0; round < 300; ++round) LaunchAndCheck(64, round);
}

TEST_F(CpuLaunchTest, SeveralThreadsMayLaunchAtOnce) {
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (uint32_t round = 0; round < 100; ++round) {
        LaunchAndCheck(1 + (round * 5 + t) % 200, round + 1000 * t);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CpuLaunchTest, AStreamIsRefused) {
  const kiln_entry_t* entry = nullptr;
  ASSERT_EQ(kiln_entry_find(modules_, "sumsq", 1, &entry, &error_),
            KILN_STATUS_OK);
  alignas(256) char arena[512];
  const void* params[2] = {arena, arena};
  EXPECT_EQ(
      kiln_launch(modules_, entry, 1, params, sizeof(params), arena,
                  sizeof(arena), reinterpret_cast<CUstream_st*>(1), &error_),
      KILN_STATUS_STREAM_NOT_ALLOWED);
}

// A section whose only step counts blocks in a 3-D grid.
BundleSection CountingSection(const char* kernel) {
  BundleSection section = TinyCpuSection(TinyKernelBinary());
  Plan plan = section.entries[0].plans[1];
  plan.interval = {1, 1000};
  plan.body.cpu_threads = 3;
  plan.body.arena = {};
  plan.body.params = {
      {.name = "counts", .dtype = "u32", .shape = "[...]", .output = true}};
  Step step;
  step.label = kernel;
  step.entry = kernel;
  step.grid = {LaunchDim::Of({.mul = 1, .add = 0, .div = 1}),
               LaunchDim::Constant(5), LaunchDim::Constant(3)};
  step.args = {Arg::Param(0), Arg::Tokens(), Arg::U32(5)};
  if (std::string(kernel) == "control") {
    step.grid[1] = step.grid[2] = LaunchDim::Constant(1);
    step.args = {Arg::Param(0)};
  }
  plan.body.steps = {step};
  section.entries[0].name = "count";
  section.entries[0].plans = {plan};
  section.entries[0].buffers.clear();
  return section;
}

class CountLaunchTest : public CpuLaunchTest {
 protected:
  CountLaunchTest() : CpuLaunchTest(CountingSection("count")) {}
};

TEST_F(CountLaunchTest, EveryBlockOfTheGridRunsOnce) {
  const kiln_entry_t* entry = nullptr;
  ASSERT_EQ(kiln_entry_find(modules_, "count", 1, &entry, &error_),
            KILN_STATUS_OK);
  for (const uint32_t m : {1u, 2u, 7u, 100u, 1000u}) {
    std::vector<uint32_t> counts(size_t{15} * m + 1);
    void* params[1] = {counts.data()};
    ASSERT_EQ(kiln_launch(modules_, entry, m, params, sizeof(params), nullptr,
                          0, nullptr, &error_),
              KILN_STATUS_OK)
        << error_.message;
    for (size_t i = 0; i < counts.size(); ++i) {
      ASSERT_EQ(counts[i], i + 1 < counts.size() ? 1u : 0u) << i;
    }
  }
}

class ControlLaunchTest : public CpuLaunchTest {
 protected:
  ControlLaunchTest() : CpuLaunchTest(CountingSection("control")) {}
};

TEST_F(ControlLaunchTest, BlocksRunWithTheProvedFloatingPointState) {
  const kiln_entry_t* entry = nullptr;
  ASSERT_EQ(kiln_entry_find(modules_, "count", 200, &entry, &error_),
            KILN_STATUS_OK);
  std::vector<uint32_t> control(200);
  void* params[1] = {control.data()};
  const unsigned before = _mm_getcsr();
  // Flush to zero, denormals are zero, round towards zero: an engine's choice.
  _mm_setcsr(0xffc0);
  const kiln_status_t status =
      kiln_launch(modules_, entry, 200, params, sizeof(params), nullptr, 0,
                  nullptr, &error_);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  ASSERT_EQ(status, KILN_STATUS_OK);
  EXPECT_EQ(after, 0xffc0u);
  for (const uint32_t value : control) EXPECT_EQ(value & 0xffc0u, 0x1f80u);
}

}  // namespace
}  // namespace kiln
