// kiln sign: a detached signature over a bundle's root, or a new key pair.

#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_cat.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "tools/bundle_view.h"
#include "tools/cli.h"
#include "tools/signature.h"

namespace kiln {

absl::StatusOr<int> RunSign(const GlobalOptions& global,
                            const SignCommand& command) {
  nlohmann::ordered_json out;
  if (command.file.empty() && !command.new_key) {
    return absl::InvalidArgumentError(
        "sign needs a bundle, or --new-key, or both");
  }
  if (command.new_key) {
    ASSIGN_OR_RETURN(const std::string key, NewSigningKey(command.key));
    out["secret_key"] = command.key;
    out["public_key"] = absl::StrCat(command.key, ".pub");
    if (!global.json) {
      std::printf("secret key %s\npublic key %s.pub (%s)\n",
                  command.key.c_str(), command.key.c_str(), key.c_str());
    }
  }
  if (!command.file.empty()) {
    // A damaged bundle is not signed.
    ASSIGN_OR_RETURN(const BundleView bundle,
                     BundleView::Open(command.file, std::nullopt));
    ASSIGN_OR_RETURN(const std::string signature,
                     SignRoot(bundle.Root(), command.key));
    const std::string path = command.output.empty()
                                 ? absl::StrCat(command.file, ".sig")
                                 : command.output;
    RETURN_IF_ERROR(WriteFileAtomically(path, signature));
    out["file"] = command.file;
    out["root"] = bundle.Root().ToHex();
    out["signature"] = path;
    if (!global.json) {
      std::printf("signature %s\nroot %s\n", path.c_str(),
                  bundle.Root().ToHex().c_str());
    }
  }
  if (global.json) PrintJson(out);
  return kExitDone;
}

}  // namespace kiln
