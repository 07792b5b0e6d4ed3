#include "compiler/spec/json_reader.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <nlohmann/json.hpp>
#include <tuple>
#include <unordered_map>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"

namespace kiln {
namespace {

constexpr size_t kDepthMax = 64;
// Members of an object that are searched one by one for a duplicate.
constexpr size_t kSearchedMax = 32;
// Most objects and arrays have no more, and need to be allocated once.
constexpr size_t kUsualCount = 4;
// Longest excerpts in messages, in bytes.
constexpr size_t kExcerptMax = 60;
constexpr size_t kLibraryTextMax = 200;

// Reads at several times the library's speed what Kiln itself writes: valid
// JSON in ASCII without escapes, small objects, small integers. Gives up on all
// else, valid or not, which the library then reads or explains.
class PlainReader {
 public:
  explicit PlainReader(absl::string_view text)
      : at_(text.data()), end_(at_ + text.size()), line_start_(at_) {}

  bool Read(JsonNode* root) {
    SkipSpace();
    if (!Value(0, root)) return false;
    SkipSpace();
    return at_ == end_;
  }

 private:
  static bool IsDigit(char c) { return c >= '0' && c <= '9'; }

  char Next() const { return at_ == end_ ? '\0' : *at_; }

  bool Take(char c) {
    if (Next() != c) return false;
    ++at_;
    return true;
  }

  void SkipSpace() {
    if (at_ != end_ && *at_ > ' ') return;
    for (; at_ != end_; ++at_) {
      if (*at_ == '\n') {
        ++line_;
        line_start_ = at_ + 1;
      } else if (*at_ != ' ' && *at_ != '\t' && *at_ != '\r') {
        return;
      }
    }
  }

  void Mark(uint32_t* line, uint32_t* column) const {
    *line = line_;
    *column = static_cast<uint32_t>(at_ - line_start_) + 1;
  }

  bool Value(size_t depth, JsonNode* node) {
    Mark(&node->line, &node->column);
    switch (Next()) {
      case '{':
        node->kind = JsonNode::Kind::kObject;
        return depth < kDepthMax && Object(depth, node);
      case '[':
        node->kind = JsonNode::Kind::kArray;
        return depth < kDepthMax && Array(depth, node);
      case '"':
        node->kind = JsonNode::Kind::kString;
        return String(&node->text);
      case 't':
        node->kind = JsonNode::Kind::kBool;
        node->boolean = true;
        return Word("true");
      case 'f':
        node->kind = JsonNode::Kind::kBool;
        return Word("false");
      case 'n':
        return Word("null");
      default:
        return Number(node);
    }
  }

  bool Word(absl::string_view word) {
    if (absl::string_view(at_, static_cast<size_t>(end_ - at_))
            .substr(0, word.size()) != word) {
      return false;
    }
    at_ += word.size();
    return true;
  }

  bool String(std::string* text) {
    const char* const begin = ++at_;
    while (at_ != end_ && *at_ != '"') {
      if (*at_ < 0x20 || *at_ > 0x7E || *at_ == '\\') return false;
      ++at_;
    }
    text->assign(begin, at_);
    return Take('"');
  }

  bool Digits() {
    const char* const begin = at_;
    while (IsDigit(Next())) ++at_;
    return at_ != begin;
  }

  bool Number(JsonNode* node) {
    const char* const begin = at_;
    const bool negative = Take('-');
    const char* const digits = at_;
    if (!Digits() || (*digits == '0' && at_ - digits > 1)) return false;
    const char* const whole_end = at_;
    if (Take('.') && !Digits()) return false;
    if (Next() == 'e' || Next() == 'E') {
      ++at_;
      if (!Take('+')) Take('-');
      if (!Digits()) return false;
    }
    if (at_ != whole_end) {
      node->kind = JsonNode::Kind::kFloat;
      return absl::SimpleAtod(
                 absl::string_view(begin, static_cast<size_t>(at_ - begin)),
                 &node->number) &&
             std::isfinite(node->number);
    }
    constexpr ptrdiff_t kDigitsMax = 18;  // below 2^63
    if (whole_end - digits > kDigitsMax) return false;
    for (const char* c = digits; c != whole_end; ++c) {
      node->integer = node->integer * 10 + (*c - '0');
    }
    if (negative) node->integer = -node->integer;
    node->kind = JsonNode::Kind::kInteger;
    node->number = static_cast<double>(node->integer);
    return true;
  }

