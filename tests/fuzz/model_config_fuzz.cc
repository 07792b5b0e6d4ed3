// Any bytes as config.json: refused with the file's name, or a geometry within
// the limits of a manifest.

#include <cstdint>
#include <variant>

#include "absl/strings/match.h"
#include "compiler/base/check.h"
#include "compiler/spec/manifest.h"
#include "templates/formats/model_config.h"

namespace {

void Check(const kiln::ModelConfig& config) {
  KILN_CHECK(config.hidden >= 1 && config.hidden <= kiln::kHiddenMax);
  KILN_CHECK(config.experts >= 1 && config.experts <= kiln::kExpertsMax);
  KILN_CHECK(config.top_k >= 1 && config.top_k <= config.experts);
  KILN_CHECK(!config.moe_layers.empty());
  int64_t before = -1;
  for (const auto& layers : {config.moe_layers, config.extra_layers}) {
    for (const int64_t layer : layers) {
      KILN_CHECK(layer > before && layer < kiln::kLayersMax);
      before = layer;
    }
  }
}

void Check(const kiln::DenseConfig& config) {
  KILN_CHECK(config.layers >= 1 && config.layers < kiln::kLayersMax);
  for (const int64_t channels :
       {config.hidden, config.intermediate, config.query, config.key_value,
        config.vocabulary}) {
    KILN_CHECK(channels >= 1 && channels <= kiln::kFeaturesMax);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<kiln::AnyModelConfig> config =
      kiln::ParseAnyModelConfig(text, "f");
  if (!config.ok()) {
    KILN_CHECK(absl::IsInvalidArgument(config.status()) ||
               absl::IsFailedPrecondition(config.status()));
    KILN_CHECK(absl::StartsWith(config.status().message(), "f:"));
    KILN_CHECK(config.status().message().size() < 1000);
    return 0;
  }
  std::visit([](const auto& known) { Check(known); }, *config);
  return 0;
}
