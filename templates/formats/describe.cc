#include "templates/formats/describe.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "templates/formats/checkpoint.h"
#include "templates/formats/routed_experts.h"

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

// Requests of the checkpoint's layers, without the folder in messages.
absl::StatusOr<std::vector<Request>> MakeRequests(const Checkpoint& checkpoint,
                                                  const ModelConfig& config,
                                                  int64_t intermediate) {
  ASSIGN_OR_RETURN(const RoutedExperts experts,
                   RoutedExperts::Find(checkpoint, config));
  std::vector<int64_t> layers = config.moe_layers;
  for (const int64_t layer : experts.Layers()) {
    if (!std::binary_search(layers.begin(), layers.end(), layer)) {
      layers.push_back(layer);  // one of the extra layers, which come last
    }
  }
  RequestGeometry geometry;
  geometry.hidden = config.hidden;
  geometry.intermediate = intermediate;
  geometry.experts = config.experts;
  geometry.top_k = config.top_k;
  geometry.io_dtype = config.io_dtype;
  std::vector<uint32_t> capacities;
  for (uint32_t c = 1; c <= kCapacityLast; c *= 2) capacities.push_back(c);

  std::vector<Request> requests;
  std::map<RequestGeometry, size_t> positions;
  for (const int64_t layer : layers) {
    ASSIGN_OR_RETURN(const RoutedLayer routed, experts.Layer(layer));
    geometry.weights.codebook = routed.codebook;
    geometry.weights.bits = routed.bits;
    const auto [position, inserted] =
        positions.emplace(geometry, requests.size());
    if (inserted) {
      Request& request = requests.emplace_back();
      request.name = "moe";
      if (position->second > 0) {
        absl::StrAppend(&request.name, "-", position->second);
      }
      request.geometry = geometry;
      request.capacities = capacities;
    }
    requests[position->second].layers.push_back(layer);
  }
  return requests;
}

}  // namespace

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/config.json");
  ASSIGN_OR_RETURN(const std::string text,
                   ReadFile(path, kModelConfigBytesMax));
  return ParseModelConfig(text, path);
}

absl::StatusOr<int64_t> IntermediatePerRank(int64_t intermediate,
                                            int64_t ranks) {
  constexpr auto kBlock = static_cast<int64_t>(kHadamardBlock);
  if (intermediate % kBlock != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("intermediate size ", intermediate,
                     " is not a multiple of 128 (the Hadamard block)"));
  }
  const int64_t blocks = intermediate / kBlock;
  if (ranks >= 1 && blocks % ranks == 0) return intermediate / ranks;
  std::vector<int64_t> possible;
  for (int64_t n = 1; n <= blocks; ++n) {
    if (blocks % n == 0) possible.push_back(n);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "intermediate size ", intermediate, " cannot be split over ", ranks,
      " ranks: each needs the same multiple of 128 channels (the Hadamard "
      "block); possible: ",
      absl::StrJoin(possible, ", ")));
}

absl::StatusOr<Manifest> DescribeCheckpoint(const std::string& folder,
                                            const DescribeOptions& options) {
  ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(folder));
  absl::StatusOr<int64_t> intermediate =
      IntermediatePerRank(config.intermediate, options.tensor_parallel);
  if (!intermediate.ok()) return Annotate(intermediate.status(), folder);
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(folder));
  absl::StatusOr<std::vector<Request>> requests =
      MakeRequests(checkpoint, config, *intermediate);
  if (!requests.ok()) return Annotate(requests.status(), folder);
  Manifest manifest;
  manifest.name = NameOfFolder(folder);
  manifest.requests = *std::move(requests);
  // The parser has the last word on what a manifest may hold.
  absl::StatusOr<Manifest> parsed =
      ParseManifest(ManifestToJson(manifest), "manifest");
  if (!parsed.ok()) return Annotate(parsed.status(), folder);
  return parsed;
}

}  // namespace kiln
