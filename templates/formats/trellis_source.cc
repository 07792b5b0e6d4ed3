#include "templates/formats/trellis_source.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "templates/fused_moe/trellis_matrix.h"

namespace kiln {
namespace {

constexpr uint64_t kTile = kTileEdge;
constexpr size_t kGate = 0;
constexpr size_t kUp = 1;
constexpr size_t kDown = 2;

bool IsTrellis(FusedMoeParam slot) {
  return slot == FusedMoeParam::kWGate || slot == FusedMoeParam::kWUp ||
         slot == FusedMoeParam::kWDown;
}

class Exl3Source : public TrellisSource {
 public:
  Exl3Source(TrellisLayout layout, std::vector<ExpertMatrices> experts,
             const TrellisExtent& extent, Checkpoint* checkpoint)
      : TrellisSource(std::move(layout)),
        experts_(std::move(experts)),
        extent_(extent),
        checkpoint_(checkpoint) {}

 private:
  absl::Status ReadRow(FusedMoeParam slot, uint64_t expert, uint64_t row,
                       std::span<uint8_t> out) override {
    const ExpertMatrices& matrices = experts_[expert];
    const auto begin = static_cast<uint64_t>(extent_.begin);
    switch (slot) {
      case FusedMoeParam::kWGate:
        return ReadExl3Tiles(matrices[kGate], row, begin / kTile, checkpoint_,
                             out);
      case FusedMoeParam::kWUp:
        return ReadExl3Tiles(matrices[kUp], row, begin / kTile, checkpoint_,
                             out);
      case FusedMoeParam::kWDown:
        return ReadExl3Tiles(matrices[kDown], begin / kTile + row, 0,
                             checkpoint_, out);
      case FusedMoeParam::kGateSuh:
        return ReadScales(matrices[kGate], true, 0, out);
      case FusedMoeParam::kUpSuh:
        return ReadScales(matrices[kUp], true, 0, out);
      case FusedMoeParam::kDownSvh:
        return ReadScales(matrices[kDown], false, 0, out);
      case FusedMoeParam::kRotations: {
        const size_t part = out.size() / 3;
        RETURN_IF_ERROR(
            ReadScales(matrices[kGate], false, begin, out.first(part)));
        RETURN_IF_ERROR(
            ReadScales(matrices[kUp], false, begin, out.subspan(part, part)));
        return ReadScales(matrices[kDown], true, begin, out.last(part));
      }
      default:
        KILN_UNREACHABLE();
    }
  }

  absl::Status ReadScales(const Exl3Matrix& matrix, bool input_side,
                          uint64_t begin, std::span<uint8_t> out) {
    scales_.resize(out.size() / sizeof(uint16_t));
    RETURN_IF_ERROR(
        ReadExl3Scales(matrix, input_side, begin, checkpoint_, scales_));
    std::memcpy(out.data(), scales_.data(), out.size());
    return absl::OkStatus();
  }

