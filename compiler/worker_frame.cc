#include "compiler/worker_frame.h"

#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

constexpr size_t kFrameHeaderBytes = 8;

uint64_t LoadInteger(absl::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) {
    value = value << 8 | static_cast<uint8_t>(bytes[i]);
  }
  return value;
}

}  // namespace

FrameWriter& FrameWriter::Integer(uint64_t value, int count) {
  for (int i = 0; i < count; ++i) {
    bytes_.push_back(static_cast<char>((value >> (8 * i)) & 0xFF));
  }
  return *this;
}

FrameWriter& FrameWriter::F64(double value) {
  return U64(std::bit_cast<uint64_t>(value));
}

FrameWriter& FrameWriter::Text(absl::string_view text) {
  // Longer texts exceed the frame in any case; Finish reports them.
  U32(static_cast<uint32_t>(text.size()));
  bytes_.append(text.data(), text.size());
  return *this;
}

FrameWriter& FrameWriter::Texts(const std::vector<std::string>& texts) {
  U32(static_cast<uint32_t>(texts.size()));
  for (const std::string& text : texts) Text(text);
  return *this;
}

FrameWriter& FrameWriter::Status(const absl::Status& status) {
  return U32(static_cast<uint32_t>(status.code()))
      .Text(status.message().substr(0, kLogBytesMax));
}

absl::StatusOr<std::string> FrameWriter::Finish(FrameType type) const {
  if (bytes_.size() > kFrameBytesMax) {
    return absl::ResourceExhaustedError(
        absl::StrCat("worker message has ", bytes_.size(), " bytes, at most ",
                     kFrameBytesMax, " fit a frame"));
  }
  FrameWriter frame;
  frame.U32(static_cast<uint32_t>(type));
  frame.U32(static_cast<uint32_t>(bytes_.size()));
  return absl::StrCat(frame.bytes_, bytes_);
}

uint32_t FrameReader::U32() {
  return static_cast<uint32_t>(LoadInteger(Take(4)));
}

uint64_t FrameReader::U64() { return LoadInteger(Take(8)); }

double FrameReader::F64() { return std::bit_cast<double>(U64()); }

std::string FrameReader::Text() { return std::string(Take(U32())); }

uint32_t FrameReader::Count(uint32_t max, absl::string_view what) {
  const uint32_t count = U32();
  if (count <= max) return count;
  Fail(absl::StrCat(count, " ", what, ", at most ", max, " are accepted"));
  return 0;
}

std::vector<std::string> FrameReader::Texts(uint32_t max,
                                            absl::string_view what) {
  std::vector<std::string> texts;
  const uint32_t count = Count(max, what);
  for (uint32_t i = 0; i < count && ok(); ++i) texts.push_back(Text());
  return texts;
}

absl::Status FrameReader::Status() {
  const uint32_t code = U32();
  const std::string message = Text();
  if (code == 0) return absl::OkStatus();
  if (code > static_cast<uint32_t>(absl::StatusCode::kUnauthenticated)) {
    return absl::UnknownError(message);
  }
  return absl::Status(static_cast<absl::StatusCode>(code), message);
}

void FrameReader::Fail(absl::string_view reason) {
  if (ok()) error_ = std::string(reason);
}

absl::Status FrameReader::Finish(absl::string_view message) {
  if (!bytes_.empty()) {
    Fail(absl::StrCat(bytes_.size(), " bytes follow its end"));
  }
  if (ok()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(message, " is damaged: ", error_));
}

absl::string_view FrameReader::Take(size_t size) {
  if (!ok()) return {};
  if (size > bytes_.size()) {
    Fail(absl::StrCat("ends early, ", size, " bytes expected, ", bytes_.size(),
                      " left"));
    bytes_ = {};
    return {};
  }
  const absl::string_view taken = bytes_.substr(0, size);
  bytes_.remove_prefix(size);
  return taken;
}

absl::StatusOr<std::string> EncodeFailure(const absl::Status& failure) {
  KILN_CHECK(!failure.ok());
  return FrameWriter().Status(failure).Finish(FrameType::kFailure);
}

absl::Status DecodeFailure(absl::string_view payload) {
  FrameReader reader(payload);
  const absl::Status failure = reader.Status();
  if (failure.ok()) reader.Fail("its code is OK");
  RETURN_IF_ERROR(reader.Finish("worker failure"));
  return failure;
}

absl::StatusOr<std::optional<Frame>> FrameParser::Next() {
  if (buffer_.size() < kFrameHeaderBytes) return std::optional<Frame>();
  const absl::string_view header(buffer_.data(), kFrameHeaderBytes);
  const auto type = static_cast<uint32_t>(LoadInteger(header.substr(0, 4)));
  const auto bytes = static_cast<uint32_t>(LoadInteger(header.substr(4, 4)));
  if (type < static_cast<uint32_t>(FrameType::kHello) ||
      type > static_cast<uint32_t>(kFrameTypeLast)) {
    return absl::DataLossError(
        absl::StrCat("worker sent a frame of unknown type ", type));
  }
  if (bytes > kFrameBytesMax) {
    return absl::DataLossError(absl::StrCat("worker announced ", bytes,
                                            " bytes, at most ", kFrameBytesMax,
                                            " fit a frame"));
  }
  if (buffer_.size() - kFrameHeaderBytes < bytes) {
    return std::optional<Frame>();
  }
  Frame frame;
  frame.type = static_cast<FrameType>(type);
  frame.payload = buffer_.substr(kFrameHeaderBytes, bytes);
  buffer_.erase(0, kFrameHeaderBytes + bytes);
  return std::optional<Frame>(std::move(frame));
}

}  // namespace kiln
