#include "templates/formats/describe.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::AddExperts;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestFolder;
using ::kiln::testing::TestNaming;
using ::kiln::testing::TestRates;
using ::kiln::testing::TestTensors;
using ::kiln::testing::WriteCheckpoint;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kHidden = 128;
constexpr int64_t kIntermediate = 256;
constexpr uint64_t kExperts = 3;

// A config.json of a family for H 128, I 256, 3 experts, top 2.
std::string Config(const std::string& model_type, int64_t layers,
                   const std::string& more = "") {
  const bool one_size = model_type == "mixtral" || model_type == "olmoe";
  const char* experts = model_type == "mixtral" ? "num_local_experts"
                        : model_type == "qwen3_moe" || model_type == "olmoe"
                            ? "num_experts"
                            : "n_routed_experts";
  return absl::StrCat(
      "{\"model_type\": \"", model_type, "\", \"hidden_act\": \"silu\", ",
      "\"hidden_size\": ", kHidden, ", \"",
      one_size ? "intermediate_size" : "moe_intermediate_size",
      "\": ", kIntermediate, ", \"", experts, "\": ", kExperts,
      ", \"num_experts_per_tok\": 2, \"torch_dtype\": \"bfloat16\", ",
      "\"num_hidden_layers\": ", layers, more, "}");
}

void AddLayers(const TestNaming& naming, const std::vector<int64_t>& layers,
               const TestRates& rates, TestTensors* tensors) {
  for (const int64_t layer : layers) {
    AddExperts(naming, layer, kHidden, kIntermediate, kExperts, rates, tensors);
  }
}

// Two layers of Qwen3-MoE at 4 bits, MCG; negative tests change one thing.
TestTensors QwenTensors() {
  TestTensors tensors;
  AddLayers({}, {0, 1}, {}, &tensors);
  tensors["model.embed_tokens.weight"] = {"F16", {2}, "abcd"};
  tensors["model.layers.0.mlp.gate.weight"] = {"F16", {1}, "ab"};
  return tensors;
}

absl::StatusOr<Manifest> Describe(const std::string& config,
                                  const TestTensors& tensors, int64_t ranks = 1,
                                  size_t shards = 1) {
  const TestFolder folder;
  folder.Write("config.json", config);
  WriteCheckpoint(folder, tensors, shards);
  return DescribeCheckpoint(folder.path(), {.tensor_parallel = ranks});
}

void ExpectRefused(const TestTensors& tensors, const std::string& tensor,
                   const std::string& value, const std::string& rule) {
  EXPECT_THAT(
      Describe(Config("qwen3_moe", 2), tensors),
      StatusIs(StatusCode::kInvalidArgument,
               AllOf(HasSubstr(tensor), HasSubstr(value), HasSubstr(rule))));
}

// Renames one tensor.
void Rename(const std::string& from, const std::string& to,
            TestTensors* tensors) {
  ASSERT_TRUE(tensors->contains(from)) << from;
  (*tensors)[to] = tensors->at(from);
  tensors->erase(from);
}

TEST(DescribeTest, Qwen3MoeIsOneRequestOfAllItsLayers) {
  for (const size_t shards : {1, 3}) {
    ASSERT_OK_AND_ASSIGN(
        const Manifest manifest,
        Describe(Config("qwen3_moe", 2), QwenTensors(), 1, shards));
    ASSERT_EQ(manifest.requests.size(), 1u);
    const Request& request = manifest.requests[0];
    EXPECT_EQ(request.name, "moe");
    EXPECT_THAT(request.layers, ElementsAre(0, 1));
    EXPECT_THAT(request.capacities, ElementsAre(1, 2, 4, 8, 16, 32, 64, 128,
                                                256, 512, 1024, 2048, 4096));
    EXPECT_EQ(request.geometry.ToString(),
              "fused_moe H128 I256 E3 k2 exl3-mcg K4 silu w4a16 bf16 i32");
  }
}

TEST(DescribeTest, ItsTextIsAManifestWithoutLoss) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                       Describe(Config("qwen3_moe", 2), QwenTensors()));
  const std::string json = ManifestToJson(manifest);
  ASSERT_OK_AND_ASSIGN(const Manifest parsed, ParseManifest(json, "m"));
  EXPECT_EQ(ManifestToJson(parsed), json);
}

TEST(DescribeTest, MixtralNamesItsProjectionsByNumber) {
  TestTensors tensors;
  AddLayers({"model.", "block_sparse_moe.experts", "w1", "w3", "w2"}, {0},
            {3, 4, 5, "mul1"}, &tensors);
  ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                       Describe(Config("mixtral", 1), tensors));
  ASSERT_EQ(manifest.requests.size(), 1u);
  EXPECT_EQ(manifest.requests[0].geometry.weights.bits,
            (Bits{.gate = 3, .up = 4, .down = 5}));
  EXPECT_EQ(manifest.requests[0].geometry.weights.codebook, Codebook::kMul1);
}

