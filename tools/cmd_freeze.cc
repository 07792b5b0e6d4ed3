// kiln freeze: stored winners -> one bundle file.

#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "tools/cli.h"
#include "tools/interrupt.h"
#include "tuner/freeze.h"

namespace kiln {

absl::StatusOr<int> RunFreeze(const GlobalOptions& global,
                              const FreezeCommand& command) {
  EndCleanlyWhenInterrupted(kUnfinishedIsRemoved);
  ASSIGN_OR_RETURN(const Manifest manifest,
                   ReadManifest(command.planning.manifest));
  RETURN_IF_ERROR(CheckReplacesNone(
      "bundle", command.output,
      {command.planning.manifest,
       absl::StrCat(CacheDirectory(global), "/", kCacheFileName)}));
  ASSIGN_OR_RETURN(const PrewarmOptions options,
                   MakePrewarmOptions(global, command.planning));
  ASSIGN_OR_RETURN(PlanCache cache, OpenExistingCache(global));
  if (!options.attached.empty()) {
    ASSIGN_OR_RETURN(const ResolvedManifest resolved,
                     ResolveManifest(manifest, options, &cache));
    PrintNotesOnIdle(options, resolved);
  }
  FreezePolicy policy;
  policy.allow_predicted = command.allow_predicted;
  policy.allow_unqualified = command.allow_unqualified;
  policy.golden = !command.no_golden;
  policy.regret_cap = command.regret_cap;
  if (command.keep_intervals) policy.regret_cap.reset();
  absl::StatusOr<FreezeResult> frozen =
      Freeze(manifest, options, policy, &cache);
  for (const std::string& warning : cache.TakeWarnings()) {
    std::fprintf(stderr, "cache: %s\n", warning.c_str());
  }
  if (absl::IsNotFound(frozen.status())) {
    std::fprintf(stderr, "kiln: %s\n",
                 std::string(frozen.status().message()).c_str());
    return kExitIncomplete;
  }
  RETURN_IF_ERROR(frozen.status());
  RETURN_IF_ERROR(WriteFileAtomically(command.output, frozen->bytes));
  if (global.json) {
    nlohmann::ordered_json out;
    out["file"] = command.output;
    out["root"] = frozen->root.ToHex();
    out["bytes"] = frozen->bytes.size();
    out["entries"] = frozen->entries;
    out["plans"] = frozen->plans;
    out["merged"] = frozen->merged;
    out["predicted"] = frozen->predicted;
    out["unqualified"] = frozen->unqualified;
    out["programs"] = frozen->programs;
    out["golden"] = frozen->golden;
    PrintJson(out);
  } else {
    std::printf(
        "%s: %s, %zu entries, %zu plans (%zu predicted, %zu "
        "unqualified, %zu with a golden digest) for %zu intervals, %zu "
        "programs\nroot %s\n",
        command.output.c_str(), FormatBytes(frozen->bytes.size()).c_str(),
        frozen->entries, frozen->plans, frozen->predicted, frozen->unqualified,
        frozen->golden, frozen->plans + frozen->merged, frozen->programs,
        frozen->root.ToHex().c_str());
  }
  return kExitDone;
}

}  // namespace kiln
