#include "templates/formats/dense_layers.h"

#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

constexpr absl::string_view kHeadPrefixes[] = {"", "language_model."};

absl::Status Refuse(absl::string_view tensor, absl::string_view rule) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor ", QuoteTensorName(tensor), " ", rule));
}

// What stands behind "<projection>." in the rest of a tensor's name.
std::optional<std::pair<size_t, absl::string_view>> ProjectionOf(
    absl::string_view rest) {
  for (size_t i = 0; i < kHeadProjection; ++i) {
    absl::string_view suffix = rest;
    if (!absl::ConsumePrefix(&suffix, kDenseProjections[i].name)) continue;
    if (absl::ConsumePrefix(&suffix, ".")) return std::pair(i, suffix);
  }
  return std::nullopt;
}

// What stands behind "lm_head.", or nothing.
std::optional<absl::string_view> HeadSuffix(absl::string_view name) {
  for (const absl::string_view prefix : kHeadPrefixes) {
    absl::string_view suffix = name;
    if (!absl::ConsumePrefix(&suffix, prefix)) continue;
    if (!absl::ConsumePrefix(&suffix, kDenseProjections[kHeadProjection].name))
      continue;
    if (absl::ConsumePrefix(&suffix, ".")) return suffix;
  }
  return std::nullopt;
}

}  // namespace

absl::string_view DenseProjection::short_name() const {
  return name.substr(name.rfind('.') + 1);
}

absl::StatusOr<std::optional<DenseTensorName>> ParseDenseTensorName(
    absl::string_view name, const DenseConfig& config) {
  const std::optional<LayerName> place = ParseLayerName(name);
  if (!place.has_value()) return std::nullopt;
  const auto projection = ProjectionOf(place->rest);
  if (!projection.has_value()) return std::nullopt;
  if (place->layer >= config.layers) {
    return Refuse(name, absl::StrCat("belongs to layer ", place->layer,
                                     ", config.json says ", config.layers,
                                     " layers, numbered from 0"));
  }
  return DenseTensorName{.place = *place,
                         .projection = projection->first,
                         .suffix = projection->second};
}

std::pair<int64_t, int64_t> DenseShape(const DenseConfig& config,
                                       size_t projection) {
  constexpr auto kBlock = static_cast<int64_t>(kHadamardBlock);
  switch (projection) {
    case 0:
      return {config.hidden, config.query};
    case 1:
    case 2:
      return {config.hidden, config.key_value};
    case 3:
      return {config.query, config.hidden};
    case 4:
    case 5:
      return {config.hidden, config.intermediate};
    case 6:
      return {config.intermediate, config.hidden};
    case kHeadProjection:
      return {config.hidden,
              (config.vocabulary + kBlock - 1) / kBlock * kBlock};
    default:
      KILN_UNREACHABLE();
  }
}

absl::StatusOr<RequestGeometry> DenseMatrix::Geometry(int64_t ranks) const {
  RequestGeometry geometry;
  geometry.op = Op::kLinear;
  geometry.weights.codebook = matrix.codebook;
  geometry.linear = {.in_features = matrix.in,
                     .out_features = matrix.out,
                     .bits = matrix.bits,
                     .bias = matrix.tensors.bias != nullptr};
  const std::string tensor = absl::StrCat(
      "tensor ", QuoteTensorName(matrix.tensors.trellis->name), ": ");
  switch (kDenseProjections[projection].split) {
    case RankSplit::kOutput: {
      ASSIGN_OR_RETURN(
          geometry.linear.out_features,
          ChannelsPerRank(tensor + "output size", matrix.out, ranks));
      break;
    }
    case RankSplit::kInput: {
      ASSIGN_OR_RETURN(
          geometry.linear.in_features,
          ChannelsPerRank(tensor + "input size", matrix.in, ranks));
      break;
    }
    case RankSplit::kNone:
      break;
  }
  return geometry;
}

