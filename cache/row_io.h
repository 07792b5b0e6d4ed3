// Columns that several tables share, between Statement and values. Internal to
// cache/.

#ifndef KILN_CACHE_ROW_IO_H_
#define KILN_CACHE_ROW_IO_H_

#include <cstdint>
#include <initializer_list>
#include <string>

#include "absl/strings/string_view.h"
#include "cache/checksum.h"
#include "cache/records.h"
#include "cache/row_codec.h"
#include "cache/sqlite_db.h"
#include "compiler/base/digest.h"

namespace kiln {

inline constexpr absl::string_view kRowDigestProblem =
    "columns do not match the row's digest";
inline constexpr absl::string_view kPreimageProblem =
    "key is not the digest of its pre-image";
inline constexpr absl::string_view kChecksumProblem =
    "row does not match its checksum";

// Reads the four provenance columns from `column` on.
inline ProvenanceColumns ReadProvenance(const Statement& select, int column) {
  return {.created_unix = select.Integer(column),
          .host_name = select.Bytes(column + 1),
          .device_name = select.Bytes(column + 2),
          .tool_version = select.Bytes(column + 3)};
}

// What a row's checksum says.
struct ChecksumVerdict {
  bool stored = false;  // rows of older builds have none
  bool fits = false;
};

// Compares the checksum at `column` with that of `parts`.
inline ChecksumVerdict CompareChecksum(
    const Statement& select, int column,
    std::initializer_list<absl::string_view> parts) {
  if (select.IsNull(column)) return {};
  return {.stored = true,
          .fits = select.Bytes(column) == ChecksumOf(parts).AsBytes()};
}

// What is wrong with a row by its SHA-256s; empty when both fit.
//   encoded: EncodeRow of its columns. key: that it was asked for by.
inline absl::string_view DigestProblem(absl::string_view encoded,
                                       absl::string_view row_digest,
                                       absl::string_view preimage,
                                       const Digest& key) {
  if (Sha256(encoded).AsBytes() != row_digest) return kRowDigestProblem;
  if (Sha256(preimage) != key) return kPreimageProblem;
  return "";
}

// Binds the four provenance columns from `index` on.
inline void BindProvenance(const ProvenanceColumns& columns, int index,
                           Statement* insert) {
  insert->BindInteger(index, columns.created_unix);
  insert->BindText(index + 1, columns.host_name);
  insert->BindText(index + 2, columns.device_name);
  insert->BindText(index + 3, columns.tool_version);
}

inline Provenance ToProvenance(const ProvenanceColumns& columns) {
  return {.created_unix = columns.created_unix,
          .host_name = std::string(columns.host_name),
          .device_name = std::string(columns.device_name),
          .tool_version = std::string(columns.tool_version)};
}

// Views into `provenance`.
inline ProvenanceColumns FromProvenance(const Provenance& provenance,
                                        int64_t now) {
  return {.created_unix = now,
          .host_name = provenance.host_name,
          .device_name = provenance.device_name,
          .tool_version = provenance.tool_version};
}

}  // namespace kiln

#endif  // KILN_CACHE_ROW_IO_H_
