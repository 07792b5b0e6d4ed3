#include "compiler/spec/request.h"

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"

namespace kiln {

absl::string_view OpName(Op op) {
  switch (op) {
    case Op::kFusedMoe:
      return "fused_moe";
  }
  KILN_UNREACHABLE();
}

absl::string_view ActivationName(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return "silu";
  }
  KILN_UNREACHABLE();
}

absl::string_view WeightFormatName(WeightFormat format) {
  switch (format) {
    case WeightFormat::kExl3:
      return "exl3";
  }
  KILN_UNREACHABLE();
}

absl::string_view CodebookName(Codebook codebook) {
  switch (codebook) {
    case Codebook::k3Inst:
      return "3inst";
    case Codebook::kMcg:
      return "mcg";
    case Codebook::kMul1:
      return "mul1";
  }
  KILN_UNREACHABLE();
}

absl::string_view RecipeName(Recipe recipe) {
  switch (recipe) {
    case Recipe::kW4A16:
      return "w4a16";
  }
  KILN_UNREACHABLE();
}

void RequestGeometry::Encode(CanonicalEncoder* encoder) const {
  encoder->Begin("request")
      .Text("op", OpName(op))
      .Number("hidden", hidden)
      .Number("intermediate", intermediate)
      .Number("experts", experts)
      .Number("top_k", top_k)
      .Text("activation", ActivationName(activation))
      .Text("io_dtype", DTypeName(io_dtype))
      .Text("id_dtype", DTypeName(id_dtype))
      .Text("format", WeightFormatName(weights.format))
      .Text("codebook", CodebookName(weights.codebook))
      .Number("bits_gate", weights.bits.gate)
      .Number("bits_up", weights.bits.up)
      .Number("bits_down", weights.bits.down)
      .Flag("shared_scales", weights.shared_scales)
      .Text("recipe", RecipeName(recipe))
      .Flag("deterministic", deterministic)
      .End();
}

std::string RequestGeometry::ToString() const {
  const Bits& bits = weights.bits;
  const std::string rate =
      bits.gate == bits.up && bits.up == bits.down
          ? absl::StrCat("K", bits.gate)
          : absl::StrCat("K", bits.gate, "/", bits.up, "/", bits.down);
  return absl::StrCat(OpName(op), " H", hidden, " I", intermediate, " E",
                      experts, " k", top_k, " ",
                      WeightFormatName(weights.format), "-",
                      CodebookName(weights.codebook), " ", rate, " ",
                      ActivationName(activation), " ", RecipeName(recipe), " ",
                      DTypeName(io_dtype), " ", DTypeName(id_dtype),
                      weights.shared_scales ? " shared scales" : "",
                      deterministic ? " deterministic" : "");
}

std::vector<Interval> Request::Intervals() const {
  std::vector<Interval> intervals;
  uint32_t previous = 0;
  for (const uint32_t capacity : capacities) {
    intervals.push_back({.m_min = previous + 1, .m_max = capacity});
    previous = capacity;
  }
  return intervals;
}

}  // namespace kiln
