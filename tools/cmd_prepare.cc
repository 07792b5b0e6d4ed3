// kiln prepare: one layer of a checkpoint as native tensors.

#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "compiler/base/status_macros.h"
#include "templates/formats/prepare.h"
#include "tools/cli.h"

namespace kiln {

absl::StatusOr<int> RunPrepare(const GlobalOptions& global,
                               const PrepareCommand& command) {
  PrepareOptions options;
  options.layer = command.layer;
  const std::vector<std::string> parts =
      absl::StrSplit(command.tensor_parallel, '/');
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &options.rank) ||
      !absl::SimpleAtoi(parts[1], &options.ranks)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--tp is \"", command.tensor_parallel, "\", must be K/N, as in 0/2"));
  }
  ASSIGN_OR_RETURN(const PreparedLayer prepared,
                   PrepareLayer(command.checkpoint, command.output, options));
  if (global.json) {
    nlohmann::ordered_json out;
    out["file"] = prepared.path;
    out["bytes"] = prepared.bytes;
    out["geometry"] = prepared.description;
    PrintJson(out, 1);
    return kExitDone;
  }
  std::printf("%s  %s  %s\n", prepared.path.c_str(),
              FormatBytes(prepared.bytes).c_str(),
              prepared.description.c_str());
  return kExitDone;
}

}  // namespace kiln
