#include "compiler/bundle_writer.h"

#include <string.h>

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/bundle_attributes.h"
#include "compiler/bundle_writer_check.h"
#include "runtime/bundle_format.h"

namespace kiln {
namespace {

// kiln.h's KILN_RUNTIME_ABI_MAJOR; the writer may see the format only.
constexpr uint32_t kRuntimeAbi = 1;

bool IsPrintable(absl::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return c >= 0x20 && c <= 0x7e; });
}

// Strings in two passes: the first collects, the second knows every offset.
class StringTable {
 public:
  absl::Status Add(absl::string_view what, absl::string_view text) {
    if (!IsPrintable(text)) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, " has a character that is not printable ASCII"));
    }
    if (text.size() > KILN_FORMAT_STRING_BYTES_MAX) {
      return absl::ResourceExhaustedError(
          absl::StrCat(what, " has ", text.size(), " bytes, limit is ",
                       KILN_FORMAT_STRING_BYTES_MAX));
    }
    offsets_.emplace(std::string(text), 0);
    return absl::OkStatus();
  }

  absl::Status Freeze() {
    for (auto& [text, offset] : offsets_) {
      offset = static_cast<uint32_t>(bytes_.size());
      bytes_.append(text).push_back('\0');
      if (bytes_.size() > KILN_FORMAT_STRINGS_BYTES_MAX) {
        return absl::ResourceExhaustedError(absl::StrCat(
            "bundle strings exceed ", KILN_FORMAT_STRINGS_BYTES_MAX, " bytes"));
      }
    }
    return absl::OkStatus();
  }

  kiln_format_text_t Find(absl::string_view text) const {
    const auto found = offsets_.find(std::string(text));
    KILN_CHECK(found != offsets_.end());
    return {.offset = found->second,
            .bytes = static_cast<uint32_t>(text.size())};
  }

  const std::string& bytes() const { return bytes_; }

 private:
  std::map<std::string, uint32_t> offsets_;
  std::string bytes_;
};

std::string ToolchainText(const Toolchain& toolchain) {
  return absl::StrCat(toolchain.name, " ", toolchain.version);
}

absl::Status CollectPlanStrings(const Plan& plan, StringTable* strings) {
  const PlanBody& body = plan.body;
  RETURN_IF_ERROR(strings->Add("template name", body.template_name));
  RETURN_IF_ERROR(strings->Add("plan label", body.Label()));
  RETURN_IF_ERROR(strings->Add("numerics class", body.numerics_class));
  for (const ParamDecl& param : body.params) {
    RETURN_IF_ERROR(strings->Add("parameter name", param.name));
    RETURN_IF_ERROR(strings->Add("parameter dtype", param.dtype));
    RETURN_IF_ERROR(strings->Add("parameter shape", param.shape));
  }
  for (const ArenaSlice& slice : body.arena.slices) {
    RETURN_IF_ERROR(strings->Add("arena slice name", slice.name));
  }
  for (const Step& step : body.steps) {
    RETURN_IF_ERROR(strings->Add("step label", step.label));
  }
  return absl::OkStatus();
}

absl::Status CollectStrings(const SortedSection& section,
                            StringTable* strings) {
  RETURN_IF_ERROR(strings->Add("target", section.target));
  for (const std::shared_ptr<const Program>& program : section.programs) {
    RETURN_IF_ERROR(
        strings->Add("toolchain", ToolchainText(program->toolchain)));
    for (const Kernel& kernel : program->kernels) {
      RETURN_IF_ERROR(strings->Add("kernel name", kernel.entry));
    }
  }
  for (const BundleEntry* entry : section.entries) {
    RETURN_IF_ERROR(strings->Add("entry name", entry->name));
    RETURN_IF_ERROR(strings->Add("op", OpName(entry->geometry.op)));
    RETURN_IF_ERROR(strings->Add("geometry", entry->geometry.ToString()));
    for (const CanonicalField& field : GeometryAttributes(entry->geometry)) {
      RETURN_IF_ERROR(strings->Add("attribute name", field.path));
      RETURN_IF_ERROR(strings->Add("attribute value", field.value));
    }
    for (const Plan& plan : entry->plans) {
      RETURN_IF_ERROR(CollectPlanStrings(plan, strings));
    }
  }
  return absl::OkStatus();
}

