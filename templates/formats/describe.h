// Describe: the manifest of a checkpoint, from config.json and the headers of
// its safetensors files. Reads no tensor. Experts lie in EXL3 groups, or in a
// BTX or QSRT container, the matrices of a dense model in EXL3 groups.

#ifndef KILN_TEMPLATES_FORMATS_DESCRIBE_H_
#define KILN_TEMPLATES_FORMATS_DESCRIBE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "compiler/spec/manifest.h"
#include "templates/formats/model_config.h"

namespace kiln {

struct DescribeOptions {
  // Ranks that share each expert's intermediate channels, equally; of a dense
  // model see RankSplit.
  int64_t tensor_parallel = 1;
};

// Reads `folder`/config.json.
absl::StatusOr<AnyModelConfig> ReadAnyModelConfig(const std::string& folder);

// The same for those who know routed experts alone.
absl::StatusOr<ModelConfig> ReadModelConfig(
    const std::string& folder, Quantization quantization = Quantization::kExl3);

// Layers of equal rates and codebook share a request; requests are named moe,
// moe-1, ... in the order of their first layers. Capacities are the powers of
// two from 1 to 4096. The manifest is named after the folder. A dense model has
// requests for linear, by projection and there as above: q_proj, q_proj-1, ...,
// k_proj, ..., and lm_head, whose layer is the number behind the last.
//   Errors: those of Checkpoint::Open, ParseAnyModelConfig, RoutedExperts,
//   DenseLayers, ChannelsPerRank, ParseBtxManifest, BtxLayer::Open and
//   QsrtLayer::Open; FailedPrecondition, with the first tensor concerned, for
//   layers that no template serves; InvalidArgument where a manifest cannot
//   hold the model. Every message begins with the folder or with a path in it.
absl::StatusOr<Manifest> DescribeCheckpoint(const std::string& folder,
                                            const DescribeOptions& options);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_DESCRIBE_H_
