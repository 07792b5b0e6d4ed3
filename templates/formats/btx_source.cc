#include <array>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "templates/formats/btx_layer.h"
#include "templates/formats/coupled_signs.h"
#include "templates/formats/exl3.h"
#include "templates/formats/pair_layer.h"
#include "templates/formats/slot_source.h"
#include "templates/fused_moe/trellis_matrix.h"

namespace kiln {
namespace {

constexpr int64_t kPreBlock = 512;
constexpr int64_t kPostBlock = 128;
constexpr uint16_t kPlusOne = 0x3C00;   // binary16
constexpr uint16_t kMinusOne = 0xBC00;  // binary16

class BtxSource : public SlotSource {
 public:
  BtxSource(TrellisLayout layout, const TrellisExtent& extent, BtxLayer* layer)
      : SlotSource(std::move(layout), extent.begin / kSlotChannels),
        layer_(*layer),
        extent_(extent) {}

 private:
  std::span<const uint8_t> Plane(int64_t slot, int64_t expert, int section,
                                 int high) const override {
    return layer_.Plane(slot, expert, section, high);
  }

  std::span<const uint8_t> Rotations(int64_t slot, int64_t expert,
                                     int section) const override {
    return layer_.Rotations(slot, expert, section);
  }

  std::span<const uint8_t> Table(FusedMoeParam slot) const override {
    if (slot == FusedMoeParam::kDownSvh) return layer_.down_svh();
    // Both projections of a coupled layer read one operand, scaled by gate_suh
    // in the lower half of the channels and by up_suh in the upper half.
    const bool gate = layout().coupled
                          ? extent_.begin < layer_.manifest().intermediate / 2
                          : slot == FusedMoeParam::kGateSuh;
    return gate ? layer_.gate_suh() : layer_.up_suh();
  }

  void ReadSigns(int64_t expert, std::span<uint8_t> out) override {
    if (!layout().coupled) return;
    const uint8_t draw = layer_.draws()[static_cast<size_t>(expert)];
    AppendSigns(draw, SignAxis::kPre, 2, &out);
    AppendSigns(draw, SignAxis::kPost, 1, &out);
  }

  // The extent's slice of an axis with `per_channel` signs for each channel.
  void AppendSigns(uint8_t draw, SignAxis axis, int64_t per_channel,
                   std::span<uint8_t>* out) {
    std::vector<int8_t>& signs =
        signs_[static_cast<size_t>(axis) - 1][static_cast<size_t>(draw)];
    if (signs.empty()) {
      signs = CoupledSigns(
          draw, axis,
          static_cast<size_t>(per_channel * layer_.manifest().intermediate));
    }
    for (int64_t i = per_channel * extent_.begin; i < per_channel * extent_.end;
         ++i) {
      const uint16_t value =
          signs[static_cast<size_t>(i)] > 0 ? kPlusOne : kMinusOne;
      KILN_CHECK(out->size() >= sizeof(value));
      std::memcpy(out->data(), &value, sizeof(value));
      *out = out->subspan(sizeof(value));
    }
  }

  BtxLayer& layer_;
  const TrellisExtent extent_;
  // Of the whole axes, by axis and draw, made when they are first needed.
  std::array<std::array<std::vector<int8_t>, kSignDrawMax + 1>, 2> signs_;
};

absl::Status CheckCoupled(const BtxManifest& manifest,
                          const TrellisExtent& extent) {
  if (manifest.pairs()) {
    return absl::FailedPreconditionError(
        "is coupled and has pair rates; no arithmetic is known for both");
  }
  if (manifest.pre_block != kPreBlock || manifest.post_block != kPostBlock) {
    return absl::FailedPreconditionError(
        absl::StrCat("has coupled blocks of ", manifest.pre_block, " and ",
                     manifest.post_block, ", only ", kPreBlock, " and ",
                     kPostBlock, " have an arithmetic"));
  }
  const int64_t half = manifest.intermediate / 2;
  if (extent.begin < half && extent.end > half) {
    return absl::InvalidArgumentError(absl::StrCat(
        "extent [", extent.begin, ", ", extent.end, ") of a coupled layer ",
        "crosses channel ", half, ", where its input scales change; use an ",
        "even number of ranks"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TrellisLayout> BtxLayoutOf(const BtxManifest& manifest,
                                          const TrellisExtent& extent) {
  constexpr auto kBlock = static_cast<int64_t>(kHadamardBlock);
  if (manifest.hidden % kBlock != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("has the hidden size ", manifest.hidden,
                     ", must be a multiple of 128 (the Hadamard block)"));
  }
  if (extent.begin % kBlock != 0 || extent.end % kBlock != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "extent [", extent.begin, ", ", extent.end,
        ") must begin and end at multiples of 128 (the Hadamard block)"));
  }
  const int64_t first = extent.begin / kSlotChannels;
  const int64_t count = (extent.end - extent.begin) / kSlotChannels;
  RETURN_IF_ERROR(CheckBtxExtent(manifest, first, count));
  if (manifest.pairs()) {
    RETURN_IF_ERROR(CheckPairExtent(extent, manifest.intermediate));
    RETURN_IF_ERROR(CheckPairKinds(manifest.pair_kinds));
  }
  if (manifest.coupled) RETURN_IF_ERROR(CheckCoupled(manifest, extent));
  TrellisLayout layout;
  layout.hidden = manifest.hidden;
  layout.intermediate = extent.end - extent.begin;
  layout.experts = manifest.experts;
  layout.codebook = manifest.codebook;
  layout.bits = {
      .gate = manifest.bits, .up = manifest.bits, .down = manifest.bits};
  layout.shared_scales = !manifest.per_expert_rotations;
  layout.coupled = manifest.coupled;
  return layout;
}

absl::StatusOr<std::unique_ptr<TrellisSource>> TrellisFromBtx(
    const TrellisExtent& extent, BtxLayer* layer) {
  const BtxManifest& manifest = layer->manifest();
  absl::StatusOr<TrellisLayout> layout = BtxLayoutOf(manifest, extent);
  if (!layout.ok()) return Annotate(layout.status(), layer->path());
  RETURN_IF_ERROR(layer->Validate());
  if (manifest.pairs()) {
    const auto pair = static_cast<size_t>(extent.begin / kPairChannels);
    const auto experts = static_cast<size_t>(manifest.experts);
    const auto of_pair = [&](std::span<const uint8_t> rates) {
      const std::span<const uint8_t> own =
          rates.subspan(pair * experts, experts);
      return std::vector<uint8_t>(own.begin(), own.end());
    };
    layout->rates_fc1 = of_pair(layer->rates_fc1());
    layout->rates_fc2 = of_pair(layer->rates_fc2());
  }
  return std::make_unique<BtxSource>(*std::move(layout), extent, layer);
}

}  // namespace kiln
