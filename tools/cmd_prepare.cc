// kiln prepare: one layer of a checkpoint as native tensors.

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "compiler/base/status_macros.h"
#include "templates/formats/npk_import.h"
#include "templates/formats/npk_prepare.h"
#include "templates/formats/prepare.h"
#include "tools/cli.h"
#include "tools/interrupt.h"

namespace kiln {
namespace {

absl::StatusOr<int> PrepareNpk(const GlobalOptions& global,
                               const std::string& folder,
                               const std::string& output,
                               const PrepareOptions& options) {
  ASSIGN_OR_RETURN(const PreparedNpkLayer prepared,
                   PrepareNpkLayer(folder, output, options));
  const NpkMetadata& m = prepared.metadata;
  const std::string geometry = absl::StrCat(
      "npk1 H", m.hidden, " I", m.intermediate, " E", m.experts, " K", m.bits,
      " ", MxBoundaryName(m.boundary), " limit ", m.limit);
  if (global.json) {
    nlohmann::ordered_json out;
    out["file"] = prepared.path;
    out["bytes"] = prepared.bytes;
    out["geometry"] = geometry;
    PrintJson(out, 1);
    return kExitDone;
  }
  std::printf("%s  %s  %s\n", prepared.path.c_str(),
              FormatBytes(prepared.bytes).c_str(), geometry.c_str());
  return kExitDone;
}

}  // namespace

absl::StatusOr<int> RunPrepare(const GlobalOptions& global,
                               const PrepareCommand& command) {
  EndCleanlyWhenInterrupted(kUnfinishedIsRemoved);
  PrepareOptions options;
  options.layer = command.layer;
  const std::vector<std::string> parts =
      absl::StrSplit(command.tensor_parallel, '/');
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], &options.rank) ||
      !absl::SimpleAtoi(parts[1], &options.ranks)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--tp is \"", command.tensor_parallel, "\", must be K/N, as in 0/2"));
  }
  // A file of the public schema becomes an NPK-1 sidecar in the output.
  const std::vector<NpkPlace> p8 = NpkPlacesIn(command.checkpoint, true);
  const absl::Status has_p8 = CheckNpkPlace(command.checkpoint, p8, options);
  if (has_p8.ok()) {
    const std::string file = P8FileName(options.layer, options.rank);
    RETURN_IF_ERROR(ImportP8Sidecar(absl::StrCat(command.checkpoint, "/", file),
                                    "imported", command.output)
                        .status());
    return PrepareNpk(global, command.output, command.output, options);
  }
  if (HoldsNpkSidecars(command.checkpoint)) {
    return PrepareNpk(global, command.checkpoint, command.output, options);
  }
  absl::StatusOr<PreparedLayer> layer =
      PrepareLayer(command.checkpoint, command.output, options);
  // A folder of such files and nothing else.
  if (!p8.empty() && absl::IsNotFound(layer.status())) return has_p8;
  ASSIGN_OR_RETURN(const PreparedLayer prepared, std::move(layer));
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
