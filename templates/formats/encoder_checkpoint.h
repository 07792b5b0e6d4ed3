// From a checkpoint of real numbers to an EXL3 checkpoint: the routed experts,
// or the layers' matrices of a dense model, are encoded, everything else is
// copied.

#ifndef KILN_TEMPLATES_FORMATS_ENCODER_CHECKPOINT_H_
#define KILN_TEMPLATES_FORMATS_ENCODER_CHECKPOINT_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compiler/spec/request.h"
#include "templates/formats/model_config.h"
#include "templates/formats/routed_experts.h"
#include "templates/formats/safetensors.h"

namespace kiln {

// Called now and then, from any thread but never from two at once.
//   detail: what is being worked on.
using EncodeProgress = std::function<void(uint64_t done, uint64_t total,
                                          const std::string& detail)>;

struct EncodeOptions {
  Codebook codebook = Codebook::kMcg;
  Bits bits = {4, 4, 4};
  uint64_t seed = 0;  // of the signs in the scales
  int threads = 1;
  EncodeProgress progress = nullptr;  // in tiles; may be empty
};

struct EncodedCheckpoint {
  uint64_t matrices = 0;
  uint64_t weights = 0;
  uint64_t bytes = 0;  // of the safetensors files
  // Squared error of all matrices over the sum of their squares.
  double relative_error = 0;
  // The matrix with the largest, and its own.
  std::string worst;
  double worst_error = 0;
};

// Writes `output`: for each safetensors file of `folder` one of the same name,
// the index where there is one, and config.json with "quantization_config".
// Experts' matrices `<key>.weight` [out][in] of F32, F16 or BF16 become EXL3
// groups; of a dense model the matrices of its layers, but not the head, and
// their biases become F16. The bytes written depend on the input and the
// options alone, not on threads or processor.
//   Errors: those of reading the checkpoint; InvalidArgument for a matrix that
//   cannot be encoded, with the tensor, or for a dense model and bits that are
//   not all equal; FailedPrecondition for a model without such matrices or with
//   quantised ones; those of writing files.
absl::StatusOr<EncodedCheckpoint> EncodeCheckpoint(
    const std::string& folder, const std::string& output,
    const EncodeOptions& options);

// A routed expert's matrix [out][in] of real numbers.
struct RealMatrix {
  ExpertTensorName name;
  uint64_t in = 0;
  uint64_t out = 0;
};

// Nothing for a tensor that is no routed expert's.
//   Errors: InvalidArgument for one that is, but no plain matrix of
//   config.json's geometry and type F32, F16 or BF16.
absl::StatusOr<std::optional<RealMatrix>> FindRealMatrix(
    const SafetensorsTensor& tensor, const ModelConfig& config);

// The elements of a tensor of type F32, F16 or BF16.
//   Errors: InvalidArgument for another type.
absl::StatusOr<std::vector<float>> ReadReals(const SafetensorsTensor& tensor,
                                             std::span<const uint8_t> bytes);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_ENCODER_CHECKPOINT_H_