  std::vector<ExpertMatrices> experts_;
  TrellisExtent extent_;
  Checkpoint* checkpoint_;
  std::vector<uint16_t> scales_;
};

}  // namespace

SafetensorsTensor TrellisSource::Tensor(FusedMoeParam slot) const {
  const auto h = static_cast<uint64_t>(layout_.hidden);
  const auto i = static_cast<uint64_t>(layout_.intermediate);
  const auto experts = static_cast<uint64_t>(layout_.experts);
  const Bits& bits = layout_.bits;
  SafetensorsTensor tensor;
  const auto trellis = [&](absl::string_view name, uint64_t in, uint64_t out,
                           int rate, const std::vector<uint8_t>& pairs) {
    tensor.name = name;
    tensor.type = StoredType::kI16;
    tensor.rank = 4;
    tensor.dims = {experts, in / kTile, out / kTile,
                   kTile * static_cast<uint64_t>(rate)};
    if (pairs.empty()) return;
    uint64_t rates = 0;
    for (const uint8_t pair : pairs) {
      const PairRate rate_pair = PairRate::FromByte(pair);
      rates += static_cast<uint64_t>(rate_pair.low + rate_pair.high);
    }
    tensor.rank = 1;
    tensor.dims = {in / kTile * (out / kTile) / 2 * kTile * rates};
  };
  const auto table = [&](absl::string_view name, uint64_t rows,
                         uint64_t channels) {
    tensor.name = name;
    tensor.type = StoredType::kF16;
    tensor.rank = 2;
    tensor.dims = {rows, channels};
  };
  const uint64_t scale_rows = layout_.shared_scales ? 1 : experts;
  switch (slot) {
    case FusedMoeParam::kWGate:
      trellis("w_gate", h, i, bits.gate, layout_.rates_fc1);
      break;
    case FusedMoeParam::kWUp:
      trellis("w_up", h, i, bits.up, layout_.rates_fc1);
      break;
    case FusedMoeParam::kWDown:
      trellis("w_down", i, h, bits.down, layout_.rates_fc2);
      break;
    case FusedMoeParam::kGateSuh:
      table("gate_suh", scale_rows, h);
      break;
    case FusedMoeParam::kUpSuh:
      table("up_suh", scale_rows, h);
      break;
    case FusedMoeParam::kRotations:
      table("rotations", experts, (layout_.coupled ? 6 : 3) * i);
      break;
    case FusedMoeParam::kDownSvh:
      table("down_svh", scale_rows, h);
      break;
    default:
      KILN_UNREACHABLE();
  }
  tensor.end = 2;  // bytes of an element, of either type
  for (const uint64_t dim : tensor.shape()) tensor.end *= dim;
  return tensor;
}

uint64_t TrellisSource::RowBytes(FusedMoeParam slot, uint64_t expert,
                                 uint64_t row) const {
  const auto h = static_cast<uint64_t>(layout_.hidden);
  const auto i = static_cast<uint64_t>(layout_.intermediate);
  if (slot == FusedMoeParam::kRotations) {
    return (layout_.coupled ? 6 : 3) * i * sizeof(uint16_t);
  }
  if (!IsTrellis(slot)) return h * sizeof(uint16_t);
  constexpr uint64_t kRecordTiles = kRecordChannels / kTileEdge;
  const bool down = slot == FusedMoeParam::kWDown;
  // Tiles times bits of each.
  uint64_t rates = 0;
  if (!layout_.pairs()) {
    const Bits& bits = layout_.bits;
    const int rate = down                          ? bits.down
                     : slot == FusedMoeParam::kWUp ? bits.up
                                                   : bits.gate;
    rates = (down ? h : i) / kTile * static_cast<uint64_t>(rate);
  } else if (down) {
    const PairRate rate = PairRate::FromByte(layout_.rates_fc2[expert]);
    rates = h / kTile *
            static_cast<uint64_t>(row < kRecordTiles ? rate.low : rate.high);
  } else {
    const PairRate rate = PairRate::FromByte(layout_.rates_fc1[expert]);
    rates = kRecordTiles * static_cast<uint64_t>(rate.low + rate.high);
  }
  return rates * kTile * sizeof(uint16_t);
}

absl::Status TrellisSource::Stream(FusedMoeParam slot, const PieceSink& sink) {
  const auto inputs = static_cast<uint64_t>(
      slot == FusedMoeParam::kWDown ? layout_.intermediate : layout_.hidden);
  const bool shared = layout_.shared_scales && !IsTrellis(slot) &&
                      slot != FusedMoeParam::kRotations;
  NativeRows rows;
  rows.bytes = Tensor(slot).bytes();
  rows.experts = shared ? 1 : static_cast<uint64_t>(layout_.experts);
  rows.rows = IsTrellis(slot) ? inputs / kTile : 1;
  rows.row_bytes = [&](uint64_t expert, uint64_t row) {
    return RowBytes(slot, expert, row);
  };
  rows.read = [&](uint64_t expert, uint64_t row, std::span<uint8_t> out) {
    return ReadRow(slot, expert, row, out);
  };
  return StreamRows(rows, sink);
}

absl::Status StreamRows(const NativeRows& rows, const PieceSink& sink) {
  std::vector<uint8_t> piece(std::min(rows.bytes, kStagingBytesMax));
  uint64_t used = 0;
  uint64_t first_expert = 0;
  const auto flush = [&] {
    const absl::Status status =
        sink(std::span<const uint8_t>(piece).first(used));
    used = 0;
    return status;
  };
  for (uint64_t expert = 0; expert < rows.experts; ++expert) {
    if (expert - first_expert == kStagingExpertsMax) {
      RETURN_IF_ERROR(flush());
      first_expert = expert;
    }
    for (uint64_t row = 0; row < rows.rows; ++row) {
      const uint64_t bytes = rows.row_bytes(expert, row);
      KILN_CHECK(bytes <= kStagingBytesMax);
      if (bytes > piece.size() - used) {
        RETURN_IF_ERROR(flush());
        first_expert = expert;
      }
      RETURN_IF_ERROR(rows.read(
          expert, row, std::span<uint8_t>(piece).subspan(used, bytes)));
      used += bytes;
    }
  }
  return flush();
}

absl::Status CheckRank(int64_t rank, int64_t ranks) {
  if (rank >= 0 && rank < ranks) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rank is ", rank, ", must be within 0..", ranks - 1));
}

absl::StatusOr<TrellisExtent> ExtentOfRank(int64_t intermediate, int64_t rank,
                                           int64_t ranks) {
  ASSIGN_OR_RETURN(const int64_t channels,
                   ChannelsPerRank("intermediate size", intermediate, ranks));
  RETURN_IF_ERROR(CheckRank(rank, ranks));
  return TrellisExtent{.begin = rank * channels, .end = (rank + 1) * channels};
}

absl::StatusOr<TrellisExtent> ExtentOfRank(
    int64_t intermediate, int64_t rank, int64_t ranks,
    const std::function<absl::Status(const TrellisExtent&)>& check) {
  constexpr auto kBlock = static_cast<int64_t>(kHadamardBlock);
  const int64_t blocks = intermediate / kBlock;
  const auto check_all = [&](int64_t count) -> absl::Status {
    if (count < 1 || blocks % count != 0) {
      return absl::InvalidArgumentError(
          "each needs the same multiple of 128 channels (the Hadamard block)");
    }
    const int64_t channels = intermediate / count;
    for (int64_t begin = 0; begin < intermediate; begin += channels) {
      RETURN_IF_ERROR(check({.begin = begin, .end = begin + channels}));
    }
    return absl::OkStatus();
  };
  // What no number of ranks can mend.
  RETURN_IF_ERROR(
      ChannelsPerRank("intermediate size", intermediate, 1).status());
  const absl::Status status = check_all(ranks);
  if (status.ok()) return ExtentOfRank(intermediate, rank, ranks);
  if (!absl::IsInvalidArgument(status)) return status;
  std::vector<int64_t> possible;
  for (int64_t count = 1; count <= blocks; ++count) {
    if (check_all(count).ok()) possible.push_back(count);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "intermediate size ", intermediate, " cannot be split over ", ranks,
      " ranks: ", status.message(), "; ", RankCountsText(possible)));
}

