#include "templates/formats/safetensors.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::SafetensorsBytes;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

// One valid file of two tensors, 12 bytes of data; each test changes one thing.
constexpr char kValid[] =
    R"({"a":{"dtype":"F16","shape":[2,2],"data_offsets":[0,8]},)"
    R"("b":{"dtype":"I32","shape":[],"data_offsets":[8,12]}})";
constexpr uint64_t kValidBytes = 12;

std::string Replaced(std::string text, const std::string& from,
                     const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

// The status of kValid with `from` replaced by `to`.
absl::Status Mutated(const std::string& from, const std::string& to,
                     uint64_t data_bytes = kValidBytes) {
  return SafetensorsHeader::Parse(Replaced(kValid, from, to), data_bytes)
      .status();
}

void ExpectRefused(const absl::Status& status, const std::string& tensor,
                   const std::string& value, const std::string& rule) {
  EXPECT_THAT(status, StatusIs(StatusCode::kInvalidArgument,
                               AllOf(HasSubstr(tensor), HasSubstr(value),
                                     HasSubstr(rule))));
}

TEST(SafetensorsHeaderTest, ReadsNamesTypesShapesAndPlaces) {
  ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header,
                       SafetensorsHeader::Parse(kValid, kValidBytes));
  ASSERT_EQ(header.tensors().size(), 2u);
  const SafetensorsTensor& a = header.tensors()[0];
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.TypeAndShape(), "F16 [2, 2]");
  EXPECT_EQ(a.bytes(), 8u);
  const SafetensorsTensor& b = header.tensors()[1];
  EXPECT_EQ(b.TypeAndShape(), "I32 []");
  EXPECT_EQ(b.begin, 8u);
}

TEST(SafetensorsHeaderTest, KeepsEveryTypeOfTheFormat) {
  for (const auto& [name, bytes] : std::map<std::string, int>{
           {"BOOL", 24},    {"U8", 24},      {"I8", 24},      {"F4", 12},
           {"F6_E2M3", 18}, {"F6_E3M2", 18}, {"F8_E4M3", 24}, {"F8_E5M2", 24},
           {"F8_E8M0", 24}, {"I16", 48},     {"U16", 48},     {"F16", 48},
           {"BF16", 48},    {"I32", 96},     {"U32", 96},     {"F32", 96},
           {"I64", 192},    {"U64", 192},    {"F64", 192},    {"C64", 192}}) {
    const std::string json =
        absl::StrCat("{\"t\":{\"dtype\":\"", name,
                     "\",\"shape\":[4,6],\"data_offsets\":[0,", bytes, "]}}");
    ASSERT_OK_AND_ASSIGN(
        const SafetensorsHeader header,
        SafetensorsHeader::Parse(json, static_cast<uint64_t>(bytes)));
    EXPECT_EQ(StoredTypeName(header.tensors()[0].type), name);
  }
}

TEST(SafetensorsHeaderTest, OrderOfTheHeaderNeedNotBeThatOfTheBytes) {
  const std::string json =
      R"({"b":{"data_offsets":[2,4],"dtype":"U8","shape":[2]},)"
      R"("__metadata__":{"format":"pt"},)"
      R"("a":{"shape":[2],"data_offsets":[0,2],"dtype":"U8"}}   )";
  ASSERT_OK_AND_ASSIGN(const SafetensorsHeader header,
                       SafetensorsHeader::Parse(json, 4));
  EXPECT_EQ(header.tensors()[0].name, "a");
  EXPECT_EQ(header.tensors()[1].name, "b");
}

TEST(SafetensorsHeaderTest, EmptyTensorsAndEmptyFilesAreValid) {
  EXPECT_OK(SafetensorsHeader::Parse("{}", 0));
  EXPECT_OK(SafetensorsHeader::Parse(
      R"({"a":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]},)"
      R"("b":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})",
      0));
}

TEST(SafetensorsHeaderTest, RefusesTheSameNameTwice) {
  ExpectRefused(Mutated("\"b\"", "\"a\""), "\"a\"", "", "named twice");
  ExpectRefused(Mutated("\"b\"", "\"\\u0061\""), "\"a\"", "", "named twice");
}

TEST(SafetensorsHeaderTest, RefusesAHoleBetweenTensors) {
  ExpectRefused(Mutated("[8,12]", "[9,13]", 13), "tensor \"b\"", "byte 9",
                "bytes 8..8 belong to no tensor");
}

TEST(SafetensorsHeaderTest, RefusesAHoleBeforeTheFirstTensor) {
  ExpectRefused(
      SafetensorsHeader::Parse(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", 2)
          .status(),
      "tensor \"a\"", "byte 1", "bytes 0..0 belong to no tensor");
}

TEST(SafetensorsHeaderTest, RefusesOverlappingTensors) {
  ExpectRefused(Mutated("[8,12]", "[6,10]"), "tensor \"b\"", "byte 6",
                "inside tensor \"a\", which ends at 8");
}

TEST(SafetensorsHeaderTest, RefusesTrailingData) {
  ExpectRefused(Mutated("{", "{", 13), "end at byte 12", "13", "trailing data");
}

TEST(SafetensorsHeaderTest, RefusesDataOfNoTensor) {
  EXPECT_THAT(
      SafetensorsHeader::Parse("{}", 1),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("trailing data")));
}

