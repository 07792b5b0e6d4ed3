#include "compiler/spec/json_reader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::StatusIs;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::Not;
using Kind = JsonNode::Kind;

void ExpectAt(const JsonNode& node, Kind kind, uint32_t line, uint32_t column) {
  EXPECT_EQ(node.kind, kind);
  EXPECT_EQ(node.line, line);
  EXPECT_EQ(node.column, column);
}

TEST(ParseJsonTest, KeepsWhereEachValueStood) {
  const std::string text =
      "{\n"
      "  \"a\" : [1,-2 , 3.5e1],\n"
      "\t\"b\\\"c\":{ \"t\":true,\"f\":false , \"n\": null},\n"
      "  \"s\": \"x \\\\\", \"last\":7\n"
      "}\n";
  ASSERT_OK_AND_ASSIGN(const JsonNode root, ParseJson(text, "f"));
  ExpectAt(root, Kind::kObject, 1, 1);
  ASSERT_EQ(root.members.size(), 4u);
  EXPECT_EQ(root.members[0].line, 2u);
  EXPECT_EQ(root.members[0].column, 3u);

  const JsonNode& a = *root.Find("a");
  ExpectAt(a, Kind::kArray, 2, 9);
  ExpectAt(a.items[0], Kind::kInteger, 2, 10);
  ExpectAt(a.items[1], Kind::kInteger, 2, 12);
  EXPECT_EQ(a.items[1].integer, -2);
  ExpectAt(a.items[2], Kind::kFloat, 2, 17);
  EXPECT_EQ(a.items[2].number, 35);

  EXPECT_EQ(root.members[1].key, "b\"c");
  EXPECT_EQ(root.members[1].line, 3u);
  EXPECT_EQ(root.members[1].column, 2u);
  const JsonNode& b = *root.Find("b\"c");
  ExpectAt(b, Kind::kObject, 3, 9);
  ExpectAt(*b.Find("t"), Kind::kBool, 3, 15);
  EXPECT_TRUE(b.Find("t")->boolean);
  ExpectAt(*b.Find("f"), Kind::kBool, 3, 24);
  EXPECT_FALSE(b.Find("f")->boolean);
  ExpectAt(*b.Find("n"), Kind::kNull, 3, 37);

  ExpectAt(*root.Find("s"), Kind::kString, 4, 8);
  EXPECT_EQ(root.Find("s")->text, "x \\");
  ExpectAt(*root.Find("last"), Kind::kInteger, 4, 23);
  EXPECT_EQ(root.Find("none"), nullptr);
}

TEST(ParseJsonTest, AcceptsAScalarAsTheRoot) {
  ASSERT_OK_AND_ASSIGN(const JsonNode root, ParseJson("  42", "f"));
  ExpectAt(root, Kind::kInteger, 1, 3);
}

TEST(ParseJsonTest, NamesPlaceAndReasonOfASyntaxError) {
  const struct {
    const char* text;
    const char* message;
  } cases[] = {
      {"", "f:1:1: invalid JSON: unexpected end of input"},
      {"{", "f:1:2: invalid JSON: unexpected end of input"},
      {"{\n \"a\": 1,\n}", "f:3:1: invalid JSON: unexpected '}'"},
      {"[1, 2", "f:1:6: invalid JSON: unexpected end of input"},
      {"[1 2]", "f:1:5: invalid JSON: unexpected number literal"},
      {"{\"a\" 1}", "f:1:7: invalid JSON: unexpected number literal"},
      {"[1]\n x", "f:2:2: invalid JSON: invalid literal"},
      {"[1e999]", "f:1:7: invalid JSON: number overflow parsing '1e999'"},
      {"[\"a\nb\"]", "f:1:4: invalid JSON: invalid string: control character"},
      {"[tru]", "f:1:5: invalid JSON: invalid literal"},
      {"// no\n1", "f:1:1: invalid JSON: invalid literal"},
  };

  for (const auto& c : cases) {
    EXPECT_THAT(
        ParseJson(c.text, "f"),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(c.message)))
        << c.text;
  }
}

TEST(ParseJsonTest, RefusesANulByteAndWhatItWouldHide) {
  for (const auto& behind : {"", " [2]"}) {
    std::string text = "[1]\n ";
    text.push_back('\0');
    text += behind;
    EXPECT_THAT(ParseJson(text, "f"),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("f:2:2: invalid JSON: a NUL byte")));
  }
}

