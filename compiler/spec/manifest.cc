#include "compiler/spec/manifest.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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

// Channels of an axis that Hadamard transforms cover.
absl::StatusOr<int64_t> ParseChannels(const ObjectReader& reader,
                                      absl::string_view key, int64_t high) {
  constexpr int64_t kBlock = 128;
  ASSIGN_OR_RETURN(const int64_t value, reader.Integer(key, kBlock, high));
  if (value % kBlock == 0) return value;
  return reader.Refuse(key, *reader.Optional(key),
                       "must be a multiple of 128 (the Hadamard block)");
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

// What the weights of every op have.
absl::StatusOr<Weights> ParseFormat(const ObjectReader& reader) {
  Weights weights;
  ASSIGN_OR_RETURN(
      weights.format,
      reader.Word<WeightFormat>("format", {{"exl3", WeightFormat::kExl3}}));
  ASSIGN_OR_RETURN(
      weights.codebook,
      reader.Word<Codebook>("codebook", {{"3inst", Codebook::k3Inst},
                                         {"mcg", Codebook::kMcg},
                                         {"mul1", Codebook::kMul1}}));
  return weights;
}

absl::StatusOr<Weights> ParseMoeWeights(absl::string_view file,
                                        const JsonNode& node) {
  const ObjectReader reader(file, node, "\"weights\"");
  RETURN_IF_ERROR(reader.CheckKeys({"format", "codebook", "bits", "scales"}));
  ASSIGN_OR_RETURN(Weights weights, ParseFormat(reader));
  ASSIGN_OR_RETURN(weights.bits, ParseBits(file, reader));
  if (reader.Optional("scales") != nullptr) {
    ASSIGN_OR_RETURN(
        weights.shared_scales,
        reader.Word<bool>("scales", {{"per_expert", false}, {"shared", true}}));
  }
  return weights;
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
  ASSIGN_OR_RETURN(geometry.hidden,
                   ParseChannels(reader, "hidden", kHiddenMax));
  ASSIGN_OR_RETURN(geometry.intermediate,
                   ParseChannels(reader, "intermediate", kIntermediateMax));
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
      reader.Word<Activation>("activation", {{"silu", Activation::kSilu}}));
  ASSIGN_OR_RETURN(geometry.io_dtype, ParseIoDType(reader));
  ASSIGN_OR_RETURN(geometry.id_dtype,
                   reader.Word<DType>("id_dtype", {{"i32", DType::kI32},
                                                   {"i64", DType::kI64}}));
  ASSIGN_OR_RETURN(const JsonNode* weights,
                   reader.Required("weights", JsonNode::Kind::kObject));
  ASSIGN_OR_RETURN(geometry.weights, ParseMoeWeights(file, *weights));
  return absl::OkStatus();
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
  ASSIGN_OR_RETURN(out->weights, ParseFormat(weights));
  ASSIGN_OR_RETURN(const int64_t bits,
                   weights.Integer("bits", kBitsMin, kBitsMax));
  shape.bits = static_cast<int>(bits);
  return absl::OkStatus();
}

// Which keys a request has depends on its op; one that does not say it is held
// against those of fused_moe.
absl::Status CheckRequestKeys(const ObjectReader& reader) {
  const JsonNode* op = reader.Optional("op");
  if (op != nullptr && op->kind == JsonNode::Kind::kString &&
      op->text == OpName(Op::kLinear)) {
    return reader.CheckKeys({"name", "op", "layers", "in_features",
                             "out_features", "bias", "io_dtype", "weights",
                             "recipe", "capacities", "deterministic"});
  }
  return reader.CheckKeys({"name", "op", "layers", "hidden", "intermediate",
                           "experts", "top_k", "activation", "io_dtype",
                           "id_dtype", "weights", "recipe", "capacities",
                           "deterministic"});
}

absl::StatusOr<Request> ParseRequest(absl::string_view file,
                                     const JsonNode& node) {
  const ObjectReader reader(file, node, "request");
  RETURN_IF_ERROR(CheckRequestKeys(reader));
  Request request;
  RequestGeometry& geometry = request.geometry;
  ASSIGN_OR_RETURN(request.name, ParseName(reader, true));
  ASSIGN_OR_RETURN(geometry.op,
                   reader.Word<Op>("op", {{"fused_moe", Op::kFusedMoe},
                                          {"linear", Op::kLinear}}));
  ASSIGN_OR_RETURN(request.layers, ParseLayers(reader));
  RETURN_IF_ERROR(geometry.op == Op::kLinear
                      ? ParseLinear(file, reader, &geometry)
                      : ParseFusedMoe(file, reader, &geometry));
  ASSIGN_OR_RETURN(geometry.recipe,
                   reader.Word<Recipe>("recipe", {{"w4a16", Recipe::kW4A16}}));
  ASSIGN_OR_RETURN(request.capacities, ParseCapacities(reader));
  if (reader.Optional("deterministic") != nullptr) {
    ASSIGN_OR_RETURN(geometry.deterministic, reader.Bool("deterministic"));
  }
  return request;
}

Json FormatToJson(const Weights& weights) {
  return {{"format", std::string(WeightFormatName(weights.format))},
          {"codebook", std::string(CodebookName(weights.codebook))}};
}

void FusedMoeToJson(const RequestGeometry& geometry, Json* request) {
  const Weights& weights = geometry.weights;
  Json& out = *request;
  out["hidden"] = geometry.hidden;
  out["intermediate"] = geometry.intermediate;
  out["experts"] = geometry.experts;
  out["top_k"] = geometry.top_k;
  out["activation"] = std::string(ActivationName(geometry.activation));
  out["io_dtype"] = std::string(DTypeName(geometry.io_dtype));
  out["id_dtype"] = std::string(DTypeName(geometry.id_dtype));
  Json& json_weights = out["weights"] = FormatToJson(weights);
  json_weights["bits"] = {{"gate", weights.bits.gate},
                          {"up", weights.bits.up},
                          {"down", weights.bits.down}};
  json_weights["scales"] = weights.shared_scales ? "shared" : "per_expert";
}

void LinearToJson(const RequestGeometry& geometry, Json* request) {
  Json& out = *request;
  out["in_features"] = geometry.linear.in_features;
  out["out_features"] = geometry.linear.out_features;
  out["bias"] = geometry.linear.bias;
  out["io_dtype"] = std::string(DTypeName(geometry.io_dtype));
  Json& weights = out["weights"] = FormatToJson(geometry.weights);
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