  bool Array(size_t depth, JsonNode* node) {
    ++at_;
    SkipSpace();
    if (Take(']')) return true;
    node->items.reserve(kUsualCount);
    do {
      SkipSpace();
      if (!Value(depth + 1, &node->items.emplace_back())) return false;
      SkipSpace();
    } while (Take(','));
    return Take(']');
  }

  bool Object(size_t depth, JsonNode* node) {
    ++at_;
    SkipSpace();
    if (Take('}')) return true;
    node->members.reserve(2 * kUsualCount);
    bool sorted = true;
    do {
      SkipSpace();
      if (Next() != '"' || node->members.size() >= kSearchedMax) return false;
      JsonNode::Member& member = node->members.emplace_back();
      Mark(&member.line, &member.column);
      if (!String(&member.key)) return false;
      // Behind names in their order, as Kiln writes them, a greater one is new;
      // else the first of this name must be this one.
      if (const size_t count = node->members.size(); count > 1) {
        sorted = sorted && node->members[count - 2].key < member.key;
      }
      if (!sorted && node->Find(member.key) != &member.value) return false;
      SkipSpace();
      if (!Take(':')) return false;
      SkipSpace();
      if (!Value(depth + 1, &member.value)) return false;
      SkipSpace();
    } while (Take(','));
    return Take('}');
  }

  const char* at_;
  const char* const end_;
  const char* line_start_;
  uint32_t line_ = 1;
};

// Input iterator that tells how many characters the lexer has taken.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** progress)
      : at_(at), progress_(progress) {}

  reference operator*() const { return *at_; }

  CountingIterator& operator++() {
    ++at_;
    *progress_ = at_;
    return *this;
  }

  CountingIterator operator++(int) {
    CountingIterator before = *this;
    ++*this;
    return before;
  }

  bool operator==(const CountingIterator& other) const {
    return at_ == other.at_;
  }

  bool operator!=(const CountingIterator& other) const {
    return at_ != other.at_;
  }

