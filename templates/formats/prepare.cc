#include "templates/formats/prepare.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/base/as_text.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "templates/formats/btx_layer.h"
#include "templates/formats/describe.h"
#include "templates/formats/qsrt_layer.h"
#include "templates/formats/trellis_source.h"

namespace kiln {
namespace {

// A layer's source and what it borrows. Destroyed from the bottom.
struct OpenedLayer {
  std::unique_ptr<Checkpoint> checkpoint;
  std::unique_ptr<BtxLayer> btx;
  std::unique_ptr<QsrtLayer> qsrt;
  std::unique_ptr<TrellisSource> source;
  std::optional<ModelConfig> config;
};

absl::StatusOr<OpenedLayer> OpenExl3(const std::string& folder,
                                     const PrepareOptions& options) {
  OpenedLayer opened;
  ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(folder));
  ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(folder));
  opened.checkpoint = std::make_unique<Checkpoint>(std::move(checkpoint));
  opened.config = config;
  const auto open = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(
        const TrellisExtent extent,
        ExtentOfRank(config.intermediate, options.rank, options.ranks));
    ASSIGN_OR_RETURN(const RoutedExperts experts,
                     RoutedExperts::Find(*opened.checkpoint, config));
    const std::vector<int64_t> layers = experts.Layers();
    if (!std::binary_search(layers.begin(), layers.end(), options.layer)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "layer ", options.layer, " has no routed experts; layers ",
          "that have: ", absl::StrJoin(layers, ", ")));
    }
    ASSIGN_OR_RETURN(const RoutedLayer layer, experts.Layer(options.layer));
    ASSIGN_OR_RETURN(opened.source,
                     TrellisFromExl3(layer, extent, opened.checkpoint.get()));
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(Annotate(open(), folder));
  return opened;
}

absl::StatusOr<OpenedLayer> OpenBtx(const std::string& folder,
                                    const PrepareOptions& options) {
  OpenedLayer opened;
  ASSIGN_OR_RETURN(const BtxManifest manifest, ReadBtxManifest(folder));
  absl::StatusOr<TrellisExtent> extent =
      ExtentOfRank(manifest.intermediate, options.rank, options.ranks);
  if (!extent.ok()) return Annotate(extent.status(), folder);
  ASSIGN_OR_RETURN(BtxLayer layer,
                   BtxLayer::Open(folder, manifest, options.layer));
  opened.btx = std::make_unique<BtxLayer>(std::move(layer));
  ASSIGN_OR_RETURN(opened.source, TrellisFromBtx(*extent, opened.btx.get()));
  return opened;
}

absl::StatusOr<OpenedLayer> OpenQsrt(const std::string& folder,
                                     const std::vector<int64_t>& layers,
                                     const PrepareOptions& options) {
  OpenedLayer opened;
  if (!std::binary_search(layers.begin(), layers.end(), options.layer)) {
    return absl::InvalidArgumentError(
        absl::StrCat(folder, ": has no ", QsrtLayerFileName(options.layer),
                     "; layers that it has: ", absl::StrJoin(layers, ", ")));
  }
  ASSIGN_OR_RETURN(QsrtLayer layer, QsrtLayer::Open(folder, options.layer));
  opened.qsrt = std::make_unique<QsrtLayer>(std::move(layer));
  absl::StatusOr<TrellisExtent> extent =
      ExtentOfRank(opened.qsrt->intermediate(), options.rank, options.ranks);
  if (!extent.ok()) return Annotate(extent.status(), folder);
  ASSIGN_OR_RETURN(opened.source,
                   TrellisFromQsrtLayer(*extent, opened.qsrt.get()));
  return opened;
}

absl::StatusOr<OpenedLayer> OpenLayer(const std::string& folder,
                                      const PrepareOptions& options) {
  if (IsBtxFolder(folder)) return OpenBtx(folder, options);
  const std::vector<int64_t> qsrt = QsrtLayersIn(folder);
  if (!qsrt.empty()) return OpenQsrt(folder, qsrt, options);
  return OpenExl3(folder, options);
}

// Rate bytes of the experts, [E].
SafetensorsTensor RatesTensor(absl::string_view name,
                              const std::vector<uint8_t>& rates) {
  SafetensorsTensor tensor;
  tensor.name = name;
  tensor.type = StoredType::kU8;
  tensor.rank = 1;
  tensor.dims = {rates.size()};
  tensor.end = rates.size();
  return tensor;
}

}  // namespace

std::string PreparedFileName(const PrepareOptions& options) {
  std::string name = absl::StrFormat("layer-%05d", options.layer);
  if (options.ranks > 1) {
    absl::StrAppend(&name, "-rank-", options.rank, "-of-", options.ranks);
  }
  return name + ".safetensors";
}

absl::StatusOr<PreparedLayer> PrepareLayer(const std::string& folder,
                                           const std::string& output,
                                           const PrepareOptions& options) {
  ASSIGN_OR_RETURN(const OpenedLayer opened, OpenLayer(folder, options));
  TrellisSource& source = *opened.source;
  PreparedLayer prepared;
  prepared.path = absl::StrCat(output, "/", PreparedFileName(options));
  prepared.layout = source.layout();
  prepared.description = prepared.layout.ToString();
  std::map<std::string, std::string> metadata = {
      {"format", "kiln.native/1"},
      {"op", std::string(OpName(Op::kFusedMoe))},
      {"codebook", std::string(prepared.layout.codebook.name())},
      {"layer", absl::StrCat(options.layer)},
      {"rank", absl::StrCat(options.rank)},
      {"ranks", absl::StrCat(options.ranks)}};
  if (opened.config.has_value()) {
    metadata["top_k"] = absl::StrCat(opened.config->top_k);
    ASSIGN_OR_RETURN(RequestGeometry geometry, ServedGeometry(prepared.layout));
    geometry.top_k = opened.config->top_k;
    geometry.io_dtype = opened.config->io_dtype;
    prepared.description = geometry.ToString();
  }
  if (prepared.layout.coupled) metadata["coupled"] = "512,128";

  std::vector<SafetensorsTensor> tensors;
  for (const FusedMoeParam slot : kTrellisSlots) {
    tensors.push_back(source.Tensor(slot));
  }
  const std::vector<uint8_t>* rates[] = {&prepared.layout.rates_fc1,
                                         &prepared.layout.rates_fc2};
  if (prepared.layout.pairs()) {
    tensors.push_back(RatesTensor("rates_fc1", *rates[0]));
    tensors.push_back(RatesTensor("rates_fc2", *rates[1]));
  }
  for (const SafetensorsTensor& tensor : tensors) {
    prepared.bytes += tensor.bytes();
  }
  const std::string head = MakeSafetensorsHead(tensors, metadata);
  prepared.bytes += head.size();
  RETURN_IF_ERROR(MakeDirectories(output));
  PendingFile file(prepared.path);
  RETURN_IF_ERROR(file.Append(head));
  for (const FusedMoeParam slot : kTrellisSlots) {
    RETURN_IF_ERROR(source.Stream(slot, [&](std::span<const uint8_t> piece) {
      return file.Append(AsText(piece));
    }));
  }
  for (const std::vector<uint8_t>* bytes : rates) {
    RETURN_IF_ERROR(file.Append(AsText(*bytes)));
  }
  RETURN_IF_ERROR(file.Commit());
  return prepared;
}

}  // namespace kiln
