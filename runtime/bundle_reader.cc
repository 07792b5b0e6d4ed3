#include "runtime/bundle_reader.h"

#include <string.h>

#include "runtime/status.h"

namespace kiln::runtime {
namespace {

constexpr uint32_t kFlags =
    KILN_FORMAT_FLAG_PREDICTED | KILN_FORMAT_FLAG_UNQUALIFIED;

struct TableRule {
  const char* name;
  uint32_t record_bytes;
  uint64_t count_max;
};

constexpr TableRule kTables[KILN_FORMAT_TABLE_COUNT] = {
    {"sections", sizeof(kiln_format_section_t), KILN_FORMAT_SECTIONS_MAX},
    {"programs", sizeof(kiln_format_program_t), KILN_FORMAT_PROGRAMS_MAX},
    {"kernels", sizeof(kiln_format_kernel_t), KILN_FORMAT_KERNELS_MAX},
    {"kernel parameters", sizeof(kiln_format_kernel_param_t),
     KILN_FORMAT_KERNEL_PARAMS_MAX},
    {"entries", sizeof(kiln_format_entry_t), KILN_FORMAT_ENTRIES_MAX},
    {"attributes", sizeof(kiln_format_attribute_t), KILN_FORMAT_ATTRIBUTES_MAX},
    {"plans", sizeof(kiln_format_plan_t), KILN_FORMAT_PLANS_MAX},
    {"parameters", sizeof(kiln_format_param_t), KILN_FORMAT_PARAMS_MAX},
    {"arena slices", sizeof(kiln_format_slice_t), KILN_FORMAT_SLICES_MAX},
    {"steps", sizeof(kiln_format_step_t), KILN_FORMAT_STEPS_MAX},
    {"arguments", sizeof(kiln_format_arg_t), KILN_FORMAT_ARGS_MAX},
    {"strings", 1, KILN_FORMAT_STRINGS_BYTES_MAX},
};

uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

bool AllZero(const uint8_t* data, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; ++i) {
    if (data[i] != 0) return false;
  }
  return true;
}

bool IsMeasure(double value) {
  // False for NaN, infinities and negative numbers, minus zero included, which
  // keeps one encoding per value.
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(bits));
  return bits < 0x7ff0000000000000u;
}

// Checks structure in file order. Each table has a cursor; a range must begin
// at its cursor and moves it, which makes ranges tile.
class Verifier {
 public:
  Verifier(const BundleView& view, kiln_error_t* error)
      : v_(view), error_(error) {}

  kiln_status_t Run() {
    for (kiln_status_t (Verifier::*stage)() :
         {&Verifier::Strings, &Verifier::Sections, &Verifier::AllConsumed,
          &Verifier::Binaries}) {
      const kiln_status_t status = (this->*stage)();
      if (status != KILN_STATUS_OK) return status;
    }
    return KILN_STATUS_OK;
  }

 private:
  using Table = uint32_t;

  uint32_t Count(Table table) const { return v_.header->tables[table].count; }

  Failure Bad() const { return Failure(error_, KILN_STATUS_BUNDLE_MALFORMED); }

  // Names the record at fault: "plans record 3: ...".
  Failure Bad(Table table, uint64_t index) const {
    Failure failure = Bad();
    failure << "bundle " << kTables[table].name << " record " << index << ": ";
    return failure;
  }

  bool TextOk(kiln_format_text_t text) const {
    const uint64_t total = Count(KILN_FORMAT_TABLE_STRINGS);
    if (text.bytes > KILN_FORMAT_STRING_BYTES_MAX) return false;
    const uint64_t end = uint64_t{text.offset} + text.bytes;
    if (end >= total || v_.strings[end] != '\0') return false;
    if (text.offset != 0 && v_.strings[text.offset - 1] != '\0') return false;
    return memchr(v_.strings + text.offset, 0, text.bytes) == nullptr;
  }

  bool NameOk(kiln_format_text_t text) const {
    return text.bytes != 0 && TextOk(text);
  }

  // Takes the next `range.count` records of `table`.
  bool Take(Table table, kiln_format_range_t range, uint32_t count_max) {
    if (range.first != cursor_[table] || range.count > count_max ||
        range.count > Count(table) - cursor_[table]) {
      return false;
    }
    cursor_[table] += range.count;
    return true;
  }

