#include "compiler/ptxas_log.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace kiln {
namespace {

constexpr absl::string_view kStart = "Compiling entry function '";

// The number before `unit`, as in "968 bytes stack frame"; 0 without one.
uint32_t NumberBefore(absl::string_view line, absl::string_view unit) {
  const size_t at = line.find(unit);
  if (at == absl::string_view::npos) return 0;
  size_t begin = at;
  while (begin > 0 && line[begin - 1] >= '0' && line[begin - 1] <= '9') {
    --begin;
  }
  uint32_t number = 0;
  return absl::SimpleAtoi(line.substr(begin, at - begin), &number) ? number : 0;
}

}  // namespace

std::vector<PtxasReport> ParsePtxasLog(absl::string_view log) {
  std::vector<PtxasReport> reports;
  for (absl::string_view line : absl::StrSplit(log, '\n')) {
    const size_t start = line.find(kStart);
    if (start != absl::string_view::npos) {
      line.remove_prefix(start + kStart.size());
      PtxasReport report;
      report.entry = std::string(line.substr(0, line.find('\'')));
      reports.push_back(report);
      continue;
    }
    if (reports.empty()) continue;
    PtxasReport& report = reports.back();
    if (absl::StrContains(line, " bytes stack frame")) {
      report.stack_bytes = NumberBefore(line, " bytes stack frame");
      report.spill_store_bytes = NumberBefore(line, " bytes spill stores");
      report.spill_load_bytes = NumberBefore(line, " bytes spill loads");
    } else if (absl::StrContains(line, "Used ")) {
      report.registers = NumberBefore(line, " registers");
      report.static_shared_bytes = NumberBefore(line, " bytes smem");
    }
  }
  return reports;
}

}  // namespace kiln
