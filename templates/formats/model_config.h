// What config.json says about the routed experts of a model, or about the
// layers of one without any.

#ifndef KILN_TEMPLATES_FORMATS_MODEL_CONFIG_H_
#define KILN_TEMPLATES_FORMATS_MODEL_CONFIG_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/spec/dtype.h"
#include "compiler/spec/request.h"

namespace kiln {

// A tree of it takes up to a hundred times its bytes.
inline constexpr uint64_t kModelConfigBytesMax = 4u << 20;

// Gate, up and down, in this order everywhere below.
inline constexpr size_t kProjections = 3;
inline constexpr std::array<const char*, kProjections> kProjectionRoles = {
    "gate", "up", "down"};

// Names of the tensors of expert e in layer n: "layers.<n>.<block>.<e>.<p>".
struct ExpertNaming {
  absl::string_view block;
  std::array<absl::string_view, kProjections> projections;
};

struct ModelConfig {
  std::string model_type;
  ExpertNaming naming;
  int64_t hidden = 0;
  int64_t intermediate = 0;  // of one routed expert
  int64_t experts = 0;
  int64_t top_k = 0;
  DType io_dtype = DType::kBf16;
  std::vector<int64_t> moe_layers;  // ascending
  // Layers of multi-token prediction that follow the model's own. A checkpoint
  // may leave their experts out.
  std::vector<int64_t> extra_layers;
  // Named by "quantization_config", where it names one.
  std::optional<Codebook> codebook;
};

// A dense model: all layers have the same matrices, under the names of Llama.
struct DenseConfig {
  std::string model_type;
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t query = 0;      // channels of all heads
  int64_t key_value = 0;  // channels of all heads of keys, and of values
  int64_t vocabulary = 0;
  DType io_dtype = DType::kBf16;
  // What "attention_bias" and "mlp_bias" promise. Where they do not, there may
  // be biases all the same.
  bool attention_bias = false;
  bool mlp_bias = false;
  // Named by "quantization_config", where it names one.
  std::optional<Codebook> codebook;
};

using AnyModelConfig = std::variant<ModelConfig, DenseConfig>;

// Whether "quantization_config" speaks of the experts.
enum class Quantization {
  kExl3,      // it does, and must be that of EXL3
  kElsewhere  // the experts are in a container that says itself what it holds
};

// Reads a config.json, of an EXL3 checkpoint. Keys that say nothing about the
// weights are ignored; a model with a vision tower has its own under
// "text_config".
//   Errors: InvalidArgument "file:line:column: ..." for a missing or impossible
//   value; FailedPrecondition, with the reason, for a model that is understood
//   but not served.
absl::StatusOr<AnyModelConfig> ParseAnyModelConfig(absl::string_view text,
                                                   absl::string_view file);

// The same for those who know routed experts alone: refuses a dense model.
absl::StatusOr<ModelConfig> ParseModelConfig(
    absl::string_view text, absl::string_view file,
    Quantization quantization = Quantization::kExl3);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_MODEL_CONFIG_H_
