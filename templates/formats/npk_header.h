// The JSON header of an NPK-1 sidecar: its canonical text, and what it says.

#ifndef KILN_TEMPLATES_FORMATS_NPK_HEADER_H_
#define KILN_TEMPLATES_FORMATS_NPK_HEADER_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compiler/base/digest.h"
#include "templates/formats/npk.h"

namespace kiln {

// InvalidArgument "rule V3: ...".
absl::Status NpkRuleError(int rule, absl::string_view message);

// Rule V15 for the two texts that a caller may choose, limit and model_id.
absl::Status CheckNpkTexts(const NpkMetadata& metadata);

struct NpkHeader {
  NpkMetadata metadata;
  std::array<Digest, kNpkTensors> digests;
  Digest signs;
  uint64_t data_begin = 0;  // in the file
};

// Rules V1 to V7, V13 and V15, over a whole file. Tensors then lie where
// NpkTensorsOf says.
absl::StatusOr<NpkHeader> ParseNpkHeader(std::span<const uint8_t> file);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_NPK_HEADER_H_
