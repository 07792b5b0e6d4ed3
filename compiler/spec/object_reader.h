// One JSON object, member by member. Every error names the line, the column and
// what was found.

#ifndef KILN_COMPILER_SPEC_OBJECT_READER_H_
#define KILN_COMPILER_SPEC_OBJECT_READER_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"

namespace kiln {

// Borrows the file's name and the node. All errors are InvalidArgument.
class ObjectReader {
 public:
  // `what` stands for the object in messages: request, "weights".
  ObjectReader(absl::string_view file, const JsonNode& node,
               absl::string_view what)
      : file_(file), node_(node), what_(what) {}

  const JsonNode& node() const { return node_; }

  // An object with no key but `known`. Comes before any key is read, so that a
  // misspelt key is called unknown rather than missing.
  absl::Status CheckKeys(std::initializer_list<absl::string_view> known) const;

  // Null where the key is missing.
  const JsonNode* Optional(absl::string_view key) const {
    return node_.Find(key);
  }

  absl::StatusOr<const JsonNode*> Required(absl::string_view key,
                                           JsonNode::Kind kind) const;

  // An integer in [low, high].
  absl::StatusOr<int64_t> Integer(absl::string_view key, int64_t low,
                                  int64_t high) const;

  // The same of a value that is found already, such as one of a list.
  absl::StatusOr<int64_t> IntegerOf(const JsonNode& value,
                                    absl::string_view key, int64_t low,
                                    int64_t high) const;

  absl::StatusOr<std::string> Text(absl::string_view key) const;

  absl::StatusOr<bool> Bool(absl::string_view key) const;

  // One word of a list of (spelling, value) pairs.
  template <typename T>
  absl::StatusOr<T> Word(
      absl::string_view key,
      const std::vector<std::pair<absl::string_view, T>>& words) const {
    ASSIGN_OR_RETURN(const JsonNode* value,
                     Required(key, JsonNode::Kind::kString));
    for (const auto& [spelling, meaning] : words) {
      if (spelling == value->text) return meaning;
    }
    const std::string known =
        absl::StrJoin(words, ", ", [](std::string* out, const auto& word) {
          absl::StrAppend(out, "\"", word.first, "\"");
        });
    return Refuse(key, *value, absl::StrCat("must be one of ", known));
  }

  // "key" is ..., and the rule that this breaks.
  absl::Status Refuse(absl::string_view key, const JsonNode& value,
                      absl::string_view rule) const;

  absl::Status Error(const JsonNode& node, absl::string_view message) const {
    return JsonError(file_, node, message);
  }

 private:
  absl::string_view file_;
  const JsonNode& node_;
  std::string what_;
};

}  // namespace kiln

#endif  // KILN_COMPILER_SPEC_OBJECT_READER_H_
