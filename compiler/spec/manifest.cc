#include "compiler/spec/manifest.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"
#include "compiler/spec/object_reader.h"

namespace kiln {
namespace {

using Json = nlohmann::ordered_json;

constexpr absl::string_view kSchema = "kiln.model/1";

// Text for people. With `ascii` also a key in a bundle, whose strings are
// printable ASCII.
absl::StatusOr<std::string> ParseName(const ObjectReader& reader, bool ascii) {
  ASSIGN_OR_RETURN(const JsonNode* value,
                   reader.Required("name", JsonNode::Kind::kString));
  if (value->text.empty() || value->text.size() > kNameBytesMax) {
    return reader.Error(*value,
                        absl::StrCat("\"name\" has ", value->text.size(),
                                     " bytes, must have 1..", kNameBytesMax));
  }
  for (const char c : value->text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      return reader.Refuse("name", *value,
                           "must not contain control characters");
    }
    if (ascii && static_cast<unsigned char>(c) > 0x7E) {
      return reader.Refuse(
          "name", *value, "must be printable ASCII: it names a bundle's entry");
    }
  }
  return value->text;
}

// What the channels of an axis come in blocks of.
struct ChannelBlock {
  int64_t channels = 128;
  absl::string_view why = "the Hadamard block";
};

// Both rules in one message: who keeps one should not be told of the other
// then.
absl::StatusOr<int64_t> ParseChannels(const ObjectReader& reader,
                                      absl::string_view key, int64_t high,
                                      const ChannelBlock& block = {}) {
  ASSIGN_OR_RETURN(const JsonNode* node,
                   reader.Required(key, JsonNode::Kind::kInteger));
  const int64_t value = node->integer;
  const std::string multiple =
      absl::StrCat("a multiple of ", block.channels, " (", block.why, ")");
  if (value < block.channels || value > high) {
    return reader.Refuse(key, *node,
                         absl::StrCat("must be within ", block.channels, "..",
                                      high, " and ", multiple));
  }
  if (value % block.channels == 0) return value;
  return reader.Refuse(key, *node, absl::StrCat("must be ", multiple));
}

// K of every EXL3 codebook; see the format's rate table.
constexpr int64_t kBitsMin = 1;
constexpr int64_t kBitsMax = 8;

absl::StatusOr<Bits> ParseBits(absl::string_view file,
                               const ObjectReader& weights) {
  const JsonNode* node = weights.Optional("bits");
  if (node != nullptr && node->kind == JsonNode::Kind::kObject) {
    const ObjectReader reader(file, *node, "\"bits\"");
    RETURN_IF_ERROR(reader.CheckKeys({"gate", "up", "down"}));
    Bits bits;
    for (auto [key, field] : {std::pair{"gate", &bits.gate},
                              {"up", &bits.up},
                              {"down", &bits.down}}) {
      ASSIGN_OR_RETURN(const int64_t value,
                       reader.Integer(key, kBitsMin, kBitsMax));
      *field = static_cast<int>(value);
    }
    return bits;
  }
  ASSIGN_OR_RETURN(const int64_t value,
                   weights.Integer("bits", kBitsMin, kBitsMax));
  const int bits = static_cast<int>(value);
  return Bits{.gate = bits, .up = bits, .down = bits};
}

// True when an object's "key" is this text. What else is wrong with the value
// is said when the key is read.
bool Says(const JsonNode& object, absl::string_view key,
          absl::string_view text) {
  const JsonNode* node = object.Find(key);
  return node != nullptr && node->kind == JsonNode::Kind::kString &&
         node->text == text;
}

// Which keys a request for fused_moe and its weights have depends on the
// format; weights that do not say it are held against those of exl3.
bool IsTrellisMx(const JsonNode& weights) {
  return Says(weights, "format", WeightFormatName(WeightFormat::kTrellisMx));
}

bool IsQsrt(const JsonNode& weights) {
  return Says(weights, "format", WeightFormatName(WeightFormat::kQsrt));
}

// What needs blocks of channels of fused_moe; there need be no "weights".
ChannelBlock BlockOf(const JsonNode* weights, bool hidden) {
  if (weights == nullptr || !IsTrellisMx(*weights)) return {};
  if (Says(*weights, "boundary", MxBoundaryName(MxBoundary::kIdentity))) {
    return {.why = "a word of prepared scales, which identity layers have too"};
  }
  const bool coupled =
      weights->Find("boundary") == nullptr ||
      Says(*weights, "boundary", MxBoundaryName(MxBoundary::kCoupled));
  if (!hidden || !coupled) return {};
  return {.channels = 512, .why = "the coupled Hadamard block of trellis_mx"};
}

absl::StatusOr<Op> ParseOp(const ObjectReader& reader) {
  return reader.Word<Op>(
      "op", {{"fused_moe", Op::kFusedMoe}, {"linear", Op::kLinear}});
}

absl::StatusOr<WeightFormat> ParseFormat(const ObjectReader& weights, Op op) {
  if (op == Op::kLinear) {
    return weights.Word<WeightFormat>("format",
                                      {{"exl3", WeightFormat::kExl3}});
  }
  return weights.Word<WeightFormat>("format",
                                    {{"exl3", WeightFormat::kExl3},
                                     {"trellis_mx", WeightFormat::kTrellisMx},
                                     {"qsrt", WeightFormat::kQsrt}});
}

absl::StatusOr<Codebook> ParseCodebook(const ObjectReader& reader) {
  return reader.Word<Codebook>("codebook", {{"3inst", Codebook::k3Inst},
                                            {"mcg", Codebook::kMcg},
                                            {"mul1", Codebook::kMul1}});
}

// Each expert has scales of its own unless "scales" says otherwise.
absl::StatusOr<bool> ParseSharedScales(const ObjectReader& weights) {
  if (weights.Optional("scales") == nullptr) return false;
  return weights.Word<bool>("scales",
                            {{"per_expert", false}, {"shared", true}});
}

absl::StatusOr<Weights> ParseMoeExl3(absl::string_view file,
                                     const ObjectReader& reader) {
  RETURN_IF_ERROR(reader.CheckKeys({"format", "codebook", "bits", "scales"}));
  Weights weights;
  ASSIGN_OR_RETURN(weights.format, ParseFormat(reader, Op::kFusedMoe));
  ASSIGN_OR_RETURN(weights.codebook, ParseCodebook(reader));
  ASSIGN_OR_RETURN(weights.bits, ParseBits(file, reader));
  ASSIGN_OR_RETURN(weights.shared_scales, ParseSharedScales(reader));
  return weights;
}

// Rates of NPK-1, the only law of the format.
constexpr int64_t kMxBitsMin = 2;
constexpr int64_t kMxBitsMax = 5;

// "weights" of trellis_mx.
absl::Status ParseTrellisMx(const ObjectReader& reader, RequestGeometry* out) {
  RETURN_IF_ERROR(reader.CheckKeys({"format", "bits", "limit", "boundary"}));
  out->weights.format = WeightFormat::kTrellisMx;
  ASSIGN_OR_RETURN(const int64_t value,
                   reader.Integer("bits", kMxBitsMin, kMxBitsMax));
  const int bits = static_cast<int>(value);
  out->weights.bits = {.gate = bits, .up = bits, .down = bits};
  ASSIGN_OR_RETURN(out->mx.limit, reader.Text("limit"));
  if (!IsClampLimit(out->mx.limit)) {
    return reader.Refuse("limit", *reader.Optional("limit"),
                         "must be \"inf\" or a decimal of at least 0.015625, "
                         "without exponent or needless zeros");
  }
  if (reader.Optional("boundary") != nullptr) {
    ASSIGN_OR_RETURN(out->mx.boundary,
                     reader.Word<MxBoundary>(
                         "boundary", {{"coupled", MxBoundary::kCoupled},
                                      {"identity", MxBoundary::kIdentity}}));
  }
  return absl::OkStatus();
}

// Channels of one part of a QSRT layer: a pair of records.
constexpr int64_t kQsrtIntermediate = 256;

// The same of qsrt.
absl::Status ParseQsrt(const ObjectReader& reader, RequestGeometry* out) {
  RETURN_IF_ERROR(reader.CheckKeys({"format", "pairs", "scales"}));
  out->weights.format = WeightFormat::kQsrt;
  ASSIGN_OR_RETURN(
      out->qsrt.pairs,
      reader.Word<PairKinds>("pairs", {{"p24_p33", PairKinds::kP24P33},
                                       {"p33_p43", PairKinds::kP33P43}}));
  ASSIGN_OR_RETURN(out->weights.shared_scales, ParseSharedScales(reader));
  return absl::OkStatus();
}

absl::StatusOr<int64_t> ParseQsrtIntermediate(const ObjectReader& request) {
  constexpr absl::string_view kKey = "intermediate";
  ASSIGN_OR_RETURN(const JsonNode* node,
                   request.Required(kKey, JsonNode::Kind::kInteger));
  if (node->integer == kQsrtIntermediate) return kQsrtIntermediate;
  return request.Refuse(
      kKey, *node,
      "must be 256 (one pair of records of qsrt; a layer with more channels is "
      "several parts, whose outputs add up)");
}

// A count, or a list of ascending layer ids.
absl::StatusOr<std::vector<int64_t>> ParseLayers(const ObjectReader& reader) {
  std::vector<int64_t> layers;
  const JsonNode* node = reader.Optional("layers");
  if (node == nullptr || node->kind != JsonNode::Kind::kArray) {
    ASSIGN_OR_RETURN(const int64_t count,
                     reader.Integer("layers", 1, kLayersMax));
    for (int64_t i = 0; i < count; ++i) layers.push_back(i);
    return layers;
  }
  if (node->items.empty()) {
    return reader.Error(*node, "\"layers\" is empty, must name a layer");
  }
  for (const JsonNode& item : node->items) {
    ASSIGN_OR_RETURN(const int64_t layer,
                     reader.IntegerOf(item, "layers", 0, kLayersMax - 1));
    if (!layers.empty() && layer <= layers.back()) {
      return reader.Error(
          item, absl::StrCat("\"layers\" has ", layer, " after ", layers.back(),
                             ", must ascend without repeats"));
    }
    layers.push_back(layer);
  }
  return layers;
}

absl::StatusOr<std::vector<uint32_t>> ParseCapacities(
    const ObjectReader& reader) {
  ASSIGN_OR_RETURN(const JsonNode* node,
                   reader.Required("capacities", JsonNode::Kind::kArray));
  if (node->items.empty() || node->items.size() > kCapacitiesMax) {
    return reader.Error(
        *node, absl::StrCat("\"capacities\" has ", node->items.size(),
                            " entries, must have 1..", kCapacitiesMax));
  }
  std::vector<uint32_t> capacities;
  for (const JsonNode& item : node->items) {
    ASSIGN_OR_RETURN(const int64_t value,
                     reader.IntegerOf(item, "capacities", 1, kCapacityMax));
    if (!capacities.empty() && value == capacities.back()) {
      return reader.Error(item,
                          absl::StrCat("\"capacities\" has ", value, " twice"));
    }
    if (!capacities.empty() && value < capacities.back()) {
      return reader.Error(item,
                          absl::StrCat("\"capacities\" has ", value, " after ",
                                       capacities.back(), ", must ascend"));
    }
    capacities.push_back(static_cast<uint32_t>(value));
  }
  return capacities;
}

absl::StatusOr<DType> ParseIoDType(const ObjectReader& reader) {
  return reader.Word<DType>("io_dtype",
                            {{"bf16", DType::kBf16}, {"f16", DType::kF16}});
}

// The geometry of a request for fused_moe, but for what every request has.
absl::Status ParseFusedMoe(absl::string_view file, const ObjectReader& reader,
                           RequestGeometry* out) {
  RequestGeometry& geometry = *out;
  const JsonNode* found = reader.Optional("weights");
  const bool is_qsrt = found != nullptr && IsQsrt(*found);
  ASSIGN_OR_RETURN(geometry.hidden, ParseChannels(reader, "hidden", kHiddenMax,
                                                  BlockOf(found, true)));
  ASSIGN_OR_RETURN(geometry.intermediate,
                   is_qsrt
                       ? ParseQsrtIntermediate(reader)
                       : ParseChannels(reader, "intermediate", kIntermediateMax,
                                       BlockOf(found, false)));
  ASSIGN_OR_RETURN(geometry.experts, reader.Integer("experts", 1, kExpertsMax));
  ASSIGN_OR_RETURN(geometry.top_k, reader.Integer("top_k", 1, kTopKMax));
  if (geometry.top_k > geometry.experts) {
    return reader.Error(
        *reader.Optional("top_k"),
        absl::StrCat("\"top_k\" is ", geometry.top_k,
                     ", must be at most \"experts\" (", geometry.experts, ")"));
  }
  ASSIGN_OR_RETURN(
      geometry.activation,
      is_qsrt ? reader.Word<Activation>(
                    "activation", {{"silu", Activation::kSilu},
                                   {"situ", Activation::kSitu},
                                   {"per_expert", Activation::kPerExpert}})
              : reader.Word<Activation>("activation",
                                        {{"silu", Activation::kSilu}}));
  ASSIGN_OR_RETURN(geometry.io_dtype, ParseIoDType(reader));
  ASSIGN_OR_RETURN(geometry.id_dtype,
                   reader.Word<DType>("id_dtype", {{"i32", DType::kI32},
                                                   {"i64", DType::kI64}}));
  ASSIGN_OR_RETURN(const JsonNode* node,
                   reader.Required("weights", JsonNode::Kind::kObject));
  const ObjectReader weights(file, *node, "\"weights\"");
  if (IsTrellisMx(*node)) return ParseTrellisMx(weights, &geometry);
  if (is_qsrt) return ParseQsrt(weights, &geometry);
  ASSIGN_OR_RETURN(geometry.weights, ParseMoeExl3(file, weights));
  return absl::OkStatus();
}

// True where no interval has tokens on both sides of a limit: one plan has one
// arm.
bool IsLimit(uint32_t tokens, const std::vector<uint32_t>& capacities) {
  return tokens >= capacities.back() ||
         std::find(capacities.begin(), capacities.end(), tokens) !=
             capacities.end();
}

// The limit of an arm of TrellisMX for few tokens.
//   missing: what it is without the key
absl::StatusOr<uint32_t> ParseArmTokens(
    const ObjectReader& reader, absl::string_view key, int64_t missing,
    int64_t most, const std::vector<uint32_t>& capacities) {
  int64_t limit = missing;
  const JsonNode* node = reader.Optional(key);
  if (node != nullptr) {
    ASSIGN_OR_RETURN(limit, reader.Integer(key, 0, most));
  }
  const auto tokens = static_cast<uint32_t>(limit);
  if (tokens == 0 || IsLimit(tokens, capacities)) return tokens;
  constexpr absl::string_view kRule =
      "must be one of \"capacities\", 0 (never), or at least the largest, so "
      "that no interval has tokens on both sides of it";
  if (node != nullptr) return reader.Refuse(key, *node, kRule);
  return reader.Error(
      *reader.Optional("capacities"),
      absl::StrCat("\"", key, "\" is ", tokens, ", its default; it ", kRule));
}

// Which arm of TrellisMX answers few tokens, and up to how many.
absl::Status ParseArms(const ObjectReader& reader,
                       const std::vector<uint32_t>& capacities,
                       TrellisMx* out) {
  const JsonNode* remainder = reader.Optional("remainder");
  if (remainder != nullptr) {
    ASSIGN_OR_RETURN(
        out->remainder,
        reader.Word<Remainder>("remainder", {{"none", Remainder::kNone},
                                             {"rp2", Remainder::kRp2}}));
  }
  const bool has_remainder = out->remainder != Remainder::kNone;
  ASSIGN_OR_RETURN(out->direct_max_tokens,
                   ParseArmTokens(reader, "direct_max_tokens",
                                  has_remainder ? kDirectTokensMax : 0,
                                  kDirectTokensMax, capacities));
  const bool is_direct = out->direct_max_tokens != 0;
  if (has_remainder && !is_direct) {
    return reader.Refuse("remainder", *remainder,
                         "must be \"none\" or missing where "
                         "\"direct_max_tokens\" is 0: no other arm has one");
  }
  ASSIGN_OR_RETURN(out->smallm_max_tokens,
                   ParseArmTokens(reader, "smallm_max_tokens",
                                  is_direct ? 0 : kSmallMTokensDefault,
                                  kCapacityMax, capacities));
  if (is_direct && out->smallm_max_tokens != 0) {
    return reader.Refuse(
        "smallm_max_tokens", *reader.Optional("smallm_max_tokens"),
        absl::StrCat("must be 0 or missing where \"direct_max_tokens\" is ",
                     out->direct_max_tokens,
                     ": one arm answers the smallest token counts"));
  }
  return absl::OkStatus();
}

// The limit of QSRT's 8-bit arm, which only recipe w4a8 has.
absl::StatusOr<uint32_t> ParseDecodeTokens(
    const ObjectReader& reader, Recipe recipe,
    const std::vector<uint32_t>& capacities) {
  constexpr absl::string_view kKey = "decode_max_tokens";
  const JsonNode* node = reader.Optional(kKey);
  if (recipe != Recipe::kW4A8) {
    if (node == nullptr) return 0;
    return reader.Refuse(kKey, *node,
                         "must not be there: recipe w4a16 has 16-bit "
                         "activations for all token counts");
  }
  ASSIGN_OR_RETURN(const int64_t limit, reader.Integer(kKey, 1, kCapacityMax));
  const auto tokens = static_cast<uint32_t>(limit);
  if (IsLimit(tokens, capacities)) return tokens;
  return reader.Refuse(kKey, *node,
                       "must be one of \"capacities\" or at least the largest, "
                       "so that no interval has tokens on both sides of it");
}

// The recipes of a format. 8-bit activations need weights of E4M3 values.
absl::StatusOr<Recipe> ParseRecipe(const ObjectReader& reader,
                                   WeightFormat format) {
  const std::pair<absl::string_view, Recipe> w4a16 = {"w4a16", Recipe::kW4A16};
  const std::pair<absl::string_view, Recipe> w4a8 = {"w4a8", Recipe::kW4A8};
  switch (format) {
    case WeightFormat::kExl3:
      return reader.Word<Recipe>("recipe", {w4a16});
    case WeightFormat::kTrellisMx:
      return reader.Word<Recipe>("recipe", {w4a8});
    case WeightFormat::kQsrt:
      return reader.Word<Recipe>("recipe", {w4a16, w4a8});
  }
  KILN_UNREACHABLE();
}

// The same of linear.
absl::Status ParseLinear(absl::string_view file, const ObjectReader& reader,
                         RequestGeometry* out) {
  LinearShape& shape = out->linear;
  ASSIGN_OR_RETURN(shape.in_features,
                   ParseChannels(reader, "in_features", kFeaturesMax));
  ASSIGN_OR_RETURN(shape.out_features,
                   ParseChannels(reader, "out_features", kFeaturesMax));
  if (reader.Optional("bias") != nullptr) {
    ASSIGN_OR_RETURN(shape.bias, reader.Bool("bias"));
  }
  ASSIGN_OR_RETURN(out->io_dtype, ParseIoDType(reader));
  ASSIGN_OR_RETURN(const JsonNode* node,
                   reader.Required("weights", JsonNode::Kind::kObject));
  const ObjectReader weights(file, *node, "\"weights\"");
  RETURN_IF_ERROR(weights.CheckKeys({"format", "codebook", "bits"}));
  ASSIGN_OR_RETURN(out->weights.format, ParseFormat(weights, Op::kLinear));
  ASSIGN_OR_RETURN(out->weights.codebook, ParseCodebook(weights));
  ASSIGN_OR_RETURN(const int64_t bits,
                   weights.Integer("bits", kBitsMin, kBitsMax));
  shape.bits = static_cast<int>(bits);
  return absl::OkStatus();
}

// Which keys a request has depends on its op and its format. So these are read
// first, or a mistake in them would be blamed on the keys.
absl::Status CheckRequestKeys(absl::string_view file,
                              const ObjectReader& reader) {
  if (reader.node().kind != JsonNode::Kind::kObject) {
    return reader.CheckKeys({});
  }
  ASSIGN_OR_RETURN(const Op op, ParseOp(reader));
  const JsonNode* node = reader.Optional("weights");
  if (node != nullptr && node->kind == JsonNode::Kind::kObject) {
    RETURN_IF_ERROR(
        ParseFormat(ObjectReader(file, *node, "\"weights\""), op).status());
  }
  if (op == Op::kLinear) {
    return reader.CheckKeys({"name", "op", "layers", "in_features",
                             "out_features", "bias", "io_dtype", "weights",
                             "recipe", "capacities", "deterministic"});
  }
  const JsonNode* weights = reader.Optional("weights");
  if (weights != nullptr && IsTrellisMx(*weights)) {
    return reader.CheckKeys({"name", "op", "layers", "hidden", "intermediate",
                             "experts", "top_k", "activation", "io_dtype",
                             "id_dtype", "weights", "recipe",
                             "smallm_max_tokens", "direct_max_tokens",
                             "remainder", "capacities", "deterministic"});
  }
  if (weights != nullptr && IsQsrt(*weights)) {
    return reader.CheckKeys(
        {"name", "op", "layers", "hidden", "intermediate", "experts", "top_k",
         "activation", "io_dtype", "id_dtype", "weights", "recipe",
         "decode_max_tokens", "capacities", "deterministic"});
  }
  return reader.CheckKeys({"name", "op", "layers", "hidden", "intermediate",
                           "experts", "top_k", "activation", "io_dtype",
                           "id_dtype", "weights", "recipe", "capacities",
                           "deterministic"});
}

absl::StatusOr<Request> ParseRequest(absl::string_view file,
                                     const JsonNode& node) {
  const ObjectReader reader(file, node, "request");
  RETURN_IF_ERROR(CheckRequestKeys(file, reader));
  Request request;
  RequestGeometry& geometry = request.geometry;
  ASSIGN_OR_RETURN(request.name, ParseName(reader, true));
  ASSIGN_OR_RETURN(geometry.op, ParseOp(reader));
  ASSIGN_OR_RETURN(request.layers, ParseLayers(reader));
  RETURN_IF_ERROR(geometry.op == Op::kLinear
                      ? ParseLinear(file, reader, &geometry)
                      : ParseFusedMoe(file, reader, &geometry));
  const WeightFormat format = geometry.weights.format;
  ASSIGN_OR_RETURN(geometry.recipe, ParseRecipe(reader, format));
  ASSIGN_OR_RETURN(request.capacities, ParseCapacities(reader));
  if (format == WeightFormat::kTrellisMx) {
    RETURN_IF_ERROR(ParseArms(reader, request.capacities, &geometry.mx));
  }
  if (format == WeightFormat::kQsrt) {
    ASSIGN_OR_RETURN(
        geometry.qsrt.decode_max_tokens,
        ParseDecodeTokens(reader, geometry.recipe, request.capacities));
  }
  if (reader.Optional("deterministic") != nullptr) {
    ASSIGN_OR_RETURN(geometry.deterministic, reader.Bool("deterministic"));
  }
  return request;
}

Json Exl3ToJson(const Weights& weights) {
  return {{"format", std::string(WeightFormatName(weights.format))},
          {"codebook", std::string(CodebookName(weights.codebook))}};
}

std::string ScalesName(const Weights& weights) {
  return weights.shared_scales ? "shared" : "per_expert";
}

Json MoeWeightsToJson(const RequestGeometry& geometry) {
  const Weights& weights = geometry.weights;
  if (weights.format == WeightFormat::kTrellisMx) {
    Json out = {{"format", std::string(WeightFormatName(weights.format))},
                {"bits", weights.bits.gate},
                {"limit", geometry.mx.limit}};
    if (geometry.mx.boundary != MxBoundary::kCoupled) {
      out["boundary"] = std::string(MxBoundaryName(geometry.mx.boundary));
    }
    return out;
  }
  if (weights.format == WeightFormat::kQsrt) {
    return {{"format", std::string(WeightFormatName(weights.format))},
            {"pairs", std::string(PairKindsName(geometry.qsrt.pairs))},
            {"scales", ScalesName(weights)}};
  }
  Json out = Exl3ToJson(weights);
  out["bits"] = {{"gate", weights.bits.gate},
                 {"up", weights.bits.up},
                 {"down", weights.bits.down}};
  out["scales"] = ScalesName(weights);
  return out;
}

void FusedMoeToJson(const RequestGeometry& geometry, Json* request) {
  Json& out = *request;
  out["hidden"] = geometry.hidden;
  out["intermediate"] = geometry.intermediate;
  out["experts"] = geometry.experts;
  out["top_k"] = geometry.top_k;
  out["activation"] = std::string(ActivationName(geometry.activation));
  out["io_dtype"] = std::string(DTypeName(geometry.io_dtype));
  out["id_dtype"] = std::string(DTypeName(geometry.id_dtype));
  out["weights"] = MoeWeightsToJson(geometry);
}

void LinearToJson(const RequestGeometry& geometry, Json* request) {
  Json& out = *request;
  out["in_features"] = geometry.linear.in_features;
  out["out_features"] = geometry.linear.out_features;
  out["bias"] = geometry.linear.bias;
  out["io_dtype"] = std::string(DTypeName(geometry.io_dtype));
  Json& weights = out["weights"] = Exl3ToJson(geometry.weights);
  weights["bits"] = geometry.linear.bits;
}

}  // namespace

