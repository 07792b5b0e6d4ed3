#include "tuner/bundle_check.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "compiler/bundle_attributes.h"
#include "runtime/kiln.h"
#include "tuner/loaded_plan.h"

namespace kiln {
namespace {

// An info struct that says its own size.
template <typename T>
T MakeInfo() {
  T info = {};
  info.struct_size = sizeof(info);
  return info;
}

absl::string_view DigestBytes(const uint8_t* digest) {
  return absl::string_view(reinterpret_cast<const char*>(digest), 32);
}

// Each function below takes the structs it compares apart by name, all members
// of what was meant and all of what was read: a member that joins one of them
// does not compile until somebody has decided here what it is compared with.

// Compares field by field; keeps the first difference with the place where it
// is. A scope adds its name to that place until it ends.
class Comparison {
 public:
  class Scope {
   public:
    Scope(Comparison* comparison, const std::string& name)
        : comparison_(comparison), outer_(comparison->place_) {
      absl::StrAppend(&comparison->place_, outer_.empty() ? "" : ", ", name);
    }

    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

    ~Scope() { comparison_->place_ = outer_; }

   private:
    Comparison* comparison_;
    std::string outer_;
  };

  template <typename A, typename B>
  void Number(absl::string_view field, A written, B meant) {
    if constexpr (std::is_floating_point_v<A>) {
      Text(field, absl::StrCat(written), absl::StrCat(meant));
      if (written != meant) Differ(field, "another double", "this one");
    } else {
      Text(field, absl::StrCat(written), absl::StrCat(meant));
    }
  }

  void Text(absl::string_view field, absl::string_view written,
            absl::string_view meant) {
    if (written != meant) Differ(field, written, meant);
  }

  void Bytes(absl::string_view field, absl::string_view written,
             absl::string_view meant) {
    if (written == meant) return;
    Differ(
        field,
        absl::StrCat(Sha256(written).Short(), " (", written.size(), " bytes)"),
        absl::StrCat(Sha256(meant).Short(), " (", meant.size(), " bytes)"));
  }

  // False when the runtime refused a getter.
  bool Read(absl::string_view what, kiln_status_t status) {
    if (status == KILN_STATUS_OK) return true;
    Differ(what, kiln_status_name(status), "a record");
    return false;
  }

  const absl::Status& status() const { return status_; }

 private:
  void Differ(absl::string_view field, absl::string_view written,
              absl::string_view meant) {
    if (!status_.ok()) return;
    status_ = absl::InternalError(absl::StrCat(
        "bundle does not read back: ", place_, place_.empty() ? "" : ", ",
        field, " is '", written, "', expected '", meant, "'"));
  }

  std::string place_;
  absl::Status status_;
};

// Closes the bundle at the end of its scope.
class OpenBundle {
 public:
  OpenBundle() = default;
  OpenBundle(const OpenBundle&) = delete;
  OpenBundle& operator=(const OpenBundle&) = delete;

  ~OpenBundle() { kiln_bundle_close(bundle_, nullptr); }

  absl::Status Open(absl::string_view bytes) {
    kiln_error_t error = {};
    return RuntimeStatus(kiln_bundle_open_memory(bytes.data(), bytes.size(),
                                                 nullptr, &bundle_, &error),
                         error);
  }

  const kiln_bundle_t* get() const { return bundle_; }