// The tables as they grow, in the order of the format.
class TableBuilder {
 public:
  explicit TableBuilder(const StringTable& strings) : strings_(strings) {}

  void AddSection(const SortedSection& sorted) {
    const BundleSection& in = *sorted.section;
    kiln_format_section_t out = {};
    out.target = strings_.Find(sorted.target);
    out.backend = in.target.backend == Backend::kCuda ? KILN_FORMAT_BACKEND_CUDA
                                                      : KILN_FORMAT_BACKEND_CPU;
    out.level = static_cast<uint32_t>(in.target.level);
    out.arch_specific = in.target.arch_specific ? 1 : 0;
    out.driver_version_min = in.driver_version_min;
    out.programs = Range(programs_, sorted.programs.size());
    out.entries = Range(entries_, sorted.entries.size());
    std::map<Digest, uint32_t> program_index;
    for (const std::shared_ptr<const Program>& program : sorted.programs) {
      program_index[program->key.digest] =
          static_cast<uint32_t>(programs_.size());
      AddProgram(*program);
    }
    flags_ = 0;
    for (const BundleEntry* entry : sorted.entries) {
      AddEntry(in, *entry, program_index, sorted.programs);
    }
    out.flags = flags_;
    header_flags_ |= flags_;
    sections_.push_back(out);
    for (const std::shared_ptr<const Program>& program : sorted.programs) {
      binaries_.push_back(&program->binary);
    }
  }

  absl::StatusOr<std::string> Finish() {
    RETURN_IF_ERROR(CheckLimits());
    kiln_format_header_t header = {};
    memcpy(header.magic, KILN_FORMAT_MAGIC, KILN_FORMAT_MAGIC_BYTES);
    header.version = KILN_FORMAT_VERSION;
    header.header_bytes = sizeof(header);
    header.runtime_abi = kRuntimeAbi;
    header.flags = header_flags_;

    std::string out(sizeof(header), '\0');
    const auto append = [&](uint32_t table, const void* data, size_t count,
                            size_t record_bytes) {
      out.resize(AlignUp(out.size(), 8), '\0');
      header.tables[table] = {
          .offset = out.size(),
          .count = static_cast<uint32_t>(count),
          .record_bytes = static_cast<uint32_t>(record_bytes)};
      if (count != 0) {
        out.append(static_cast<const char*>(data), count * record_bytes);
      }
    };
    const auto append_table = [&](uint32_t table, const auto& records) {
      append(table, records.data(), records.size(), sizeof(records[0]));
    };
    // Offsets of binaries follow from the sizes of everything before them.
    PlaceBinaries(&header);
    append_table(KILN_FORMAT_TABLE_SECTIONS, sections_);
    append_table(KILN_FORMAT_TABLE_PROGRAMS, programs_);
    append_table(KILN_FORMAT_TABLE_KERNELS, kernels_);
    append_table(KILN_FORMAT_TABLE_KERNEL_PARAMS, kernel_params_);
    append_table(KILN_FORMAT_TABLE_ENTRIES, entries_);
    append_table(KILN_FORMAT_TABLE_ATTRIBUTES, attributes_);
    append_table(KILN_FORMAT_TABLE_PLANS, plans_);
    append_table(KILN_FORMAT_TABLE_PARAMS, params_);
    append_table(KILN_FORMAT_TABLE_SLICES, slices_);
    append_table(KILN_FORMAT_TABLE_STEPS, steps_);
    append_table(KILN_FORMAT_TABLE_ARGS, args_);
    append_table(KILN_FORMAT_TABLE_STRINGS, strings_.bytes());
    KILN_CHECK(AlignUp(out.size(), KILN_FORMAT_BINARY_ALIGNMENT) ==
               header.binaries_offset);
    out.reserve(header.file_bytes);
    for (size_t i = 0; i < binaries_.size(); ++i) {
      out.resize(programs_[i].offset, '\0');
      out.append(*binaries_[i]);
    }
    KILN_CHECK(out.size() == header.file_bytes);
    if (out.size() > KILN_FORMAT_FILE_BYTES_MAX) {
      return absl::ResourceExhaustedError(
          absl::StrCat("bundle of ", out.size(), " bytes, limit is ",
                       KILN_FORMAT_FILE_BYTES_MAX));
    }
    memcpy(out.data(), &header, sizeof(header));
    kiln_bundle_root(out.data(), out.size(), header.root);
    memcpy(out.data(), &header, sizeof(header));
    return out;
  }

