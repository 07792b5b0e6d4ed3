#include "runtime/inspect.h"

#include <string.h>

namespace kiln::runtime {

// kiln.h promises the values of the format.
static_assert(KILN_BACKEND_CUDA + 0 == KILN_FORMAT_BACKEND_CUDA + 0);
static_assert(KILN_BACKEND_CPU + 0 == KILN_FORMAT_BACKEND_CPU + 0);
static_assert(KILN_CONTAINS_PREDICTED + 0 == KILN_FORMAT_FLAG_PREDICTED + 0);
static_assert(KILN_CONTAINS_UNQUALIFIED + 0 ==
              KILN_FORMAT_FLAG_UNQUALIFIED + 0);
static_assert(KILN_ARG_PARAM + 0 == KILN_FORMAT_ARG_PARAM + 0);
static_assert(KILN_ARG_ARENA + 0 == KILN_FORMAT_ARG_ARENA + 0);
static_assert(KILN_ARG_TOKENS + 0 == KILN_FORMAT_ARG_TOKENS + 0);
static_assert(KILN_ARG_U32 + 0 == KILN_FORMAT_ARG_U32 + 0);
static_assert(KILN_ARG_U64 + 0 == KILN_FORMAT_ARG_U64 + 0);
static_assert(KILN_FILL_NONE + 0 == KILN_FORMAT_FILL_NONE + 0);
static_assert(KILN_FILL_WORDS + 0 == KILN_FORMAT_FILL_WORDS + 0);
static_assert(KILN_FILL_INDICES + 0 == KILN_FORMAT_FILL_INDICES + 0);

void Describe(const BundleView& view, kiln_bundle_info_t* info) {
  info->format_version = view.header->version;
  info->flags = view.header->flags;
  info->section_count = view.section_count();
  info->bytes = view.bytes;
  memcpy(info->root, view.header->root, sizeof(info->root));
}

void Describe(const BundleView& view, const kiln_format_section_t& record,
              kiln_section_info_t* info) {
  info->backend = record.backend;
  info->level = record.level;
  info->arch_specific = record.arch_specific;
  info->driver_version_min = record.driver_version_min;
  info->flags = record.flags;
  info->entry_count = record.entries.count;
  info->program_count = record.programs.count;
  info->target = view.Text(record.target);
}

void Describe(const BundleView& view, const kiln_format_entry_t& record,
              kiln_entry_info_t* info) {
  info->capacity = record.capacity;
  info->plan_count = record.plans.count;
  info->attribute_count = record.attributes.count;
  info->name = view.Text(record.name);
  info->op = view.Text(record.op);
  info->geometry = view.Text(record.geometry);
}

void Describe(const BundleView& view, const kiln_format_plan_t& record,
              kiln_plan_info_t* info) {
  info->flags = record.flags;
  info->m_min = record.m_min;
  info->m_max = record.m_max;
  info->arena_bytes = record.arena_bytes;
  info->param_count = record.params.count;
  info->slice_count = record.slices.count;
  info->step_count = record.steps.count;
  info->cpu_threads = record.cpu_threads;
  info->deterministic = record.deterministic;
  info->template_version = record.template_version;
  info->template_name = view.Text(record.template_name);
  info->label = view.Text(record.label);
  info->numerics_class = view.Text(record.numerics_class);
  info->tolerance = record.tolerance;
  info->median_ns = record.median_ns;
  info->default_median_ns = record.default_median_ns;
  info->noise_floor = record.noise_floor;
  info->worst_error = record.worst_error;
  info->samples = record.samples;
  info->candidates = record.candidates;
  // The struct of ABI 1.0 ends here.
  if (info->struct_size < sizeof(*info)) return;
  info->overlapped = record.overlapped;
  info->reserved = 0;
}

void Describe(const BundleView& view, const kiln_format_param_t& record,
              uint32_t index, kiln_param_info_t* info) {
  info->output = record.output;
  info->offset = 8 * index;
  info->bytes = 8;
  info->name = view.Text(record.name);
  info->dtype = view.Text(record.dtype);
  info->shape = view.Text(record.shape);
}

void Describe(const kiln_format_param_t& record, kiln_buffer_info_t* info) {
  info->fill = record.fill;
  info->element_bytes = record.element_bytes;
  info->reserved = 0;
  info->bytes = record.bytes;
  info->bytes_per_token = record.bytes_per_token;
  info->a = record.fill_a;
  info->b = record.fill_b;
}

void Describe(const BundleView& view, const kiln_format_slice_t& record,
              kiln_slice_info_t* info) {
  info->reserved = 0;
  info->name = view.Text(record.name);
  info->offset = record.offset;
  info->bytes = record.bytes;
}

void Describe(const BundleView& view, const kiln_format_section_t& section,
              const kiln_format_step_t& record, kiln_step_info_t* info) {
  info->program = record.program - section.programs.first;
  info->kernel = record.kernel - view.programs[record.program].kernels.first;
  info->arg_count = record.args.count;
  info->label = view.Text(record.label);
  info->kernel_name = view.Text(view.kernels[record.kernel].name);
  for (int d = 0; d < 3; ++d) {
    for (int t = 0; t < 2; ++t) {
      info->grid[d].mul[t] = record.grid[d][t].mul;
      info->grid[d].add[t] = record.grid[d][t].add;
      info->grid[d].div[t] = record.grid[d][t].div;
    }
    info->block[d] = record.block[d];
  }
  info->dynamic_shared_bytes = record.dynamic_shared_bytes;
}

void Describe(const kiln_format_arg_t& record, kiln_arg_info_t* info) {
  info->kind = record.kind;
  info->offset = record.offset;
  info->bytes = ArgBytes(record.kind);
  info->value = record.value;
}

void Describe(const BundleView& view, const kiln_format_program_t& record,
              kiln_program_info_t* info) {
  info->kernel_count = record.kernels.count;
  memcpy(info->build_digest, record.build_digest, sizeof(info->build_digest));
  memcpy(info->binary_digest, record.binary_digest,
         sizeof(info->binary_digest));
  memcpy(info->toolchain_digest, record.toolchain_digest,
         sizeof(info->toolchain_digest));
  info->file_offset = record.offset;
  info->bytes = record.bytes;
  info->data = view.data + record.offset;
  info->toolchain = view.Text(record.toolchain);
}

void Describe(const BundleView& view, const kiln_format_kernel_t& record,
              kiln_kernel_info_t* info) {
  info->param_count = record.params.count;
  info->param_bytes = record.param_bytes;
  info->registers = record.registers;
  info->static_shared_bytes = record.static_shared_bytes;
  info->local_bytes = record.local_bytes;
  info->max_threads = record.max_threads;
  info->reserved = 0;
  info->name = view.Text(record.name);
}

}  // namespace kiln::runtime
