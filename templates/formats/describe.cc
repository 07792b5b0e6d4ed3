#include "templates/formats/describe.h"

#include <algorithm>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "templates/formats/btx_layer.h"
#include "templates/formats/checkpoint.h"
#include "templates/formats/dense_layers.h"
#include "templates/formats/exl3.h"
#include "templates/formats/pair_layer.h"
#include "templates/formats/qsrt_layer.h"
#include "templates/formats/routed_experts.h"
#include "templates/fused_moe/trellis_matrix.h"

namespace kiln {
namespace {

constexpr uint32_t kCapacityLast = 4096;

// The last part of a path, without characters that a manifest's name cannot
// hold.
std::string NameOfFolder(std::string folder) {
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  std::string name = folder.substr(folder.rfind('/') + 1);
  for (char& c : name) {
    if (c < 0x20 || c > 0x7E) c = '_';
  }
  name.resize(std::min(name.size(), kNameBytesMax));
  if (name.empty() || name == "." || name == "..") return "model";
  return name;
}

std::vector<uint32_t> Capacities() {
  std::vector<uint32_t> capacities;
  for (uint32_t c = 1; c <= kCapacityLast; c *= 2) capacities.push_back(c);
  return capacities;
}

std::string ConfigPath(const std::string& folder) {
  return absl::StrCat(folder, "/config.json");
}

absl::StatusOr<std::string> ReadConfigText(const std::string& folder) {
  return ReadFile(ConfigPath(folder), kModelConfigBytesMax);
}

// Layers that have the same geometry share a request, in the order of their
// first layers.
class RequestGroups {
 public:
  // Requests are named `name`, `name`-1, ...
  explicit RequestGroups(absl::string_view name) : name_(name) {}

  void Add(const RequestGeometry& geometry, int64_t layer) {
    const auto [position, inserted] =
        positions_.emplace(geometry, requests_.size());
    if (inserted) {
      Request& request = requests_.emplace_back();
      request.name = name_;
      if (position->second > 0) {
        absl::StrAppend(&request.name, "-", position->second);
      }
      request.geometry = geometry;
      request.capacities = Capacities();
    }
    requests_[position->second].layers.push_back(layer);
  }

  const std::vector<Request>& requests() const { return requests_; }

