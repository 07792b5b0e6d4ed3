// The kernels' own MXFP8, NPK-1 and H512 against the formats' definitions.

#include "templates/fused_moe/mx_block.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "device/cpu_vector.h"
#include "gtest/gtest.h"
#include "templates/formats/mxfp8.h"
#include "templates/formats/npk_law.h"
#include "templates/fused_moe/mx_boundary.h"
#include "templates/fused_moe/mx_vector.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using nlohmann::json;
using testing::ReadJson;
using testing::SplitMix64;
using testing::VectorsFolder;

// Equal bits, or both NaN.
bool Same(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) ||
         (std::isnan(a) && std::isnan(b));
}

TEST(MxBlockTest, EveryE4m3CodeHasItsValue) {
  const json file = ReadJson(VectorsFolder() / "e4m3_and_scale_layout.json");
  const json& values = file.at("e4m3fn_values");
  ASSERT_EQ(values.size(), 256u);
  for (size_t code = 0; code < 256; ++code) {
    const float value = kd::E4m3ToFloat(static_cast<uint8_t>(code));
    const float want = values[code].is_null()
                           ? std::numeric_limits<float>::quiet_NaN()
                           : values[code].get<float>();
    EXPECT_TRUE(Same(value, want)) << code << ": " << value;
  }
}

// Every binary16 number, and its neighbours in binary32, which lie on both
// sides of every midpoint.
TEST(MxBlockTest, RoundsEveryNumberAsTheFormatDoes) {
  for (uint32_t half = 0; half < 65536; ++half) {
    const float middle = kd::f16_to_f32(static_cast<uint16_t>(half));
    for (const float value : {middle, std::nextafterf(middle, INFINITY),
                              std::nextafterf(middle, -INFINITY)}) {
      ASSERT_EQ(kd::FloatToE4m3(value), E4m3Of(value)) << value;
    }
  }
}

TEST(MxBlockTest, EveryScaleByteHasItsValue) {
  for (int byte = 0; byte < 256; ++byte) {
    const auto code = static_cast<uint8_t>(byte);
    EXPECT_TRUE(
        Same(kd::Ue8m0ToFloat(code), static_cast<float>(Ue8m0Value(code))))
        << byte;
  }
}

// All exponents with fractions around each decision: none, one unit, all.
TEST(MxBlockTest, TheScaleOfABlockIsThatOfTheFormat) {
  for (uint32_t field = 0; field < 256; ++field) {
    for (const uint32_t base : {0u, 0x600000u, 0x400000u, 0x7FFFFFu}) {
      for (int32_t step = -3; step <= 3; ++step) {
        const uint32_t fraction =
            (base + static_cast<uint32_t>(step)) & 0x7FFFFFu;
        const auto amax = std::bit_cast<float>(field << 23 | fraction);
        ASSERT_EQ(kd::Mxfp8ScaleByte(amax), Mxfp8ScaleOf(amax)) << amax;
      }
    }
  }
}

// Rounded to binary32, the logarithm of what lies just above a power of two is
// a whole number, the more often the larger the exponent is: a scale from it
// would be too small, and the largest value would not fit.
TEST(MxBlockTest, TheScaleIsNotThatOfALogarithm) {
  // Of the 64 numbers above 448 * 2^e, as many would have the wrong scale.
  const struct {
    int from, to, wrong;
  } counts[] = {{-126, -65, 39}, {-64, -33, 20}, {-32, -17, 9}, {-16, -9, 4},
                {-8, -5, 2},     {-4, 3, 0},     {4, 7, 2},     {8, 15, 4},
                {16, 31, 9},     {32, 63, 20},   {64, 119, 39}};

  int exponents = 0;
  for (const auto& [from, to, want] : counts) {
    for (int e = from; e <= to; ++e, ++exponents) {
      SCOPED_TRACE(e);
      int wrong = 0;
      float amax = std::ldexp(448.0f, e);
      for (int step = 0; step < 64; ++step) {
        amax = std::nextafterf(amax, INFINITY);
        const int scale = kd::Mxfp8ScaleByte(amax);
        ASSERT_EQ(scale, e + 128) << step;
        ASSERT_EQ(Mxfp8ScaleOf(amax), scale) << step;
        const auto logarithm =
            static_cast<float>(std::log2(static_cast<double>(amax / 448.0f)));
        wrong += static_cast<int>(std::ceil(logarithm)) + 127 != scale ? 1 : 0;
      }
      EXPECT_EQ(wrong, want);
    }
  }
  EXPECT_EQ(exponents, 246);
}

