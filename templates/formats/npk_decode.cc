#include "templates/formats/npk_decode.h"

#include <cstring>

#include "compiler/base/check.h"
#include "device/trellis.h"
#include "templates/formats/encoder_tile.h"
#include "templates/formats/mxfp8.h"
#include "templates/formats/npk_law.h"

namespace kiln {
namespace {

constexpr size_t kGroup = 32;

// stream: [in/16][out/16][8 K words]; scales: [out][in/32].
template <int K>
std::vector<double> Decode(const uint8_t* stream, const uint8_t* scales,
                           size_t out, size_t in) {
  std::vector<double> values(out * in);
  for (size_t tile = 0; tile < out * in / kTileSize; ++tile) {
    uint32_t ring[8 * K];
    std::memcpy(ring, stream + tile * sizeof(ring), sizeof(ring));
    const size_t row = tile / (out / 16) * 16;
    const size_t column = tile % (out / 16) * 16;
    for (uint32_t lane = 0; lane < 32; ++lane) {
      uint32_t states[8];
      kd::NpkLaneStates<K, kd::kNpkWindow<K>>(ring, lane, states);
      for (uint32_t j = 0; j < 8; ++j) {
        const uint32_t p = 8 * lane + j;
        const size_t k = row + kd::PositionRow(p);
        const size_t n = column + kd::PositionColumn(p);
        values[n * in + k] =
            Mxfp8Value(scales[(n * in + k) / kGroup], kd::NpkByte(states[j]));
      }
    }
  }
  return values;
}

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
  switch (m.bits) {
    case 2:
      return Decode<2>(words, bytes, out, in);
    case 3:
      return Decode<3>(words, bytes, out, in);
    case 4:
      return Decode<4>(words, bytes, out, in);
    case 5:
      return Decode<5>(words, bytes, out, in);
    default:
      KILN_UNREACHABLE();
  }
}

std::vector<uint16_t> NpkHalves(std::span<const uint8_t> bytes) {
  std::vector<uint16_t> values(bytes.size() / 2);
  // The identity boundary has no vectors, and memcpy takes no null.
  if (values.empty()) return values;
  std::memcpy(values.data(), bytes.data(), 2 * values.size());
  return values;
}

}  // namespace kiln
