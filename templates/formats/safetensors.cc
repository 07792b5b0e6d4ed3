#include "templates/formats/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"
#include "templates/formats/json_scanner.h"

namespace kiln {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kDataAlignment = 64;

struct TypeRow {
  StoredType type;
  absl::string_view name;
  uint64_t bits;
};

constexpr TypeRow kTypes[] = {
    {StoredType::kBool, "BOOL", 8},      {StoredType::kU8, "U8", 8},
    {StoredType::kI8, "I8", 8},          {StoredType::kF4, "F4", 4},
    {StoredType::kF6E2M3, "F6_E2M3", 6}, {StoredType::kF6E3M2, "F6_E3M2", 6},
    {StoredType::kF8E4M3, "F8_E4M3", 8}, {StoredType::kF8E5M2, "F8_E5M2", 8},
    {StoredType::kF8E8M0, "F8_E8M0", 8}, {StoredType::kI16, "I16", 16},
    {StoredType::kU16, "U16", 16},       {StoredType::kF16, "F16", 16},
    {StoredType::kBf16, "BF16", 16},     {StoredType::kI32, "I32", 32},
    {StoredType::kU32, "U32", 32},       {StoredType::kF32, "F32", 32},
    {StoredType::kI64, "I64", 64},       {StoredType::kU64, "U64", 64},
    {StoredType::kF64, "F64", 64},       {StoredType::kC64, "C64", 64},
};

const TypeRow& RowOf(StoredType type) {
  for (const TypeRow& row : kTypes) {
    if (row.type == type) return row;
  }
  KILN_UNREACHABLE();
}

std::optional<StoredType> ParseStoredType(absl::string_view name) {
  for (const TypeRow& row : kTypes) {
    if (row.name == name) return row.type;
  }
  return std::nullopt;
}

absl::Status TensorError(absl::string_view name, absl::string_view message) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor ", QuoteTensorName(name), ": ", message));
}

// Reads [a, b, ...] of at most `values.size()` integers; returns the count.
absl::StatusOr<size_t> ScanList(JsonScanner* scanner,
                                std::span<uint64_t> values,
                                absl::string_view what) {
  RETURN_IF_ERROR(scanner->Expect('['));
  if (scanner->Take(']')) return size_t{0};
  size_t count = 0;
  do {
    ASSIGN_OR_RETURN(const uint64_t value, scanner->Unsigned());
    if (count == values.size()) {
      return scanner->Error(absl::StrCat("\"", what, "\" has more than ",
                                         values.size(), " entries"));
    }
    values[count++] = value;
  } while (scanner->Take(','));
  RETURN_IF_ERROR(scanner->Expect(']'));
  return count;
}

