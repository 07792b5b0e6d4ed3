#include "compiler/worker_protocol.h"

#include <sys/stat.h>

#include <bit>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

constexpr size_t kFrameHeaderBytes = 8;
// Upper bounds of the lists inside messages.
constexpr uint32_t kComponentsMax = 16;
constexpr uint32_t kHeadersMax = 256;
constexpr uint32_t kEntriesMax = 256;
constexpr uint32_t kOptionsMax = 256;

// Appends values to a payload.
class Writer {
 public:
  Writer& U32(uint32_t value) { return Integer(value, 4); }

  Writer& U64(uint64_t value) { return Integer(value, 8); }

  Writer& F64(double value) { return U64(std::bit_cast<uint64_t>(value)); }

  Writer& Text(absl::string_view text) {
    // Longer texts exceed the frame in any case; Finish reports them.
    U32(static_cast<uint32_t>(text.size()));
    bytes_.append(text.data(), text.size());
    return *this;
  }

  Writer& Texts(const std::vector<std::string>& texts) {
    U32(static_cast<uint32_t>(texts.size()));
    for (const std::string& text : texts) Text(text);
    return *this;
  }

  absl::StatusOr<std::string> Finish(FrameType type) const {
    if (bytes_.size() > kFrameBytesMax) {
      return absl::ResourceExhaustedError(
          absl::StrCat("compiler worker message has ", bytes_.size(),
                       " bytes, at most ", kFrameBytesMax, " fit a frame"));
    }
    Writer frame;
    frame.U32(static_cast<uint32_t>(type));
    frame.U32(static_cast<uint32_t>(bytes_.size()));
    return absl::StrCat(frame.bytes_, bytes_);
  }

 private:
  Writer& Integer(uint64_t value, int count) {
    for (int i = 0; i < count; ++i) {
      bytes_.push_back(static_cast<char>((value >> (8 * i)) & 0xFF));
    }
    return *this;
  }

  std::string bytes_;
};

uint64_t LoadInteger(absl::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = bytes.size(); i-- > 0;) {
    value = value << 8 | static_cast<uint8_t>(bytes[i]);
  }
  return value;
}

// Cursor over a payload. After the first failure every read returns an empty
// value, and Finish reports the failure.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : bytes_(bytes) {}

  uint32_t U32() { return static_cast<uint32_t>(LoadInteger(Take(4))); }

  uint64_t U64() { return LoadInteger(Take(8)); }

  double F64() { return std::bit_cast<double>(U64()); }

  std::string Text() { return std::string(Take(U32())); }

  // A list length of at most `max`.
  uint32_t Count(uint32_t max, absl::string_view what) {
    const uint32_t count = U32();
    if (count <= max) return count;
    Fail(absl::StrCat(count, " ", what, ", at most ", max, " are accepted"));
    return 0;
  }

  std::vector<std::string> Texts(uint32_t max, absl::string_view what) {
    std::vector<std::string> texts;
    const uint32_t count = Count(max, what);
    for (uint32_t i = 0; i < count && error_.empty(); ++i) {
      texts.push_back(Text());
    }
    return texts;
  }

  void Fail(absl::string_view reason) {
    if (error_.empty()) error_ = std::string(reason);
  }

  absl::Status Finish(absl::string_view message) {
    if (!bytes_.empty()) {
      Fail(absl::StrCat(bytes_.size(), " bytes follow its end"));
    }
    if (error_.empty()) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat("compiler worker ", message, " is damaged: ", error_));
  }

 private:
  absl::string_view Take(size_t size) {
    if (!error_.empty()) return {};
    if (size > bytes_.size()) {
      Fail(absl::StrCat("ends early, ", size, " bytes expected, ",
                        bytes_.size(), " left"));
      bytes_ = {};
      return {};
    }
    const absl::string_view taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }

  absl::string_view bytes_;
  std::string error_;
};

absl::string_view CutLog(absl::string_view log) {
  return log.substr(0, kLogBytesMax);
}

// Codes outside the canonical set read as kUnknown.
absl::Status MakeStatus(uint32_t code, absl::string_view message) {
  if (code == 0) return absl::OkStatus();
  if (code > static_cast<uint32_t>(absl::StatusCode::kUnauthenticated)) {
    return absl::UnknownError(message);
  }
  return absl::Status(static_cast<absl::StatusCode>(code), message);
}

}  // namespace

absl::StatusOr<FileIdentity> IdentifyFile(const std::string& path) {
  char resolved[PATH_MAX];
  if (realpath(path.c_str(), resolved) == nullptr) {
    return ErrnoStatus(errno, "cannot resolve", path);
  }
  struct stat info;
  if (stat(resolved, &info) != 0) {
    return ErrnoStatus(errno, "cannot stat", path);
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is not a regular file"));
  }
  return FileIdentity{
      .path = resolved,
      .bytes = static_cast<uint64_t>(info.st_size),
      .mtime_ns =
          int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec,
      .inode = info.st_ino,
  };
}

absl::StatusOr<std::string> EncodeHello(const WorkerHello& hello) {
  Writer writer;
  writer.U32(kWorkerProtocolVersion)
      .Text(hello.compiler)
      .Text(hello.version)
      .U32(static_cast<uint32_t>(hello.components.size()));
  for (const FileIdentity& file : hello.components) {
    writer.Text(file.path)
        .U64(file.bytes)
        .U64(static_cast<uint64_t>(file.mtime_ns))
        .U64(file.inode);
  }
  return writer.Finish(FrameType::kHello);
}

