// Ceilings of this machine's processor, through the real kernels.

#include "tuner/measure_ceilings.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/tuner/cpu_programs.h"

namespace kiln {
namespace {

using testing::CcCpuPath;
using testing::WhyNoCcCpu;

TEST(MeasureCeilingsTest, EveryCeilingOfTheProcessorIsPlausible) {
  if (const std::string why = WhyNoCcCpu(); !why.empty()) GTEST_SKIP() << why;
  ASSERT_OK_AND_ASSIGN(const Target target, HostCpuTarget());
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Device> device,
                       OpenCpuDevice(target));
  ASSERT_OK_AND_ASSIGN(const CompilerSetup setup, ProbeCcCpu(CcCpuPath()));
  MeasureOptions options;
  options.jobs = 2;
  options.bits_min = options.bits_max = 4;
  std::vector<std::string> told;
  options.progress = [&](const std::string& line) { told.push_back(line); };
  ASSERT_OK_AND_ASSIGN(const Ceilings ceilings,
                       MeasureCeilings(device.get(), setup, options));
  // Orders of magnitude that every machine of this decade lies within.
  EXPECT_GT(ceilings.read_bytes_per_s, 1e8);
  EXPECT_LT(ceilings.read_bytes_per_s, 1e13);
  EXPECT_GT(ceilings.mma_flops_per_s, 1e8);
  EXPECT_LT(ceilings.mma_flops_per_s, 1e16);
  ASSERT_EQ(ceilings.decode_weights_per_s.size(), 3u);
  for (const auto& [rate, value] : ceilings.decode_weights_per_s) {
    EXPECT_EQ(rate.second, 4);
    EXPECT_GT(value, 1e6);
    EXPECT_LT(value, 1e13);
  }
  EXPECT_TRUE(ceilings.hash_weights_per_s.empty());
  EXPECT_NE(ceilings.Balance(), "");
  EXPECT_FALSE(told.empty());
}

}  // namespace
}  // namespace kiln