TEST(SafetensorsHeaderTest, RefusesATensorBeyondTheFile) {
  ExpectRefused(Mutated("{", "{", 11), "tensor \"b\"", "[8, 12]",
                "holds 11 bytes");
}

TEST(SafetensorsHeaderTest, RefusesDescendingOffsets) {
  ExpectRefused(Mutated("[8,12]", "[12,8]"), "tensor \"b\"", "[12, 8]",
                "must not descend");
}

TEST(SafetensorsHeaderTest, RefusesASizeThatIsNotTheShapes) {
  ExpectRefused(Mutated("[2,2]", "[2,3]"), "tensor \"a\"", "F16 [2, 3]",
                "needs 12");
}

TEST(SafetensorsHeaderTest, RefusesAShapeThatOverflows) {
  ExpectRefused(Mutated("[2,2]", "[4611686018427387904,4]"), "tensor \"a\"",
                "4611686018427387904", "2^64 bits");
  ExpectRefused(Mutated("[2,2]", "[9223372036854775807,9223372036854775807]"),
                "tensor \"a\"", "", "2^64 bits");
}

TEST(SafetensorsHeaderTest, RefusesHalfABytePerTensor) {
  ExpectRefused(
      SafetensorsHeader::Parse(
          R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", 2)
          .status(),
      "tensor \"a\"", "12 bits", "whole bytes");
}

TEST(SafetensorsHeaderTest, RefusesAnUnknownType) {
  ExpectRefused(Mutated("\"F16\"", "\"F17\""), "tensor \"a\"", "\"F17\"",
                "must be one of BOOL, U8, I8");
}

TEST(SafetensorsHeaderTest, RefusesTooManyDimensions) {
  ExpectRefused(Mutated("[2,2]", "[1,1,1,1,1,1,1,2,2]"), "tensor \"a\"",
                "\"shape\"", "more than 8 entries");
}

TEST(SafetensorsHeaderTest, RefusesOneOffsetOrThree) {
  ExpectRefused(Mutated("[8,12]", "[8]"), "tensor \"b\"", "1 entries",
                "must have 2");
  ExpectRefused(Mutated("[8,12]", "[8,12,12]"), "tensor \"b\"",
                "\"data_offsets\"", "more than 2 entries");
}

TEST(SafetensorsHeaderTest, RefusesNegativeAndFractionalNumbers) {
  ExpectRefused(Mutated("[2,2]", "[-2,2]"), "tensor \"a\"", "",
                "integer of at least 0");
  ExpectRefused(Mutated("[2,2]", "[2.0,2]"), "tensor \"a\"", "",
                "integer of at least 0");
}

TEST(SafetensorsHeaderTest, RefusesAMissingKey) {
  ExpectRefused(Mutated(R"("dtype":"F16",)", ""), "tensor \"a\"", "\"dtype\"",
                "lacks the key");
  ExpectRefused(Mutated(R"("shape":[2,2],)", ""), "tensor \"a\"", "\"shape\"",
                "lacks the key");
  ExpectRefused(Mutated(R"(,"data_offsets":[0,8])", ""), "tensor \"a\"",
                "\"data_offsets\"", "lacks the key");
}

TEST(SafetensorsHeaderTest, RefusesAnUnknownKey) {
  for (const char* change :
       {R"("dtype":"F16","order":"C")", R"("order":"C","dtype":"F16")"}) {
    ExpectRefused(Mutated(R"("dtype":"F16")", change), "tensor \"a\"",
                  "\"order\"", "unknown key");
  }
}

TEST(SafetensorsHeaderTest, RefusesAKeyTwiceInOneTensor) {
  ExpectRefused(Mutated(R"("dtype":"F16")", R"("dtype":"F16","dtype":"F16")"),
                "tensor \"a\"", "\"dtype\"", "duplicate key");
}

TEST(SafetensorsHeaderTest, RefusesMetadataOfOtherKinds) {
  ExpectRefused(Mutated("{\"a\"", R"({"__metadata__":[],"a")"),
                "\"__metadata__\"", "array", "must be an object");
  ExpectRefused(Mutated("{\"a\"", R"({"__metadata__":{"x":1},"a")"), "\"x\"",
                "1", "must be a string");
  ExpectRefused(
      Mutated("{\"a\"", R"({"__metadata__":{},"__metadata__":{},"a")"),
      "\"__metadata__\"", "", "duplicate key");
}

TEST(SafetensorsHeaderTest, RefusesWhatIsNotOneObject) {
  for (const char* json : {"", " {}", "[]", "{", "{}x", "{}{}", "{\"a\"}"}) {
    EXPECT_THAT(SafetensorsHeader::Parse(json, 0),
                StatusIs(StatusCode::kInvalidArgument,
                         HasSubstr("safetensors header: ")))
        << json;
  }
}

TEST(SafetensorsFileTest, MapsTheBytesOfATensor) {
  const TestFolder folder;
  const std::string path =
      folder.Write("t", SafetensorsBytes(kValid, "abcdefghIJKL"));
  ASSERT_OK_AND_ASSIGN(SafetensorsFile file, SafetensorsFile::Open(path));
  SafetensorsFile moved = std::move(file);
  ASSERT_OK_AND_ASSIGN(const std::span<const uint8_t> bytes,
                       moved.Bytes(moved.header().tensors()[1]));
  EXPECT_EQ(std::string(bytes.begin(), bytes.end()), "IJKL");
}

TEST(SafetensorsFileTest, RefusesAFileWithoutALength) {
  const TestFolder folder;
  EXPECT_THAT(
      SafetensorsFile::Open(folder.Write("t", "1234567")),
      StatusIs(StatusCode::kInvalidArgument,
               AllOf(HasSubstr(folder.path()), HasSubstr("has 7 bytes"))));
}

TEST(SafetensorsFileTest, RefusesAHeaderAboveTheLimit) {
  const TestFolder folder;
  std::string bytes = SafetensorsBytes("{}", "");
  bytes[4] = 1;  // 4 GiB
  EXPECT_THAT(
      SafetensorsFile::Open(folder.Write("t", bytes)),
      StatusIs(StatusCode::kInvalidArgument,
               AllOf(HasSubstr("4294967298"), HasSubstr("at most 100000000"))));
}

TEST(SafetensorsFileTest, RefusesAHeaderBeyondTheFile) {
  const TestFolder folder;
  std::string bytes = SafetensorsBytes("{}", "");
  bytes[0] = 3;
  EXPECT_THAT(SafetensorsFile::Open(folder.Write("t", bytes)),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("length is 3 bytes"),
                             HasSubstr("only 2 follow"))));
}

