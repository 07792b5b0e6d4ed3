// kiln describe and kiln prepare on BTX and QSRT folders.

#include <gtest/gtest.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "templates/formats/describe.h"
#include "templates/formats/prepare.h"
#include "templates/formats/trellis_source.h"
#include "tests/support/btx_writer.h"
#include "tests/support/qsrt_writer.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::BtxOptions;
using ::kiln::testing::QsrtOptions;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Layer 1 of 2 has experts, as BtxOptions says. Other quantisers describe
// themselves in quantization_config.
constexpr char kConfig[] = R"({"model_type": "qwen3_moe", "hidden_act": "silu",
  "hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 3,
  "num_experts_per_tok": 2, "num_hidden_layers": 2, "mlp_only_layers": [0],
  "quantization_config": {"quant_method": "btx"}})";

void WriteBtx(const TestFolder& folder, const BtxOptions& options) {
  testing::WriteBtx(folder, options, testing::MakeBtxFiles(options));
  folder.Write("config.json", kConfig);
}

void WriteQsrt(const TestFolder& folder, const QsrtOptions& options) {
  folder.Write(testing::QsrtName(options.layer),
               testing::QsrtFileBytes(options, testing::MakeQsrtFile(options)));
}

TEST(ContainersTest, DescribeMakesARequestOfUniformMcgLayers) {
  for (const bool per_expert : {false, true}) {
    const TestFolder folder;
    BtxOptions options;
    options.bits = 4;
    options.per_expert_rotations = per_expert;
    WriteBtx(folder, options);
    ASSERT_OK_AND_ASSIGN(
        const Manifest manifest,
        DescribeCheckpoint(folder.path(), {.tensor_parallel = 2}));
    ASSERT_EQ(manifest.requests.size(), 1u);
    const Request& request = manifest.requests[0];
    EXPECT_EQ(request.layers, std::vector<int64_t>{1});
    EXPECT_EQ(request.geometry.ToString(),
              absl::StrCat("fused_moe H256 I256 E3 k2 exl3-mcg K4 silu w4a16 "
                           "bf16 i32",
                           per_expert ? "" : " shared scales"));
  }
}

auto NotServed(const std::string& tensor, const std::string& reason) {
  return StatusIs(
      StatusCode::kFailedPrecondition,
      AllOf(HasSubstr(absl::StrCat(".safetensors: tensor \"", tensor, "\"")),
            HasSubstr(reason), HasSubstr("kiln prepare writes")));
}

TEST(ContainersTest, Row36DescribeSaysWhichTensorNoTemplateServes) {
  const TestFolder folder;
  const auto describe = [&](const BtxOptions& options) {
    WriteBtx(folder, options);
    return DescribeCheckpoint(folder.path(), {.tensor_parallel = 2}).status();
  };
  EXPECT_THAT(describe({.codebook = "sqg_e4m3"}),
              NotServed("atoms", "has the codebook sqg_e4m3"));
  EXPECT_THAT(describe({.codebook = "sqg_fp16", .bits = 5}),
              NotServed("atoms", "has the codebook sqg_fp16"));
  EXPECT_THAT(describe({.pair_kinds = {"P33", "P43"}}),
              NotServed("rates_fc1",
                        "has a pair of rates for each expert and "
                        "the codebook mcg"));
  EXPECT_THAT(
      describe(
          {.codebook = "sqg_e4m3", .hidden = 512, .bits = 2, .coupled = true}),
      NotServed("rotation_draws", "has a coupled Hadamard transform"));
  const TestFolder qsrt;
  WriteQsrt(qsrt, {});
  EXPECT_THAT(
      DescribeCheckpoint(qsrt.path(), {}).status(),
      StatusIs(StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("qsrt-layer-003.safetensors: is QSRT"),
                     HasSubstr("write the request of its 2 parts by hand, with "
                               "\"hidden\" 128"))));
}