absl::Status CheckExtent(const TrellisExtent& extent, int64_t channels) {
  constexpr auto kBlock = static_cast<int64_t>(kHadamardBlock);
  if (extent.begin >= 0 && extent.begin < extent.end &&
      extent.end <= channels && extent.begin % kBlock == 0 &&
      extent.end % kBlock == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "extent is [", extent.begin, ", ", extent.end,
      "), must be a non-empty range of multiples of 128 (the Hadamard block) "
      "within 0..",
      channels));
}

absl::StatusOr<std::unique_ptr<TrellisSource>> TrellisFromExl3(
    const RoutedLayer& layer, const TrellisExtent& extent,
    Checkpoint* checkpoint) {
  KILN_CHECK(!layer.experts.empty());
  const Exl3Matrix& gate = layer.experts[0][kGate];
  RETURN_IF_ERROR(CheckExtent(extent, gate.out));
  for (const ExpertMatrices& matrices : layer.experts) {
    for (const Exl3Matrix& matrix : matrices) {
      RETURN_IF_ERROR(CheckExl3Values(matrix, checkpoint));
    }
  }
  TrellisLayout layout;
  layout.hidden = gate.in;
  layout.intermediate = extent.end - extent.begin;
  layout.experts = static_cast<int64_t>(layer.experts.size());
  layout.codebook = layer.codebook;
  layout.bits = layer.bits;
  return std::make_unique<Exl3Source>(std::move(layout), layer.experts, extent,
                                      checkpoint);
}

}  // namespace kiln
