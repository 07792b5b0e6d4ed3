#include "tools/bundle_json.h"

#include <utility>

#include "absl/strings/string_view.h"
#include "compiler/base/digest.h"

namespace kiln {
namespace {

using Json = nlohmann::ordered_json;

// Each function takes the runtime's struct apart by name, so that a member that
// joins it does not compile until somebody has decided how it is shown. Sizes,
// reserved members and the counts of lists are not shown.

std::string Hex(const uint8_t* digest) {
  return ToHex({reinterpret_cast<const char*>(digest), KILN_ROOT_BYTES});
}

// Where a plan is: indices for the getters.
struct Place {
  const BundleView& bundle;
  uint32_t section = 0;
  uint32_t entry = 0;
  uint32_t plan = 0;
};

Json ArgToJson(const kiln_arg_info_t& arg) {
  static constexpr const char* kKinds[] = {"?",      "param", "arena",
                                           "tokens", "u32",   "u64"};
  const auto& [size, kind, offset, bytes, value] = arg;
  return {{"kind", kind <= 5 ? kKinds[kind] : "?"},
          {"offset", offset},
          {"bytes", bytes},
          {"value", value}};
}

Json StepToJson(const Place& at, uint32_t index) {
  const kiln_step_info_t step =
      at.bundle.Step(at.section, at.entry, at.plan, index);
  // The kernel's index says no more than its name.
  const auto& [size, program, kernel, arg_count, label, kernel_name, grid,
               block, dynamic_shared_bytes] = step;
  Json out;
  out["label"] = label;
  out["program"] = program;
  out["kernel"] = kernel_name;
  out["grid"] = Json::array();
  for (const auto& [mul, add, div] : grid) {
    Json terms = Json::array();
    for (int i = 0; i < 2; ++i) terms.push_back({mul[i], add[i], div[i]});
    out["grid"].push_back(std::move(terms));
  }
  out["block"] = {block[0], block[1], block[2]};
  out["dynamic_shared_bytes"] = dynamic_shared_bytes;
  out["args"] = Json::array();
  for (uint32_t i = 0; i < arg_count; ++i) {
    out["args"].push_back(
        ArgToJson(at.bundle.Arg(at.section, at.entry, at.plan, index, i)));
  }
  return out;
}

// Null where the bundle does not describe the buffer.
Json BufferToJson(const kiln_buffer_info_t& buffer) {
  static constexpr const char* kFills[] = {"none", "words", "indices"};
  const auto& [size, fill, element_bytes, reserved, bytes, bytes_per_token, a,
               b] = buffer;
  if (element_bytes == 0) return nullptr;
  return {{"bytes", bytes},
          {"bytes_per_token", bytes_per_token},
          {"element_bytes", element_bytes},
          {"fill", fill <= 2 ? kFills[fill] : "?"},
          {"a", a},
          {"b", b}};
}

Json ParamToJson(const Place& at, uint32_t index) {
  const kiln_param_info_t param =
      at.bundle.Param(at.section, at.entry, at.plan, index);
  const auto& [size, output, offset, bytes, name, dtype, shape] = param;
  return {{"name", name},
          {"dtype", dtype},
          {"shape", shape},
          {"offset", offset},
          {"bytes", bytes},
          {"output", output != 0},
          {"buffer", BufferToJson(at.bundle.Buffer(at.section, at.entry,
                                                   at.plan, index))}};
}

Json SliceToJson(const kiln_slice_info_t& slice) {
  const auto& [size, reserved, name, offset, bytes] = slice;
  return {{"name", name}, {"offset", offset}, {"bytes", bytes}};
}

Json PlanToJson(const Place& at) {
  const kiln_plan_info_t plan = at.bundle.Plan(at.section, at.entry, at.plan);
  const auto& [size, flags, m_min, m_max, arena_bytes, param_count, slice_count,
               step_count, cpu_threads, deterministic, template_version,
               template_name, label, numerics_class, tolerance, median_ns,
               default_median_ns, noise_floor, worst_error, samples, candidates,
               overlapped, reserved] = plan;
  Json out;
  out["m_min"] = m_min;
  out["m_max"] = m_max;
  out["label"] = label;
  out["template"] = template_name;
  out["template_version"] = template_version;
  out["state"] =
      (flags & KILN_CONTAINS_PREDICTED) != 0 ? "predicted" : "measured";
  out["qualified"] = (flags & KILN_CONTAINS_UNQUALIFIED) == 0;
  out["numerics_class"] = numerics_class;
  out["tolerance"] = tolerance;
  out["deterministic"] = deterministic != 0;
  out["overlapped"] = overlapped != 0;
  out["cpu_threads"] = cpu_threads;
  out["evidence"] = {
      {"median_ns", median_ns},     {"default_median_ns", default_median_ns},
      {"noise_floor", noise_floor}, {"worst_error", worst_error},
      {"samples", samples},         {"candidates", candidates}};
  const Digest golden = at.bundle.Golden(at.section, at.entry, at.plan);
  out["golden"] = golden == Digest() ? Json() : Json(golden.ToHex());
  out["params"] = Json::array();
  for (uint32_t i = 0; i < param_count; ++i) {
    out["params"].push_back(ParamToJson(at, i));
  }
  out["arena_bytes"] = arena_bytes;
  out["arena"] = Json::array();
  for (uint32_t i = 0; i < slice_count; ++i) {
    out["arena"].push_back(
        SliceToJson(at.bundle.Slice(at.section, at.entry, at.plan, i)));
  }
  out["steps"] = Json::array();
  for (uint32_t i = 0; i < step_count; ++i) {
    out["steps"].push_back(StepToJson(at, i));
  }
  return out;
}

Json EntryToJson(Place at) {
  const kiln_entry_info_t entry = at.bundle.Entry(at.section, at.entry);
  const auto& [size, capacity, plan_count, attribute_count, name, op,
               geometry] = entry;
  Json out;
  out["name"] = name;
  out["op"] = op;
  out["geometry"] = geometry;
  out["attributes"] = Json::object();
  for (const CanonicalField& field :
       at.bundle.Attributes(at.section, at.entry)) {
    out["attributes"][field.path] = field.value;
  }
  out["capacity"] = capacity;
  out["plans"] = Json::array();
  for (; at.plan < plan_count; ++at.plan) {
    out["plans"].push_back(PlanToJson(at));
  }
  return out;
}

Json KernelToJson(const BundleView& bundle, uint32_t section, uint32_t program,
                  uint32_t index) {
  const kiln_kernel_info_t kernel = bundle.Kernel(section, program, index);
  const auto& [size, param_count, param_bytes, registers, static_shared_bytes,
               local_bytes, max_threads, reserved, name] = kernel;
  Json out = {{"name", name},
              {"param_bytes", param_bytes},
              {"registers", registers},
              {"static_shared_bytes", static_shared_bytes},
              {"local_bytes", local_bytes},
              {"max_threads", max_threads},
              {"params", Json::array()}};
  for (uint32_t i = 0; i < param_count; ++i) {
    const auto& [offset, bytes] = bundle.Parameter(section, program, index, i);
    out["params"].push_back({{"offset", offset}, {"bytes", bytes}});
  }
  return out;
}

Json ProgramToJson(const BundleView& bundle, uint32_t section, uint32_t index) {
  const kiln_program_info_t program = bundle.Program(section, index);
  // The binary is shown by its digest; its place follows from the sizes.
  const auto& [size, kernel_count, build_digest, binary_digest,
               toolchain_digest, file_offset, bytes, data, toolchain] = program;
  Json out;
  out["build_digest"] = Hex(build_digest);
  out["binary_digest"] = Hex(binary_digest);
  out["bytes"] = bytes;
  out["toolchain"] = toolchain;
  out["toolchain_digest"] = Hex(toolchain_digest);
  out["kernels"] = Json::array();
  for (uint32_t i = 0; i < kernel_count; ++i) {
    out["kernels"].push_back(KernelToJson(bundle, section, index, i));
  }
  return out;
}

Json SectionToJson(const BundleView& bundle, uint32_t index) {
  const kiln_section_info_t section = bundle.Section(index);
  // Backend, level and variant are the target's, flags the plans'.
  const auto& [size, backend, level, arch_specific, driver_version_min, flags,
               entry_count, program_count, target] = section;
  Json out;
  out["target"] = target;
  out["driver_version_min"] = driver_version_min;
  out["entries"] = Json::array();
  for (uint32_t i = 0; i < entry_count; ++i) {
    out["entries"].push_back(EntryToJson({bundle, index, i}));
  }
  out["programs"] = Json::array();
  for (uint32_t i = 0; i < program_count; ++i) {
    out["programs"].push_back(ProgramToJson(bundle, index, i));
  }
  return out;
}

}  // namespace

Json BundleToJson(const BundleView& bundle) {
  const auto& [size, format_version, flags, section_count, bytes, root] =
      bundle.info();
  Json out;
  out["root"] = bundle.Root().ToHex();
  out["bytes"] = bytes;
  out["format_version"] = format_version;
  out["sections"] = Json::array();
  for (uint32_t i = 0; i < section_count; ++i) {
    out["sections"].push_back(SectionToJson(bundle, i));
  }
  return out;
}

}  // namespace kiln
