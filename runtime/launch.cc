#include "runtime/launch.h"

#include <string.h>

#include "runtime/status.h"

namespace kiln::runtime {
namespace {

// "entry 'moe' (fused_moe): ".
Failure EntryFailure(const Modules& modules, const kiln_format_entry_t& entry,
                     kiln_status_t code, kiln_error_t* error,
                     int32_t driver_code = 0) {
  const BundleView& view = modules.bundle->view;
  Failure failure(error, code, driver_code);
  failure << "entry " << Quoted{view.Text(entry.name)} << " ("
          << view.Text(entry.op) << "): ";
  return failure;
}

// "; declared intervals 1..1, 2..2, ..., 65..128; bundle 0123456789ab, target
// sm_90a". Of many intervals, the first ones and the last are shown.
void AppendDeclared(const Modules& modules, const kiln_format_entry_t& entry,
                    Failure* failure) {
  constexpr uint32_t kShown = 6;
  const BundleView& view = modules.bundle->view;
  *failure << "; declared intervals ";
  for (uint32_t i = 0; i < entry.plans.count; ++i) {
    const bool last = i + 1 == entry.plans.count;
    if (i >= kShown && !last) continue;
    const kiln_format_plan_t& plan = view.plans[entry.plans.first + i];
    if (i > 0) *failure << ", ";
    if (i > kShown) *failure << "..., ";
    *failure << plan.m_min << ".." << plan.m_max;
  }
  *failure << "; bundle " << Hex{view.header->root, 6} << ", target "
           << modules.target();
}

kiln_status_t AboveCapacity(const Modules& modules,
                            const kiln_format_entry_t& entry, uint64_t m,
                            kiln_error_t* error) {
  Failure failure =
      EntryFailure(modules, entry, KILN_STATUS_TOKENS_OUT_OF_RANGE, error);
  failure << "m " << m << " is above its capacity " << entry.capacity;
  AppendDeclared(modules, entry, &failure);
  return failure << "; fix: add a capacity of at least " << m
                 << " to the manifest, then kiln prewarm MANIFEST --target "
                 << modules.target() << " and kiln freeze";
}

kiln_status_t UnknownEntry(const Modules& modules, const char* name,
                           kiln_error_t* error) {
  const BundleView& view = modules.bundle->view;
  const kiln_format_range_t range = modules.section->entries;
  Failure failure(error, KILN_STATUS_ENTRY_NOT_FOUND);
  failure << "no entry " << Quoted{name} << " in target " << modules.target()
          << "; it has ";
  for (uint32_t i = 0; i < range.count && i < 4; ++i) {
    failure << (i == 0 ? "" : ", ")
            << Quoted{view.Text(view.entries[range.first + i].name)};
  }
  if (range.count > 4) failure << " and " << range.count - 4 << " more";
  return failure << "; bundle " << Hex{view.header->root, 6}
                 << "; fix: add the request to the manifest, then kiln prewarm "
                    "MANIFEST --target "
                 << modules.target() << " and kiln freeze";
}

// Kernels access memory in words of up to this many bytes.
constexpr uint64_t kAlignmentMax = 16;

// What a slot's pointer must be a multiple of, so that rows of an aligned
// buffer pass too. 1 if the bundle does not describe the buffer.
uint64_t AlignmentOf(const kiln_format_param_t& param) {
  if (param.element_bytes == 0) return 1;
  const uint64_t sizes = param.bytes | param.bytes_per_token | kAlignmentMax;
  return sizes & (~sizes + 1);  // its lowest bit
}

kiln_status_t CheckParams(const Modules& modules, const LoadedPlan& plan,
                          const LaunchArguments& arguments,
                          kiln_error_t* error) {
  const BundleView& view = modules.bundle->view;
  const uint32_t count = plan.record->params.count;
  if (count == 0) return KILN_STATUS_OK;
  const size_t bytes = size_t{8} * count;
  if (arguments.params == nullptr) {
    return EntryFailure(modules, *plan.entry, KILN_STATUS_PARAMS_MISSING, error)
           << "params is null, the plan reads " << bytes << " bytes";
  }
  if (arguments.params_bytes < bytes) {
    return EntryFailure(modules, *plan.entry, KILN_STATUS_PARAMS_SHORT, error)
           << "params has " << arguments.params_bytes
           << " bytes, the plan reads " << bytes;
  }
  const uint8_t* slots = static_cast<const uint8_t*>(arguments.params);
  for (uint32_t i = 0; i < count; ++i) {
    uint64_t pointer;
    memcpy(&pointer, slots + size_t{8} * i, sizeof(pointer));
    if (pointer == 0) {
      return EntryFailure(modules, *plan.entry, KILN_STATUS_PARAM_NULL, error)
             << "parameter " << i << " "
             << Quoted{view.Text(
                    view.params[plan.record->params.first + i].name)}
             << " is null";
    }
    // Rare enough that the record is only read here.
    if (pointer % kAlignmentMax != 0) {
      const kiln_format_param_t& param =
          view.params[plan.record->params.first + i];
      const uint64_t alignment = AlignmentOf(param);
      if (pointer % alignment != 0) {
        return EntryFailure(modules, *plan.entry, KILN_STATUS_PARAM_MISALIGNED,
                            error)
               << "parameter " << i << " " << Quoted{view.Text(param.name)}
               << " is misaligned by " << pointer % alignment
               << " bytes, it must be a multiple of " << alignment;
      }
    }
  }
  return KILN_STATUS_OK;
}

kiln_status_t CheckArena(const Modules& modules, const LoadedPlan& plan,
                         const LaunchArguments& arguments,
                         kiln_error_t* error) {
  const uint64_t needed = plan.record->arena_bytes;
  if (needed == 0) return KILN_STATUS_OK;
  if (arguments.arena == nullptr) {
    return EntryFailure(modules, *plan.entry, KILN_STATUS_ARENA_MISSING, error)
           << "arena is null, the plan needs " << needed << " bytes";
  }
  const uint64_t past = reinterpret_cast<uintptr_t>(arguments.arena) %
                        KILN_FORMAT_ARENA_ALIGNMENT;
  if (past != 0) {
    return EntryFailure(modules, *plan.entry, KILN_STATUS_ARENA_MISALIGNED,
                        error)
           << "arena is misaligned by " << past << " bytes, it must be a "
           << "multiple of " << KILN_FORMAT_ARENA_ALIGNMENT;
  }
  if (arguments.arena_bytes < needed) {
    return EntryFailure(modules, *plan.entry, KILN_STATUS_ARENA_SHORT, error)
           << "arena has " << arguments.arena_bytes << " bytes, the plan needs "
           << needed;
  }
  return KILN_STATUS_OK;
}

kiln_status_t CheckTokens(const Modules& modules, const LoadedPlan& plan,
                          uint64_t m, kiln_error_t* error) {
  if (m > plan.entry->capacity) {
    return AboveCapacity(modules, *plan.entry, m, error);
  }
  if (m < plan.record->m_min || m > plan.record->m_max) {
    Failure failure = EntryFailure(modules, *plan.entry,
                                   KILN_STATUS_TOKENS_OUT_OF_RANGE, error);
    failure << "m " << m << " is outside this plan's interval "
            << plan.record->m_min << ".." << plan.record->m_max;
    AppendDeclared(modules, *plan.entry, &failure);
    return failure << "; fix: call kiln_entry_find for this m";
  }
  return KILN_STATUS_OK;
}

// The parameter block of one step.
void FillBlock(const LoadedStep& step, const LaunchArguments& arguments,
               uint8_t* block) {
  memcpy(block, step.block, step.block_bytes);
  const uint8_t* slots = static_cast<const uint8_t*>(arguments.params);
  for (uint32_t i = 0; i < step.patch_count; ++i) {
    const Patch& patch = step.patches[i];
    uint8_t* to = block + patch.offset;
    if (patch.kind == KILN_FORMAT_ARG_PARAM) {
      memcpy(to, slots + 8 * patch.value, 8);
    } else if (patch.kind == KILN_FORMAT_ARG_ARENA) {
      const uint64_t address =
          reinterpret_cast<uintptr_t>(arguments.arena) + patch.value;
      memcpy(to, &address, 8);
    } else {
      const uint32_t m = static_cast<uint32_t>(arguments.m);
      memcpy(to, &m, 4);
    }
  }
}

// False if the step has nothing to do. Dimensions were checked against the
// limits at m_max, so they fit.
bool EvaluateGrid(const kiln_format_step_t& record, uint64_t m,
                  uint32_t* grid) {
  for (int d = 0; d < 3; ++d) {
    grid[d] = static_cast<uint32_t>(EvaluateDim(record.grid[d], m));
    if (grid[d] == 0) return false;
  }
  return true;
}

kiln_status_t LaunchCuda(const Modules& modules, const LoadedPlan& plan,
                         const LaunchArguments& arguments,
                         kiln_error_t* error) {
  const kiln_driver_t* driver = modules.driver;
  ContextScope scope(driver);
  const kiln_status_t entered = scope.Enter(modules.context, error);
  if (entered != KILN_STATUS_OK) return entered;
  alignas(64) uint8_t block[KILN_FORMAT_ARG_BLOCK_BYTES_MAX];
  bool first = true;
  for (uint32_t s = 0; s < plan.record->steps.count; ++s) {
    const LoadedStep& step = plan.steps[s];
    uint32_t grid[3];
    if (!EvaluateGrid(*step.record, arguments.m, grid)) continue;
    FillBlock(step, arguments, block);
    // One packed block: the driver copies it before it returns.
    size_t block_bytes = step.block_bytes;
    void* extra[] = {reinterpret_cast<void*>(kLaunchParamBufferPointer), block,
                     reinterpret_cast<void*>(kLaunchParamBufferSize),
                     &block_bytes, reinterpret_cast<void*>(kLaunchParamEnd)};
    const uint32_t* threads = step.record->block;
    void** packed = step.block_bytes == 0 ? nullptr : extra;
    int result;
    const bool overlapped = plan.record->overlapped != 0 && !first;
    if (overlapped) {
      LaunchAttribute attribute = {};
      attribute.id = kLaunchProgrammaticStreamSerialization;
      attribute.flag = 1;
      const LaunchConfig config = {{grid[0], grid[1], grid[2]},
                                   {threads[0], threads[1], threads[2]},
                                   step.record->dynamic_shared_bytes,
                                   arguments.stream,
                                   &attribute,
                                   1};
      result =
          driver->launch_kernel_ex(&config, step.function, nullptr, packed);
    } else {
      result = driver->launch_kernel(step.function, grid[0], grid[1], grid[2],
                                     threads[0], threads[1], threads[2],
                                     step.record->dynamic_shared_bytes,
                                     arguments.stream, nullptr, packed);
    }
    first = false;
    if (result != kCudaSuccess) {
      const char* name = nullptr;
      const bool named =
          driver->get_error_name(result, &name) == kCudaSuccess &&
          name != nullptr;
      const BundleView& view = modules.bundle->view;
      return EntryFailure(modules, *plan.entry, KILN_STATUS_DRIVER, error,
                          result)
             << "m " << arguments.m << ", step " << s << " "
             << Quoted{view.Text(step.record->label)}
             << (overlapped ? ": cuLaunchKernelEx" : ": cuLaunchKernel")
             << " failed: " << (named ? name : "CUresult") << " (" << result
             << "); bundle " << Hex{view.header->root, 6} << ", target "
             << modules.target();
    }
  }
  return scope.Leave(error);
}

kiln_status_t LaunchCpu(const Modules& modules, const LoadedPlan& plan,
                        const LaunchArguments& arguments) {
  alignas(64) uint8_t block[KILN_FORMAT_ARG_BLOCK_BYTES_MAX];
  modules.pool->Lock();
  for (uint32_t s = 0; s < plan.record->steps.count; ++s) {
    const LoadedStep& step = plan.steps[s];
    CpuJob job;
    if (!EvaluateGrid(*step.record, arguments.m, job.grid)) continue;
    FillBlock(step, arguments, block);
    job.kernel = step.kernel;
    job.args = block;
    modules.pool->Run(job, plan.record->cpu_threads);
  }
  modules.pool->Unlock();
  return KILN_STATUS_OK;
}

}  // namespace

kiln_status_t RefuseFind(const Modules& modules, const NameBucket* bucket,
                         const char* name, uint64_t m, kiln_error_t* error) {
  if (bucket == nullptr) return UnknownEntry(modules, name, error);
  return AboveCapacity(modules, *bucket->entry, m, error);
}

kiln_status_t LaunchPlan(const Modules& modules, const LoadedPlan& plan,
                         const LaunchArguments& arguments,
                         kiln_error_t* error) {
  kiln_status_t status = CheckTokens(modules, plan, arguments.m, error);
  if (status != KILN_STATUS_OK) return status;
  status = CheckParams(modules, plan, arguments, error);
  if (status != KILN_STATUS_OK) return status;
  status = CheckArena(modules, plan, arguments, error);
  if (status != KILN_STATUS_OK) return status;
  if (modules.cuda()) return LaunchCuda(modules, plan, arguments, error);
  if (arguments.stream != nullptr) {
    return EntryFailure(modules, *plan.entry, KILN_STATUS_STREAM_NOT_ALLOWED,
                        error)
           << "a stream was given, target " << modules.target()
           << " runs in the calling thread; pass NULL";
  }
  return LaunchCpu(modules, plan, arguments);
}

}  // namespace kiln::runtime
