// TrellisLayout: what the native tensors of one layer hold, whatever container
// they come from.
//
// Source: trellis format specification, sections 2.2 and 2.3.

#ifndef KILN_TEMPLATES_FORMATS_TRELLIS_LAYOUT_H_
#define KILN_TEMPLATES_FORMATS_TRELLIS_LAYOUT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compiler/spec/request.h"
#include "templates/fused_moe/trellis_codebook.h"

namespace kiln {

struct TrellisLayout {
  int64_t hidden = 0;
  int64_t intermediate = 0;  // of the extent
  int64_t experts = 0;
  TrellisCodebook codebook = TrellisCodebook::kMcg;
  Bits bits;                   // all 0 in a layer of pair rates
  bool shared_scales = false;  // the tables of the hidden side have one row
  bool coupled = false;        // rotations are [E][6I]
  // Pair rates: low << 4 | high of each expert, for gate and up, and for down;
  // the extent has 256 channels. Empty in a layer of uniform rates.
  std::vector<uint8_t> rates_fc1;
  std::vector<uint8_t> rates_fc2;

  bool pairs() const { return !rates_fc1.empty(); }

  // One line for people: "H256 I256 E3 sqg_e4m3 pairs P24 P33 shared scales".
  std::string ToString() const;
};

// "P33" of rate byte 0x33.
std::string PairKindName(uint8_t rate_byte);

// The geometry of a request for the layer, which has no pair rates; what a
// container does not know (top_k, io_dtype) is left at its default.
//   Errors: FailedPrecondition with the first reason why no template of this
//   build serves such a layer.
absl::StatusOr<RequestGeometry> ServedGeometry(const TrellisLayout& layout);

// The same of one part of a layer of pair rates.
//   pairs: which kinds its experts have.
absl::StatusOr<RequestGeometry> ServedPairGeometry(const TrellisLayout& layout,
                                                   PairKinds pairs);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_TRELLIS_LAYOUT_H_
