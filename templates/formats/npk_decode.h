// Values of the matrices in an NPK-1 sidecar.

#ifndef KILN_TEMPLATES_FORMATS_NPK_DECODE_H_
#define KILN_TEMPLATES_FORMATS_NPK_DECODE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "templates/formats/npk.h"

namespace kiln {

enum class NpkMatrix : size_t { kGate, kUp, kDown };

// One expert's matrix as it is multiplied, row-major [out][in]: E4M3 values
// times their scales, exact.
std::vector<double> DecodeNpkMatrix(const NpkSidecar& sidecar, NpkMatrix matrix,
                                    int64_t expert);

// Binary16 bits of a tensor.
std::vector<uint16_t> NpkHalves(std::span<const uint8_t> bytes);

// The FC1 rows interleave atoms of 32 of gate (slot 0) and up (slot 1): which
// slot row r of 2 I comes from, and which of its rows.
constexpr size_t NpkSlotOf(size_t r) {
  return r / static_cast<size_t>(kNpkAtom) % 2;
}

constexpr size_t NpkSlotRowOf(size_t r) {
  constexpr auto kAtom = static_cast<size_t>(kNpkAtom);
  return r / (2 * kAtom) * kAtom + r % kAtom;
}

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_NPK_DECODE_H_