TEST(ContainersTest, DescribeWritesARequestForPartsOfPairRates) {
  const TestFolder folder;
  WriteBtx(folder, {.codebook = "sqg_e4m3", .pair_kinds = {"P33", "P43"}});
  ASSERT_OK_AND_ASSIGN(
      const Manifest manifest,
      DescribeCheckpoint(folder.path(), {.tensor_parallel = 2}));
  ASSERT_EQ(manifest.requests.size(), 1u);
  const RequestGeometry& geometry = manifest.requests[0].geometry;
  EXPECT_EQ(geometry.weights.format, WeightFormat::kQsrt);
  EXPECT_EQ(geometry.qsrt.pairs, PairKinds::kP33P43);
  EXPECT_EQ(geometry.intermediate, 256);
  EXPECT_EQ(geometry.hidden, 256);
  EXPECT_TRUE(geometry.weights.shared_scales);
  EXPECT_EQ(geometry.recipe, Recipe::kW4A16);
  WriteBtx(folder, {.codebook = "sqg_e4m3", .pair_kinds = {"P33", "P24"}});
  ASSERT_OK_AND_ASSIGN(
      const Manifest other,
      DescribeCheckpoint(folder.path(), {.tensor_parallel = 2}));
  EXPECT_EQ(other.requests[0].geometry.qsrt.pairs, PairKinds::kP24P33);
  // One rank would have two pairs.
  EXPECT_THAT(DescribeCheckpoint(folder.path(), {}).status(),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("512 channels are 2 parts")));
}

TEST(ContainersTest, Row15DescribeRefusesAConfigurationThatDisagrees) {
  const TestFolder folder;
  WriteBtx(folder, {});
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string config = kConfig;
    const size_t at = config.find(from);
    EXPECT_NE(at, std::string::npos);
    config.replace(at, from.size(), to);
    folder.Write("config.json", config);
    return DescribeCheckpoint(folder.path(), {}).status();
  };
  const auto refused = [&](const std::string& text) {
    return StatusIs(StatusCode::kInvalidArgument, HasSubstr(text));
  };
  EXPECT_THAT(with("\"hidden_size\": 256", "\"hidden_size\": 128"),
              refused("has the hidden_size 256, config.json has 128"));
  EXPECT_THAT(
      with("\"moe_intermediate_size\": 512", "\"moe_intermediate_size\": 256"),
      refused("has the intermediate_size 512, config.json has 256"));
  EXPECT_THAT(with("\"num_experts\": 3", "\"num_experts\": 4"),
              refused("has the num_experts 3, config.json has 4"));
  EXPECT_THAT(with("[0]", "[1]"),
              refused("has layer 1, which has no routed experts"));
  EXPECT_THAT(with("[0]", "[]"), refused("lacks layer 0"));
  EXPECT_THAT(with("silu", "gelu"),
              StatusIs(StatusCode::kFailedPrecondition, HasSubstr("gelu")));
  for (const int64_t ranks : {0, -1, 3, 1 << 30}) {
    EXPECT_THAT(
        DescribeCheckpoint(folder.path(), {.tensor_parallel = ranks}).status(),
        refused("cannot be split"));
  }
}

TEST(ContainersTest, PrepareWritesTheTensorsOfABtxRank) {
  const TestFolder folder;
  WriteBtx(folder, {});
  for (const int64_t rank : {0, 1}) {
    ASSERT_OK_AND_ASSIGN(const PreparedLayer prepared,
                         PrepareLayer(folder.path(), folder.At("out"),
                                      {.layer = 1, .rank = rank, .ranks = 2}));
    EXPECT_EQ(prepared.description, "H256 I256 E3 mcg K3 shared scales");
    EXPECT_EQ(prepared.bytes, std::filesystem::file_size(prepared.path));
    ASSERT_OK_AND_ASSIGN(SafetensorsFile file,
                         SafetensorsFile::Open(prepared.path));
    ASSERT_EQ(file.header().tensors().size(), 7u);
    EXPECT_EQ(file.header().tensors()[0].TypeAndShape(), "I16 [3, 16, 16, 48]");
    EXPECT_EQ(file.header().tensors()[3].TypeAndShape(), "F16 [1, 256]");
    EXPECT_EQ(file.header().metadata().at("codebook"), "mcg");
    EXPECT_EQ(file.header().metadata().count("top_k"), 0u);
  }
}

