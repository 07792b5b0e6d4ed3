// A bundle as JSON: what `inspect --json` prints and `diff` compares.

#ifndef KILN_TOOLS_BUNDLE_JSON_H_
#define KILN_TOOLS_BUNDLE_JSON_H_

#include <cstdint>
#include <nlohmann/json.hpp>

#include "tools/bundle_view.h"

namespace kiln {

nlohmann::ordered_json PlanToJson(const BundleView& bundle, uint32_t section,
                                  uint32_t entry, uint32_t index);
nlohmann::ordered_json ProgramToJson(const BundleView& bundle, uint32_t section,
                                     uint32_t index);
// The whole bundle.
nlohmann::ordered_json BundleToJson(const BundleView& bundle);

}  // namespace kiln

#endif  // KILN_TOOLS_BUNDLE_JSON_H_
