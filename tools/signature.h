// Detached Ed25519 signatures over a bundle's root, and their key files.
//
// All three files are one line of text, "TYPE HEX\n":
//   kiln-ed25519-secret-1     the 32-byte seed; mode 0600, owned by the user
//   kiln-ed25519-public-1     the 32-byte public key
//   kiln-ed25519-signature-1  public key and 64-byte signature, 96 bytes
// What is signed is the text "kiln bundle root 1", a NUL and the 32-byte root,
// so that a signature made for anything else never fits.

#ifndef KILN_TOOLS_SIGNATURE_H_
#define KILN_TOOLS_SIGNATURE_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compiler/base/digest.h"

namespace kiln {

// Makes a key pair: `path` (mode 0600) and `path`.pub. Neither may exist yet.
// Returns the public key in hexadecimal.
//   Errors: AlreadyExists, NotFound, PermissionDenied.
absl::StatusOr<std::string> NewSigningKey(const std::string& path);

// The contents of a signature file for `root`.
//   Errors: FailedPrecondition if others can read the secret key, or it is not
//   the user's own regular file; InvalidArgument if it is not a secret key.
absl::StatusOr<std::string> SignRoot(const Digest& root,
                                     const std::string& secret_key_path);

// Checks the signature file against `root` and the public key file. Returns
// the public key in hexadecimal.
//   Errors: FailedPrecondition without a signature file, for a signature by
//   another key, of another root, or damaged; InvalidArgument for files of
//   another form.
absl::StatusOr<std::string> CheckSignature(const Digest& root,
                                           const std::string& signature_path,
                                           const std::string& public_key_path);

}  // namespace kiln

#endif  // KILN_TOOLS_SIGNATURE_H_
