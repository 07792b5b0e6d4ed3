// CpuProgram: one ELF shared object of a bundle, loaded from sealed anonymous
// memory.

#ifndef KILN_RUNTIME_CPU_PROGRAM_H_
#define KILN_RUNTIME_CPU_PROGRAM_H_

#include <stddef.h>
#include <stdint.h>

#include "runtime/kiln.h"

namespace kiln::runtime {

// Runs one block of a step. `args` is the packed argument structure.
using CpuKernel = void (*)(const void* args, uint32_t block_x, uint32_t block_y,
                           uint32_t block_z);

// Loads `bytes` bytes of ELF. Refuses, before the dynamic loader sees them,
// objects that would run code on load or bring in other files: initialisers
// and finalisers, indirect functions, needed libraries, search paths,
// executable stacks, text relocations. Writes a dlopen handle.
//   Errors: PROGRAM_REFUSED, SYSTEM.
kiln_status_t LoadCpuProgram(const void* data, size_t bytes, void** handle,
                             kiln_error_t* error);
void UnloadCpuProgram(void* handle);

// Finds `name` and its NAME_args_bytes, which must equal `param_bytes`.
//   Errors: KERNEL_MISSING, PARAMETER_LAYOUT.
kiln_status_t FindCpuKernel(void* handle, const char* name,
                            uint32_t param_bytes, CpuKernel* kernel,
                            kiln_error_t* error);

// The check that LoadCpuProgram makes first. Null if the object is acceptable,
// else what is wrong with it. Reads only within `bytes`.
const char* CheckCpuObject(const void* data, size_t bytes);

}  // namespace kiln::runtime

#endif  // KILN_RUNTIME_CPU_PROGRAM_H_
