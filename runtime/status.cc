#include "runtime/status.h"

#include <string.h>

namespace kiln::runtime {

void Failure::Append(const char* text, size_t bytes) {
  if (error_ == nullptr) return;
  const size_t left = room();
  const size_t take = bytes < left ? bytes : left;
  memcpy(error_->message + used_, text, take);
  used_ += take;
  error_->message[used_] = '\0';
}

Failure& Failure::operator<<(const char* text) {
  Append(text, strlen(text));
  return *this;
}

Failure& Failure::operator<<(Quoted quoted) {
  constexpr size_t kShown = 96;
  Append("'", 1);
  size_t n = 0;
  for (; n < kShown && quoted.text[n] != '\0'; ++n) {
    const char c = quoted.text[n];
    Append(c >= 0x20 && c < 0x7f ? &c : "?", 1);
  }
  if (quoted.text[n] != '\0') Append("...", 3);
  Append("'", 1);
  return *this;
}

Failure& Failure::operator<<(Hex hex) {
  static const char kDigits[] = "0123456789abcdef";
  for (size_t i = 0; i < hex.bytes; ++i) {
    const char pair[2] = {kDigits[hex.data[i] >> 4], kDigits[hex.data[i] & 15]};
    Append(pair, 2);
  }
  return *this;
}

Failure& Failure::Number(uint64_t value) {
  char digits[20];
  size_t at = sizeof(digits);
  do {
    digits[--at] = static_cast<char>('0' + value % 10);
    value /= 10;
  } while (value != 0);
  Append(digits + at, sizeof(digits) - at);
  return *this;
}

}  // namespace kiln::runtime

extern "C" const char* kiln_status_name(kiln_status_t status) {
#define KILN_STATUS_CASE_(name) \
  case name:                    \
    return #name;
  switch (status) {
    KILN_STATUS_CASE_(KILN_STATUS_OK)
    KILN_STATUS_CASE_(KILN_STATUS_INVALID_ARGUMENT)
    KILN_STATUS_CASE_(KILN_STATUS_STRUCT_SIZE)
    KILN_STATUS_CASE_(KILN_STATUS_CLOSED_HANDLE)
    KILN_STATUS_CASE_(KILN_STATUS_OUT_OF_MEMORY)
    KILN_STATUS_CASE_(KILN_STATUS_SYSTEM)
    KILN_STATUS_CASE_(KILN_STATUS_DRIVER)
    KILN_STATUS_CASE_(KILN_STATUS_FILE_NOT_FOUND)
    KILN_STATUS_CASE_(KILN_STATUS_FILE_UNREADABLE)
    KILN_STATUS_CASE_(KILN_STATUS_BUNDLE_NOT_A_BUNDLE)
    KILN_STATUS_CASE_(KILN_STATUS_BUNDLE_VERSION)
    KILN_STATUS_CASE_(KILN_STATUS_BUNDLE_TRUNCATED)
    KILN_STATUS_CASE_(KILN_STATUS_BUNDLE_DAMAGED)
    KILN_STATUS_CASE_(KILN_STATUS_BUNDLE_MALFORMED)
    KILN_STATUS_CASE_(KILN_STATUS_BUNDLE_LIMIT)
    KILN_STATUS_CASE_(KILN_STATUS_ROOT_MISMATCH)
    KILN_STATUS_CASE_(KILN_STATUS_TARGET_MISSING)
    KILN_STATUS_CASE_(KILN_STATUS_TARGET_MISMATCH)
    KILN_STATUS_CASE_(KILN_STATUS_TARGET_AMBIGUOUS)
    KILN_STATUS_CASE_(KILN_STATUS_NO_DRIVER)
    KILN_STATUS_CASE_(KILN_STATUS_DRIVER_TOO_OLD)
    KILN_STATUS_CASE_(KILN_STATUS_NO_CONTEXT)
    KILN_STATUS_CASE_(KILN_STATUS_DEVICE_LIMIT)
    KILN_STATUS_CASE_(KILN_STATUS_PROGRAM_REFUSED)
    KILN_STATUS_CASE_(KILN_STATUS_KERNEL_MISSING)
    KILN_STATUS_CASE_(KILN_STATUS_PARAMETER_LAYOUT)
    KILN_STATUS_CASE_(KILN_STATUS_PREDICTED_PLANS)
    KILN_STATUS_CASE_(KILN_STATUS_UNQUALIFIED_PLANS)
    KILN_STATUS_CASE_(KILN_STATUS_SELFTEST_MISMATCH)
    KILN_STATUS_CASE_(KILN_STATUS_ENTRY_NOT_FOUND)
    KILN_STATUS_CASE_(KILN_STATUS_ENTRY_FOREIGN)
    KILN_STATUS_CASE_(KILN_STATUS_TOKENS_OUT_OF_RANGE)
    KILN_STATUS_CASE_(KILN_STATUS_PARAMS_MISSING)
    KILN_STATUS_CASE_(KILN_STATUS_PARAMS_SHORT)
    KILN_STATUS_CASE_(KILN_STATUS_PARAM_NULL)
    KILN_STATUS_CASE_(KILN_STATUS_ARENA_MISSING)
    KILN_STATUS_CASE_(KILN_STATUS_ARENA_SHORT)
    KILN_STATUS_CASE_(KILN_STATUS_ARENA_MISALIGNED)
    KILN_STATUS_CASE_(KILN_STATUS_STREAM_NOT_ALLOWED)
    KILN_STATUS_CASE_(KILN_STATUS_PARAM_MISALIGNED)
  }
#undef KILN_STATUS_CASE_
  return "KILN_STATUS_UNKNOWN";
}
