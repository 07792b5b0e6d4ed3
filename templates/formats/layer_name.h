// The place of a tensor in a model, as its name tells it:
// "<prefix>layers.<n>.<rest>".

#ifndef KILN_TEMPLATES_FORMATS_LAYER_NAME_H_
#define KILN_TEMPLATES_FORMATS_LAYER_NAME_H_

#include <array>
#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"

namespace kiln {

inline constexpr absl::string_view kLayers = "layers.";

// What may stand before "layers.": plain models, and the text part of models
// with several.
inline constexpr std::array<absl::string_view, 5> kLayerPrefixes = {
    "model.", "model.language_model.", "language_model.model.",
    "language_model.", ""};

struct LayerName {
  absl::string_view prefix;  // one of kLayerPrefixes
  int64_t layer = 0;
  absl::string_view rest;
};

// Nothing for a name of another form.
std::optional<LayerName> ParseLayerName(absl::string_view name);

// Takes "<digits>." from the front of `text`, a number below 2^31 without
// leading zeros.
std::optional<int64_t> TakeNumber(absl::string_view* text);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_LAYER_NAME_H_