  kiln_status_t Strings() {
    const uint64_t total = Count(KILN_FORMAT_TABLE_STRINGS);
    if (total == 0 || v_.strings[total - 1] != '\0') {
      return Bad() << "bundle string table is empty or not terminated";
    }
    const char* previous = nullptr;
    for (uint64_t at = 0; at < total;) {
      const char* text = v_.strings + at;
      const uint64_t bytes = strlen(text);
      for (uint64_t i = 0; i < bytes; ++i) {
        if (text[i] < 0x20 || text[i] > 0x7e) {
          return Bad() << "bundle string at " << at
                       << " is not printable ASCII";
        }
      }
      if (previous != nullptr && strcmp(previous, text) >= 0) {
        return Bad() << "bundle string at " << at
                     << " is out of order or repeated";
      }
      previous = text;
      at += bytes + 1;
    }
    return KILN_STATUS_OK;
  }

  kiln_status_t Sections() {
    uint32_t flags = 0;
    for (uint32_t i = 0; i < v_.section_count(); ++i) {
      const kiln_format_section_t& section = v_.sections[i];
      const kiln_status_t status = SectionHead(i, section);
      if (status != KILN_STATUS_OK) return status;
      const kiln_status_t programs = Programs(section);
      if (programs != KILN_STATUS_OK) return programs;
      const kiln_status_t entries = Entries(section);
      if (entries != KILN_STATUS_OK) return entries;
      if (section.flags != section_flags_) {
        return Bad(KILN_FORMAT_TABLE_SECTIONS, i)
               << "flags are " << section.flags << ", its plans say "
               << section_flags_;
      }
      flags |= section.flags;
    }
    if (v_.header->flags != flags) {
      return Bad() << "bundle flags are " << v_.header->flags
                   << ", its sections say " << flags;
    }
    return KILN_STATUS_OK;
  }

  kiln_status_t SectionHead(uint32_t index,
                            const kiln_format_section_t& section) {
    constexpr Table kTable = KILN_FORMAT_TABLE_SECTIONS;
    if (!NameOk(section.target) || section.reserved != 0 ||
        (section.flags & ~kFlags) != 0 || section.arch_specific > 1) {
      return Bad(kTable, index) << "bad target text, flags or reserved field";
    }
    const char* target = v_.Text(section.target);
    if (section.backend == KILN_FORMAT_BACKEND_CUDA) {
      if (section.level < 10 || section.level > 999) {
        return Bad(kTable, index) << "CUDA level " << section.level;
      }
    } else if (section.backend == KILN_FORMAT_BACKEND_CPU) {
      if (section.level < 2 || section.level > 4 ||
          section.arch_specific != 0 || section.driver_version_min != 0) {
        return Bad(kTable, index) << "CPU level " << section.level
                                  << ", variant or driver version";
      }
    } else {
      return Bad(kTable, index) << "unknown backend " << section.backend;
    }
    if (!TargetTextMatches(section, target)) {
      return Bad(kTable, index)
             << "target " << target << " does not match backend "
             << section.backend << ", level " << section.level;
    }
    if (index > 0 &&
        strcmp(v_.Text(v_.sections[index - 1].target), target) >= 0) {
      return Bad(kTable, index)
             << "target " << target << " is out of order or repeated";
    }
    if (!Take(KILN_FORMAT_TABLE_PROGRAMS, section.programs,
              KILN_FORMAT_PROGRAMS_MAX) ||
        !Take(KILN_FORMAT_TABLE_ENTRIES, section.entries,
              KILN_FORMAT_ENTRIES_MAX) ||
        section.entries.count == 0) {
      return Bad(kTable, index)
             << "ranges are empty, too long, or do not follow the section "
                "before";
    }
    section_flags_ = 0;
    return KILN_STATUS_OK;
  }

  static bool TargetTextMatches(const kiln_format_section_t& section,
                                const char* target) {
    const bool cuda = section.backend == KILN_FORMAT_BACKEND_CUDA;
    const char* prefix = cuda ? "sm_" : "cpu-x86-64-v";
    const size_t prefix_bytes = strlen(prefix);
    if (strncmp(target, prefix, prefix_bytes) != 0) return false;
    char digits[4];
    size_t n = 0;
    for (uint32_t rest = section.level; rest != 0; rest /= 10) {
      digits[n++] = static_cast<char>('0' + rest % 10);
    }
    const char* at = target + prefix_bytes;
    while (n > 0) {
      if (*at++ != digits[--n]) return false;
    }
    if (section.arch_specific != 0 && *at++ != 'a') return false;
    return *at == '\0';
  }

