#include "templates/formats/npk_checkpoint.h"

#include <array>
#include <map>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "compiler/base/annotate_once.h"
#include "compiler/base/pending_folder.h"
#include "compiler/base/status_macros.h"
#include "templates/formats/checkpoint.h"
#include "templates/formats/describe.h"
#include "templates/formats/npk_encode.h"

namespace kiln {
namespace {

constexpr uint64_t kTileWeights = 256;

// Tensors of a layer by expert and projection.
using Layer =
    std::map<int64_t, std::array<const SafetensorsTensor*, kProjections>>;

absl::StatusOr<std::map<int64_t, Layer>> FindLayers(
    const Checkpoint& checkpoint, const ModelConfig& config) {
  std::map<int64_t, Layer> layers;
  for (const SafetensorsFile& shard : checkpoint.shards()) {
    for (const SafetensorsTensor& tensor : shard.header().tensors()) {
      ASSIGN_OR_RETURN(const std::optional<RealMatrix> matrix,
                       FindRealMatrix(tensor, config));
      if (!matrix.has_value()) continue;
      const ExpertTensorName& name = matrix->name;
      layers[name.layer][name.expert][name.projection] = &tensor;
    }
  }
  if (layers.empty()) {
    return absl::FailedPreconditionError("has no tensor of a routed expert");
  }
  for (const auto& [number, layer] : layers) {
    for (int64_t e = 0; e < config.experts; ++e) {
      const auto expert = layer.find(e);
      for (size_t i = 0; i < kProjections; ++i) {
        if (expert != layer.end() && expert->second[i] != nullptr) continue;
        return absl::InvalidArgumentError(absl::StrCat(
            "layer ", number, " lacks expert ", e, "'s ",
            config.naming.projections[i], ".weight: config.json says ",
            config.experts, " experts"));
      }
    }
  }
  return layers;
}

}  // namespace

absl::StatusOr<EncodedCheckpoint> EncodeNpkCheckpoint(
    const std::string& folder, const std::string& output,
    const NpkCheckpointOptions& options) {
  ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(folder));
  ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(folder));
  const auto layers = FindLayers(checkpoint, config);
  if (!layers.ok()) return Annotate(layers.status(), folder);
  PendingFolder pending(output);
  RETURN_IF_ERROR(pending.status());

  EncodedCheckpoint result;
  const auto each = static_cast<uint64_t>(config.hidden * config.intermediate);
  result.matrices =
      layers->size() * kProjections * static_cast<uint64_t>(config.experts);
  result.weights = result.matrices * each;
  NpkMetadata metadata;
  metadata.bits = options.bits;
  metadata.boundary = options.boundary;
  metadata.world_size = options.ranks;
  metadata.experts = config.experts;
  metadata.hidden = config.hidden;
  metadata.intermediate_global = config.intermediate;
  metadata.limit = options.limit;
  metadata.model_id = config.model_type;
  metadata.design = Sha256(absl::StrCat(
      "bits=", options.bits, ";seed=", options.seed, ";draws=expert mod 8"));
  double energy = 0;
  double squared_error = 0;
  std::mutex mutex;
  uint64_t tiles = 0;
  for (const auto& [number, layer] : *layers) {
    metadata.layer = number;
    const std::string name = absl::StrCat("layer ", number);
    for (int64_t rank = 0; rank < options.ranks; ++rank) {
      pending.At(NpkFileName(number, rank, options.ranks));
    }
    // Named, because clang 14 captures no structured binding by itself.
    const auto experts =
        [&, &layer = layer](int64_t e) -> absl::StatusOr<RealExpert> {
      RealExpert expert;
      const std::array<std::vector<float>*, kProjections> matrices = {
          &expert.gate, &expert.up, &expert.down};
      for (size_t i = 0; i < kProjections; ++i) {
        const SafetensorsTensor& tensor = *layer.at(e)[i];
        ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes,
                         checkpoint.Bytes(tensor));
        ASSIGN_OR_RETURN(*matrices[i], ReadReals(tensor, bytes));
      }
      return expert;
    };
    const auto done = [&](size_t count) {
      const std::lock_guard<std::mutex> lock(mutex);
      // Tiles whose scale moved are encoded again and not counted twice.
      tiles = std::min(tiles + count, result.weights / kTileWeights);
      if (options.progress) {
        options.progress(tiles, result.weights / kTileWeights, name);
      }
    };
    absl::StatusOr<NpkEncoding> encoding = EncodeNpkLayer(
        metadata, experts, options.seed, options.threads, done, output);
    if (!encoding.ok()) return AnnotateOnce(encoding.status(), folder);
    result.bytes += encoding->bytes;
    energy += encoding->energy;
    squared_error += encoding->squared_error;
    const double error =
        encoding->energy > 0 ? encoding->squared_error / encoding->energy : 0;
    if (result.worst.empty() || error > result.worst_error) {
      result.worst = name;
      result.worst_error = error;
    }
  }
  result.relative_error = energy > 0 ? squared_error / energy : 0;
  pending.Commit();
  return result;
}

}  // namespace kiln