 private:
  kiln_bundle_t* bundle_ = nullptr;
};

// Where a record is: what the getters take.
struct Place {
  const kiln_bundle_t* bundle = nullptr;
  uint32_t section = 0;
  uint32_t entry = 0;
  uint32_t plan = 0;
};

void CompareArgs(const Place& at, uint32_t step_index, const Step& meant,
                 Comparison* compare) {
  const std::vector<uint32_t> offsets = ArgOffsets(meant.args);
  for (uint32_t i = 0; i < meant.args.size(); ++i) {
    const Comparison::Scope scope(compare, absl::StrCat("argument ", i));
    auto info = MakeInfo<kiln_arg_info_t>();
    if (!compare->Read("argument",
                       kiln_bundle_arg(at.bundle, at.section, at.entry, at.plan,
                                       step_index, i, &info, nullptr))) {
      return;
    }
    const auto& [kind, value] = meant.args[i];
    const auto& [info_size, info_kind, info_offset, info_bytes, info_value] =
        info;
    compare->Number("kind", info_kind, static_cast<uint32_t>(kind));
    compare->Number("offset", info_offset, offsets[i]);
    compare->Number("bytes", info_bytes, ArgBytes(kind));
    compare->Number("value", info_value, value);
  }
}

void CompareStep(const Place& at, uint32_t index, const Plan& plan,
                 const Step& meant, Comparison* compare) {
  const Comparison::Scope scope(compare, absl::StrCat("step ", index));
  auto info = MakeInfo<kiln_step_info_t>();
  if (!compare->Read("step",
                     kiln_bundle_step(at.bundle, at.section, at.entry, at.plan,
                                      index, &info, nullptr))) {
    return;
  }
  const auto& [label, program, entry, grid, block, dynamic_shared_bytes, args] =
      meant;
  const auto& [info_size, info_program, info_kernel, info_args, info_label,
               info_kernel_name, info_grid, info_block,
               info_dynamic_shared_bytes] = info;
  compare->Text("label", info_label, label);
  compare->Text("kernel", info_kernel_name, entry);
  auto found = MakeInfo<kiln_program_info_t>();
  if (compare->Read("program",
                    kiln_bundle_program(at.bundle, at.section, info_program,
                                        &found, nullptr))) {
    compare->Bytes("program", DigestBytes(found.build_digest),
                   plan.programs[program].AsBytes());
  }
  auto kernel = MakeInfo<kiln_kernel_info_t>();
  if (compare->Read("kernel",
                    kiln_bundle_kernel(at.bundle, at.section, info_program,
                                       info_kernel, &kernel, nullptr))) {
    compare->Text("kernel name", kernel.name, entry);
  }
  for (size_t d = 0; d < 3; ++d) {
    const auto& [a, b] = grid[d];
    const auto& [info_mul, info_add, info_div] = info_grid[d];
    for (size_t t = 0; t < 2; ++t) {
      const std::string name = absl::StrCat("grid ", d, " term ", t);
      const auto& [mul, add, div] = t == 0 ? a : b;
      compare->Number(name + " mul", info_mul[t], mul);
      compare->Number(name + " add", info_add[t], add);
      compare->Number(name + " div", info_div[t], div);
    }
    compare->Number(absl::StrCat("block ", d), info_block[d], block[d]);
  }
  compare->Number("dynamic_shared_bytes", info_dynamic_shared_bytes,
                  dynamic_shared_bytes);
  compare->Number("arguments", info_args, args.size());
  CompareArgs(at, index, meant, compare);
}

void CompareBuffer(const Place& at, uint32_t index, const BufferFill& meant,
                   Comparison* compare) {
  auto info = MakeInfo<kiln_buffer_info_t>();
  if (!compare->Read(
          "buffer", kiln_bundle_buffer(at.bundle, at.section, at.entry, at.plan,
                                       index, &info, nullptr))) {
    return;
  }
  const auto& [kind, element_bytes, bytes, bytes_per_token, a, b] = meant;
  const auto& [info_size, info_fill, info_element_bytes, info_reserved,
               info_bytes, info_bytes_per_token, info_a, info_b] = info;
  compare->Number("fill", info_fill, static_cast<uint32_t>(kind));
  compare->Number("element_bytes", info_element_bytes, element_bytes);
  compare->Number("buffer bytes", info_bytes, bytes);
  compare->Number("bytes_per_token", info_bytes_per_token, bytes_per_token);
  compare->Number("fill a", info_a, a);
  compare->Number("fill b", info_b, b);
}

void CompareParams(const Place& at, const std::vector<ParamDecl>& params,
                   const std::vector<BufferFill>& buffers,
                   Comparison* compare) {
  for (uint32_t i = 0; i < params.size(); ++i) {
    const Comparison::Scope scope(compare, absl::StrCat("parameter ", i));
    auto info = MakeInfo<kiln_param_info_t>();
    if (!compare->Read("parameter",
                       kiln_bundle_param(at.bundle, at.section, at.entry,
                                         at.plan, i, &info, nullptr))) {
      return;
    }
    const auto& [name, dtype, shape, output] = params[i];
    const auto& [info_size, info_output, info_offset, info_bytes, info_name,
                 info_dtype, info_shape] = info;
    compare->Text("name", info_name, name);
    compare->Text("dtype", info_dtype, dtype);
    compare->Text("shape", info_shape, shape);
    compare->Number("output", info_output, output ? 1 : 0);
    compare->Number("offset", info_offset, 8 * i);
    compare->Number("bytes", info_bytes, 8);
    CompareBuffer(at, i,
                  buffers.empty() ? BufferFill{.element_bytes = 0} : buffers[i],
                  compare);
  }
}

void CompareSlices(const Place& at, const std::vector<ArenaSlice>& slices,
                   Comparison* compare) {
  for (uint32_t i = 0; i < slices.size(); ++i) {
    const Comparison::Scope scope(compare, absl::StrCat("arena slice ", i));
    auto info = MakeInfo<kiln_slice_info_t>();
    if (!compare->Read("arena slice",
                       kiln_bundle_slice(at.bundle, at.section, at.entry,
                                         at.plan, i, &info, nullptr))) {
      return;
    }
    const auto& [name, offset, bytes] = slices[i];
    const auto& [info_size, info_reserved, info_name, info_offset, info_bytes] =
        info;
    compare->Text("name", info_name, name);
    compare->Number("offset", info_offset, offset);
    compare->Number("bytes", info_bytes, bytes);
  }
}

uint32_t PlanFlags(const BundleSection& section, const Plan& plan) {
  uint32_t flags = 0;
  if (plan.evidence.state == PlanState::kPredicted) {
    flags |= KILN_CONTAINS_PREDICTED;
  }
  const std::vector<std::string>& unqualified = section.unqualified_templates;
  if (std::find(unqualified.begin(), unqualified.end(),
                plan.body.template_name) != unqualified.end()) {
    flags |= KILN_CONTAINS_UNQUALIFIED;
  }
  return flags;
}

void ComparePlan(const Place& at, const BundleSection& section,
                 const BundleEntry& entry, const Plan& meant,
                 Comparison* compare) {
  const Comparison::Scope scope(
      compare, absl::StrCat("plan for m ", meant.interval.m_min, "..",
                            meant.interval.m_max));
  auto info = MakeInfo<kiln_plan_info_t>();
  if (!compare->Read("plan", kiln_bundle_plan(at.bundle, at.section, at.entry,
                                              at.plan, &info, nullptr))) {
    return;
  }
  // Target and geometry are the section's and the entry's; the assignment is
  // the label's; programs are compared by step. How the race went stays in the
  // cache, from `blocks` on.
  const auto& [geometry, target, interval, body, programs, evidence] = meant;
  const auto& [template_name, template_version, assignment, numerics_class,
               tolerance, deterministic, overlapped, cpu_threads, params, arena,
               steps] = body;
  const auto& [slices, arena_bytes] = arena;
  const auto& [state, median_ns, default_median_ns, noise_floor, worst_error,
               samples, candidates, blocks, discarded, pruned, race_seconds] =
      evidence;
  const auto& [info_size, info_flags, info_m_min, info_m_max, info_arena_bytes,
               info_params, info_slices, info_steps, info_cpu_threads,
               info_deterministic, info_template_version, info_template_name,
               info_label, info_numerics_class, info_tolerance, info_median_ns,
               info_default_median_ns, info_noise_floor, info_worst_error,
               info_samples, info_candidates, info_overlapped, info_reserved] =
      info;
  compare->Number("flags", info_flags, PlanFlags(section, meant));
  compare->Number("m_min", info_m_min, interval.m_min);
  compare->Number("m_max", info_m_max, interval.m_max);
  compare->Number("arena_bytes", info_arena_bytes, arena_bytes);
  compare->Number("parameters", info_params, params.size());
  compare->Number("arena slices", info_slices, slices.size());
  compare->Number("steps", info_steps, steps.size());
  compare->Number("cpu_threads", info_cpu_threads, cpu_threads);
  compare->Number("deterministic", info_deterministic, deterministic ? 1 : 0);
  compare->Number("overlapped", info_overlapped, overlapped ? 1 : 0);
  compare->Number("template_version", info_template_version, template_version);
  compare->Text("template_name", info_template_name, template_name);
  compare->Text("label", info_label, body.Label());
  compare->Text("numerics_class", info_numerics_class, numerics_class);
  compare->Number("tolerance", info_tolerance, tolerance);
  compare->Number("median_ns", info_median_ns, median_ns);
  compare->Number("default_median_ns", info_default_median_ns,
                  default_median_ns);
  compare->Number("noise_floor", info_noise_floor, noise_floor);
  compare->Number("worst_error", info_worst_error, worst_error);
  compare->Number("samples", info_samples, samples);
  compare->Number("candidates", info_candidates, candidates);
  uint8_t digest[KILN_ROOT_BYTES] = {};
  if (compare->Read("golden digest",
                    kiln_bundle_golden(at.bundle, at.section, at.entry, at.plan,
                                       digest, nullptr))) {
    const auto golden = entry.golden.find(interval);
    compare->Bytes(
        "golden digest", DigestBytes(digest),
        (golden == entry.golden.end() ? Digest() : golden->second).AsBytes());
  }
  CompareParams(at, params, entry.buffers, compare);
  CompareSlices(at, slices, compare);
  for (uint32_t i = 0; i < steps.size(); ++i) {
    CompareStep(at, i, meant, steps[i], compare);
  }
}

void CompareAttributes(const Place& at, uint32_t count,
                       const RequestGeometry& meant, Comparison* compare) {
  std::vector<CanonicalField> fields;
  for (uint32_t i = 0; i < count; ++i) {
    const char* name = nullptr;
    const char* value = nullptr;
    if (!compare->Read("attribute",
                       kiln_bundle_attribute(at.bundle, at.section, at.entry, i,
                                             &name, &value, nullptr))) {
      return;
    }
    fields.push_back({.path = name, .value = value});
  }
  const absl::StatusOr<RequestGeometry> geometry =
      GeometryFromAttributes(fields);
  compare->Text(
      "geometry attributes",
      geometry.ok() ? geometry->ToString() : geometry.status().ToString(),
      meant.ToString());
  compare->Number("geometry from attributes is equal",
                  geometry.ok() && *geometry == meant ? 1 : 0, 1);
}

void CompareEntry(Place at, const BundleSection& section,
                  const BundleEntry& meant, Comparison* compare) {
  const Comparison::Scope scope(compare, absl::StrCat("entry ", meant.name));
  auto info = MakeInfo<kiln_entry_info_t>();
  if (!compare->Read("entry", kiln_bundle_entry(at.bundle, at.section, at.entry,
                                                &info, nullptr))) {
    return;
  }
  // Buffers and golden digests are compared with the plans.
  const auto& [name, geometry, plans, buffers, golden] = meant;
  const auto& [info_size, info_capacity, info_plans, info_attributes, info_name,
               info_op, info_geometry] = info;
  std::vector<const Plan*> sorted;
  for (const Plan& plan : plans) sorted.push_back(&plan);
  std::sort(sorted.begin(), sorted.end(), [](const Plan* a, const Plan* b) {
    return a->interval < b->interval;
  });
  compare->Text("name", info_name, name);
  compare->Text("op", info_op, OpName(geometry.op));
  compare->Text("geometry", info_geometry, geometry.ToString());
  compare->Number("capacity", info_capacity, sorted.back()->interval.m_max);
  compare->Number("plans", info_plans, sorted.size());
  CompareAttributes(at, info_attributes, geometry, compare);
  for (; at.plan < sorted.size(); ++at.plan) {
    ComparePlan(at, section, meant, *sorted[at.plan], compare);
  }
}

void CompareKernel(const Place& at, uint32_t program, uint32_t index,
                   const Kernel& meant, Comparison* compare) {
  const Comparison::Scope scope(compare, absl::StrCat("kernel ", meant.entry));
  auto info = MakeInfo<kiln_kernel_info_t>();
  if (!compare->Read("kernel",
                     kiln_bundle_kernel(at.bundle, at.section, program, index,
                                        &info, nullptr))) {
    return;
  }
  const auto& [entry, params, param_bytes, registers, static_shared_bytes,
               local_bytes, max_threads] = meant;
  const auto& [info_size, info_params, info_param_bytes, info_registers,
               info_static_shared_bytes, info_local_bytes, info_max_threads,
               info_reserved, info_name] = info;
  compare->Text("name", info_name, entry);
  compare->Number("param_bytes", info_param_bytes, param_bytes);
  compare->Number("registers", info_registers, registers);
  compare->Number("static_shared_bytes", info_static_shared_bytes,
                  static_shared_bytes);
  compare->Number("local_bytes", info_local_bytes, local_bytes);
  compare->Number("max_threads", info_max_threads, max_threads);
  compare->Number("parameters", info_params, params.size());
  for (uint32_t i = 0; i < params.size(); ++i) {
    uint32_t info_offset = 0;
    uint32_t info_bytes = 0;
    if (!compare->Read(
            "kernel parameter",
            kiln_bundle_kernel_param(at.bundle, at.section, program, index, i,
                                     &info_offset, &info_bytes, nullptr))) {
      return;
    }
    const auto& [offset, bytes] = params[i];
    compare->Number("parameter offset", info_offset, offset);
    compare->Number("parameter bytes", info_bytes, bytes);
  }
}

void CompareProgram(const Place& at, uint32_t index, const Program& meant,
                    Comparison* compare) {
  const Comparison::Scope scope(
      compare, absl::StrCat("program ", meant.key.digest.Short()));
  auto info = MakeInfo<kiln_program_info_t>();
  if (!compare->Read("program", kiln_bundle_program(at.bundle, at.section,
                                                    index, &info, nullptr))) {
    return;
  }
  // The log and the time of the compilation are the cache's.
  const auto& [key, target, toolchain, binary, binary_digest, kernels, log,
               compile_seconds] = meant;
  const auto& [toolchain_name, toolchain_version, toolchain_content] =
      toolchain;
  // Where the binary lies is checked by the reader: it tiles the file.
  const auto& [info_size, info_kernels, info_build_digest, info_binary_digest,
               info_toolchain_digest, info_file_offset, info_bytes, info_data,
               info_toolchain] = info;
  compare->Bytes("build digest", DigestBytes(info_build_digest),
                 key.digest.AsBytes());
  compare->Bytes("binary digest", DigestBytes(info_binary_digest),
                 binary_digest.AsBytes());
  compare->Bytes("toolchain digest", DigestBytes(info_toolchain_digest),
                 toolchain_content.AsBytes());
  compare->Text("toolchain", info_toolchain,
                absl::StrCat(toolchain_name, " ", toolchain_version));
  compare->Bytes("binary",
                 absl::string_view(static_cast<const char*>(info_data),
                                   static_cast<size_t>(info_bytes)),
                 binary);
  compare->Number("kernels", info_kernels, kernels.size());
  for (uint32_t k = 0; k < kernels.size(); ++k) {
    CompareKernel(at, index, k, kernels[k], compare);
  }
}

void CompareSection(Place at, const BundleSection& meant, Comparison* compare) {
  const Comparison::Scope scope(
      compare, absl::StrCat("target ", meant.target.ToString()));
  auto info = MakeInfo<kiln_section_info_t>();
  if (!compare->Read("section", kiln_bundle_section(at.bundle, at.section,
                                                    &info, nullptr))) {
    return;
  }
  // Unqualified templates show as flags.
  const auto& [target, driver_version_min, meant_entries, meant_programs,
               unqualified_templates] = meant;
  const auto& [backend, level, arch_specific] = target;
  const auto& [info_size, info_backend, info_level, info_arch_specific,
               info_driver_version_min, info_flags, info_entries, info_programs,
               info_target] = info;
  std::set<Digest> used;
  std::map<std::string, const BundleEntry*> entries;
  uint32_t flags = 0;
  for (const BundleEntry& entry : meant_entries) {
    entries[entry.name] = &entry;
    for (const Plan& plan : entry.plans) {
      flags |= PlanFlags(meant, plan);
      for (const Step& step : plan.body.steps) {
        used.insert(plan.programs[step.program]);
      }
    }
  }
  std::map<Digest, const Program*> programs;
  for (const auto& program : meant_programs) {
    if (used.count(program->key.digest) != 0) {
      programs[program->key.digest] = program.get();
    }
  }
  compare->Text("target", info_target, target.ToString());
  compare->Number(
      "backend", info_backend,
      backend == Backend::kCuda ? KILN_BACKEND_CUDA : KILN_BACKEND_CPU);
  compare->Number("level", info_level, level);
  compare->Number("arch_specific", info_arch_specific, arch_specific ? 1 : 0);
  compare->Number("driver_version_min", info_driver_version_min,
                  driver_version_min);
  compare->Number("flags", info_flags, flags);
  compare->Number("entries", info_entries, entries.size());
  compare->Number("programs", info_programs, programs.size());
  for (const auto& [name, entry] : entries) {
    CompareEntry(at, meant, *entry, compare);
    ++at.entry;
  }
  uint32_t index = 0;
  for (const auto& [digest, program] : programs) {
    CompareProgram(at, index++, *program, compare);
  }
}

}  // namespace

absl::Status CheckBundleMatches(absl::string_view bytes,
                                const std::vector<BundleSection>& sections) {
  OpenBundle bundle;
  RETURN_IF_ERROR(bundle.Open(bytes));
  Comparison compare;
  auto info = MakeInfo<kiln_bundle_info_t>();
  if (compare.Read("bundle", kiln_bundle_info(bundle.get(), &info, nullptr))) {
    // Version and root were checked by opening, flags follow from the sections.
    const auto& [info_size, info_version, info_flags, info_sections, info_bytes,
                 info_root] = info;
    compare.Number("bytes", info_bytes, bytes.size());
    compare.Number("sections", info_sections, sections.size());
  }
  std::map<std::string, const BundleSection*> by_target;
  for (const BundleSection& section : sections) {
    by_target[section.target.ToString()] = &section;
  }
  Place at;
  at.bundle = bundle.get();
  for (const auto& [target, section] : by_target) {
    CompareSection(at, *section, &compare);
    ++at.section;
  }
  return compare.status();
}

}  // namespace kiln
