// Digest: a SHA-256 value. CanonicalEncoder and DecodeCanonical: the one
// injective encoding behind every key, so that a key's pre-image can be stored
// and compared field by field when it does not match.
//
// Encoding: a domain string, then fields in the order they were added. Each
// field is  tag (1 byte) · name (u32 length, bytes) · value, where integers are
// little-endian and strings are length-prefixed. Nested groups carry an end
// mark. Two different field sequences never encode to the same bytes.

#ifndef KILN_COMPILER_BASE_DIGEST_H_
#define KILN_COMPILER_BASE_DIGEST_H_

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kiln {

// 32 bytes of SHA-256, a plain value.
struct Digest {
  std::array<uint8_t, 32> bytes{};

  // 64 lower-case hexadecimal digits.
  std::string ToHex() const;

  // The first 12 hexadecimal digits, for people.
  std::string Short() const { return ToHex().substr(0, 12); }

  // InvalidArgument unless `text` is exactly 64 hexadecimal digits.
  static absl::StatusOr<Digest> FromHex(absl::string_view text);
  // InvalidArgument unless `text` is exactly 32 bytes.
  static absl::StatusOr<Digest> FromBytes(absl::string_view text);

  absl::string_view AsBytes() const {
    return absl::string_view(reinterpret_cast<const char*>(bytes.data()),
                             bytes.size());
  }

  auto operator<=>(const Digest&) const = default;

  template <typename H>
  friend H AbslHashValue(H h, const Digest& d) {
    return H::combine(std::move(h), d.bytes);
  }
};

// SHA-256 of `data`.
Digest Sha256(absl::string_view data);

// Builds the canonical encoding. Names are part of the encoding: renaming a
// field changes every digest that contains it. Not thread-safe.
class CanonicalEncoder {
 public:
  // `domain` separates kinds of keys and carries their version, for example
  // "kiln.build/1".
  explicit CanonicalEncoder(absl::string_view domain);

  CanonicalEncoder& Text(absl::string_view name, absl::string_view value);
  CanonicalEncoder& Number(absl::string_view name, int64_t value);
  CanonicalEncoder& Flag(absl::string_view name, bool value);
  CanonicalEncoder& Hash(absl::string_view name, const Digest& value);
  // Opens a named group, at most kCanonicalDepthMax deep; every Begin needs its
  // End.
  CanonicalEncoder& Begin(absl::string_view name);
  CanonicalEncoder& End();

  // The pre-image. All groups must be closed.
  const std::string& bytes() const&;
  std::string bytes() &&;

  Digest digest() const { return Sha256(bytes()); }

 private:
  void Header(char tag, absl::string_view name);

  std::string bytes_;
  int depth_ = 0;
};

// One decoded field; `path` joins group names and the field name with '/'.
struct CanonicalField {
  std::string path;
  std::string value;  // text form: digests in hex, flags as true or false

  bool operator==(const CanonicalField&) const = default;
};

struct CanonicalRecord {
  std::string domain;
  std::vector<CanonicalField> fields;
};

// Inverse of CanonicalEncoder. DataLoss for anything it could not have written.
absl::StatusOr<CanonicalRecord> DecodeCanonical(absl::string_view bytes);

// Deepest nesting of groups in an encoding.
inline constexpr int kCanonicalDepthMax = 16;

// Lower-case hexadecimal of any bytes.
std::string ToHex(absl::string_view data);

}  // namespace kiln

#endif  // KILN_COMPILER_BASE_DIGEST_H_
