#include "tests/support/fake_driver.h"

#include <algorithm>
#include <cstring>
#include <sstream>

namespace kiln::testing {

using runtime::kCudaErrorInvalidImage;
using runtime::kCudaErrorInvalidValue;
using runtime::kCudaErrorNotFound;
using runtime::kCudaSuccess;

namespace {

constexpr int kErrorInvalidContext = 201;
constexpr int kErrorInvalidHandle = 400;

bool ParseKernel(const std::string& line, CUfunc_st* function) {
  std::istringstream in(line);
  std::string word;
  if (!(in >> function->name)) return false;
  while (in >> word) {
    size_t offset = 0;
    size_t bytes = 0;
    if (std::sscanf(word.c_str(), "%zu:%zu", &offset, &bytes) == 2) {
      function->params.push_back({offset, bytes});
    } else if (std::sscanf(word.c_str(), "shared=%d",
                           &function->shared_bytes) != 1 &&
               std::sscanf(word.c_str(), "threads=%d",
                           &function->threads_max) != 1) {
      return false;
    }
  }
  return true;
}

}  // namespace

struct FakeDriverCalls {
  static FakeDriver& fake() { return FakeDriver::Get(); }

  static int Init(unsigned) {
    int result = kCudaSuccess;
    fake().Enter("cuInit", &result);
    return result;
  }

  static int DriverGetVersion(int* version) {
    int result = kCudaSuccess;
    if (!fake().Enter("cuDriverGetVersion", &result)) {
      *version = fake().driver_version;
    }
    return result;
  }

  static int GetErrorName(int error, const char** name) {
    switch (error) {
      case 2:
        *name = "CUDA_ERROR_OUT_OF_MEMORY";
        return kCudaSuccess;
      case 200:
        *name = "CUDA_ERROR_INVALID_IMAGE";
        return kCudaSuccess;
      case 500:
        *name = "CUDA_ERROR_NOT_FOUND";
        return kCudaSuccess;
      default:
        return kCudaErrorInvalidValue;
    }
  }

  static int DeviceGetAttribute(int* value, int attribute, int) {
    int result = kCudaSuccess;
    if (fake().Enter("cuDeviceGetAttribute", &result)) return result;
    const auto found = fake().device_attributes.find(attribute);
    if (found == fake().device_attributes.end()) return kCudaErrorInvalidValue;
    *value = found->second;
    return kCudaSuccess;
  }

  static int CtxGetCurrent(CUctx_st** context) {
    int result = kCudaSuccess;
    if (!fake().Enter("cuCtxGetCurrent", &result)) *context = fake().current();
    return result;
  }

  static int CtxGetDevice(int* device) {
    int result = kCudaSuccess;
    if (fake().Enter("cuCtxGetDevice", &result)) return result;
    if (fake().current() == nullptr) return kErrorInvalidContext;
    *device = fake().current()->device;
    return kCudaSuccess;
  }

  static int CtxPushCurrent(CUctx_st* context) {
    int result = kCudaSuccess;
    if (!fake().Enter("cuCtxPushCurrent", &result)) {
      fake().context_stack.push_back(context);
    }
    return result;
  }

  // A real driver that fails here has lost the context; so has this one, which
  // keeps the depth of the stack comparable.
  static int CtxPopCurrent(CUctx_st** context) {
    int result = kCudaSuccess;
    fake().Enter("cuCtxPopCurrent", &result);
    if (fake().context_stack.empty()) return kErrorInvalidContext;
    *context = fake().context_stack.back();
    fake().context_stack.pop_back();
    return result;
  }

  static int ModuleLoadData(CUmod_st** module, const void* image) {
    int result = kCudaSuccess;
    if (fake().Enter("cuModuleLoadData", &result)) return result;
    if (fake().current() == nullptr) return kErrorInvalidContext;
    auto loaded = std::make_unique<CUmod_st>();
    loaded->context = fake().current();
    std::istringstream lines(static_cast<const char*>(image));
    std::string line;
    while (std::getline(lines, line)) {
      CUfunc_st function;
      if (!ParseKernel(line, &function)) return kCudaErrorInvalidImage;
      function.module = loaded.get();
      loaded->functions[function.name] = function;
    }
    if (loaded->functions.empty()) return kCudaErrorInvalidImage;
    fake().modules_.insert(loaded.get());
    *module = loaded.release();
    return kCudaSuccess;
  }

  // A failed unload has freed the module all the same, as far as a caller can
  // do anything about it.
  static int ModuleUnload(CUmod_st* module) {
    int result = kCudaSuccess;
    fake().Enter("cuModuleUnload", &result);
    if (fake().modules_.erase(module) == 0) return kErrorInvalidHandle;
    delete module;
    return result;
  }

  static int ModuleGetFunction(CUfunc_st** function, CUmod_st* module,
                               const char* name) {
    int result = kCudaSuccess;
    if (fake().Enter("cuModuleGetFunction", &result)) return result;
    const auto found = module->functions.find(name);
    if (found == module->functions.end()) return kCudaErrorNotFound;
    *function = &found->second;
    return kCudaSuccess;
  }

