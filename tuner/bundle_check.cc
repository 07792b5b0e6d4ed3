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
    compare->Number("kind", info.kind,
                    static_cast<uint32_t>(meant.args[i].kind));
    compare->Number("offset", info.offset, offsets[i]);
    compare->Number("bytes", info.bytes, ArgBytes(meant.args[i].kind));
    compare->Number("value", info.value, meant.args[i].value);
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
  compare->Text("label", info.label, meant.label);
  compare->Text("kernel", info.kernel_name, meant.entry);
  auto program = MakeInfo<kiln_program_info_t>();
  if (compare->Read("program",
                    kiln_bundle_program(at.bundle, at.section, info.program,
                                        &program, nullptr))) {
    compare->Bytes("program", DigestBytes(program.build_digest),
                   plan.programs[meant.program].AsBytes());
  }
  auto kernel = MakeInfo<kiln_kernel_info_t>();
  if (compare->Read("kernel",
                    kiln_bundle_kernel(at.bundle, at.section, info.program,
                                       info.kernel, &kernel, nullptr))) {
    compare->Text("kernel name", kernel.name, meant.entry);
  }
  for (size_t d = 0; d < 3; ++d) {
    const LaunchTerm terms[2] = {meant.grid[d].a, meant.grid[d].b};
    for (size_t t = 0; t < 2; ++t) {
      const std::string name = absl::StrCat("grid ", d, " term ", t);
      compare->Number(name + " mul", info.grid[d].mul[t], terms[t].mul);
      compare->Number(name + " add", info.grid[d].add[t], terms[t].add);
      compare->Number(name + " div", info.grid[d].div[t], terms[t].div);
    }
    compare->Number(absl::StrCat("block ", d), info.block[d], meant.block[d]);
  }
  compare->Number("dynamic_shared_bytes", info.dynamic_shared_bytes,
                  meant.dynamic_shared_bytes);
  compare->Number("arguments", info.arg_count, meant.args.size());
  CompareArgs(at, index, meant, compare);
}