absl::Status DenseLayers::Add(const SafetensorsTensor& tensor) {
  if (const std::optional<absl::string_view> suffix = HeadSuffix(tensor.name);
      suffix.has_value()) {
    if (*suffix == "weight") {
      plain_head_ = &tensor;
      return absl::OkStatus();
    }
    return AddToExl3Group(*suffix, tensor,
                          &groups_[{config_.layers, kHeadProjection}]);
  }
  ASSIGN_OR_RETURN(const std::optional<DenseTensorName> name,
                   ParseDenseTensorName(tensor.name, config_));
  if (!name.has_value()) {
    if (!absl::EndsWith(tensor.name, ".trellis")) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "tensor ", QuoteTensorName(tensor.name),
        " is a trellis of no known projection; known: ",
        absl::StrJoin(kDenseProjections, ", ",
                      [](std::string* out, const DenseProjection& known) {
                        absl::StrAppend(out, known.name);
                      })));
  }
  const LayerName& place = name->place;
  const auto [prefix, inserted] = prefixes_.emplace(place.layer, place.prefix);
  if (!inserted && prefix->second != place.prefix) {
    return Refuse(
        tensor.name,
        absl::StrCat("and others of the same layer begin with \"",
                     prefix->second, "layers.\": which is meant is unclear"));
  }
  return AddToExl3Group(name->suffix, tensor,
                        &groups_[{place.layer, name->projection}]);
}

absl::StatusOr<DenseLayers> DenseLayers::Find(const Checkpoint& checkpoint,
                                              const DenseConfig& config) {
  DenseLayers found;
  found.config_ = config;
  for (const SafetensorsFile& shard : checkpoint.shards()) {
    for (const SafetensorsTensor& tensor : shard.header().tensors()) {
      RETURN_IF_ERROR(found.Add(tensor));
    }
  }
  const auto head = found.groups_.find({config.layers, kHeadProjection});
  if (found.plain_head_ == nullptr || head == found.groups_.end()) {
    return found;
  }
  if (head->second.trellis != nullptr) {
    return Refuse(
        head->second.trellis->name,
        absl::StrCat("stands beside ", QuoteTensorName(found.plain_head_->name),
                     ", only one may exist"));
  }
  found.groups_.erase(head);  // the bias of a plain head
  return found;
}

std::vector<int64_t> DenseLayers::Numbers() const {
  std::vector<int64_t> numbers;
  for (int64_t i = 0; i < config_.layers; ++i) numbers.push_back(i);
  if (groups_.count({config_.layers, kHeadProjection}) != 0) {
    numbers.push_back(config_.layers);
  }
  return numbers;
}

absl::StatusOr<DenseMatrix> DenseLayers::Matrix(int64_t number,
                                                size_t projection) const {
  const absl::string_view name = kDenseProjections[projection].name;
  const auto prefix = prefixes_.find(number);
  const std::string key =
      projection == kHeadProjection
          ? std::string(name)
          : absl::StrCat(
                prefix != prefixes_.end() ? prefix->second : kLayerPrefixes[0],
                kLayers, number, ".", name);
  const auto group = groups_.find({number, projection});
  if (group == groups_.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "layer ", number, " lacks ",
        QuoteTensorName(absl::StrCat(key, ".trellis")), ": config.json says ",
        config_.layers, " layers, numbered from 0"));
  }
  DenseMatrix result;
  result.projection = projection;
  ASSIGN_OR_RETURN(result.matrix, CheckExl3Group(key, group->second));
  const Exl3Matrix& matrix = result.matrix;
  const auto [in, out] = DenseShape(config_, projection);
  if (matrix.in != in || matrix.out != out) {
    return Refuse(
        matrix.tensors.trellis->name,
        absl::StrCat("is a matrix [", matrix.in, ", ", matrix.out,
                     "], must be [", in, ", ", out, "] by config.json"));
  }
  const bool attention = absl::StartsWith(name, "self_attn.");
  const bool promised = attention ? config_.attention_bias : config_.mlp_bias;
  if (promised && projection != kHeadProjection &&
      matrix.tensors.bias == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "layer ", number, " lacks ",
        QuoteTensorName(absl::StrCat(key, ".bias")), ": config.json says \"",
        attention ? "attention_bias" : "mlp_bias", "\": true"));
  }
  if (config_.codebook.has_value()) {
    RETURN_IF_ERROR(CheckExl3Codebook(matrix, *config_.codebook));
  }
  return result;
}

absl::StatusOr<std::vector<DenseMatrix>> DenseLayers::Layer(
    int64_t number) const {
  std::vector<DenseMatrix> matrices;
  const bool head = number == config_.layers;
  for (size_t i = 0; i < kDenseProjections.size(); ++i) {
    if ((i == kHeadProjection) != head) continue;
    ASSIGN_OR_RETURN(DenseMatrix matrix, Matrix(number, i));
    matrices.push_back(std::move(matrix));
  }
  return matrices;
}

}  // namespace kiln
