#include "templates/seeded_values.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "compiler/base/check.h"
#include "templates/device/half.h"

namespace kiln {

uint64_t MixSeed(uint64_t seed, uint64_t a, uint64_t b, uint64_t c) {
  SplitMix64 random(seed ^ (a * 0xD1B54A32D192ED03u));
  SplitMix64 second(random.Next() ^ (b * 0x8CB92BA72F3D8DD7u));
  SplitMix64 third(second.Next() ^ (c * 0xAEF17502108EF2D9u));
  return third.Next();
}

void AppendHalf(std::string* out, double value) {
  AppendBytes(out, kd::f32_to_f16(static_cast<float>(value)));
}

void AppendNarrow(std::string* out, float value, bool bf16) {
  if (!bf16) return AppendHalf(out, value);
  const uint32_t word = kd::FloatBits(value);
  AppendBytes(out, std::isfinite(value)
                       ? static_cast<uint16_t>(
                             (word + 0x7FFF + ((word >> 16) & 1)) >> 16)
                       : static_cast<uint16_t>(word >> 16));
}

std::string MakeScales(uint64_t count, double magnitude, uint64_t seed) {
  SplitMix64 random(seed);
  std::string out;
  out.reserve(count * 2);
  for (uint64_t i = 0; i < count; ++i) {
    const double spread = 0.75 + 0.5 * random.Unit();
    const double sign = (random.Next() & 1) != 0 ? 1 : -1;
    AppendHalf(&out, sign * spread * magnitude);
  }
  return out;
}

std::string MakeWords(uint64_t bytes, uint64_t seed) {
  SplitMix64 random(seed);
  std::string out(bytes, '\0');
  for (uint64_t at = 0; at < bytes; at += 8) {
    const uint64_t word = random.Next();
    std::memcpy(out.data() + at, &word, std::min<uint64_t>(8, bytes - at));
  }
  return out;
}

BufferFill FloatFill(DType dtype, int exponent, bool with_sign) {
  int mantissa_bits = 23;
  int bias = 127;
  int sign_bit = 31;
  if (dtype == DType::kF16) {
    mantissa_bits = 10;
    bias = 15;
    sign_bit = 15;
  } else if (dtype == DType::kBf16) {
    mantissa_bits = 7;
    sign_bit = 15;
  }
  BufferFill fill;
  fill.kind = BufferFill::Kind::kWords;
  fill.element_bytes = DTypeBytes(dtype);
  fill.a = (uint64_t{1} << mantissa_bits) - 1;
  if (with_sign) fill.a |= uint64_t{1} << sign_bit;
  fill.b = static_cast<uint64_t>(bias + exponent) << mantissa_bits;
  return fill;
}

void SetFillBytes(const std::vector<uint64_t>& none,
                  const std::vector<uint64_t>& one,
                  std::vector<BufferFill>* fills) {
  KILN_CHECK(fills->size() == none.size() && fills->size() == one.size());
  for (size_t i = 0; i < fills->size(); ++i) {
    (*fills)[i].bytes = none[i];
    (*fills)[i].bytes_per_token = one[i] - none[i];
  }
}

}  // namespace kiln
