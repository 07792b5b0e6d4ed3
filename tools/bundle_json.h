// A bundle as JSON: what `inspect --json` prints and `diff` compares.

#ifndef KILN_TOOLS_BUNDLE_JSON_H_
#define KILN_TOOLS_BUNDLE_JSON_H_

#include <nlohmann/json.hpp>

#include "tools/bundle_view.h"

namespace kiln {

// Everything that the bundle says; binaries by digest.
nlohmann::ordered_json BundleToJson(const BundleView& bundle);

}  // namespace kiln

#endif  // KILN_TOOLS_BUNDLE_JSON_H_
