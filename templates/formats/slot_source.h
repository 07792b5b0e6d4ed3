// SlotSource: the native tensors of one extent of a container that stores the
// intermediate axis in slots of 32 channels, 16 in a low plane and 16 in a high
// plane. BTX and QSRT are two ways to find a plane.
//
// Source: trellis format specification, sections 2.3, 3.3 and 3.5.

#ifndef KILN_TEMPLATES_FORMATS_SLOT_SOURCE_H_
#define KILN_TEMPLATES_FORMATS_SLOT_SOURCE_H_

#include <cstdint>
#include <span>
#include <utility>

#include "templates/formats/trellis_source.h"

namespace kiln {

inline constexpr int64_t kSlotChannels = 32;
// Slots that hold the two records of a pair.
inline constexpr int64_t kPairSlots = 8;
// Gate, up and down, in this order.
inline constexpr int kSlotSections = 3;

class SlotSource : public TrellisSource {
 protected:
  SlotSource(TrellisLayout layout, int64_t first_slot)
      : TrellisSource(std::move(layout)), first_slot_(first_slot) {}

  // Tiles of the plane's 16 channels, one for each 16 hidden channels.
  //   section: 0 gate, 1 up, 2 down. high: 0 or 1.
  virtual std::span<const uint8_t> Plane(int64_t slot, int64_t expert,
                                         int section, int high) const = 0;

  // The 32 binary16 values of a slot's channels, the low plane's first:
  // gate_svh, up_svh or down_suh.
  virtual std::span<const uint8_t> Rotations(int64_t slot, int64_t expert,
                                             int section) const = 0;

  // kGateSuh, kUpSuh or kDownSvh, as long as the layout says.
  virtual std::span<const uint8_t> Table(FusedMoeParam slot) const = 0;

  // Fills what follows the 3I scales of an expert: the signs of a coupled
  // layer.
  virtual void ReadSigns(int64_t expert, std::span<uint8_t> out);

 private:
  absl::Status ReadRow(FusedMoeParam slot, uint64_t expert, uint64_t row,
                       std::span<uint8_t> out) override;
  std::pair<int64_t, int> PlaceOfTile(int64_t tile) const;
  void ReadColumns(int section, int64_t expert, int64_t hidden_tile,
                   std::span<uint8_t> out) const;
  void ReadRotations(int64_t expert, std::span<uint8_t> out);

  int64_t first_slot_;
};

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_SLOT_SOURCE_H_
