// Layers whose experts have pair rates: what one prepared part is, and the
// tables by which the known kernels find an expert's payload in it.
//
// Source: trellis format specification, section 2.3.

#ifndef KILN_TEMPLATES_FORMATS_PAIR_LAYER_H_
#define KILN_TEMPLATES_FORMATS_PAIR_LAYER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "templates/formats/trellis_source.h"

namespace kiln {

// How a kernel finds the payload of an expert.
enum class PairArm {
  kDynamic,  // P33 and P24: equal strides, the kind is a mode of the expert
  kPools,    // P33 and P43: no gaps, the place and the kind are a descriptor
};

// The arm of a set of rate bytes.
//   Errors: FailedPrecondition for a set that no arm runs.
absl::StatusOr<PairArm> PairArmOf(std::span<const uint8_t> kinds);
absl::Status CheckPairKinds(std::span<const uint8_t> kinds);

// One part holds the 256 channels of one pair.
absl::Status CheckPairExtent(const TrellisExtent& extent, int64_t intermediate);

// Per expert: 0 for P33, 1 for the other kind.
//   rates: P33, P24 and P43 only.
std::vector<int32_t> PairModes(std::span<const uint8_t> rates);

// Per expert: offset << 1 | (1 for P43), where the offset counts 32-bit words
// from the start of the projection's payload.
//   rates: only P33 and P43. hidden: multiple of 16.
std::vector<int64_t> PairDescriptors(std::span<const uint8_t> rates,
                                     int64_t hidden);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_PAIR_LAYER_H_