  kiln_status_t Programs(const kiln_format_section_t& section) {
    constexpr Table kTable = KILN_FORMAT_TABLE_PROGRAMS;
    for (uint32_t n = 0; n < section.programs.count; ++n) {
      const uint32_t index = section.programs.first + n;
      const kiln_format_program_t& program = v_.programs[index];
      if (!TextOk(program.toolchain)) {
        return Bad(kTable, index) << "bad toolchain text";
      }
      if (n > 0 && memcmp(v_.programs[index - 1].build_digest,
                          program.build_digest, 32) >= 0) {
        return Bad(kTable, index) << "build digest is out of order or repeated";
      }
      if (!Take(KILN_FORMAT_TABLE_KERNELS, program.kernels,
                KILN_FORMAT_PROGRAM_KERNELS_MAX) ||
          program.kernels.count == 0) {
        return Bad(kTable, index) << "bad kernel range";
      }
      for (uint32_t k = 0; k < program.kernels.count; ++k) {
        const kiln_status_t status =
            Kernel(section, program.kernels.first + k, k > 0);
        if (status != KILN_STATUS_OK) return status;
      }
    }
    return KILN_STATUS_OK;
  }

  kiln_status_t Kernel(const kiln_format_section_t& section, uint32_t index,
                       bool has_previous) {
    constexpr Table kTable = KILN_FORMAT_TABLE_KERNELS;
    const kiln_format_kernel_t& kernel = v_.kernels[index];
    if (!NameOk(kernel.name) || kernel.reserved != 0) {
      return Bad(kTable, index) << "bad name or reserved field";
    }
    if (has_previous && strcmp(v_.Text(v_.kernels[index - 1].name),
                               v_.Text(kernel.name)) >= 0) {
      return Bad(kTable, index) << "name is out of order or repeated";
    }
    if (kernel.param_bytes > KILN_FORMAT_ARG_BLOCK_BYTES_MAX ||
        !Take(KILN_FORMAT_TABLE_KERNEL_PARAMS, kernel.params,
              KILN_FORMAT_KERNEL_PARAMS_EACH_MAX)) {
      return Bad(kTable, index) << "bad parameter range or size";
    }
    uint64_t end = 0;
    for (uint32_t p = 0; p < kernel.params.count; ++p) {
      const kiln_format_kernel_param_t& param =
          v_.kernel_params[kernel.params.first + p];
      if (param.offset < end || param.bytes == 0 ||
          param.bytes > KILN_FORMAT_ARG_BLOCK_BYTES_MAX) {
        return Bad(kTable, index) << "parameter " << p << " overlaps or is "
                                  << "empty";
      }
      end = uint64_t{param.offset} + param.bytes;
    }
    const bool whole = section.backend == KILN_FORMAT_BACKEND_CUDA ||
                       (kernel.params.count == 1 && end == kernel.param_bytes &&
                        v_.kernel_params[kernel.params.first].offset == 0) ||
                       (kernel.params.count == 0 && kernel.param_bytes == 0);
    if (end > kernel.param_bytes || !whole) {
      return Bad(kTable, index) << "parameters end at " << end << ", block has "
                                << kernel.param_bytes << " bytes";
    }
    return KILN_STATUS_OK;
  }

  kiln_status_t Entries(const kiln_format_section_t& section) {
    constexpr Table kTable = KILN_FORMAT_TABLE_ENTRIES;
    for (uint32_t n = 0; n < section.entries.count; ++n) {
      const uint32_t index = section.entries.first + n;
      const kiln_format_entry_t& entry = v_.entries[index];
      if (!NameOk(entry.name) || !NameOk(entry.op) || !TextOk(entry.geometry) ||
          entry.reserved != 0) {
        return Bad(kTable, index) << "bad text or reserved field";
      }
      if (n > 0 && strcmp(v_.Text(v_.entries[index - 1].name),
                          v_.Text(entry.name)) >= 0) {
        return Bad(kTable, index) << "name is out of order or repeated";
      }
      if (!Take(KILN_FORMAT_TABLE_ATTRIBUTES, entry.attributes,
                KILN_FORMAT_ENTRY_ATTRIBUTES_MAX) ||
          !Take(KILN_FORMAT_TABLE_PLANS, entry.plans,
                KILN_FORMAT_ENTRY_PLANS_MAX) ||
          entry.plans.count == 0) {
        return Bad(kTable, index) << "bad attribute or plan range";
      }
      for (uint32_t a = 0; a < entry.attributes.count; ++a) {
        const kiln_format_attribute_t& attribute =
            v_.attributes[entry.attributes.first + a];
        if (!NameOk(attribute.name) || !TextOk(attribute.value)) {
          return Bad(kTable, index) << "bad text of attribute " << a;
        }
      }
      const kiln_status_t status = Coverage(section, index, entry);
      if (status != KILN_STATUS_OK) return status;
    }
    return KILN_STATUS_OK;
  }