TEST(MxBlockTest, EveryBlockOfTheVectorsMatches) {
  const json file = ReadJson(VectorsFolder() / "mxfp8.json");
  ASSERT_FALSE(file.at("blocks").empty());
  for (const json& block : file.at("blocks")) {
    SCOPED_TRACE(block.at("name").get<std::string>());
    const auto bits = block.at("x_f32_bits").get<std::vector<uint32_t>>();
    float values[kd::kMxBlock];
    std::memcpy(values, bits.data(), sizeof values);
    std::vector<uint8_t> payload(kd::kMxBlock);
    const uint8_t scale = kd::QuantizeMxBlock(values, payload.data());
    if (block.contains("policy")) {
      EXPECT_EQ(scale, kScaleNan);
      continue;
    }
    EXPECT_EQ(scale, block.at("scale_byte").get<int>());
    EXPECT_EQ(payload, block.at("payload").get<std::vector<uint8_t>>());
  }
}

TEST(MxBlockTest, RandomBlocksOfEverySizeMatch) {
  SplitMix64 random(4);
  for (int exponent = -149; exponent <= 126; ++exponent) {
    float values[kd::kMxBlock];
    for (float& value : values) {
      value = static_cast<float>(std::ldexp(random.Symmetric(), exponent));
    }
    std::vector<uint8_t> payload(kd::kMxBlock);
    const uint8_t scale = kd::QuantizeMxBlock(values, payload.data());
    uint8_t want_scale = 0;
    std::vector<uint8_t> want(kd::kMxBlock);
    QuantizeMxfp8(values, &want_scale,
                  std::span<uint8_t, kMxfp8Block>(want.data(), kMxfp8Block));
    ASSERT_EQ(scale, want_scale) << exponent;
    ASSERT_EQ(payload, want) << exponent;
  }
}

TEST(MxBlockTest, ABlockWithAnInfinityOrNanIsAllNan) {
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    float values[kd::kMxBlock] = {1, 2, 3};
    values[17] = bad;
    std::vector<uint8_t> payload(kd::kMxBlock);
    EXPECT_EQ(kd::QuantizeMxBlock(values, payload.data()), kScaleNan);
    EXPECT_EQ(payload, std::vector<uint8_t>(kd::kMxBlock, kE4m3Nan));
  }
}

template <int L>
void CheckLaw() {
  for (uint32_t s = 0; s < 65536; s += L) {
    kd::U32V<L> states;
    for (int i = 0; i < L; ++i) states[i] = s + static_cast<uint32_t>(i);
    const kd::F32V<L> values = kd::DecodeNpkLanes<L>(states);
    for (int i = 0; i < L; ++i) {
      // The sign of zero is open; all else is exact.
      ASSERT_EQ(values[i], E4m3Value(kd::NpkByte(s + static_cast<uint32_t>(i))))
          << s + static_cast<uint32_t>(i);
    }
  }
}

TEST(MxVectorTest, EveryStateDecodesAsTheLawSays) {
  CheckLaw<8>();
  CheckLaw<16>();
}

TEST(MxVectorTest, EveryScaleByteHasItsValueInEveryPlace) {
  for (uint32_t byte = 0; byte < 255; ++byte) {
    for (uint32_t place = 0; place < 4; ++place) {
      kd::U32V<8> words = {};
      words =
          words + (0xA5A5A5A5u & ~(0xFFu << 8 * place)) + (byte << 8 * place);
      const kd::F32V<8> scales = kd::ScaleLanes<8>(words, place);
      ASSERT_EQ(scales[3],
                static_cast<float>(Ue8m0Value(static_cast<uint8_t>(byte))));
    }
  }
}

// Column j of the natural-order matrix, (-1)^popcount(i and j) / sqrt(512).
TEST(MxBoundaryTest, H512IsTheSylvesterMatrix) {
  for (const uint32_t j : {0u, 1u, 127u, 128u, 300u, 511u}) {
    float v[512] = {};
    v[j] = 1;
    kd::Hadamard512(v);
    for (uint32_t i = 0; i < 512; ++i) {
      const double sign = std::popcount(i & j) % 2 == 0 ? 1 : -1;
      ASSERT_NEAR(v[i], sign / std::sqrt(512.0), 1e-7) << i << ", " << j;
    }
  }
}

TEST(MxBoundaryTest, TheActivationIsClampedAndKeepsNan) {
  const auto silu = [](double g) { return g / (1 + std::exp(-g)); };
  EXPECT_NEAR(kd::MxActivate(20, 20, 10), silu(10) * 10, 1e-4);
  EXPECT_NEAR(kd::MxActivate(-20, -20, 10), silu(-20) * -10, 1e-6);
  EXPECT_NEAR(kd::MxActivate(2, 3, INFINITY), silu(2) * 3, 1e-5);
  EXPECT_TRUE(std::isnan(kd::MxActivate(NAN, 1, 10)));
  EXPECT_TRUE(std::isnan(kd::MxActivate(1, NAN, 10)));
}

}  // namespace
}  // namespace kiln