void CompareBuffers(const Place& at, const PlanBody& body,
                    const std::vector<BufferFill>& buffers,
                    Comparison* compare) {
  for (uint32_t i = 0; i < body.params.size(); ++i) {
    const Comparison::Scope scope(compare, absl::StrCat("parameter ", i));
    auto info = MakeInfo<kiln_param_info_t>();
    if (!compare->Read("parameter",
                       kiln_bundle_param(at.bundle, at.section, at.entry,
                                         at.plan, i, &info, nullptr))) {
      return;
    }
    compare->Text("name", info.name, body.params[i].name);
    compare->Text("dtype", info.dtype, body.params[i].dtype);
    compare->Text("shape", info.shape, body.params[i].shape);
    compare->Number("output", info.output, body.params[i].output ? 1 : 0);
    auto found = MakeInfo<kiln_buffer_info_t>();
    if (!compare->Read("buffer",
                       kiln_bundle_buffer(at.bundle, at.section, at.entry,
                                          at.plan, i, &found, nullptr))) {
      return;
    }
    const BufferFill meant =
        buffers.empty() ? BufferFill{.element_bytes = 0} : buffers[i];
    compare->Number("fill", found.fill, static_cast<uint32_t>(meant.kind));
    compare->Number("element_bytes", found.element_bytes, meant.element_bytes);
    compare->Number("buffer bytes", found.bytes, meant.bytes);
    compare->Number("bytes_per_token", found.bytes_per_token,
                    meant.bytes_per_token);
    compare->Number("fill a", found.a, meant.a);
    compare->Number("fill b", found.b, meant.b);
  }
  for (uint32_t i = 0; i < body.arena.slices.size(); ++i) {
    const Comparison::Scope scope(compare, absl::StrCat("arena slice ", i));
    auto info = MakeInfo<kiln_slice_info_t>();
    if (!compare->Read("arena slice",
                       kiln_bundle_slice(at.bundle, at.section, at.entry,
                                         at.plan, i, &info, nullptr))) {
      return;
    }
    compare->Text("name", info.name, body.arena.slices[i].name);
    compare->Number("offset", info.offset, body.arena.slices[i].offset);
    compare->Number("bytes", info.bytes, body.arena.slices[i].bytes);
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
  const PlanBody& body = meant.body;
  compare->Number("flags", info.flags, PlanFlags(section, meant));
  compare->Number("m_min", info.m_min, meant.interval.m_min);
  compare->Number("m_max", info.m_max, meant.interval.m_max);
  compare->Number("arena_bytes", info.arena_bytes, body.arena.bytes);
  compare->Number("parameters", info.param_count, body.params.size());
  compare->Number("arena slices", info.slice_count, body.arena.slices.size());
  compare->Number("steps", info.step_count, body.steps.size());
  compare->Number("cpu_threads", info.cpu_threads, body.cpu_threads);
  compare->Number("deterministic", info.deterministic,
                  body.deterministic ? 1 : 0);
  compare->Number("template_version", info.template_version,
                  body.template_version);
  compare->Text("template_name", info.template_name, body.template_name);
  compare->Text("label", info.label, body.Label());
  compare->Text("numerics_class", info.numerics_class, body.numerics_class);
  const Evidence& evidence = meant.evidence;
  compare->Number("tolerance", info.tolerance, body.tolerance);
  compare->Number("median_ns", info.median_ns, evidence.median_ns);
  compare->Number("default_median_ns", info.default_median_ns,
                  evidence.default_median_ns);
  compare->Number("noise_floor", info.noise_floor, evidence.noise_floor);
  compare->Number("worst_error", info.worst_error, evidence.worst_error);
  compare->Number("samples", info.samples, evidence.samples);
  compare->Number("candidates", info.candidates, evidence.candidates);
  uint8_t digest[KILN_ROOT_BYTES] = {};
  if (compare->Read("golden digest",
                    kiln_bundle_golden(at.bundle, at.section, at.entry, at.plan,
                                       digest, nullptr))) {
    const auto golden = entry.golden.find(meant.interval);
    compare->Bytes(
        "golden digest", DigestBytes(digest),
        (golden == entry.golden.end() ? Digest() : golden->second).AsBytes());
  }
  CompareBuffers(at, body, entry.buffers, compare);
  for (uint32_t i = 0; i < body.steps.size(); ++i) {
    CompareStep(at, i, meant, body.steps[i], compare);
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
  std::vector<const Plan*> plans;
  for (const Plan& plan : meant.plans) plans.push_back(&plan);
  std::sort(plans.begin(), plans.end(), [](const Plan* a, const Plan* b) {
    return a->interval < b->interval;
  });
  compare->Text("name", info.name, meant.name);
  compare->Text("op", info.op, OpName(meant.geometry.op));
  compare->Text("geometry", info.geometry, meant.geometry.ToString());
  compare->Number("capacity", info.capacity, plans.back()->interval.m_max);
  compare->Number("plans", info.plan_count, plans.size());
  CompareAttributes(at, info.attribute_count, meant.geometry, compare);
  for (; at.plan < plans.size(); ++at.plan) {
    ComparePlan(at, section, meant, *plans[at.plan], compare);
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
  compare->Text("name", info.name, meant.entry);
  compare->Number("param_bytes", info.param_bytes, meant.param_bytes);
  compare->Number("registers", info.registers, meant.registers);
  compare->Number("static_shared_bytes", info.static_shared_bytes,
                  meant.static_shared_bytes);
  compare->Number("local_bytes", info.local_bytes, meant.local_bytes);
  compare->Number("max_threads", info.max_threads, meant.max_threads);
  compare->Number("parameters", info.param_count, meant.params.size());
  for (uint32_t i = 0; i < meant.params.size(); ++i) {
    uint32_t offset = 0;
    uint32_t bytes = 0;
    if (!compare->Read(
            "kernel parameter",
            kiln_bundle_kernel_param(at.bundle, at.section, program, index, i,
                                     &offset, &bytes, nullptr))) {
      return;
    }
    compare->Number("parameter offset", offset, meant.params[i].offset);
    compare->Number("parameter bytes", bytes, meant.params[i].bytes);
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
  compare->Bytes("build digest", DigestBytes(info.build_digest),
                 meant.key.digest.AsBytes());
  compare->Bytes("binary digest", DigestBytes(info.binary_digest),
                 meant.binary_digest.AsBytes());
  compare->Bytes("toolchain digest", DigestBytes(info.toolchain_digest),
                 meant.toolchain.content.AsBytes());
  compare->Text(
      "toolchain", info.toolchain,
      absl::StrCat(meant.toolchain.name, " ", meant.toolchain.version));
  compare->Bytes("binary",
                 absl::string_view(static_cast<const char*>(info.data),
                                   static_cast<size_t>(info.bytes)),
                 meant.binary);
  compare->Number("kernels", info.kernel_count, meant.kernels.size());
  for (uint32_t k = 0; k < meant.kernels.size(); ++k) {
    CompareKernel(at, index, k, meant.kernels[k], compare);
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
  std::set<Digest> used;
  std::map<std::string, const BundleEntry*> entries;
  uint32_t flags = 0;
  for (const BundleEntry& entry : meant.entries) {
    entries[entry.name] = &entry;
    for (const Plan& plan : entry.plans) {
      flags |= PlanFlags(meant, plan);
      for (const Step& step : plan.body.steps) {
        used.insert(plan.programs[step.program]);
      }
    }
  }
  std::map<Digest, const Program*> programs;
  for (const auto& program : meant.programs) {
    if (used.count(program->key.digest) != 0) {
      programs[program->key.digest] = program.get();
    }
  }
  compare->Text("target", info.target, meant.target.ToString());
  compare->Number("backend", info.backend,
                  meant.target.backend == Backend::kCuda ? KILN_BACKEND_CUDA
                                                         : KILN_BACKEND_CPU);
  compare->Number("level", info.level, meant.target.level);
  compare->Number("arch_specific", info.arch_specific,
                  meant.target.arch_specific ? 1 : 0);
  compare->Number("driver_version_min", info.driver_version_min,
                  meant.driver_version_min);
  compare->Number("flags", info.flags, flags);
  compare->Number("entries", info.entry_count, entries.size());
  compare->Number("programs", info.program_count, programs.size());
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
    compare.Number("bytes", info.bytes, bytes.size());
    compare.Number("sections", info.section_count, sections.size());
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
