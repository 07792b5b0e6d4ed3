// Frames between Kiln and its worker processes, and the values inside them.
//
//   frame   type u32 · payload bytes u32 · payload
//   payload integers little-endian; strings and lists prefixed by a u32 count
//
// Both sides treat the other as untrusted: every count is checked against a
// stated maximum and against the bytes that are really there before anything
// is allocated for it.

#ifndef KILN_COMPILER_WORKER_FRAME_H_
#define KILN_COMPILER_WORKER_FRAME_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kiln {

// Largest payload of a frame. Programs are well below: a cubin has 10-500 KB.
inline constexpr uint32_t kFrameBytesMax = 64u << 20;
// Logs and messages are cut to their first bytes: the first error is the one
// that counts.
inline constexpr uint32_t kLogBytesMax = 256u << 10;

enum class FrameType : uint32_t {
  // Every worker.
  kHello = 1,
  kFailure = 2,
  // Compiler workers.
  kJob = 3,
  kResult = 4,
  // Race workers.
  kRaceHello = 5,
  kRaceProgram = 6,
  kRacePrepare = 7,
  kRacePrepared = 8,
  kRaceJob = 9,
  kRaceCheckpoint = 10,
  kRaceResult = 11,
};

inline constexpr FrameType kFrameTypeLast = FrameType::kRaceResult;

struct Frame {
  FrameType type = FrameType::kHello;
  std::string payload;
};

// Appends values to a payload.
class FrameWriter {
 public:
  FrameWriter& U32(uint32_t value) { return Integer(value, 4); }

  FrameWriter& U64(uint64_t value) { return Integer(value, 8); }

  FrameWriter& F64(double value);
  FrameWriter& Text(absl::string_view text);
  FrameWriter& Texts(const std::vector<std::string>& texts);
  // Code and message; the message is cut to kLogBytesMax.
  FrameWriter& Status(const absl::Status& status);

  // The whole frame, ready to be sent. A payload larger than kFrameBytesMax is
  // ResourceExhausted.
  absl::StatusOr<std::string> Finish(FrameType type) const;

 private:
  FrameWriter& Integer(uint64_t value, int count);

  std::string bytes_;
};

// Cursor over a payload, which must outlive it. After the first failure every
// read returns an empty value, and Finish reports the failure.
class FrameReader {
 public:
  explicit FrameReader(absl::string_view bytes) : bytes_(bytes) {}

  uint32_t U32();
  uint64_t U64();
  double F64();
  std::string Text();
  // A list length of at most `max`.
  uint32_t Count(uint32_t max, absl::string_view what);
  std::vector<std::string> Texts(uint32_t max, absl::string_view what);
  // Codes outside the canonical set read as kUnknown.
  absl::Status Status();

  // Makes Finish fail for `reason`, unless something failed before.
  void Fail(absl::string_view reason);

  bool ok() const { return error_.empty(); }

  // DataLoss, naming the message, unless everything was read and whole.
  absl::Status Finish(absl::string_view message);

 private:
  absl::string_view Take(size_t size);

  absl::string_view bytes_;
  std::string error_;
};

// The worker's own failure, after which it ends.
absl::StatusOr<std::string> EncodeFailure(const absl::Status& failure);
// Returns the failure itself, which is never OK; DataLoss when unreadable.
absl::Status DecodeFailure(absl::string_view payload);

// Cuts a byte stream into frames. Holds what was fed and not yet taken, so a
// length that a peer only claims costs nothing.
class FrameParser {
 public:
  void Feed(absl::string_view bytes) {
    buffer_.append(bytes.data(), bytes.size());
  }

  // The next whole frame, or nullopt when more bytes are needed. DataLoss for
  // an unknown type or a length above kFrameBytesMax; the stream is then
  // unusable.
  absl::StatusOr<std::optional<Frame>> Next();

  // True when no part of a frame is held.
  bool Empty() const { return buffer_.empty(); }

 private:
  std::string buffer_;
};

}  // namespace kiln

#endif  // KILN_COMPILER_WORKER_FRAME_H_
