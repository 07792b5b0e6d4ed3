#include "templates/formats/prepare.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/base/annotate_once.h"
#include "compiler/base/as_text.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "templates/formats/btx_layer.h"
#include "templates/formats/dense_layers.h"
#include "templates/formats/describe.h"
#include "templates/formats/linear_source.h"
#include "templates/formats/pair_layer.h"
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
                                     const ModelConfig& config,
                                     const PrepareOptions& options) {
  OpenedLayer opened;
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
  RETURN_IF_ERROR(AnnotateOnce(open(), folder));
  return opened;
}

absl::StatusOr<OpenedLayer> OpenBtx(const std::string& folder,
                                    const PrepareOptions& options) {
  OpenedLayer opened;
  ASSIGN_OR_RETURN(const BtxManifest manifest, ReadBtxManifest(folder));
  const absl::StatusOr<TrellisExtent> extent = ExtentOfRank(
      manifest.intermediate, options.rank, options.ranks,
      [&](const auto& part) { return BtxLayoutOf(manifest, part).status(); });
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
  const int64_t channels = opened.qsrt->intermediate();
  const absl::StatusOr<TrellisExtent> extent = ExtentOfRank(
      channels, options.rank, options.ranks,
      [&](const auto& part) { return CheckPairExtent(part, channels); });
  if (!extent.ok()) return Annotate(extent.status(), folder);
  ASSIGN_OR_RETURN(opened.source,
                   TrellisFromQsrtLayer(*extent, opened.qsrt.get()));
  return opened;
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

// One tensor of the file, and what writes its bytes.
struct PreparedTensor {
  SafetensorsTensor tensor;
  std::function<absl::Status(const PieceSink&)> stream;
};

// The modes that the op takes, i32 [E], of these rates.
PreparedTensor ModesTensor(absl::string_view name,
                           const std::vector<uint8_t>& rates) {
  const std::vector<int32_t> modes = PairModes(rates);
  std::vector<uint8_t> bytes(modes.size() * sizeof(int32_t));
  std::memcpy(bytes.data(), modes.data(), bytes.size());
  SafetensorsTensor tensor;
  tensor.name = name;
  tensor.type = StoredType::kI32;
  tensor.rank = 1;
  tensor.dims = {modes.size()};
  tensor.end = bytes.size();
  return {tensor, [bytes](const PieceSink& sink) { return sink(bytes); }};
}

// Writes head and tensors to `path`; returns the bytes of the file, which are
// known before the first is written.
absl::StatusOr<uint64_t> WritePrepared(
    const std::string& path, const std::vector<PreparedTensor>& prepared,
    const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsTensor> tensors;
  for (const PreparedTensor& each : prepared) tensors.push_back(each.tensor);
  const std::string head = MakeSafetensorsHead(tensors, metadata);
  uint64_t bytes = head.size();
  RETURN_IF_ERROR(MakeDirectories(path.substr(0, path.rfind('/'))));
  PendingFile file(path);
  RETURN_IF_ERROR(file.Append(head));
  for (const PreparedTensor& each : prepared) {
    bytes += each.tensor.bytes();
    RETURN_IF_ERROR(each.stream([&](std::span<const uint8_t> piece) {
      return file.Append(AsText(piece));
    }));
  }
  RETURN_IF_ERROR(file.Commit());
  return bytes;
}

std::string PreparedPath(const std::string& output,
                         const PrepareOptions& options) {
  return absl::StrCat(output, "/", PreparedFileName(options));
}

std::map<std::string, std::string> Metadata(Op op,
                                            const PrepareOptions& options) {
  return {{"format", "kiln.native/1"},
          {"op", std::string(OpName(op))},
          {"layer", absl::StrCat(options.layer)},
          {"rank", absl::StrCat(options.rank)},
          {"ranks", absl::StrCat(options.ranks)}};
}

absl::StatusOr<PreparedLayer> PrepareExperts(const OpenedLayer& opened,
                                             const std::string& output,
                                             const PrepareOptions& options) {
  TrellisSource& source = *opened.source;
  const TrellisLayout& layout = source.layout();
  PreparedLayer prepared;
  prepared.path = PreparedPath(output, options);
  prepared.layout = layout;
  prepared.description = layout.ToString();
  std::map<std::string, std::string> metadata =
      Metadata(Op::kFusedMoe, options);
  metadata["codebook"] = std::string(layout.codebook.name());
  if (opened.config.has_value()) {
    metadata["top_k"] = absl::StrCat(opened.config->top_k);
    ASSIGN_OR_RETURN(RequestGeometry geometry, ServedGeometry(layout));
    geometry.top_k = opened.config->top_k;
    geometry.io_dtype = opened.config->io_dtype;
    prepared.description = geometry.ToString();
  }
  if (layout.coupled) metadata["coupled"] = "512,128";

  std::vector<PreparedTensor> tensors;
  for (const FusedMoeParam slot : kTrellisSlots) {
    tensors.push_back({source.Tensor(slot), [&source, slot](const auto& sink) {
                         return source.Stream(slot, sink);
                       }});
  }
  if (layout.pairs()) {
    for (const auto& [name, rates] : {std::pair{"rates_fc1", &layout.rates_fc1},
                                      {"rates_fc2", &layout.rates_fc2}}) {
      tensors.push_back(
          {RatesTensor(name, *rates),
           [&bytes = *rates](const auto& sink) { return sink(bytes); }});
    }
    tensors.push_back(ModesTensor("modes_fc1", layout.rates_fc1));
    tensors.push_back(ModesTensor("modes_fc2", layout.rates_fc2));
  }
  ASSIGN_OR_RETURN(prepared.bytes,
                   WritePrepared(prepared.path, tensors, metadata));
  return prepared;
}

// The sources of one layer of a dense model.
absl::StatusOr<std::vector<std::pair<DenseProjection, LinearSource>>>
DenseSources(const DenseConfig& config, const PrepareOptions& options,
             Checkpoint* checkpoint) {
  ASSIGN_OR_RETURN(const DenseLayers layers,
                   DenseLayers::Find(*checkpoint, config));
  const std::vector<int64_t> numbers = layers.Numbers();
  if (options.layer < 0 || options.layer > numbers.back()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "has no layer ", options.layer, "; it has 0..", numbers.back(),
        numbers.back() == config.layers ? ", of which the last is the head"
                                        : ""));
  }
  ASSIGN_OR_RETURN(const std::vector<DenseMatrix> matrices,
                   layers.Layer(options.layer));
  std::vector<std::pair<DenseProjection, LinearSource>> sources;
  for (const DenseMatrix& matrix : matrices) {
    ASSIGN_OR_RETURN(const LinearExtent extent,
                     ExtentOfRank(matrix, options.rank, options.ranks));
    ASSIGN_OR_RETURN(LinearSource source,
                     LinearSource::FromExl3(matrix.matrix, extent, checkpoint));
    sources.emplace_back(kDenseProjections[matrix.projection],
                         std::move(source));
  }
  return sources;
}

