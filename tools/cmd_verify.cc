// kiln verify: is a bundle whole, and is it the one that was meant?

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/str_cat.h"
#include "compiler/base/digest.h"
#include "compiler/base/status_macros.h"
#include "tools/bundle_view.h"
#include "tools/cli.h"
#include "tools/signature.h"

namespace kiln {
namespace {

// The root covers every byte; this covers what the bytes say about each other.
absl::Status CheckBinaryDigests(const BundleView& bundle) {
  for (uint32_t s = 0; s < bundle.info().section_count; ++s) {
    const kiln_section_info_t section = bundle.Section(s);
    for (uint32_t p = 0; p < section.program_count; ++p) {
      const kiln_program_info_t program = bundle.Program(s, p);
      const Digest found =
          Sha256({static_cast<const char*>(program.data), program.bytes});
      Digest declared;
      std::copy(std::begin(program.binary_digest),
                std::end(program.binary_digest), declared.bytes.begin());
      if (found != declared) {
        return absl::DataLossError(absl::StrCat(
            "program ", p, " of section ", section.target, " hashes to ",
            found.ToHex(), ", the bundle declares ", declared.ToHex()));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<int> RunVerify(const GlobalOptions& global,
                              const VerifyCommand& command) {
  std::optional<Digest> root;
  if (!command.root.empty()) {
    ASSIGN_OR_RETURN(root, Digest::FromHex(command.root));
  }
  ASSIGN_OR_RETURN(const BundleView bundle,
                   BundleView::Open(command.file, root));
  RETURN_IF_ERROR(CheckBinaryDigests(bundle));
  std::string signer;
  if (!command.key.empty()) {
    const std::string signature = command.signature.empty()
                                      ? absl::StrCat(command.file, ".sig")
                                      : command.signature;
    ASSIGN_OR_RETURN(signer,
                     CheckSignature(bundle.Root(), signature, command.key));
  } else if (!command.signature.empty()) {
    return absl::InvalidArgumentError(
        "--signature needs --key, the public key to check it with");
  }
  const bool predicted = (bundle.info().flags & KILN_CONTAINS_PREDICTED) != 0;
  if (global.json) {
    nlohmann::ordered_json out;
    out["file"] = command.file;
    out["root"] = bundle.Root().ToHex();
    out["bytes"] = bundle.info().bytes;
    out["format_version"] = bundle.info().format_version;
    out["sections"] = bundle.info().section_count;
    out["predicted"] = predicted;
    if (!signer.empty()) out["signed_by"] = signer;
    out["verified"] = true;
    PrintJson(out);
  } else {
    std::printf("%s: whole, format %u, %s, %u sections%s\nroot %s\n",
                command.file.c_str(), bundle.info().format_version,
                FormatBytes(bundle.info().bytes).c_str(),
                bundle.info().section_count,
                predicted ? ", contains predicted plans" : "",
                bundle.Root().ToHex().c_str());
    if (!signer.empty()) std::printf("signed by %s\n", signer.c_str());
  }
  return kExitDone;
}

}  // namespace kiln