  // Intervals cover 1..capacity without gap or overlap.
  kiln_status_t Coverage(const kiln_format_section_t& section, uint32_t index,
                         const kiln_format_entry_t& entry) {
    uint64_t covered = 0;
    for (uint32_t p = 0; p < entry.plans.count; ++p) {
      const kiln_format_plan_t& plan = v_.plans[entry.plans.first + p];
      if (plan.m_min != covered + 1 || plan.m_max < plan.m_min ||
          plan.m_max > KILN_FORMAT_TOKENS_MAX) {
        return Bad(KILN_FORMAT_TABLE_ENTRIES, index)
               << "interval " << plan.m_min << ".." << plan.m_max
               << " does not continue at " << covered + 1;
      }
      covered = plan.m_max;
      const kiln_status_t status = Plan(section, entry.plans.first + p, plan);
      if (status != KILN_STATUS_OK) return status;
    }
    if (covered != entry.capacity) {
      return Bad(KILN_FORMAT_TABLE_ENTRIES, index)
             << "intervals end at " << covered << ", capacity is "
             << entry.capacity;
    }
    return KILN_STATUS_OK;
  }

  kiln_status_t Plan(const kiln_format_section_t& section, uint32_t index,
                     const kiln_format_plan_t& plan) {
    constexpr Table kTable = KILN_FORMAT_TABLE_PLANS;
    const bool cpu = section.backend == KILN_FORMAT_BACKEND_CPU;
    if (!NameOk(plan.template_name) || !NameOk(plan.label) ||
        !TextOk(plan.numerics_class) || (plan.flags & ~kFlags) != 0 ||
        plan.deterministic > 1 || plan.overlapped > (cpu ? 0u : 1u) ||
        plan.reserved != 0) {
      return Bad(kTable, index) << "bad text, flags or reserved field";
    }
    if (!IsMeasure(plan.tolerance) || !IsMeasure(plan.median_ns) ||
        !IsMeasure(plan.default_median_ns) || !IsMeasure(plan.noise_floor) ||
        !IsMeasure(plan.worst_error)) {
      return Bad(kTable, index) << "a measure is negative or not finite";
    }
    if (cpu ? plan.cpu_threads < 1 ||
                  plan.cpu_threads > KILN_FORMAT_CPU_THREADS_MAX
            : plan.cpu_threads != 0) {
      return Bad(kTable, index) << "cpu_threads is " << plan.cpu_threads;
    }
    if (plan.arena_bytes > KILN_FORMAT_ARENA_BYTES_MAX ||
        plan.arena_bytes % KILN_FORMAT_ARENA_ALIGNMENT != 0) {
      return Bad(kTable, index) << "arena of " << plan.arena_bytes
                                << " bytes is too large or not a multiple of "
                                << KILN_FORMAT_ARENA_ALIGNMENT;
    }
    if (!Take(KILN_FORMAT_TABLE_PARAMS, plan.params,
              KILN_FORMAT_PLAN_PARAMS_MAX) ||
        !Take(KILN_FORMAT_TABLE_SLICES, plan.slices,
              KILN_FORMAT_PLAN_SLICES_MAX) ||
        !Take(KILN_FORMAT_TABLE_STEPS, plan.steps,
              KILN_FORMAT_PLAN_STEPS_MAX) ||
        plan.steps.count == 0) {
      return Bad(kTable, index) << "bad parameter, slice or step range";
    }
    section_flags_ |= plan.flags;
    bool replayable = true;
    bool outputs = false;
    for (uint32_t p = 0; p < plan.params.count; ++p) {
      const kiln_format_param_t& param = v_.params[plan.params.first + p];
      if (!NameOk(param.name) || !TextOk(param.dtype) || !TextOk(param.shape) ||
          param.output > 1 || param.reserved != 0 ||
          !BufferOk(param, plan.m_max)) {
        return Bad(kTable, index) << "parameter " << p << " is malformed";
      }
      if (param.element_bytes == 0) replayable = false;
      if (param.output != 0) outputs = true;
    }
    if (!AllZero(plan.golden, sizeof(plan.golden)) &&
        !(replayable && outputs && plan.deterministic != 0 &&
          (plan.flags & KILN_FORMAT_FLAG_PREDICTED) == 0)) {
      return Bad(kTable, index)
             << "has a golden digest, but was never run, does not repeat "
                "itself, or does not declare its buffers";
    }
    uint64_t end = 0;
    for (uint32_t s = 0; s < plan.slices.count; ++s) {
      const kiln_format_slice_t& slice = v_.slices[plan.slices.first + s];
      if (!TextOk(slice.name) || slice.offset < end ||
          slice.offset % KILN_FORMAT_ARENA_ALIGNMENT != 0 ||
          slice.bytes > plan.arena_bytes ||
          slice.offset > plan.arena_bytes - slice.bytes) {
        return Bad(kTable, index)
               << "arena slice " << s << " overlaps, is misaligned, or lies "
               << "outside the arena";
      }
      end = slice.offset + slice.bytes;
    }
    for (uint32_t s = 0; s < plan.steps.count; ++s) {
      const kiln_status_t status = Step(section, plan, plan.steps.first + s);
      if (status != KILN_STATUS_OK) return status;
    }
    return KILN_STATUS_OK;
  }

