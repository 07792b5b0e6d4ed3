#include "compiler/base/digest.h"

#include <bit>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "runtime/sha256.h"

namespace kiln {
namespace {

constexpr char kTagText = 'T';
constexpr char kTagNumber = 'N';
constexpr char kTagFlag = 'F';
constexpr char kTagHash = 'H';
constexpr char kTagBegin = '{';
constexpr char kTagEnd = '}';

void AppendInteger(std::string* out, uint64_t value, size_t bytes) {
  static_assert(std::endian::native == std::endian::little);
  out->append(reinterpret_cast<const char*>(&value), bytes);
}

void AppendString(std::string* out, absl::string_view text) {
  KILN_CHECK(text.size() <= std::numeric_limits<uint32_t>::max());
  AppendInteger(out, text.size(), 4);
  out->append(text.data(), text.size());
}

int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// Cursor over untrusted bytes; every read is checked.
class Reader {
 public:
  explicit Reader(absl::string_view bytes) : bytes_(bytes) {}

  bool AtEnd() const { return bytes_.empty(); }

  absl::Status Integer(int count, uint64_t* value) {
    absl::string_view raw;
    RETURN_IF_ERROR(Take(static_cast<size_t>(count), &raw));
    *value = 0;
    for (int i = 0; i < count; ++i) {
      *value |= uint64_t{static_cast<uint8_t>(raw[static_cast<size_t>(i)])}
                << (8 * i);
    }
    return absl::OkStatus();
  }

  absl::Status String(absl::string_view* text) {
    uint64_t size = 0;
    RETURN_IF_ERROR(Integer(4, &size));
    return Take(static_cast<size_t>(size), text);
  }

  absl::Status Take(size_t size, absl::string_view* raw) {
    if (size > bytes_.size()) {
      return absl::DataLossError(
          absl::StrCat("canonical record ends early: ", size,
                       " bytes expected, ", bytes_.size(), " left"));
    }
    *raw = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return absl::OkStatus();
  }

 private:
  absl::string_view bytes_;
};

}  // namespace

std::string ToHex(absl::string_view data) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  out.reserve(data.size() * 2);
  for (const char c : data) {
    const auto byte = static_cast<uint8_t>(c);
    out.push_back(kDigits[byte >> 4]);
    out.push_back(kDigits[byte & 15]);
  }
  return out;
}

std::string Digest::ToHex() const { return kiln::ToHex(AsBytes()); }

absl::StatusOr<Digest> Digest::FromHex(absl::string_view text) {
  Digest digest;
  if (text.size() != 64) {
    return absl::InvalidArgumentError(absl::StrCat(
        "digest has ", text.size(), " characters, expected 64 hex digits"));
  }
  for (size_t i = 0; i < 32; ++i) {
    const int high = HexValue(text[2 * i]);
    const int low = HexValue(text[2 * i + 1]);
    if (high < 0 || low < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "digest \"", text, "\" has a character that is no hex digit"));
    }
    digest.bytes[i] = static_cast<uint8_t>(high * 16 + low);
  }
  return digest;
}

absl::StatusOr<Digest> Digest::FromBytes(absl::string_view text) {
  Digest digest;
  if (text.size() != digest.bytes.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("digest has ", text.size(), " bytes, expected 32"));
  }
  for (size_t i = 0; i < text.size(); ++i) {
    digest.bytes[i] = static_cast<uint8_t>(text[i]);
  }
  return digest;
}

Digest Sha256(absl::string_view data) {
  Digest digest;
  kiln_sha256(data.data(), data.size(), digest.bytes.data());
  return digest;
}

CanonicalEncoder::CanonicalEncoder(absl::string_view domain) {
  bytes_.reserve(1024);  // a typical row of the cache
  AppendString(&bytes_, domain);
}

void CanonicalEncoder::Header(char tag, absl::string_view name) {
  bytes_.push_back(tag);
  AppendString(&bytes_, name);
}

