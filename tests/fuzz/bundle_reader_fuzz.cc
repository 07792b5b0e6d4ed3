// Any bytes: the reader refuses them or every getter can walk them. Each input
// is tried as it is and with its root made right, since a hostile file has a
// right root.

#include <cstdint>
#include <cstring>
#include <vector>

#include "compiler/base/check.h"
#include "runtime/bundle_format.h"
#include "runtime/kiln.h"

namespace {

template <typename T>
T Info() {
  T info = {};
  info.struct_size = sizeof(info);
  return info;
}

void CheckText(const char* text) {
  KILN_CHECK(std::strlen(text) <= KILN_FORMAT_STRING_BYTES_MAX);
}

#define KILN_READ(call) KILN_CHECK((call) == KILN_STATUS_OK)

void WalkPlan(const kiln_bundle_t* bundle, uint32_t section, uint32_t entry,
              uint32_t plan) {
  auto info = Info<kiln_plan_info_t>();
  KILN_READ(kiln_bundle_plan(bundle, section, entry, plan, &info, nullptr));
  CheckText(info.label);
  uint8_t golden[KILN_ROOT_BYTES];
  KILN_READ(kiln_bundle_golden(bundle, section, entry, plan, golden, nullptr));
  for (uint32_t i = 0; i < info.param_count; ++i) {
    auto param = Info<kiln_param_info_t>();
    KILN_READ(
        kiln_bundle_param(bundle, section, entry, plan, i, &param, nullptr));
    CheckText(param.shape);
    auto buffer = Info<kiln_buffer_info_t>();
    KILN_READ(
        kiln_bundle_buffer(bundle, section, entry, plan, i, &buffer, nullptr));
    KILN_CHECK(buffer.bytes + buffer.bytes_per_token * info.m_max <=
               KILN_FORMAT_PARAM_BYTES_MAX);
  }
  for (uint32_t i = 0; i < info.slice_count; ++i) {
    auto slice = Info<kiln_slice_info_t>();
    KILN_READ(
        kiln_bundle_slice(bundle, section, entry, plan, i, &slice, nullptr));
    KILN_CHECK(slice.offset + slice.bytes <= info.arena_bytes);
  }
  for (uint32_t s = 0; s < info.step_count; ++s) {
    auto step = Info<kiln_step_info_t>();
    KILN_READ(
        kiln_bundle_step(bundle, section, entry, plan, s, &step, nullptr));
    auto kernel = Info<kiln_kernel_info_t>();
    KILN_READ(kiln_bundle_kernel(bundle, section, step.program, step.kernel,
                                 &kernel, nullptr));
    for (uint32_t a = 0; a < step.arg_count; ++a) {
      auto arg = Info<kiln_arg_info_t>();
      KILN_READ(
          kiln_bundle_arg(bundle, section, entry, plan, s, a, &arg, nullptr));
      KILN_CHECK(arg.offset + arg.bytes <= kernel.param_bytes);
    }
  }
}

void WalkSection(const kiln_bundle_t* bundle, uint32_t section) {
  auto info = Info<kiln_section_info_t>();
  KILN_READ(kiln_bundle_section(bundle, section, &info, nullptr));
  CheckText(info.target);
  for (uint32_t e = 0; e < info.entry_count; ++e) {
    auto entry = Info<kiln_entry_info_t>();
    KILN_READ(kiln_bundle_entry(bundle, section, e, &entry, nullptr));
    CheckText(entry.name);
    for (uint32_t a = 0; a < entry.attribute_count; ++a) {
      const char* name = nullptr;
      const char* value = nullptr;
      KILN_READ(
          kiln_bundle_attribute(bundle, section, e, a, &name, &value, nullptr));
      CheckText(name);
      CheckText(value);
    }
    for (uint32_t p = 0; p < entry.plan_count; ++p) {
      WalkPlan(bundle, section, e, p);
    }
  }
  for (uint32_t p = 0; p < info.program_count; ++p) {
    auto program = Info<kiln_program_info_t>();
    KILN_READ(kiln_bundle_program(bundle, section, p, &program, nullptr));
    // Touch both ends, so that a sanitizer sees a binary outside the file.
    const auto* data = static_cast<const uint8_t*>(program.data);
    volatile uint8_t sink = data[0];
    sink = data[program.bytes - 1];
    static_cast<void>(sink);
  }
}

void Try(const std::vector<uint8_t>& bytes) {
  kiln_bundle_t* bundle = nullptr;
  kiln_error_t error = {};
  const kiln_status_t status = kiln_bundle_open_memory(
      bytes.data(), bytes.size(), nullptr, &bundle, &error);
  if (status != KILN_STATUS_OK) {
    KILN_CHECK(bundle == nullptr && error.message[0] != '\0');
    return;
  }
  auto info = Info<kiln_bundle_info_t>();
  KILN_READ(kiln_bundle_info(bundle, &info, nullptr));
  for (uint32_t s = 0; s < info.section_count; ++s) WalkSection(bundle, s);
  KILN_READ(kiln_bundle_close(bundle, nullptr));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<uint8_t> bytes(data, data + size);
  if (bytes.empty()) return 0;
  Try(bytes);
  if (size < sizeof(kiln_format_header_t)) return 0;
  auto* header = reinterpret_cast<kiln_format_header_t*>(bytes.data());
  header->file_bytes = size;
  kiln_bundle_root(bytes.data(), bytes.size(), header->root);
  Try(bytes);
  return 0;
}
