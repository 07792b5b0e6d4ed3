#include "templates/formats/prepare.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "templates/formats/trellis_source.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestFolder;
using ::kiln::testing::TestTensors;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kConfig[] = R"({"model_type": "qwen3_moe", "hidden_act": "silu",
  "hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 3,
  "num_experts_per_tok": 2, "num_hidden_layers": 2, "mlp_only_layers": [0]})";

TestTensors Tensors() {
  TestTensors tensors;
  testing::AddExperts({}, 1, 128, 256, 3, {2, 3, 4, "mul1"}, &tensors);
  return tensors;
}

void WriteModel(const TestFolder& folder, const TestTensors& tensors) {
  folder.Write("config.json", kConfig);
  testing::WriteCheckpoint(folder, tensors, 2);
}

TEST(PrepareTest, WritesTheTensorsOfEveryRank) {
  const TestFolder folder;
  WriteModel(folder, Tensors());
  for (const int64_t ranks : {1, 2}) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      ASSERT_OK_AND_ASSIGN(
          const PreparedLayer prepared,
          PrepareLayer(folder.path(), folder.At("out/deep"),
                       {.layer = 1, .rank = rank, .ranks = ranks}));
      EXPECT_EQ(prepared.path, folder.At("out/deep/layer-00001") +
                                   (ranks == 1  ? ".safetensors"
                                    : rank == 0 ? "-rank-0-of-2.safetensors"
                                                : "-rank-1-of-2.safetensors"));
      EXPECT_EQ(prepared.bytes, std::filesystem::file_size(prepared.path));
      EXPECT_EQ(prepared.layout->intermediate, 256 / ranks);
      ASSERT_OK_AND_ASSIGN(const RequestGeometry geometry,
                           ServedGeometry(*prepared.layout));
      ASSERT_OK_AND_ASSIGN(SafetensorsFile file,
                           SafetensorsFile::Open(prepared.path));
      const std::vector<uint64_t> bytes = FusedMoeBytes(geometry, 1);
      ASSERT_EQ(file.header().tensors().size(), kTrellisSlots.size());
      for (size_t i = 0; i < kTrellisSlots.size(); ++i) {
        EXPECT_EQ(file.header().tensors()[i].bytes(),
                  bytes[static_cast<size_t>(kTrellisSlots[i])]);
      }
    }
  }
}

TEST(PrepareTest, TheFileHoldsTheStackedExperts) {
  const TestFolder folder;
  const TestTensors tensors = Tensors();
  WriteModel(folder, tensors);
  ASSERT_OK_AND_ASSIGN(
      const PreparedLayer prepared,
      PrepareLayer(folder.path(), folder.At("out"), {.layer = 1}));
  ASSERT_OK_AND_ASSIGN(SafetensorsFile file,
                       SafetensorsFile::Open(prepared.path));
  const SafetensorsTensor& up = file.header().tensors()[1];
  EXPECT_EQ(up.name, "w_up");
  EXPECT_EQ(up.TypeAndShape(), "I16 [3, 8, 16, 48]");
  std::string expected;
  for (uint64_t e = 0; e < 3; ++e) {
    expected +=
        tensors.at(testing::ExpertKey({}, 1, e, "up_proj.trellis")).bytes;
  }
  ASSERT_OK_AND_ASSIGN(const std::span<const uint8_t> bytes, file.Bytes(up));
  EXPECT_TRUE(std::string(bytes.begin(), bytes.end()) == expected);
}

TEST(PrepareTest, RefusesALayerWithoutExperts) {
  const TestFolder folder;
  WriteModel(folder, Tensors());
  EXPECT_THAT(PrepareLayer(folder.path(), folder.At("out"), {.layer = 0}),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(folder.path()),
                             HasSubstr("layer 0 has no routed experts"),
                             HasSubstr("that have: 1"))));
}

TEST(PrepareTest, LeavesNothingBehindWhenItRefuses) {
  const TestFolder folder;
  TestTensors tensors = Tensors();
  tensors[testing::ExpertKey({}, 1, 2, "up_proj.mul1")].bytes = "abcd";
  WriteModel(folder, tensors);
  EXPECT_THAT(PrepareLayer(folder.path(), folder.At("out"), {.layer = 1}),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("must hold 0x83dcd12d")));
  EXPECT_FALSE(std::filesystem::exists(folder.At("out")));
}

TEST(PrepareTest, ReportsAFolderThatCannotBeWritten) {
  const TestFolder folder;
  WriteModel(folder, Tensors());
  EXPECT_THAT(
      PrepareLayer(folder.path(), folder.At("config.json"), {.layer = 1}),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("not a folder")));
}

}  // namespace
}  // namespace kiln
