// Properties of templates/device that need no data file.

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <vector>

#include "device/activation.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "device/platform.h"
#include "device/trellis.h"
#include "gtest/gtest.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using testing::SplitMix64;

// Value of finite binary16 bits, from the definition of the format.
double ExactHalf(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const double magnitude = exponent == 0
                               ? std::ldexp(fraction, -24)
                               : std::ldexp(1024 + fraction, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

bool IsHalfNan(uint16_t bits) { return (bits & 0x7FFF) > 0x7C00; }

TEST(HalfTest, EveryBitPatternConvertsToItsValueAndBack) {
  for (uint32_t i = 0; i < 65536; ++i) {
    const uint16_t bits = static_cast<uint16_t>(i);
    for (const float value :
         {kd::f16_to_f32(bits), kd::soft::f16_to_f32(bits)}) {
      if (IsHalfNan(bits)) {
        ASSERT_TRUE(std::isnan(value)) << i;
        ASSERT_TRUE(IsHalfNan(kd::f32_to_f16(value))) << i;
        ASSERT_TRUE(IsHalfNan(kd::soft::f32_to_f16(value))) << i;
        continue;
      }
      if ((bits & 0x7FFF) == 0x7C00) {
        ASSERT_TRUE(std::isinf(value)) << i;
      } else {
        ASSERT_EQ(value, ExactHalf(bits)) << i;
      }
      ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << i;
      ASSERT_EQ(kd::f32_to_f16(value), bits) << i;
      ASSERT_EQ(kd::soft::f32_to_f16(value), bits) << i;
    }
  }
}

TEST(HalfTest, RoundingGoesToNearestWithTiesToEvenAtEveryMidpoint) {
  // Between consecutive finite positive values, infinity included.
  for (uint32_t i = 0; i < 0x7C00; ++i) {
    const double low = ExactHalf(static_cast<uint16_t>(i));
    const double high =
        i + 1 == 0x7C00 ? 65536.0 : ExactHalf(static_cast<uint16_t>(i + 1));
    const float middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(middle, (low + high) / 2);
    const float below = std::nextafterf(middle, 0.0f);
    const float above =
        std::nextafterf(middle, std::numeric_limits<float>::infinity());
    const uint16_t even = static_cast<uint16_t>(i + (i & 1));
    ASSERT_EQ(kd::f32_to_f16(middle), even) << i;
    ASSERT_EQ(kd::soft::f32_to_f16(middle), even) << i;
    ASSERT_EQ(kd::f32_to_f16(below), i);
    ASSERT_EQ(kd::soft::f32_to_f16(below), i);
    ASSERT_EQ(kd::f32_to_f16(above), i + 1);
    ASSERT_EQ(kd::soft::f32_to_f16(above), i + 1);
    ASSERT_EQ(kd::f32_to_f16(-above), 0x8000 | (i + 1));
    ASSERT_EQ(kd::soft::f32_to_f16(-above), 0x8000 | (i + 1));
  }
}

TEST(HalfTest, Bfloat16OutsideTheBinary16RangeBecomesInfinity) {
  EXPECT_EQ(kd::bf16_to_f16(0x3F80), 0x3C00);  // 1
  EXPECT_EQ(kd::bf16_to_f16(0x4780), 0x7C00);  // 65536
  EXPECT_EQ(kd::bf16_to_f16(0xC780), 0xFC00);
  EXPECT_EQ(kd::bf16_to_f16(0x0080), 0x0000);  // 2^-126
}

// Rounds an exact long double sum to binary16 by trying the neighbours.
uint16_t NearestHalf(long double exact) {
  if (exact == 0) return std::signbit(exact) ? 0x8000 : 0;
  const long double magnitude = std::fabs(exact);
  const uint16_t sign = exact < 0 ? 0x8000 : 0;
  if (magnitude >= 65520.0L) return static_cast<uint16_t>(sign | 0x7C00);
  // Binary search over the monotone positive patterns.
  uint32_t low = 0;
  uint32_t high = 0x7C00;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (ExactHalf(static_cast<uint16_t>(middle)) <= magnitude ? low : high) =
        middle;
  }
  const long double a = ExactHalf(static_cast<uint16_t>(low));
  const long double b =
      high == 0x7C00 ? 65536.0L : ExactHalf(static_cast<uint16_t>(high));
  const bool up = magnitude - a > b - magnitude ||
                  (magnitude - a == b - magnitude && (low & 1) != 0);
  return static_cast<uint16_t>(sign | (up ? high : low));
}

TEST(HalfTest, ArithmeticRoundsOnce) {
  SplitMix64 random(7);
  for (int i = 0; i < 400000; ++i) {
    const uint64_t bits = random.Next();
    const uint16_t a = static_cast<uint16_t>(bits);
    const uint16_t b = static_cast<uint16_t>(bits >> 16);
    const uint16_t c = static_cast<uint16_t>(bits >> 32);
    if (((a >> 10) & 31) == 31 || ((b >> 10) & 31) == 31 ||
        ((c >> 10) & 31) == 31) {
      continue;
    }
    const long double x = ExactHalf(a);
    const long double y = ExactHalf(b);
    const long double z = ExactHalf(c);
    if (x + y != 0) {
      ASSERT_EQ(kd::hadd(a, b), NearestHalf(x + y)) << a << " " << b;
    }
    if (x * y != 0) {
      ASSERT_EQ(kd::hmul(a, b), NearestHalf(x * y)) << a << " " << b;
    }
    // x * y has 22 bits above 2^-48 and z sits above 2^-24, so the 64-bit
    // significand loses a bit only where it cannot matter.
    if (x * y + z != 0) {
      ASSERT_EQ(kd::hfma(a, b, c), NearestHalf(x * y + z))
          << a << " " << b << " " << c;
    }
  }
}

TEST(TrellisTest, PositionMapsAreInverseOfEachOther) {
  std::set<std::pair<uint32_t, uint32_t>> seen;
  for (uint32_t p = 0; p < 256; ++p) {
    const uint32_t k = kd::PositionRow(p);
    const uint32_t n = kd::PositionColumn(p);
    ASSERT_LT(k, 16u);
    ASSERT_LT(n, 16u);
    ASSERT_EQ(kd::ElementPosition(k, n), p);
    seen.insert({k, n});
  }
  EXPECT_EQ(seen.size(), 256u);
}

// The state by its definition: sixteen single bits of the ring.
uint32_t StateFromBits(const std::vector<uint32_t>& words, int bits,
                       uint32_t p) {
  const uint32_t ring = 256u * static_cast<uint32_t>(bits);
  uint32_t state = 0;
  for (uint32_t i = 0; i < 16; ++i) {
    const uint32_t at =
        ((p + 1) * static_cast<uint32_t>(bits) + ring - 16 + i) % ring;
    state = 2 * state + ((words[at / 32] >> (31 - at % 32)) & 1);
  }
  return state;
}

template <int K>
void CheckWindows() {
  SplitMix64 random(100 + K);
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::vector<uint32_t> words(kd::kTileWords<K>);
    for (uint32_t& word : words) word = static_cast<uint32_t>(random.Next());
    for (uint32_t lane = 0; lane < 32; ++lane) {
      std::array<uint32_t, 8> states;
      kd::LaneStates<K>(words.data(), lane, states.data());
      for (uint32_t j = 0; j < 8; ++j) {
        const uint32_t p = 8 * lane + j;
        const uint32_t expected = StateFromBits(words, K, p);
        ASSERT_EQ(kd::Window<K>(words.data(), p), expected)
            << "K=" << K << " p=" << p;
        ASSERT_EQ(states[j], expected) << "K=" << K << " p=" << p;
      }
    }
  }
}