TEST(DescribeTest, DeepseekSkipsDenseLayersAndSharedExperts) {
  for (const char* type :
       {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe"}) {
    TestTensors tensors;
    AddLayers({}, {1, 2}, {}, &tensors);
    tensors["model.layers.0.mlp.gate_proj.weight"] = {"F16", {1}, "ab"};
    tensors["model.layers.1.mlp.shared_experts.gate_proj.weight"] = {
        "F16", {1}, "ab"};
    ASSERT_OK_AND_ASSIGN(
        const Manifest manifest,
        Describe(Config(type, 3, ", \"first_k_dense_replace\": 1"), tensors));
    ASSERT_EQ(manifest.requests.size(), 1u);
    EXPECT_THAT(manifest.requests[0].layers, ElementsAre(1, 2));
  }
}

TEST(DescribeTest, LayersOfMultiTokenPredictionAreServedWhereTheyExist) {
  const std::string config =
      Config("deepseek_v3", 2, ", \"num_nextn_predict_layers\": 1");
  TestTensors tensors;
  AddLayers({}, {0, 1}, {}, &tensors);
  ASSERT_OK_AND_ASSIGN(const Manifest without, Describe(config, tensors));
  EXPECT_THAT(without.requests[0].layers, ElementsAre(0, 1));
  AddLayers({}, {2}, {}, &tensors);
  ASSERT_OK_AND_ASSIGN(const Manifest with, Describe(config, tensors));
  EXPECT_THAT(with.requests[0].layers, ElementsAre(0, 1, 2));
}

TEST(DescribeTest, OlmoeWithoutMarkersIs3Inst) {
  TestTensors tensors;
  AddLayers({}, {0}, {2, 2, 2, "3inst"}, &tensors);
  ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                       Describe(Config("olmoe", 1), tensors));
  EXPECT_EQ(manifest.requests[0].geometry.weights.codebook, Codebook::k3Inst);
}

TEST(DescribeTest, OtherPrefixesOfTheTextModelAreKnown) {
  for (const char* prefix : {"model.language_model.", "language_model.model.",
                             "language_model.", ""}) {
    TestTensors tensors;
    AddLayers({.prefix = prefix}, {0}, {}, &tensors);
    EXPECT_OK(Describe(Config("qwen3_moe", 1), tensors)) << prefix;
  }
}

TEST(DescribeTest, LayersOfOtherRatesOrCodebooksGetTheirOwnRequests) {
  TestTensors tensors;
  AddLayers({}, {0, 3}, {4, 4, 4, "mcg"}, &tensors);
  AddLayers({}, {1}, {4, 4, 5, "mcg"}, &tensors);
  AddLayers({}, {2, 4}, {4, 4, 4, "3inst"}, &tensors);
  ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                       Describe(Config("qwen3_moe", 5), tensors));
  ASSERT_EQ(manifest.requests.size(), 3u);
  EXPECT_EQ(manifest.requests[0].name, "moe");
  EXPECT_THAT(manifest.requests[0].layers, ElementsAre(0, 3));
  EXPECT_EQ(manifest.requests[1].name, "moe-1");
  EXPECT_THAT(manifest.requests[1].layers, ElementsAre(1));
  EXPECT_EQ(manifest.requests[1].geometry.weights.bits.down, 5);
  EXPECT_EQ(manifest.requests[2].name, "moe-2");
  EXPECT_THAT(manifest.requests[2].layers, ElementsAre(2, 4));
}

TEST(DescribeTest, RanksDivideTheIntermediateChannels) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                       Describe(Config("qwen3_moe", 2), QwenTensors(), 2));
  EXPECT_EQ(manifest.requests[0].geometry.intermediate, 128);
}

TEST(DescribeTest, RefusesRanksThatCutAHadamardBlock) {
  EXPECT_THAT(Describe(Config("qwen3_moe", 2), QwenTensors(), 4),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("256 cannot be split over 4 ranks"),
                             HasSubstr("possible: 1, 2"))));
  EXPECT_THAT(IntermediatePerRank(768, 4),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("possible: 1, 2, 3, 6")));
  EXPECT_THAT(IntermediatePerRank(200, 1),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("200 is not a multiple of 128")));
}

TEST(DescribeTest, RefusesMixedRatesInsideALayer) {
  TestTensors tensors = QwenTensors();
  testing::AddExl3("model.layers.1.mlp.experts.2.up_proj", kHidden,
                   kIntermediate, 3, "mcg", 7, &tensors);
  ExpectRefused(tensors, "\"model.layers.1.mlp.experts.2.up_proj.trellis\"",
                "3 bits",
                "\"model.layers.1.mlp.experts.0.up_proj.trellis\" of the same "
                "layer has 4 bits; experts of mixed rates");
}

