#include "templates/formats/routed_experts.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/manifest.h"
#include "templates/formats/layer_name.h"

namespace kiln {
namespace {

absl::Status Refuse(absl::string_view tensor, absl::string_view rule) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor ", QuoteTensorName(tensor), " ", rule));
}

// Of a checkpoint without a fault that no template serves.
absl::Status NotServed(absl::string_view tensor, absl::string_view rule) {
  return absl::FailedPreconditionError(
      absl::StrCat("tensor ", QuoteTensorName(tensor), " ", rule));
}

uint64_t GroupOf(int64_t layer, int64_t expert, size_t projection) {
  return (static_cast<uint64_t>(layer) * kExpertsMax +
          static_cast<uint64_t>(expert)) *
             kProjections +
         projection;
}

// The groups of one layer must agree; says which two do not.
absl::Status Disagree(const Exl3Matrix& matrix, absl::string_view found,
                      const Exl3Matrix& first, absl::string_view wanted,
                      absl::string_view rule) {
  return NotServed(matrix.tensors.trellis->name,
                   absl::StrCat("has ", found, ", but tensor ",
                                QuoteTensorName(first.tensors.trellis->name),
                                " of the same layer has ", wanted, "; ", rule));
}

}  // namespace

absl::StatusOr<std::optional<ExpertTensorName>> ParseExpertTensorName(
    absl::string_view name, const ModelConfig& config) {
  const std::string block = absl::StrCat(".", config.naming.block, ".");
  if (!absl::StrContains(name, block)) return std::nullopt;
  const std::optional<LayerName> place = ParseLayerName(name);
  absl::string_view rest = place.has_value() ? place->rest : "";
  if (!absl::ConsumePrefix(&rest, absl::string_view(block).substr(1))) {
    return Refuse(name,
                  absl::StrCat("is named as a routed expert's, but what stands "
                               "before \"",
                               config.naming.block,
                               "\" is not \"layers.N\" after one of \"",
                               absl::StrJoin(kLayerPrefixes, "\", \""), "\""));
  }
  ExpertTensorName parsed;
  parsed.prefix = place->prefix;
  parsed.layer = place->layer;
  const auto has = [&](const std::vector<int64_t>& layers) {
    return std::binary_search(layers.begin(), layers.end(), parsed.layer);
  };
  if (!has(config.moe_layers) && !has(config.extra_layers)) {
    return Refuse(name, absl::StrCat("belongs to layer ", parsed.layer,
                                     ", which has no routed experts by "
                                     "config.json"));
  }
  const std::optional<int64_t> expert = TakeNumber(&rest);
  if (!expert.has_value()) {
    return NotServed(name,
                     absl::StrCat("must go on with an expert's number after \"",
                                  config.naming.block,
                                  ".\"; stacked experts are not served"));
  }
  if (*expert >= config.experts) {
    return Refuse(name,
                  absl::StrCat("is of expert ", *expert, ", must be within 0..",
                               config.experts - 1, " by config.json"));
  }
  parsed.expert = *expert;
  for (size_t i = 0; i < kProjections; ++i) {
    absl::string_view suffix = rest;
    if (!absl::ConsumePrefix(&suffix, config.naming.projections[i])) continue;
    if (!absl::ConsumePrefix(&suffix, ".")) continue;
    parsed.projection = i;
    parsed.suffix = suffix;
    return parsed;
  }
  return Refuse(name,
                absl::StrCat("is of no projection; projections: ",
                             absl::StrJoin(config.naming.projections, ", ")));
}

