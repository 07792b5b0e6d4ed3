#include "tools/bundle_json.h"

#include <utility>

#include "compiler/base/digest.h"

namespace kiln {
namespace {

using Json = nlohmann::ordered_json;

Json StepToJson(const BundleView& bundle, uint32_t section, uint32_t entry,
                uint32_t plan, uint32_t index) {
  const kiln_step_info_t step = bundle.Step(section, entry, plan, index);
  Json out;
  out["label"] = step.label;
  out["program"] = step.program;
  out["kernel"] = step.kernel_name;
  out["grid"] = Json::array();
  for (const kiln_launch_dim_t& dim : step.grid) {
    Json terms = Json::array();
    for (int i = 0; i < 2; ++i) {
      terms.push_back({dim.mul[i], dim.add[i], dim.div[i]});
    }
    out["grid"].push_back(std::move(terms));
  }
  out["block"] = {step.block[0], step.block[1], step.block[2]};
  out["dynamic_shared_bytes"] = step.dynamic_shared_bytes;
  static constexpr const char* kKinds[] = {"?",      "param", "arena",
                                           "tokens", "u32",   "u64"};
  out["args"] = Json::array();
  for (uint32_t i = 0; i < step.arg_count; ++i) {
    const kiln_arg_info_t arg = bundle.Arg(section, entry, plan, index, i);
    out["args"].push_back({{"kind", arg.kind <= 5 ? kKinds[arg.kind] : "?"},
                           {"offset", arg.offset},
                           {"bytes", arg.bytes},
                           {"value", arg.value}});
  }
  return out;
}

// Null where the bundle does not describe the buffer.
Json BufferToJson(const kiln_buffer_info_t& buffer) {
  if (buffer.element_bytes == 0) return nullptr;
  static constexpr const char* kFills[] = {"none", "words", "indices"};
  return {{"bytes", buffer.bytes},
          {"bytes_per_token", buffer.bytes_per_token},
          {"element_bytes", buffer.element_bytes},
          {"fill", buffer.fill <= 2 ? kFills[buffer.fill] : "?"},
          {"a", buffer.a},
          {"b", buffer.b}};
}

}  // namespace

Json PlanToJson(const BundleView& bundle, uint32_t section, uint32_t entry,
                uint32_t index) {
  const kiln_plan_info_t plan = bundle.Plan(section, entry, index);
  Json out;
  out["m_min"] = plan.m_min;
  out["m_max"] = plan.m_max;
  out["label"] = plan.label;
  out["template"] = plan.template_name;
  out["template_version"] = plan.template_version;
  out["state"] =
      (plan.flags & KILN_CONTAINS_PREDICTED) != 0 ? "predicted" : "measured";
  out["numerics_class"] = plan.numerics_class;
  out["tolerance"] = plan.tolerance;
  out["deterministic"] = plan.deterministic != 0;
  out["cpu_threads"] = plan.cpu_threads;
  out["evidence"] = {{"median_ns", plan.median_ns},
                     {"default_median_ns", plan.default_median_ns},
                     {"noise_floor", plan.noise_floor},
                     {"worst_error", plan.worst_error},
                     {"samples", plan.samples},
                     {"candidates", plan.candidates}};
  const Digest golden = bundle.Golden(section, entry, index);
  out["golden"] = golden == Digest() ? Json() : Json(golden.ToHex());
  out["params"] = Json::array();
  for (uint32_t i = 0; i < plan.param_count; ++i) {
    const kiln_param_info_t param = bundle.Param(section, entry, index, i);
    out["params"].push_back(
        {{"name", param.name},
         {"dtype", param.dtype},
         {"shape", param.shape},
         {"offset", param.offset},
         {"output", param.output != 0},
         {"buffer", BufferToJson(bundle.Buffer(section, entry, index, i))}});
  }
  out["arena_bytes"] = plan.arena_bytes;
  out["arena"] = Json::array();
  for (uint32_t i = 0; i < plan.slice_count; ++i) {
    const kiln_slice_info_t slice = bundle.Slice(section, entry, index, i);
    out["arena"].push_back({{"name", slice.name},
                            {"offset", slice.offset},
                            {"bytes", slice.bytes}});
  }
  out["steps"] = Json::array();
  for (uint32_t i = 0; i < plan.step_count; ++i) {
    out["steps"].push_back(StepToJson(bundle, section, entry, index, i));
  }
  return out;
}

Json ProgramToJson(const BundleView& bundle, uint32_t section, uint32_t index) {
  const kiln_program_info_t program = bundle.Program(section, index);
  const auto hex = [](const uint8_t* digest) {
    return ToHex({reinterpret_cast<const char*>(digest), 32});
  };
  Json out;
  out["build_digest"] = hex(program.build_digest);
  out["binary_digest"] = hex(program.binary_digest);
  out["bytes"] = program.bytes;
  out["toolchain"] = program.toolchain;
  out["kernels"] = Json::array();
  for (uint32_t i = 0; i < program.kernel_count; ++i) {
    const kiln_kernel_info_t kernel = bundle.Kernel(section, index, i);
    out["kernels"].push_back(
        {{"name", kernel.name},
         {"param_bytes", kernel.param_bytes},
         {"registers", kernel.registers},
         {"static_shared_bytes", kernel.static_shared_bytes},
         {"local_bytes", kernel.local_bytes},
         {"max_threads", kernel.max_threads}});
  }
  return out;
}

Json BundleToJson(const BundleView& bundle) {
  Json out;
  out["root"] = bundle.Root().ToHex();
  out["bytes"] = bundle.info().bytes;
  out["format_version"] = bundle.info().format_version;
  out["sections"] = Json::array();
  for (uint32_t s = 0; s < bundle.info().section_count; ++s) {
    const kiln_section_info_t section = bundle.Section(s);
    Json json_section;
    json_section["target"] = section.target;
    json_section["driver_version_min"] = section.driver_version_min;
    json_section["entries"] = Json::array();
    for (uint32_t e = 0; e < section.entry_count; ++e) {
      const kiln_entry_info_t entry = bundle.Entry(s, e);
      Json json_entry;
      json_entry["name"] = entry.name;
      json_entry["op"] = entry.op;
      json_entry["geometry"] = entry.geometry;
      json_entry["capacity"] = entry.capacity;
      json_entry["plans"] = Json::array();
      for (uint32_t p = 0; p < entry.plan_count; ++p) {
        json_entry["plans"].push_back(PlanToJson(bundle, s, e, p));
      }
      json_section["entries"].push_back(std::move(json_entry));
    }
    json_section["programs"] = Json::array();
    for (uint32_t p = 0; p < section.program_count; ++p) {
      json_section["programs"].push_back(ProgramToJson(bundle, s, p));
    }
    out["sections"].push_back(std::move(json_section));
  }
  return out;
}

}  // namespace kiln