TEST(SafetensorsFileTest, RefusesEveryPrefixOfAFile) {
  const TestFolder folder;
  const std::string whole = SafetensorsBytes(kValid, "abcdefghIJKL");
  for (size_t keep = 0; keep < whole.size(); ++keep) {
    EXPECT_THAT(
        SafetensorsFile::Open(folder.Write("t", whole.substr(0, keep))),
        StatusIs(StatusCode::kInvalidArgument, HasSubstr(folder.path())))
        << keep;
  }
}

TEST(SafetensorsFileTest, RefusesAFolderAndAMissingFile) {
  const TestFolder folder;
  EXPECT_THAT(
      SafetensorsFile::Open(folder.path()),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("not a regular file")));
  EXPECT_THAT(SafetensorsFile::Open(folder.At("none")),
              StatusIs(StatusCode::kNotFound, HasSubstr("none")));
}

TEST(SafetensorsFileTest, RefusesAFileThatShrankBeforeItsBytesAreAskedFor) {
  const TestFolder folder;
  const std::string path =
      folder.Write("t", SafetensorsBytes(kValid, "abcdefghIJKL"));
  ASSERT_OK_AND_ASSIGN(SafetensorsFile file, SafetensorsFile::Open(path));
  ASSERT_EQ(truncate(path.c_str(), 20), 0);
  EXPECT_THAT(
      file.Bytes(file.header().tensors()[0]),
      StatusIs(StatusCode::kFailedPrecondition, HasSubstr("now has 20")));
}

TEST(SafetensorsHeadTest, IsReadBackAndAligned) {
  std::vector<SafetensorsTensor> tensors(2);
  tensors[0].name = "w";
  tensors[0].type = StoredType::kI16;
  tensors[0].rank = 2;
  tensors[0].dims = {3, 5};
  tensors[1].name = "s";
  tensors[1].type = StoredType::kF32;
  const std::string head = MakeSafetensorsHead(tensors, {{"layer", "3"}});
  EXPECT_THAT(head, HasSubstr(R"("__metadata__":{"layer":"3"})"));
  EXPECT_EQ(head.size() % 64, 0u);
  const TestFolder folder;
  ASSERT_OK_AND_ASSIGN(
      const SafetensorsFile file,
      SafetensorsFile::Open(folder.Write("t", head + std::string(34, 'x'))));
  ASSERT_EQ(file.header().tensors().size(), 2u);
  EXPECT_EQ(file.header().tensors()[0].TypeAndShape(), "I16 [3, 5]");
  EXPECT_EQ(file.header().tensors()[1].begin, 30u);
}

}  // namespace
}  // namespace kiln