 private:
  template <typename T>
  static kiln_format_range_t Range(const std::vector<T>& table, size_t count) {
    return {.first = static_cast<uint32_t>(table.size()),
            .count = static_cast<uint32_t>(count)};
  }

  static void CopyDigest(const Digest& digest, uint8_t* to) {
    memcpy(to, digest.bytes.data(), digest.bytes.size());
  }

  void AddProgram(const Program& in) {
    kiln_format_program_t out = {};
    CopyDigest(in.key.digest, out.build_digest);
    CopyDigest(in.binary_digest, out.binary_digest);
    CopyDigest(in.toolchain.content, out.toolchain_digest);
    out.bytes = in.binary.size();
    out.kernels = Range(kernels_, in.kernels.size());
    out.toolchain = strings_.Find(ToolchainText(in.toolchain));
    programs_.push_back(out);
    for (const Kernel& kernel : in.kernels) {
      kernels_.push_back({.name = strings_.Find(kernel.entry),
                          .params = Range(kernel_params_, kernel.params.size()),
                          .param_bytes = kernel.param_bytes,
                          .registers = kernel.registers,
                          .static_shared_bytes = kernel.static_shared_bytes,
                          .local_bytes = kernel.local_bytes,
                          .max_threads = kernel.max_threads,
                          .reserved = 0});
      for (const KernelParam& param : kernel.params) {
        kernel_params_.push_back(
            {.offset = param.offset, .bytes = param.bytes});
      }
    }
  }

  void AddEntry(const BundleSection& section, const BundleEntry& in,
                const std::map<Digest, uint32_t>& program_index,
                const std::vector<std::shared_ptr<const Program>>& programs) {
    const std::vector<CanonicalField> attributes =
        GeometryAttributes(in.geometry);
    entries_.push_back({.name = strings_.Find(in.name),
                        .op = strings_.Find(OpName(in.geometry.op)),
                        .geometry = strings_.Find(in.geometry.ToString()),
                        .capacity = in.plans.back().interval.m_max,
                        .reserved = 0,
                        .attributes = Range(attributes_, attributes.size()),
                        .plans = Range(plans_, in.plans.size())});
    for (const CanonicalField& field : attributes) {
      attributes_.push_back({.name = strings_.Find(field.path),
                             .value = strings_.Find(field.value)});
    }
    const uint32_t first_program = program_index.begin()->second;
    for (const Plan& plan : in.plans) {
      AddPlan(section, in, plan);
      for (const Step& step : plan.body.steps) {
        const uint32_t program = program_index.at(plan.programs[step.program]);
        AddStep(step, program, *programs[program - first_program]);
      }
    }
  }

