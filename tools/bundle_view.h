// BundleView: a bundle opened through the runtime, with its getters as values
// for the command line.

#ifndef KILN_TOOLS_BUNDLE_VIEW_H_
#define KILN_TOOLS_BUNDLE_VIEW_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compiler/base/digest.h"
#include "compiler/spec/request.h"
#include "compiler/spec/target.h"
#include "runtime/kiln.h"

namespace kiln {

class BundleView {
 public:
  // Opens and verifies. InvalidArgument when there is no such file, so that all
  // verbs exit alike; DataLoss for a damaged file or another root.
  static absl::StatusOr<BundleView> Open(const std::string& path,
                                         std::optional<Digest> root);
  // Takes over a handle that is open.
  explicit BundleView(kiln_bundle_t* bundle);
  BundleView(BundleView&& other) noexcept;
  BundleView& operator=(BundleView&& other) noexcept;
  ~BundleView();

  kiln_bundle_t* handle() const { return bundle_; }

  const kiln_bundle_info_t& info() const { return info_; }

  Digest Root() const;

  // Every getter of the runtime, with indices in range.
  kiln_section_info_t Section(uint32_t section) const;
  kiln_entry_info_t Entry(uint32_t section, uint32_t entry) const;
  kiln_plan_info_t Plan(uint32_t section, uint32_t entry, uint32_t plan) const;
  kiln_param_info_t Param(uint32_t section, uint32_t entry, uint32_t plan,
                          uint32_t param) const;
  kiln_buffer_info_t Buffer(uint32_t section, uint32_t entry, uint32_t plan,
                            uint32_t param) const;
  // All zero: the plan has none.
  Digest Golden(uint32_t section, uint32_t entry, uint32_t plan) const;
  kiln_slice_info_t Slice(uint32_t section, uint32_t entry, uint32_t plan,
                          uint32_t slice) const;
  kiln_step_info_t Step(uint32_t section, uint32_t entry, uint32_t plan,
                        uint32_t step) const;
  kiln_arg_info_t Arg(uint32_t section, uint32_t entry, uint32_t plan,
                      uint32_t step, uint32_t arg) const;
  kiln_program_info_t Program(uint32_t section, uint32_t program) const;
  kiln_kernel_info_t Kernel(uint32_t section, uint32_t program,
                            uint32_t kernel) const;

  struct KernelParam {
    uint32_t offset = 0;
    uint32_t bytes = 0;
  };

  KernelParam Parameter(uint32_t section, uint32_t program, uint32_t kernel,
                        uint32_t param) const;

  // The request's geometry, field by field.
  std::vector<CanonicalField> Attributes(uint32_t section,
                                         uint32_t entry) const;

  // The request behind an entry.
  absl::StatusOr<RequestGeometry> Geometry(uint32_t section,
                                           uint32_t entry) const;

 private:
  kiln_bundle_t* bundle_ = nullptr;
  kiln_bundle_info_t info_ = {};
};

}  // namespace kiln

#endif  // KILN_TOOLS_BUNDLE_VIEW_H_