absl::StatusOr<PreparedLayer> PrepareDense(const std::string& folder,
                                           const DenseConfig& config,
                                           const std::string& output,
                                           const PrepareOptions& options) {
  ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(folder));
  auto sources = DenseSources(config, options, &checkpoint);
  if (!sources.ok()) return AnnotateOnce(sources.status(), folder);
  PreparedLayer prepared;
  prepared.path = PreparedPath(output, options);
  prepared.description = std::string(OpName(Op::kLinear));
  std::map<std::string, std::string> metadata = Metadata(Op::kLinear, options);
  std::deque<std::string> names;
  std::vector<PreparedTensor> tensors;
  for (auto& [projection, linear] : *sources) {
    LinearSource& source = linear;
    const std::string prefix = absl::StrCat(projection.name, ".");
    metadata[prefix + "codebook"] =
        std::string(CodebookName(source.codebook()));
    const LinearShape& shape = source.shape();
    absl::StrAppend(&prepared.description, tensors.empty() ? " " : ", ",
                    projection.short_name(), " [", shape.in_features, ", ",
                    shape.out_features, "] K", shape.bits,
                    shape.bias ? " bias" : "");
    for (const LinearSlot slot : source.Slots()) {
      PreparedTensor& tensor = tensors.emplace_back();
      tensor.tensor = source.Tensor(slot);
      tensor.tensor.name =
          names.emplace_back(absl::StrCat(prefix, tensor.tensor.name));
      tensor.stream = [&source, slot](const PieceSink& sink) {
        return source.Stream(slot, sink);
      };
    }
  }
  ASSIGN_OR_RETURN(prepared.bytes,
                   WritePrepared(prepared.path, tensors, metadata));
  return prepared;
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
  OpenedLayer opened;
  const std::vector<int64_t> qsrt = QsrtLayersIn(folder);
  if (IsBtxFolder(folder)) {
    ASSIGN_OR_RETURN(opened, OpenBtx(folder, options));
  } else if (!qsrt.empty()) {
    ASSIGN_OR_RETURN(opened, OpenQsrt(folder, qsrt, options));
  } else {
    ASSIGN_OR_RETURN(const AnyModelConfig config, ReadAnyModelConfig(folder));
    if (const auto* dense = std::get_if<DenseConfig>(&config)) {
      return PrepareDense(folder, *dense, output, options);
    }
    ASSIGN_OR_RETURN(opened,
                     OpenExl3(folder, std::get<ModelConfig>(config), options));
  }
  return PrepareExperts(opened, output, options);
}

}  // namespace kiln
