// TrellisSource: the weights of one fused_moe layer in their native layout,
// whatever container they come from. The size of every tensor is known before
// a byte is allocated; bytes are delivered in pieces, so that the host never
// holds more of a layer than one piece. Payloads are copied, never re-encoded.
//
// Source: trellis format specification, sections 1.8, 2.2 and 2.3.

#ifndef KILN_TEMPLATES_FORMATS_TRELLIS_SOURCE_H_
#define KILN_TEMPLATES_FORMATS_TRELLIS_SOURCE_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "templates/formats/checkpoint.h"
#include "templates/formats/routed_experts.h"
#include "templates/formats/safetensors.h"
#include "templates/formats/trellis_layout.h"
#include "templates/fused_moe/op.h"

namespace kiln {

// The most that one piece holds.
inline constexpr uint64_t kStagingBytesMax = 64u << 20;
inline constexpr uint64_t kStagingExpertsMax = 64;

// Consecutive pieces of a tensor; one is only valid during the call.
using PieceSink = std::function<absl::Status(std::span<const uint8_t>)>;

// A native tensor as rows that are read one by one.
struct NativeRows {
  uint64_t bytes = 0;  // of the tensor
  uint64_t experts = 1;
  uint64_t rows = 1;  // of each expert
  // Of one row, at most kStagingBytesMax.
  std::function<uint64_t(uint64_t expert, uint64_t row)> row_bytes;
  // Fills one row.
  std::function<absl::Status(uint64_t expert, uint64_t row,
                             std::span<uint8_t> out)>
      read;
};

// Calls `sink` with pieces of whole rows, each of at most kStagingBytesMax
// bytes of at most kStagingExpertsMax experts. Stops at the first error.
absl::Status StreamRows(const NativeRows& rows, const PieceSink& sink);

// Channels [begin, end) of one axis of the source, multiples of 128: what one
// tensor-parallel rank holds; of fused_moe, intermediate channels. Outputs of
// all ranks add up to the whole.
struct TrellisExtent {
  int64_t begin = 0;
  int64_t end = 0;
};

// The slots of the op's parameter block that hold weights, in its order.
inline constexpr std::array<FusedMoeParam, 7> kTrellisSlots = {
    FusedMoeParam::kWGate,   FusedMoeParam::kWUp,   FusedMoeParam::kWDown,
    FusedMoeParam::kGateSuh, FusedMoeParam::kUpSuh, FusedMoeParam::kRotations,
    FusedMoeParam::kDownSvh,
};

// Not thread-safe.
class TrellisSource {
 public:
  virtual ~TrellisSource() = default;

  const TrellisLayout& layout() const { return layout_; }

  // Name, type and shape of a slot's native tensor; `begin` is 0 and `end` its
  // exact size in bytes. The name lives for the whole process. Experts of pair
  // rates follow each other without gaps; such a trellis has rank 1.
  SafetensorsTensor Tensor(FusedMoeParam slot) const;

  // StreamRows of the slot's native tensor.
  absl::Status Stream(FusedMoeParam slot, const PieceSink& sink);

 protected:
  explicit TrellisSource(TrellisLayout layout) : layout_(std::move(layout)) {}

  // Writes one row of expert `expert`. Of a trellis, a row is all tiles of 16
  // input channels ([columns / 16][16 K], or the low record's and then the high
  // record's); of a table, it is the expert's part, or what all experts share.
  virtual absl::Status ReadRow(FusedMoeParam slot, uint64_t expert,
                               uint64_t row, std::span<uint8_t> out) = 0;

 private:
  uint64_t RowBytes(FusedMoeParam slot, uint64_t expert, uint64_t row) const;

  TrellisLayout layout_;
};

// InvalidArgument for a rank outside 0..ranks-1.
absl::Status CheckRank(int64_t rank, int64_t ranks);

// Channels of rank `rank` of `ranks`, counted from 0.
//   Errors: InvalidArgument for a rank outside 0..ranks-1 or a split that cuts
//   a Hadamard block; see ChannelsPerRank.
absl::StatusOr<TrellisExtent> ExtentOfRank(int64_t intermediate, int64_t rank,
                                           int64_t ranks);

// The same of a layer with more rules than Hadamard blocks.
//   check: InvalidArgument for an extent that no rank may have; other errors
//   do not depend on the extent and are returned as they are.
//   Errors: InvalidArgument with the rule and the numbers of ranks that are
//   possible, unless the extents of all ranks pass.
absl::StatusOr<TrellisExtent> ExtentOfRank(
    int64_t intermediate, int64_t rank, int64_t ranks,
    const std::function<absl::Status(const TrellisExtent&)>& check);

// InvalidArgument unless the extent lies within `channels`.
absl::Status CheckExtent(const TrellisExtent& extent, int64_t channels);

// A source over the EXL3 groups of one layer. Checks the values that have rules
// of their own: markers and scales.
//   checkpoint: borrowed.
//   Errors: InvalidArgument with the tensor, the value and the rule.
absl::StatusOr<std::unique_ptr<TrellisSource>> TrellisFromExl3(
    const RoutedLayer& layer, const TrellisExtent& extent,
    Checkpoint* checkpoint);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_TRELLIS_SOURCE_H_
