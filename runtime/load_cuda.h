// The CUDA half of loading a section: the device, the modules, the preflight.

#ifndef KILN_RUNTIME_LOAD_CUDA_H_
#define KILN_RUNTIME_LOAD_CUDA_H_

#include <stdint.h>

#include "runtime/module_set.h"

namespace kiln::runtime {

struct CudaDevice {
  const kiln_driver_t* driver = nullptr;
  uint32_t driver_version = 0;
  CUctx_st* context = nullptr;
  uint32_t capability = 0;  // 10 * major + minor
  uint64_t threads_max = 0;
  uint64_t block_max[3] = {0, 0, 0};
  uint64_t grid_max[3] = {0, 0, 0};
  uint64_t shared_bytes_default = 0;  // per block, without opting in
  uint64_t shared_bytes_max = 0;      // per block, with cuFuncSetAttribute
};

// Driver, version and context.
//   Errors: NO_DRIVER, DRIVER_TOO_OLD, NO_CONTEXT, DRIVER.
kiln_status_t OpenCudaDevice(const LoadOptions& options, CudaDevice* device,
                             kiln_error_t* error);
// The rest of `device`; its context must be current.
kiln_status_t QueryCudaDevice(CudaDevice* device, kiln_error_t* error);

// Loads the programs of modules->section into the current context, resolves
// every kernel, compares parameter layouts, checks every step against the
// device and opts in to large shared memory. On failure UnloadCuda cleans up.
kiln_status_t LoadCuda(const CudaDevice& device, Modules* modules,
                       kiln_error_t* error);
// Goes on after an error and returns the first.
kiln_status_t UnloadCuda(Modules* modules, kiln_error_t* error);

}  // namespace kiln::runtime

#endif  // KILN_RUNTIME_LOAD_CUDA_H_
