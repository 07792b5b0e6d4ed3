#include "tools/bundle_view.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "compiler/bundle_attributes.h"
#include "tuner/loaded_plan.h"

namespace kiln {
namespace {

// An info struct with its size set, filled by `getter`. Indices come from the
// bundle's own counts, so a failure is our mistake.
template <typename Info, typename Getter>
Info Get(Getter getter) {
  Info info = {};
  info.struct_size = sizeof(info);
  kiln_error_t error = {};
  KILN_CHECK(getter(&info, &error) == KILN_STATUS_OK);
  return info;
}

}  // namespace

absl::StatusOr<BundleView> BundleView::Open(const std::string& path,
                                            std::optional<Digest> root) {
  kiln_open_options_t options = {};
  options.struct_size = sizeof(options);
  options.expected_root = root.has_value() ? root->bytes.data() : nullptr;
  kiln_error_t error = {};
  kiln_bundle_t* bundle = nullptr;
  const kiln_status_t status =
      kiln_bundle_open_file(path.c_str(), &options, &bundle, &error);
  if (status == KILN_STATUS_FILE_UNREADABLE) {
    const std::string message =
        absl::StrCat(error.message, " (", kiln_status_name(status), ")");
    // Without a number of the system's it is no file, as ReadFile has it.
    return error.driver_code == 0
               ? absl::InvalidArgumentError(message)
               : absl::Status(ErrnoStatus(error.driver_code, "", "").code(),
                              message);
  }
  RETURN_IF_ERROR(RuntimeStatus(status, error));
  return BundleView(bundle);
}

BundleView::BundleView(kiln_bundle_t* bundle)
    : bundle_(bundle),
      info_(Get<kiln_bundle_info_t>([&](auto* info, auto* error) {
        return kiln_bundle_info(bundle, info, error);
      })) {}

BundleView::BundleView(BundleView&& other) noexcept {
  *this = std::move(other);
}

BundleView& BundleView::operator=(BundleView&& other) noexcept {
  std::swap(bundle_, other.bundle_);
  std::swap(info_, other.info_);
  return *this;
}

BundleView::~BundleView() {
  if (bundle_ != nullptr) kiln_bundle_close(bundle_, nullptr);
}

Digest BundleView::Root() const {
  Digest root;
  std::memcpy(root.bytes.data(), info_.root, root.bytes.size());
  return root;
}

kiln_section_info_t BundleView::Section(uint32_t section) const {
  return Get<kiln_section_info_t>([&](auto* info, auto* error) {
    return kiln_bundle_section(bundle_, section, info, error);
  });
}

kiln_entry_info_t BundleView::Entry(uint32_t section, uint32_t entry) const {
  return Get<kiln_entry_info_t>([&](auto* info, auto* error) {
    return kiln_bundle_entry(bundle_, section, entry, info, error);
  });
}

kiln_plan_info_t BundleView::Plan(uint32_t section, uint32_t entry,
                                  uint32_t plan) const {
  return Get<kiln_plan_info_t>([&](auto* info, auto* error) {
    return kiln_bundle_plan(bundle_, section, entry, plan, info, error);
  });
}

kiln_param_info_t BundleView::Param(uint32_t section, uint32_t entry,
                                    uint32_t plan, uint32_t param) const {
  return Get<kiln_param_info_t>([&](auto* info, auto* error) {
    return kiln_bundle_param(bundle_, section, entry, plan, param, info, error);
  });
}

kiln_buffer_info_t BundleView::Buffer(uint32_t section, uint32_t entry,
                                      uint32_t plan, uint32_t param) const {
  return Get<kiln_buffer_info_t>([&](auto* info, auto* error) {
    return kiln_bundle_buffer(bundle_, section, entry, plan, param, info,
                              error);
  });
}

Digest BundleView::Golden(uint32_t section, uint32_t entry,
                          uint32_t plan) const {
  Digest digest;
  KILN_CHECK(kiln_bundle_golden(bundle_, section, entry, plan,
                                digest.bytes.data(),
                                nullptr) == KILN_STATUS_OK);
  return digest;
}

kiln_slice_info_t BundleView::Slice(uint32_t section, uint32_t entry,
                                    uint32_t plan, uint32_t slice) const {
  return Get<kiln_slice_info_t>([&](auto* info, auto* error) {
    return kiln_bundle_slice(bundle_, section, entry, plan, slice, info, error);
  });
}

kiln_step_info_t BundleView::Step(uint32_t section, uint32_t entry,
                                  uint32_t plan, uint32_t step) const {
  return Get<kiln_step_info_t>([&](auto* info, auto* error) {
    return kiln_bundle_step(bundle_, section, entry, plan, step, info, error);
  });
}

kiln_arg_info_t BundleView::Arg(uint32_t section, uint32_t entry, uint32_t plan,
                                uint32_t step, uint32_t arg) const {
  return Get<kiln_arg_info_t>([&](auto* info, auto* error) {
    return kiln_bundle_arg(bundle_, section, entry, plan, step, arg, info,
                           error);
  });
}

kiln_program_info_t BundleView::Program(uint32_t section,
                                        uint32_t program) const {
  return Get<kiln_program_info_t>([&](auto* info, auto* error) {
    return kiln_bundle_program(bundle_, section, program, info, error);
  });
}

kiln_kernel_info_t BundleView::Kernel(uint32_t section, uint32_t program,
                                      uint32_t kernel) const {
  return Get<kiln_kernel_info_t>([&](auto* info, auto* error) {
    return kiln_bundle_kernel(bundle_, section, program, kernel, info, error);
  });
}

BundleView::KernelParam BundleView::Parameter(uint32_t section,
                                              uint32_t program, uint32_t kernel,
                                              uint32_t param) const {
  KernelParam out;
  KILN_CHECK(kiln_bundle_kernel_param(bundle_, section, program, kernel, param,
                                      &out.offset, &out.bytes,
                                      nullptr) == KILN_STATUS_OK);
  return out;
}

std::vector<CanonicalField> BundleView::Attributes(uint32_t section,
                                                   uint32_t entry) const {
  std::vector<CanonicalField> fields;
  const uint32_t count = Entry(section, entry).attribute_count;
  for (uint32_t i = 0; i < count; ++i) {
    const char* name = nullptr;
    const char* value = nullptr;
    KILN_CHECK(kiln_bundle_attribute(bundle_, section, entry, i, &name, &value,
                                     nullptr) == KILN_STATUS_OK);
    fields.push_back({name, value});
  }
  return fields;
}

absl::StatusOr<RequestGeometry> BundleView::Geometry(uint32_t section,
                                                     uint32_t entry) const {
  return GeometryFromAttributes(Attributes(section, entry));
}

}  // namespace kiln