// The value of one tensor's key, after its colon.
absl::Status ScanTensor(JsonScanner* scanner, SafetensorsTensor* tensor) {
  std::deque<std::string> decoded;
  bool has_type = false;
  bool has_shape = false;
  bool has_offsets = false;
  const auto once = [&](bool* seen, absl::string_view key) -> absl::Status {
    if (*seen) {
      return TensorError(tensor->name,
                         absl::StrCat("duplicate key \"", key, "\""));
    }
    *seen = true;
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(scanner->Expect('{'));
  do {
    ASSIGN_OR_RETURN(const absl::string_view key, scanner->String(&decoded));
    RETURN_IF_ERROR(scanner->Expect(':'));
    if (key == "dtype") {
      RETURN_IF_ERROR(once(&has_type, key));
      ASSIGN_OR_RETURN(const absl::string_view name, scanner->String(&decoded));
      const std::optional<StoredType> type = ParseStoredType(name);
      if (!type.has_value()) {
        return TensorError(
            tensor->name,
            absl::StrCat("\"dtype\" is ", JsonQuote(name), ", must be one of ",
                         absl::StrJoin(kTypes, ", ",
                                       [](std::string* out, const auto& row) {
                                         absl::StrAppend(out, row.name);
                                       })));
      }
      tensor->type = *type;
    } else if (key == "shape") {
      RETURN_IF_ERROR(once(&has_shape, key));
      absl::StatusOr<size_t> rank = ScanList(scanner, tensor->dims, key);
      if (!rank.ok()) {
        return Annotate(rank.status(),
                        absl::StrCat("tensor ", QuoteTensorName(tensor->name)));
      }
      tensor->rank = *rank;
    } else if (key == "data_offsets") {
      RETURN_IF_ERROR(once(&has_offsets, key));
      std::array<uint64_t, 2> offsets{};
      absl::StatusOr<size_t> count = ScanList(scanner, offsets, key);
      if (!count.ok()) {
        return Annotate(count.status(),
                        absl::StrCat("tensor ", QuoteTensorName(tensor->name)));
      }
      if (*count != 2) {
        return TensorError(tensor->name,
                           absl::StrCat("\"data_offsets\" has ", *count,
                                        " entries, must have 2"));
      }
      tensor->begin = offsets[0];
      tensor->end = offsets[1];
    } else {
      return TensorError(tensor->name,
                         absl::StrCat("unknown key ", JsonQuote(key),
                                      "; known: dtype, shape, data_offsets"));
    }
  } while (scanner->Take(','));
  RETURN_IF_ERROR(scanner->Expect('}'));
  for (const auto& [seen, key] : {std::pair{has_type, "dtype"},
                                  {has_shape, "shape"},
                                  {has_offsets, "data_offsets"}}) {
    if (!seen) {
      return TensorError(tensor->name,
                         absl::StrCat("lacks the key \"", key, "\""));
    }
  }
  return absl::OkStatus();
}

// The extent of one tensor against its shape and the file.
absl::Status CheckExtent(const SafetensorsTensor& tensor, uint64_t data_bytes) {
  const auto offsets = absl::StrCat("\"data_offsets\" is [", tensor.begin, ", ",
                                    tensor.end, "]");
  if (tensor.begin > tensor.end) {
    return TensorError(tensor.name,
                       absl::StrCat(offsets, ", must not descend"));
  }
  if (tensor.end > data_bytes) {
    return TensorError(tensor.name,
                       absl::StrCat(offsets, ", the file holds ", data_bytes,
                                    " bytes of data; it may be cut short"));
  }
  uint64_t bits = StoredTypeBits(tensor.type);
  for (const uint64_t dim : tensor.shape()) {
    if (__builtin_mul_overflow(bits, dim, &bits)) {
      return TensorError(tensor.name, absl::StrCat(tensor.TypeAndShape(),
                                                   " has 2^64 bits or more"));
    }
  }
  if (bits % 8 != 0) {
    return TensorError(tensor.name,
                       absl::StrCat(tensor.TypeAndShape(), " has ", bits,
                                    " bits, must fill whole bytes"));
  }
  if (bits / 8 != tensor.bytes()) {
    return TensorError(
        tensor.name, absl::StrCat(offsets, ", ", tensor.bytes(), " bytes, but ",
                                  tensor.TypeAndShape(), " needs ", bits / 8));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::map<std::string, std::string>> ReadMetadata(
    absl::string_view text) {
  ASSIGN_OR_RETURN(const JsonNode node, ParseJson(text, "__metadata__"));
  if (node.kind != JsonNode::Kind::kObject) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"__metadata__\" must be an object, found ", JsonExcerpt(node)));
  }
  std::map<std::string, std::string> metadata;
  for (const JsonNode::Member& member : node.members) {
    if (member.value.kind != JsonNode::Kind::kString) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"__metadata__\": ", JsonQuote(member.key),
                       " must be a string, found ", JsonExcerpt(member.value)));
    }
    metadata.emplace(member.key, member.value.text);
  }
  return metadata;
}

// Reads exactly `bytes` bytes at `offset`.
absl::Status ReadExactly(int fd, const std::string& path, uint64_t offset,
                         char* out, uint64_t bytes) {
  while (bytes > 0) {
    const ssize_t got = pread(fd, out, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, "cannot read", path);
    if (got == 0) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, ": was cut short while it was read"));
    }
    out += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
  return absl::OkStatus();
}

}  // namespace

std::string QuoteTensorName(absl::string_view name) {
  constexpr size_t kNameMax = 200;
  const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
    return c >= 0x20 && c < 0x7F && c != '"' && c != '\\';
  });
  if (!plain || name.size() > kNameMax) return JsonQuote(name);
  return absl::StrCat("\"", name, "\"");
}

