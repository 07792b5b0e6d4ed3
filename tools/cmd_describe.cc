// kiln describe: the manifest of a checkpoint, from its headers alone.

#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "templates/formats/describe.h"
#include "tools/cli.h"

namespace kiln {

absl::StatusOr<int> RunDescribe(const GlobalOptions& global,
                                const DescribeCommand& command) {
  ASSIGN_OR_RETURN(
      const Manifest manifest,
      DescribeCheckpoint(command.checkpoint,
                         {.tensor_parallel = command.tensor_parallel}));
  const std::string json = ManifestToJson(manifest);
  if (command.output.empty()) {
    std::printf("%s", json.c_str());
    return kExitDone;
  }
  RETURN_IF_ERROR(WriteFileAtomically(command.output, json));
  if (global.json) {
    nlohmann::ordered_json out;
    out["manifest"] = command.output;
    out["model"] = manifest.name;
    out["requests"] = manifest.requests.size();
    PrintJson(out, 1);
    return kExitDone;
  }
  std::vector<std::vector<std::string>> rows = {
      {"request", "layers", "first", "geometry"}};
  for (const Request& request : manifest.requests) {
    rows.push_back({request.name, absl::StrCat(request.layers.size()),
                    absl::StrCat(request.layers.front()),
                    request.geometry.ToString()});
  }
  std::printf("%s", FormatTable(rows).c_str());
  return kExitDone;
}

}  // namespace kiln
