// Failure: builds the caller's kiln_error_t without allocation.
//
//   return Failure(error, KILN_STATUS_ARENA_SHORT)
//          << "arena of " << given << " bytes, plan needs " << needed;

#ifndef KILN_RUNTIME_STATUS_H_
#define KILN_RUNTIME_STATUS_H_

#include <stddef.h>
#include <stdint.h>

#include <type_traits>

#include "runtime/kiln.h"

namespace kiln::runtime {

// Text of unknown origin, quoted: at most 96 characters, each outside printable
// ASCII shown as '?'.
struct Quoted {
  const char* text;
};

// The first `bytes` bytes in lower-case hexadecimal.
struct Hex {
  const uint8_t* data;
  size_t bytes;
};

class Failure {
 public:
  // `error` may be null. Cold: what leads here is not what a launch waits for.
  [[gnu::cold]] Failure(kiln_error_t* error, kiln_status_t code,
                        int32_t driver_code = 0)
      : error_(error), code_(code) {
    if (error_ == nullptr) return;
    error_->code = code;
    error_->driver_code = driver_code;
    error_->message[0] = '\0';
  }

  Failure& operator<<(const char* text);
  Failure& operator<<(Quoted quoted);
  Failure& operator<<(Hex hex);
  template <typename T>

  requires std::is_integral_v<T> Failure& operator<<(T value) {
    if constexpr (std::is_signed_v<T>) {
      if (value < 0) {
        *this << "-";
        return Number(uint64_t{0} - static_cast<uint64_t>(value));
      }
    }
    return Number(static_cast<uint64_t>(value));
  }

  // Characters that still fit.
  size_t room() const {
    return error_ == nullptr ? 0 : sizeof(error_->message) - 1 - used_;
  }

  // Implicit on purpose: a chain of << is what the function returns.
  operator kiln_status_t() const {  // NOLINT(google-explicit-constructor)
    return code_;
  }

 private:
  Failure& Number(uint64_t value);
  void Append(const char* text, size_t bytes);

  kiln_error_t* error_;
  kiln_status_t code_;
  size_t used_ = 0;
};

}  // namespace kiln::runtime

#endif  // KILN_RUNTIME_STATUS_H_
