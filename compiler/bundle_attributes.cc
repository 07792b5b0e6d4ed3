#include "compiler/bundle_attributes.h"

#include <cstdint>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

constexpr absl::string_view kGroup = "request/";

// Reads fields by name; the first problem is kept.
class Fields {
 public:
  explicit Fields(const std::vector<CanonicalField>& fields)
      : fields_(fields) {}

  template <typename T>
  void Number(absl::string_view name, T* value) {
    int64_t parsed = 0;
    if (!absl::SimpleAtoi(Find(name), &parsed)) return Refuse(name);
    *value = static_cast<T>(parsed);
  }

  void Flag(absl::string_view name, bool* value) {
    const absl::string_view text = Find(name);
    if (text != "true" && text != "false") return Refuse(name);
    *value = text == "true";
  }

  // A text that `is_legal` takes.
  void Text(absl::string_view name, bool (*is_legal)(absl::string_view),
            std::string* value) {
    if (!is_legal(Find(name))) return Refuse(name);
    *value = std::string(Find(name));
  }

  // The value among `values` whose name is the field's text.
  template <typename T, typename Namer>
  void OneOf(absl::string_view name, std::initializer_list<T> values,
             Namer namer, T* value) {
    const absl::string_view text = Find(name);
    for (const T candidate : values) {
      if (namer(candidate) == text) {
        *value = candidate;
        return;
      }
    }
    Refuse(name);
  }

  bool Has(absl::string_view name) const { return !Find(name).empty(); }

  const absl::Status& status() const { return status_; }

 private:
  absl::string_view Find(absl::string_view name) const {
    for (const CanonicalField& field : fields_) {
      if (field.path == name) return field.value;
    }
    return absl::string_view();
  }

  void Refuse(absl::string_view name) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(
        absl::StrCat("geometry field ", name, " is '", Find(name),
                     "', which this build does not read"));
  }

  const std::vector<CanonicalField>& fields_;
  absl::Status status_;
};

constexpr std::initializer_list<DType> kDTypes = {DType::kF32,  DType::kF16,
                                                  DType::kBf16, DType::kI16,
                                                  DType::kI32,  DType::kI64};

void ReadCodebook(Fields* fields, Weights* weights) {
  fields->OneOf("codebook", {Codebook::k3Inst, Codebook::kMcg, Codebook::kMul1},
                CodebookName, &weights->codebook);
}

void ReadFusedMoe(Fields* fields, RequestGeometry* out) {
  fields->Number("hidden", &out->hidden);
  fields->Number("intermediate", &out->intermediate);
  fields->Number("experts", &out->experts);
  fields->Number("top_k", &out->top_k);
  fields->OneOf("id_dtype", kDTypes, DTypeName, &out->id_dtype);
  Weights& weights = out->weights;
  fields->OneOf(
      "format",
      {WeightFormat::kExl3, WeightFormat::kTrellisMx, WeightFormat::kQsrt},
      WeightFormatName, &weights.format);
  switch (weights.format) {
    case WeightFormat::kExl3:
      fields->OneOf("activation", {Activation::kSilu}, ActivationName,
                    &out->activation);
      ReadCodebook(fields, &weights);
      fields->Number("bits_gate", &weights.bits.gate);
      fields->Number("bits_up", &weights.bits.up);
      fields->Number("bits_down", &weights.bits.down);
      fields->Flag("shared_scales", &weights.shared_scales);
      break;
    case WeightFormat::kTrellisMx:
      fields->OneOf("activation", {Activation::kSilu}, ActivationName,
                    &out->activation);
      fields->Number("bits", &weights.bits.gate);
      weights.bits.up = weights.bits.down = weights.bits.gate;
      fields->Text("limit", IsClampLimit, &out->mx.limit);
      fields->Number("smallm_max_tokens", &out->mx.smallm_max_tokens);
      if (fields->Has("direct_max_tokens")) {
        fields->Number("direct_max_tokens", &out->mx.direct_max_tokens);
        fields->OneOf("remainder", {Remainder::kNone, Remainder::kRp2},
                      RemainderName, &out->mx.remainder);
      }
      if (fields->Has("boundary")) {
        fields->OneOf("boundary", {MxBoundary::kIdentity}, MxBoundaryName,
                      &out->mx.boundary);
      }
      break;
    case WeightFormat::kQsrt:
      fields->OneOf(
          "activation",
          {Activation::kSilu, Activation::kSitu, Activation::kPerExpert},
          ActivationName, &out->activation);
      fields->OneOf("pairs", {PairKinds::kP24P33, PairKinds::kP33P43},
                    PairKindsName, &out->qsrt.pairs);
      fields->Flag("shared_scales", &weights.shared_scales);
      fields->Number("decode_max_tokens", &out->qsrt.decode_max_tokens);
      break;
  }
}

void ReadLinear(Fields* fields, RequestGeometry* out) {
  fields->Number("in_features", &out->linear.in_features);
  fields->Number("out_features", &out->linear.out_features);
  fields->Flag("bias", &out->linear.bias);
  fields->Number("bits", &out->linear.bits);
  fields->OneOf("format", {WeightFormat::kExl3}, WeightFormatName,
                &out->weights.format);
  ReadCodebook(fields, &out->weights);
}

}  // namespace

std::vector<CanonicalField> GeometryAttributes(
    const RequestGeometry& geometry) {
  CanonicalEncoder encoder("kiln.geometry/1");
  geometry.Encode(&encoder);
  absl::StatusOr<CanonicalRecord> record = DecodeCanonical(encoder.bytes());
  KILN_CHECK(record.ok());
  for (CanonicalField& field : record->fields) {
    KILN_CHECK(field.path.rfind(std::string(kGroup), 0) == 0);
    field.path.erase(0, kGroup.size());
  }
  return std::move(record->fields);
}

absl::StatusOr<RequestGeometry> GeometryFromAttributes(
    const std::vector<CanonicalField>& attributes) {
  RequestGeometry out;
  Fields fields(attributes);
  fields.OneOf("op", {Op::kFusedMoe, Op::kLinear}, OpName, &out.op);
  switch (out.op) {
    case Op::kFusedMoe:
      ReadFusedMoe(&fields, &out);
      break;
    case Op::kLinear:
      ReadLinear(&fields, &out);
      break;
  }
  fields.OneOf("io_dtype", kDTypes, DTypeName, &out.io_dtype);
  fields.OneOf("recipe", {Recipe::kW4A16, Recipe::kW4A8}, RecipeName,
               &out.recipe);
  fields.Flag("deterministic", &out.deterministic);
  RETURN_IF_ERROR(fields.status());
  // Catches what the reads above cannot: fields that are unknown, repeated or
  // in another order.
  if (GeometryAttributes(out) != attributes) {
    return absl::InvalidArgumentError(
        "geometry fields are not the ones this build writes");
  }
  return out;
}

}  // namespace kiln
