#include "templates/formats/layer_name.h"

#include "absl/strings/strip.h"

namespace kiln {

std::optional<LayerName> ParseLayerName(absl::string_view name) {
  for (const absl::string_view prefix : kLayerPrefixes) {
    absl::string_view rest = name;
    if (!absl::ConsumePrefix(&rest, prefix)) continue;
    if (!absl::ConsumePrefix(&rest, kLayers)) continue;
    const std::optional<int64_t> layer = TakeNumber(&rest);
    if (!layer.has_value()) return std::nullopt;
    return LayerName{.prefix = prefix, .layer = *layer, .rest = rest};
  }
  return std::nullopt;
}

std::optional<int64_t> TakeNumber(absl::string_view* text) {
  int64_t value = 0;
  size_t i = 0;
  for (; i < text->size() && (*text)[i] >= '0' && (*text)[i] <= '9'; ++i) {
    value = value * 10 + ((*text)[i] - '0');
    if (i == 9) return std::nullopt;
  }
  if (i == 0 || i == text->size() || (*text)[i] != '.') return std::nullopt;
  if (i > 1 && (*text)[0] == '0') return std::nullopt;
  text->remove_prefix(i + 1);
  return value;
}

}  // namespace kiln
