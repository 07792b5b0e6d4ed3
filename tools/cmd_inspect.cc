// kiln inspect: everything a bundle declares.

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/base/digest.h"
#include "compiler/base/status_macros.h"
#include "tools/bundle_json.h"
#include "tools/bundle_view.h"
#include "tools/cli.h"

namespace kiln {
namespace {

// "measured", and what is special about the plan.
std::string StateText(const kiln_plan_info_t& plan) {
  std::string text =
      (plan.flags & KILN_CONTAINS_PREDICTED) != 0 ? "predicted" : "measured";
  if ((plan.flags & KILN_CONTAINS_UNQUALIFIED) != 0) text += ", unqualified";
  if (plan.overlapped != 0) text += ", overlapped";
  return text;
}

void Print(const BundleView& bundle) {
  std::printf("root %s\nformat %u, %s\n", bundle.Root().ToHex().c_str(),
              bundle.info().format_version,
              FormatBytes(bundle.info().bytes).c_str());
  for (uint32_t s = 0; s < bundle.info().section_count; ++s) {
    const kiln_section_info_t section = bundle.Section(s);
    std::printf("\n%s", section.target);
    if (section.driver_version_min != 0) {
      std::printf(", driver %u.%u or later", section.driver_version_min / 1000,
                  section.driver_version_min % 1000 / 10);
    }
    std::printf("\n");
    for (uint32_t e = 0; e < section.entry_count; ++e) {
      const kiln_entry_info_t entry = bundle.Entry(s, e);
      std::printf("  %s  %s  1..%u\n", entry.name, entry.geometry,
                  entry.capacity);
      std::vector<std::vector<std::string>> rows = {
          {"    m", "state", "time", "error", "arena", "golden", "plan"}};
      for (uint32_t p = 0; p < entry.plan_count; ++p) {
        const kiln_plan_info_t plan = bundle.Plan(s, e, p);
        const Digest golden = bundle.Golden(s, e, p);
        const bool predicted = (plan.flags & KILN_CONTAINS_PREDICTED) != 0;
        rows.push_back(
            {absl::StrCat("    ", plan.m_min, "..", plan.m_max),
             StateText(plan), predicted ? "-" : FormatNs(plan.median_ns),
             predicted ? "-" : absl::StrFormat("%.1e", plan.worst_error),
             FormatBytes(plan.arena_bytes),
             golden == Digest() ? "-" : golden.Short(), plan.label});
      }
      std::printf("%s", FormatTable(rows).c_str());
    }
    std::vector<std::vector<std::string>> rows = {{"  program", "bytes",
                                                   "kernel", "regs", "shared",
                                                   "local", "toolchain"}};
    for (uint32_t p = 0; p < section.program_count; ++p) {
      const kiln_program_info_t program = bundle.Program(s, p);
      for (uint32_t k = 0; k < program.kernel_count; ++k) {
        const kiln_kernel_info_t kernel = bundle.Kernel(s, p, k);
        rows.push_back({absl::StrCat("  ", ToHex({reinterpret_cast<const char*>(
                                                      program.build_digest),
                                                  6})),
                        absl::StrCat(program.bytes), kernel.name,
                        absl::StrCat(kernel.registers),
                        absl::StrCat(kernel.static_shared_bytes),
                        absl::StrCat(kernel.local_bytes), program.toolchain});
      }
    }
    std::printf("%s", FormatTable(rows).c_str());
  }
}

}  // namespace

absl::StatusOr<int> RunInspect(const GlobalOptions& global,
                               const InspectCommand& command) {
  ASSIGN_OR_RETURN(const BundleView bundle,
                   BundleView::Open(command.file, std::nullopt));
  if (global.json) {
    PrintJson(BundleToJson(bundle), 1);
  } else {
    Print(bundle);
  }
  return kExitDone;
}

}  // namespace kiln
