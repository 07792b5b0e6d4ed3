#include "templates/formats/describe.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "templates/formats/exl3.h"
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
                   const std::string& value, const std::string& rule,
                   StatusCode code = StatusCode::kInvalidArgument) {
  EXPECT_THAT(Describe(Config("qwen3_moe", 2), tensors),
              StatusIs(code, AllOf(HasSubstr(tensor), HasSubstr(value),
                                   HasSubstr(rule))));
}

// A checkpoint without a fault that no template serves.
void ExpectNotServed(const TestTensors& tensors, const std::string& tensor,
                     const std::string& value, const std::string& rule) {
  ExpectRefused(tensors, tensor, value, rule, StatusCode::kFailedPrecondition);
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

// What one family calls its things.
struct FamilyCase {
  const char* model_type;
  TestNaming naming;
  int64_t first_layer;  // with routed experts
  std::string more;     // of its configuration
};

class DescribeFamilyTest : public ::testing::TestWithParam<FamilyCase> {};

std::vector<FamilyCase> FamilyCases() {
  const std::string first_dense =
      ", \"first_k_dense_replace\": 1, \"n_shared_experts\": 1";
  return {
      {"qwen3_moe", {}, 0, ", \"decoder_sparse_step\": 1"},
      {"mixtral",
       {"model.", "block_sparse_moe.experts", "w1", "w3", "w2"},
       0,
       ""},
      {"deepseek_v2", {}, 1, first_dense + ", \"moe_layer_freq\": 1"},
      {"deepseek_v3", {}, 1, first_dense + ", \"moe_layer_freq\": 1"},
      {"glm4_moe", {}, 1, first_dense},
      {"olmoe", {}, 0, ""},
      {"kimi_k2", {}, 1, first_dense + ", \"moe_layer_freq\": 1"},
  };
}

INSTANTIATE_TEST_SUITE_P(Families, DescribeFamilyTest,
                         ::testing::ValuesIn(FamilyCases()),
                         [](const auto& which) {
                           std::string name = which.param.model_type;
                           std::erase(name, '_');
                           return name;
                         });

TEST_P(DescribeFamilyTest, RatesRanksPrefixesAndCodebooksAreTold) {
  FamilyCase family = GetParam();
  const int64_t first = family.first_layer;
  for (const char* prefix : {"model.", "model.language_model."}) {
    family.naming.prefix = prefix;
    TestTensors tensors;
    AddLayers(family.naming, {first, first + 2}, {3, 4, 5, "mul1"}, &tensors);
    AddLayers(family.naming, {first + 1}, {2, 2, 2, "mul1"}, &tensors);
    tensors[absl::StrCat(prefix, "layers.", first,
                         ".mlp.shared_experts.gate_proj.weight")] = {
        "F16", {1}, "ab"};
    for (const char* codebook : {"", ", \"codebook\": \"mul1\""}) {
      const std::string config =
          Config(family.model_type, first + 3,
                 family.more +
                     ", \"quantization_config\": {\"quant_method\": "
                     "\"exl3\", \"bits\": 3.5" +
                     codebook + "}");
      ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                           Describe(config, tensors, 2));
      ASSERT_EQ(manifest.requests.size(), 2u);
      EXPECT_THAT(manifest.requests[0].layers, ElementsAre(first, first + 2));
      EXPECT_EQ(
          manifest.requests[0].geometry.ToString(),
          "fused_moe H128 I128 E3 k2 exl3-mul1 K3/4/5 silu w4a16 bf16 i32");
      EXPECT_THAT(manifest.requests[1].layers, ElementsAre(first + 1));
      EXPECT_EQ(manifest.requests[1].geometry.ToString(),
                "fused_moe H128 I128 E3 k2 exl3-mul1 K2 silu w4a16 bf16 i32");
    }
  }
}

TEST_P(DescribeFamilyTest, ARefusalNamesTheFirstTensorConcerned) {
  const FamilyCase& family = GetParam();
  TestTensors tensors;
  AddLayers(family.naming, {family.first_layer}, {}, &tensors);
  const std::string config =
      Config(family.model_type, family.first_layer + 1, family.more);
  // Experts 1 and 2 both differ from the first.
  for (const uint64_t expert : {2, 1}) {
    testing::AddExl3(testing::ExpertKey(family.naming, family.first_layer,
                                        expert, family.naming.up),
                     kHidden, kIntermediate, 6, "mcg", 7, &tensors);
  }
  EXPECT_THAT(
      Describe(config, tensors),
      StatusIs(StatusCode::kFailedPrecondition,
               AllOf(HasSubstr(absl::StrCat(
                         "tensor \"",
                         testing::ExpertKey(family.naming, family.first_layer,
                                            1, family.naming.up),
                         ".trellis\" has 6 bits")),
                     HasSubstr("experts of mixed rates"))));
}

