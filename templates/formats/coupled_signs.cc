#include "templates/formats/coupled_signs.h"

#include <random>

#include "compiler/base/check.h"

namespace kiln {

std::vector<int8_t> CoupledSigns(uint8_t draw, SignAxis axis, size_t count) {
  KILN_CHECK(draw <= kSignDrawMax);
  std::vector<int8_t> signs(count, 1);
  if (draw == 0) return signs;
  constexpr uint64_t kDrawFactor = 0x6A09E667F3BCC909;
  constexpr uint64_t kAxisFactor = 0xBB67AE8584CAA73B;
  // Of the seed, taken modulo 2^63, the generator uses the low half.
  const uint64_t seed =
      kDrawFactor * draw + kAxisFactor * static_cast<uint64_t>(axis);
  std::mt19937 random(static_cast<uint32_t>(seed));
  for (int8_t& sign : signs) sign = (random() & 1) != 0 ? 1 : -1;
  return signs;
}

}  // namespace kiln
