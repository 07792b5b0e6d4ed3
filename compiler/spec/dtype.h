// Element types of buffers and parameters.

#ifndef KILN_COMPILER_SPEC_DTYPE_H_
#define KILN_COMPILER_SPEC_DTYPE_H_

#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"

namespace kiln {

enum class DType { kF32, kF16, kBf16, kI16, kI32, kI64 };

// "f32", "f16", "bf16", "i16", "i32", "i64".
absl::string_view DTypeName(DType type);
std::optional<DType> ParseDType(absl::string_view name);
// Bytes of one element.
uint32_t DTypeBytes(DType type);

}  // namespace kiln

#endif  // KILN_COMPILER_SPEC_DTYPE_H_
