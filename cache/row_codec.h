// Columns of the cache's tables: text and byte forms of kernels and samples,
// and the pre-image of every row's digest. Pure functions, no SQLite.
//
// A row's digest covers its columns as they are stored, so that any flipped
// byte is seen before a value is made of them. What a row stores as a digest
// (a key, a binary) stands for the bytes behind it, which are hashed on their
// own.

#ifndef KILN_CACHE_ROW_CODEC_H_
#define KILN_CACHE_ROW_CODEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache/records.h"
#include "compiler/spec/program.h"

namespace kiln {

struct ProvenanceColumns {
  int64_t created_unix = 0;
  absl::string_view host_name = {};
  absl::string_view device_name = {};
  absl::string_view tool_version = {};
};

struct ProgramColumns {
  absl::string_view key = {};
  absl::string_view target = {};
  absl::string_view toolchain_name = {};
  absl::string_view toolchain_version = {};
  absl::string_view toolchain_content = {};
  absl::string_view binary_digest = {};
  absl::string_view kernels = {};
  absl::string_view log = {};
  double compile_seconds = 0;
  ProvenanceColumns provenance = {};
};

struct RejectColumns {
  absl::string_view key = {};
  absl::string_view preimage = {};
  absl::string_view stage = {};
  absl::string_view reason = {};
  absl::string_view log = {};
  ProvenanceColumns provenance = {};
};

struct PlanColumns {
  absl::string_view key = {};
  absl::string_view plan = {};
  int64_t measurements = 0;
  ProvenanceColumns provenance = {};
};

struct MeasurementColumns {
  absl::string_view plan_key = {};
  int64_t position = 0;
  absl::string_view label = {};
  absl::string_view candidate = {};
  absl::string_view verdict = {};
  absl::string_view reason = {};
  double worst_error = 0;
  double regret = 0;
  absl::string_view numerics_class = {};
  int64_t arena_bytes = 0;
  int64_t registers = 0;
  absl::string_view samples = {};
};

struct PlanUseColumns {
  absl::string_view plan_key = {};
  int64_t used_unix = 0;
};

struct MemoColumns {
  absl::string_view key = {};
  absl::string_view value = {};
};

struct LeaseColumns {
  absl::string_view key = {};
  absl::string_view boot = {};
  int64_t pid = 0;
  int64_t start_ticks = 0;
  int64_t token = 0;
  int64_t expires_unix = 0;
};

// CanonicalEncoder bytes whose SHA-256 is the row's digest. A column that a
// later schema added is encoded only where it is not NULL, so that older rows
// keep their digests.
std::string EncodeRow(const ProgramColumns& row);
std::string EncodeRow(const RejectColumns& row);
std::string EncodeRow(const PlanColumns& row);
std::string EncodeRow(const MeasurementColumns& row);
std::string EncodeRow(const PlanUseColumns& row);
std::string EncodeRow(const MemoColumns& row);
std::string EncodeRow(const LeaseColumns& row);

// One line per kernel, fields separated by one space:
//   entry registers static_shared local max_threads param_bytes params
// where params is "offset:bytes,..." or "-".
//   Errors: InvalidArgument for an entry with spaces or control characters.
absl::StatusOr<std::string> KernelsToText(const std::vector<Kernel>& kernels);
// DataLoss for anything KernelsToText could not have written.
absl::StatusOr<std::vector<Kernel>> KernelsFromText(absl::string_view text);

// 12 bytes per sample, little-endian: u32 block, f64 nanoseconds.
std::string SamplesToBytes(const std::vector<Sample>& samples);
// DataLoss unless the size is a multiple of 12.
absl::StatusOr<std::vector<Sample>> SamplesFromBytes(absl::string_view bytes);

}  // namespace kiln

#endif  // KILN_CACHE_ROW_CODEC_H_