  static int FuncLoad(CUfunc_st* function) {
    int result = kCudaSuccess;
    if (!fake().Enter("cuFuncLoad", &result)) function->loaded = true;
    return result;
  }

  static int FuncGetParamInfo(CUfunc_st* function, size_t index, size_t* offset,
                              size_t* bytes) {
    int result = kCudaSuccess;
    if (fake().Enter("cuFuncGetParamInfo", &result)) return result;
    if (index >= function->params.size()) return kCudaErrorInvalidValue;
    *offset = function->params[index][0];
    *bytes = function->params[index][1];
    return kCudaSuccess;
  }

  static int FuncGetAttribute(int* value, int attribute, CUfunc_st* function) {
    int result = kCudaSuccess;
    if (fake().Enter("cuFuncGetAttribute", &result)) return result;
    if (attribute == runtime::kFunctionMaxThreadsPerBlock) {
      *value = function->threads_max;
    } else if (attribute == runtime::kFunctionSharedBytes) {
      *value = function->shared_bytes;
    } else {
      return kCudaErrorInvalidValue;
    }
    return kCudaSuccess;
  }

  static int FuncSetAttribute(CUfunc_st* function, int attribute, int value) {
    int result = kCudaSuccess;
    if (fake().Enter("cuFuncSetAttribute", &result)) return result;
    if (attribute != runtime::kFunctionMaxDynamicSharedBytes) {
      return kCudaErrorInvalidValue;
    }
    function->dynamic_shared_bytes_max = value;
    return kCudaSuccess;
  }

  static int MemAlloc(uint64_t* memory, size_t bytes) {
    int result = kCudaSuccess;
    if (fake().Enter("cuMemAlloc", &result)) return result;
    if (fake().current() == nullptr) return kErrorInvalidContext;
    if (bytes == 0) return kCudaErrorInvalidValue;
    // Room to begin at a multiple of 256, as the real driver does.
    std::vector<uint8_t> piece(bytes + 255);
    *memory = (reinterpret_cast<uintptr_t>(piece.data()) + 255) / 256 * 256;
    fake().memory_[*memory] = std::move(piece);
    return kCudaSuccess;
  }

  // A failed call has freed the memory all the same.
  static int MemFree(uint64_t memory) {
    int result = kCudaSuccess;
    fake().Enter("cuMemFree", &result);
    return fake().memory_.erase(memory) == 1 ? result : kCudaErrorInvalidValue;
  }

  // `bytes` bytes at `memory` lie in one live piece.
  static bool Inside(uint64_t memory, size_t bytes) {
    auto at = fake().memory_.upper_bound(memory);
    if (at == fake().memory_.begin()) return false;
    --at;
    return memory - at->first + bytes <= at->second.size() - 255;
  }

  static int MemSet(uint64_t memory, unsigned char value, size_t bytes) {
    int result = kCudaSuccess;
    if (fake().Enter("cuMemsetD8", &result)) return result;
    if (!Inside(memory, bytes)) return kCudaErrorInvalidValue;
    std::memset(reinterpret_cast<void*>(memory), value, bytes);
    return kCudaSuccess;
  }

  static int MemCopyIn(uint64_t to, const void* from, size_t bytes) {
    int result = kCudaSuccess;
    if (fake().Enter("cuMemcpyHtoD", &result)) return result;
    if (!Inside(to, bytes)) return kCudaErrorInvalidValue;
    std::memcpy(reinterpret_cast<void*>(to), from, bytes);
    return kCudaSuccess;
  }

  static int MemCopyOut(void* to, uint64_t from, size_t bytes) {
    int result = kCudaSuccess;
    if (fake().Enter("cuMemcpyDtoH", &result)) return result;
    if (!Inside(from, bytes)) return kCudaErrorInvalidValue;
    std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
    return kCudaSuccess;
  }

  static int LaunchKernel(CUfunc_st* function, unsigned grid_x, unsigned grid_y,
                          unsigned grid_z, unsigned block_x, unsigned block_y,
                          unsigned block_z, unsigned shared_bytes,
                          CUstream_st* stream, void** params, void** extra) {
    int result = kCudaSuccess;
    if (fake().Enter("cuLaunchKernel", &result)) return result;
    const runtime::LaunchConfig config = {{grid_x, grid_y, grid_z},
                                          {block_x, block_y, block_z},
                                          shared_bytes,
                                          stream,
                                          nullptr,
                                          0};
    return Record(config, function, params, extra);
  }

  static int LaunchKernelEx(const runtime::LaunchConfig* config,
                            CUfunc_st* function, void** params, void** extra) {
    int result = kCudaSuccess;
    if (fake().Enter("cuLaunchKernelEx", &result)) return result;
    return Record(*config, function, params, extra);
  }

