// Any bytes: DecodeCanonical answers with DataLoss or with a record.

#include <cstdint>

#include "compiler/base/check.h"
#include "compiler/base/digest.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view bytes(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<kiln::CanonicalRecord> record =
      kiln::DecodeCanonical(bytes);
  if (!record.ok()) {
    KILN_CHECK(absl::IsDataLoss(record.status()));
    return 0;
  }
  // Every field takes at least its tag, its name's length and one byte.
  KILN_CHECK(record->fields.size() * 6 <= size);
  return 0;
}
