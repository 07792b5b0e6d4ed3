// kiln report: the measured plans of the cache as one HTML page.

#include <cstdio>
#include <nlohmann/json.hpp>

#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "tools/cli.h"
#include "tuner/report.h"

namespace kiln {

absl::StatusOr<int> RunReport(const GlobalOptions& global,
                              const ReportCommand& command) {
  std::vector<Target> targets;
  if (!command.targets.empty()) {
    ASSIGN_OR_RETURN(targets, ParseTargets(command.targets));
  }
  ASSIGN_OR_RETURN(PlanCache cache, OpenCacheToRead(global));
  RETURN_IF_ERROR(CheckReplacesNone("report", command.output, {cache.path()}));
  ASSIGN_OR_RETURN(const ReportInput input, LoadReport(&cache, targets));
  PrintWarnings(&cache);
  const std::string page = RenderReport(input);
  RETURN_IF_ERROR(WriteFileAtomically(command.output, page));
  if (global.json) {
    const nlohmann::ordered_json out = {{"report", command.output},
                                        {"plans", input.plans.size()},
                                        {"predicted", input.predicted},
                                        {"bytes", page.size()}};
    PrintJson(out);
  } else {
    std::printf("%s: %zu measured plans, %s\n", command.output.c_str(),
                input.plans.size(), FormatBytes(page.size()).c_str());
  }
  return kExitDone;
}

}  // namespace kiln
