// kiln describe: the manifest of a checkpoint, from its headers alone.

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "templates/formats/describe.h"
#include "templates/formats/npk_prepare.h"
#include "tools/cli.h"

namespace kiln {
namespace {

// What a request of a layer says as far as its sidecar knows.
std::string NpkRequest(const NpkMetadata& m) {
  return absl::StrCat(
      "\"hidden\" ", m.hidden, ", \"intermediate\" ",
      m.intermediate_global / m.world_size, " (of one of ", m.world_size,
      " ranks), \"experts\" ", m.experts,
      ", \"weights\" {\"format\": \"trellis_mx\", \"bits\": ", m.bits,
      ", \"limit\": \"", m.limit, "\", \"boundary\": \"",
      MxBoundaryName(m.boundary), "\"} and \"recipe\" \"w4a8\"");
}

// "a request with ...", or one for each kind of layers.
std::string NpkRequests(const std::vector<NpkLayerSummary>& layers) {
  std::vector<std::pair<std::string, std::vector<std::string>>> kinds;
  for (const NpkLayerSummary& layer : layers) {
    const std::string request = NpkRequest(layer.metadata);
    auto kind = std::find_if(kinds.begin(), kinds.end(), [&](const auto& one) {
      return one.first == request;
    });
    if (kind == kinds.end()) kind = kinds.insert(kinds.end(), {request, {}});
    kind->second.push_back(absl::StrCat(layer.metadata.layer));
  }
  if (kinds.size() == 1) return absl::StrCat("a request with ", kinds[0].first);
  std::vector<std::string> texts;
  for (const auto& [request, numbers] : kinds) {
    texts.push_back(absl::StrCat(
        "one for layers ", absl::StrJoin(numbers, ", "), " with ", request));
  }
  return absl::StrCat("several requests, ", absl::StrJoin(texts, "; "), ",");
}

// A file of the checkpoint is not replaced, unless it is a manifest that an
// earlier call wrote there.
absl::Status CheckOutput(const DescribeCommand& command) {
  if (command.output.empty()) return absl::OkStatus();
  std::vector<std::string> inputs;
  std::error_code ignored;
  for (const auto& entry :
       std::filesystem::directory_iterator(command.checkpoint, ignored)) {
    inputs.push_back(entry.path().string());
  }
  const absl::Status replaces =
      CheckReplacesNone("manifest", command.output, inputs);
  return replaces.ok() || ReadManifest(command.output).ok() ? absl::OkStatus()
                                                            : replaces;
}

// Sidecars are made for a number of ranks, which --tp can only repeat.
absl::Status CheckRanks(const DescribeCommand& command,
                        const std::vector<NpkLayerSummary>& layers) {
  if (!command.tensor_parallel.has_value()) return absl::OkStatus();
  for (const NpkLayerSummary& layer : layers) {
    const NpkMetadata& m = layer.metadata;
    if (m.world_size == *command.tensor_parallel) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        command.checkpoint, ": --tp is ", *command.tensor_parallel,
        ", and the sidecars of layer ", m.layer, " are for ", m.world_size,
        m.world_size == 1 ? " rank" : " ranks",
        "; leave --tp out, or make them for others with kiln encode --format "
        "npk1 --tp"));
  }
  return absl::OkStatus();
}

// Sidecars do not say all that a request needs: without -o, a table of them.
absl::StatusOr<int> DescribeNpk(const GlobalOptions& global,
                                const DescribeCommand& command) {
  ASSIGN_OR_RETURN(const std::vector<NpkLayerSummary> layers,
                   DescribeNpkFolder(command.checkpoint));
  RETURN_IF_ERROR(CheckRanks(command, layers));
  if (!command.output.empty()) {
    for (const NpkLayerSummary& layer : layers) {
      const absl::Status read = NpkPreparedTensors(layer.metadata).status();
      if (read.ok()) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          command.checkpoint, ": no request is for the sidecars of layer ",
          layer.metadata.layer, ": ", read.message()));
    }
    return absl::FailedPreconditionError(absl::StrCat(
        command.checkpoint,
        ": holds NPK-1 sidecars, which name neither top_k, nor the types of x "
        "and ids, nor up to how many tokens activations keep 16 bits; write ",
        NpkRequests(layers), " by hand"));
  }
  nlohmann::ordered_json out = nlohmann::ordered_json::array();
  std::vector<std::vector<std::string>> rows = {
      {"layer", "ranks", "H", "I", "E", "K", "boundary", "limit", "bytes"}};
  for (const NpkLayerSummary& layer : layers) {
    const NpkMetadata& m = layer.metadata;
    const std::string boundary(MxBoundaryName(m.boundary));
    rows.push_back({absl::StrCat(m.layer), absl::StrCat(m.world_size),
                    absl::StrCat(m.hidden), absl::StrCat(m.intermediate_global),
                    absl::StrCat(m.experts), absl::StrCat(m.bits), boundary,
                    m.limit, FormatBytes(layer.bytes)});
    out.push_back({{"format", "npk1"},
                   {"layer", m.layer},
                   {"ranks", m.world_size},
                   {"hidden", m.hidden},
                   {"intermediate", m.intermediate_global},
                   {"experts", m.experts},
                   {"bits", m.bits},
                   {"boundary", boundary},
                   {"limit", m.limit},
                   {"bytes", layer.bytes}});
  }
  if (global.json) {
    PrintJson(out, 1);
  } else {
    std::printf("%s", FormatTable(rows).c_str());
  }
  return kExitDone;
}

}  // namespace

absl::StatusOr<int> RunDescribe(const GlobalOptions& global,
                                const DescribeCommand& command) {
  RETURN_IF_ERROR(CheckOutput(command));
  if (HoldsNpkSidecars(command.checkpoint)) return DescribeNpk(global, command);
  ASSIGN_OR_RETURN(
      const Manifest manifest,
      DescribeCheckpoint(
          command.checkpoint,
          {.tensor_parallel = command.tensor_parallel.value_or(1)}));
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
