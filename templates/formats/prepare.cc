#include "templates/formats/prepare.h"

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "templates/formats/describe.h"
#include "templates/formats/trellis_source.h"

namespace kiln {
namespace {

std::string FileName(const PrepareOptions& options) {
  std::string name = absl::StrFormat("layer-%05d", options.layer);
  if (options.ranks > 1) {
    absl::StrAppend(&name, "-rank-", options.rank, "-of-", options.ranks);
  }
  return name + ".safetensors";
}

absl::StatusOr<std::unique_ptr<TrellisSource>> OpenSource(
    const ModelConfig& config, const PrepareOptions& options,
    Checkpoint* checkpoint) {
  ASSIGN_OR_RETURN(
      const TrellisExtent extent,
      ExtentOfRank(config.intermediate, options.rank, options.ranks));
  ASSIGN_OR_RETURN(const RoutedExperts experts,
                   RoutedExperts::Find(*checkpoint, config));
  const std::vector<int64_t> layers = experts.Layers();
  if (!std::binary_search(layers.begin(), layers.end(), options.layer)) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer ", options.layer, " has no routed experts; layers ",
                     "that have: ", absl::StrJoin(layers, ", ")));
  }
  ASSIGN_OR_RETURN(const RoutedLayer layer, experts.Layer(options.layer));
  return TrellisFromExl3(layer, extent, checkpoint);
}

}  // namespace

absl::StatusOr<PreparedLayer> PrepareLayer(const std::string& folder,
                                           const std::string& output,
                                           const PrepareOptions& options) {
  ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(folder));
  ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(folder));
  absl::StatusOr<std::unique_ptr<TrellisSource>> source =
      OpenSource(config, options, &checkpoint);
  if (!source.ok()) return Annotate(source.status(), folder);
  PreparedLayer prepared;
  prepared.path = absl::StrCat(output, "/", FileName(options));
  prepared.geometry = (*source)->geometry();
  prepared.geometry.top_k = config.top_k;
  prepared.geometry.io_dtype = config.io_dtype;

  std::vector<SafetensorsTensor> tensors;
  for (const FusedMoeParam slot : kTrellisSlots) {
    tensors.push_back((*source)->Tensor(slot));
    prepared.bytes += tensors.back().bytes();
  }
  const std::string head = MakeSafetensorsHead(
      tensors, {{"format", "kiln.native/1"},
                {"op", std::string(OpName(prepared.geometry.op))},
                {"codebook",
                 std::string(CodebookName(prepared.geometry.weights.codebook))},
                {"layer", absl::StrCat(options.layer)},
                {"rank", absl::StrCat(options.rank)},
                {"ranks", absl::StrCat(options.ranks)},
                {"top_k", absl::StrCat(config.top_k)}});
  prepared.bytes += head.size();
  RETURN_IF_ERROR(MakeDirectories(output));
  PendingFile file(prepared.path);
  RETURN_IF_ERROR(
      file.Append({reinterpret_cast<const char*>(head.data()), head.size()}));
  for (const FusedMoeParam slot : kTrellisSlots) {
    RETURN_IF_ERROR(
        (*source)->Stream(slot, [&](std::span<const uint8_t> piece) {
          return file.Append(
              {reinterpret_cast<const char*>(piece.data()), piece.size()});
        }));
  }
  RETURN_IF_ERROR(file.Commit());
  return prepared;
}

}  // namespace kiln