TEST(DescribeTest, RefusesMixedCodebooksInsideALayer) {
  TestTensors tensors = QwenTensors();
  tensors.erase("model.layers.1.mlp.experts.1.down_proj.mcg");
  ExpectRefused(tensors, "\"model.layers.1.mlp.experts.1.down_proj.trellis\"",
                "codebook 3inst", "has codebook mcg");
}

TEST(DescribeTest, RefusesMarkersThatContradictTheConfiguration) {
  EXPECT_THAT(
      Describe(Config("qwen3_moe", 2,
                      ", \"quantization_config\": {\"quant_method\": \"exl3\","
                      " \"codebook\": \"mul1\"}"),
               QwenTensors()),
      StatusIs(StatusCode::kInvalidArgument,
               AllOf(HasSubstr("has codebook mcg by its markers"),
                     HasSubstr("says mul1"))));
}

TEST(DescribeTest, RefusesAMissingExpert) {
  TestTensors tensors = QwenTensors();
  for (const char* part : {"trellis", "suh", "svh", "mcg"}) {
    tensors.erase(absl::StrCat("model.layers.1.mlp.experts.2.up_proj.", part));
  }
  ExpectRefused(
      tensors, "layer 1 lacks \"model.layers.1.mlp.experts.2.up_proj.trellis\"",
      "", "config.json says 3 experts");
}

TEST(DescribeTest, RefusesAMissingLayer) {
  TestTensors tensors;
  AddLayers({}, {0}, {}, &tensors);
  ExpectRefused(tensors, "layer 1 lacks",
                "\"model.layers.1.mlp.experts.0.gate_proj.trellis\"", "");
}

TEST(DescribeTest, RefusesAnIncompleteGroup) {
  TestTensors tensors = QwenTensors();
  tensors.erase("model.layers.0.mlp.experts.1.gate_proj.trellis");
  ExpectRefused(tensors, "\"model.layers.0.mlp.experts.1.gate_proj\"", "",
                "lacks .trellis");
}

TEST(DescribeTest, RefusesAnExpertBeyondTheConfiguration) {
  TestTensors tensors = QwenTensors();
  Rename("model.layers.0.mlp.experts.2.up_proj.suh",
         "model.layers.0.mlp.experts.3.up_proj.suh", &tensors);
  ExpectRefused(tensors, "\"model.layers.0.mlp.experts.3.up_proj.suh\"",
                "expert 3", "within 0..2");
}

TEST(DescribeTest, RefusesALayerBeyondTheConfiguration) {
  TestTensors tensors = QwenTensors();
  AddLayers({}, {2}, {}, &tensors);
  ExpectRefused(tensors, "\"model.layers.2.mlp.experts.0.down_proj.mcg\"",
                "layer 2", "no routed experts by config.json");
}

TEST(DescribeTest, RefusesStackedExperts) {
  TestTensors tensors = QwenTensors();
  tensors["model.layers.0.mlp.experts.gate_up_proj"] = {"F16", {1}, "ab"};
  ExpectRefused(tensors, "\"model.layers.0.mlp.experts.gate_up_proj\"", "",
                "stacked experts are not served");
}

TEST(DescribeTest, RefusesAnUnknownProjection) {
  TestTensors tensors = QwenTensors();
  Rename("model.layers.0.mlp.experts.2.up_proj.suh",
         "model.layers.0.mlp.experts.2.side_proj.suh", &tensors);
  ExpectRefused(tensors, "\"model.layers.0.mlp.experts.2.side_proj.suh\"", "",
                "projections: gate_proj, up_proj, down_proj");
}

TEST(DescribeTest, RefusesAnUnknownPrefix) {
  TestTensors tensors = QwenTensors();
  AddLayers({.prefix = "mtp."}, {0}, {}, &tensors);
  ExpectRefused(tensors, "\"mtp.layers.0.mlp.experts.0.down_proj.mcg\"", "",
                "is not \"layers.N\" after one of");
}

TEST(DescribeTest, RefusesALayerUnderTwoPrefixes) {
  TestTensors tensors = QwenTensors();
  AddLayers({.prefix = "language_model."}, {0}, {}, &tensors);
  ExpectRefused(tensors, "layers.0.mlp.experts.0.down_proj.mcg\"", "",
                "which is meant is unclear");
}

