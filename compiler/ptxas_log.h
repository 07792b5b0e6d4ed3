// ParsePtxasLog: what ptxas itself says about kernels when it runs with -v. The
// numbers agree with the cubin's; only spills are found nowhere else.

#ifndef KILN_COMPILER_PTXAS_LOG_H_
#define KILN_COMPILER_PTXAS_LOG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace kiln {

struct PtxasReport {
  std::string entry;
  uint32_t registers = 0;
  uint32_t stack_bytes = 0;
  uint32_t spill_store_bytes = 0;
  uint32_t spill_load_bytes = 0;
  uint32_t static_shared_bytes = 0;

  bool operator==(const PtxasReport&) const = default;
};

// One report per kernel, in the order of the log. Lines of any other kind are
// skipped; numbers that are missing stay 0.
std::vector<PtxasReport> ParsePtxasLog(absl::string_view log);

}  // namespace kiln

#endif  // KILN_COMPILER_PTXAS_LOG_H_