  void AddPlan(const BundleSection& section, const BundleEntry& entry,
               const Plan& in) {
    const PlanBody& body = in.body;
    kiln_format_plan_t out = {};
    out.m_min = in.interval.m_min;
    out.m_max = in.interval.m_max;
    out.arena_bytes = body.arena.bytes;
    out.params = Range(params_, body.params.size());
    out.slices = Range(slices_, body.arena.slices.size());
    out.steps = Range(steps_, body.steps.size());
    if (in.evidence.state == PlanState::kPredicted) {
      out.flags |= KILN_FORMAT_FLAG_PREDICTED;
    }
    if (IsUnqualified(section, in)) {
      out.flags |= KILN_FORMAT_FLAG_UNQUALIFIED;
    }
    flags_ |= out.flags;
    out.deterministic = body.deterministic ? 1 : 0;
    out.cpu_threads = body.cpu_threads;
    out.template_version = body.template_version;
    out.template_name = strings_.Find(body.template_name);
    out.label = strings_.Find(body.Label());
    out.numerics_class = strings_.Find(body.numerics_class);
    out.tolerance = body.tolerance;
    out.median_ns = in.evidence.median_ns;
    out.default_median_ns = in.evidence.default_median_ns;
    out.noise_floor = in.evidence.noise_floor;
    out.worst_error = in.evidence.worst_error;
    out.samples = in.evidence.samples;
    out.candidates = in.evidence.candidates;
    out.overlapped = body.overlapped ? 1 : 0;
    const auto golden = entry.golden.find(in.interval);
    if (golden != entry.golden.end()) CopyDigest(golden->second, out.golden);
    plans_.push_back(out);
    for (size_t i = 0; i < body.params.size(); ++i) {
      AddParam(body.params[i],
               entry.buffers.empty() ? nullptr : &entry.buffers[i]);
    }
    for (const ArenaSlice& slice : body.arena.slices) {
      slices_.push_back({.name = strings_.Find(slice.name),
                         .offset = slice.offset,
                         .bytes = slice.bytes});
    }
  }

  // `buffer` may be null.
  void AddParam(const ParamDecl& in, const BufferFill* buffer) {
    kiln_format_param_t out = {};
    out.name = strings_.Find(in.name);
    out.dtype = strings_.Find(in.dtype);
    out.shape = strings_.Find(in.shape);
    out.output = in.output ? 1 : 0;
    if (buffer != nullptr) {
      out.fill = static_cast<uint32_t>(buffer->kind);
      out.element_bytes = buffer->element_bytes;
      out.bytes = buffer->bytes;
      out.bytes_per_token = buffer->bytes_per_token;
      out.fill_a = buffer->a;
      out.fill_b = buffer->b;
    }
    params_.push_back(out);
  }

  void AddStep(const Step& in, uint32_t program_index, const Program& program) {
    kiln_format_step_t out = {};
    out.label = strings_.Find(in.label);
    out.program = program_index;
    out.kernel = programs_[program_index].kernels.first +
                 static_cast<uint32_t>(program.FindKernel(in.entry) -
                                       program.kernels.data());
    for (size_t d = 0; d < 3; ++d) {
      const LaunchTerm terms[2] = {in.grid[d].a, in.grid[d].b};
      for (size_t t = 0; t < 2; ++t) {
        out.grid[d][t] = {
            .mul = terms[t].mul, .add = terms[t].add, .div = terms[t].div};
      }
      out.block[d] = in.block[d];
    }
    out.dynamic_shared_bytes = in.dynamic_shared_bytes;
    out.args = Range(args_, in.args.size());
    steps_.push_back(out);
    const std::vector<uint32_t> offsets = ArgOffsets(in.args);
    for (size_t i = 0; i < in.args.size(); ++i) {
      args_.push_back({.kind = static_cast<uint32_t>(in.args[i].kind),
                       .offset = offsets[i],
                       .value = in.args[i].value});
    }
  }

  void PlaceBinaries(kiln_format_header_t* header) {
    uint64_t end = sizeof(*header);
    for (const uint64_t bytes :
         {sections_.size() * sizeof(sections_[0]),
          programs_.size() * sizeof(programs_[0]),
          kernels_.size() * sizeof(kernels_[0]),
          kernel_params_.size() * sizeof(kernel_params_[0]),
          entries_.size() * sizeof(entries_[0]),
          attributes_.size() * sizeof(attributes_[0]),
          plans_.size() * sizeof(plans_[0]),
          params_.size() * sizeof(params_[0]),
          slices_.size() * sizeof(slices_[0]),
          steps_.size() * sizeof(steps_[0]), args_.size() * sizeof(args_[0]),
          strings_.bytes().size()}) {
      end = AlignUp(end, 8) + bytes;
    }
    header->binaries_offset = AlignUp(end, KILN_FORMAT_BINARY_ALIGNMENT);
    for (kiln_format_program_t& program : programs_) {
      program.offset = AlignUp(end, KILN_FORMAT_BINARY_ALIGNMENT);
      end = program.offset + program.bytes;
    }
    header->file_bytes = end;
  }

