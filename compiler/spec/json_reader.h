// JSON with positions: nlohmann/json parses, this keeps where each value stood,
// so that an error about a value names its line and column.

#ifndef KILN_COMPILER_SPEC_JSON_READER_H_
#define KILN_COMPILER_SPEC_JSON_READER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kiln {

// A parsed value with its place in the text: lines and columns count from 1,
// columns in bytes. Objects keep their members in the order of the text; a
// duplicate key is a parse error.
struct JsonNode {
  enum class Kind { kNull, kBool, kInteger, kFloat, kString, kArray, kObject };

  Kind kind = Kind::kNull;
  uint32_t line = 1;
  uint32_t column = 1;
  bool boolean = false;
  int64_t integer = 0;
  double number = 0;  // also set for integers
  std::string text;   // of a string
  std::vector<JsonNode> items;
  struct Member;
  std::vector<Member> members;

  // The member named `key`, or null.
  const JsonNode* Find(absl::string_view key) const;
};

struct JsonNode::Member {
  std::string key;
  uint32_t line = 1;
  uint32_t column = 1;
  JsonNode value;
};

// The value as JSON on one line, shortened for messages.
std::string JsonExcerpt(const JsonNode& node);
// UTF-8 text in quotes, escaped and shortened for messages.
std::string JsonQuote(absl::string_view text);
absl::string_view JsonKindName(JsonNode::Kind kind);

// Parses strict JSON of at most 64 levels. Errors are
// InvalidArgument and start with "file:line:column: ".
absl::StatusOr<JsonNode> ParseJson(absl::string_view text,
                                   absl::string_view file);

// InvalidArgument "file:line:column: message".
absl::Status JsonError(absl::string_view file, uint32_t line, uint32_t column,
                       absl::string_view message);
absl::Status JsonError(absl::string_view file, const JsonNode& node,
                       absl::string_view message);

}  // namespace kiln

#endif  // KILN_COMPILER_SPEC_JSON_READER_H_
