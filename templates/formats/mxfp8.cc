#include "templates/formats/mxfp8.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "compiler/base/check.h"

namespace kiln {
namespace {

constexpr double kE4m3Max = 448;
constexpr uint8_t kE4m3MaxCode = 0x7E;
constexpr int kExponentMin = -6;  // of normal numbers
constexpr uint8_t kSign = 0x80;

constexpr std::array<uint8_t, kMxfp8Block> MakeNpkOrder() {
  std::array<uint8_t, kMxfp8Block> order{};
  for (size_t g = 0; g < 2; ++g) {
    for (size_t c = 0; c < 4; ++c) {
      for (size_t i = 0; i < 4; ++i) {
        order[16 * g + 4 * c + i] =
            static_cast<uint8_t>(16 * g + 2 * c + (i & 1) + 8 * (i >> 1));
      }
    }
  }
  return order;
}

}  // namespace

const std::array<uint8_t, kMxfp8Block> kSqgOrder = {
    0,  1,  8,  9,  4,  5,  12, 13, 2,  3,  10, 11, 6,  7,  14, 15,
    20, 21, 28, 29, 16, 17, 24, 25, 22, 23, 30, 31, 18, 19, 26, 27};
const std::array<uint8_t, kMxfp8Block> kNpkOrder = MakeNpkOrder();

float E4m3Value(uint8_t code) {
  const int field = code >> 3 & 15;
  const int fraction = code & 7;
  if (field == 15 && fraction == 7) {
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float magnitude =
      field == 0 ? std::ldexp(static_cast<float>(fraction), kExponentMin - 3)
                 : std::ldexp(static_cast<float>(8 + fraction), field - 7 - 3);
  return (code & kSign) != 0 ? -magnitude : magnitude;
}

uint8_t E4m3Of(double value) {
  if (std::isnan(value)) return kE4m3Nan;
  const uint8_t sign = std::signbit(value) ? kSign : 0;
  const double magnitude = std::abs(value);
  if (magnitude >= kE4m3Max) return sign | kE4m3MaxCode;
  // The unit of the last place; subnormals share the smallest normal one's.
  const int exponent = magnitude < std::ldexp(1.0, kExponentMin)
                           ? kExponentMin
                           : std::ilogb(magnitude);
  // 8..16 for normal numbers; 16 and a subnormal 8 carry into the exponent.
  const auto steps =
      static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  const int code = 8 * (exponent - kExponentMin) + steps;
  return static_cast<uint8_t>(sign | std::min(code, int{kE4m3MaxCode}));
}

double Ue8m0Value(uint8_t byte) {
  if (byte == kScaleNan) return std::numeric_limits<double>::quiet_NaN();
  return std::ldexp(1.0, byte - kScaleOne);
}

uint8_t Mxfp8ScaleOf(float amax) {
  if (!std::isfinite(amax)) return kScaleNan;
  if (amax == 0) return kScaleOne;
  constexpr uint32_t kFraction = (1u << 23) - 1;
  const uint32_t bits =
      std::bit_cast<uint32_t>(amax / static_cast<float>(kE4m3Max));
  const auto field = static_cast<int>(bits >> 23);
  const uint32_t fraction = bits & kFraction;
  // A subnormal quotient is fraction * 2^-149, often below the least scale.
  const int exponent = field != 0 ? field - 127 + (fraction != 0 ? 1 : 0)
                       : fraction == 0
                           ? -127
                           : -149 + std::bit_width(fraction) -
                                 (std::has_single_bit(fraction) ? 1 : 0);
  return static_cast<uint8_t>(std::max(exponent, -127) + kScaleOne);
}

void QuantizeMxfp8(std::span<const float, kMxfp8Block> values, uint8_t* scale,
                   std::span<uint8_t, kMxfp8Block> payload) {
  float amax = 0;
  for (const float value : values) {
    // A NaN stays: the comparison is false for one, on either side.
    if (!(std::abs(value) <= amax)) amax = std::abs(value);
    if (std::isnan(amax)) break;
  }
  *scale = Mxfp8ScaleOf(amax);
  for (size_t i = 0; i < kMxfp8Block; ++i) {
    payload[i] = *scale == kScaleNan
                     ? kE4m3Nan
                     : E4m3Of(std::ldexp(static_cast<double>(values[i]),
                                         kScaleOne - *scale));
  }
}

size_t ScaleMmaOffset(size_t row, size_t group, size_t groups) {
  KILN_CHECK(group < groups);
  const size_t panel = (groups + 3) / 4 * 512;  // bytes of 128 rows
  return row % 32 * 16 + row / 32 % 4 * 4 + row / 128 * panel + group % 4 +
         group / 4 * 512;
}

}  // namespace kiln