// GPT-OSS as EXL3 files have it: single experts with biases, sizes that are
// padded to multiples of 128.
TEST(DescribeTest, RefusesGptOssAndNamesItsFirstTensor) {
  constexpr int64_t kPadded = 256;
  TestTensors tensors;
  for (uint64_t expert = 0; expert < 2; ++expert) {
    for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
      const std::string key = testing::ExpertKey({}, 0, expert, projection);
      testing::AddExl3(key, kPadded, kPadded, 4, "mul1", expert, &tensors);
      tensors[key + ".bias"] = {"F16", {kPadded}, std::string(2 * kPadded, 0)};
    }
  }
  tensors["model.layers.0.mlp.router.weight"] = {"F16", {2}, "abcd"};
  tensors["model.layers.0.self_attn.sinks"] = {"F16", {2}, "abcd"};
  const std::string config =
      "{\"architectures\": [\"GptOssForCausalLM\"], \"model_type\": "
      "\"gpt_oss\", \"hidden_act\": \"silu\", \"hidden_size\": 180, "
      "\"intermediate_size\": 180, \"num_local_experts\": 2, "
      "\"num_experts_per_tok\": 2, \"experts_per_token\": 2, "
      "\"num_hidden_layers\": 1, \"swiglu_limit\": 7.0}";
  EXPECT_THAT(
      Describe(config, tensors),
      StatusIs(
          StatusCode::kFailedPrecondition,
          AllOf(HasSubstr("model_type \"gpt_oss\" has experts that compute"),
                HasSubstr("clamped at 7"), HasSubstr("add biases"),
                HasSubstr("the first tensor concerned is \"model.layers.0."
                          "mlp.experts.0.down_proj.bias\""))));

  // As it was published: stacked experts in MXFP4.
  TestTensors published;
  for (const char* layer : {"model.layers.1.", "model.layers.0."}) {
    for (const char* part :
         {"gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias"}) {
      published[absl::StrCat(layer, "mlp.experts.", part)] = {"U8", {1}, "a"};
    }
  }
  EXPECT_THAT(Describe(config, published),
              StatusIs(StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("add biases"),
                             HasSubstr("\"model.layers.0.mlp.experts."
                                       "gate_up_proj_bias\""))));
}

// Of a form that is not Llama's.
TEST(DescribeTest, RefusesAnUnknownDenseModelAndNamesItsFirstMatrix) {
  TestTensors tensors;
  for (const char* key :
       {"model.layers.10.mlp.down_proj", "model.layers.2.self_attn.qkv_proj",
        "model.layers.2.self_attn.o_proj"}) {
    testing::AddExl3(key, 128, 128, 4, "mcg", 1, &tensors);
  }
  tensors["lm_head.weight"] = {"F16", {1, 1}, "ab"};
  tensors["model.layers.0.self_attn.q_proj.weight"] = {"F16", {1, 1}, "ab"};
  EXPECT_THAT(Describe("{\"model_type\": \"phi3\"}", tensors),
              StatusIs(StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("is no known dense model"),
                             HasSubstr("the first tensor concerned is "
                                       "\"model.layers.2.self_attn.o_proj."
                                       "trellis\""))));
}

// No template serves the op linear: a manifest with such requests could not be
// prewarmed.
TEST(DescribeTest, TheMatricesOfAttentionAreNotDescribedBesideExperts) {
  TestTensors tensors = QwenTensors();
  testing::AddExl3("model.layers.0.self_attn.q_proj", kHidden, 256, 4, "mcg", 1,
                   &tensors);
  ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                       Describe(Config("qwen3_moe", 2), tensors));
  ASSERT_EQ(manifest.requests.size(), 1u);
  EXPECT_EQ(manifest.requests[0].name, "moe");
}

TEST(DescribeTest, RefusalsOfTheConfigurationNameTheFirstExpertsTensor) {
  const std::string config = Config("qwen3_moe", 2);
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string text = config;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos);
    return text.replace(at, from.size(), to);
  };
  for (const std::string& text :
       {changed("\"silu\"", "\"gelu\""),
        changed("\"silu\"", "\"silu\", \"swiglu_limit\": 7"),
        changed("qwen3_moe", "new_moe"),
        changed("\"silu\"",
                "\"silu\", \"quantization_config\": {\"quant_method\": "
                "\"fp8\"}")}) {
    EXPECT_THAT(
        Describe(text, QwenTensors()),
        StatusIs(StatusCode::kFailedPrecondition,
                 HasSubstr("the first tensor concerned is \"model.layers.0."
                           "mlp.experts.0.down_proj.mcg\"")))
        << text;
  }
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
                             HasSubstr("possible with --tp: 1, 2"))));
  EXPECT_THAT(ChannelsPerRank("size", 768, 4),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("possible with --tp: 1, 2, 3, 6")));
  EXPECT_THAT(ChannelsPerRank("size", 200, 1),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("200 is not a multiple of 128")));
}