absl::StatusOr<Manifest> ParseManifest(absl::string_view text,
                                       absl::string_view file) {
  ASSIGN_OR_RETURN(const JsonNode root, ParseJson(text, file));
  const ObjectReader reader(file, root, "manifest");
  // Before the keys: another schema may well have others.
  if (root.kind == JsonNode::Kind::kObject) {
    ASSIGN_OR_RETURN(const JsonNode* schema,
                     reader.Required("schema", JsonNode::Kind::kString));
    if (schema->text != kSchema) {
      return reader.Error(*schema,
                          absl::StrCat("\"schema\" is ", JsonExcerpt(*schema),
                                       ", this build reads \"", kSchema, "\""));
    }
  }
  RETURN_IF_ERROR(reader.CheckKeys({"schema", "name", "requests"}));
  Manifest manifest;
  ASSIGN_OR_RETURN(manifest.name, ParseName(reader, false));
  ASSIGN_OR_RETURN(const JsonNode* requests,
                   reader.Required("requests", JsonNode::Kind::kArray));
  if (requests->items.empty() || requests->items.size() > kRequestsMax) {
    return reader.Error(
        *requests, absl::StrCat("\"requests\" has ", requests->items.size(),
                                " entries, must have 1..", kRequestsMax));
  }
  std::map<std::string, uint32_t> first_line;
  for (const JsonNode& item : requests->items) {
    ASSIGN_OR_RETURN(Request request, ParseRequest(file, item));
    const auto [it, inserted] = first_line.emplace(request.name, item.line);
    if (!inserted) {
      return reader.Error(
          *item.Find("name"),
          absl::StrCat("duplicate request name ", JsonQuote(request.name),
                       ", first used by the request on line ", it->second));
    }
    manifest.requests.push_back(std::move(request));
  }
  return manifest;
}