TEST(ContainersTest, PrepareWritesTheRatesOfPairParts) {
  const TestFolder folder;
  WriteBtx(folder, {.codebook = "sqg_e4m3", .pair_kinds = {"P33", "P24"}});
  ASSERT_OK_AND_ASSIGN(const PreparedLayer prepared,
                       PrepareLayer(folder.path(), folder.At("out"),
                                    {.layer = 1, .rank = 1, .ranks = 2}));
  EXPECT_EQ(prepared.description,
            "H256 I256 E3 sqg_e4m3 pairs P24 P33 shared scales");
  ASSERT_OK_AND_ASSIGN(SafetensorsFile file,
                       SafetensorsFile::Open(prepared.path));
  ASSERT_EQ(file.header().tensors().size(), 11u);
  EXPECT_EQ(file.header().tensors()[7].name, "rates_fc1");
  EXPECT_EQ(file.header().tensors()[9].name, "modes_fc1");
  EXPECT_EQ(file.header().tensors()[9].TypeAndShape(), "I32 [3]");
  ASSERT_OK_AND_ASSIGN(const std::span<const uint8_t> modes,
                       file.Bytes(file.header().tensors()[9]));
  EXPECT_EQ(std::vector<uint8_t>(modes.begin(), modes.end()),
            (std::vector<uint8_t>{1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0}));
  ASSERT_OK_AND_ASSIGN(const std::span<const uint8_t> rates,
                       file.Bytes(file.header().tensors()[7]));
  EXPECT_EQ(std::vector<uint8_t>(rates.begin(), rates.end()),
            (std::vector<uint8_t>{0x24, 0x33, 0x24}));
  EXPECT_EQ(prepared.bytes, std::filesystem::file_size(prepared.path));
}

TEST(ContainersTest, PrepareWritesThePartsOfAQsrtLayer) {
  const TestFolder folder;
  WriteQsrt(folder, {});
  for (const int64_t part : {0, 1}) {
    ASSERT_OK_AND_ASSIGN(const PreparedLayer prepared,
                         PrepareLayer(folder.path(), folder.At("out"),
                                      {.layer = 3, .rank = part, .ranks = 2}));
    EXPECT_EQ(prepared.description,
              "H128 I256 E5 sqg_e4m3 pairs P24 P33 shared scales");
    EXPECT_OK(SafetensorsFile::Open(prepared.path).status());
  }
  EXPECT_THAT(
      PrepareLayer(folder.path(), folder.At("out"), {.layer = 3}).status(),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("are 2 parts")));
  EXPECT_THAT(
      PrepareLayer(folder.path(), folder.At("out"), {.layer = 4}).status(),
      StatusIs(StatusCode::kInvalidArgument,
               HasSubstr("has no qsrt-layer-004.safetensors; layers that it "
                         "has: 3")));
}

TEST(ContainersTest, PrepareLeavesNothingBehindWhenItRefuses) {
  const TestFolder folder;
  BtxOptions options;
  testing::BtxFiles files = testing::MakeBtxFiles(options);
  testing::WriteBtx(folder, options, files);
  std::string bytes = files.LayerBytes();
  bytes[bytes.size() - 1000] ^= 1;
  folder.Write(testing::BtxLayerName(1), bytes);
  EXPECT_THAT(
      PrepareLayer(folder.path(), folder.At("out"), {.layer = 1}).status(),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("has the SHA-256")));
  EXPECT_FALSE(std::filesystem::exists(folder.At("out")));
}

}  // namespace
}  // namespace kiln