 private:
  std::string name_;
  std::vector<Request> requests_;
  std::map<RequestGeometry, size_t> positions_;
};

// Requests of the checkpoint's layers, without the folder in messages.
absl::StatusOr<std::vector<Request>> MoeRequests(const Checkpoint& checkpoint,
                                                 const ModelConfig& config,
                                                 int64_t ranks) {
  RequestGeometry geometry;
  ASSIGN_OR_RETURN(
      geometry.intermediate,
      ChannelsPerRank("intermediate size", config.intermediate, ranks));
  ASSIGN_OR_RETURN(const RoutedExperts experts,
                   RoutedExperts::Find(checkpoint, config));
  std::vector<int64_t> layers = config.moe_layers;
  for (const int64_t layer : experts.Layers()) {
    if (!std::binary_search(layers.begin(), layers.end(), layer)) {
      layers.push_back(layer);  // one of the extra layers, which come last
    }
  }
  geometry.hidden = config.hidden;
  geometry.experts = config.experts;
  geometry.top_k = config.top_k;
  geometry.io_dtype = config.io_dtype;
  RequestGroups groups("moe");
  for (const int64_t layer : layers) {
    ASSIGN_OR_RETURN(const RoutedLayer routed, experts.Layer(layer));
    geometry.weights.codebook = routed.codebook;
    geometry.weights.bits = routed.bits;
    groups.Add(geometry, layer);
  }
  return groups.requests();
}

// The same of a dense model.
absl::StatusOr<std::vector<Request>> LinearRequests(
    const Checkpoint& checkpoint, const DenseConfig& config, int64_t ranks) {
  ASSIGN_OR_RETURN(const DenseLayers layers,
                   DenseLayers::Find(checkpoint, config));
  std::vector<RequestGroups> groups;
  for (const DenseProjection& projection : kDenseProjections) {
    groups.emplace_back(projection.short_name());
  }
  for (const int64_t number : layers.Numbers()) {
    ASSIGN_OR_RETURN(const std::vector<DenseMatrix> matrices,
                     layers.Layer(number));
    for (const DenseMatrix& matrix : matrices) {
      ASSIGN_OR_RETURN(RequestGeometry geometry, matrix.Geometry(ranks));
      geometry.io_dtype = config.io_dtype;
      groups[matrix.projection].Add(geometry, number);
    }
  }
  std::vector<Request> requests;
  for (const RequestGroups& group : groups) {
    requests.insert(requests.end(), group.requests().begin(),
                    group.requests().end());
  }
  return requests;
}

// The layer in a tensor's name, "...layers.<n>...".
std::optional<int64_t> LayerOf(absl::string_view name) {
  constexpr absl::string_view kLayers = "layers.";
  const size_t at = name.find(kLayers);
  if (at == absl::string_view::npos) return std::nullopt;
  absl::string_view rest = name.substr(at + kLayers.size());
  rest = rest.substr(0, rest.find('.'));
  int64_t layer = 0;
  if (!absl::SimpleAtoi(rest, &layer)) return std::nullopt;
  return layer;
}

// Of a model that is not served, the first tensor that the refusal is about:
// that of a routed expert, else a quantised matrix, else any matrix; of the
// first layer, and there by name. Empty where there is none.
std::string FirstTensorConcerned(const Checkpoint& checkpoint) {
  std::optional<std::tuple<int, int64_t, absl::string_view>> first;
  for (const SafetensorsFile& shard : checkpoint.shards()) {
    for (const SafetensorsTensor& tensor : shard.header().tensors()) {
      const std::optional<int64_t> layer = LayerOf(tensor.name);
      if (!layer.has_value()) continue;
      const int kind = absl::StrContains(tensor.name, ".experts.") ? 0
                       : absl::EndsWith(tensor.name, ".trellis")   ? 1
                       : tensor.rank == 2                          ? 2
                                                                   : 3;
      if (kind == 3) continue;
      const std::tuple place = {kind, *layer, tensor.name};
      if (!first.has_value() || place < *first) first = place;
    }
  }
  return first.has_value() ? QuoteTensorName(std::get<2>(*first)) : "";
}

// Of a refusal by the configuration: adds the first tensor concerned. What is
// wrong with the tensors themselves does not matter then.
absl::Status AddFirstTensor(const absl::Status& refusal,
                            const std::string& folder) {
  if (!absl::IsFailedPrecondition(refusal)) return refusal;
  const absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(folder);
  if (!checkpoint.ok()) return refusal;
  const std::string tensor = FirstTensorConcerned(*checkpoint);
  if (tensor.empty()) return refusal;
  return absl::FailedPreconditionError(absl::StrCat(
      refusal.message(), "; the first tensor concerned is ", tensor));
}

absl::StatusOr<std::vector<Request>> DescribeExl3(const std::string& folder,
                                                  int64_t ranks) {
  const absl::StatusOr<AnyModelConfig> config = ReadAnyModelConfig(folder);
  if (!config.ok()) return AddFirstTensor(config.status(), folder);
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(folder));
  const auto* dense = std::get_if<DenseConfig>(&*config);
  absl::StatusOr<std::vector<Request>> requests =
      dense != nullptr
          ? LinearRequests(checkpoint, *dense, ranks)
          : MoeRequests(checkpoint, std::get<ModelConfig>(*config), ranks);
  if (!requests.ok()) return Annotate(requests.status(), folder);
  return requests;
}

// The layers of config.json and those of the container are the same.
absl::Status CheckBtxAgainstConfig(const BtxManifest& manifest,
                                   const ModelConfig& config) {
  const std::pair<const char*, std::pair<int64_t, int64_t>> sizes[] = {
      {"hidden_size", {manifest.hidden, config.hidden}},
      {"intermediate_size", {manifest.intermediate, config.intermediate}},
      {"num_experts", {manifest.experts, config.experts}}};
  for (const auto& [name, values] : sizes) {
    if (values.first == values.second) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(kBtxManifestName, " has the ", name, " ", values.first,
                     ", config.json has ", values.second));
  }
  for (const auto& [layer, entry] : manifest.layers) {
    const auto has = [layer = layer](const std::vector<int64_t>& layers) {
      return std::binary_search(layers.begin(), layers.end(), layer);
    };
    if (has(config.moe_layers) || has(config.extra_layers)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(kBtxManifestName, " has layer ", layer,
                     ", which has no routed experts by config.json"));
  }
  for (const int64_t layer : config.moe_layers) {
    if (manifest.layers.count(layer) != 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(kBtxManifestName, " lacks layer ", layer,
                     ", which has routed experts by config.json"));
  }
  return absl::OkStatus();
}

// The tensor that shows why a layer is not served.
absl::string_view TensorConcerned(const BtxManifest& manifest) {
  return manifest.pairs()   ? "rates_fc1"
         : manifest.coupled ? "rotation_draws"
                            : "atoms";
}

