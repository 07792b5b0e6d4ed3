#include "templates/formats/json_scanner.h"

#include <gtest/gtest.h>

#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::StatusIs;
using ::testing::HasSubstr;

absl::Status StringError(absl::string_view text) {
  std::deque<std::string> decoded;
  JsonScanner scanner(text);
  return scanner.String(&decoded).status();
}

absl::Status NumberError(absl::string_view text) {
  JsonScanner scanner(text);
  return scanner.Unsigned().status();
}

TEST(JsonScannerTest, StringsAreDecodedOnlyWhereTheyMustBe) {
  const std::string text = " \"plain\" \"a\\\"b\\u00e9\" ";
  std::deque<std::string> decoded;
  JsonScanner scanner(text);
  ASSERT_OK_AND_ASSIGN(const absl::string_view plain, scanner.String(&decoded));
  EXPECT_EQ(plain, "plain");
  EXPECT_EQ(plain.data(), text.data() + 2);
  EXPECT_TRUE(decoded.empty());
  ASSERT_OK_AND_ASSIGN(const absl::string_view other, scanner.String(&decoded));
  EXPECT_EQ(other, "a\"b\xC3\xA9");
  EXPECT_TRUE(scanner.AtEnd());
}

TEST(JsonScannerTest, MalformedStringsAreRefused) {
  EXPECT_THAT(StringError("\"abc"), StatusIs(StatusCode::kInvalidArgument,
                                             HasSubstr("without an end")));
  EXPECT_THAT(StringError("\"abc\\"), StatusIs(StatusCode::kInvalidArgument,
                                               HasSubstr("without an end")));
  EXPECT_THAT(StringError("\"a\nb\""),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("control")));
  EXPECT_THAT(StringError("\"\\q\""),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("JSON")));
  EXPECT_THAT(StringError("\"\xFF\""),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("JSON")));
  EXPECT_THAT(StringError("7"), StatusIs(StatusCode::kInvalidArgument,
                                         HasSubstr("expected '\"'")));
}

TEST(JsonScannerTest, NumbersReachTwoToThe63MinusOne) {
  JsonScanner scanner("9223372036854775807 0");
  ASSERT_OK_AND_ASSIGN(const uint64_t most, scanner.Unsigned());
  EXPECT_EQ(most, 9223372036854775807u);
  ASSERT_OK_AND_ASSIGN(const uint64_t zero, scanner.Unsigned());
  EXPECT_EQ(zero, 0u);
}

TEST(JsonScannerTest, OtherNumbersAreRefused) {
  EXPECT_THAT(NumberError("9223372036854775808"),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("2^63")));
  for (const char* text : {"-1", "+1", "1.0", "1e3", "01", "", "x", "\"1\""}) {
    EXPECT_THAT(NumberError(text),
                StatusIs(StatusCode::kInvalidArgument, HasSubstr("byte 0: ")))
        << text;
  }
}

TEST(JsonScannerTest, ValueTakesOneWholeValue) {
  JsonScanner scanner("{\"a\": [1, \"]}\", {}]}, 3");
  ASSERT_OK_AND_ASSIGN(const absl::string_view value, scanner.Value());
  EXPECT_EQ(value, "{\"a\": [1, \"]}\", {}]}");
  EXPECT_TRUE(scanner.Take(','));
  EXPECT_THAT(scanner.Value(), kiln::testing::IsOkAndHolds("3"));
  for (const char* text : {"", ",", "}", "\xEF\xBB\xBF{}", "1 2"}) {
    EXPECT_THAT(JsonScanner(text).Value(),
                StatusIs(StatusCode::kInvalidArgument, HasSubstr("byte 0: ")))
        << text;
  }
  EXPECT_THAT(JsonScanner("{\"a\" 1}").Value(),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("JSON")));
  EXPECT_THAT(JsonScanner("[1}").Value(),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("JSON")));
  EXPECT_THAT(JsonScanner("\"a\\").Value(),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("end")));
}

// The tree of a value takes many times its text.
TEST(JsonScannerTest, ValueRefusesWhatIsTooLongToBeNotes) {
  const std::string most(kScannedValueBytesMax - 2, 'a');
  EXPECT_OK(JsonScanner("\"" + most + "\"").Value());
  EXPECT_THAT(JsonScanner("\"" + most + "a\"").Value(),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("a value of 1048577 bytes, at most 1048576")));
}

}  // namespace
}  // namespace kiln
