#include "templates/formats/slot_source.h"

#include <cstring>

#include "compiler/base/check.h"
#include "templates/fused_moe/trellis_matrix.h"

namespace kiln {
namespace {

constexpr int64_t kPlanes = kSlotChannels / kTileEdge;
constexpr size_t kPlaneRotationBytes = kTileEdge * sizeof(uint16_t);

// Copies to the front of what is left of `out`.
void Append(std::span<const uint8_t> from, std::span<uint8_t>* out) {
  KILN_CHECK(from.size() <= out->size());
  std::memcpy(out->data(), from.data(), from.size());
  *out = out->subspan(from.size());
}

}  // namespace

void SlotSource::ReadSigns(int64_t, std::span<uint8_t> out) {
  KILN_CHECK(out.empty());
}

absl::Status SlotSource::ReadRow(FusedMoeParam slot, uint64_t expert,
                                 uint64_t row, std::span<uint8_t> out) {
  const auto e = static_cast<int64_t>(expert);
  const auto r = static_cast<int64_t>(row);
  switch (slot) {
    case FusedMoeParam::kWGate:
      ReadColumns(0, e, r, out);
      break;
    case FusedMoeParam::kWUp:
      ReadColumns(1, e, r, out);
      break;
    case FusedMoeParam::kWDown: {
      const auto [at, high] = PlaceOfTile(r);
      Append(Plane(at, e, 2, high), &out);
      break;
    }
    case FusedMoeParam::kGateSuh:
    case FusedMoeParam::kUpSuh:
    case FusedMoeParam::kDownSvh:
      Append(Table(slot).subspan(expert * out.size(), out.size()), &out);
      break;
    case FusedMoeParam::kRotations:
      ReadRotations(e, out);
      break;
    default:
      KILN_UNREACHABLE();
  }
  return absl::OkStatus();
}

// Slot and plane of the extent's tile `tile` of 16 intermediate channels.
// Uniform rates keep the channels' order; a pair holds its low record in the
// low planes and its high record in the high planes.
std::pair<int64_t, int> SlotSource::PlaceOfTile(int64_t tile) const {
  if (layout().pairs()) {
    return {first_slot_ + tile % kPairSlots,
            static_cast<int>(tile / kPairSlots)};
  }
  return {first_slot_ + tile / kPlanes, static_cast<int>(tile % kPlanes)};
}

// One hidden tile of every tile column of gate or up.
void SlotSource::ReadColumns(int section, int64_t expert, int64_t hidden_tile,
                             std::span<uint8_t> out) const {
  const auto hidden_tiles = static_cast<uint64_t>(layout().hidden / kTileEdge);
  for (int64_t tile = 0; tile < layout().intermediate / kTileEdge; ++tile) {
    const auto [slot, high] = PlaceOfTile(tile);
    const std::span<const uint8_t> plane = Plane(slot, expert, section, high);
    const uint64_t tile_bytes = plane.size() / hidden_tiles;
    Append(plane.subspan(static_cast<uint64_t>(hidden_tile) * tile_bytes,
                         tile_bytes),
           &out);
  }
}

void SlotSource::ReadRotations(int64_t expert, std::span<uint8_t> out) {
  for (int section = 0; section < kSlotSections; ++section) {
    for (int64_t tile = 0; tile < layout().intermediate / kTileEdge; ++tile) {
      const auto [slot, high] = PlaceOfTile(tile);
      Append(Rotations(slot, expert, section)
                 .subspan(static_cast<size_t>(high) * kPlaneRotationBytes,
                          kPlaneRotationBytes),
             &out);
    }
  }
  ReadSigns(expert, out);
}

}  // namespace kiln
