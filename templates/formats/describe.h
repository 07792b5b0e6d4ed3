// Describe: the manifest of a checkpoint, from config.json and the headers of
// its safetensors files. Reads no tensor. The experts lie in EXL3 groups, or in
// a BTX or QSRT container.

#ifndef KILN_TEMPLATES_FORMATS_DESCRIBE_H_
#define KILN_TEMPLATES_FORMATS_DESCRIBE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "compiler/spec/manifest.h"
#include "templates/formats/model_config.h"

namespace kiln {

struct DescribeOptions {
  // Ranks that share each expert's intermediate channels, equally.
  int64_t tensor_parallel = 1;
};

// Reads `folder`/config.json.
absl::StatusOr<ModelConfig> ReadModelConfig(
    const std::string& folder, Quantization quantization = Quantization::kExl3);

// Channels of the intermediate axis that each of `ranks` ranks holds.
//   Errors: InvalidArgument, with the counts that are possible, unless each
//   gets the same multiple of 128.
absl::StatusOr<int64_t> IntermediatePerRank(int64_t intermediate,
                                            int64_t ranks);

// Layers of equal rates and codebook share a request; requests are named moe,
// moe-1, ... in the order of their first layers. Capacities are the powers of
// two from 1 to 4096. The manifest is named after the folder.
//   Errors: those of Checkpoint::Open, ParseModelConfig, RoutedExperts,
//   ParseBtxManifest, BtxLayer::Open and QsrtLayer::Open; FailedPrecondition,
//   with the first tensor concerned, for layers that no template serves;
//   InvalidArgument where a manifest cannot hold the model. Every message
//   begins with the folder or with a path in it.
absl::StatusOr<Manifest> DescribeCheckpoint(const std::string& folder,
                                            const DescribeOptions& options);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_DESCRIBE_H_
