#include "compiler/worker_protocol.h"

#include <sys/stat.h>

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

// Upper bounds of the lists inside messages.
constexpr uint32_t kComponentsMax = 16;
constexpr uint32_t kHeadersMax = 256;
constexpr uint32_t kEntriesMax = 256;
constexpr uint32_t kOptionsMax = 256;

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
  FrameWriter writer;
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
  FrameReader reader(payload);
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
  RETURN_IF_ERROR(reader.Finish("compiler worker hello"));
  return hello;
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
  FrameWriter writer;
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
  FrameReader reader(payload);
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
  RETURN_IF_ERROR(reader.Finish("compiler worker job"));
  return job;
}

absl::StatusOr<std::string> EncodeResult(const WorkerResult& result) {
  return FrameWriter()
      .U64(result.id)
      .Status(result.status)
      .Text(result.binary)
      .Text(absl::string_view(result.log).substr(0, kLogBytesMax))
      .F64(result.seconds)
      .U32(result.last ? 1 : 0)
      .Finish(FrameType::kResult);
}

absl::StatusOr<WorkerResult> DecodeResult(absl::string_view payload) {
  FrameReader reader(payload);
  WorkerResult result;
  result.id = reader.U64();
  result.status = reader.Status();
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
  RETURN_IF_ERROR(reader.Finish("compiler worker result"));
  return result;
}

}  // namespace kiln
