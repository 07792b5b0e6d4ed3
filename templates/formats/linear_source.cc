#include "templates/formats/linear_source.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/manifest.h"
#include "templates/fused_moe/trellis_matrix.h"

namespace kiln {
namespace {

constexpr uint64_t kTile = kTileEdge;

}  // namespace

absl::StatusOr<LinearSource> LinearSource::FromExl3(const Exl3Matrix& matrix,
                                                    const LinearExtent& extent,
                                                    Checkpoint* checkpoint) {
  for (const int64_t channels : {matrix.in, matrix.out}) {
    if (channels <= kFeaturesMax) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor ", QuoteTensorName(matrix.tensors.trellis->name), " has ",
        channels, " channels, must have at most ", kFeaturesMax));
  }
  RETURN_IF_ERROR(CheckExtent(extent.in, matrix.in));
  RETURN_IF_ERROR(CheckExtent(extent.out, matrix.out));
  RETURN_IF_ERROR(CheckExl3Values(matrix, checkpoint));
  LinearSource source(matrix, extent, checkpoint);
  source.shape_ = {.in_features = extent.in.end - extent.in.begin,
                   .out_features = extent.out.end - extent.out.begin,
                   .bits = matrix.bits,
                   .bias = matrix.tensors.bias != nullptr};
  if (source.shape_.bias) {
    ASSIGN_OR_RETURN(const std::vector<uint16_t> whole,
                     ReadExl3Bias(matrix, checkpoint));
    source.bias_.resize(static_cast<size_t>(source.shape_.out_features));
    if (extent.in.begin == 0) {
      std::copy_n(whole.begin() + extent.out.begin, source.bias_.size(),
                  source.bias_.begin());
    }
  }
  return source;
}

std::vector<LinearSlot> LinearSource::Slots() const {
  std::vector<LinearSlot> slots = {LinearSlot::kW, LinearSlot::kSuh,
                                   LinearSlot::kSvh};
  if (shape_.bias) slots.push_back(LinearSlot::kBias);
  return slots;
}

SafetensorsTensor LinearSource::Tensor(LinearSlot slot) const {
  const auto in = static_cast<uint64_t>(shape_.in_features);
  const auto out = static_cast<uint64_t>(shape_.out_features);
  SafetensorsTensor tensor;
  const auto table = [&](absl::string_view name, uint64_t channels) {
    tensor.name = name;
    tensor.type = StoredType::kF16;
    tensor.rank = 1;
    tensor.dims = {channels};
  };
  switch (slot) {
    case LinearSlot::kW:
      tensor.name = "w";
      tensor.type = StoredType::kI16;
      tensor.rank = 3;
      tensor.dims = {in / kTile, out / kTile,
                     kTile * static_cast<uint64_t>(shape_.bits)};
      break;
    case LinearSlot::kSuh:
      table("suh", in);
      break;
    case LinearSlot::kSvh:
      table("svh", out);
      break;
    case LinearSlot::kBias:
      table("bias", out);
      break;
  }
  tensor.end = 2;  // bytes of an element, of either type
  for (const uint64_t dim : tensor.shape()) tensor.end *= dim;
  return tensor;
}

absl::Status LinearSource::ReadRow(LinearSlot slot, uint64_t row,
                                   std::span<uint8_t> out) {
  const auto in_begin = static_cast<uint64_t>(extent_.in.begin);
  const auto out_begin = static_cast<uint64_t>(extent_.out.begin);
  switch (slot) {
    case LinearSlot::kW:
      return ReadExl3Tiles(matrix_, in_begin / kTile + row, out_begin / kTile,
                           checkpoint_, out);
    case LinearSlot::kSuh:
    case LinearSlot::kSvh: {
      const bool input = slot == LinearSlot::kSuh;
      scales_.resize(out.size() / sizeof(uint16_t));
      RETURN_IF_ERROR(ReadExl3Scales(
          matrix_, input, input ? in_begin : out_begin, checkpoint_, scales_));
      std::memcpy(out.data(), scales_.data(), out.size());
      return absl::OkStatus();
    }
    case LinearSlot::kBias:
      KILN_CHECK(out.size() == bias_.size() * sizeof(uint16_t));
      std::memcpy(out.data(), bias_.data(), out.size());
      return absl::OkStatus();
  }
  KILN_UNREACHABLE();
}

absl::Status LinearSource::Stream(LinearSlot slot, const PieceSink& sink) {
  const SafetensorsTensor tensor = Tensor(slot);
  NativeRows rows;
  rows.bytes = tensor.bytes();
  rows.rows = slot == LinearSlot::kW ? tensor.dims[0] : 1;
  const uint64_t row_bytes = rows.bytes / rows.rows;
  rows.row_bytes = [&](uint64_t, uint64_t) { return row_bytes; };
  rows.read = [&](uint64_t, uint64_t row, std::span<uint8_t> out) {
    return ReadRow(slot, row, out);
  };
  return StreamRows(rows, sink);
}

absl::StatusOr<LinearExtent> ExtentOfRank(const DenseMatrix& matrix,
                                          int64_t rank, int64_t ranks) {
  ASSIGN_OR_RETURN(const RequestGeometry part, matrix.Geometry(ranks));
  RETURN_IF_ERROR(CheckRank(rank, ranks));
  const int64_t in = part.linear.in_features;
  const int64_t out = part.linear.out_features;
  LinearExtent extent = {.in = {0, in}, .out = {0, out}};
  switch (kDenseProjections[matrix.projection].split) {
    case RankSplit::kOutput:
      extent.out = {rank * out, (rank + 1) * out};
      break;
    case RankSplit::kInput:
      extent.in = {rank * in, (rank + 1) * in};
      break;
    case RankSplit::kNone:
      break;
  }
  return extent;
}

}  // namespace kiln