  // Size and fill of a parameter's buffer: one encoding for each meaning.
  static bool BufferOk(const kiln_format_param_t& param, uint32_t m_max) {
    const uint32_t element = param.element_bytes;
    if (element == 0) {
      return param.fill == KILN_FORMAT_FILL_NONE && param.bytes == 0 &&
             param.bytes_per_token == 0 && param.fill_a == 0 &&
             param.fill_b == 0;
    }
    if (element != 1 && element != 2 && element != 4 && element != 8) {
      return false;
    }
    constexpr uint64_t kMax = KILN_FORMAT_PARAM_BYTES_MAX;
    if (param.bytes % element != 0 || param.bytes_per_token % element != 0 ||
        param.bytes > kMax || param.bytes_per_token > kMax / m_max ||
        param.bytes + param.bytes_per_token * m_max > kMax ||
        param.bytes + param.bytes_per_token == 0) {
      return false;
    }
    const uint64_t largest = UINT64_MAX >> (64 - 8 * element);
    switch (param.fill) {
      case KILN_FORMAT_FILL_NONE:
        return param.output != 0 && param.fill_a == 0 && param.fill_b == 0;
      case KILN_FORMAT_FILL_WORDS:
        return param.output == 0 && param.fill_a <= largest &&
               param.fill_b <= largest && (param.fill_a & param.fill_b) == 0;
      case KILN_FORMAT_FILL_INDICES:
        return param.output == 0 && param.fill_a >= 1 &&
               param.fill_a <= largest && param.fill_b == 0;
      default:
        return false;
    }
  }

  static bool Inside(uint32_t index, kiln_format_range_t range) {
    return index >= range.first && index - range.first < range.count;
  }

  kiln_status_t Step(const kiln_format_section_t& section,
                     const kiln_format_plan_t& plan, uint32_t index) {
    constexpr Table kTable = KILN_FORMAT_TABLE_STEPS;
    const kiln_format_step_t& step = v_.steps[index];
    if (!TextOk(step.label)) return Bad(kTable, index) << "bad label";
    if (!Inside(step.program, section.programs) ||
        !Inside(step.kernel, v_.programs[step.program].kernels)) {
      return Bad(kTable, index)
             << "program " << step.program << " or kernel " << step.kernel
             << " is not in its section or program";
    }
    const kiln_format_kernel_t& kernel = v_.kernels[step.kernel];
    for (int d = 0; d < 3; ++d) {
      if (step.grid[d][0].div == 0 || step.grid[d][1].div == 0) {
        return Bad(kTable, index) << "grid dimension " << d << " divides by 0";
      }
      // Terms grow with m, so the largest grid is the one at m_max.
      const uint64_t largest = EvaluateDim(step.grid[d], plan.m_max);
      const uint64_t limit =
          d == 0 ? KILN_FORMAT_GRID_X_MAX : KILN_FORMAT_GRID_YZ_MAX;
      if (largest > limit) {
        return Bad(kTable, index)
               << "grid dimension " << d << " is " << largest << " at m "
               << plan.m_max << ", limit is " << limit;
      }
    }
    uint64_t threads = 1;
    for (const uint32_t n : step.block) {
      if (n < 1 || n > KILN_FORMAT_BLOCK_THREADS_MAX) {
        return Bad(kTable, index) << "block dimension of " << n << " threads";
      }
      threads *= n;
    }
    const uint64_t threads_max = section.backend == KILN_FORMAT_BACKEND_CPU ? 1
                                 : kernel.max_threads != 0 ? kernel.max_threads
                                                           : 1024;
    if (threads > threads_max || threads > KILN_FORMAT_BLOCK_THREADS_MAX) {
      return Bad(kTable, index)
             << "block of " << threads << " threads, limit is " << threads_max;
    }
    if (section.backend == KILN_FORMAT_BACKEND_CPU &&
        step.dynamic_shared_bytes != 0) {
      return Bad(kTable, index) << "shared memory on the CPU";
    }
    return Args(plan, index, step, kernel,
                section.backend == KILN_FORMAT_BACKEND_CUDA);
  }

