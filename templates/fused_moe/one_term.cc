#include "templates/fused_moe/one_term.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "templates/device/hadamard.h"

namespace kiln {

void SetOneTermScales(size_t hidden, std::string* gate, std::string* up) {
  for (size_t row = 0; row < gate->size(); row += hidden * 2) {
    for (size_t at = row; at < row + kd::kHadamardSize * 2; at += 2) {
      uint16_t bits = 0;
      std::memcpy(&bits, gate->data() + at, 2);
      bits = (bits & 0x8000u) | 0x3C00u;
      std::memcpy(gate->data() + at, &bits, 2);
      std::memcpy(up->data() + at, &bits, 2);
    }
  }
}

double OneTermValue(const RequestGeometry& geometry, absl::string_view gate_suh,
                    const std::vector<int64_t>& ids, uint32_t token,
                    int64_t channel) {
  if (channel >= kd::kHadamardSize) return 0;
  // Row r of the Hadamard matrix has the sign (-1)^popcount(r and c) in column
  // c; it is rotated into channel r alone.
  const uint32_t row = (token * 37 + 11) % kd::kHadamardSize;
  const bool minus =
      std::popcount(row & static_cast<uint32_t>(channel)) % 2 == 1;
  const int64_t expert = *std::max_element(ids.begin(), ids.end());
  const int64_t table = geometry.weights.shared_scales ? 0 : expert;
  uint16_t scale = 0;
  std::memcpy(&scale, gate_suh.data() + (table * geometry.hidden + channel) * 2,
              2);
  // A power of two near sqrt(hidden / 128), so that gates are of order one.
  const double size = std::exp2(
      std::round(0.5 * std::log2(static_cast<double>(geometry.hidden) /
                                 kd::kHadamardSize)));
  return minus != (scale >> 15 != 0) ? -size : size;
}

}  // namespace kiln
