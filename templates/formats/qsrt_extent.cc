#include "templates/formats/qsrt_extent.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/manifest.h"
#include "templates/formats/exl3.h"
#include "templates/formats/layer_values.h"
#include "templates/formats/slot_source.h"

namespace kiln {
namespace {

constexpr uint8_t kP24 = 0x24;
constexpr uint8_t kP33 = 0x33;
constexpr int64_t kPairsOfP24Max = 2;
constexpr int kBitsOfPair = 6;
constexpr uint64_t kScaleBytes = kSlotChannels * sizeof(uint16_t);

uint64_t Size(int64_t value) { return static_cast<uint64_t>(value); }

uint64_t MatrixBytes(int64_t hidden) {
  return Size(kSlotChannels * hidden * kBitsOfPair / 2 / 8);
}

absl::Status Refuse(absl::string_view field, int64_t value,
                    absl::string_view rule) {
  return absl::InvalidArgumentError(
      absl::StrCat("QSRT ", field, " is ", value, ", must be ", rule));
}

absl::Status CheckGeometry(const QsrtExtent& extent) {
  constexpr auto kBlock = static_cast<int64_t>(kHadamardBlock);
  constexpr int64_t kSlotsMax = kIntermediateMax / kSlotChannels;
  if (extent.hidden <= 0 || extent.hidden % kBlock != 0 ||
      extent.hidden > kHiddenMax) {
    return Refuse(
        "hidden size", extent.hidden,
        absl::StrCat("a positive multiple of 128, at most ", kHiddenMax));
  }
  if (extent.atom_slots <= 0 || extent.atom_slots % kPairSlots != 0 ||
      extent.atom_slots > kSlotsMax) {
    return Refuse(
        "atom_slots", extent.atom_slots,
        absl::StrCat("a positive multiple of 8, at most ", kSlotsMax));
  }
  if (extent.experts_per_layer <= 0 || extent.experts_per_layer > kExpertsMax) {
    return Refuse("experts_per_layer", extent.experts_per_layer,
                  absl::StrCat("within 1..", kExpertsMax));
  }
  if (extent.rotation_multiplier < 0) {
    return Refuse("rotation_multiplier", extent.rotation_multiplier,
                  "0 or more");
  }
  if (extent.layer < 0) return Refuse("layer", extent.layer, "0 or more");
  if (extent.first_slot < 0 || extent.first_slot >= extent.atom_slots ||
      extent.first_slot % kPairSlots != 0) {
    return Refuse("first atom slot", extent.first_slot,
                  absl::StrCat("a multiple of 8 below ", extent.atom_slots));
  }
  return absl::OkStatus();
}

absl::Status CheckExperts(const QsrtExtent& extent) {
  const auto experts = static_cast<int64_t>(extent.expert_ids.size());
  if (experts < 1 || experts > extent.experts_per_layer) {
    return Refuse("count of expert numbers", experts,
                  absl::StrCat("within 1..", extent.experts_per_layer));
  }
  if (extent.format_codes.size() != extent.expert_ids.size()) {
    return Refuse("count of format codes",
                  static_cast<int64_t>(extent.format_codes.size()),
                  absl::StrCat(experts, ", one for each expert"));
  }
  std::vector<bool> seen(Size(extent.experts_per_layer));
  for (size_t e = 0; e < extent.expert_ids.size(); ++e) {
    const int64_t id = extent.expert_ids[e];
    const std::string at = absl::StrCat("expert number at ", e);
    if (id < 0 || id >= extent.experts_per_layer) {
      return Refuse(at, id,
                    absl::StrCat("within 0..", extent.experts_per_layer - 1));
    }
    if (seen[Size(id)]) return Refuse(at, id, "named once");
    seen[Size(id)] = true;
    const int64_t code = extent.format_codes[e];
    if (code < 0 || code > std::numeric_limits<uint8_t>::max() ||
        code >> 4 > kPairsOfP24Max || (code & 0xF) > kPairsOfP24Max) {
      return Refuse(absl::StrCat("format code of expert ", id), code,
                    code == kQsrtX4t
                        ? "that of a trellis expert; 255 is one that is stored "
                          "in the X4T tier, which is not read"
                        : "two nibbles within 0..2");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPayload(const QsrtExtent& extent) {
  const uint64_t bundle = QsrtBundleBytes(extent.hidden);
  const uint64_t row = extent.expert_ids.size() * bundle;
  // Strides above this cannot be those of a mapped payload.
  constexpr uint64_t kStrideMax = uint64_t{1} << 60;
  if (extent.row_stride < row || extent.row_stride > kStrideMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "QSRT row stride is ", extent.row_stride, " bytes, must be at least ",
        row, ": ", extent.expert_ids.size(), " bundles of ", bundle));
  }
  const uint64_t needed = (kPairSlots - 1) * extent.row_stride + row;
  if (extent.payload.size() < needed) {
    return absl::InvalidArgumentError(
        absl::StrCat("QSRT payload has ", extent.payload.size(),
                     " bytes, must have ", needed, " for 8 rows"));
  }
  for (uint64_t slot = 0; slot < kPairSlots; ++slot) {
    for (size_t e = 0; e < extent.expert_ids.size(); ++e) {
      const uint64_t at = slot * extent.row_stride + e * bundle +
                          kSlotSections * MatrixBytes(extent.hidden);
      const absl::Status finite =
          CheckFinite("qsrt_atoms",
                      extent.payload.subspan(at, kSlotSections * kScaleBytes));
      if (!finite.ok()) {
        return Annotate(
            finite,
            absl::StrCat("scales of atom ", Size(extent.first_slot) + slot,
                         ", expert ", extent.expert_ids[e]));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTables(const QsrtExtent& extent) {
  const uint64_t shared = Size(extent.hidden) * sizeof(uint16_t);
  const uint64_t own = shared * extent.expert_ids.size();
  const std::pair<const char*, std::span<const uint8_t>> tables[] = {
      {"gate_suh", extent.gate_suh},
      {"up_suh", extent.up_suh},
      {"down_svh", extent.down_svh}};
  for (const auto& [name, bytes] : tables) {
    if ((bytes.size() != shared && bytes.size() != own) ||
        bytes.size() != extent.gate_suh.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "QSRT table ", name, " has ", bytes.size(), " bytes, must have ",
          shared, " (shared by all experts) or ", own,
          " (each expert's), as gate_suh has"));
    }
    RETURN_IF_ERROR(CheckFinite(name, bytes));
  }
  return absl::OkStatus();
}

class QsrtSource : public SlotSource {
 public:
  QsrtSource(TrellisLayout layout, const QsrtExtent& extent)
      : SlotSource(std::move(layout), 0), extent_(extent) {}

 private:
  std::span<const uint8_t> Bundle(int64_t slot, int64_t expert) const {
    const uint64_t bundle = QsrtBundleBytes(extent_.hidden);
    return extent_.payload.subspan(
        Size(slot) * extent_.row_stride + Size(expert) * bundle, bundle);
  }

  std::span<const uint8_t> Plane(int64_t slot, int64_t expert, int section,
                                 int high) const override {
    const std::vector<uint8_t>& rates =
        section == 2 ? layout().rates_fc2 : layout().rates_fc1;
    const PairRate rate = PairRate::FromByte(rates[Size(expert)]);
    const uint64_t bytes = MatrixBytes(extent_.hidden);
    const uint64_t low = bytes * Size(rate.low) / kBitsOfPair;
    const std::span<const uint8_t> matrix =
        Bundle(slot, expert).subspan(Size(section) * bytes, bytes);
    return high == 0 ? matrix.first(low) : matrix.subspan(low);
  }

  std::span<const uint8_t> Rotations(int64_t slot, int64_t expert,
                                     int section) const override {
    return Bundle(slot, expert)
        .subspan(kSlotSections * MatrixBytes(extent_.hidden) +
                     Size(section) * kScaleBytes,
                 kScaleBytes);
  }

  std::span<const uint8_t> Table(FusedMoeParam slot) const override {
    return slot == FusedMoeParam::kGateSuh ? extent_.gate_suh
           : slot == FusedMoeParam::kUpSuh ? extent_.up_suh
                                           : extent_.down_svh;
  }

  const QsrtExtent extent_;
};

}  // namespace

uint64_t QsrtBundleBytes(int64_t hidden) {
  return kSlotSections * (MatrixBytes(hidden) + kScaleBytes);
}

int64_t QsrtRotation(int64_t pairs, int64_t multiplier, int64_t layer,
                     int64_t expert) {
  // Reduced first, so that no product overflows.
  return (multiplier % pairs * (expert % pairs) + layer % pairs) % pairs;
}

absl::Status CheckQsrtExtent(const QsrtExtent& extent) {
  RETURN_IF_ERROR(CheckGeometry(extent));
  RETURN_IF_ERROR(CheckExperts(extent));
  RETURN_IF_ERROR(CheckPayload(extent));
  return CheckTables(extent);
}

absl::StatusOr<std::unique_ptr<TrellisSource>> TrellisFromQsrt(
    const QsrtExtent& extent) {
  RETURN_IF_ERROR(CheckQsrtExtent(extent));
  TrellisLayout layout;
  layout.hidden = extent.hidden;
  layout.intermediate = kPairChannels;
  layout.experts = static_cast<int64_t>(extent.expert_ids.size());
  layout.codebook = TrellisCodebook::kSqgE4m3;
  layout.shared_scales =
      extent.gate_suh.size() == Size(extent.hidden) * sizeof(uint16_t);
  const int64_t pairs = extent.atom_slots / kPairSlots;
  for (size_t e = 0; e < extent.expert_ids.size(); ++e) {
    const int64_t rotation = QsrtRotation(pairs, extent.rotation_multiplier,
                                          extent.layer, extent.expert_ids[e]);
    const int64_t logical =
        (extent.first_slot / kPairSlots - rotation + pairs) % pairs;
    const int64_t code = extent.format_codes[e];
    layout.rates_fc1.push_back(logical < code >> 4 ? kP24 : kP33);
    layout.rates_fc2.push_back(logical < (code & 0xF) ? kP24 : kP33);
  }
  return std::make_unique<QsrtSource>(std::move(layout), extent);
}

}  // namespace kiln