CanonicalEncoder& CanonicalEncoder::Text(absl::string_view name,
                                         absl::string_view value) {
  Header(kTagText, name);
  AppendString(&bytes_, value);
  return *this;
}

CanonicalEncoder& CanonicalEncoder::Number(absl::string_view name,
                                           int64_t value) {
  Header(kTagNumber, name);
  AppendInteger(&bytes_, static_cast<uint64_t>(value), 8);
  return *this;
}

CanonicalEncoder& CanonicalEncoder::Flag(absl::string_view name, bool value) {
  Header(kTagFlag, name);
  bytes_.push_back(value ? 1 : 0);
  return *this;
}

CanonicalEncoder& CanonicalEncoder::Hash(absl::string_view name,
                                         const Digest& value) {
  Header(kTagHash, name);
  bytes_.append(value.AsBytes().data(), value.AsBytes().size());
  return *this;
}

CanonicalEncoder& CanonicalEncoder::Begin(absl::string_view name) {
  KILN_CHECK(depth_ < kCanonicalDepthMax);
  Header(kTagBegin, name);
  ++depth_;
  return *this;
}

CanonicalEncoder& CanonicalEncoder::End() {
  KILN_CHECK(depth_ > 0);
  --depth_;
  bytes_.push_back(kTagEnd);
  return *this;
}

const std::string& CanonicalEncoder::bytes() const& {
  KILN_CHECK(depth_ == 0);
  return bytes_;
}

std::string CanonicalEncoder::bytes() && {
  KILN_CHECK(depth_ == 0);
  return std::move(bytes_);
}

absl::StatusOr<CanonicalRecord> DecodeCanonical(absl::string_view bytes) {
  CanonicalRecord record;
  Reader reader(bytes);
  absl::string_view text;
  RETURN_IF_ERROR(reader.String(&text));
  record.domain = std::string(text);
  std::vector<std::string> groups;
  while (!reader.AtEnd()) {
    absl::string_view tag;
    RETURN_IF_ERROR(reader.Take(1, &tag));
    if (tag[0] == kTagEnd) {
      if (groups.empty()) {
        return absl::DataLossError("canonical record closes no open group");
      }
      groups.pop_back();
      continue;
    }
    absl::string_view name;
    RETURN_IF_ERROR(reader.String(&name));
    groups.emplace_back(name);
    if (tag[0] == kTagBegin) {
      if (groups.size() > static_cast<size_t>(kCanonicalDepthMax)) {
        return absl::DataLossError(
            absl::StrCat("canonical record nests deeper than ",
                         kCanonicalDepthMax, " groups"));
      }
      continue;  // the group stays open
    }
    CanonicalField field;
    field.path = absl::StrJoin(groups, "/");
    switch (tag[0]) {
      case kTagText:
        RETURN_IF_ERROR(reader.String(&text));
        field.value = std::string(text);
        break;
      case kTagNumber: {
        uint64_t value = 0;
        RETURN_IF_ERROR(reader.Integer(8, &value));
        field.value = absl::StrCat(static_cast<int64_t>(value));
        break;
      }
      case kTagFlag: {
        uint64_t value = 0;
        RETURN_IF_ERROR(reader.Integer(1, &value));
        if (value > 1) {
          return absl::DataLossError(absl::StrCat(
              "canonical flag ", field.path, " is ", value, ", not 0 or 1"));
        }
        field.value = value != 0 ? "true" : "false";
        break;
      }
      case kTagHash:
        RETURN_IF_ERROR(reader.Take(32, &text));
        field.value = ToHex(text);
        break;
      default:
        return absl::DataLossError(
            absl::StrCat("canonical record has unknown tag ",
                         static_cast<int>(static_cast<uint8_t>(tag[0]))));
    }
    groups.pop_back();
    record.fields.push_back(std::move(field));
  }
  if (!groups.empty()) {
    return absl::DataLossError(absl::StrCat(
        "canonical record leaves group ", absl::StrJoin(groups, "/"), " open"));
  }
  return record;
}

}  // namespace kiln
