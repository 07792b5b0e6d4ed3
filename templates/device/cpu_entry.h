// How a CPU kernel is exported.
//
// Every CPU entry has the signature
//   void NAME(const void* args, uint32_t bx, uint32_t by, uint32_t bz)
// where args points at the packed argument block (each argument at its natural
// alignment, as CUDA lays parameters out) and bx, by, bz name the block. A
// constant uint32_t NAME_args_bytes states the size of that block, so that an
// inspector can compare it with a plan.
#ifndef KILN_DEVICE_CPU_ENTRY_H_
#define KILN_DEVICE_CPU_ENTRY_H_

#include "device/platform.h"

#define KILN_CPU_JOIN_(a, b) a##b
#define KILN_CPU_JOIN(a, b) KILN_CPU_JOIN_(a, b)

// A prefix of every exported symbol; lets one process hold several
// specialisations of one template.
#ifndef KILN_CPU_PREFIX
#define KILN_CPU_PREFIX
#endif

#define KILN_CPU_SYMBOL(name) KILN_CPU_JOIN(KILN_CPU_PREFIX, name)

// Exports `function` (const Args&, u32 bx, u32 by, u32 bz) under `name`. The
// last member of Args must be 8 bytes wide, so that the struct has no padding
// that a packed argument block lacks.
#define KILN_CPU_ENTRY(name, Args, function)                           \
  extern "C" {                                                         \
  extern __attribute__((visibility("default")))                        \
  const kd::u32 KILN_CPU_JOIN(KILN_CPU_SYMBOL(name), _args_bytes);     \
  const kd::u32 KILN_CPU_JOIN(KILN_CPU_SYMBOL(name),                   \
                              _args_bytes) = sizeof(Args);             \
  __attribute__((visibility("default"))) void KILN_CPU_SYMBOL(name)(   \
      const void* args, kd::u32 bx, kd::u32 by, kd::u32 bz);           \
  void KILN_CPU_SYMBOL(name)(const void* args, kd::u32 bx, kd::u32 by, \
                             kd::u32 bz) {                             \
    function(*static_cast<const Args*>(args), bx, by, bz);             \
  }                                                                    \
  }

#endif  // KILN_DEVICE_CPU_ENTRY_H_