absl::StatusOr<std::vector<Request>> DescribeBtx(const std::string& folder,
                                                 int64_t ranks) {
  ASSIGN_OR_RETURN(const BtxManifest manifest, ReadBtxManifest(folder));
  std::string first_path;
  for (const auto& [number, entry] : manifest.layers) {
    ASSIGN_OR_RETURN(const BtxLayer layer,
                     BtxLayer::Open(folder, manifest, number));
    if (first_path.empty()) first_path = layer.path();
  }
  // All ranks have the same layout.
  const auto layout_of = [&](const TrellisExtent& extent) {
    return BtxLayoutOf(manifest, extent);
  };
  const auto served = [&]() -> absl::StatusOr<RequestGeometry> {
    ASSIGN_OR_RETURN(const TrellisExtent extent,
                     ExtentOfRank(manifest.intermediate, /*rank=*/0, ranks,
                                  [&](const auto& part) {
                                    return layout_of(part).status();
                                  }));
    ASSIGN_OR_RETURN(const TrellisLayout layout, layout_of(extent));
    if (!manifest.pairs()) return ServedGeometry(layout);
    ASSIGN_OR_RETURN(const PairArm arm, PairArmOf(manifest.pair_kinds));
    return ServedPairGeometry(layout, arm == PairArm::kPools
                                          ? PairKinds::kP33P43
                                          : PairKinds::kP24P33);
  }();
  // The number of ranks is to blame, or a tensor.
  if (absl::IsInvalidArgument(served.status())) {
    return Annotate(served.status(), folder);
  }
  if (!served.ok()) {
    return Annotate(served.status(),
                    absl::StrCat(first_path, ": tensor \"",
                                 TensorConcerned(manifest), "\""));
  }
  RequestGeometry geometry = *served;
  ASSIGN_OR_RETURN(const ModelConfig config,
                   ReadModelConfig(folder, Quantization::kElsewhere));
  RETURN_IF_ERROR(Annotate(CheckBtxAgainstConfig(manifest, config), folder));
  geometry.top_k = config.top_k;
  geometry.io_dtype = config.io_dtype;
  Request request;
  request.name = "moe";
  request.geometry = geometry;
  request.capacities = Capacities();
  for (const auto& [number, entry] : manifest.layers) {
    request.layers.push_back(number);
  }
  return std::vector<Request>{request};
}

// Understood, and served, but such a folder does not say what a request needs.
absl::Status RefuseQsrt(const std::string& folder, int64_t first_layer) {
  ASSIGN_OR_RETURN(const QsrtLayer layer, QsrtLayer::Open(folder, first_layer));
  return absl::FailedPreconditionError(absl::StrCat(
      layer.path(), ": is QSRT, whose files name neither top_k, nor the ",
      "activation, nor the type of x; write the request of its ",
      layer.intermediate() / kPairChannels, " parts by hand, with \"hidden\" ",
      layer.hidden(), ", \"intermediate\" ", kPairChannels,
      ", and weights of the format \"qsrt\" with \"pairs\" \"p24_p33\"; "
      "kiln prepare --tp K/",
      layer.intermediate() / kPairChannels,
      " writes part K's native tensors and prints how many experts it has and "
      "whether they share scales"));
}

absl::StatusOr<std::vector<Request>> DescribeLayers(const std::string& folder,
                                                    int64_t ranks) {
  if (IsBtxFolder(folder)) return DescribeBtx(folder, ranks);
  const std::vector<int64_t> qsrt = QsrtLayersIn(folder);
  if (!qsrt.empty()) return RefuseQsrt(folder, qsrt.front());
  return DescribeExl3(folder, ranks);
}

}  // namespace

absl::StatusOr<AnyModelConfig> ReadAnyModelConfig(const std::string& folder) {
  ASSIGN_OR_RETURN(const std::string text, ReadConfigText(folder));
  return ParseAnyModelConfig(text, ConfigPath(folder));
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& folder,
                                            Quantization quantization) {
  ASSIGN_OR_RETURN(const std::string text, ReadConfigText(folder));
  return ParseModelConfig(text, ConfigPath(folder), quantization);
}

absl::StatusOr<Manifest> DescribeCheckpoint(const std::string& folder,
                                            const DescribeOptions& options) {
  ASSIGN_OR_RETURN(std::vector<Request> requests,
                   DescribeLayers(folder, options.tensor_parallel));
  Manifest manifest;
  manifest.name = NameOfFolder(folder);
  manifest.requests = std::move(requests);
  // The parser has the last word on what a manifest may hold.
  absl::StatusOr<Manifest> parsed =
      ParseManifest(ManifestToJson(manifest), "manifest");
  if (!parsed.ok()) return Annotate(parsed.status(), folder);
  return parsed;
}

}  // namespace kiln