 private:
  const char* at_;
  const char** progress_;
};

// Builds JsonNodes from nlohmann's SAX events. The events come after a token
// was read, so a token's start is found by walking back from there.
class Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  Builder(absl::string_view text, absl::string_view file,
          const char* const* progress)
      : text_(text), file_(file), progress_(progress) {
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] == '\n') line_starts_.push_back(i + 1);
    }
  }

  const absl::Status& status() const { return status_; }

  JsonNode TakeRoot() { return std::move(root_); }

  bool null() override { return Scalar(JsonNode::Kind::kNull); }

  bool boolean(bool value) override {
    JsonNode node = Make(JsonNode::Kind::kBool, ScalarStart());
    node.boolean = value;
    return Place(std::move(node));
  }

  bool number_integer(number_integer_t value) override {
    return Integer(value);
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<uint64_t>(INT64_MAX)) {
      return Fail(ScalarStart(),
                  absl::StrCat("number ", value, " is out of range"));
    }
    return Integer(static_cast<int64_t>(value));
  }

  bool number_float(number_float_t value, const string_t&) override {
    JsonNode node = Make(JsonNode::Kind::kFloat, ScalarStart());
    node.number = value;
    return Place(std::move(node));
  }

  bool string(string_t& value) override {
    JsonNode node = Make(JsonNode::Kind::kString, StringStart());
    node.text = value;
    return Place(std::move(node));
  }

  bool binary(binary_t&) override {
    return Fail(Consumed(), "binary values are not JSON");
  }

  bool start_object(size_t) override { return Open(JsonNode::Kind::kObject); }

  bool end_object() override { return Close(); }

  bool start_array(size_t) override { return Open(JsonNode::Kind::kArray); }

  bool end_array() override { return Close(); }

  bool key(string_t& name) override {
    const size_t start = StringStart();
    JsonNode::Member member;
    member.key = name;
    std::tie(member.line, member.column) = LineColumn(start);
    Level& level = stack_.back();
    if (const JsonNode::Member* first = level.Find(member.key);
        first != nullptr) {
      return Fail(start, absl::StrCat("duplicate key ", JsonQuote(member.key),
                                      ", first on line ", first->line));
    }
    std::vector<JsonNode::Member>& members = level.node.members;
    if (members.empty()) members.reserve(kUsualCount);
    members.push_back(std::move(member));
    return true;
  }

  bool parse_error(size_t, const std::string&,
                   const nlohmann::json::exception& error) override {
    // The library's text is "[json.exception.parse_error.101] parse error at
    // line 1, column 2: syntax error while parsing value - WHAT; last read:
    // 'TOKEN'", or "[json.exception.out_of_range.406] number overflow parsing
    // 'TOKEN'". The token may be as long as the input and need not be UTF-8.
    std::string what = error.what();
    if (const size_t dash = what.find(" - "); dash != std::string::npos) {
      what = what.substr(dash + 3);
    } else if (const size_t id = what.find("] "); id != std::string::npos) {
      what = what.substr(id + 2);
    }
    what = what.substr(0, what.find("; last read: "));
    what = what.substr(0, kLibraryTextMax);
    for (char& c : what) {
      if (c < 0x20 || c > 0x7E) c = '?';
    }
    // The count includes the character that was refused, unless there was none.
    const size_t at = Consumed();
    const bool ended = what.rfind("unexpected end of input", 0) == 0;
    return Fail(ended || at == 0 ? at : at - 1,
                absl::StrCat("invalid JSON: ", what));
  }

 private:
  // An array or object that is not closed yet.
  struct Level {
    JsonNode node;
    // Of the members, once there are so many that a search takes long.
    std::unordered_map<std::string, size_t> index;

    const JsonNode::Member* Find(const std::string& key) {
      const std::vector<JsonNode::Member>& members = node.members;
      if (members.size() <= kSearchedMax) {
        const auto found = std::find_if(
            members.begin(), members.end(),
            [&](const JsonNode::Member& member) { return member.key == key; });
        return found == members.end() ? nullptr : &*found;
      }
      while (index.size() < members.size()) {
        index.emplace(members[index.size()].key, index.size());
      }
      const auto found = index.find(key);
      return found == index.end() ? nullptr : &members[found->second];
    }
  };

  size_t Consumed() const {
    return static_cast<size_t>(*progress_ - text_.data());
  }

  std::pair<uint32_t, uint32_t> LineColumn(size_t offset) const {
    const auto index = static_cast<size_t>(
        std::upper_bound(line_starts_.begin(), line_starts_.end(), offset) -
        line_starts_.begin());
    const size_t start = index == 0 ? 0 : line_starts_[index - 1];
    return {static_cast<uint32_t>(index + 1),
            static_cast<uint32_t>(offset - start + 1)};
  }

  // Start of a string token that ends just before Consumed().
  size_t StringStart() const {
    size_t at = Consumed();
    while (at > 0 && text_[at - 1] != '"') --at;  // closing quote
    if (at == 0) return 0;
    --at;
    while (at > 0) {
      --at;
      if (text_[at] != '"') continue;
      size_t escapes = 0;
      while (escapes < at && text_[at - 1 - escapes] == '\\') ++escapes;
      if (escapes % 2 == 0) return at;
    }
    return 0;
  }

  // Start of a number or word; the lexer may have taken one character more.
  size_t ScalarStart() const {
    const auto part = [](char c) {
      return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') ||
             (c >= 'A' && c <= 'Z') || c == '-' || c == '+' || c == '.';
    };
    size_t at = std::min(Consumed(), text_.size());
    if (at > 0 && !part(text_[at - 1])) --at;
    while (at > 0 && part(text_[at - 1])) --at;
    return at;
  }

  JsonNode Make(JsonNode::Kind kind, size_t start) const {
    JsonNode node;
    node.kind = kind;
    std::tie(node.line, node.column) = LineColumn(start);
    return node;
  }

  bool Scalar(JsonNode::Kind kind) { return Place(Make(kind, ScalarStart())); }

  bool Integer(int64_t value) {
    JsonNode node = Make(JsonNode::Kind::kInteger, ScalarStart());
    node.integer = value;
    node.number = static_cast<double>(value);
    return Place(std::move(node));
  }

  bool Open(JsonNode::Kind kind) {
    if (stack_.size() >= kDepthMax) {
      return Fail(Consumed() - 1,
                  absl::StrCat("more than ", kDepthMax, " levels of nesting"));
    }
    stack_.push_back({.node = Make(kind, Consumed() - 1), .index = {}});
    return true;
  }

  bool Close() {
    JsonNode node = std::move(stack_.back().node);
    stack_.pop_back();
    return Place(std::move(node));
  }

  bool Place(JsonNode node) {
    if (stack_.empty()) {
      root_ = std::move(node);
      return true;
    }
    JsonNode& parent = stack_.back().node;
    if (parent.kind == JsonNode::Kind::kObject) {
      parent.members.back().value = std::move(node);
    } else {
      if (parent.items.empty()) parent.items.reserve(kUsualCount);
      parent.items.push_back(std::move(node));
    }
    return true;
  }

  bool Fail(size_t offset, absl::string_view message) {
    const auto [line, column] = LineColumn(std::min(offset, text_.size()));
    status_ = JsonError(file_, line, column, message);
    return false;
  }

  absl::string_view text_;
  absl::string_view file_;
  const char* const* progress_;
  std::vector<size_t> line_starts_;
  std::vector<Level> stack_;
  JsonNode root_;
  absl::Status status_;
};

}  // namespace

