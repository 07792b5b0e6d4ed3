#include "templates/formats/npk_decode.h"

#include <cstring>

#include "compiler/base/check.h"
#include "templates/formats/mxfp8.h"
#include "templates/fused_moe/mx_reference.h"

namespace kiln {
namespace {

constexpr size_t kGroup = 32;

}  // namespace

std::vector<double> DecodeNpkMatrix(const NpkSidecar& sidecar, NpkMatrix matrix,
                                    int64_t expert) {
  const NpkMetadata& m = sidecar.metadata();
  KILN_CHECK(expert >= 0 && expert < m.experts);
  const auto hidden = static_cast<size_t>(m.hidden);
  const auto inter = static_cast<size_t>(m.intermediate);
  const auto e = static_cast<size_t>(expert);
  const size_t stream = hidden * inter / 8 * static_cast<size_t>(m.bits);
  const size_t scales = hidden * inter / kGroup;
  const bool down = matrix == NpkMatrix::kDown;
  const auto slot = static_cast<size_t>(matrix);
  const uint8_t* words =
      down ? sidecar.tensor(NpkTensor::kW2Stream).data() + e * stream
           : sidecar.tensor(NpkTensor::kW13Stream).data() +
                 (slot * static_cast<size_t>(m.experts) + e) * stream;
  const uint8_t* bytes =
      down ? sidecar.tensor(NpkTensor::kW2Scale).data() + e * scales
           : sidecar.tensor(NpkTensor::kW13Scale).data() +
                 (2 * e + slot) * scales;
  const size_t out = down ? hidden : inter;
  const size_t in = down ? inter : hidden;
  std::vector<double> values = DecodeNpkStream(words, m.bits, out, in);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] *= Ue8m0Value(bytes[i / kGroup]);
  }
  return values;
}

std::vector<uint16_t> NpkHalves(std::span<const uint8_t> bytes) {
  std::vector<uint16_t> values(bytes.size() / 2);
  // The identity boundary has no vectors, and memcpy takes no null.
  if (values.empty()) return values;
  std::memcpy(values.data(), bytes.data(), 2 * values.size());
  return values;
}

}  // namespace kiln
