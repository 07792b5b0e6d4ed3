#include "compiler/spec/dtype.h"

#include "compiler/base/check.h"

namespace kiln {

absl::string_view DTypeName(DType type) {
  switch (type) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBf16:
      return "bf16";
    case DType::kI16:
      return "i16";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
  }
  KILN_UNREACHABLE();
}

std::optional<DType> ParseDType(absl::string_view name) {
  for (const DType type : {DType::kF32, DType::kF16, DType::kBf16, DType::kI16,
                           DType::kI32, DType::kI64}) {
    if (DTypeName(type) == name) return type;
  }
  return std::nullopt;
}

uint32_t DTypeBytes(DType type) {
  switch (type) {
    case DType::kF16:
    case DType::kBf16:
    case DType::kI16:
      return 2;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kI64:
      return 8;
  }
  KILN_UNREACHABLE();
}

}  // namespace kiln