  static int Record(const runtime::LaunchConfig& config, CUfunc_st* function,
                    void** params, void** extra) {
    if (params != nullptr) return kCudaErrorInvalidValue;
    FakeLaunch launch;
    launch.kernel = function->name;
    launch.context = function->module->context;
    launch.current = fake().current();
    std::copy_n(config.grid, 3, launch.grid.begin());
    std::copy_n(config.block, 3, launch.block.begin());
    launch.shared_bytes = config.shared_bytes;
    launch.stream = config.stream;
    for (unsigned i = 0; i < config.attribute_count; ++i) {
      const runtime::LaunchAttribute& attribute = config.attributes[i];
      if (attribute.id != runtime::kLaunchProgrammaticStreamSerialization) {
        return kCudaErrorInvalidValue;
      }
      launch.overlapped = attribute.flag != 0;
    }
    const void* block = nullptr;
    size_t bytes = 0;
    for (void** at = extra; at != nullptr && *at != nullptr; at += 2) {
      const auto key = reinterpret_cast<uintptr_t>(*at);
      if (key == runtime::kLaunchParamBufferPointer) block = at[1];
      if (key == runtime::kLaunchParamBufferSize) {
        bytes = *static_cast<size_t*>(at[1]);
      }
    }
    // The real driver refuses a block of another size than the kernel's.
    size_t declared = 0;
    for (const auto& param : function->params) declared = param[0] + param[1];
    if (bytes != declared) return kCudaErrorInvalidValue;
    const auto* begin = static_cast<const uint8_t*>(block);
    if (bytes != 0) launch.params.assign(begin, begin + bytes);
    if (fake().on_launch) fake().on_launch(launch);
    fake().launches_.push_back(launch);
    return kCudaSuccess;
  }
};

FakeDriver& FakeDriver::Get() {
  static FakeDriver fake;
  return fake;
}

FakeDriver::FakeDriver() {
  table_.init = FakeDriverCalls::Init;
  table_.driver_get_version = FakeDriverCalls::DriverGetVersion;
  table_.get_error_name = FakeDriverCalls::GetErrorName;
  table_.device_get_attribute = FakeDriverCalls::DeviceGetAttribute;
  table_.ctx_get_current = FakeDriverCalls::CtxGetCurrent;
  table_.ctx_get_device = FakeDriverCalls::CtxGetDevice;
  table_.ctx_push_current = FakeDriverCalls::CtxPushCurrent;
  table_.ctx_pop_current = FakeDriverCalls::CtxPopCurrent;
  table_.module_load_data = FakeDriverCalls::ModuleLoadData;
  table_.module_unload = FakeDriverCalls::ModuleUnload;
  table_.module_get_function = FakeDriverCalls::ModuleGetFunction;
  table_.func_load = FakeDriverCalls::FuncLoad;
  table_.func_get_param_info = FakeDriverCalls::FuncGetParamInfo;
  table_.func_get_attribute = FakeDriverCalls::FuncGetAttribute;
  table_.func_set_attribute = FakeDriverCalls::FuncSetAttribute;
  table_.mem_alloc = FakeDriverCalls::MemAlloc;
  table_.mem_free = FakeDriverCalls::MemFree;
  table_.mem_set = FakeDriverCalls::MemSet;
  table_.mem_copy_in = FakeDriverCalls::MemCopyIn;
  table_.mem_copy_out = FakeDriverCalls::MemCopyOut;
  table_.launch_kernel = FakeDriverCalls::LaunchKernel;
  table_.launch_kernel_ex = FakeDriverCalls::LaunchKernelEx;
  Reset();
}

void FakeDriver::Reset() {
  ClearLog();
  for (CUmod_st* module : modules_) delete module;
  modules_.clear();
  memory_.clear();
  on_launch = nullptr;
  contexts_[0].device = 0;
  contexts_[1].device = 1;
  context_stack = {&contexts_[0]};
  driver_version = 13000;
  device_attributes = {
      {runtime::kDeviceComputeCapabilityMajor, 9},
      {runtime::kDeviceComputeCapabilityMinor, 0},
      {runtime::kDeviceMaxThreadsPerBlock, 1024},
      {runtime::kDeviceMaxBlockDimX + 0, 1024},
      {runtime::kDeviceMaxBlockDimX + 1, 1024},
      {runtime::kDeviceMaxBlockDimX + 2, 64},
      {runtime::kDeviceMaxGridDimX + 0, 2147483647},
      {runtime::kDeviceMaxGridDimX + 1, 65535},
      {runtime::kDeviceMaxGridDimX + 2, 65535},
      {runtime::kDeviceMaxSharedBytes, 49152},
      {runtime::kDeviceMaxSharedBytesOptin, 232448},
  };
}

int FakeDriver::CountOf(const std::string& symbol) const {
  int count = 0;
  for (const std::string& call : calls_) count += call == symbol ? 1 : 0;
  return count;
}

const CUfunc_st* FakeDriver::Find(const std::string& kernel) const {
  for (const CUmod_st* module : modules_) {
    const auto found = module->functions.find(kernel);
    if (found != module->functions.end()) return &found->second;
  }
  return nullptr;
}

bool FakeDriver::Enter(const char* symbol, int* result) {
  calls_.emplace_back(symbol);
  if (calls_.size() != fail_at_) return false;
  failed_ = true;
  *result = fail_result_;
  return true;
}

}  // namespace kiln::testing
