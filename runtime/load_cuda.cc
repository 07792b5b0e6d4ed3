#include "runtime/load_cuda.h"

#include <stdlib.h>

#include "runtime/status.h"

namespace kiln::runtime {
namespace {

struct ResolvedKernel {
  CUfunc_st* function;
  uint64_t threads_max;
  uint64_t static_shared_bytes;
  uint64_t dynamic_shared_bytes;  // most that a step asks for
};

kiln_status_t Attribute(const kiln_driver_t* driver, int device, int attribute,
                        uint64_t* value, kiln_error_t* error) {
  int number = 0;
  const int result = driver->device_get_attribute(&number, attribute, device);
  if (result != kCudaSuccess) {
    return DriverFailure(driver, KILN_STATUS_DRIVER, result,
                         "cuDeviceGetAttribute", nullptr, error);
  }
  *value = number < 0 ? 0 : static_cast<uint64_t>(number);
  return KILN_STATUS_OK;
}

// Every declared parameter must lie where the driver says it lies. Asking past
// the last one would tell whether the binary has more, but that call fails by
// design, and compute-sanitizer reports it as an error of the application. The
// number of parameters was compared with the binary itself when the bundle was
// written, and the root covers both.
kiln_status_t CheckLayout(const kiln_driver_t* driver, const BundleView& view,
                          const kiln_format_kernel_t& kernel,
                          CUfunc_st* function, kiln_error_t* error) {
  const char* name = view.Text(kernel.name);
  for (uint32_t i = 0; i < kernel.params.count; ++i) {
    size_t offset = 0;
    size_t bytes = 0;
    const int result =
        driver->func_get_param_info(function, i, &offset, &bytes);
    if (result == kCudaErrorInvalidValue) {
      return Failure(error, KILN_STATUS_PARAMETER_LAYOUT)
             << "kernel " << Quoted{name} << " has only " << i
             << " parameters in its binary, bundle declares "
             << kernel.params.count;
    }
    if (result != kCudaSuccess) {
      return DriverFailure(driver, KILN_STATUS_DRIVER, result,
                           "cuFuncGetParamInfo", name, error);
    }
    const kiln_format_kernel_param_t& declared =
        view.kernel_params[kernel.params.first + i];
    if (offset != declared.offset || bytes != declared.bytes) {
      return Failure(error, KILN_STATUS_PARAMETER_LAYOUT)
             << "kernel " << Quoted{name} << " parameter " << i << " has "
             << bytes << " bytes at offset " << offset
             << " in its binary, bundle declares " << declared.bytes << " at "
             << declared.offset;
    }
  }
  return KILN_STATUS_OK;
}

kiln_status_t ResolveKernel(const kiln_driver_t* driver, const BundleView& view,
                            const kiln_format_kernel_t& kernel,
                            CUmod_st* module, ResolvedKernel* resolved,
                            kiln_error_t* error) {
  const char* name = view.Text(kernel.name);
  int result = driver->module_get_function(&resolved->function, module, name);
  if (result != kCudaSuccess) {
    return DriverFailure(driver,
                         result == kCudaErrorNotFound
                             ? KILN_STATUS_KERNEL_MISSING
                             : KILN_STATUS_DRIVER,
                         result, "cuModuleGetFunction", name, error);
  }
  // Loading is lazy by default; a first launch inside a capture must not be
  // the one that loads.
  result = driver->func_load(resolved->function);
  if (result != kCudaSuccess) {
    return DriverFailure(driver, KILN_STATUS_DRIVER, result, "cuFuncLoad", name,
                         error);
  }
  const kiln_status_t layout =
      CheckLayout(driver, view, kernel, resolved->function, error);
  if (layout != KILN_STATUS_OK) return layout;

  const struct {
    int attribute;
    uint64_t* value;
  } wanted[] = {
      {kFunctionMaxThreadsPerBlock, &resolved->threads_max},
      {kFunctionSharedBytes, &resolved->static_shared_bytes},
  };

  for (const auto& want : wanted) {
    int value = 0;
    result =
        driver->func_get_attribute(&value, want.attribute, resolved->function);
    if (result != kCudaSuccess) {
      return DriverFailure(driver, KILN_STATUS_DRIVER, result,
                           "cuFuncGetAttribute", name, error);
    }
    *want.value = value < 0 ? 0 : static_cast<uint64_t>(value);
  }
  return KILN_STATUS_OK;
}

kiln_status_t LoadPrograms(const kiln_driver_t* driver, Modules* modules,
                           ResolvedKernel* kernels, uint32_t first_kernel,
                           kiln_error_t* error) {
  const BundleView& view = modules->bundle->view;
  const kiln_format_range_t range = modules->section->programs;
  for (uint32_t i = 0; i < range.count; ++i) {
    const kiln_format_program_t& program = view.programs[range.first + i];
    CUmod_st* module = nullptr;
    const int result =
        driver->module_load_data(&module, view.data + program.offset);
    if (result != kCudaSuccess) {
      const bool refused = result == kCudaErrorInvalidImage ||
                           result == kCudaErrorNoBinaryForGpu;
      return DriverFailure(
          driver, refused ? KILN_STATUS_PROGRAM_REFUSED : KILN_STATUS_DRIVER,
          result, "cuModuleLoadData",
          view.Text(view.kernels[program.kernels.first].name), error);
    }
    modules->cuda_modules[i] = module;
    for (uint32_t k = 0; k < program.kernels.count; ++k) {
      const uint32_t index = program.kernels.first + k;
      const kiln_status_t status =
          ResolveKernel(driver, view, view.kernels[index], module,
                        &kernels[index - first_kernel], error);
      if (status != KILN_STATUS_OK) return status;
    }
  }
  return KILN_STATUS_OK;
}

Failure Limit(const Modules& modules, const LoadedPlan& plan,
              const LoadedStep& step, kiln_error_t* error) {
  const BundleView& view = modules.bundle->view;
  Failure failure(error, KILN_STATUS_DEVICE_LIMIT);
  failure << "entry " << Quoted{view.Text(plan.entry->name)} << ", plan for m "
          << plan.record->m_min << ".." << plan.record->m_max << ", step "
          << Quoted{view.Text(step.record->label)} << ": ";
  return failure;
}

kiln_status_t CheckStep(const CudaDevice& device, const Modules& modules,
                        const LoadedPlan& plan, const LoadedStep& step,
                        ResolvedKernel* kernel, kiln_error_t* error) {
  const kiln_format_step_t& record = *step.record;
  static const char* const kAxis[3] = {"x", "y", "z"};
  uint64_t threads = 1;
  for (int d = 0; d < 3; ++d) {
    threads *= record.block[d];
    if (record.block[d] > device.block_max[d]) {
      return Limit(modules, plan, step, error)
             << "block." << kAxis[d] << " is " << record.block[d]
             << ", the device's limit is " << device.block_max[d];
    }
    // Terms grow with m, so this is the largest grid the plan can ask for.
    const uint64_t grid = EvaluateDim(record.grid[d], plan.record->m_max);
    if (grid > device.grid_max[d]) {
      return Limit(modules, plan, step, error)
             << "grid." << kAxis[d] << " is " << grid << " at m "
             << plan.record->m_max << ", the device's limit is "
             << device.grid_max[d];
    }
  }
  const uint64_t threads_max = device.threads_max < kernel->threads_max
                                   ? device.threads_max
                                   : kernel->threads_max;
  if (threads > threads_max) {
    return Limit(modules, plan, step, error)
           << "block of " << threads << " threads, limit of device and kernel "
           << "is " << threads_max;
  }
  const uint64_t shared =
      kernel->static_shared_bytes + record.dynamic_shared_bytes;
  if (shared > device.shared_bytes_max) {
    return Limit(modules, plan, step, error)
           << "shared memory of " << shared << " bytes, the device's limit is "
           << device.shared_bytes_max;
  }
  if (record.dynamic_shared_bytes > kernel->dynamic_shared_bytes) {
    kernel->dynamic_shared_bytes = record.dynamic_shared_bytes;
  }
  return KILN_STATUS_OK;
}

kiln_status_t OptIn(const CudaDevice& device, const Modules& modules,
                    uint32_t first_kernel, uint32_t kernel_count,
                    const ResolvedKernel* kernels, kiln_error_t* error) {
  const BundleView& view = modules.bundle->view;
  for (uint32_t k = 0; k < kernel_count; ++k) {
    const ResolvedKernel& kernel = kernels[k];
    if (kernel.static_shared_bytes + kernel.dynamic_shared_bytes <=
        device.shared_bytes_default) {
      continue;
    }
    const int result = device.driver->func_set_attribute(
        kernel.function, kFunctionMaxDynamicSharedBytes,
        static_cast<int>(kernel.dynamic_shared_bytes));
    if (result != kCudaSuccess) {
      return DriverFailure(
          device.driver, KILN_STATUS_DRIVER, result, "cuFuncSetAttribute",
          view.Text(view.kernels[first_kernel + k].name), error);
    }
  }
  return KILN_STATUS_OK;
}

kiln_status_t LoadInto(const CudaDevice& device, Modules* modules,
                       ResolvedKernel* kernels, uint32_t first_kernel,
                       uint32_t kernel_count, kiln_error_t* error) {
  kiln_status_t status =
      LoadPrograms(device.driver, modules, kernels, first_kernel, error);
  if (status != KILN_STATUS_OK) return status;
  for (uint32_t p = 0; p < modules->plan_count; ++p) {
    const LoadedPlan& plan = modules->plans[p];
    for (uint32_t s = 0; s < plan.record->steps.count; ++s) {
      LoadedStep& step = modules->steps[plan.steps - modules->steps + s];
      ResolvedKernel& kernel = kernels[step.record->kernel - first_kernel];
      step.function = kernel.function;
      status = CheckStep(device, *modules, plan, step, &kernel, error);
      if (status != KILN_STATUS_OK) return status;
    }
  }
  return OptIn(device, *modules, first_kernel, kernel_count, kernels, error);
}

}  // namespace

kiln_status_t OpenCudaDevice(const LoadOptions& options, CudaDevice* device,
                             kiln_error_t* error) {
  device->driver = options.driver;
  if (device->driver == nullptr) {
    const kiln_status_t status = RealDriver(&device->driver, error);
    if (status != KILN_STATUS_OK) return status;
  }
  const kiln_driver_t* driver = device->driver;
  int result = driver->init(0);
  if (result != kCudaSuccess) {
    return DriverFailure(driver, KILN_STATUS_DRIVER, result, "cuInit", nullptr,
                         error);
  }
  int version = 0;
  result = driver->driver_get_version(&version);
  if (result != kCudaSuccess) {
    return DriverFailure(driver, KILN_STATUS_DRIVER, result,
                         "cuDriverGetVersion", nullptr, error);
  }
  device->driver_version = version < 0 ? 0 : static_cast<uint32_t>(version);
  device->context = options.context;
  if (device->context == nullptr) {
    result = driver->ctx_get_current(&device->context);
    if (result != kCudaSuccess) {
      return DriverFailure(driver, KILN_STATUS_DRIVER, result,
                           "cuCtxGetCurrent", nullptr, error);
    }
  }
  if (device->context == nullptr) {
    return Failure(error, KILN_STATUS_NO_CONTEXT)
           << "no CUDA context is current on this thread; create one, or pass "
              "it as kiln_load_options_t.context";
  }
  return KILN_STATUS_OK;
}

kiln_status_t QueryCudaDevice(CudaDevice* device, kiln_error_t* error) {
  int ordinal = 0;
  const int result = device->driver->ctx_get_device(&ordinal);
  if (result != kCudaSuccess) {
    return DriverFailure(device->driver, KILN_STATUS_DRIVER, result,
                         "cuCtxGetDevice", nullptr, error);
  }
  uint64_t major = 0;
  uint64_t minor = 0;

  const struct {
    int attribute;
    uint64_t* value;
  } wanted[] = {
      {kDeviceComputeCapabilityMajor, &major},
      {kDeviceComputeCapabilityMinor, &minor},
      {kDeviceMaxThreadsPerBlock, &device->threads_max},
      {kDeviceMaxBlockDimX + 0, &device->block_max[0]},
      {kDeviceMaxBlockDimX + 1, &device->block_max[1]},
      {kDeviceMaxBlockDimX + 2, &device->block_max[2]},
      {kDeviceMaxGridDimX + 0, &device->grid_max[0]},
      {kDeviceMaxGridDimX + 1, &device->grid_max[1]},
      {kDeviceMaxGridDimX + 2, &device->grid_max[2]},
      {kDeviceMaxSharedBytes, &device->shared_bytes_default},
      {kDeviceMaxSharedBytesOptin, &device->shared_bytes_max},
  };

  for (const auto& want : wanted) {
    const kiln_status_t status =
        Attribute(device->driver, ordinal, want.attribute, want.value, error);
    if (status != KILN_STATUS_OK) return status;
  }
  device->capability = static_cast<uint32_t>(major * 10 + minor);
  return KILN_STATUS_OK;
}

kiln_status_t LoadCuda(const CudaDevice& device, Modules* modules,
                       kiln_error_t* error) {
  const BundleView& view = modules->bundle->view;
  const kiln_format_section_t& section = *modules->section;
  const uint32_t wanted = section.driver_version_min > kDriverVersionMin
                              ? section.driver_version_min
                              : kDriverVersionMin;
  if (device.driver_version < wanted) {
    return Failure(error, KILN_STATUS_DRIVER_TOO_OLD)
           << "section " << modules->target() << " needs CUDA driver "
           << wanted / 1000 << "." << wanted % 1000 / 10
           << ", this machine has " << device.driver_version / 1000 << "."
           << device.driver_version % 1000 / 10
           << "; install a newer NVIDIA driver";
  }
  const kiln_format_range_t range = section.programs;
  uint32_t kernel_count = 0;
  for (uint32_t i = 0; i < range.count; ++i) {
    kernel_count += view.programs[range.first + i].kernels.count;
  }
  const uint32_t first_kernel =
      range.count == 0 ? 0 : view.programs[range.first].kernels.first;
  modules->driver = device.driver;
  modules->context = device.context;
  modules->cuda_modules =
      static_cast<CUmod_st**>(calloc(range.count + 1u, sizeof(CUmod_st*)));
  auto* kernels = static_cast<ResolvedKernel*>(
      calloc(kernel_count + 1u, sizeof(ResolvedKernel)));
  kiln_status_t status = KILN_STATUS_OK;
  if (modules->cuda_modules == nullptr || kernels == nullptr) {
    status = Failure(error, KILN_STATUS_OUT_OF_MEMORY)
             << "out of memory loading " << range.count << " programs";
  } else {
    status =
        LoadInto(device, modules, kernels, first_kernel, kernel_count, error);
  }
  free(kernels);
  return status;
}

kiln_status_t UnloadCuda(Modules* modules, kiln_error_t* error) {
  ContextScope scope(modules->driver);
  kiln_status_t status = scope.Enter(modules->context, error);
  for (uint32_t i = 0; i < modules->section->programs.count; ++i) {
    CUmod_st* module = modules->cuda_modules[i];
    if (module == nullptr) continue;
    const int result = modules->driver->module_unload(module);
    if (result != kCudaSuccess && status == KILN_STATUS_OK) {
      status = DriverFailure(modules->driver, KILN_STATUS_DRIVER, result,
                             "cuModuleUnload", nullptr, error);
    }
  }
  const kiln_status_t left =
      scope.Leave(status == KILN_STATUS_OK ? error : nullptr);
  return status == KILN_STATUS_OK ? left : status;
}

}  // namespace kiln::runtime
