#include "tests/support/idle_driver.h"

#include <cstdint>
#include <vector>

#include "tests/support/tiny_bundle.h"

namespace kiln::testing {
namespace {

int g_object = 0;

template <typename T>
T* Object() {
  return reinterpret_cast<T*>(&g_object);
}

// Parameters of fc1 and fc2, as the bundle declares them.
const std::vector<std::vector<KernelParam>>& Layouts() {
  static const std::vector<std::vector<KernelParam>> layouts = [] {
    std::vector<std::vector<KernelParam>> out(2);
    const BundleSection section = TinyCudaSection();
    for (const auto& program : section.programs) {
      for (const Kernel& kernel : program->kernels) {
        if (kernel.entry == "fc1") out[0] = kernel.params;
        if (kernel.entry == "fc2") out[1] = kernel.params;
      }
    }
    return out;
  }();
  return layouts;
}

}  // namespace

kiln_driver_t IdleDriver() {
  kiln_driver_t driver = {};
  driver.init = [](unsigned) { return 0; };
  driver.driver_get_version = [](int* version) {
    *version = 13000;
    return 0;
  };
  driver.get_error_name = [](int, const char** name) {
    *name = "";
    return 0;
  };
  driver.device_get_attribute = [](int* value, int attribute, int) {
    *value = attribute == runtime::kDeviceComputeCapabilityMajor   ? 9
             : attribute == runtime::kDeviceComputeCapabilityMinor ? 0
                                                                   : 1 << 20;
    return 0;
  };
  driver.ctx_get_current = [](CUctx_st** context) {
    *context = Object<CUctx_st>();
    return 0;
  };
  driver.ctx_get_device = [](int* device) {
    *device = 0;
    return 0;
  };
  driver.ctx_push_current = [](CUctx_st*) { return 0; };
  driver.ctx_pop_current = [](CUctx_st**) { return 0; };
  driver.module_load_data = [](CUmod_st** module, const void*) {
    *module = Object<CUmod_st>();
    return 0;
  };
  driver.module_unload = [](CUmod_st*) { return 0; };
  driver.module_get_function = [](CUfunc_st** function, CUmod_st*,
                                  const char* name) {
    // '1' of "fc1" or '2' of "fc2".
    *function = reinterpret_cast<CUfunc_st*>(static_cast<uintptr_t>(name[2]));
    return 0;
  };
  driver.func_load = [](CUfunc_st*) { return 0; };
  driver.func_get_param_info = [](CUfunc_st* function, size_t index,
                                  size_t* offset, size_t* bytes) {
    const auto& layout = Layouts()[reinterpret_cast<uintptr_t>(function) - '1'];
    *offset = layout[index].offset;
    *bytes = layout[index].bytes;
    return 0;
  };
  driver.func_get_attribute = [](int* value, int, CUfunc_st*) {
    *value = 1024;
    return 0;
  };
  driver.func_set_attribute = [](CUfunc_st*, int, int) { return 0; };
  driver.mem_alloc = [](uint64_t*, size_t) {
    return runtime::kCudaErrorOutOfMemory;
  };
  driver.launch_kernel = [](CUfunc_st*, unsigned, unsigned, unsigned, unsigned,
                            unsigned, unsigned, unsigned, CUstream_st*, void**,
                            void**) { return 0; };
  driver.launch_kernel_ex = [](const runtime::LaunchConfig*, CUfunc_st*, void**,
                               void**) { return 0; };
  return driver;
}

}  // namespace kiln::testing
