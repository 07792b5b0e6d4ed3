// kiln verify: is a bundle whole, and is it the one that was meant?

#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "compiler/base/status_macros.h"
#include "tools/bundle_view.h"
#include "tools/cli.h"

namespace kiln {

absl::StatusOr<int> RunVerify(const GlobalOptions& global,
                              const VerifyCommand& command) {
  std::optional<Digest> root;
  if (!command.root.empty()) {
    ASSIGN_OR_RETURN(root, Digest::FromHex(command.root));
  }
  ASSIGN_OR_RETURN(const BundleView bundle,
                   BundleView::Open(command.file, root));
  const bool predicted = (bundle.info().flags & KILN_CONTAINS_PREDICTED) != 0;
  if (global.json) {
    nlohmann::ordered_json out;
    out["file"] = command.file;
    out["root"] = bundle.Root().ToHex();
    out["bytes"] = bundle.info().bytes;
    out["format_version"] = bundle.info().format_version;
    out["sections"] = bundle.info().section_count;
    out["predicted"] = predicted;
    out["verified"] = true;
    std::printf("%s\n", out.dump().c_str());
  } else {
    std::printf("%s: whole, format %u, %s, %u sections%s\nroot %s\n",
                command.file.c_str(), bundle.info().format_version,
                FormatBytes(bundle.info().bytes).c_str(),
                bundle.info().section_count,
                predicted ? ", contains predicted plans" : "",
                bundle.Root().ToHex().c_str());
  }
  return kExitDone;
}

}  // namespace kiln
