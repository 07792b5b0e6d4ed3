#include "templates/formats/checkpoint.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::SafetensorsBytes;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestFolder;
using ::kiln::testing::TestTensors;
using ::kiln::testing::WriteCheckpoint;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kIndex[] = "model.safetensors.index.json";

TestTensors FourTensors() {
  TestTensors tensors;
  for (const char* name : {"a", "b", "c", "d"}) {
    tensors[name] = {"U8", {3}, std::string(3, name[0])};
  }
  return tensors;
}

// Index text over shard-0 (a, b) and shard-1 (c, d).
std::string Index(const std::string& map) {
  return absl::StrCat("{\"weight_map\": {", map, "}}");
}

absl::Status OpenWithIndex(const std::string& index) {
  const TestFolder folder;
  WriteCheckpoint(folder, FourTensors(), 2);
  folder.Write(kIndex, index);
  return Checkpoint::Open(folder.path()).status();
}

std::string Entry(const std::string& tensor, const std::string& shard) {
  return absl::StrCat("\"", tensor, "\":\"", shard, "\"");
}

const std::string kA = Entry("a", "shard-0.safetensors");
const std::string kB = Entry("b", "shard-0.safetensors");
const std::string kC = Entry("c", "shard-1.safetensors");
const std::string kD = Entry("d", "shard-1.safetensors");

TEST(CheckpointTest, FindsTensorsInEveryShard) {
  for (const size_t shards : {1, 2, 4}) {
    const TestFolder folder;
    WriteCheckpoint(folder, FourTensors(), shards);
    ASSERT_OK_AND_ASSIGN(Checkpoint checkpoint,
                         Checkpoint::Open(folder.path()));
    EXPECT_EQ(checkpoint.shards().size(), shards);
    for (const char* name : {"a", "b", "c", "d"}) {
      const SafetensorsTensor* tensor = checkpoint.Find(name);
      ASSERT_NE(tensor, nullptr) << name;
      ASSERT_OK_AND_ASSIGN(const std::span<const uint8_t> bytes,
                           checkpoint.Bytes(*tensor));
      EXPECT_EQ(std::string(bytes.begin(), bytes.end()),
                std::string(3, name[0]));
      EXPECT_THAT(checkpoint.PathOf(*tensor), HasSubstr(folder.path()));
    }
    EXPECT_EQ(checkpoint.Find("e"), nullptr);
  }
}

TEST(CheckpointTest, AcceptsTheIndexThatTheNegativeTestsChange) {
  EXPECT_OK(OpenWithIndex(Index(absl::StrCat(kA, ",", kB, ",", kC, ",", kD))));
}

TEST(CheckpointTest, RefusesAFolderWithoutTensors) {
  const TestFolder folder;
  EXPECT_THAT(Checkpoint::Open(folder.path()),
              StatusIs(StatusCode::kNotFound,
                       HasSubstr("neither model.safetensors.index.json nor "
                                 "model.safetensors")));
}

TEST(CheckpointTest, RefusesAnIndexThatNamesATensorNoShardHolds) {
  EXPECT_THAT(
      OpenWithIndex(Index(absl::StrCat(kA, ",", kB, ",", kC, ",", kD, ",",
                                       Entry("x", "shard-1.safetensors")))),
      StatusIs(StatusCode::kInvalidArgument,
               AllOf(HasSubstr("names tensor \"x\" in shard-1.safetensors"),
                     HasSubstr("does not hold it"))));
}

TEST(CheckpointTest, RefusesAShardTensorThatTheIndexLacks) {
  EXPECT_THAT(OpenWithIndex(Index(absl::StrCat(kA, ",", kB, ",", kC))),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("does not name tensor \"d\", which lies in "
                                 "shard-1.safetensors")));
}

TEST(CheckpointTest, RefusesAnIndexThatNamesTheWrongShard) {
  EXPECT_THAT(
      OpenWithIndex(Index(absl::StrCat(
          kA, ",", Entry("b", "shard-1.safetensors"), ",", kC, ",", kD))),
      StatusIs(StatusCode::kInvalidArgument,
               HasSubstr("tensor \"b\" lies in shard-1.safetensors, "
                         "but shard-0.safetensors holds it")));
}

TEST(CheckpointTest, RefusesATensorThatTwoShardsHold) {
  const TestFolder folder;
  WriteCheckpoint(folder, FourTensors(), 2);
  TestTensors again = {{"a", {"U8", {1}, "a"}},
                       {"c", {"U8", {1}, "c"}},
                       {"d", {"U8", {1}, "d"}}};
  folder.Write("shard-1.safetensors", SafetensorsBytes(again));
  EXPECT_THAT(Checkpoint::Open(folder.path()),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("tensor \"a\" lies in shard-0.safetensors, "
                                 "but shard-1.safetensors holds it")));
}

TEST(CheckpointTest, RefusesATensorThatTheIndexNamesTwice) {
  EXPECT_THAT(OpenWithIndex(Index(absl::StrCat(kA, ",", kA))),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("tensor \"a\" is named twice")));
}

TEST(CheckpointTest, RefusesAShardOutsideTheFolder) {
  for (const char* shard : {"../x", "/x", "a/b", "..", ".hidden", ""}) {
    EXPECT_THAT(OpenWithIndex(Index(Entry("a", shard))),
                StatusIs(StatusCode::kInvalidArgument,
                         HasSubstr("a file in the same folder")))
        << shard;
  }
}

TEST(CheckpointTest, RefusesAMissingShard) {
  EXPECT_THAT(OpenWithIndex(Index(Entry("a", "none.safetensors"))),
              StatusIs(StatusCode::kNotFound, HasSubstr("none.safetensors")));
}

TEST(CheckpointTest, RefusesADamagedShard) {
  const TestFolder folder;
  WriteCheckpoint(folder, FourTensors(), 2);
  folder.Write("shard-1.safetensors", "123");
  EXPECT_THAT(Checkpoint::Open(folder.path()),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("shard-1.safetensors: has 3 bytes")));
}

TEST(ShardIndexTest, RefusesWhatIsNotAnIndex) {
  for (const char* json :
       {"", "[]", "{}", "{\"weight_map\":[]}", "{\"weight_map\":{\"a\":1}}",
        "{\"weight_map\":{}}x", "{\"weight_map\":{},\"weight_map\":{}}",
        "{\"metadata\":{\"a\":}},\"weight_map\":{}}",
        "{\"map\":{},\"weight_map\":{}}"}) {
    EXPECT_THAT(ShardIndex::Parse(json),
                StatusIs(StatusCode::kInvalidArgument, ::testing::_))
        << json;
  }
  EXPECT_OK(ShardIndex::Parse("{\"metadata\":{},\"weight_map\":{}}"));
}

TEST(ShardIndexTest, RefusesTooManyShards) {
  std::string map;
  for (size_t i = 0; i <= kShardsMax; ++i) {
    absl::StrAppend(&map, i > 0 ? "," : "",
                    Entry(absl::StrCat("t", i), absl::StrCat("s", i)));
  }
  EXPECT_THAT(ShardIndex::Parse(Index(map)),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("more than 4096 shards")));
}

}  // namespace
}  // namespace kiln