  kiln_status_t Args(const kiln_format_plan_t& plan, uint32_t index,
                     const kiln_format_step_t& step,
                     const kiln_format_kernel_t& kernel, bool cuda) {
    constexpr Table kTable = KILN_FORMAT_TABLE_STEPS;
    if (!Take(KILN_FORMAT_TABLE_ARGS, step.args, KILN_FORMAT_STEP_ARGS_MAX)) {
      return Bad(kTable, index) << "bad argument range";
    }
    if (cuda && step.args.count != kernel.params.count) {
      return Bad(kTable, index)
             << "passes " << step.args.count << " arguments, kernel declares "
             << kernel.params.count;
    }
    uint64_t end = 0;
    for (uint32_t a = 0; a < step.args.count; ++a) {
      const kiln_format_arg_t& arg = v_.args[step.args.first + a];
      bool in_range = false;
      switch (arg.kind) {
        case KILN_FORMAT_ARG_PARAM:
          in_range = arg.value < plan.params.count;
          break;
        case KILN_FORMAT_ARG_ARENA:
          in_range = arg.value < plan.slices.count;
          break;
        case KILN_FORMAT_ARG_TOKENS:
          in_range = arg.value == 0;
          break;
        case KILN_FORMAT_ARG_U32:
          in_range = arg.value <= UINT32_MAX;
          break;
        case KILN_FORMAT_ARG_U64:
          in_range = true;
          break;
        default:
          break;
      }
      if (!in_range) {
        return Bad(kTable, index) << "argument " << a << " of kind " << arg.kind
                                  << " has value " << arg.value;
      }
      const uint32_t bytes = ArgBytes(arg.kind);
      if (arg.offset != AlignUp(end, bytes)) {
        return Bad(kTable, index)
               << "argument " << a << " is at offset " << arg.offset;
      }
      end = uint64_t{arg.offset} + bytes;
      if (cuda) {
        const kiln_format_kernel_param_t& declared =
            v_.kernel_params[kernel.params.first + a];
        if (declared.offset != arg.offset || declared.bytes != bytes) {
          return Bad(kTable, index)
                 << "argument " << a << " has " << bytes << " bytes at "
                 << arg.offset << ", kernel declares " << declared.bytes
                 << " at " << declared.offset;
        }
      }
    }
    if (kernel.param_bytes != end && kernel.param_bytes != AlignUp(end, 8)) {
      return Bad(kTable, index)
             << "arguments take " << end << " bytes, kernel declares "
             << kernel.param_bytes;
    }
    return KILN_STATUS_OK;
  }

  kiln_status_t AllConsumed() {
    for (Table table = KILN_FORMAT_TABLE_PROGRAMS;
         table < KILN_FORMAT_TABLE_STRINGS; ++table) {
      if (cursor_[table] != Count(table)) {
        return Bad() << "bundle " << kTables[table].name << " table has "
                     << Count(table) << " records, " << cursor_[table]
                     << " are owned";
      }
    }
    return KILN_STATUS_OK;
  }

  kiln_status_t Binaries() {
    constexpr Table kTable = KILN_FORMAT_TABLE_PROGRAMS;
    const kiln_format_table_t& strings =
        v_.header->tables[KILN_FORMAT_TABLE_STRINGS];
    uint64_t end = strings.offset + strings.count;
    if (v_.header->binaries_offset !=
        AlignUp(end, KILN_FORMAT_BINARY_ALIGNMENT)) {
      return Bad() << "bundle binaries begin at " << v_.header->binaries_offset
                   << ", expected "
                   << AlignUp(end, KILN_FORMAT_BINARY_ALIGNMENT);
    }
    for (uint32_t i = 0; i < Count(kTable); ++i) {
      const kiln_format_program_t& program = v_.programs[i];
      const uint64_t begin = AlignUp(end, KILN_FORMAT_BINARY_ALIGNMENT);
      if (program.offset != begin || program.bytes == 0 ||
          program.bytes > KILN_FORMAT_BINARY_BYTES_MAX || begin > v_.bytes ||
          program.bytes > v_.bytes - begin) {
        return Bad(kTable, i) << "binary of " << program.bytes << " bytes at "
                              << program.offset << ", expected at " << begin
                              << " in a file of " << v_.bytes;
      }
      if (!AllZero(v_.data + end, begin - end)) {
        return Bad(kTable, i) << "padding before the binary is not zero";
      }
      end = begin + program.bytes;
    }
    if (end != v_.bytes) {
      return Bad() << "bundle has " << v_.bytes << " bytes, its content ends "
                   << "at " << end;
    }
    return KILN_STATUS_OK;
  }