absl::string_view StoredTypeName(StoredType type) { return RowOf(type).name; }

uint64_t StoredTypeBits(StoredType type) { return RowOf(type).bits; }

std::string SafetensorsTensor::TypeAndShape() const {
  return absl::StrCat(StoredTypeName(type), " [", absl::StrJoin(shape(), ", "),
                      "]");
}

absl::StatusOr<SafetensorsHeader> SafetensorsHeader::Parse(
    std::string json, uint64_t data_bytes) {
  SafetensorsHeader header;
  header.text_ = std::make_unique<const std::string>(std::move(json));
  header.decoded_ = std::make_unique<std::deque<std::string>>();
  RETURN_IF_ERROR(Annotate(header.Scan(data_bytes), "safetensors header"));
  return header;
}

absl::Status SafetensorsHeader::Scan(uint64_t data_bytes) {
  if (text_->empty() || text_->front() != '{') {
    return absl::InvalidArgumentError("must begin with '{'");
  }
  JsonScanner scanner(*text_);
  RETURN_IF_ERROR(scanner.Expect('{'));
  absl::flat_hash_set<absl::string_view> names;
  bool has_metadata = false;
  if (!scanner.Take('}')) {
    do {
      ASSIGN_OR_RETURN(const absl::string_view name,
                       scanner.String(decoded_.get()));
      RETURN_IF_ERROR(scanner.Expect(':'));
      if (name == "__metadata__") {
        if (has_metadata) {
          return absl::InvalidArgumentError("duplicate key \"__metadata__\"");
        }
        has_metadata = true;
        ASSIGN_OR_RETURN(const absl::string_view value, scanner.Value());
        ASSIGN_OR_RETURN(metadata_, ReadMetadata(value));
        continue;
      }
      if (!names.insert(name).second) {
        return TensorError(name, "is named twice");
      }
      SafetensorsTensor& tensor = tensors_.emplace_back();
      tensor.name = name;
      RETURN_IF_ERROR(ScanTensor(&scanner, &tensor));
      RETURN_IF_ERROR(CheckExtent(tensor, data_bytes));
    } while (scanner.Take(','));
    RETURN_IF_ERROR(scanner.Expect('}'));
  }
  if (!scanner.AtEnd()) return scanner.Error("text after the header's object");

  const auto by_place = [](const SafetensorsTensor& a,
                           const SafetensorsTensor& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  };
  if (!std::is_sorted(tensors_.begin(), tensors_.end(), by_place)) {
    std::stable_sort(tensors_.begin(), tensors_.end(), by_place);
  }
  uint64_t at = 0;
  const SafetensorsTensor* before = nullptr;
  for (const SafetensorsTensor& tensor : tensors_) {
    if (tensor.begin < at) {
      return TensorError(
          tensor.name,
          absl::StrCat("begins at byte ", tensor.begin, ", inside tensor ",
                       QuoteTensorName(before->name), ", which ends at ", at));
    }
    if (tensor.begin > at) {
      return TensorError(
          tensor.name,
          absl::StrCat("begins at byte ", tensor.begin, ", but bytes ", at,
                       "..", tensor.begin - 1, " belong to no tensor"));
    }
    at = tensor.end;
    before = &tensor;
  }
  if (at != data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the tensors end at byte ", at, " of ", data_bytes,
                     "; trailing data is refused"));
  }
  return absl::OkStatus();
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept {
  *this = std::move(other);
}

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
  if (this == &other) return *this;
  Release();
  path_ = std::move(other.path_);
  fd_ = std::exchange(other.fd_, -1);
  file_bytes_ = other.file_bytes_;
  data_begin_ = other.data_begin_;
  header_ = std::move(other.header_);
  map_ = std::exchange(other.map_, nullptr);
  return *this;
}

SafetensorsFile::~SafetensorsFile() { Release(); }