TEST(DescribeTest, Row41RefusesMixedRatesInsideALayer) {
  TestTensors tensors = QwenTensors();
  testing::AddExl3("model.layers.1.mlp.experts.2.up_proj", kHidden,
                   kIntermediate, 3, "mcg", 7, &tensors);
  ExpectNotServed(
      tensors, "\"model.layers.1.mlp.experts.2.up_proj.trellis\"", "3 bits",
      "\"model.layers.1.mlp.experts.0.up_proj.trellis\" of the same "
      "layer has 4 bits; experts of mixed rates");
}

TEST(DescribeTest, Row41RefusesMixedCodebooksInsideALayer) {
  TestTensors tensors = QwenTensors();
  tensors.erase("model.layers.1.mlp.experts.1.down_proj.mcg");
  ExpectNotServed(tensors, "\"model.layers.1.mlp.experts.1.down_proj.trellis\"",
                  "codebook 3inst", "has codebook mcg");
}

TEST(DescribeTest, Row22RefusesMarkersThatContradictTheConfiguration) {
  const std::string config =
      Config("qwen3_moe", 2,
             ", \"quantization_config\": {\"quant_method\": \"exl3\","
             " \"codebook\": \"mul1\"}");
  EXPECT_THAT(
      Describe(config, QwenTensors()),
      StatusIs(StatusCode::kInvalidArgument,
               AllOf(HasSubstr("experts.0.gate_proj.trellis\" has by its "
                               "marker the codebook mcg"),
                     HasSubstr("says mul1"))));
  // Without a marker it is 3inst, whatever the configuration wishes.
  TestTensors tensors;
  AddLayers({}, {0, 1}, {4, 4, 4, "3inst"}, &tensors);
  EXPECT_THAT(
      Describe(config, tensors),
      StatusIs(StatusCode::kInvalidArgument,
               AllOf(HasSubstr("experts.0.gate_proj.trellis\" has no marker "
                               "beside it, which means codebook 3inst"),
                     HasSubstr("says mul1"))));
}

TEST(DescribeTest, Row16RefusesAMissingExpert) {
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

TEST(DescribeTest, Row16RefusesAnIncompleteGroup) {
  TestTensors tensors = QwenTensors();
  tensors.erase("model.layers.0.mlp.experts.1.gate_proj.trellis");
  ExpectRefused(tensors, "\"model.layers.0.mlp.experts.1.gate_proj\"", "",
                "lacks .trellis");
}

TEST(DescribeTest, Row41RefusesAnExpertBeyondTheConfiguration) {
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
  ExpectNotServed(tensors, "\"model.layers.0.mlp.experts.gate_up_proj\"", "",
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

TEST(DescribeTest, Row16RefusesAnotherGeometryThanTheConfigurations) {
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
  ExpectNotServed(tensors, "\"model.layers.0.mlp.experts.0.up_proj.bias\"", "",
                  "fused_moe adds none");
}

TEST(DescribeTest, RefusesUnquantisedExperts) {
  TestTensors tensors;
  tensors["model.layers.0.mlp.experts.0.up_proj.weight"] = {"BF16", {1}, "ab"};
  ExpectNotServed(tensors, "\"model.layers.0.mlp.experts.0.up_proj.weight\"",
                  "BF16 [1]", "only trellis weights are served");
}

TEST(DescribeTest, RefusesAFolderWithoutConfiguration) {
  const TestFolder folder;
  WriteCheckpoint(folder, QwenTensors(), 1);
  EXPECT_THAT(DescribeCheckpoint(folder.path(), {}),
              StatusIs(StatusCode::kNotFound, HasSubstr("config.json")));
}

// The time is printed for people, and containers_bench measures it; the limit
// is loose on purpose, since tests share their machine.
TEST(DescribeTest, AHundredShardsAreReadInAFractionOfASecond) {
  const TestFolder folder;
  testing::WriteLargeCheckpoint(folder);
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                       DescribeCheckpoint(folder.path(), {}));
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin)
          .count();
  EXPECT_EQ(manifest.requests.size(), 1u);
  EXPECT_EQ(manifest.requests[0].layers.size(), 48u);
  std::printf("described 100 shards in %.1f ms\n", 1e3 * seconds);
  EXPECT_LT(seconds, 2);
}

}  // namespace
}  // namespace kiln