TEST(TrellisTest, WindowAndLaneStatesFollowTheBitStreamForEveryRate) {
  CheckWindows<1>();
  CheckWindows<2>();
  CheckWindows<3>();
  CheckWindows<4>();
  CheckWindows<5>();
  CheckWindows<6>();
  CheckWindows<7>();
  CheckWindows<8>();
}

template <int CB>
void CheckPairs() {
  for (uint32_t s = 0; s < 65536; ++s) {
    const uint32_t other = (s * 40503u + 77u) & 0xFFFFu;
    ASSERT_EQ(kd::DecodeStatePair<CB>(s, other),
              kd::DecodeState<CB>(s) |
                  (static_cast<uint32_t>(kd::DecodeState<CB>(other)) << 16));
  }
}

TEST(TrellisTest, PairDecodingEqualsSingleDecoding) {
  CheckPairs<kd::kCodebook3Inst>();
  CheckPairs<kd::kCodebookMcg>();
  CheckPairs<kd::kCodebookMul1>();
}

TEST(TrellisTest, McgStateZeroHasTheDocumentedBits) {
  EXPECT_EQ(kd::DecodeState<kd::kCodebookMcg>(0), 0x3F60);
}

TEST(HadamardTest, TransformEqualsTheSignMatrixOnIntegers) {
  SplitMix64 random(11);
  std::array<float, 128> v;
  for (float& value : v) {
    value = static_cast<float>(static_cast<int>(random.Next() % 2001) - 1000);
  }
  std::array<float, 128> expected{};
  for (uint32_t i = 0; i < 128; ++i) {
    for (uint32_t j = 0; j < 128; ++j) {
      expected[i] += std::popcount(i & j) % 2 != 0 ? -v[j] : v[j];
    }
  }
  kd::Hadamard128Unscaled(v.data());
  EXPECT_EQ(v, expected);  // integers below 2^24: exact
}

TEST(HadamardTest, ScaleIsTheDocumentedConstant) {
  EXPECT_EQ(kd::HadamardScale(), 0.088388347648f);
}

TEST(ActivationTest, ExpStaysWithinTwoUnitsInTheLastPlace) {
  double worst = 0;
  for (int i = -86000; i <= 87900; ++i) {
    const float v = static_cast<float>(i) * 1e-3f;
    const double exact = std::exp(static_cast<double>(v));
    const float f = static_cast<float>(exact);
    const double unit =
        std::nextafterf(f, std::numeric_limits<float>::infinity()) - f;
    worst = std::max(worst, std::fabs(kd::Exp(v) - exact) / unit);
  }
  EXPECT_LT(worst, 2.0);
}

TEST(ActivationTest, SiluIsAccurateAndPropagatesNan) {
  for (int i = -2000; i <= 2000; ++i) {
    const float v = static_cast<float>(i) * 0.05f;
    const double g = v;
    const double exact = g / (1 + std::exp(-g));
    EXPECT_NEAR(kd::Silu(v), exact, 1e-6 * std::fabs(exact) + 1e-35) << g;
  }
  EXPECT_TRUE(std::isnan(kd::Silu(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_EQ(kd::Silu(std::numeric_limits<float>::infinity()),
            std::numeric_limits<float>::infinity());
}

}  // namespace
}  // namespace kiln
