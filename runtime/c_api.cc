// The extern "C" shell of kiln.h: handles, struct sizes and null pointers are
// checked here, the work is done elsewhere.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "runtime/bundle_reader.h"
#include "runtime/handle.h"
#include "runtime/inspect.h"
#include "runtime/kiln.h"
#include "runtime/launch.h"
#include "runtime/module_set.h"
#include "runtime/selftest.h"
#include "runtime/status.h"

namespace {

using kiln::runtime::Bundle;
using kiln::runtime::BundleView;
using kiln::runtime::Failure;
using kiln::runtime::HandleKind;
using kiln::runtime::LoadedPlan;
using kiln::runtime::LoadOptions;
using kiln::runtime::Modules;

static_assert(sizeof(void*) == 8, "handles carry 64 bits");
static_assert(sizeof(kiln_error_t) == 512, "frozen");

uint64_t Value(const void* handle) {
  return reinterpret_cast<uintptr_t>(handle);
}

template <typename T>
T* Handle(uint64_t value) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(value));
}

[[gnu::cold]] Failure Null(const char* what, kiln_error_t* error) {
  Failure failure(error, KILN_STATUS_INVALID_ARGUMENT);
  failure << what << " is null";
  return failure;
}

[[gnu::cold]] Failure Closed(const char* what, const void* handle,
                             kiln_error_t* error) {
  Failure failure(error, KILN_STATUS_CLOSED_HANDLE);
  failure << what
          << (handle == nullptr
                  ? " is null"
                  : " is not open: it was closed, or is another kind of "
                    "handle");
  return failure;
}

// Sizes that a type had in earlier minor versions of the ABI, and has still.
template <typename T>
bool SizeIsKnown(uint32_t bytes) {
  return bytes == sizeof(T);
}

template <>
bool SizeIsKnown<kiln_plan_info_t>(uint32_t bytes) {
  return bytes == sizeof(kiln_plan_info_t) ||
         bytes == offsetof(kiln_plan_info_t, overlapped);
}

template <typename T>
kiln_status_t CheckSize(const T* value, const char* type, kiln_error_t* error) {
  if (value == nullptr) return Null(type, error);
  if (SizeIsKnown<T>(value->struct_size)) return KILN_STATUS_OK;
  return Failure(error, KILN_STATUS_STRUCT_SIZE)
         << type << ".struct_size is " << value->struct_size
         << ", this runtime knows " << sizeof(T)
         << "; set it to sizeof, and build with the runtime's own kiln.h";
}

kiln_status_t ResolveBundle(const kiln_bundle_t* handle, Bundle** bundle,
                            kiln_error_t* error) {
  *bundle = static_cast<Bundle*>(
      kiln::runtime::ResolveHandle(HandleKind::kBundle, Value(handle)));
  if (*bundle != nullptr) return KILN_STATUS_OK;
  return Closed("bundle", handle, error);
}

kiln_status_t ResolveModules(const kiln_modules_t* handle,
                             const Modules** modules, kiln_error_t* error) {
  *modules = static_cast<const Modules*>(
      kiln::runtime::ResolveHandle(HandleKind::kModules, Value(handle)));
  if (*modules != nullptr) return KILN_STATUS_OK;
  return Closed("modules", handle, error);
}

kiln_status_t ResolveEntry(const kiln_entry_t* handle, const Modules** modules,
                           const LoadedPlan** plan, kiln_error_t* error) {
  const uint64_t value = Value(handle);
  if (kiln::runtime::IsEntry(value)) {
    *modules = static_cast<const Modules*>(kiln::runtime::ResolveHandle(
        HandleKind::kModules, kiln::runtime::ModulesOfEntry(value)));
    const uint32_t index = kiln::runtime::PlanOfEntry(value);
    if (*modules != nullptr && index < (*modules)->plan_count) {
      *plan = &(*modules)->plans[index];
      return KILN_STATUS_OK;
    }
  }
  return Closed("entry", handle, error);
}

