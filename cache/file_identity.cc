#include "cache/file_identity.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cache/plan_cache.h"
#include "cache/schema.h"
#include "cache/sqlite_vfs.h"
#include "compiler/base/digest.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

// Source: SQLite file format, "The Database Header" and "The Rollback Journal",
// sqlite.org/fileformat2.html. Numbers are big-endian.
constexpr size_t kHeaderBytes = 100;
constexpr absl::string_view kSqliteMagic("SQLite format 3\0", 16);
constexpr size_t kWriteVersionOffset = 18;  // 1 = rollback journal, 2 = WAL
constexpr size_t kReadVersionOffset = 19;
constexpr size_t kEncodingOffset = 56;  // 1 = UTF-8
constexpr size_t kUserVersionOffset = 60;
constexpr size_t kApplicationIdOffset = 68;

constexpr size_t kJournalHeaderBytes = 28;
constexpr absl::string_view kJournalMagic("\xd9\xd5\x05\xf9\x20\xa1\x63\xd7",
                                          8);
constexpr size_t kJournalPagesOffset = 16;   // of the database before
constexpr size_t kJournalSectorOffset = 20;  // bytes; the first record's place
constexpr size_t kJournalPageSizeOffset = 24;
// A record is a page number, a page and a checksum.
constexpr uint64_t kPageNumberBytes = 4;
constexpr uint64_t kChecksumBytes = 4;
constexpr uint64_t kJournalRecordsMax = 1 << 20;

// A journal: unlike a database (see ReadDatabaseHeader) it is never locked.
class File {
 public:
  explicit File(const std::string& path)
      : path_(path), fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}

  File(const File&) = delete;
  File& operator=(const File&) = delete;

  ~File() {
    if (fd_ >= 0) close(fd_);
  }

  // At most `size` bytes; fewer at the end of the file.
  absl::StatusOr<std::string> Read(uint64_t offset, size_t size) const {
    if (fd_ < 0) return ErrnoStatus(errno, "cannot open", path_);
    std::string bytes(size, '\0');
    const ssize_t got =
        pread(fd_, bytes.data(), size, static_cast<off_t>(offset));
    if (got < 0) return ErrnoStatus(errno, "cannot read", path_);
    bytes.resize(static_cast<size_t>(got));
    return bytes;
  }

 private:
  const std::string path_;
  const int fd_;
};

uint32_t BigEndian32(absl::string_view bytes, size_t offset) {
  uint32_t value = 0;
  for (size_t i = 0; i < 4; ++i) {
    value = value << 8 | static_cast<uint8_t>(bytes[offset + i]);
  }
  return value;
}

absl::StatusOr<CacheFileState> StateOf(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return CacheFileState{};
    return ErrnoStatus(errno, "cannot stat", path);
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is not a regular file; ", kOtherCacheFolder));
  }
  return CacheFileState{.exists = true,
                        .bytes = static_cast<uint64_t>(info.st_size)};
}

absl::Status CheckHeader(const std::string& path, absl::string_view header) {
  if (header.size() < kHeaderBytes ||
      header.substr(0, kSqliteMagic.size()) != kSqliteMagic) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, " is not a Kiln cache: it starts with bytes ",
        ToHex(header.substr(0, kSqliteMagic.size())), ", expected ",
        ToHex(kSqliteMagic), "; ", kOtherCacheFolder));
  }
  RETURN_IF_ERROR(CheckIdentity(
      path, BigEndian32(header, kApplicationIdOffset),
      static_cast<int32_t>(BigEndian32(header, kUserVersionOffset))));
  const int write_version = header[kWriteVersionOffset];
  const int read_version = header[kReadVersionOffset];
  if (write_version != 1 || read_version != 1) {
    return absl::DataLossError(absl::StrCat(
        path, " has journal mode bytes ", write_version, " and ", read_version,
        ", expected 1 and 1 (rollback journal); ", kOtherCacheFolder));
  }
  const uint32_t encoding = BigEndian32(header, kEncodingOffset);
  if (encoding != 1) {
    return absl::DataLossError(absl::StrCat(path, " has text encoding ",
                                            encoding, ", expected 1 (UTF-8); ",
                                            kOtherCacheFolder));
  }
  return absl::OkStatus();
}

// The first bytes that the journal will restore: empty when it will empty the
// file, absent when it will restore none.
absl::StatusOr<std::optional<std::string>> RestoredHeader(
    const std::string& path) {
  ASSIGN_OR_RETURN(const CacheFileState state, StateOf(path));
  if (state.bytes < kJournalHeaderBytes) return std::nullopt;
  const File file(path);
  ASSIGN_OR_RETURN(const std::string header, file.Read(0, kJournalHeaderBytes));
  if (header.size() < kJournalHeaderBytes ||
      absl::string_view(header).substr(0, kJournalMagic.size()) !=
          kJournalMagic) {
    return std::nullopt;
  }
  if (BigEndian32(header, kJournalPagesOffset) == 0) return "";
  const uint64_t page_bytes = BigEndian32(header, kJournalPageSizeOffset);
  const uint64_t record_bytes = kPageNumberBytes + page_bytes + kChecksumBytes;
  uint64_t offset = BigEndian32(header, kJournalSectorOffset);
  for (uint64_t i = 0; i < kJournalRecordsMax; ++i, offset += record_bytes) {
    if (offset + record_bytes > state.bytes) break;
    ASSIGN_OR_RETURN(const std::string record,
                     file.Read(offset, kPageNumberBytes + kHeaderBytes));
    if (record.size() < kPageNumberBytes + kHeaderBytes) break;
    if (BigEndian32(record, 0) == 1) return record.substr(kPageNumberBytes);
  }
  return std::nullopt;
}

}  // namespace

absl::StatusOr<CacheFileState> ExamineCacheFile(const std::string& path) {
  ASSIGN_OR_RETURN(const CacheFileState state, StateOf(path));
  if (state.bytes == 0) return state;
  ASSIGN_OR_RETURN(const std::string header,
                   ReadDatabaseHeader(path, kHeaderBytes));
  const absl::Status status = CheckHeader(path, header);
  if (status.ok()) return state;
  ASSIGN_OR_RETURN(const std::optional<std::string> restored,
                   RestoredHeader(absl::StrCat(path, "-journal")));
  if (!restored.has_value() ||
      (!restored->empty() && !CheckHeader(path, *restored).ok())) {
    return status;
  }
  return state;
}

}  // namespace kiln