  const BundleView& v_;
  kiln_error_t* error_;
  uint32_t cursor_[KILN_FORMAT_TABLE_COUNT] = {};
  uint32_t section_flags_ = 0;
};

// Where the tables lie: each at the next multiple of 8, zero bytes between.
kiln_status_t CheckDirectory(const uint8_t* data, size_t bytes,
                             const kiln_format_header_t* header,
                             kiln_error_t* error) {
  uint64_t end = sizeof(kiln_format_header_t);
  for (uint32_t i = 0; i < KILN_FORMAT_TABLE_COUNT; ++i) {
    const kiln_format_table_t& table = header->tables[i];
    const TableRule& rule = kTables[i];
    if (table.record_bytes != rule.record_bytes) {
      return Failure(error, KILN_STATUS_BUNDLE_MALFORMED)
             << "bundle " << rule.name << " records have " << table.record_bytes
             << " bytes, expected " << rule.record_bytes;
    }
    if (table.count > rule.count_max) {
      return Failure(error, KILN_STATUS_BUNDLE_LIMIT)
             << "bundle has " << table.count << " " << rule.name
             << ", limit is " << rule.count_max;
    }
    const uint64_t begin = AlignUp(end, 8);
    // At most 2^26 records of at most 168 bytes: no overflow.
    const uint64_t table_bytes = uint64_t{table.count} * table.record_bytes;
    if (table.offset != begin || begin > bytes || table_bytes > bytes - begin) {
      return Failure(error, KILN_STATUS_BUNDLE_MALFORMED)
             << "bundle " << rule.name << " table of " << table_bytes
             << " bytes at " << table.offset << ", expected at " << begin
             << " in a file of " << bytes;
    }
    if (!AllZero(data + end, begin - end)) {
      return Failure(error, KILN_STATUS_BUNDLE_MALFORMED)
             << "padding before the bundle " << rule.name
             << " table is not zero";
    }
    end = begin + table_bytes;
  }
  if (header->tables[KILN_FORMAT_TABLE_SECTIONS].count == 0) {
    return Failure(error, KILN_STATUS_BUNDLE_MALFORMED)
           << "bundle has no section";
  }
  return KILN_STATUS_OK;
}

// What the header says of the content and itself, after VerifyHead.
kiln_status_t CheckHeader(const uint8_t* data, size_t bytes,
                          kiln_error_t* error) {
  const auto* header = reinterpret_cast<const kiln_format_header_t*>(data);
  uint8_t root[KILN_ROOT_BYTES];
  kiln_bundle_root(data, bytes, root);
  if (memcmp(header->root, root, sizeof(root)) != 0) {
    return Failure(error, KILN_STATUS_BUNDLE_DAMAGED)
           << "bundle is damaged: its content hashes to "
           << Hex{root, sizeof(root)} << ", its header says "
           << Hex{header->root, sizeof(root)};
  }
  if (header->runtime_abi != KILN_RUNTIME_ABI_MAJOR) {
    return Failure(error, KILN_STATUS_BUNDLE_VERSION)
           << "bundle needs runtime ABI " << header->runtime_abi
           << ", this runtime has " << KILN_RUNTIME_ABI_MAJOR;
  }
  if (header->header_bytes != sizeof(kiln_format_header_t) ||
      header->reserved != 0 || (header->flags & ~kFlags) != 0) {
    return Failure(error, KILN_STATUS_BUNDLE_MALFORMED)
           << "bundle header has a bad size, flag or reserved field";
  }
  return KILN_STATUS_OK;
}

template <typename T>
const T* TableAt(const uint8_t* data, const kiln_format_header_t* header,
                 uint32_t table) {
  return reinterpret_cast<const T*>(data + header->tables[table].offset);
}

}  // namespace

uint32_t ArgBytes(uint32_t kind) {
  return kind == KILN_FORMAT_ARG_TOKENS || kind == KILN_FORMAT_ARG_U32 ? 4 : 8;
}

