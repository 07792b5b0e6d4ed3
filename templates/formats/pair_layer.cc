#include "templates/formats/pair_layer.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"
#include "templates/fused_moe/trellis_matrix.h"

namespace kiln {
namespace {

constexpr uint8_t kP33 = 0x33;
constexpr uint8_t kP24 = 0x24;
constexpr uint8_t kP43 = 0x43;

bool AreAll(std::span<const uint8_t> kinds, uint8_t first, uint8_t second) {
  return std::all_of(kinds.begin(), kinds.end(), [&](uint8_t kind) {
    return kind == first || kind == second;
  });
}

}  // namespace

absl::StatusOr<PairArm> PairArmOf(std::span<const uint8_t> kinds) {
  const bool has_p33 =
      std::find(kinds.begin(), kinds.end(), kP33) != kinds.end();
  if (has_p33 && AreAll(kinds, kP33, kP24)) return PairArm::kDynamic;
  if (has_p33 && AreAll(kinds, kP33, kP43)) return PairArm::kPools;
  return absl::FailedPreconditionError(absl::StrCat(
      "has the kinds of pairs ",
      absl::StrJoin(kinds, ", ",
                    [](std::string* out, uint8_t kind) {
                      absl::StrAppend(out, PairKindName(kind));
                    }),
      ", which no kernel runs; must be P33, P33 and P24, or P33 and P43"));
}

absl::Status CheckPairKinds(std::span<const uint8_t> kinds) {
  return PairArmOf(kinds).status();
}

absl::Status CheckPairExtent(const TrellisExtent& extent,
                             int64_t intermediate) {
  if (extent.begin >= 0 && extent.begin % kPairChannels == 0 &&
      extent.end - extent.begin == kPairChannels &&
      extent.end <= intermediate) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "extent [", extent.begin, ", ", extent.end, ") of a layer of pair rates ",
      "must be one pair of 256 channels; ", intermediate, " channels are ",
      intermediate / kPairChannels, " parts, whose outputs add up"));
}

std::vector<int32_t> PairModes(std::span<const uint8_t> rates) {
  std::vector<int32_t> modes;
  for (const uint8_t rate : rates) {
    KILN_CHECK(rate == kP33 || rate == kP24 || rate == kP43);
    modes.push_back(rate == kP33 ? 0 : 1);
  }
  return modes;
}

std::vector<int64_t> PairDescriptors(std::span<const uint8_t> rates,
                                     int64_t hidden) {
  KILN_CHECK(AreAll(rates, kP33, kP43) && hidden % kTileEdge == 0);
  // 32-bit words of one bit of all tiles of a record.
  const int64_t record =
      hidden / kTileEdge * (kRecordChannels / kTileEdge) * kTileEdge / 2;
  std::vector<int64_t> descriptors;
  int64_t at = 0;
  for (const uint8_t rate : rates) {
    descriptors.push_back(at << 1 | (rate == kP43 ? 1 : 0));
    const PairRate pair = PairRate::FromByte(rate);
    at += record * (pair.low + pair.high);
  }
  return descriptors;
}

}  // namespace kiln
