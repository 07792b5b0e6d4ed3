#include "compiler/spec/request.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"

namespace kiln {

absl::string_view OpName(Op op) {
  switch (op) {
    case Op::kFusedMoe:
      return "fused_moe";
    case Op::kLinear:
      return "linear";
  }
  KILN_UNREACHABLE();
}

absl::string_view ActivationName(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return "silu";
    case Activation::kSitu:
      return "situ";
    case Activation::kPerExpert:
      return "per_expert";
  }
  KILN_UNREACHABLE();
}

absl::string_view WeightFormatName(WeightFormat format) {
  switch (format) {
    case WeightFormat::kExl3:
      return "exl3";
    case WeightFormat::kTrellisMx:
      return "trellis_mx";
    case WeightFormat::kQsrt:
      return "qsrt";
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
    case Recipe::kW4A8:
      return "w4a8";
  }
  KILN_UNREACHABLE();
}

absl::string_view PairKindsName(PairKinds pairs) {
  switch (pairs) {
    case PairKinds::kP24P33:
      return "p24_p33";
    case PairKinds::kP33P43:
      return "p33_p43";
  }
  KILN_UNREACHABLE();
}

absl::string_view MxBoundaryName(MxBoundary boundary) {
  switch (boundary) {
    case MxBoundary::kCoupled:
      return "coupled";
    case MxBoundary::kIdentity:
      return "identity";
  }
  KILN_UNREACHABLE();
}

absl::string_view RemainderName(Remainder remainder) {
  switch (remainder) {
    case Remainder::kNone:
      return "none";
    case Remainder::kRp2:
      return "rp2";
  }
  KILN_UNREACHABLE();
}

bool IsClampLimit(absl::string_view text) {
  if (text == "inf") return true;
  // Two numbers of this size, one behind silu, have a product of 2^-13, which
  // binary16, in which activations may be kept, still has in full.
  constexpr double kLeast = 0.015625;
  constexpr size_t kDigitsMax = 9;
  const size_t point = text.find('.');
  const absl::string_view whole = text.substr(0, point);
  const auto digits = [](absl::string_view s) {
    return !s.empty() && s.size() <= kDigitsMax &&
           std::all_of(s.begin(), s.end(),
                       [](char c) { return c >= '0' && c <= '9'; });
  };
  if (!digits(whole) || (whole.size() > 1 && whole[0] == '0')) return false;
  if (point != absl::string_view::npos) {
    const absl::string_view part = text.substr(point + 1);
    if (!digits(part) || part.back() == '0') return false;
  }
  double value = 0;
  return absl::SimpleAtod(text, &value) && value >= kLeast;
}

