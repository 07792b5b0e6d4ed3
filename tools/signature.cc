#include "tools/signature.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

constexpr absl::string_view kSecretType = "kiln-ed25519-secret-1";
constexpr absl::string_view kPublicType = "kiln-ed25519-public-1";
constexpr absl::string_view kSignatureType = "kiln-ed25519-signature-1";
constexpr uint64_t kFileBytesMax = 1024;

using Seed = std::array<uint8_t, crypto_sign_SEEDBYTES>;
using PublicKey = std::array<uint8_t, crypto_sign_PUBLICKEYBYTES>;
using SecretKey = std::array<uint8_t, crypto_sign_SECRETKEYBYTES>;
using Signature = std::array<uint8_t, crypto_sign_BYTES>;

template <size_t kBytes>
std::string HexOf(const std::array<uint8_t, kBytes>& bytes) {
  return ToHex({reinterpret_cast<const char*>(bytes.data()), kBytes});
}

// The bytes of "TYPE HEX\n".
absl::StatusOr<std::string> Parse(absl::string_view text,
                                  absl::string_view type, size_t bytes,
                                  const std::string& path) {
  absl::string_view hex = text;
  const bool shaped =
      absl::ConsumePrefix(&hex, type) && absl::ConsumePrefix(&hex, " ") &&
      absl::ConsumeSuffix(&hex, "\n") && hex.size() == 2 * bytes;
  for (const char c : hex) {
    if (!shaped ||
        !absl::StrContains("0123456789abcdef", absl::string_view(&c, 1))) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, " is not a file of type ", type));
    }
  }
  if (!shaped) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is not a file of type ", type));
  }
  return absl::HexStringToBytes(hex);
}

std::string Message(const Digest& root) {
  std::string message("kiln bundle root 1", 19);  // with its NUL
  message.append(reinterpret_cast<const char*>(root.bytes.data()),
                 root.bytes.size());
  return message;
}

const uint8_t* Bytes(absl::string_view text) {
  return reinterpret_cast<const uint8_t*>(text.data());
}

absl::Status WriteNew(const std::string& path, absl::string_view contents,
                      mode_t mode) {
  const int fd = open(
      path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, mode);
  if (fd < 0) return ErrnoStatus(errno, "cannot create", path);
  const ssize_t written = write(fd, contents.data(), contents.size());
  const int reason = written < 0 ? errno : ENOSPC;
  const bool whole =
      written == static_cast<ssize_t>(contents.size()) && fsync(fd) == 0;
  close(fd);
  if (whole) return absl::OkStatus();
  unlink(path.c_str());
  return ErrnoStatus(reason, "cannot write", path);
}

// Reads the secret key from the file that was checked, not from a path that
// may have changed since.
absl::StatusOr<Seed> ReadSecret(const std::string& path) {
  const int fd = open(
      path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
  if (fd < 0 && errno == ELOOP) {
    return absl::FailedPreconditionError(absl::StrCat(
        "secret key ", path, " is a symbolic link, must be the file itself"));
  }
  if (fd < 0) {
    return ErrnoStatus(errno, "cannot open secret key", path);
  }
  const absl::Cleanup closer = [fd] { close(fd); };
  struct stat info;
  if (fstat(fd, &info) != 0) {
    return ErrnoStatus(errno, "cannot examine secret key", path);
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("secret key ", path, " is not a regular file"));
  }
  if (info.st_uid != geteuid()) {
    return absl::FailedPreconditionError(
        absl::StrCat("secret key ", path, " belongs to user ", info.st_uid,
                     ", this process runs as ", geteuid()));
  }
  if ((info.st_mode & 077) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "secret key ", path, " has mode ",
        absl::StrCat((info.st_mode >> 6) & 7, (info.st_mode >> 3) & 7,
                     info.st_mode & 7),
        ", others can use it; chmod 600 it, or make a new key if it leaked"));
  }
  std::array<char, kFileBytesMax> text;
  const ssize_t bytes = read(fd, text.data(), text.size());
  if (bytes < 0) return ErrnoStatus(errno, "cannot read secret key", path);
  absl::StatusOr<std::string> parsed =
      Parse({text.data(), static_cast<size_t>(bytes)}, kSecretType,
            sizeof(Seed), path);
  sodium_memzero(text.data(), text.size());
  RETURN_IF_ERROR(parsed.status());
  Seed seed;
  std::memcpy(seed.data(), parsed->data(), seed.size());
  sodium_memzero(parsed->data(), parsed->size());
  return seed;
}

}  // namespace