  absl::Status CheckLimits() const {
    const struct {
      const char* name;
      uint64_t count;
      uint64_t max;
    } limits[] = {
        {"sections", sections_.size(), KILN_FORMAT_SECTIONS_MAX},
        {"programs", programs_.size(), KILN_FORMAT_PROGRAMS_MAX},
        {"kernels", kernels_.size(), KILN_FORMAT_KERNELS_MAX},
        {"kernel parameters", kernel_params_.size(),
         KILN_FORMAT_KERNEL_PARAMS_MAX},
        {"entries", entries_.size(), KILN_FORMAT_ENTRIES_MAX},
        {"attributes", attributes_.size(), KILN_FORMAT_ATTRIBUTES_MAX},
        {"plans", plans_.size(), KILN_FORMAT_PLANS_MAX},
        {"parameters", params_.size(), KILN_FORMAT_PARAMS_MAX},
        {"arena slices", slices_.size(), KILN_FORMAT_SLICES_MAX},
        {"steps", steps_.size(), KILN_FORMAT_STEPS_MAX},
        {"arguments", args_.size(), KILN_FORMAT_ARGS_MAX},
    };

    for (const auto& limit : limits) {
      RETURN_IF_ERROR(CheckCount(absl::StrCat("bundle ", limit.name),
                                 limit.count, limit.max));
    }
    return absl::OkStatus();
  }

  const StringTable& strings_;
  uint32_t flags_ = 0;  // of the section being added
  uint32_t header_flags_ = 0;
  std::vector<kiln_format_section_t> sections_;
  std::vector<kiln_format_program_t> programs_;
  std::vector<kiln_format_kernel_t> kernels_;
  std::vector<kiln_format_kernel_param_t> kernel_params_;
  std::vector<kiln_format_entry_t> entries_;
  std::vector<kiln_format_attribute_t> attributes_;
  std::vector<kiln_format_plan_t> plans_;
  std::vector<kiln_format_param_t> params_;
  std::vector<kiln_format_slice_t> slices_;
  std::vector<kiln_format_step_t> steps_;
  std::vector<kiln_format_arg_t> args_;
  std::vector<const std::string*> binaries_;  // one per program
};

}  // namespace

absl::StatusOr<std::string> WriteBundle(std::vector<BundleSection> sections,
                                        const BundleOptions& options) {
  if (sections.empty()) {
    return absl::InvalidArgumentError("bundle has no sections");
  }
  std::sort(sections.begin(), sections.end(),
            [](const BundleSection& a, const BundleSection& b) {
              return a.target.ToString() < b.target.ToString();
            });
  std::vector<SortedSection> sorted;
  for (BundleSection& section : sections) {
    const std::string target = section.target.ToString();
    if (!sorted.empty() && sorted.back().target == target) {
      return absl::InvalidArgumentError(
          absl::StrCat("target ", target, " appears twice"));
    }
    absl::StatusOr<SortedSection> one = SortSection(&section, options);
    if (!one.ok()) {
      return Annotate(one.status(), absl::StrCat("target ", target));
    }
    sorted.push_back(*std::move(one));
  }
  StringTable strings;
  for (const SortedSection& section : sorted) {
    RETURN_IF_ERROR(Annotate(CollectStrings(section, &strings),
                             absl::StrCat("target ", section.target)));
  }
  RETURN_IF_ERROR(strings.Freeze());
  TableBuilder builder(strings);
  for (const SortedSection& section : sorted) builder.AddSection(section);
  return builder.Finish();
}

absl::StatusOr<Digest> BundleRoot(absl::string_view bundle) {
  kiln_format_header_t header;
  if (bundle.size() < sizeof(header) ||
      memcmp(bundle.data(), KILN_FORMAT_MAGIC, KILN_FORMAT_MAGIC_BYTES) != 0) {
    return absl::InvalidArgumentError("not a kiln bundle");
  }
  memcpy(&header, bundle.data(), sizeof(header));
  return Digest::FromBytes(absl::string_view(
      reinterpret_cast<const char*>(header.root), sizeof(header.root)));
}

}  // namespace kiln
