// Finding a plan and launching it. Nothing here allocates; on CUDA nothing
// locks or makes a system call of its own.

#ifndef KILN_RUNTIME_LAUNCH_H_
#define KILN_RUNTIME_LAUNCH_H_

#include <stddef.h>
#include <stdint.h>

#include "runtime/module_set.h"

namespace kiln::runtime {

// Index into modules.plans of the plan of entry `name` that serves `m`.
//   Errors: ENTRY_NOT_FOUND, TOKENS_OUT_OF_RANGE.
kiln_status_t FindPlan(const Modules& modules, const char* name, uint64_t m,
                       uint32_t* plan, kiln_error_t* error);

struct LaunchArguments {
  uint64_t m = 0;  // at least 1
  const void* params = nullptr;
  size_t params_bytes = 0;
  void* arena = nullptr;
  size_t arena_bytes = 0;
  CUstream_st* stream = nullptr;
};

// Checks the arguments against the plan, then enqueues (CUDA) or runs (CPU) it.
kiln_status_t LaunchPlan(const Modules& modules, const LoadedPlan& plan,
                         const LaunchArguments& arguments, kiln_error_t* error);

}  // namespace kiln::runtime

#endif  // KILN_RUNTIME_LAUNCH_H_