absl::StatusOr<Manifest> ReadManifest(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kManifestBytesMax));
  return ParseManifest(text, path);
}

std::string ManifestToJson(const Manifest& manifest) {
  Json root;
  root["schema"] = std::string(kSchema);
  root["name"] = manifest.name;
  root["requests"] = Json::array();
  for (const Request& request : manifest.requests) {
    const RequestGeometry& geometry = request.geometry;
    Json out;
    out["name"] = request.name;
    out["op"] = std::string(OpName(geometry.op));
    out["layers"] = request.layers;
    switch (geometry.op) {
      case Op::kFusedMoe:
        FusedMoeToJson(geometry, &out);
        break;
      case Op::kLinear:
        LinearToJson(geometry, &out);
        break;
    }
    out["recipe"] = std::string(RecipeName(geometry.recipe));
    if (geometry.weights.format == WeightFormat::kTrellisMx) {
      out["smallm_max_tokens"] = geometry.mx.smallm_max_tokens;
      if (geometry.mx.direct_max_tokens != 0) {
        out["direct_max_tokens"] = geometry.mx.direct_max_tokens;
        out["remainder"] = std::string(RemainderName(geometry.mx.remainder));
      }
    }
    if (geometry.weights.format == WeightFormat::kQsrt &&
        geometry.recipe == Recipe::kW4A8) {
      out["decode_max_tokens"] = geometry.qsrt.decode_max_tokens;
    }
    out["capacities"] = request.capacities;
    out["deterministic"] = geometry.deterministic;
    root["requests"].push_back(std::move(out));
  }
  return root.dump(1) + "\n";
}