absl::StatusOr<WorkerHello> DecodeHello(absl::string_view payload) {
  Reader reader(payload);
  const uint32_t version = reader.U32();
  if (version != kWorkerProtocolVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "compiler worker speaks protocol ", version, ", this build speaks ",
        kWorkerProtocolVersion, "; install both from one build"));
  }
  WorkerHello hello;
  hello.compiler = reader.Text();
  hello.version = reader.Text();
  const uint32_t count = reader.Count(kComponentsMax, "components");
  for (uint32_t i = 0; i < count; ++i) {
    FileIdentity file;
    file.path = reader.Text();
    file.bytes = reader.U64();
    file.mtime_ns = static_cast<int64_t>(reader.U64());
    file.inode = reader.U64();
    hello.components.push_back(std::move(file));
  }
  RETURN_IF_ERROR(reader.Finish("hello"));
  return hello;
}

absl::StatusOr<std::string> EncodeFailure(const absl::Status& failure) {
  KILN_CHECK(!failure.ok());
  return Writer()
      .U32(static_cast<uint32_t>(failure.code()))
      .Text(CutLog(failure.message()))
      .Finish(FrameType::kFailure);
}

absl::Status DecodeFailure(absl::string_view payload) {
  Reader reader(payload);
  const uint32_t code = reader.U32();
  const std::string message = reader.Text();
  if (code == 0) reader.Fail("its code is OK");
  RETURN_IF_ERROR(reader.Finish("failure"));
  return MakeStatus(code, message);
}

absl::StatusOr<std::string> EncodeJob(const WorkerJob& job) {
  if (job.unit.headers.size() > kHeadersMax ||
      job.unit.entries.size() > kEntriesMax ||
      job.unit.options.size() > kOptionsMax) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "source unit ", job.unit.name, " has ", job.unit.headers.size(),
        " headers, ", job.unit.entries.size(), " entries and ",
        job.unit.options.size(), " options; at most ", kHeadersMax, ", ",
        kEntriesMax, " and ", kOptionsMax, " are accepted"));
  }
  Writer writer;
  writer.U64(job.id)
      .Text(job.target.ToString())
      .Text(job.unit.name)
      .U32(job.unit.template_version)
      .Text(job.unit.compute_dtype)
      .Text(job.unit.text)
      .U32(static_cast<uint32_t>(job.unit.headers.size()));
  for (const auto& [name, text] : job.unit.headers) {
    writer.Text(name).Text(text);
  }
  writer.Texts(job.unit.entries).Texts(job.unit.options);
  return writer.Finish(FrameType::kJob);
}

absl::StatusOr<WorkerJob> DecodeJob(absl::string_view payload) {
  Reader reader(payload);
  WorkerJob job;
  job.id = reader.U64();
  const absl::StatusOr<Target> target = ParseTarget(reader.Text());
  if (target.ok()) {
    job.target = *target;
  } else {
    reader.Fail(std::string(target.status().message()));
  }
  job.unit.name = reader.Text();
  job.unit.template_version = reader.U32();
  job.unit.compute_dtype = reader.Text();
  job.unit.text = reader.Text();
  const uint32_t headers = reader.Count(kHeadersMax, "headers");
  for (uint32_t i = 0; i < headers; ++i) {
    std::string name = reader.Text();
    std::string text = reader.Text();
    job.unit.headers.emplace_back(std::move(name), std::move(text));
  }
  job.unit.entries = reader.Texts(kEntriesMax, "entries");
  job.unit.options = reader.Texts(kOptionsMax, "options");
  RETURN_IF_ERROR(reader.Finish("job"));
  return job;
}

absl::StatusOr<std::string> EncodeResult(const WorkerResult& result) {
  return Writer()
      .U64(result.id)
      .U32(static_cast<uint32_t>(result.status.code()))
      .Text(CutLog(result.status.message()))
      .Text(result.binary)
      .Text(CutLog(result.log))
      .F64(result.seconds)
      .U32(result.last ? 1 : 0)
      .Finish(FrameType::kResult);
}

absl::StatusOr<WorkerResult> DecodeResult(absl::string_view payload) {
  Reader reader(payload);
  WorkerResult result;
  result.id = reader.U64();
  const uint32_t code = reader.U32();
  result.status = MakeStatus(code, reader.Text());
  result.binary = reader.Text();
  result.log = reader.Text();
  result.seconds = reader.F64();
  const uint32_t last = reader.U32();
  result.last = last == 1;
  if (!(result.seconds >= 0)) reader.Fail("its duration is negative");
  if (last > 1) reader.Fail(absl::StrCat("its last mark is ", last));
  if (result.status.ok() && result.binary.empty()) {
    reader.Fail("its binary is empty");
  }
  RETURN_IF_ERROR(reader.Finish("result"));
  return result;
}

absl::StatusOr<std::optional<Frame>> FrameParser::Next() {
  if (buffer_.size() < kFrameHeaderBytes) return std::optional<Frame>();
  const absl::string_view header(buffer_.data(), kFrameHeaderBytes);
  const auto type = static_cast<uint32_t>(LoadInteger(header.substr(0, 4)));
  const auto bytes = static_cast<uint32_t>(LoadInteger(header.substr(4, 4)));
  if (type < static_cast<uint32_t>(FrameType::kHello) ||
      type > static_cast<uint32_t>(FrameType::kResult)) {
    return absl::DataLossError(
        absl::StrCat("compiler worker sent a frame of unknown type ", type));
  }
  if (bytes > kFrameBytesMax) {
    return absl::DataLossError(absl::StrCat("compiler worker announced ", bytes,
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