namespace {

void EncodeWeights(const RequestGeometry& geometry, CanonicalEncoder* encoder) {
  const Weights& weights = geometry.weights;
  encoder->Text("format", WeightFormatName(weights.format));
  switch (weights.format) {
    case WeightFormat::kExl3:
      encoder->Text("codebook", CodebookName(weights.codebook))
          .Number("bits_gate", weights.bits.gate)
          .Number("bits_up", weights.bits.up)
          .Number("bits_down", weights.bits.down)
          .Flag("shared_scales", weights.shared_scales);
      return;
    case WeightFormat::kTrellisMx:
      encoder->Number("bits", weights.bits.gate)
          .Text("limit", geometry.mx.limit)
          .Number("smallm_max_tokens", geometry.mx.smallm_max_tokens);
      // Without the arm the key is that of requests that never heard of it.
      if (geometry.mx.direct_max_tokens != 0) {
        encoder->Number("direct_max_tokens", geometry.mx.direct_max_tokens)
            .Text("remainder", RemainderName(geometry.mx.remainder));
      }
      // Likewise of the boundary that is not the usual one.
      if (geometry.mx.boundary != MxBoundary::kCoupled) {
        encoder->Text("boundary", MxBoundaryName(geometry.mx.boundary));
      }
      return;
    case WeightFormat::kQsrt:
      encoder->Text("pairs", PairKindsName(geometry.qsrt.pairs))
          .Flag("shared_scales", weights.shared_scales)
          .Number("decode_max_tokens", geometry.qsrt.decode_max_tokens);
      return;
  }
  KILN_UNREACHABLE();
}

void EncodeFusedMoe(const RequestGeometry& geometry,
                    CanonicalEncoder* encoder) {
  encoder->Number("hidden", geometry.hidden)
      .Number("intermediate", geometry.intermediate)
      .Number("experts", geometry.experts)
      .Number("top_k", geometry.top_k)
      .Text("activation", ActivationName(geometry.activation))
      .Text("io_dtype", DTypeName(geometry.io_dtype))
      .Text("id_dtype", DTypeName(geometry.id_dtype));
  EncodeWeights(geometry, encoder);
}

void EncodeLinear(const RequestGeometry& geometry, CanonicalEncoder* encoder) {
  const LinearShape& shape = geometry.linear;
  encoder->Number("in_features", shape.in_features)
      .Number("out_features", shape.out_features)
      .Flag("bias", shape.bias)
      .Text("io_dtype", DTypeName(geometry.io_dtype))
      .Text("format", WeightFormatName(geometry.weights.format))
      .Text("codebook", CodebookName(geometry.weights.codebook))
      .Number("bits", shape.bits);
}

std::string LinearToString(const RequestGeometry& geometry) {
  const LinearShape& shape = geometry.linear;
  return absl::StrCat(OpName(geometry.op), " [", shape.in_features, ", ",
                      shape.out_features, "] ",
                      WeightFormatName(geometry.weights.format), "-",
                      CodebookName(geometry.weights.codebook), " K", shape.bits,
                      " ", RecipeName(geometry.recipe), " ",
                      DTypeName(geometry.io_dtype), shape.bias ? " bias" : "",
                      geometry.deterministic ? "" : " nondeterministic");
}

// What a format adds to a request's line behind its own name, the activation
// and the recipe.
struct WeightTexts {
  std::string weights;
  std::string activation;
  std::string recipe;
};

WeightTexts WeightTextsOf(const RequestGeometry& geometry) {
  const Weights& weights = geometry.weights;
  const Bits& bits = weights.bits;
  const std::string rate =
      bits.gate == bits.up && bits.up == bits.down
          ? absl::StrCat(" K", bits.gate)
          : absl::StrCat(" K", bits.gate, "/", bits.up, "/", bits.down);
  WeightTexts texts;
  switch (weights.format) {
    case WeightFormat::kExl3:
      texts.weights = absl::StrCat("-", CodebookName(weights.codebook), rate);
      return texts;
    case WeightFormat::kTrellisMx:
      texts.weights = rate;
      if (geometry.mx.boundary != MxBoundary::kCoupled) {
        absl::StrAppend(&texts.weights, " ",
                        MxBoundaryName(geometry.mx.boundary));
      }
      texts.activation = absl::StrCat(" limit ", geometry.mx.limit);
      texts.recipe =
          geometry.mx.direct_max_tokens == 0
              ? absl::StrCat(" small-m ", geometry.mx.smallm_max_tokens)
              : absl::StrCat(" direct ", geometry.mx.direct_max_tokens);
      if (geometry.mx.remainder != Remainder::kNone) {
        absl::StrAppend(&texts.recipe, " ",
                        RemainderName(geometry.mx.remainder));
      }
      return texts;
    case WeightFormat::kQsrt:
      texts.weights = absl::StrCat(" ", PairKindsName(geometry.qsrt.pairs));
      if (geometry.recipe == Recipe::kW4A8) {
        texts.recipe =
            absl::StrCat(" decode ", geometry.qsrt.decode_max_tokens);
      }
      return texts;
  }
  KILN_UNREACHABLE();
}

}  // namespace

void RequestGeometry::Encode(CanonicalEncoder* encoder) const {
  encoder->Begin("request").Text("op", OpName(op));
  switch (op) {
    case Op::kFusedMoe:
      EncodeFusedMoe(*this, encoder);
      break;
    case Op::kLinear:
      EncodeLinear(*this, encoder);
      break;
  }
  encoder->Text("recipe", RecipeName(recipe))
      .Flag("deterministic", deterministic)
      .End();
}

std::string RequestGeometry::ToString() const {
  if (op == Op::kLinear) return LinearToString(*this);
  const WeightTexts texts = WeightTextsOf(*this);
  return absl::StrCat(
      OpName(op), " H", hidden, " I", intermediate, " E", experts, " k", top_k,
      " ", WeightFormatName(weights.format), texts.weights, " ",
      ActivationName(activation), texts.activation, " ", RecipeName(recipe),
      texts.recipe, " ", DTypeName(io_dtype), " ", DTypeName(id_dtype),
      weights.shared_scales ? " shared scales" : "",
      deterministic ? "" : " nondeterministic");
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
