#include "runtime/module_set.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/load_cpu.h"
#include "runtime/load_cuda.h"
#include "runtime/section_choice.h"
#include "runtime/status.h"

namespace kiln::runtime {
namespace {

template <typename T>
bool Allocate(T** out, uint64_t count) {
  // calloc(0) may return null; ask for one so that null always means failure.
  *out = static_cast<T*>(calloc(count == 0 ? 1 : count, sizeof(T)));
  return *out != nullptr;
}

// What the launch tables of a section need.
struct TableSizes {
  uint32_t first_plan = 0;
  uint32_t plans = 0;
  uint32_t first_step = 0;
  uint32_t steps = 0;
  uint64_t patches = 0;
  uint64_t block_bytes = 0;
};

uint64_t AlignUp8(uint64_t value) { return (value + 7) / 8 * 8; }

uint32_t ArgsEnd(const BundleView& view, const kiln_format_step_t& step) {
  if (step.args.count == 0) return 0;
  const kiln_format_arg_t& last =
      view.args[step.args.first + step.args.count - 1];
  return last.offset + ArgBytes(last.kind);
}

bool IsConstant(uint32_t kind) {
  return kind == KILN_FORMAT_ARG_U32 || kind == KILN_FORMAT_ARG_U64;
}

TableSizes Measure(const BundleView& view,
                   const kiln_format_section_t& section) {
  TableSizes sizes;
  const kiln_format_entry_t& first = view.entries[section.entries.first];
  const kiln_format_entry_t& last =
      view.entries[section.entries.first + section.entries.count - 1];
  sizes.first_plan = first.plans.first;
  sizes.plans = last.plans.first + last.plans.count - sizes.first_plan;
  sizes.first_step = view.plans[sizes.first_plan].steps.first;
  const kiln_format_plan_t& last_plan =
      view.plans[sizes.first_plan + sizes.plans - 1];
  sizes.steps =
      last_plan.steps.first + last_plan.steps.count - sizes.first_step;
  for (uint32_t s = 0; s < sizes.steps; ++s) {
    const kiln_format_step_t& step = view.steps[sizes.first_step + s];
    sizes.block_bytes += AlignUp8(ArgsEnd(view, step));
    for (uint32_t a = 0; a < step.args.count; ++a) {
      if (!IsConstant(view.args[step.args.first + a].kind)) ++sizes.patches;
    }
  }
  return sizes;
}

// Fills one step's block and patches; returns the patches used.
uint32_t FillStep(const BundleView& view, const kiln_format_plan_t& plan,
                  const kiln_format_step_t& record, uint8_t* block,
                  Patch* patches, LoadedStep* step) {
  uint32_t used = 0;
  for (uint32_t a = 0; a < record.args.count; ++a) {
    const kiln_format_arg_t& arg = view.args[record.args.first + a];
    if (IsConstant(arg.kind)) {
      // Little-endian: the low bytes come first.
      memcpy(block + arg.offset, &arg.value, ArgBytes(arg.kind));
      continue;
    }
    uint64_t value = arg.value;
    if (arg.kind == KILN_FORMAT_ARG_ARENA) {
      value = view.slices[plan.slices.first + arg.value].offset;
    }
    patches[used++] = {arg.kind, arg.offset, value};
  }
  step->record = &record;
  step->block = block;
  step->block_bytes = ArgsEnd(view, record);
  step->patches = patches;
  step->patch_count = used;
  return used;
}

void FillNames(const BundleView& view, uint32_t first_plan, Modules* modules) {
  for (uint32_t p = 0; p < modules->plan_count; ++p) {
    modules->ends[p] = modules->plans[p].record->m_max;
  }
  const kiln_format_range_t range = modules->section->entries;
  for (uint32_t i = 0; i < range.count; ++i) {
    const kiln_format_entry_t* entry = &view.entries[range.first + i];
    const char* name = view.Text(entry->name);
    size_t bytes = 0;
    const uint64_t hash = HashName(name, &bytes);
    uint64_t at = hash & modules->bucket_mask;
    while (modules->buckets[at].entry != nullptr) {
      at = (at + 1) & modules->bucket_mask;
    }
    const uint32_t first = entry->plans.first - first_plan;
    modules->buckets[at] = {.hash = hash,
                            .name = name,
                            .ends = modules->ends + first,
                            .name_bytes = entry->name.bytes,
                            .plan_count = entry->plans.count,
                            .first_plan = first,
                            .capacity = entry->capacity,
                            .entry = entry};
  }
}

// Allocates and fills everything that needs no device.
kiln_status_t BuildTables(Modules* modules, kiln_error_t* error) {
  const BundleView& view = modules->bundle->view;
  const kiln_format_section_t& section = *modules->section;
  const TableSizes sizes = Measure(view, section);
  uint64_t buckets = 2;
  while (buckets < uint64_t{section.entries.count} * 2) buckets *= 2;
  uint64_t* blocks = nullptr;  // 8-byte aligned
  const bool ok = Allocate(&modules->plans, sizes.plans) &&
                  Allocate(&modules->steps, sizes.steps) &&
                  Allocate(&modules->patches, sizes.patches) &&
                  Allocate(&blocks, sizes.block_bytes / 8) &&
                  Allocate(&modules->ends, sizes.plans) &&
                  Allocate(&modules->buckets, buckets);
  modules->blocks = reinterpret_cast<uint8_t*>(blocks);
  if (!ok) {
    return Failure(error, KILN_STATUS_OUT_OF_MEMORY)
           << "out of memory loading " << sizes.plans << " plans";
  }
  modules->plan_count = sizes.plans;
  modules->bucket_mask = buckets - 1;

  uint64_t block_at = 0;
  uint64_t patch_at = 0;
  for (uint32_t e = 0; e < section.entries.count; ++e) {
    const kiln_format_entry_t& entry = view.entries[section.entries.first + e];
    for (uint32_t p = 0; p < entry.plans.count; ++p) {
      const uint32_t index = entry.plans.first + p;
      const kiln_format_plan_t& record = view.plans[index];
      LoadedPlan& plan = modules->plans[index - sizes.first_plan];
      plan.record = &record;
      plan.entry = &entry;
      plan.steps = modules->steps + (record.steps.first - sizes.first_step);
      for (uint32_t s = 0; s < record.steps.count; ++s) {
        const uint32_t step_index = record.steps.first + s;
        LoadedStep& step = modules->steps[step_index - sizes.first_step];
        patch_at += FillStep(view, record, view.steps[step_index],
                             modules->blocks + block_at,
                             modules->patches + patch_at, &step);
        block_at += AlignUp8(step.block_bytes);
      }
    }
  }
  FillNames(view, sizes.first_plan, modules);
  return KILN_STATUS_OK;
}

void FreeTables(Modules* modules) {
  free(modules->plans);
  free(modules->steps);
  free(modules->patches);
  free(modules->blocks);
  free(modules->ends);
  free(modules->buckets);
  free(modules->cuda_modules);
  free(modules->libraries);
  ReleaseBundle(modules->bundle);
  free(modules);
}

kiln_status_t CheckConsent(const kiln_format_section_t& section,
                           uint32_t options, const char* target,
                           kiln_error_t* error) {
  if ((section.flags & KILN_FORMAT_FLAG_PREDICTED) != 0 &&
      (options & KILN_LOAD_ALLOW_PREDICTED) == 0) {
    return Failure(error, KILN_STATUS_PREDICTED_PLANS)
           << "section " << target
           << " has predicted plans, which were never run; run kiln prewarm "
              "--target "
           << target
           << " on such a device and freeze again, or pass "
              "KILN_LOAD_ALLOW_PREDICTED";
  }
  if ((section.flags & KILN_FORMAT_FLAG_UNQUALIFIED) != 0 &&
      (options & KILN_LOAD_ALLOW_UNQUALIFIED) == 0) {
    return Failure(error, KILN_STATUS_UNQUALIFIED_PLANS)
           << "section " << target
           << " has plans of templates without a qualification on that "
              "target; pass KILN_LOAD_ALLOW_UNQUALIFIED to load them";
  }
  return KILN_STATUS_OK;
}

// What both backends do once the section is known.
kiln_status_t Begin(const kiln_format_section_t* section,
                    const LoadOptions& options, Modules* modules,
                    kiln_error_t* error) {
  modules->section = section;
  const kiln_status_t status =
      CheckConsent(*section, options.flags, modules->target(), error);
  if (status != KILN_STATUS_OK) return status;
  return BuildTables(modules, error);
}

kiln_status_t FillCpu(const LoadOptions& options, Modules* modules,
                      kiln_error_t* error) {
  const kiln_format_section_t* section = nullptr;
  kiln_status_t status =
      ChooseCpuSection(modules->bundle->view, options, &section, error);
  if (status == KILN_STATUS_OK) {
    status = Begin(section, options, modules, error);
  }
  if (status != KILN_STATUS_OK) return status;
  return LoadCpu(options, modules, error);
}

kiln_status_t FillCuda(const LoadOptions& options, Modules* modules,
                       kiln_error_t* error) {
  CudaDevice device;
  kiln_status_t status = OpenCudaDevice(options, &device, error);
  if (status != KILN_STATUS_OK) return status;
  ContextScope scope(device.driver);
  status = scope.Enter(device.context, error);
  if (status == KILN_STATUS_OK) status = QueryCudaDevice(&device, error);
  const kiln_format_section_t* section = nullptr;
  if (status == KILN_STATUS_OK) {
    status = ChooseCudaSection(modules->bundle->view, options,
                               device.capability, &section, error);
  }
  if (status == KILN_STATUS_OK) {
    status = Begin(section, options, modules, error);
  }
  if (status == KILN_STATUS_OK) status = LoadCuda(device, modules, error);
  if (status != KILN_STATUS_OK) return status;
  return scope.Leave(error);
}

kiln_status_t Fill(const LoadOptions& options, Modules* modules,
                   kiln_error_t* error) {
  const BundleView& view = modules->bundle->view;
  bool cuda = false;
  const kiln_status_t status = ChooseBackend(view, options, &cuda, error);
  if (status != KILN_STATUS_OK) return status;
  return cuda ? FillCuda(options, modules, error)
              : FillCpu(options, modules, error);
}

// Releases programs and the pool, if any, then memory.
kiln_status_t Destroy(Modules* modules, kiln_error_t* error) {
  kiln_status_t status = KILN_STATUS_OK;
  if (modules->cuda_modules != nullptr) status = UnloadCuda(modules, error);
  UnloadCpu(modules);
  FreeTables(modules);
  return status;
}

}  // namespace

kiln_status_t DriverFailure(const kiln_driver_t* driver, kiln_status_t code,
                            int result, const char* call, const char* subject,
                            kiln_error_t* error) {
  const char* name = nullptr;
  if (driver->get_error_name(result, &name) != kCudaSuccess ||
      name == nullptr) {
    name = "CUresult";
  }
  Failure failure(error, code, result);
  failure << call;
  if (subject != nullptr) failure << " for " << Quoted{subject};
  return failure << " failed: " << name << " (" << result << ")";
}

kiln_status_t ContextScope::Enter(CUctx_st* context, kiln_error_t* error) {
  CUctx_st* current = nullptr;
  int result = driver_->ctx_get_current(&current);
  if (result != kCudaSuccess) {
    return DriverFailure(driver_, KILN_STATUS_DRIVER, result, "cuCtxGetCurrent",
                         nullptr, error);
  }
  if (current == context) return KILN_STATUS_OK;
  result = driver_->ctx_push_current(context);
  if (result != kCudaSuccess) {
    return DriverFailure(driver_, KILN_STATUS_DRIVER, result,
                         "cuCtxPushCurrent", nullptr, error);
  }
  pushed_ = true;
  return KILN_STATUS_OK;
}

kiln_status_t ContextScope::Leave(kiln_error_t* error) {
  if (!pushed_) return KILN_STATUS_OK;
  pushed_ = false;
  CUctx_st* popped = nullptr;
  const int result = driver_->ctx_pop_current(&popped);
  if (result == kCudaSuccess) return KILN_STATUS_OK;
  return DriverFailure(driver_, KILN_STATUS_DRIVER, result, "cuCtxPopCurrent",
                       nullptr, error);
}

NamePiece ReadNamePieceByBytes(const char* name) {
  NamePiece piece;
  for (; piece.bytes < 16; ++piece.bytes) {
    const auto c = static_cast<uint8_t>(name[piece.bytes]);
    if (c == 0) break;
    uint64_t& word = piece.bytes < 8 ? piece.low : piece.high;
    word |= uint64_t{c} << (8 * (piece.bytes % 8));
  }
  return piece;
}

kiln_status_t LoadModules(Bundle* bundle, const LoadOptions& options,
                          Modules** out, kiln_error_t* error) {
  Modules* modules = nullptr;
  if (!Allocate(&modules, 1)) {
    return Failure(error, KILN_STATUS_OUT_OF_MEMORY)
           << "out of memory loading modules";
  }
  RetainBundle(bundle);
  modules->bundle = bundle;
  const kiln_status_t status = Fill(options, modules, error);
  if (status != KILN_STATUS_OK) {
    // The first error is the one to report.
    (void)Destroy(modules, nullptr);
    return status;
  }
  *out = modules;
  return KILN_STATUS_OK;
}

kiln_status_t UnloadModules(Modules* modules, kiln_error_t* error) {
  return Destroy(modules, error);
}

}  // namespace kiln::runtime
