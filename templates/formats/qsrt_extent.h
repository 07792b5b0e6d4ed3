// QSRT atoms, version 1: the intermediate axis in atoms of 32 channels, stored
// for each expert at a place that its number and the layer decide. Eight atoms
// are a pair of records of 128 channels, P24 or P33.
//
// Source: trellis format specification, sections 3.1 to 3.5.

#ifndef KILN_TEMPLATES_FORMATS_QSRT_EXTENT_H_
#define KILN_TEMPLATES_FORMATS_QSRT_EXTENT_H_

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "templates/formats/trellis_source.h"
#include "templates/fused_moe/trellis_matrix.h"

namespace kiln {

// The format code of an expert that is stored elsewhere, in the X4T tier.
inline constexpr uint8_t kQsrtX4t = 0xFF;

// Bytes of one expert in one atom: three matrices and three times 32 scales.
uint64_t QsrtBundleBytes(int64_t hidden);

// How many pairs an expert's logical pairs are rotated up: logical pair i lies
// at physical pair (i + rotation) mod pairs.
//   pairs: at least 1; the others: not negative. expert: the global number.
int64_t QsrtRotation(int64_t pairs, int64_t multiplier, int64_t layer,
                     int64_t expert);

// The eight atoms of one physical pair for some experts of a layer. Borrows
// all.
struct QsrtExtent {
  int64_t hidden = 0;      // multiple of 128
  int64_t atom_slots = 0;  // of the whole axis, multiple of 8
  int64_t experts_per_layer = 0;
  int64_t rotation_multiplier = 0;
  int64_t layer = 0;
  int64_t first_slot = 0;  // multiple of 8
  // Eight rows, `row_stride` bytes apart; the last may end with its bundles.
  std::span<const uint8_t> payload;
  uint64_t row_stride = 0;
  std::span<const int64_t> expert_ids;  // global numbers, distinct
  std::span<const int64_t>
      format_codes;  // pairs of P24: gate and up << 4 | down
  // Binary16 [H], or [E][H] in the order of expert_ids: all of one kind.
  std::span<const uint8_t> gate_suh;
  std::span<const uint8_t> up_suh;
  std::span<const uint8_t> down_svh;
};

// Everything about an extent that has a rule, finite scales included.
//   Errors: InvalidArgument with the rule, the value and the values accepted.
absl::Status CheckQsrtExtent(const QsrtExtent& extent);

// The native tensors of the pair, one part of the layer. Checks the extent.
absl::StatusOr<std::unique_ptr<TrellisSource>> TrellisFromQsrt(
    const QsrtExtent& extent);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_QSRT_EXTENT_H_
