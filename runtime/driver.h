// kiln_driver_t: the CUDA driver as one table of function pointers. The real
// table comes from libcuda.so.1, opened at run time; tests pass their own. No
// toolkit header is included: what is needed of the driver's ABI is here and in
// driver_symbols.inc.

#ifndef KILN_RUNTIME_DRIVER_H_
#define KILN_RUNTIME_DRIVER_H_

#include <stddef.h>
#include <stdint.h>

#include "runtime/kiln.h"

struct CUctx_st;
struct CUmod_st;
struct CUfunc_st;
struct CUstream_st;

namespace kiln::runtime {
struct LaunchConfig;
}

struct kiln_driver_t {
#define KILN_DRIVER_SYMBOL(member, symbol, parameters) int(*member) parameters;
#include "runtime/driver_symbols.inc"
#undef KILN_DRIVER_SYMBOL
};

namespace kiln::runtime {

// CUresult.
inline constexpr int kCudaSuccess = 0;
inline constexpr int kCudaErrorInvalidValue = 1;
inline constexpr int kCudaErrorOutOfMemory = 2;
inline constexpr int kCudaErrorInvalidImage = 200;
inline constexpr int kCudaErrorNoBinaryForGpu = 209;
inline constexpr int kCudaErrorNotFound = 500;

// CUdevice_attribute.
inline constexpr int kDeviceMaxThreadsPerBlock = 1;
inline constexpr int kDeviceMaxBlockDimX = 2;  // y and z follow
inline constexpr int kDeviceMaxGridDimX = 5;   // y and z follow
inline constexpr int kDeviceMaxSharedBytes = 8;
inline constexpr int kDeviceComputeCapabilityMajor = 75;
inline constexpr int kDeviceComputeCapabilityMinor = 76;
inline constexpr int kDeviceMaxSharedBytesOptin = 97;

// CUfunction_attribute.
inline constexpr int kFunctionMaxThreadsPerBlock = 0;
inline constexpr int kFunctionSharedBytes = 1;
inline constexpr int kFunctionMaxDynamicSharedBytes = 8;

// CUlaunchAttribute and CUlaunchConfig.
struct LaunchAttribute {
  int id;
  int pad;

  union {
    int flag;
    char bytes[64];
  };
};

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  CUstream_st* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfig) == 56,
              "as cuda.h has them");

// CUlaunchAttributeID.
inline constexpr int kLaunchProgrammaticStreamSerialization = 6;

// Keys of cuLaunchKernel's `extra` array.
inline constexpr uintptr_t kLaunchParamEnd = 0;
inline constexpr uintptr_t kLaunchParamBufferPointer = 1;
inline constexpr uintptr_t kLaunchParamBufferSize = 2;

// cuFuncGetParamInfo and cuFuncLoad came with this driver.
inline constexpr uint32_t kDriverVersionMin = 12040;

// The table of libcuda.so.1, all symbols or none. Opened on first use and kept
// for the life of the process; a failure is tried again next time. Thread-safe.
//   Errors: NO_DRIVER.
kiln_status_t RealDriver(const kiln_driver_t** driver, kiln_error_t* error);

}  // namespace kiln::runtime

#endif  // KILN_RUNTIME_DRIVER_H_
