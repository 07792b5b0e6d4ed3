#include "templates/formats/mxfp8.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using nlohmann::json;
using testing::ReadJson;
using testing::VectorsFolder;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Mxfp8Test, EveryCodeHasItsValue) {
  const json file = ReadJson(VectorsFolder() / "e4m3_and_scale_layout.json");
  const json& values = file.at("e4m3fn_values");
  ASSERT_EQ(values.size(), 256u);
  for (size_t code = 0; code < 256; ++code) {
    const float value = E4m3Value(static_cast<uint8_t>(code));
    if (values[code].is_null()) {
      EXPECT_TRUE(std::isnan(value)) << code;
      continue;
    }
    EXPECT_EQ(std::bit_cast<uint32_t>(value),
              std::bit_cast<uint32_t>(values[code].get<float>()))
        << code;
  }
}

TEST(Mxfp8Test, ScalePlaneOffsetsMatch) {
  const json file = ReadJson(VectorsFolder() / "e4m3_and_scale_layout.json");
  const json& offsets = file.at("scale_mma_offsets");
  ASSERT_FALSE(offsets.empty());
  for (const json& item : offsets) {
    EXPECT_EQ(
        ScaleMmaOffset(item.at("row"), item.at("group"), item.at("groups_k")),
        item.at("byte_offset").get<size_t>())
        << item;
  }
}

TEST(Mxfp8Test, EveryBlockMatchesTheExactRule) {
  const json file = ReadJson(VectorsFolder() / "mxfp8.json");
  const auto order = file.at("k32_native_a_permutation");
  EXPECT_EQ(std::vector<uint8_t>(kSqgOrder.begin(), kSqgOrder.end()),
            order.get<std::vector<uint8_t>>());
  ASSERT_FALSE(file.at("blocks").empty());
  for (const json& block : file.at("blocks")) {
    SCOPED_TRACE(block.at("name").get<std::string>());
    const auto bits = block.at("x_f32_bits").get<std::vector<uint32_t>>();
    ASSERT_EQ(bits.size(), kMxfp8Block);
    std::array<float, kMxfp8Block> values;
    for (size_t i = 0; i < kMxfp8Block; ++i) {
      values[i] = std::bit_cast<float>(bits[i]);
    }
    uint8_t scale = 0;
    std::array<uint8_t, kMxfp8Block> payload;
    QuantizeMxfp8(values, &scale, payload);
    if (block.contains("policy")) {
      // Not a number: no rule of the format covers it, and it must not get one.
      EXPECT_EQ(scale, kScaleNan);
      continue;
    }
    EXPECT_EQ(scale, block.at("scale_byte").get<int>());
    EXPECT_EQ(std::vector<uint8_t>(payload.begin(), payload.end()),
              block.at("payload").get<std::vector<uint8_t>>());
  }
}

TEST(Mxfp8Test, EveryValueAndEveryMidpointRoundsToEven) {
  for (int code = 0; code < 0x7E; ++code) {
    const double low = E4m3Value(static_cast<uint8_t>(code));
    const double high = E4m3Value(static_cast<uint8_t>(code + 1));
    const double middle = (low + high) / 2;
    const int even = code % 2 == 0 ? code : code + 1;
    for (const int sign : {0, 0x80}) {
      const double s = sign != 0 ? -1 : 1;
      EXPECT_EQ(E4m3Of(s * low), sign | code);
      EXPECT_EQ(E4m3Of(s * middle), sign | even) << code;
      EXPECT_EQ(E4m3Of(s * std::nextafter(middle, 0.0)), sign | code) << code;
      EXPECT_EQ(E4m3Of(s * std::nextafter(middle, 1e9)), sign | (code + 1))
          << code;
    }
  }
  EXPECT_EQ(E4m3Of(448), 0x7E);
  EXPECT_EQ(E4m3Of(1e300), 0x7E);
  EXPECT_EQ(E4m3Of(-kInf), 0xFE);
  EXPECT_EQ(E4m3Of(-0.0), 0x80);
  EXPECT_EQ(E4m3Of(kNan), 0x7F);
}

TEST(Mxfp8Test, TheScaleIsTheLeastPowerOfTwoThatIsNotBelow) {
  // One mantissa step around every power of two times 448, and the ends.
  for (int exponent = -120; exponent <= 119; ++exponent) {
    const float edge = std::ldexp(448.0f, exponent);
    EXPECT_EQ(Mxfp8ScaleOf(edge), exponent + 127);
    EXPECT_EQ(Mxfp8ScaleOf(std::nextafter(edge, 0.0f)), exponent + 127);
    EXPECT_EQ(Mxfp8ScaleOf(std::nextafter(edge, kInf)), exponent + 128);
  }
  EXPECT_EQ(Mxfp8ScaleOf(0), 127);
  EXPECT_EQ(Mxfp8ScaleOf(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(Mxfp8ScaleOf(std::numeric_limits<float>::max()), 247);
  EXPECT_EQ(Mxfp8ScaleOf(kInf), 255);
  EXPECT_EQ(Mxfp8ScaleOf(kNan), 255);
}

TEST(Mxfp8Test, ABlockThatIsNotFiniteIsAllNan) {
  for (const float bad : {kNan, kInf, -kInf}) {
    for (const size_t at : {size_t{0}, size_t{17}, size_t{31}}) {
      std::array<float, kMxfp8Block> values;
      values.fill(1.0f);
      values[at] = bad;
      uint8_t scale = 0;
      std::array<uint8_t, kMxfp8Block> payload;
      QuantizeMxfp8(values, &scale, payload);
      EXPECT_EQ(scale, 255);
      for (const uint8_t code : payload) EXPECT_EQ(code, 0x7F);
      EXPECT_TRUE(std::isnan(Mxfp8Value(scale, payload[3])));
    }
  }
}

TEST(Mxfp8Test, ErrorIsAtMostHalfAStepOfTheLargestValue) {
  testing::SplitMix64 random(5);
  for (int round = 0; round < 1000; ++round) {
    std::array<float, kMxfp8Block> values;
    for (float& value : values) {
      value = static_cast<float>(std::ldexp(random.Symmetric(), round % 60));
    }
    uint8_t scale = 0;
    std::array<uint8_t, kMxfp8Block> payload;
    QuantizeMxfp8(values, &scale, payload);
    for (size_t i = 0; i < kMxfp8Block; ++i) {
      const double magnitude = std::abs(static_cast<double>(values[i]));
      const double step = std::max(magnitude / 16, Ue8m0Value(scale) / 1024);
      EXPECT_LE(std::abs(Mxfp8Value(scale, payload[i]) - values[i]), step);
    }
  }
}

TEST(Mxfp8Test, OrdersArePermutations) {
  for (const auto& order : {kSqgOrder, kNpkOrder}) {
    uint32_t seen = 0;
    for (const uint8_t element : order) seen |= 1u << element;
    EXPECT_EQ(seen, 0xFFFFFFFFu);
  }
}

}  // namespace
}  // namespace kiln
