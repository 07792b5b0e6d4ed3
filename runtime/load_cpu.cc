#include "runtime/load_cpu.h"

#include <stdlib.h>

#include "runtime/status.h"

namespace kiln::runtime {
namespace {

kiln_status_t LoadPrograms(Modules* modules, CpuKernel* kernels,
                           uint32_t first_kernel, kiln_error_t* error) {
  const BundleView& view = modules->bundle->view;
  const kiln_format_range_t range = modules->section->programs;
  for (uint32_t i = 0; i < range.count; ++i) {
    const kiln_format_program_t& program = view.programs[range.first + i];
    kiln_status_t status =
        LoadCpuProgram(view.data + program.offset, program.bytes,
                       &modules->libraries[i], error);
    if (status != KILN_STATUS_OK) return status;
    for (uint32_t k = 0; k < program.kernels.count; ++k) {
      const uint32_t index = program.kernels.first + k;
      const kiln_format_kernel_t& kernel = view.kernels[index];
      status = FindCpuKernel(modules->libraries[i], view.Text(kernel.name),
                             kernel.param_bytes, &kernels[index - first_kernel],
                             error);
      if (status != KILN_STATUS_OK) return status;
    }
  }
  return KILN_STATUS_OK;
}

}  // namespace

kiln_status_t LoadCpu(const LoadOptions& options, Modules* modules,
                      kiln_error_t* error) {
  const BundleView& view = modules->bundle->view;
  const kiln_format_range_t range = modules->section->programs;
  uint32_t kernel_count = 0;
  for (uint32_t i = 0; i < range.count; ++i) {
    kernel_count += view.programs[range.first + i].kernels.count;
  }
  modules->libraries =
      static_cast<void**>(calloc(range.count + 1u, sizeof(void*)));
  auto* kernels =
      static_cast<CpuKernel*>(calloc(kernel_count + 1u, sizeof(CpuKernel)));
  if (modules->libraries == nullptr || kernels == nullptr) {
    free(kernels);
    return Failure(error, KILN_STATUS_OUT_OF_MEMORY)
           << "out of memory loading " << range.count << " programs";
  }
  const uint32_t first_kernel =
      range.count == 0 ? 0 : view.programs[range.first].kernels.first;
  kiln_status_t status = LoadPrograms(modules, kernels, first_kernel, error);
  if (status == KILN_STATUS_OK) {
    for (uint32_t p = 0; p < modules->plan_count; ++p) {
      const LoadedPlan& plan = modules->plans[p];
      for (uint32_t s = 0; s < plan.record->steps.count; ++s) {
        LoadedStep& step = modules->steps[plan.steps - modules->steps + s];
        step.kernel = kernels[step.record->kernel - first_kernel];
      }
    }
    const uint32_t threads =
        options.cpu_threads != 0 ? options.cpu_threads : AvailableProcessors();
    status = CpuPool::Create(threads < KILN_FORMAT_CPU_THREADS_MAX
                                 ? threads
                                 : KILN_FORMAT_CPU_THREADS_MAX,
                             &modules->pool, error);
  }
  free(kernels);
  return status;
}

void UnloadCpu(Modules* modules) {
  if (modules->pool != nullptr) CpuPool::Destroy(modules->pool);
  if (modules->libraries == nullptr) return;
  for (uint32_t i = 0; i < modules->section->programs.count; ++i) {
    void* library = modules->libraries[i];
    if (library != nullptr) UnloadCpuProgram(library);
  }
}

}  // namespace kiln::runtime
