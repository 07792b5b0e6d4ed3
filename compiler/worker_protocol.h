// Messages between Kiln and a compiler worker process.
//
// A worker inherits one stream socket as standard input and output. It sends
// one Hello (or one Failure, and exits), then answers each Job with one Result,
// in order, until the stream ends.
//
// Both sides treat the other as untrusted, see worker_frame.h.

#ifndef KILN_COMPILER_WORKER_PROTOCOL_H_
#define KILN_COMPILER_WORKER_PROTOCOL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/target.h"
#include "compiler/worker_frame.h"

namespace kiln {

// Moves whenever a frame or a message changes; Kiln refuses another version.
inline constexpr uint32_t kWorkerProtocolVersion = 1;

// What identifies a file without reading it.
struct FileIdentity {
  std::string path;  // absolute, symbolic links resolved
  uint64_t bytes = 0;
  int64_t mtime_ns = 0;  // since the epoch
  uint64_t inode = 0;

  bool operator==(const FileIdentity&) const = default;
};

// FileIdentity of the regular file that `path` leads to.
//   Errors: NotFound, PermissionDenied, FailedPrecondition (no regular file).
absl::StatusOr<FileIdentity> IdentifyFile(const std::string& path);

// The worker is ready. `components` are the files its compiler consists of, in
// the order in which they enter Toolchain::content.
struct WorkerHello {
  std::string compiler;  // "nvrtc" or "clang"
  std::string version;   // as the compiler itself reports it
  std::vector<FileIdentity> components;

  bool operator==(const WorkerHello&) const = default;
};

// One compile. `id` comes back in the result.
struct WorkerJob {
  uint64_t id = 0;
  Target target;
  SourceUnit unit;
};

// `status` is OK and `binary` non-empty, or the unit was rejected.
struct WorkerResult {
  uint64_t id = 0;
  absl::Status status;
  std::string binary;
  std::string log;
  double seconds = 0;  // inside the compiler, as the worker measured it
  bool last = false;   // the worker ends after this result
};

// Whole frames, ready to be sent. A message larger than kFrameBytesMax, and a
// unit with more than 256 headers, entries or options, is ResourceExhausted.
absl::StatusOr<std::string> EncodeHello(const WorkerHello& hello);
absl::StatusOr<std::string> EncodeJob(const WorkerJob& job);
absl::StatusOr<std::string> EncodeResult(const WorkerResult& result);

// Payload parsers. DataLoss for anything that the encoders cannot have written.
absl::StatusOr<WorkerHello> DecodeHello(absl::string_view payload);
absl::StatusOr<WorkerJob> DecodeJob(absl::string_view payload);
absl::StatusOr<WorkerResult> DecodeResult(absl::string_view payload);

}  // namespace kiln

#endif  // KILN_COMPILER_WORKER_PROTOCOL_H_
