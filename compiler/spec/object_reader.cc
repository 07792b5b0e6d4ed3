#include "compiler/spec/object_reader.h"

#include <algorithm>

namespace kiln {

absl::Status ObjectReader::CheckKeys(
    std::initializer_list<absl::string_view> known) const {
  if (node_.kind != JsonNode::Kind::kObject) {
    return Error(node_, absl::StrCat(what_, " must be an object, found ",
                                     JsonExcerpt(node_)));
  }
  for (const JsonNode::Member& member : node_.members) {
    if (std::find(known.begin(), known.end(), member.key) == known.end()) {
      return JsonError(
          file_, member.line, member.column,
          absl::StrCat("unknown key ", JsonQuote(member.key), " in ", what_,
                       "; known: ", absl::StrJoin(known, ", ")));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<const JsonNode*> ObjectReader::Required(
    absl::string_view key, JsonNode::Kind kind) const {
  const JsonNode* value = Optional(key);
  if (value == nullptr) {
    return Error(node_, absl::StrCat(what_, " lacks the key \"", key, "\""));
  }
  if (value->kind != kind) {
    return Error(*value,
                 absl::StrCat("\"", key, "\" must be ", JsonKindName(kind),
                              ", found ", JsonExcerpt(*value)));
  }
  return value;
}

absl::StatusOr<int64_t> ObjectReader::Integer(absl::string_view key,
                                              int64_t low, int64_t high) const {
  ASSIGN_OR_RETURN(const JsonNode* value,
                   Required(key, JsonNode::Kind::kInteger));
  return IntegerOf(*value, key, low, high);
}

absl::StatusOr<int64_t> ObjectReader::IntegerOf(const JsonNode& value,
                                                absl::string_view key,
                                                int64_t low,
                                                int64_t high) const {
  if (value.kind != JsonNode::Kind::kInteger) {
    return Error(value, absl::StrCat("\"", key, "\" must be an integer, ",
                                     "found ", JsonExcerpt(value)));
  }
  if (value.integer < low || value.integer > high) {
    return Refuse(key, value, absl::StrCat("must be within ", low, "..", high));
  }
  return value.integer;
}

absl::StatusOr<std::string> ObjectReader::Text(absl::string_view key) const {
  ASSIGN_OR_RETURN(const JsonNode* value,
                   Required(key, JsonNode::Kind::kString));
  return value->text;
}

absl::StatusOr<bool> ObjectReader::Bool(absl::string_view key) const {
  ASSIGN_OR_RETURN(const JsonNode* value, Required(key, JsonNode::Kind::kBool));
  return value->boolean;
}

absl::Status ObjectReader::Refuse(absl::string_view key, const JsonNode& value,
                                  absl::string_view rule) const {
  return Error(
      value, absl::StrCat("\"", key, "\" is ", JsonExcerpt(value), ", ", rule));
}

}  // namespace kiln
