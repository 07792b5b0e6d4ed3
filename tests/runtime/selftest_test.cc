// Golden replay: on the CPU with real programs, on CUDA through the fake
// driver.

#include "runtime/selftest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "runtime/bundle_format.h"
#include "runtime/kiln.h"
#include "tests/support/fake_driver.h"
#include "tests/support/status_matchers.h"
#include "tests/support/tiny_bundle.h"

namespace kiln {
namespace {

using ::kiln::testing::FakeDriver;
using ::kiln::testing::FakeLaunch;
using ::kiln::testing::kTinyHidden;
using ::kiln::testing::kTinyWidth;
using ::kiln::testing::RepairRoot;
using ::kiln::testing::TinyCpuSection;
using ::kiln::testing::TinyCudaSection;
using ::kiln::testing::TinyKernelBinary;
using ::testing::HasSubstr;

// The generator as bundle_format.md describes it, written once more.
uint64_t Random(uint64_t slot, uint64_t index) {
  uint64_t z = 0x9E3779B97F4A7C15u * (index + 1);
  z += 0xD1B54A32D192ED03u * (slot + 1);
  z ^= z >> 30;
  z *= 0xBF58476D1CE4E5B9u;
  z ^= z >> 27;
  z *= 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

struct Outcome {
  kiln_status_t status = KILN_STATUS_OK;
  std::string message;
  kiln_selftest_result_t result = {};
  std::vector<kiln_selftest_plan_t> plans;
};

// Writes, loads and tests; nothing stays open.
class SelftestTest : public ::testing::Test {
 protected:
  SelftestTest() {
    FakeDriver::Get().Reset();
    load_.struct_size = sizeof(load_);
    load_.cpu_threads = 2;
    load_.driver = FakeDriver::Get().table();
  }

  Outcome Run(const std::string& bytes, uint32_t flags = 0) {
    Outcome out;
    kiln_error_t error = {};
    kiln_bundle_t* bundle = nullptr;
    EXPECT_EQ(kiln_bundle_open_memory(bytes.data(), bytes.size(), nullptr,
                                      &bundle, &error),
              KILN_STATUS_OK)
        << error.message;
    kiln_modules_t* modules = nullptr;
    EXPECT_EQ(kiln_modules_load(bundle, &load_, &modules, &error),
              KILN_STATUS_OK)
        << error.message;
    kiln_selftest_options_t options = {};
    options.struct_size = sizeof(options);
    options.flags = flags;
    options.report = [](void* user, const kiln_selftest_plan_t* plan) {
      static_cast<Outcome*>(user)->plans.push_back(*plan);
    };
    options.user = &out;
    out.result.struct_size = sizeof(out.result);
    if (armed_) armed_();
    out.status = kiln_modules_selftest(modules, &options, &out.result, &error);
    out.message = error.message;
    if (armed_) {
      // Unload has calls of its own, which other tests fail.
      FakeDriver::Get().FailCall(1 << 20, 0);
    }
    EXPECT_EQ(kiln_modules_unload(modules, nullptr), KILN_STATUS_OK);
    kiln_bundle_close(bundle, nullptr);
    return out;
  }

  static std::string Write(const BundleSection& section) {
    const absl::StatusOr<std::string> bytes =
        WriteBundle({section}, {.allow_predicted = true});
    EXPECT_TRUE(bytes.ok()) << bytes.status();
    return bytes.value_or("");
  }

  // The section with the digests that this machine computes.
  BundleSection Frozen(BundleSection section) {
    const Outcome computed = Run(Write(section), KILN_SELFTEST_COMPUTE);
    EXPECT_EQ(computed.status, KILN_STATUS_OK) << computed.message;
    // Bundles are sorted; these sections' entries may not be.
    std::map<std::string, BundleEntry*> by_name;
    for (BundleEntry& entry : section.entries) by_name[entry.name] = &entry;
    std::vector<BundleEntry*> entries;
    for (const auto& [name, entry] : by_name) entries.push_back(entry);
    for (const kiln_selftest_plan_t& plan : computed.plans) {
      if (plan.outcome != KILN_SELFTEST_COMPUTED) continue;
      Digest digest;
      std::memcpy(digest.bytes.data(), plan.found, digest.bytes.size());
      BundleEntry& entry = *entries[plan.entry];
      entry.golden[entry.plans[plan.plan].interval] = digest;
    }
    return section;
  }

  kiln_load_options_t load_ = {};
  std::function<void()> armed_;  // just before the test
};

TEST_F(SelftestTest, ComputesTheDigestOfTheDocument) {
  const Outcome out =
      Run(Write(TinyCpuSection(TinyKernelBinary())), KILN_SELFTEST_COMPUTE);
  ASSERT_EQ(out.status, KILN_STATUS_OK) << out.message;
  EXPECT_EQ(out.result.computed, 2u);
  ASSERT_EQ(out.plans.size(), 2u);
  // Intervals 1..2 and 3..256: the middles are 1 and 129.
  const uint32_t tokens[2] = {1, 129};
  for (size_t p = 0; p < 2; ++p) {
    const kiln_selftest_plan_t& plan = out.plans[p];
    EXPECT_EQ(plan.outcome, uint32_t{KILN_SELFTEST_COMPUTED});
    EXPECT_EQ(plan.m, tokens[p]);
    EXPECT_EQ(plan.entry, 0u);
    EXPECT_EQ(plan.plan, p);
    // The kernels by hand: see tiny_kernel.c.
    std::vector<float> sums(tokens[p]);
    for (uint32_t t = 0; t < tokens[p]; ++t) {
      float total = 0;
      for (uint32_t i = 0; i < kTinyWidth; ++i) {
        const uint32_t bits =
            (static_cast<uint32_t>(Random(0, t * kTinyWidth + i)) &
             0x007fffffu) |
            0x3f800000u;
        float x;
        std::memcpy(&x, &bits, 4);
        volatile float square = x * x;  // the kernel stores it
        total += square;
      }
      sums[t] = total;
    }
    const Digest expected =
        Sha256({reinterpret_cast<const char*>(sums.data()), sums.size() * 4});
    EXPECT_EQ(std::memcmp(plan.found, expected.bytes.data(), 32), 0) << p;
  }
}

TEST_F(SelftestTest, WhatWasFrozenHerePasses) {
  const BundleSection section = Frozen(TinyCpuSection(TinyKernelBinary()));
  // For every number of threads.
  for (const uint32_t threads : {1u, 2u, 5u}) {
    load_.cpu_threads = threads;
    const Outcome out = Run(Write(section));
    EXPECT_EQ(out.status, KILN_STATUS_OK) << out.message;
    EXPECT_EQ(out.result.passed, 2u);
    EXPECT_EQ(out.result.no_digest, 0u);
    EXPECT_EQ(out.plans[0].outcome, uint32_t{KILN_SELFTEST_PASSED});
  }
}

TEST_F(SelftestTest, AChangedInstructionUnderARightRootIsCaught) {
  std::string bytes = Write(Frozen(TinyCpuSection(TinyKernelBinary())));
  // Kernel square's mulss becomes an addss: the program still loads.
  const size_t at = bytes.find("\xf3\x0f\x59");
  ASSERT_NE(at, std::string::npos) << "no mulss in tiny_kernel.so";
  bytes[at + 2] = '\x58';
  RepairRoot(&bytes);
  const Outcome out = Run(bytes);
  EXPECT_EQ(out.status, KILN_STATUS_SELFTEST_MISMATCH);
  EXPECT_THAT(out.message, HasSubstr("entry 'sumsq' (fused_moe), plan for m "
                                     "1..2: golden replay with m 1 gives "));
  EXPECT_THAT(out.message, HasSubstr("frozen with "));
  EXPECT_THAT(out.message, HasSubstr("kiln freeze"));
  // The rest was tested all the same.
  ASSERT_EQ(out.plans.size(), 2u);
  EXPECT_EQ(out.plans[0].outcome, uint32_t{KILN_SELFTEST_FAILED});
  EXPECT_EQ(out.plans[1].outcome, uint32_t{KILN_SELFTEST_FAILED});
  EXPECT_NE(std::memcmp(out.plans[1].found, out.plans[1].expected, 32), 0);
}

TEST_F(SelftestTest, AChangedArgumentIsCaught) {
  const BundleSection section = Frozen(TinyCpuSection(TinyKernelBinary()));
  std::string bytes = Write(section);
  kiln_format_header_t header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  const kiln_format_table_t& table = header.tables[KILN_FORMAT_TABLE_ARGS];
  auto* args =
      reinterpret_cast<kiln_format_arg_t*>(bytes.data() + table.offset);
  int caught = 0;
  for (uint32_t i = 0; i < table.count; ++i) {
    if (args[i].kind != KILN_FORMAT_ARG_U32) continue;
    --args[i].value;  // one element less of each row
    RepairRoot(&bytes);
    EXPECT_EQ(Run(bytes).status, KILN_STATUS_SELFTEST_MISMATCH) << i;
    ++args[i].value;
    ++caught;
  }
  EXPECT_EQ(caught, 4);
}

TEST_F(SelftestTest, APlanThatMayDifferIsSkippedAndSaysSo) {
  BundleSection section = TinyCpuSection(TinyKernelBinary());
  section.entries[0].plans[1].body.deterministic = false;
  const Outcome out = Run(Write(Frozen(section)));
  EXPECT_EQ(out.status, KILN_STATUS_OK) << out.message;
  EXPECT_EQ(out.result.passed, 1u);
  EXPECT_EQ(out.result.not_deterministic, 1u);
  EXPECT_EQ(out.plans[1].outcome, uint32_t{KILN_SELFTEST_NOT_DETERMINISTIC});
  EXPECT_EQ(out.plans[1].m, 0u);
}

TEST_F(SelftestTest, PlansWithoutADigestAreSkippedAndCounted) {
  const Outcome out = Run(Write(TinyCpuSection(TinyKernelBinary())));
  EXPECT_EQ(out.status, KILN_STATUS_OK) << out.message;
  EXPECT_EQ(out.result.passed, 0u);
  EXPECT_EQ(out.result.no_digest, 2u);
  EXPECT_EQ(out.plans[0].outcome, uint32_t{KILN_SELFTEST_NO_DIGEST});
}

TEST_F(SelftestTest, NeitherPredictedNorUndescribedPlansAreRun) {
  BundleSection predicted = TinyCpuSection(TinyKernelBinary());
  for (Plan& plan : predicted.entries[0].plans) plan.evidence = Evidence{};
  load_.flags = KILN_LOAD_ALLOW_PREDICTED;
  EXPECT_EQ(Run(Write(predicted), KILN_SELFTEST_COMPUTE).result.no_digest, 2u);
  BundleSection unknown = TinyCpuSection(TinyKernelBinary());
  unknown.entries[0].buffers.clear();
  EXPECT_EQ(Run(Write(unknown), KILN_SELFTEST_COMPUTE).result.no_digest, 2u);
}

TEST_F(SelftestTest, ABufferBeyondTheMachineIsRefused) {
  BundleSection section = TinyCpuSection(TinyKernelBinary());
  section.entries[0].buffers[0].bytes = uint64_t{1} << 39;
  const Outcome out = Run(Write(section), KILN_SELFTEST_COMPUTE);
  EXPECT_EQ(out.status, KILN_STATUS_OUT_OF_MEMORY);
  EXPECT_THAT(out.message, HasSubstr("golden replay: no memory"));
}

TEST_F(SelftestTest, ArgumentsAreChecked) {
  kiln_error_t error = {};
  EXPECT_EQ(kiln_modules_selftest(nullptr, nullptr, nullptr, &error),
            KILN_STATUS_CLOSED_HANDLE);
  kiln_selftest_options_t options = {};
  EXPECT_EQ(kiln_modules_selftest(nullptr, &options, nullptr, &error),
            KILN_STATUS_STRUCT_SIZE);
  options.struct_size = sizeof(options);
  options.flags = 2;
  EXPECT_EQ(kiln_modules_selftest(nullptr, &options, nullptr, &error),
            KILN_STATUS_INVALID_ARGUMENT);
  kiln_selftest_result_t result = {};
  EXPECT_EQ(kiln_modules_selftest(nullptr, nullptr, &result, &error),
            KILN_STATUS_STRUCT_SIZE);
}

// A kernel for the fake driver: out = x with its bits turned, for m tokens.
class FakeKernels {
 public:
  FakeKernels() {
    FakeDriver::Get().on_launch = [this](const FakeLaunch& launch) {
      const auto read = [&](size_t at, auto* value) {
        std::memcpy(value, launch.params.data() + at, sizeof(*value));
      };
      if (launch.kernel == "fc1") {
        read(0, &x_);
        return;
      }
      uint32_t m = 0;
      uint64_t out = 0;
      read(8, &m);
      read(16, &out);
      EXPECT_EQ(launch.stream, nullptr);
      const auto* x = reinterpret_cast<const uint16_t*>(x_);
      auto* to = reinterpret_cast<uint32_t*>(out);
      for (uint32_t i = 0; i < m * kTinyHidden; ++i) to[i] = x[i] * 3u ^ turn;
      tokens.push_back(m);
    };
  }

  uint32_t turn = 0;
  std::vector<uint32_t> tokens;

 private:
  uint64_t x_ = 0;
};

TEST_F(SelftestTest, CudaRunsEveryPlanOnceAndComparesItsOutput) {
  FakeKernels kernels;
  const BundleSection section = Frozen(TinyCudaSection());
  kernels.tokens.clear();
  FakeDriver::Get().ClearLog();
  const Outcome out = Run(Write(section));
  EXPECT_EQ(out.status, KILN_STATUS_OK) << out.message;
  EXPECT_EQ(out.result.passed, 4u);
  // "dense" for 1..8, then "moe" for 1..1, 2..4, 5..64.
  EXPECT_THAT(kernels.tokens, ::testing::ElementsAre(4u, 1u, 3u, 34u));
  EXPECT_EQ(FakeDriver::Get().live_memory(), 0u);
  // Inputs are made once for an entry, not for each plan.
  EXPECT_EQ(FakeDriver::Get().CountOf("cuMemcpyHtoD"), 2);
  for (uint32_t i = 0; i < 4; ++i) {
    const kiln_selftest_plan_t& plan = out.plans[i];
    std::vector<uint32_t> expected(plan.m * kTinyHidden);
    for (size_t e = 0; e < expected.size(); ++e) {
      const auto random = static_cast<uint32_t>(Random(0, e));
      expected[e] = ((random & 0x807f) | 0x3f00) * 3u;
    }
    const Digest digest = Sha256(
        {reinterpret_cast<const char*>(expected.data()), expected.size() * 4});
    EXPECT_EQ(std::memcmp(plan.found, digest.bytes.data(), 32), 0) << i;
  }
  kernels.turn = 1;
  EXPECT_EQ(Run(Write(section)).status, KILN_STATUS_SELFTEST_MISMATCH);
}

TEST_F(SelftestTest, CudaLeavesTheCurrentContextAlone) {
  FakeKernels kernels;
  const std::string bytes = Write(Frozen(TinyCudaSection()));
  FakeDriver& fake = FakeDriver::Get();
  load_.context = fake.context(1);
  fake.device_attributes[runtime::kDeviceComputeCapabilityMajor] = 9;
  EXPECT_EQ(Run(bytes).status, KILN_STATUS_OK);
  EXPECT_EQ(fake.current(), fake.context(0));
  EXPECT_EQ(fake.context_stackdepth(), 1u);
  EXPECT_EQ(fake.launches().back().current, fake.context(1));
}

TEST_F(SelftestTest, EveryFailingDriverCallIsReportedAndLeavesNothing) {
  FakeKernels kernels;
  const std::string bytes = Write(Frozen(TinyCudaSection()));
  FakeDriver& fake = FakeDriver::Get();
  std::map<std::string, int> failed;
  for (int n = 1; n < 500; ++n) {
    armed_ = [&] {
      fake.ClearLog();
      fake.FailCall(n, 2);
    };
    const Outcome out = Run(bytes);
    const std::string call =
        fake.failed() ? fake.calls()[static_cast<size_t>(n) - 1] : "";
    if (call.empty()) break;
    ++failed[call];
    EXPECT_EQ(fake.live_memory(), 0u) << call;
    EXPECT_EQ(fake.live_modules(), 0u) << call;
    EXPECT_EQ(fake.context_stackdepth(), 1u) << call;
    // Nothing can be done about memory that does not go away.
    EXPECT_EQ(out.status, call == "cuMemFree"    ? KILN_STATUS_OK
                          : call == "cuMemAlloc" ? KILN_STATUS_OUT_OF_MEMORY
                                                 : KILN_STATUS_DRIVER)
        << call << ": " << out.message;
    armed_ = nullptr;
    EXPECT_EQ(Run(bytes).status, KILN_STATUS_OK) << "after " << call;
  }
  for (const char* call : {"cuMemAlloc", "cuMemsetD8", "cuMemcpyHtoD",
                           "cuMemcpyDtoH", "cuLaunchKernel"}) {
    EXPECT_TRUE(failed.contains(call)) << call;
  }
}

}  // namespace
}  // namespace kiln
