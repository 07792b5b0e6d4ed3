#include "runtime/section_choice.h"

#include <string.h>

#include "runtime/cpu_level.h"
#include "runtime/status.h"

namespace kiln::runtime {
namespace {

bool IsShort(const char* target) {
  return target == nullptr || strcmp(target, "cuda") == 0 ||
         strcmp(target, "cpu") == 0;
}

const kiln_format_section_t* FindSection(const BundleView& view,
                                         const char* target) {
  for (uint32_t i = 0; i < view.section_count(); ++i) {
    if (strcmp(view.Text(view.sections[i].target), target) == 0) {
      return &view.sections[i];
    }
  }
  return nullptr;
}

// Appends "sections: cpu-x86-64-v3, sm_90a".
void AppendSections(const BundleView& view, Failure* failure) {
  *failure << "; the bundle's sections are ";
  for (uint32_t i = 0; i < view.section_count(); ++i) {
    *failure << (i == 0 ? "" : ", ") << view.Text(view.sections[i].target);
  }
}

void AppendFix(const BundleView& view, const char* target, Failure* failure) {
  *failure << "; bundle " << Hex{view.header->root, 6}
           << "; fix: kiln prewarm MANIFEST --target " << target
           << ", then kiln freeze with that target";
}

}  // namespace

kiln_status_t ChooseBackend(const BundleView& view, const LoadOptions& options,
                            bool* cuda, kiln_error_t* error) {
  bool has_cuda = false;
  bool has_cpu = false;
  for (uint32_t i = 0; i < view.section_count(); ++i) {
    if (view.sections[i].backend == KILN_FORMAT_BACKEND_CUDA) {
      has_cuda = true;
    } else {
      has_cpu = true;
    }
  }
  if (!IsShort(options.target)) {
    const kiln_format_section_t* section = FindSection(view, options.target);
    if (section == nullptr) {
      Failure failure(error, KILN_STATUS_TARGET_MISSING);
      failure << "no section for target " << Quoted{options.target};
      AppendSections(view, &failure);
      AppendFix(view, "TARGET", &failure);
      return failure;
    }
    *cuda = section->backend == KILN_FORMAT_BACKEND_CUDA;
    return KILN_STATUS_OK;
  }
  if (options.target != nullptr) {
    *cuda = strcmp(options.target, "cuda") == 0;
    if (*cuda ? has_cuda : has_cpu) return KILN_STATUS_OK;
    Failure failure(error, KILN_STATUS_TARGET_MISSING);
    failure << "no section for backend " << options.target;
    AppendSections(view, &failure);
    AppendFix(view, *cuda ? "sm_NN" : "cpu", &failure);
    return failure;
  }
  if (has_cuda && has_cpu && options.context == nullptr) {
    Failure failure(error, KILN_STATUS_TARGET_AMBIGUOUS);
    failure << "no target chosen";
    AppendSections(view, &failure);
    return failure << "; set target to \"cuda\", \"cpu\" or one of them";
  }
  *cuda = has_cuda;
  return KILN_STATUS_OK;
}

kiln_status_t ChooseCudaSection(const BundleView& view,
                                const LoadOptions& options, uint32_t capability,
                                const kiln_format_section_t** section,
                                kiln_error_t* error) {
  if (!IsShort(options.target)) {
    const kiln_format_section_t* named = FindSection(view, options.target);
    if (named->level != capability) {
      return Failure(error, KILN_STATUS_TARGET_MISMATCH)
             << "section " << options.target << " is for compute capability "
             << named->level / 10 << "." << named->level % 10
             << ", the device has " << capability / 10 << "."
             << capability % 10;
    }
    *section = named;
    return KILN_STATUS_OK;
  }
  const kiln_format_section_t* best = nullptr;
  for (uint32_t i = 0; i < view.section_count(); ++i) {
    const kiln_format_section_t& candidate = view.sections[i];
    if (candidate.backend != KILN_FORMAT_BACKEND_CUDA ||
        candidate.level != capability) {
      continue;
    }
    if (best == nullptr || candidate.arch_specific > best->arch_specific) {
      best = &candidate;
    }
  }
  if (best == nullptr) {
    Failure failure(error, KILN_STATUS_TARGET_MISSING);
    failure << "no section for this device of compute capability "
            << capability / 10 << "." << capability % 10;
    AppendSections(view, &failure);
    AppendFix(view, "sm_NN", &failure);
    return failure;
  }
  *section = best;
  return KILN_STATUS_OK;
}

kiln_status_t ChooseCpuSection(const BundleView& view,
                               const LoadOptions& options,
                               const kiln_format_section_t** section,
                               kiln_error_t* error) {
  if (options.context != nullptr) {
    return Failure(error, KILN_STATUS_INVALID_ARGUMENT)
           << "a CUDA context was given for a CPU section";
  }
  const uint32_t level = HostCpuLevel();
  if (!IsShort(options.target)) {
    const kiln_format_section_t* named = FindSection(view, options.target);
    if (named->level > level) {
      return Failure(error, KILN_STATUS_TARGET_MISMATCH)
             << "section " << options.target << " needs x86-64 level "
             << named->level << ", this host has " << level;
    }
    *section = named;
    return KILN_STATUS_OK;
  }
  const kiln_format_section_t* best = nullptr;
  uint32_t lowest = UINT32_MAX;
  for (uint32_t i = 0; i < view.section_count(); ++i) {
    const kiln_format_section_t& candidate = view.sections[i];
    if (candidate.backend != KILN_FORMAT_BACKEND_CPU) continue;
    if (candidate.level < lowest) lowest = candidate.level;
    if (candidate.level <= level &&
        (best == nullptr || candidate.level > best->level)) {
      best = &candidate;
    }
  }
  if (best == nullptr) {
    Failure failure(error, KILN_STATUS_TARGET_MISMATCH);
    failure << "this host has x86-64 level " << level
            << ", the lowest CPU section needs " << lowest;
    AppendFix(view, "cpu", &failure);
    return failure;
  }
  *section = best;
  return KILN_STATUS_OK;
}

}  // namespace kiln::runtime
