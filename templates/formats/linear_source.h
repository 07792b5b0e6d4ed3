// LinearSource: the weights of one matrix of op linear in their native layout.
// As TrellisSource: sizes are known before a byte is allocated, bytes are
// delivered in pieces, payloads are copied and never re-encoded.
//
// Source: trellis format specification, sections 1.7 and 1.8.

#ifndef KILN_TEMPLATES_FORMATS_LINEAR_SOURCE_H_
#define KILN_TEMPLATES_FORMATS_LINEAR_SOURCE_H_

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compiler/spec/request.h"
#include "templates/formats/checkpoint.h"
#include "templates/formats/dense_layers.h"
#include "templates/formats/exl3.h"
#include "templates/formats/safetensors.h"
#include "templates/formats/trellis_source.h"

namespace kiln {

// What a matrix [in][out] consists of.
enum class LinearSlot {
  kW,     // i16 [in/16][out/16][16 bits]
  kSuh,   // f16 [in]
  kSvh,   // f16 [out]
  kBias,  // f16 [out], where there is one
};

// The part of a matrix that one tensor-parallel rank holds.
struct LinearExtent {
  TrellisExtent in;
  TrellisExtent out;
};

// Not thread-safe.
class LinearSource {
 public:
  // Checks the values that have rules of their own: marker, scales, bias.
  //   checkpoint: borrowed.
  //   Errors: InvalidArgument with the tensor, the value and the rule.
  static absl::StatusOr<LinearSource> FromExl3(const Exl3Matrix& matrix,
                                               const LinearExtent& extent,
                                               Checkpoint* checkpoint);

  // Of the extent.
  const LinearShape& shape() const { return shape_; }

  Codebook codebook() const { return matrix_.codebook; }

  // Those that there are, in order.
  std::vector<LinearSlot> Slots() const;

  // Name, type and shape of a slot's native tensor; `begin` is 0 and `end` its
  // exact size in bytes. The name lives for the whole process.
  SafetensorsTensor Tensor(LinearSlot slot) const;

  // StreamRows of the slot's native tensor. A part whose input does not begin
  // at channel 0 has a bias of zeros: outputs of all ranks add up.
  absl::Status Stream(LinearSlot slot, const PieceSink& sink);

 private:
  LinearSource(const Exl3Matrix& matrix, const LinearExtent& extent,
               Checkpoint* checkpoint)
      : matrix_(matrix), extent_(extent), checkpoint_(checkpoint) {}

  absl::Status ReadRow(LinearSlot slot, uint64_t row, std::span<uint8_t> out);

  Exl3Matrix matrix_;
  LinearExtent extent_;
  Checkpoint* checkpoint_;
  LinearShape shape_;
  std::vector<uint16_t> bias_;  // of the extent
  std::vector<uint16_t> scales_;
};

// Channels of rank `rank` of `ranks`, counted from 0.
//   Errors: InvalidArgument, with the tensor, for a rank outside 0..ranks-1 or
//   a split that cuts a Hadamard block.
absl::StatusOr<LinearExtent> ExtentOfRank(const DenseMatrix& matrix,
                                          int64_t rank, int64_t ranks);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_LINEAR_SOURCE_H_