// A path down the ranges of a bundle. The first bad index wins.
class Walk {
 public:
  Walk(const kiln_bundle_t* handle, kiln_error_t* error) : error_(error) {
    Bundle* bundle = nullptr;
    status_ = ResolveBundle(handle, &bundle, error);
    if (status_ == KILN_STATUS_OK) view_ = &bundle->view;
  }

  kiln_status_t status() const { return status_; }

  const BundleView& view() const { return *view_; }

  template <typename T>
  const T* At(const T* table, kiln_format_range_t range, uint32_t index,
              const char* what) {
    if (status_ != KILN_STATUS_OK) return nullptr;
    if (index >= range.count) {
      status_ = Failure(error_, KILN_STATUS_INVALID_ARGUMENT)
                << what << " index " << index << " of " << range.count;
      return nullptr;
    }
    return table + range.first + index;
  }

  const kiln_format_section_t* Section(uint32_t index) {
    if (status_ != KILN_STATUS_OK) return nullptr;
    return At(view_->sections, {0, view_->section_count()}, index, "section");
  }

  const kiln_format_entry_t* Entry(uint32_t section, uint32_t entry) {
    const auto* s = Section(section);
    return s == nullptr ? nullptr
                        : At(view_->entries, s->entries, entry, "entry");
  }

  const kiln_format_plan_t* Plan(uint32_t section, uint32_t entry,
                                 uint32_t plan) {
    const auto* e = Entry(section, entry);
    return e == nullptr ? nullptr : At(view_->plans, e->plans, plan, "plan");
  }

  const kiln_format_step_t* Step(uint32_t section, uint32_t entry,
                                 uint32_t plan, uint32_t step) {
    const auto* p = Plan(section, entry, plan);
    return p == nullptr ? nullptr : At(view_->steps, p->steps, step, "step");
  }

  const kiln_format_program_t* Program(uint32_t section, uint32_t program) {
    const auto* s = Section(section);
    return s == nullptr ? nullptr
                        : At(view_->programs, s->programs, program, "program");
  }

  const kiln_format_kernel_t* Kernel(uint32_t section, uint32_t program,
                                     uint32_t kernel) {
    const auto* p = Program(section, program);
    return p == nullptr ? nullptr
                        : At(view_->kernels, p->kernels, kernel, "kernel");
  }

 private:
  kiln_error_t* error_;
  kiln_status_t status_ = KILN_STATUS_OK;
  const BundleView* view_ = nullptr;
};

kiln_status_t OpenOptions(const kiln_open_options_t* options,
                          kiln_bundle_t** bundle, const uint8_t** root,
                          kiln_error_t* error) {
  if (bundle == nullptr) return Null("bundle", error);
  *root = nullptr;
  if (options == nullptr) return KILN_STATUS_OK;
  const kiln_status_t size = CheckSize(options, "kiln_open_options_t", error);
  if (size != KILN_STATUS_OK) return size;
  if (options->flags != 0) {
    return Failure(error, KILN_STATUS_INVALID_ARGUMENT)
           << "kiln_open_options_t.flags is " << options->flags
           << ", no flag is defined";
  }
  *root = options->expected_root;
  return KILN_STATUS_OK;
}

kiln_status_t Publish(Bundle* bundle, kiln_bundle_t** handle,
                      kiln_error_t* error) {
  const uint64_t value = kiln::runtime::MakeHandle(HandleKind::kBundle, bundle);
  if (value == 0) {
    kiln::runtime::ReleaseBundle(bundle);
    return Failure(error, KILN_STATUS_OUT_OF_MEMORY)
           << "too many open bundles, limit is " << kiln::runtime::kHandleSlots;
  }
  *handle = Handle<kiln_bundle_t>(value);
  return KILN_STATUS_OK;
}

