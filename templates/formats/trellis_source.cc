#include "templates/formats/trellis_source.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "templates/formats/describe.h"

namespace kiln {
namespace {

constexpr uint64_t kTileEdge = 16;
constexpr size_t kGate = 0;
constexpr size_t kUp = 1;
constexpr size_t kDown = 2;

class Exl3Source : public TrellisSource {
 public:
  Exl3Source(const RequestGeometry& geometry,
             std::vector<ExpertMatrices> experts, const TrellisExtent& extent,
             Checkpoint* checkpoint)
      : TrellisSource(geometry),
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
        return ReadTiles(matrices[kGate], row, begin / kTileEdge, out);
      case FusedMoeParam::kWUp:
        return ReadTiles(matrices[kUp], row, begin / kTileEdge, out);
      case FusedMoeParam::kWDown:
        return ReadTiles(matrices[kDown], begin / kTileEdge + row, 0, out);
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

  // Tiles from (tile_row, tile_column) on, as many as `out` holds.
  absl::Status ReadTiles(const Exl3Matrix& matrix, uint64_t tile_row,
                         uint64_t tile_column, std::span<uint8_t> out) {
    const SafetensorsTensor& trellis = *matrix.tensors.trellis;
    ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes,
                     checkpoint_->Bytes(trellis));
    const uint64_t tile_bytes = trellis.dims[2] * 2;
    const uint64_t at = (tile_row * trellis.dims[1] + tile_column) * tile_bytes;
    KILN_CHECK(at <= bytes.size() && out.size() <= bytes.size() - at);
    std::memcpy(out.data(), bytes.data() + at, out.size());
    return absl::OkStatus();
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
  const auto h = static_cast<uint64_t>(geometry_.hidden);
  const auto i = static_cast<uint64_t>(geometry_.intermediate);
  const auto experts = static_cast<uint64_t>(geometry_.experts);
  const Bits& bits = geometry_.weights.bits;
  SafetensorsTensor tensor;
  const auto trellis = [&](absl::string_view name, uint64_t in, uint64_t out,
                           int rate) {
    tensor.name = name;
    tensor.type = StoredType::kI16;
    tensor.rank = 4;
    tensor.dims = {experts, in / kTileEdge, out / kTileEdge,
                   kTileEdge * static_cast<uint64_t>(rate)};
  };
  const auto table = [&](absl::string_view name, uint64_t channels) {
    tensor.name = name;
    tensor.type = StoredType::kF16;
    tensor.rank = 2;
    tensor.dims = {experts, channels};
  };
  switch (slot) {
    case FusedMoeParam::kWGate:
      trellis("w_gate", h, i, bits.gate);
      break;
    case FusedMoeParam::kWUp:
      trellis("w_up", h, i, bits.up);
      break;
    case FusedMoeParam::kWDown:
      trellis("w_down", i, h, bits.down);
      break;
    case FusedMoeParam::kGateSuh:
      table("gate_suh", h);
      break;
    case FusedMoeParam::kUpSuh:
      table("up_suh", h);
      break;
    case FusedMoeParam::kRotations:
      table("rotations", 3 * i);
      break;
    case FusedMoeParam::kDownSvh:
      table("down_svh", h);
      break;
    default:
      KILN_UNREACHABLE();
  }
  tensor.end = 2;  // bytes of an element, of either type
  for (const uint64_t dim : tensor.shape()) tensor.end *= dim;
  return tensor;
}

absl::Status TrellisSource::Stream(
    FusedMoeParam slot,
    const std::function<absl::Status(std::span<const uint8_t>)>& sink) {
  const SafetensorsTensor tensor = Tensor(slot);
  const uint64_t experts = tensor.dims[0];
  const uint64_t rows_per_expert = tensor.rank == 4 ? tensor.dims[1] : 1;
  const uint64_t rows = experts * rows_per_expert;
  const uint64_t row_bytes = tensor.bytes() / rows;
  KILN_CHECK(row_bytes <= kStagingBytesMax);
  const uint64_t rows_max = std::min(kStagingBytesMax / row_bytes,
                                     kStagingExpertsMax * rows_per_expert);
  std::vector<uint8_t> piece(std::min(rows, rows_max) * row_bytes);
  for (uint64_t begin = 0; begin < rows; begin += rows_max) {
    const uint64_t count = std::min(rows_max, rows - begin);
    for (uint64_t i = 0; i < count; ++i) {
      const uint64_t row = begin + i;
      RETURN_IF_ERROR(
          ReadRow(slot, row / rows_per_expert, row % rows_per_expert,
                  std::span<uint8_t>(piece).subspan(i * row_bytes, row_bytes)));
    }
    RETURN_IF_ERROR(
        sink(std::span<const uint8_t>(piece).first(count * row_bytes)));
  }
  return absl::OkStatus();
}

absl::StatusOr<TrellisExtent> ExtentOfRank(int64_t intermediate, int64_t rank,
                                           int64_t ranks) {
  ASSIGN_OR_RETURN(const int64_t channels,
                   IntermediatePerRank(intermediate, ranks));
  if (rank < 0 || rank >= ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank is ", rank, ", must be within 0..", ranks - 1));
  }
  return TrellisExtent{.begin = rank * channels, .end = (rank + 1) * channels};
}

absl::StatusOr<std::unique_ptr<TrellisSource>> TrellisFromExl3(
    const RoutedLayer& layer, const TrellisExtent& extent,
    Checkpoint* checkpoint) {
  KILN_CHECK(!layer.experts.empty());
  const Exl3Matrix& gate = layer.experts[0][kGate];
  constexpr auto kBlock = static_cast<int64_t>(kHadamardBlock);
  if (extent.begin < 0 || extent.begin >= extent.end || extent.end > gate.out ||
      extent.begin % kBlock != 0 || extent.end % kBlock != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "extent is [", extent.begin, ", ", extent.end,
        "), must be a non-empty "
        "range of multiples of 128 (the Hadamard block) within 0..",
        gate.out));
  }
  for (const ExpertMatrices& matrices : layer.experts) {
    for (const Exl3Matrix& matrix : matrices) {
      RETURN_IF_ERROR(CheckExl3Values(matrix, checkpoint));
    }
  }
  RequestGeometry geometry;
  geometry.hidden = gate.in;
  geometry.intermediate = extent.end - extent.begin;
  geometry.experts = static_cast<int64_t>(layer.experts.size());
  geometry.weights.codebook = layer.codebook;
  geometry.weights.bits = layer.bits;
  return std::make_unique<Exl3Source>(geometry, layer.experts, extent,
                                      checkpoint);
}

}  // namespace kiln
