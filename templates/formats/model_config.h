// What config.json says about the routed experts of a model.

#ifndef KILN_TEMPLATES_FORMATS_MODEL_CONFIG_H_
#define KILN_TEMPLATES_FORMATS_MODEL_CONFIG_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
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

// Whether "quantization_config" speaks of the experts.
enum class Quantization {
  kExl3,      // it does, and must be that of EXL3
  kElsewhere  // the experts are in a container that says itself what it holds
};

// Reads a config.json. Keys that say nothing about routed experts are ignored;
// a model with a vision tower has its own under "text_config".
//   Errors: InvalidArgument "file:line:column: ..." for a missing or impossible
//   value; FailedPrecondition, with the reason, for a model that is understood
//   but not served.
absl::StatusOr<ModelConfig> ParseModelConfig(
    absl::string_view text, absl::string_view file,
    Quantization quantization = Quantization::kExl3);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_MODEL_CONFIG_H_
