#include "templates/formats/layer_values.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace kiln {
namespace {

constexpr uint16_t kExponent = 0x7C00;  // all ones: infinity or NaN

uint16_t Value(std::span<const uint8_t> binary16, size_t i) {
  uint16_t value = 0;
  std::memcpy(&value, &binary16[2 * i], sizeof(value));
  return value;
}

}  // namespace

absl::Status RefuseTensor(absl::string_view name, absl::string_view rule) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor ", QuoteTensorName(name), " ", rule));
}

absl::Status CheckTensorIs(const SafetensorsTensor& tensor, StoredType type,
                           std::initializer_list<uint64_t> shape) {
  if (tensor.type == type &&
      std::equal(shape.begin(), shape.end(), tensor.shape().begin(),
                 tensor.shape().end())) {
    return absl::OkStatus();
  }
  return RefuseTensor(tensor.name,
                      absl::StrCat("is ", tensor.TypeAndShape(), ", must be ",
                                   StoredTypeName(type), " [",
                                   absl::StrJoin(shape, ", "), "]"));
}

absl::Status CheckFinite(absl::string_view name,
                         std::span<const uint8_t> binary16) {
  const size_t count = binary16.size() / 2;
  // One pass that the compiler turns into vectors; the place of a bad value is
  // only looked for when there is one.
  uint16_t bad = 0;
  for (size_t i = 0; i < count; ++i) {
    bad |= static_cast<uint16_t>((Value(binary16, i) & kExponent) == kExponent);
  }
  if (bad == 0) return absl::OkStatus();
  size_t at = 0;
  while ((Value(binary16, at) & kExponent) != kExponent) ++at;
  return RefuseTensor(
      name,
      absl::StrCat("has the binary16 bits 0x", absl::Hex(Value(binary16, at)),
                   " at element ", at, ", must be finite"));
}

absl::Status CheckZeroPadding(absl::string_view name, uint64_t at,
                              std::span<const uint8_t> bytes) {
  const auto found = std::find_if(bytes.begin(), bytes.end(),
                                  [](uint8_t byte) { return byte != 0; });
  if (found == bytes.end()) return absl::OkStatus();
  return RefuseTensor(
      name, absl::StrCat("has 0x", absl::Hex(*found), " at byte ",
                         at + static_cast<uint64_t>(found - bytes.begin()),
                         ", which is padding and must be 0"));
}

}  // namespace kiln
