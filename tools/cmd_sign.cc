// kiln sign: a detached signature over a bundle's root, or a new key pair.

#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "compiler/base/file_util.h"
#include "compiler/base/same_file.h"
#include "compiler/base/status_macros.h"
#include "tools/bundle_view.h"
#include "tools/cli.h"
#include "tools/signature.h"

namespace kiln {

absl::StatusOr<int> RunSign(const GlobalOptions& global,
                            const SignCommand& command) {
  if (command.file.empty() && !command.new_key) {
    return absl::InvalidArgumentError(
        "sign needs a bundle, or --new-key, or both");
  }
  // A damaged bundle is not signed, and gets no keys made for it.
  std::optional<BundleView> bundle;
  if (!command.file.empty()) {
    ASSIGN_OR_RETURN(bundle, BundleView::Open(command.file, std::nullopt));
  }
  nlohmann::ordered_json out;
  std::string text;
  const std::string public_key = absl::StrCat(command.key, ".pub");
  // New keys go away again when they could not be used; other files of these
  // names are somebody else's.
  bool remove_keys = false;
  const absl::Cleanup cleanup = [&] {
    if (!remove_keys) return;
    unlink(command.key.c_str());
    unlink(public_key.c_str());
  };
  if (command.new_key) {
    ASSIGN_OR_RETURN(const std::string key, NewSigningKey(command.key));
    remove_keys = true;
    out["secret_key"] = command.key;
    out["public_key"] = public_key;
    absl::StrAppend(&text, "secret key ", command.key, "\npublic key ",
                    public_key, " (", key, ")\n");
  }
  if (bundle.has_value()) {
    ASSIGN_OR_RETURN(const std::string signature,
                     SignRoot(bundle->Root(), command.key));
    const std::string path = command.output.empty()
                                 ? absl::StrCat(command.file, ".sig")
                                 : command.output;
    for (const std::string& input : {command.file, command.key, public_key}) {
      if (!IsSameFile(path, input)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("the signature would replace ", input,
                       "; name another file with -o"));
    }
    RETURN_IF_ERROR(WriteFileAtomically(path, signature));
    out["file"] = command.file;
    out["root"] = bundle->Root().ToHex();
    out["signature"] = path;
    absl::StrAppend(&text, "signature ", path, "\nroot ",
                    bundle->Root().ToHex(), "\n");
  }
  remove_keys = false;
  if (!global.json) std::printf("%s", text.c_str());
  if (global.json) PrintJson(out);
  return kExitDone;
}

}  // namespace kiln
