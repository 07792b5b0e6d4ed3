// SiTU of kernels against the C library in binary64.

#include "templates/fused_moe/situ.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "gtest/gtest.h"

namespace kiln {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Distance in units of the last place of a binary32 near `expected`.
double Units(float got, double expected) {
  const int exponent =
      expected == 0 ? -126 : std::max(-126, std::ilogb(expected));
  return std::fabs(got - expected) / std::ldexp(1.0, exponent - 23);
}

TEST(SituTest, TanhIsWithinThreeUnitsOfAllSizes) {
  for (uint32_t bits = 0; bits < kd::FloatBits(100.0f); bits += 4093) {
    const float v = kd::BitsFloat(bits);
    const double expected = std::tanh(static_cast<double>(v));
    ASSERT_LE(Units(kd::Tanh(v), expected), 3) << v;
    ASSERT_EQ(kd::FloatBits(kd::Tanh(-v)), kd::FloatBits(-kd::Tanh(v))) << v;
  }
}

TEST(SituTest, TanhKeepsZeroInfinityAndNan) {
  EXPECT_EQ(kd::FloatBits(kd::Tanh(0.0f)), 0u);
  EXPECT_EQ(kd::FloatBits(kd::Tanh(-0.0f)), 0x80000000u);
  EXPECT_EQ(kd::Tanh(kInfinity), 1.0f);
  EXPECT_EQ(kd::Tanh(-kInfinity), -1.0f);
  EXPECT_TRUE(std::isnan(kd::Tanh(std::numeric_limits<float>::quiet_NaN())));
}

TEST(SituTest, IsTheProductOfItsFactors) {
  for (int g = -80; g <= 80; ++g) {
    for (int u = -60; u <= 60; ++u) {
      const double gate = 0.37 * g;
      const double up = 1.9 * u;
      const auto narrow_gate = static_cast<float>(gate);
      const auto narrow_up = static_cast<float>(up);
      const double expected = 4 * std::tanh(double{narrow_gate} / 4) /
                              (1 + std::exp(-double{narrow_gate})) * 25 *
                              std::tanh(double{narrow_up} / 25);
      ASSERT_NEAR(kd::Situ(narrow_gate, narrow_up), expected,
                  1e-6 * std::fabs(expected))
          << narrow_gate << ", " << narrow_up;
    }
  }
}

TEST(SituTest, NanInEitherFactorIsNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(kd::Situ(nan, 1.0f)));
  EXPECT_TRUE(std::isnan(kd::Situ(1.0f, nan)));
}

}  // namespace
}  // namespace kiln