TEST(ParseJsonTest, RefusesDuplicateKeysPerObject) {
  EXPECT_THAT(ParseJson("{\"a\":1,\n \"b\":2,\n  \"a\":3}", "f"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       Eq("f:3:3: duplicate key \"a\", first on line 1")));
  // The same key by another spelling.
  EXPECT_THAT(ParseJson("{\"a\":1, \"\\u0061\":3}", "f"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("f:1:9: duplicate key \"a\"")));
  EXPECT_OK(ParseJson("{\"a\":{\"a\":1},\"b\":{\"a\":[{\"a\":1}]}}", "f"));
}

TEST(ParseJsonTest, RefusesDeepNestingAtItsPlace) {
  const auto nested = [](int depth) {
    return absl::StrCat(std::string(static_cast<size_t>(depth), '['),
                        std::string(static_cast<size_t>(depth), ']'));
  };
  EXPECT_OK(ParseJson(nested(64), "f"));
  EXPECT_THAT(ParseJson(nested(65), "f"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       Eq("f:1:65: more than 64 levels of nesting")));
  EXPECT_THAT(ParseJson(std::string(1 << 20, '['), "f"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("more than 64 levels")));
}

TEST(ParseJsonTest, RefusesIntegersBeyond63Bits) {
  ASSERT_OK_AND_ASSIGN(
      const JsonNode root,
      ParseJson("[9223372036854775807,-9223372036854775808]", "f"));
  EXPECT_EQ(root.items[0].integer, INT64_MAX);
  EXPECT_EQ(root.items[1].integer, INT64_MIN);
  EXPECT_THAT(
      ParseJson("[9223372036854775808]", "f"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               Eq("f:1:2: number 9223372036854775808 is out of range")));
  // Beyond 64 bits it is no integer any more.
  ASSERT_OK_AND_ASSIGN(const JsonNode huge,
                       ParseJson("[99999999999999999999]", "f"));
  EXPECT_EQ(huge.items[0].kind, Kind::kFloat);
}

TEST(ParseJsonTest, MessagesAreShortPrintableText) {
  const std::string long_token(1 << 20, 'x');
  const std::string inputs[] = {
      "[\"\xFF\xFE\"]",
      "[\"" + long_token,
      "[" + long_token,
      "[\"a - b\" \"c\"]",
      std::string("[\0]", 3),
      "{\"" + long_token + "\":1,\"" + long_token + "\":2}",
      "[" + std::string(1 << 20, '9') + "e99999]",
  };
  for (const std::string& input : inputs) {
    const absl::StatusOr<JsonNode> root = ParseJson(input, "f");
    ASSERT_THAT(root, StatusIs(absl::StatusCode::kInvalidArgument));
    const std::string message(root.status().message());
    EXPECT_LT(message.size(), 300u) << message.substr(0, 400);
    EXPECT_THAT(message, HasSubstr("f:1:"));
    for (const char c : message) {
      EXPECT_TRUE(c >= 0x20 && c < 0x7F) << message;
    }
  }
  EXPECT_THAT(ParseJson("[\"a - b\" \"c\"]", "f").status().message(),
              HasSubstr("unexpected string literal"));
}

// A text of the largest accepted size must not take minutes: positions and
// duplicate keys are looked up, not searched for.
TEST(ParseJsonTest, TakesTimeInProportionToTheText) {
  std::string text = "{";
  for (int i = 0; i < 200000; ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ",", "\n\"k", i, "\":1");
  }
  text += "\n}";
  const auto start = std::chrono::steady_clock::now();
  ASSERT_OK_AND_ASSIGN(const JsonNode root, ParseJson(text, "f"));
  EXPECT_EQ(root.members.back().line, 200001u);
  // 0.2 s on a slow machine; a quadratic reader needs minutes.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(JsonExcerptTest, ShortensWithoutCuttingACharacter) {
  JsonNode node;
  node.kind = Kind::kString;
  // 59 bytes, then a character of two.
  node.text = std::string(59, 'a') + "\u00fc\u00fc";
  EXPECT_EQ(JsonExcerpt(node),
            absl::StrCat("\"", std::string(59, 'a'), "\"..."));
  node.text = "line\nbreak";
  EXPECT_EQ(JsonExcerpt(node), "\"line\\nbreak\"");
  EXPECT_THAT(JsonExcerpt(node), Not(HasSubstr("\n")));
}

}  // namespace
}  // namespace kiln