TEST(DescribeTest, RefusesAnotherGeometryThanTheConfigurations) {
  TestTensors tensors = QwenTensors();
  testing::AddExl3("model.layers.0.mlp.experts.1.down_proj", kHidden, kHidden,
                   4, "mcg", 7, &tensors);
  ExpectRefused(tensors, "\"model.layers.0.mlp.experts.1.down_proj.trellis\"",
                "[128, 128]", "must be [256, 128] by config.json");
}

TEST(DescribeTest, RefusesABias) {
  TestTensors tensors = QwenTensors();
  tensors["model.layers.0.mlp.experts.0.up_proj.bias"] = {
      "F16", {kIntermediate}, std::string(2 * kIntermediate, '\0')};
  ExpectRefused(tensors, "\"model.layers.0.mlp.experts.0.up_proj.bias\"", "",
                "fused_moe adds none");
}

TEST(DescribeTest, RefusesUnquantisedExperts) {
  TestTensors tensors;
  tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = {"BF16", {1}, "ab"};
  ExpectRefused(tensors, "\"model.layers.0.mlp.experts.0.up_proj.weight\"",
                "BF16 [1]", "only trellis weights are served");
}

TEST(DescribeTest, RefusesAFolderWithoutConfiguration) {
  const TestFolder folder;
  WriteCheckpoint(folder, QwenTensors(), 1);
  EXPECT_THAT(DescribeCheckpoint(folder.path(), {}),
              StatusIs(StatusCode::kNotFound, HasSubstr("config.json")));
}

// The shape of a large checkpoint: 48 layers of 64 experts in 100 shards,
// 36,864 tensors of experts, without room for their bytes: the files are
// sparse. The time is printed for people; the limit is loose on purpose, since
// tests share their machine.
TEST(DescribeTest, AHundredShardsAreReadInAFractionOfASecond) {
  const TestFolder folder;
  constexpr int kLayers = 48;
  constexpr int kManyExperts = 64;
  constexpr int kShards = 100;
  folder.Write("config.json",
               absl::StrCat("{\"model_type\": \"qwen3_moe\", \"hidden_act\": ",
                            "\"silu\", \"hidden_size\": 2048, ",
                            "\"moe_intermediate_size\": 768, ",
                            "\"num_experts\": ", kManyExperts,
                            ", \"num_experts_per_tok\": 8, ",
                            "\"num_hidden_layers\": ", kLayers, "}"));
  std::vector<std::string> heads(kShards);
  std::vector<uint64_t> sizes(kShards, 0);
  std::string map;
  int position = 0;
  const auto add = [&](const std::string& name, const std::string& type,
                       const std::string& shape, uint64_t bytes) {
    const auto shard = static_cast<size_t>(position++ / 4 % kShards);
    absl::StrAppend(&heads[shard], heads[shard].empty() ? "{" : ",", "\"", name,
                    "\":{\"dtype\":\"", type, "\",\"shape\":[", shape,
                    "],\"data_offsets\":[", sizes[shard], ",",
                    sizes[shard] + bytes, "]}");
    sizes[shard] += bytes;
    absl::StrAppend(&map, map.empty() ? "" : ",\n", "\"", name, "\": \"shard-",
                    shard, ".safetensors\"");
  };
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int expert = 0; expert < kManyExperts; ++expert) {
      for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
        const bool down = projection[0] == 'd';
        const uint64_t in = down ? 768 : 2048;
        const uint64_t out = down ? 2048 : 768;
        const std::string key = testing::ExpertKey(
            {}, layer, static_cast<uint64_t>(expert), projection);
        add(key + ".trellis", "I16",
            absl::StrCat(in / 16, ",", out / 16, ",64"), in * out / 2);
        add(key + ".suh", "F16", absl::StrCat(in), 2 * in);
        add(key + ".svh", "F16", absl::StrCat(out), 2 * out);
        add(key + ".mcg", "I32", "", 4);
      }
    }
  }
  for (size_t i = 0; i < kShards; ++i) {
    const std::string name = absl::StrCat("shard-", i, ".safetensors");
    const std::string head = testing::SafetensorsBytes(heads[i] + "}", "");
    folder.Write(name, head);
    ASSERT_EQ(truncate(folder.At(name).c_str(),
                       static_cast<off_t>(head.size() + sizes[i])),
              0);
  }
  folder.Write("model.safetensors.index.json",
               absl::StrCat("{\"weight_map\": {", map, "}}"));
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                       DescribeCheckpoint(folder.path(), {}));
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
          .count();
  EXPECT_EQ(manifest.requests.size(), 1u);
  EXPECT_EQ(manifest.requests[0].layers.size(), 48u);
  std::printf("described %d tensors in %d shards in %.1f ms\n", position,
              kShards, 1e3 * seconds);
  EXPECT_LT(seconds, 2);
}

}  // namespace
}  // namespace kiln
