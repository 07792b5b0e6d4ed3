#include "templates/formats/trellis_layout.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"

namespace kiln {

std::string PairKindName(uint8_t rate_byte) {
  return absl::StrCat("P", rate_byte >> 4, rate_byte & 0xF);
}

std::string TrellisLayout::ToString() const {
  std::string text = absl::StrCat("H", hidden, " I", intermediate, " E",
                                  experts, " ", codebook.name());
  if (pairs()) {
    std::set<uint8_t> kinds(rates_fc1.begin(), rates_fc1.end());
    kinds.insert(rates_fc2.begin(), rates_fc2.end());
    absl::StrAppend(&text, " pairs");
    for (const uint8_t kind : kinds) {
      absl::StrAppend(&text, " ", PairKindName(kind));
    }
  } else if (bits.gate == bits.up && bits.up == bits.down) {
    absl::StrAppend(&text, " K", bits.gate);
  } else {
    absl::StrAppend(&text, " K", bits.gate, "/", bits.up, "/", bits.down);
  }
  absl::StrAppend(&text, shared_scales ? " shared scales" : "",
                  coupled ? " coupled" : "");
  return text;
}

namespace {

absl::Status NotServed(absl::string_view what) {
  return absl::FailedPreconditionError(
      absl::StrCat("has ", what,
                   "; no template of this build serves it, kiln prepare writes "
                   "its native tensors"));
}

}  // namespace

absl::StatusOr<RequestGeometry> ServedPairGeometry(const TrellisLayout& layout,
                                                   PairKinds pairs) {
  if (layout.coupled) return NotServed("a coupled Hadamard transform");
  if (layout.codebook != TrellisCodebook::kSqgE4m3) {
    return NotServed(
        absl::StrCat("a pair of rates for each expert and the codebook ",
                     layout.codebook.name()));
  }
  RequestGeometry geometry;
  geometry.hidden = layout.hidden;
  geometry.intermediate = layout.intermediate;
  geometry.experts = layout.experts;
  geometry.weights.format = WeightFormat::kQsrt;
  geometry.weights.shared_scales = layout.shared_scales;
  geometry.qsrt.pairs = pairs;
  return geometry;
}

absl::StatusOr<RequestGeometry> ServedGeometry(const TrellisLayout& layout) {
  KILN_CHECK(!layout.pairs());
  if (layout.coupled) return NotServed("a coupled Hadamard transform");
  if (!layout.codebook.request().has_value()) {
    return NotServed(absl::StrCat("the codebook ", layout.codebook.name()));
  }
  RequestGeometry geometry;
  geometry.hidden = layout.hidden;
  geometry.intermediate = layout.intermediate;
  geometry.experts = layout.experts;
  geometry.weights.codebook = *layout.codebook.request();
  geometry.weights.bits = layout.bits;
  geometry.weights.shared_scales = layout.shared_scales;
  return geometry;
}

}  // namespace kiln