const JsonNode* JsonNode::Find(absl::string_view key) const {
  for (const Member& member : members) {
    if (member.key == key) return &member.value;
  }
  return nullptr;
}

absl::string_view JsonKindName(JsonNode::Kind kind) {
  switch (kind) {
    case JsonNode::Kind::kNull:
      return "null";
    case JsonNode::Kind::kBool:
      return "a boolean";
    case JsonNode::Kind::kInteger:
      return "an integer";
    case JsonNode::Kind::kFloat:
      return "a fraction";
    case JsonNode::Kind::kString:
      return "a string";
    case JsonNode::Kind::kArray:
      return "an array";
    case JsonNode::Kind::kObject:
      return "an object";
  }
  KILN_UNREACHABLE();
}

std::string JsonQuote(absl::string_view text) {
  // Parsed text is UTF-8; a cut must not leave part of a character.
  size_t keep = std::min(text.size(), kExcerptMax);
  if (keep < text.size()) {
    while (keep > 0 && (static_cast<uint8_t>(text[keep]) & 0xC0) == 0x80) {
      --keep;
    }
  }
  return absl::StrCat("\"", absl::Utf8SafeCEscape(text.substr(0, keep)), "\"",
                      keep < text.size() ? "..." : "");
}

std::string JsonExcerpt(const JsonNode& node) {
  switch (node.kind) {
    case JsonNode::Kind::kNull:
      return "null";
    case JsonNode::Kind::kBool:
      return node.boolean ? "true" : "false";
    case JsonNode::Kind::kInteger:
      return absl::StrCat(node.integer);
    case JsonNode::Kind::kFloat:
      return absl::StrCat(node.number);
    case JsonNode::Kind::kString:
      return JsonQuote(node.text);
    case JsonNode::Kind::kArray:
      return absl::StrCat("an array of ", node.items.size());
    case JsonNode::Kind::kObject:
      return "an object";
  }
  KILN_UNREACHABLE();
}

absl::Status JsonError(absl::string_view file, uint32_t line, uint32_t column,
                       absl::string_view message) {
  return absl::InvalidArgumentError(
      absl::StrCat(file, ":", line, ":", column, ": ", message));
}

absl::Status JsonError(absl::string_view file, const JsonNode& node,
                       absl::string_view message) {
  return JsonError(file, node.line, node.column, message);
}

absl::StatusOr<JsonNode> ParseJson(absl::string_view text,
                                   absl::string_view file) {
  if (JsonNode root; PlainReader(text).Read(&root)) return root;
  const char* progress = text.data();
  const CountingIterator begin(text.data(), &progress);
  const CountingIterator end(text.data() + text.size(), &progress);
  Builder builder(text, file, &progress);
  const bool parsed = nlohmann::json::sax_parse(begin, end, &builder);
  RETURN_IF_ERROR(builder.status());
  // The parser takes a NUL for the end of the text.
  if (const size_t nul = text.find('\0'); nul != absl::string_view::npos) {
    const absl::string_view before = text.substr(0, nul);
    const size_t line = before.rfind('\n') + 1;  // npos + 1 is 0
    return JsonError(file,
                     1 + static_cast<uint32_t>(
                             std::count(before.begin(), before.end(), '\n')),
                     1 + static_cast<uint32_t>(nul - line),
                     "invalid JSON: a NUL byte");
  }
  if (!parsed) return JsonError(file, 1, 1, "invalid JSON");
  return builder.TakeRoot();
}

}  // namespace kiln