absl::StatusOr<std::string> NewSigningKey(const std::string& path) {
  KILN_CHECK(sodium_init() >= 0);
  Seed seed;
  PublicKey public_key;
  SecretKey secret_key;
  randombytes_buf(seed.data(), seed.size());
  crypto_sign_seed_keypair(public_key.data(), secret_key.data(), seed.data());
  std::string secret = absl::StrCat(kSecretType, " ", HexOf(seed), "\n");
  absl::Status status = WriteNew(path, secret, 0600);
  sodium_memzero(secret.data(), secret.size());
  sodium_memzero(seed.data(), seed.size());
  sodium_memzero(secret_key.data(), secret_key.size());
  RETURN_IF_ERROR(status);
  status =
      WriteNew(absl::StrCat(path, ".pub"),
               absl::StrCat(kPublicType, " ", HexOf(public_key), "\n"), 0644);
  if (!status.ok()) {
    unlink(path.c_str());
    return status;
  }
  return HexOf(public_key);
}

absl::StatusOr<std::string> SignRoot(const Digest& root,
                                     const std::string& secret_key_path) {
  KILN_CHECK(sodium_init() >= 0);
  ASSIGN_OR_RETURN(Seed seed, ReadSecret(secret_key_path));
  PublicKey public_key;
  SecretKey secret_key;
  crypto_sign_seed_keypair(public_key.data(), secret_key.data(), seed.data());
  const std::string message = Message(root);
  Signature signature;
  crypto_sign_detached(signature.data(), nullptr, Bytes(message),
                       message.size(), secret_key.data());
  sodium_memzero(seed.data(), seed.size());
  sodium_memzero(secret_key.data(), secret_key.size());
  return absl::StrCat(kSignatureType, " ", HexOf(public_key), HexOf(signature),
                      "\n");
}

absl::StatusOr<std::string> CheckSignature(const Digest& root,
                                           const std::string& signature_path,
                                           const std::string& public_key_path) {
  KILN_CHECK(sodium_init() >= 0);
  const absl::StatusOr<std::string> key_text =
      ReadFile(public_key_path, kFileBytesMax);
  RETURN_IF_ERROR(key_text.status());
  ASSIGN_OR_RETURN(
      const std::string key,
      Parse(*key_text, kPublicType, sizeof(PublicKey), public_key_path));
  absl::StatusOr<std::string> text = ReadFile(signature_path, kFileBytesMax);
  if (absl::IsNotFound(text.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat("bundle is unsigned: there is no ", signature_path,
                     "; kiln sign makes it"));
  }
  std::error_code ignored;
  if (absl::IsInvalidArgument(text.status()) &&
      std::filesystem::is_regular_file(signature_path, ignored)) {
    // Too large for a signature.
    return absl::FailedPreconditionError(text.status().message());
  }
  RETURN_IF_ERROR(text.status());
  const absl::StatusOr<std::string> parsed =
      Parse(*text, kSignatureType, sizeof(PublicKey) + sizeof(Signature),
            signature_path);
  const bool other_kind = absl::StartsWith(*text, kPublicType) ||
                          absl::StartsWith(*text, kSecretType);
  if (!parsed.ok() && !other_kind) {
    return absl::FailedPreconditionError(
        absl::StrCat(parsed.status().message(), ": it is damaged"));
  }
  ASSIGN_OR_RETURN(const std::string blob, parsed);
  const std::string signer = blob.substr(0, sizeof(PublicKey));
  if (signer != key) {
    return absl::FailedPreconditionError(
        absl::StrCat(signature_path, " is by key ", ToHex(signer),
                     ", expected ", ToHex(key)));
  }
  const std::string message = Message(root);
  if (crypto_sign_verify_detached(Bytes(blob) + sizeof(PublicKey),
                                  Bytes(message), message.size(),
                                  Bytes(key)) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        signature_path, " is no signature by key ", ToHex(key), " of root ",
        root.ToHex(), ": it is damaged, or belongs to another bundle"));
  }
  return ToHex(key);
}

}  // namespace kiln