void SafetensorsFile::Release() {
  if (map_ != nullptr) munmap(const_cast<uint8_t*>(map_), file_bytes_);
  if (fd_ >= 0) close(fd_);
  map_ = nullptr;
  fd_ = -1;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  SafetensorsFile file;
  file.path_ = path;
  // Opening a pipe must not wait for its writer; it is refused below.
  file.fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file.fd_ < 0) return ErrnoStatus(errno, "cannot open", path);
  struct stat info;
  if (fstat(file.fd_, &info) != 0) {
    return ErrnoStatus(errno, "cannot stat", path);
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is not a regular file"));
  }
  file.file_bytes_ = static_cast<uint64_t>(info.st_size);
  if (file.file_bytes_ < kLengthBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": has ", file.file_bytes_, " bytes, a safetensors ",
                     "file has at least ", kLengthBytes));
  }
  std::array<char, kLengthBytes> length_bytes{};
  RETURN_IF_ERROR(
      ReadExactly(file.fd_, path, 0, length_bytes.data(), kLengthBytes));
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) {
    length = length << 8 | static_cast<uint8_t>(length_bytes[i]);
  }
  if (length > kSafetensorsHeaderBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": the header's length is ", length,
                     " bytes, must be at most ", kSafetensorsHeaderBytesMax));
  }
  if (length > file.file_bytes_ - kLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": the header's length is ", length, " bytes, only ",
        file.file_bytes_ - kLengthBytes, " follow; the file may be cut short"));
  }
  file.data_begin_ = kLengthBytes + length;
  std::string json(length, '\0');
  RETURN_IF_ERROR(
      ReadExactly(file.fd_, path, kLengthBytes, json.data(), length));
  absl::StatusOr<SafetensorsHeader> header = SafetensorsHeader::Parse(
      std::move(json), file.file_bytes_ - file.data_begin_);
  if (!header.ok()) return Annotate(header.status(), path);
  file.header_ = *std::move(header);
  return file;
}

absl::StatusOr<std::span<const uint8_t>> SafetensorsFile::Bytes(
    const SafetensorsTensor& tensor) {
  ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes, FileBytes());
  KILN_CHECK(tensor.end <= file_bytes_ - data_begin_);
  return bytes.subspan(data_begin_ + tensor.begin, tensor.bytes());
}

absl::StatusOr<std::span<const uint8_t>> SafetensorsFile::FileBytes() {
  if (map_ == nullptr) {
    struct stat info;
    if (fstat(fd_, &info) != 0) return ErrnoStatus(errno, "cannot stat", path_);
    if (static_cast<uint64_t>(info.st_size) != file_bytes_) {
      return absl::FailedPreconditionError(
          absl::StrCat(path_, ": had ", file_bytes_, " bytes when it was ",
                       "opened and now has ", info.st_size));
    }
    void* map = mmap(nullptr, file_bytes_, PROT_READ, MAP_PRIVATE, fd_, 0);
    if (map == MAP_FAILED) return ErrnoStatus(errno, "cannot map", path_);
    map_ = static_cast<const uint8_t*>(map);
  }
  return std::span<const uint8_t>(map_, file_bytes_);
}

std::string MakeSafetensorsHead(
    std::span<const SafetensorsTensor> tensors,
    const std::map<std::string, std::string>& metadata) {
  std::vector<std::string> members;
  if (!metadata.empty()) {
    std::vector<std::string> pairs;
    for (const auto& [key, value] : metadata) {
      pairs.push_back(absl::StrCat("\"", key, "\":\"", value, "\""));
    }
    members.push_back(
        absl::StrCat("\"__metadata__\":{", absl::StrJoin(pairs, ","), "}"));
  }
  uint64_t at = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    uint64_t bits = StoredTypeBits(tensor.type);
    for (const uint64_t dim : tensor.shape()) bits *= dim;
    KILN_CHECK(bits % 8 == 0);
    const uint64_t end = at + bits / 8;
    members.push_back(absl::StrCat(
        "\"", tensor.name, "\":{\"dtype\":\"", StoredTypeName(tensor.type),
        "\",\"shape\":[", absl::StrJoin(tensor.shape(), ","),
        "],\"data_offsets\":[", at, ",", end, "]}"));
    at = end;
  }
  std::string json = absl::StrCat("{", absl::StrJoin(members, ","), "}");
  while ((kLengthBytes + json.size()) % kDataAlignment != 0) json += ' ';
  std::string head;
  for (size_t i = 0; i < kLengthBytes; ++i) {
    head.push_back(static_cast<char>(json.size() >> (8 * i) & 0xFF));
  }
  return head + json;
}

}  // namespace kiln
