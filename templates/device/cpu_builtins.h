// The memory functions a compiler may call even in freestanding code. A CPU
// program links against nothing, so it carries its own, hidden.
//
// Hosted builds (tests) keep those of their C library.
#ifndef KILN_DEVICE_CPU_BUILTINS_H_
#define KILN_DEVICE_CPU_BUILTINS_H_

#include "device/platform.h"

#if !__STDC_HOSTED__

#define KILN_HIDDEN_C extern "C" __attribute__((visibility("hidden"), used))

// The empty asm keeps the compiler from turning a loop back into a call of the
// function that contains it.
#define KILN_KEEP_LOOP() asm volatile("" ::: "memory")

namespace kd {

typedef u64 AliasedU64 __attribute__((may_alias, aligned(1)));

KILN_FN void CopyUp(u8* to, const u8* from, u64 count) {
  for (; count >= 8; count -= 8, to += 8, from += 8) {
    *reinterpret_cast<AliasedU64*>(to) =
        *reinterpret_cast<const AliasedU64*>(from);
    KILN_KEEP_LOOP();
  }
  for (; count != 0; --count) {
    *to++ = *from++;
    KILN_KEEP_LOOP();
  }
}

}  // namespace kd

KILN_HIDDEN_C void* memcpy(void* to, const void* from, __SIZE_TYPE__ count) {
  kd::CopyUp(static_cast<kd::u8*>(to), static_cast<const kd::u8*>(from), count);
  return to;
}

KILN_HIDDEN_C void* memmove(void* to, const void* from, __SIZE_TYPE__ count) {
  kd::u8* out = static_cast<kd::u8*>(to);
  const kd::u8* in = static_cast<const kd::u8*>(from);
  if (out <= in || out >= in + count) {
    kd::CopyUp(out, in, count);
    return to;
  }
  for (; count != 0; --count) {
    out[count - 1] = in[count - 1];
    KILN_KEEP_LOOP();
  }
  return to;
}

KILN_HIDDEN_C void* memset(void* to, int value, __SIZE_TYPE__ count) {
  kd::u8* out = static_cast<kd::u8*>(to);
  const kd::u64 word = static_cast<kd::u8>(value) * 0x0101010101010101ull;
  for (; count >= 8; count -= 8, out += 8) {
    *reinterpret_cast<kd::AliasedU64*>(out) = word;
    KILN_KEEP_LOOP();
  }
  for (; count != 0; --count) {
    *out++ = static_cast<kd::u8>(value);
    KILN_KEEP_LOOP();
  }
  return to;
}

KILN_HIDDEN_C int memcmp(const void* a, const void* b, __SIZE_TYPE__ count) {
  const kd::u8* x = static_cast<const kd::u8*>(a);
  const kd::u8* y = static_cast<const kd::u8*>(b);
  for (; count != 0; --count, ++x, ++y) {
    if (*x != *y) return *x < *y ? -1 : 1;
    KILN_KEEP_LOOP();
  }
  return 0;
}

#endif  // !__STDC_HOSTED__

#endif  // KILN_DEVICE_CPU_BUILTINS_H_
