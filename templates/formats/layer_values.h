// Checks of tensor bytes that the readers of several containers share.

#ifndef KILN_TEMPLATES_FORMATS_LAYER_VALUES_H_
#define KILN_TEMPLATES_FORMATS_LAYER_VALUES_H_

#include <cstdint>
#include <initializer_list>
#include <span>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "templates/formats/safetensors.h"

namespace kiln {

// InvalidArgument 'tensor "name" rule'.
absl::Status RefuseTensor(absl::string_view name, absl::string_view rule);

// The tensor's type and shape are exactly these.
absl::Status CheckTensorIs(const SafetensorsTensor& tensor, StoredType type,
                           std::initializer_list<uint64_t> shape);

// Binary16 values, little-endian, without an infinity or NaN.
absl::Status CheckFinite(absl::string_view name,
                         std::span<const uint8_t> binary16);

// Zero bytes. `at` is the place of the first one, for messages.
absl::Status CheckZeroPadding(absl::string_view name, uint64_t at,
                              std::span<const uint8_t> bytes);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_LAYER_VALUES_H_
