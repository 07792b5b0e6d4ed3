#include "templates/formats/json_scanner.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"

namespace kiln {
namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// The error of a piece that ParseJson refused: its position counts from the
// piece, so only the reason is kept.
std::string ReasonOf(const absl::Status& status) {
  const absl::string_view message = status.message();
  const size_t reason = message.find(": ");
  return std::string(
      reason == absl::string_view::npos ? message : message.substr(reason + 2));
}

}  // namespace

absl::Status JsonScanner::Error(absl::string_view message) const {
  return absl::InvalidArgumentError(absl::StrCat("byte ", at_, ": ", message));
}

void JsonScanner::SkipSpace() {
  while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' ||
                                text_[at_] == '\r' || text_[at_] == '\t')) {
    ++at_;
  }
}

bool JsonScanner::Take(char c) {
  SkipSpace();
  if (at_ == text_.size() || text_[at_] != c) return false;
  ++at_;
  return true;
}

absl::Status JsonScanner::Expect(char c) {
  if (Take(c)) return absl::OkStatus();
  const std::string wanted = absl::StrCat("expected '", std::string(1, c), "'");
  if (at_ == text_.size()) return Error(wanted + ", found the end");
  const char found = text_[at_];
  if (found < 0x20 || found > 0x7E) {
    return Error(absl::StrCat(wanted, ", found byte ",
                              static_cast<unsigned char>(found)));
  }
  return Error(absl::StrCat(wanted, ", found '", std::string(1, found), "'"));
}

bool JsonScanner::AtEnd() {
  SkipSpace();
  return at_ == text_.size();
}

absl::StatusOr<absl::string_view> JsonScanner::String(
    std::deque<std::string>* decoded) {
  RETURN_IF_ERROR(Expect('"'));
  const size_t begin = at_;
  bool plain = true;
  for (size_t i = begin; i < text_.size(); ++i) {
    const auto c = static_cast<unsigned char>(text_[i]);
    if (c == '"') {
      const absl::string_view inside = text_.substr(begin, i - begin);
      if (plain) {
        at_ = i + 1;
        return inside;
      }
      const absl::StatusOr<JsonNode> node =
          ParseJson(text_.substr(begin - 1, i + 2 - begin), "string");
      if (!node.ok()) return Error(ReasonOf(node.status()));
      at_ = i + 1;
      return decoded->emplace_back(node->text);
    }
    if (c < 0x20) return Error("control character in a string");
    if (c == '\\') ++i;  // whatever follows, it does not end the string
    if (c == '\\' || c >= 0x80) plain = false;
  }
  return Error("string without an end");
}

absl::StatusOr<uint64_t> JsonScanner::Unsigned() {
  SkipSpace();
  constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
  const size_t begin = at_;
  uint64_t value = 0;
  size_t i = begin;
  for (; i < text_.size() && IsDigit(text_[i]); ++i) {
    const auto digit = static_cast<uint64_t>(text_[i] - '0');
    if (value > (kMax - digit) / 10) return Error("number above 2^63-1");
    value = value * 10 + digit;
  }
  const char next = i < text_.size() ? text_[i] : ' ';
  if (i == begin || next == '.' || next == 'e' || next == 'E') {
    return Error("expected an integer of at least 0");
  }
  if (text_[begin] == '0' && i - begin > 1) {
    return Error("number with a leading zero");
  }
  at_ = i;
  return value;
}

absl::StatusOr<absl::string_view> JsonScanner::Value() {
  SkipSpace();
  const size_t begin = at_;
  size_t depth = 0;
  bool quoted = false;
  size_t i = begin;
  for (; i < text_.size(); ++i) {
    const char c = text_[i];
    if (quoted) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        quoted = false;
      }
      continue;
    }
    if (c == '"') {
      quoted = true;
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if (c == '}' || c == ']') {
      if (depth == 0) break;
      --depth;
    } else if (c == ',' && depth == 0) {
      break;
    }
  }
  if (i > text_.size()) return Error("string without an end");
  const absl::string_view value = text_.substr(begin, i - begin);
  if (value.empty()) return Error("expected a value");
  if (value.size() > kScannedValueBytesMax) {
    return Error(absl::StrCat("a value of ", value.size(), " bytes, at most ",
                              kScannedValueBytesMax, " are read here"));
  }
  // In brackets, it is as deep as it is in the text, and what only a whole text
  // may begin with, a byte order mark, is refused.
  const absl::StatusOr<JsonNode> node =
      ParseJson(absl::StrCat("[", value, "]"), "value");
  if (!node.ok()) return Error(ReasonOf(node.status()));
  at_ = i;
  return value;
}

}  // namespace kiln