kiln_status_t ReadLoadOptions(const kiln_load_options_t* options,
                              LoadOptions* out, kiln_error_t* error) {
  if (options == nullptr) return KILN_STATUS_OK;
  const kiln_status_t size = CheckSize(options, "kiln_load_options_t", error);
  if (size != KILN_STATUS_OK) return size;
  constexpr uint32_t kKnown =
      KILN_LOAD_ALLOW_PREDICTED | KILN_LOAD_ALLOW_UNQUALIFIED;
  if ((options->flags & ~kKnown) != 0 || options->reserved != 0) {
    return Failure(error, KILN_STATUS_INVALID_ARGUMENT)
           << "kiln_load_options_t has unknown flags " << options->flags
           << " or a reserved field that is not 0";
  }
  out->flags = options->flags;
  out->target = options->target;
  out->context = options->context;
  out->cpu_threads = options->cpu_threads;
  out->driver = options->driver;
  return KILN_STATUS_OK;
}

}  // namespace

extern "C" {

void kiln_runtime_version(uint32_t* major, uint32_t* minor) {
  if (major != nullptr) *major = KILN_RUNTIME_ABI_MAJOR;
  if (minor != nullptr) *minor = KILN_RUNTIME_ABI_MINOR;
}

kiln_status_t kiln_bundle_open_file(const char* path,
                                    const kiln_open_options_t* options,
                                    kiln_bundle_t** bundle,
                                    kiln_error_t* error) {
  const uint8_t* root = nullptr;
  kiln_status_t status = OpenOptions(options, bundle, &root, error);
  if (status != KILN_STATUS_OK) return status;
  if (path == nullptr) return Null("path", error);
  Bundle* opened = nullptr;
  status = kiln::runtime::OpenBundleFile(path, root, &opened, error);
  if (status != KILN_STATUS_OK) return status;
  return Publish(opened, bundle, error);
}

kiln_status_t kiln_bundle_open_memory(const void* data, size_t bytes,
                                      const kiln_open_options_t* options,
                                      kiln_bundle_t** bundle,
                                      kiln_error_t* error) {
  const uint8_t* root = nullptr;
  kiln_status_t status = OpenOptions(options, bundle, &root, error);
  if (status != KILN_STATUS_OK) return status;
  if (data == nullptr) return Null("data", error);
  Bundle* opened = nullptr;
  status = kiln::runtime::OpenBundleMemory(data, bytes, root, &opened, error);
  if (status != KILN_STATUS_OK) return status;
  return Publish(opened, bundle, error);
}

kiln_status_t kiln_bundle_close(kiln_bundle_t* bundle, kiln_error_t* error) {
  if (bundle == nullptr) return KILN_STATUS_OK;
  auto* opened = static_cast<Bundle*>(
      kiln::runtime::TakeHandle(HandleKind::kBundle, Value(bundle)));
  if (opened == nullptr) return Closed("bundle", bundle, error);
  kiln::runtime::ReleaseBundle(opened);
  return KILN_STATUS_OK;
}

kiln_status_t kiln_bundle_info(const kiln_bundle_t* bundle,
                               kiln_bundle_info_t* info, kiln_error_t* error) {
  const kiln_status_t size = CheckSize(info, "kiln_bundle_info_t", error);
  if (size != KILN_STATUS_OK) return size;
  const Walk walk(bundle, error);
  if (walk.status() == KILN_STATUS_OK) {
    kiln::runtime::Describe(walk.view(), info);
  }
  return walk.status();
}

kiln_status_t kiln_bundle_section(const kiln_bundle_t* bundle, uint32_t section,
                                  kiln_section_info_t* info,
                                  kiln_error_t* error) {
  const kiln_status_t size = CheckSize(info, "kiln_section_info_t", error);
  if (size != KILN_STATUS_OK) return size;
  Walk walk(bundle, error);
  const auto* record = walk.Section(section);
  if (record != nullptr) kiln::runtime::Describe(walk.view(), *record, info);
  return walk.status();
}

kiln_status_t kiln_bundle_entry(const kiln_bundle_t* bundle, uint32_t section,
                                uint32_t entry, kiln_entry_info_t* info,
                                kiln_error_t* error) {
  const kiln_status_t size = CheckSize(info, "kiln_entry_info_t", error);
  if (size != KILN_STATUS_OK) return size;
  Walk walk(bundle, error);
  const auto* record = walk.Entry(section, entry);
  if (record != nullptr) kiln::runtime::Describe(walk.view(), *record, info);
  return walk.status();
}

kiln_status_t kiln_bundle_attribute(const kiln_bundle_t* bundle,
                                    uint32_t section, uint32_t entry,
                                    uint32_t attribute, const char** name,
                                    const char** value, kiln_error_t* error) {
  if (name == nullptr || value == nullptr) return Null("name or value", error);
  Walk walk(bundle, error);
  const auto* owner = walk.Entry(section, entry);
  if (owner == nullptr) return walk.status();
  const auto* record = walk.At(walk.view().attributes, owner->attributes,
                               attribute, "attribute");
  if (record == nullptr) return walk.status();
  *name = walk.view().Text(record->name);
  *value = walk.view().Text(record->value);
  return KILN_STATUS_OK;
}

kiln_status_t kiln_bundle_plan(const kiln_bundle_t* bundle, uint32_t section,
                               uint32_t entry, uint32_t plan,
                               kiln_plan_info_t* info, kiln_error_t* error) {
  const kiln_status_t size = CheckSize(info, "kiln_plan_info_t", error);
  if (size != KILN_STATUS_OK) return size;
  Walk walk(bundle, error);
  const auto* record = walk.Plan(section, entry, plan);
  if (record != nullptr) kiln::runtime::Describe(walk.view(), *record, info);
  return walk.status();
}

kiln_status_t kiln_bundle_param(const kiln_bundle_t* bundle, uint32_t section,
                                uint32_t entry, uint32_t plan, uint32_t param,
                                kiln_param_info_t* info, kiln_error_t* error) {
  const kiln_status_t size = CheckSize(info, "kiln_param_info_t", error);
  if (size != KILN_STATUS_OK) return size;
  Walk walk(bundle, error);
  const auto* owner = walk.Plan(section, entry, plan);
  if (owner == nullptr) return walk.status();
  const auto* record =
      walk.At(walk.view().params, owner->params, param, "parameter");
  if (record != nullptr) {
    kiln::runtime::Describe(walk.view(), *record, param, info);
  }
  return walk.status();
}

kiln_status_t kiln_bundle_buffer(const kiln_bundle_t* bundle, uint32_t section,
                                 uint32_t entry, uint32_t plan, uint32_t param,
                                 kiln_buffer_info_t* info,
                                 kiln_error_t* error) {
  const kiln_status_t size = CheckSize(info, "kiln_buffer_info_t", error);
  if (size != KILN_STATUS_OK) return size;
  Walk walk(bundle, error);
  const auto* owner = walk.Plan(section, entry, plan);
  if (owner == nullptr) return walk.status();
  const auto* record =
      walk.At(walk.view().params, owner->params, param, "parameter");
  if (record != nullptr) kiln::runtime::Describe(*record, info);
  return walk.status();
}

kiln_status_t kiln_bundle_golden(const kiln_bundle_t* bundle, uint32_t section,
                                 uint32_t entry, uint32_t plan, uint8_t* digest,
                                 kiln_error_t* error) {
  if (digest == nullptr) return Null("digest", error);
  Walk walk(bundle, error);
  const auto* record = walk.Plan(section, entry, plan);
  if (record != nullptr) memcpy(digest, record->golden, sizeof(record->golden));
  return walk.status();
}

kiln_status_t kiln_bundle_slice(const kiln_bundle_t* bundle, uint32_t section,
                                uint32_t entry, uint32_t plan, uint32_t slice,
                                kiln_slice_info_t* info, kiln_error_t* error) {
  const kiln_status_t size = CheckSize(info, "kiln_slice_info_t", error);
  if (size != KILN_STATUS_OK) return size;
  Walk walk(bundle, error);
  const auto* owner = walk.Plan(section, entry, plan);
  if (owner == nullptr) return walk.status();
  const auto* record =
      walk.At(walk.view().slices, owner->slices, slice, "slice");
  if (record != nullptr) kiln::runtime::Describe(walk.view(), *record, info);
  return walk.status();
}

kiln_status_t kiln_bundle_step(const kiln_bundle_t* bundle, uint32_t section,
                               uint32_t entry, uint32_t plan, uint32_t step,
                               kiln_step_info_t* info, kiln_error_t* error) {
  const kiln_status_t size = CheckSize(info, "kiln_step_info_t", error);
  if (size != KILN_STATUS_OK) return size;
  Walk walk(bundle, error);
  const auto* record = walk.Step(section, entry, plan, step);
  if (record != nullptr) {
    kiln::runtime::Describe(walk.view(), *walk.Section(section), *record, info);
  }
  return walk.status();
}

kiln_status_t kiln_bundle_arg(const kiln_bundle_t* bundle, uint32_t section,
                              uint32_t entry, uint32_t plan, uint32_t step,
                              uint32_t arg, kiln_arg_info_t* info,
                              kiln_error_t* error) {
  const kiln_status_t size = CheckSize(info, "kiln_arg_info_t", error);
  if (size != KILN_STATUS_OK) return size;
  Walk walk(bundle, error);
  const auto* owner = walk.Step(section, entry, plan, step);
  if (owner == nullptr) return walk.status();
  const auto* record = walk.At(walk.view().args, owner->args, arg, "argument");
  if (record != nullptr) kiln::runtime::Describe(*record, info);
  return walk.status();
}

kiln_status_t kiln_bundle_program(const kiln_bundle_t* bundle, uint32_t section,
                                  uint32_t program, kiln_program_info_t* info,
                                  kiln_error_t* error) {
  const kiln_status_t size = CheckSize(info, "kiln_program_info_t", error);
  if (size != KILN_STATUS_OK) return size;
  Walk walk(bundle, error);
  const auto* record = walk.Program(section, program);
  if (record != nullptr) kiln::runtime::Describe(walk.view(), *record, info);
  return walk.status();
}

kiln_status_t kiln_bundle_kernel(const kiln_bundle_t* bundle, uint32_t section,
                                 uint32_t program, uint32_t kernel,
                                 kiln_kernel_info_t* info,
                                 kiln_error_t* error) {
  const kiln_status_t size = CheckSize(info, "kiln_kernel_info_t", error);
  if (size != KILN_STATUS_OK) return size;
  Walk walk(bundle, error);
  const auto* record = walk.Kernel(section, program, kernel);
  if (record != nullptr) kiln::runtime::Describe(walk.view(), *record, info);
  return walk.status();
}

kiln_status_t kiln_bundle_kernel_param(const kiln_bundle_t* bundle,
                                       uint32_t section, uint32_t program,
                                       uint32_t kernel, uint32_t param,
                                       uint32_t* offset, uint32_t* bytes,
                                       kiln_error_t* error) {
  if (offset == nullptr || bytes == nullptr) {
    return Null("offset or bytes", error);
  }
  Walk walk(bundle, error);
  const auto* owner = walk.Kernel(section, program, kernel);
  if (owner == nullptr) return walk.status();
  const auto* record = walk.At(walk.view().kernel_params, owner->params, param,
                               "kernel parameter");
  if (record == nullptr) return walk.status();
  *offset = record->offset;
  *bytes = record->bytes;
  return KILN_STATUS_OK;
}

kiln_status_t kiln_modules_load(const kiln_bundle_t* bundle,
                                const kiln_load_options_t* options,
                                kiln_modules_t** modules, kiln_error_t* error) {
  if (modules == nullptr) return Null("modules", error);
  LoadOptions checked;
  kiln_status_t status = ReadLoadOptions(options, &checked, error);
  if (status != KILN_STATUS_OK) return status;
  Bundle* opened = nullptr;
  status = ResolveBundle(bundle, &opened, error);
  if (status != KILN_STATUS_OK) return status;
  Modules* loaded = nullptr;
  status = kiln::runtime::LoadModules(opened, checked, &loaded, error);
  if (status != KILN_STATUS_OK) return status;
  const uint64_t value =
      kiln::runtime::MakeHandle(HandleKind::kModules, loaded);
  if (value == 0) {
    (void)kiln::runtime::UnloadModules(loaded, nullptr);
    return Failure(error, KILN_STATUS_OUT_OF_MEMORY)
           << "too many loaded modules sets, limit is "
           << kiln::runtime::kHandleSlots;
  }
  loaded->handle = value;
  *modules = Handle<kiln_modules_t>(value);
  return KILN_STATUS_OK;
}

kiln_status_t kiln_modules_unload(kiln_modules_t* modules,
                                  kiln_error_t* error) {
  if (modules == nullptr) return KILN_STATUS_OK;
  auto* loaded = static_cast<Modules*>(
      kiln::runtime::TakeHandle(HandleKind::kModules, Value(modules)));
  if (loaded == nullptr) return Closed("modules", modules, error);
  return kiln::runtime::UnloadModules(loaded, error);
}

kiln_status_t kiln_modules_info(const kiln_modules_t* modules,
                                kiln_modules_info_t* info,
                                kiln_error_t* error) {
  const kiln_status_t size = CheckSize(info, "kiln_modules_info_t", error);
  if (size != KILN_STATUS_OK) return size;
  const Modules* loaded = nullptr;
  const kiln_status_t status = ResolveModules(modules, &loaded, error);
  if (status != KILN_STATUS_OK) return status;
  const BundleView& view = loaded->bundle->view;
  info->backend = loaded->section->backend;
  info->section = static_cast<uint32_t>(loaded->section - view.sections);
  info->entry_count = loaded->section->entries.count;
  info->program_count = loaded->section->programs.count;
  info->cpu_threads = loaded->pool == nullptr ? 0 : loaded->pool->threads();
  memcpy(info->root, view.header->root, sizeof(info->root));
  info->target = loaded->target();
  return KILN_STATUS_OK;
}

kiln_status_t kiln_modules_selftest(const kiln_modules_t* modules,
                                    const kiln_selftest_options_t* options,
                                    kiln_selftest_result_t* result,
                                    kiln_error_t* error) {
  kiln_selftest_options_t checked = {};
  if (options != nullptr) {
    const kiln_status_t size =
        CheckSize(options, "kiln_selftest_options_t", error);
    if (size != KILN_STATUS_OK) return size;
    if ((options->flags & ~uint32_t{KILN_SELFTEST_COMPUTE}) != 0) {
      return Failure(error, KILN_STATUS_INVALID_ARGUMENT)
             << "kiln_selftest_options_t has unknown flags " << options->flags;
    }
    checked = *options;
  }
  kiln_selftest_result_t unused = {};
  if (result != nullptr) {
    const kiln_status_t size =
        CheckSize(result, "kiln_selftest_result_t", error);
    if (size != KILN_STATUS_OK) return size;
  }
  const Modules* loaded = nullptr;
  const kiln_status_t status = ResolveModules(modules, &loaded, error);
  if (status != KILN_STATUS_OK) return status;
  return kiln::runtime::RunSelftest(
      *loaded, checked, result == nullptr ? &unused : result, error);
}

kiln_status_t kiln_entry_find(const kiln_modules_t* modules, const char* name,
                              uint64_t m, const kiln_entry_t** entry,
                              kiln_error_t* error) {
  if (name == nullptr || entry == nullptr) return Null("name or entry", error);
  const Modules* loaded = nullptr;
  const kiln_status_t status = ResolveModules(modules, &loaded, error);
  if (status != KILN_STATUS_OK) return status;
  const kiln::runtime::NameBucket* bucket =
      kiln::runtime::FindName(*loaded, name);
  if (bucket == nullptr || m > bucket->capacity) {
    return kiln::runtime::RefuseFind(*loaded, bucket, name, m, error);
  }
  *entry = Handle<const kiln_entry_t>(kiln::runtime::EntryHandle(
      Value(modules), kiln::runtime::PlanFor(*bucket, m)));
  return KILN_STATUS_OK;
}

kiln_status_t kiln_entry_arena_size(const kiln_entry_t* entry, uint64_t* bytes,
                                    uint64_t* alignment, kiln_error_t* error) {
  const Modules* modules = nullptr;
  const LoadedPlan* plan = nullptr;
  const kiln_status_t status = ResolveEntry(entry, &modules, &plan, error);
  if (status != KILN_STATUS_OK) return status;
  if (bytes != nullptr) *bytes = plan->record->arena_bytes;
  if (alignment != nullptr) *alignment = KILN_FORMAT_ARENA_ALIGNMENT;
  return KILN_STATUS_OK;
}

kiln_status_t kiln_entry_params(const kiln_entry_t* entry, uint32_t* count,
                                uint32_t* bytes, kiln_error_t* error) {
  const Modules* modules = nullptr;
  const LoadedPlan* plan = nullptr;
  const kiln_status_t status = ResolveEntry(entry, &modules, &plan, error);
  if (status != KILN_STATUS_OK) return status;
  if (count != nullptr) *count = plan->record->params.count;
  if (bytes != nullptr) *bytes = plan->record->params.count * 8;
  return KILN_STATUS_OK;
}

kiln_status_t kiln_entry_param(const kiln_entry_t* entry, uint32_t index,
                               kiln_param_info_t* info, kiln_error_t* error) {
  kiln_status_t status = CheckSize(info, "kiln_param_info_t", error);
  if (status != KILN_STATUS_OK) return status;
  const Modules* modules = nullptr;
  const LoadedPlan* plan = nullptr;
  status = ResolveEntry(entry, &modules, &plan, error);
  if (status != KILN_STATUS_OK) return status;
  const kiln_format_range_t range = plan->record->params;
  if (index >= range.count) {
    return Failure(error, KILN_STATUS_INVALID_ARGUMENT)
           << "parameter index " << index << " of " << range.count;
  }
  const BundleView& view = modules->bundle->view;
  kiln::runtime::Describe(view, view.params[range.first + index], index, info);
  return KILN_STATUS_OK;
}

kiln_status_t kiln_entry_plan(const kiln_entry_t* entry, kiln_plan_info_t* info,
                              kiln_error_t* error) {
  kiln_status_t status = CheckSize(info, "kiln_plan_info_t", error);
  if (status != KILN_STATUS_OK) return status;
  const Modules* modules = nullptr;
  const LoadedPlan* plan = nullptr;
  status = ResolveEntry(entry, &modules, &plan, error);
  if (status != KILN_STATUS_OK) return status;
  kiln::runtime::Describe(modules->bundle->view, *plan->record, info);
  return KILN_STATUS_OK;
}

kiln_status_t kiln_launch(const kiln_modules_t* modules,
                          const kiln_entry_t* entry, uint64_t m,
                          const void* params, size_t params_bytes, void* arena,
                          size_t arena_bytes, struct CUstream_st* stream,
                          kiln_error_t* error) {
  const Modules* owner = nullptr;
  const LoadedPlan* plan = nullptr;
  kiln_status_t status = ResolveEntry(entry, &owner, &plan, error);
  if (status != KILN_STATUS_OK) return status;
  if (owner->handle != Value(modules)) {
    const Modules* given = nullptr;
    status = ResolveModules(modules, &given, error);
    if (status != KILN_STATUS_OK) return status;
    return Failure(error, KILN_STATUS_ENTRY_FOREIGN)
           << "entry belongs to another modules set than the one given";
  }
  if (m == 0) return KILN_STATUS_OK;
  return kiln::runtime::LaunchPlan(
      *owner, *plan, {m, params, params_bytes, arena, arena_bytes, stream},
      error);
}

}  // extern "C"