absl::StatusOr<std::vector<PlannedRequest>> Canonicalize(
    const Manifest& manifest, uint32_t capacity_max) {
  std::map<RequestGeometry, PlannedRequest> merged;
  for (const Request& request : manifest.requests) {
    std::vector<uint32_t> kept;
    for (const uint32_t capacity : request.capacities) {
      if (capacity_max == 0 || capacity <= capacity_max) {
        kept.push_back(capacity);
      }
    }
    if (kept.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "request \"", request.name, "\" has no capacity of at most ",
          capacity_max, "; its smallest is ", request.capacities.front()));
    }
    PlannedRequest& planned = merged[request.geometry];
    if (planned.names.empty()) {
      planned.geometry = request.geometry;
      planned.capacities = kept;
      Request view = request;
      view.capacities = kept;
      planned.intervals = view.Intervals();
    } else if (planned.capacities != kept) {
      return absl::InvalidArgumentError(absl::StrCat(
          "requests \"", planned.names.front(), "\" and \"", request.name,
          "\" have the same geometry but different capacities; give both the "
          "same list so that their intervals agree"));
    }
    planned.names.push_back(request.name);
  }
  std::vector<PlannedRequest> result;
  for (auto& [geometry, planned] : merged) {
    std::sort(planned.names.begin(), planned.names.end());
    result.push_back(std::move(planned));
  }
  return result;
}

}  // namespace kiln
