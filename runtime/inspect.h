// Records of a verified bundle as the info structs of kiln.h. `struct_size` of
// the target is kept; every other member within it is written.

#ifndef KILN_RUNTIME_INSPECT_H_
#define KILN_RUNTIME_INSPECT_H_

#include "runtime/bundle_reader.h"
#include "runtime/kiln.h"

namespace kiln::runtime {

void Describe(const BundleView& view, kiln_bundle_info_t* info);
void Describe(const BundleView& view, const kiln_format_section_t& record,
              kiln_section_info_t* info);
void Describe(const BundleView& view, const kiln_format_entry_t& record,
              kiln_entry_info_t* info);
void Describe(const BundleView& view, const kiln_format_plan_t& record,
              kiln_plan_info_t* info);
void Describe(const BundleView& view, const kiln_format_param_t& record,
              uint32_t index, kiln_param_info_t* info);
void Describe(const kiln_format_param_t& record, kiln_buffer_info_t* info);
void Describe(const BundleView& view, const kiln_format_slice_t& record,
              kiln_slice_info_t* info);
// Program and kernel indices become relative to the section and the program.
void Describe(const BundleView& view, const kiln_format_section_t& section,
              const kiln_format_step_t& record, kiln_step_info_t* info);
void Describe(const kiln_format_arg_t& record, kiln_arg_info_t* info);
void Describe(const BundleView& view, const kiln_format_program_t& record,
              kiln_program_info_t* info);
void Describe(const BundleView& view, const kiln_format_kernel_t& record,
              kiln_kernel_info_t* info);

}  // namespace kiln::runtime

#endif  // KILN_RUNTIME_INSPECT_H_