absl::StatusOr<RoutedExperts> RoutedExperts::Find(const Checkpoint& checkpoint,
                                                  const ModelConfig& config) {
  RoutedExperts found;
  found.config_ = config;
  for (const SafetensorsFile& shard : checkpoint.shards()) {
    for (const SafetensorsTensor& tensor : shard.header().tensors()) {
      ASSIGN_OR_RETURN(const std::optional<ExpertTensorName> name,
                       ParseExpertTensorName(tensor.name, config));
      if (!name.has_value()) continue;
      const auto [prefix, inserted] =
          found.prefixes_.emplace(name->layer, name->prefix);
      if (!inserted && prefix->second != name->prefix) {
        return Refuse(tensor.name, absl::StrCat("and others of the same layer ",
                                                "begin with \"", prefix->second,
                                                "layers.\": which is meant is "
                                                "unclear"));
      }
      RETURN_IF_ERROR(AddToExl3Group(
          name->suffix, tensor,
          &found
               .groups_[GroupOf(name->layer, name->expert, name->projection)]));
    }
  }
  return found;
}

std::vector<int64_t> RoutedExperts::Layers() const {
  std::vector<int64_t> layers;
  for (const auto& [layer, prefix] : prefixes_) layers.push_back(layer);
  return layers;
}

std::string RoutedExperts::KeyOf(int64_t layer, int64_t expert,
                                 size_t projection) const {
  const auto prefix = prefixes_.find(layer);
  return absl::StrCat(
      prefix != prefixes_.end() ? prefix->second : kLayerPrefixes[0], kLayers,
      layer, ".", config_.naming.block, ".", expert, ".",
      config_.naming.projections[projection]);
}

absl::StatusOr<RoutedLayer> RoutedExperts::Layer(int64_t layer) const {
  RoutedLayer result;
  result.layer = layer;
  for (int64_t expert = 0; expert < config_.experts; ++expert) {
    ExpertMatrices& matrices = result.experts.emplace_back();
    for (size_t i = 0; i < kProjections; ++i) {
      const auto group = groups_.find(GroupOf(layer, expert, i));
      if (group == groups_.end()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "layer ", layer, " lacks ",
            QuoteTensorName(absl::StrCat(KeyOf(layer, expert, i), ".trellis")),
            ": config.json says ", config_.experts, " experts"));
      }
      // The key is for messages of incomplete groups only.
      const bool complete = group->second.trellis != nullptr;
      const std::string key = complete ? "" : KeyOf(layer, expert, i);
      absl::StatusOr<Exl3Matrix> checked = CheckExl3Group(
          complete ? absl::StripSuffix(group->second.trellis->name, ".trellis")
                   : absl::string_view(key),
          group->second);
      RETURN_IF_ERROR(checked.status());
      const Exl3Matrix& matrix = matrices[i] = *std::move(checked);
      const bool down = i == kProjections - 1;
      const int64_t in = down ? config_.intermediate : config_.hidden;
      const int64_t out = down ? config_.hidden : config_.intermediate;
      if (matrix.in != in || matrix.out != out) {
        return Refuse(
            matrix.tensors.trellis->name,
            absl::StrCat("is a matrix [", matrix.in, ", ", matrix.out,
                         "], must be [", in, ", ", out, "] by config.json"));
      }
      if (matrix.tensors.bias != nullptr) {
        return NotServed(matrix.tensors.bias->name,
                         "is a bias; fused_moe adds none");
      }
      const Exl3Matrix& first = result.experts[0][0];
      if (matrix.codebook != first.codebook) {
        return Disagree(
            matrix, absl::StrCat("codebook ", CodebookName(matrix.codebook)),
            first, absl::StrCat("codebook ", CodebookName(first.codebook)),
            "one codebook serves a layer");
      }
      const Exl3Matrix& same = result.experts[0][i];
      if (matrix.bits != same.bits) {
        return Disagree(matrix, absl::StrCat(matrix.bits, " bits"), same,
                        absl::StrCat(same.bits, " bits"),
                        "experts of mixed rates inside a layer are not served");
      }
    }
  }
  const ExpertMatrices& first = result.experts[0];
  if (config_.codebook.has_value()) {
    RETURN_IF_ERROR(CheckExl3Codebook(first[0], *config_.codebook));
  }
  result.codebook = first[0].codebook;
  result.bits = {
      .gate = first[0].bits, .up = first[1].bits, .down = first[2].bits};
  return result;
}

}  // namespace kiln