kiln_status_t VerifyHead(const uint8_t* data, uint64_t bytes,
                         const uint8_t* expected_root, kiln_error_t* error) {
  const uint64_t magic_bytes =
      bytes < KILN_FORMAT_MAGIC_BYTES ? bytes : KILN_FORMAT_MAGIC_BYTES;
  if (memcmp(data, KILN_FORMAT_MAGIC, magic_bytes) != 0) {
    return Failure(error, KILN_STATUS_BUNDLE_NOT_A_BUNDLE)
           << "not a kiln bundle: the first 8 bytes are not its magic number";
  }
  if (bytes < sizeof(kiln_format_header_t)) {
    return Failure(error, KILN_STATUS_BUNDLE_TRUNCATED)
           << "bundle is truncated: " << bytes << " bytes, its header alone "
           << "has " << sizeof(kiln_format_header_t);
  }
  const auto* header = reinterpret_cast<const kiln_format_header_t*>(data);
  if (header->version != KILN_FORMAT_VERSION) {
    return Failure(error, KILN_STATUS_BUNDLE_VERSION)
           << "bundle has format version " << header->version
           << ", this runtime reads " << KILN_FORMAT_VERSION
           << "; freeze it again with the matching kiln";
  }
  if (header->file_bytes > KILN_FORMAT_FILE_BYTES_MAX) {
    return Failure(error, KILN_STATUS_BUNDLE_LIMIT)
           << "bundle declares " << header->file_bytes << " bytes, limit is "
           << KILN_FORMAT_FILE_BYTES_MAX;
  }
  if (bytes < header->file_bytes) {
    return Failure(error, KILN_STATUS_BUNDLE_TRUNCATED)
           << "bundle is truncated: " << bytes << " of " << header->file_bytes
           << " bytes";
  }
  if (bytes > header->file_bytes) {
    return Failure(error, KILN_STATUS_BUNDLE_MALFORMED)
           << "bundle has " << bytes << " bytes, its header declares "
           << header->file_bytes;
  }
  if (expected_root != nullptr &&
      memcmp(header->root, expected_root, KILN_ROOT_BYTES) != 0) {
    return Failure(error, KILN_STATUS_ROOT_MISMATCH)
           << "bundle root is " << Hex{header->root, KILN_ROOT_BYTES}
           << ", expected " << Hex{expected_root, KILN_ROOT_BYTES};
  }
  return KILN_STATUS_OK;
}

kiln_status_t VerifyBundle(const uint8_t* data, size_t bytes,
                           const uint8_t* expected_root, BundleView* view,
                           kiln_error_t* error) {
  const kiln_status_t head = VerifyHead(data, bytes, expected_root, error);
  if (head != KILN_STATUS_OK) return head;
  const kiln_status_t header = CheckHeader(data, bytes, error);
  if (header != KILN_STATUS_OK) return header;
  const auto* h = reinterpret_cast<const kiln_format_header_t*>(data);
  const kiln_status_t directory = CheckDirectory(data, bytes, h, error);
  if (directory != KILN_STATUS_OK) return directory;

  BundleView v;
  v.data = data;
  v.bytes = bytes;
  v.header = h;
  v.sections =
      TableAt<kiln_format_section_t>(data, h, KILN_FORMAT_TABLE_SECTIONS);
  v.programs =
      TableAt<kiln_format_program_t>(data, h, KILN_FORMAT_TABLE_PROGRAMS);
  v.kernels = TableAt<kiln_format_kernel_t>(data, h, KILN_FORMAT_TABLE_KERNELS);
  v.kernel_params = TableAt<kiln_format_kernel_param_t>(
      data, h, KILN_FORMAT_TABLE_KERNEL_PARAMS);
  v.entries = TableAt<kiln_format_entry_t>(data, h, KILN_FORMAT_TABLE_ENTRIES);
  v.attributes =
      TableAt<kiln_format_attribute_t>(data, h, KILN_FORMAT_TABLE_ATTRIBUTES);
  v.plans = TableAt<kiln_format_plan_t>(data, h, KILN_FORMAT_TABLE_PLANS);
  v.params = TableAt<kiln_format_param_t>(data, h, KILN_FORMAT_TABLE_PARAMS);
  v.slices = TableAt<kiln_format_slice_t>(data, h, KILN_FORMAT_TABLE_SLICES);
  v.steps = TableAt<kiln_format_step_t>(data, h, KILN_FORMAT_TABLE_STEPS);
  v.args = TableAt<kiln_format_arg_t>(data, h, KILN_FORMAT_TABLE_ARGS);
  v.strings = TableAt<char>(data, h, KILN_FORMAT_TABLE_STRINGS);
  const kiln_status_t status = Verifier(v, error).Run();
  if (status == KILN_STATUS_OK) *view = v;
  return status;
}

}  // namespace kiln::runtime
