// Dense models: what describe says of them, and what it refuses.

#include "templates/formats/dense_layers.h"

#include <gtest/gtest.h>

#include <map>

#include "absl/strings/str_cat.h"
#include "templates/formats/describe.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::AddBias;
using ::kiln::testing::AddDenseLayer;
using ::kiln::testing::AddExl3;
using ::kiln::testing::DenseConfigJson;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestDense;
using ::kiln::testing::TestFolder;
using ::kiln::testing::TestTensors;
using ::kiln::testing::WriteCheckpoint;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Two layers at 4 bits, MCG; negative tests change one thing.
TestTensors Llama() {
  TestTensors tensors;
  AddDenseLayer({}, 0, &tensors);
  AddDenseLayer({}, 1, &tensors);
  tensors["model.embed_tokens.weight"] = {"F16", {2}, "abcd"};
  tensors["model.layers.0.input_layernorm.weight"] = {"F16", {1}, "ab"};
  tensors["model.layers.0.self_attn.q_norm.weight"] = {"F16", {1}, "ab"};
  tensors["lm_head.weight"] = {"F16", {1, 1}, "ab"};
  return tensors;
}

absl::StatusOr<Manifest> Describe(const TestTensors& tensors, int64_t ranks = 1,
                                  const std::string& more = "",
                                  const std::string& model_type = "llama") {
  const TestFolder folder;
  folder.Write("config.json", DenseConfigJson(model_type, {}, 2, more));
  WriteCheckpoint(folder, tensors, 2);
  return DescribeCheckpoint(folder.path(), {.tensor_parallel = ranks});
}

// "q_proj 0,1 linear [256, 384] ...": one line for each request.
std::vector<std::string> Lines(const Manifest& manifest) {
  std::vector<std::string> lines;
  for (const Request& request : manifest.requests) {
    std::string line = absl::StrCat(request.name, " ");
    for (const int64_t layer : request.layers) {
      absl::StrAppend(&line, layer, " ");
    }
    lines.push_back(absl::StrCat(line, request.geometry.ToString()));
  }
  return lines;
}

void ExpectRefused(const TestTensors& tensors, const std::string& tensor,
                   const std::string& rule,
                   StatusCode code = StatusCode::kInvalidArgument) {
  EXPECT_THAT(Describe(tensors),
              StatusIs(code, AllOf(HasSubstr(tensor), HasSubstr(rule))));
}

void Erase(const std::string& key, TestTensors* tensors) {
  for (const char* part : {"trellis", "suh", "svh", "mcg"}) {
    ASSERT_EQ(tensors->erase(absl::StrCat(key, ".", part)), 1u) << key;
  }
}

TEST(DenseLayersTest, ADenseModelHasARequestForEachProjection) {
  for (const char* type : {"llama", "mistral", "qwen2", "qwen3"}) {
    ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                         Describe(Llama(), 1, "", type));
    EXPECT_THAT(
        Lines(manifest),
        ElementsAre("q_proj 0 1 linear [256, 384] exl3-mcg K4 w4a16 bf16",
                    "k_proj 0 1 linear [256, 128] exl3-mcg K4 w4a16 bf16",
                    "v_proj 0 1 linear [256, 128] exl3-mcg K4 w4a16 bf16",
                    "o_proj 0 1 linear [384, 256] exl3-mcg K4 w4a16 bf16",
                    "gate_proj 0 1 linear [256, 512] exl3-mcg K4 w4a16 bf16",
                    "up_proj 0 1 linear [256, 512] exl3-mcg K4 w4a16 bf16",
                    "down_proj 0 1 linear [512, 256] exl3-mcg K4 w4a16 bf16"));
    EXPECT_THAT(
        manifest.requests[0].capacities,
        ElementsAre(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096));
  }
}

// Gate and up, and keys and values, are raced once.
TEST(DenseLayersTest, EqualMatricesSharePlans) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, Describe(Llama()));
  ASSERT_OK_AND_ASSIGN(const std::vector<PlannedRequest> planned,
                       Canonicalize(manifest, 0));
  std::map<std::string, std::vector<std::string>> names;
  for (const PlannedRequest& request : planned) {
    names[request.names.front()] = request.names;
  }
  EXPECT_EQ(planned.size(), 5u);
  EXPECT_THAT(names["gate_proj"], ElementsAre("gate_proj", "up_proj"));
  EXPECT_THAT(names["k_proj"], ElementsAre("k_proj", "v_proj"));
}

TEST(DenseLayersTest, MixedRatesCodebooksAndBiasesGetTheirOwnRequests) {
  TestTensors tensors = Llama();
  AddExl3("model.layers.1.self_attn.q_proj", 256, 384, 5, "mcg", 7, &tensors);
  Erase("model.layers.0.mlp.up_proj", &tensors);
  AddExl3("model.layers.0.mlp.up_proj", 256, 512, 4, "mul1", 7, &tensors);
  AddBias("model.layers.1.self_attn.v_proj", 128, 3, &tensors);
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, Describe(tensors));
  EXPECT_THAT(
      Lines(manifest),
      ElementsAre("q_proj 0 linear [256, 384] exl3-mcg K4 w4a16 bf16",
                  "q_proj-1 1 linear [256, 384] exl3-mcg K5 w4a16 bf16",
                  "k_proj 0 1 linear [256, 128] exl3-mcg K4 w4a16 bf16",
                  "v_proj 0 linear [256, 128] exl3-mcg K4 w4a16 bf16",
                  "v_proj-1 1 linear [256, 128] exl3-mcg K4 w4a16 bf16 bias",
                  "o_proj 0 1 linear [384, 256] exl3-mcg K4 w4a16 bf16",
                  "gate_proj 0 1 linear [256, 512] exl3-mcg K4 w4a16 bf16",
                  "up_proj 0 linear [256, 512] exl3-mul1 K4 w4a16 bf16",
                  "up_proj-1 1 linear [256, 512] exl3-mcg K4 w4a16 bf16",
                  "down_proj 0 1 linear [512, 256] exl3-mcg K4 w4a16 bf16"));
}

// The vocabulary of 1000 is padded to whole blocks.
TEST(DenseLayersTest, AQuantisedHeadIsTheLayerBehindTheLast) {
  for (const char* key : {"lm_head", "language_model.lm_head"}) {
    TestTensors tensors = Llama();
    tensors.erase("lm_head.weight");
    AddExl3(key, 256, 1024, 6, "mcg", 9, &tensors);
    ASSERT_OK_AND_ASSIGN(const Manifest manifest, Describe(tensors));
    ASSERT_EQ(manifest.requests.size(), 8u);
    EXPECT_EQ(Lines(manifest).back(),
              "lm_head 2 linear [256, 1024] exl3-mcg K6 w4a16 bf16");
  }
}

TEST(DenseLayersTest, TheBiasOfAPlainHeadIsPassedOver) {
  TestTensors tensors = Llama();
  AddBias("lm_head", 1000, 1, &tensors);
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, Describe(tensors));
  EXPECT_EQ(manifest.requests.size(), 7u);
}

TEST(DenseLayersTest, TheTextModelMayStandUnderOtherPrefixes) {
  for (const char* prefix : {"model.language_model.", "language_model.model.",
                             "language_model.", ""}) {
    TestTensors tensors;
    AddDenseLayer({.prefix = prefix}, 0, &tensors);
    AddDenseLayer({.prefix = prefix}, 1, &tensors);
    EXPECT_OK(Describe(tensors)) << prefix;
  }
}

TEST(DenseLayersTest, ItsTextIsAManifestWithoutLoss) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, Describe(Llama()));
  const std::string json = ManifestToJson(manifest);
  ASSERT_OK_AND_ASSIGN(const Manifest parsed, ParseManifest(json, "m"));
  EXPECT_EQ(ManifestToJson(parsed), json);
}

// Two heads of keys and values, and 512 channels of queries.
TestTensors Wide(const TestDense& dense) {
  TestTensors tensors;
  AddDenseLayer(dense, 0, &tensors);
  AddExl3("lm_head", 256, 1024, 6, "mcg", 9, &tensors);
  return tensors;
}

absl::StatusOr<Manifest> DescribeWide(int64_t ranks) {
  const TestDense dense = {.query = 512, .key_value = 256};
  const TestFolder folder;
  folder.Write("config.json", DenseConfigJson("llama", dense, 1));
  WriteCheckpoint(folder, Wide(dense), 1);
  return DescribeCheckpoint(folder.path(), {.tensor_parallel = ranks});
}

TEST(DenseLayersTest, RanksDivideOutputsButForThoseThatTheyAddUp) {
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, DescribeWide(2));
  EXPECT_THAT(
      Lines(manifest),
      ElementsAre("q_proj 0 linear [256, 256] exl3-mcg K4 w4a16 bf16",
                  "k_proj 0 linear [256, 128] exl3-mcg K4 w4a16 bf16",
                  "v_proj 0 linear [256, 128] exl3-mcg K4 w4a16 bf16",
                  "o_proj 0 linear [256, 256] exl3-mcg K4 w4a16 bf16",
                  "gate_proj 0 linear [256, 256] exl3-mcg K4 w4a16 bf16",
                  "up_proj 0 linear [256, 256] exl3-mcg K4 w4a16 bf16",
                  "down_proj 0 linear [256, 256] exl3-mcg K4 w4a16 bf16",
                  "lm_head 1 linear [256, 1024] exl3-mcg K6 w4a16 bf16"));
}

TEST(DenseLayersTest, RefusesRanksThatCutABlockAndNamesTheTensor) {
  EXPECT_THAT(
      DescribeWide(4),
      StatusIs(StatusCode::kInvalidArgument,
               HasSubstr("tensor \"model.layers.0.self_attn.k_proj.trellis\": "
                         "output size 256 cannot be split over 4 ranks: each "
                         "needs the same multiple of 128 channels (the "
                         "Hadamard block); possible with --tp: 1, 2")));
  TestTensors tensors = Llama();
  EXPECT_THAT(Describe(tensors, 3),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("self_attn.k_proj.trellis\": output size 128 "
                                 "cannot be split over 3 ranks")));
  DenseMatrix down;
  down.projection = 6;
  SafetensorsTensor trellis;
  trellis.name = "down_proj.trellis";
  down.matrix.in = 384;
  down.matrix.out = 512;
  down.matrix.tensors.trellis = &trellis;
  EXPECT_THAT(down.Geometry(2),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("tensor \"down_proj.trellis\": input size 384 "
                                 "cannot be split over 2 ranks")));
}

TEST(DenseLayersTest, RefusesAMissingProjection) {
  TestTensors tensors = Llama();
  Erase("model.layers.1.mlp.up_proj", &tensors);
  ExpectRefused(tensors, "layer 1 lacks \"model.layers.1.mlp.up_proj.trellis\"",
                "config.json says 2 layers");
}

TEST(DenseLayersTest, RefusesAMissingBiasThatTheConfigurationPromises) {
  const auto describe = [](TestTensors tensors, const std::string& key) {
    return Describe(tensors, 1, absl::StrCat(", \"", key, "\": true"));
  };
  EXPECT_THAT(
      describe(Llama(), "attention_bias"),
      StatusIs(StatusCode::kInvalidArgument,
               AllOf(HasSubstr("layer 0 lacks "
                               "\"model.layers.0.self_attn.q_proj.bias\""),
                     HasSubstr("\"attention_bias\": true"))));
  EXPECT_THAT(describe(Llama(), "mlp_bias"),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("\"model.layers.0.mlp.gate_proj.bias\""),
                             HasSubstr("\"mlp_bias\": true"))));
  TestTensors tensors = Llama();
  for (const int layer : {0, 1}) {
    for (const auto& [projection, out] :
         {std::pair{"q", 384}, {"k", 128}, {"v", 128}, {"o", 256}}) {
      AddBias(absl::StrCat("model.layers.", layer, ".self_attn.", projection,
                           "_proj"),
              static_cast<uint64_t>(out), 5, &tensors);
    }
  }
  EXPECT_OK(describe(tensors, "attention_bias"));
  EXPECT_THAT(Describe(Llama(), 1, R"(, "mlp_bias": "yes")"),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("\"mlp_bias\" is \"yes\", must be true")));
}

TEST(DenseLayersTest, Row23RefusesAnIncompleteMatrix) {
  TestTensors tensors = Llama();
  tensors.erase("model.layers.1.mlp.up_proj.trellis");
  ExpectRefused(tensors, "\"model.layers.1.mlp.up_proj\"", "lacks .trellis");
}

TEST(DenseLayersTest, Row23RefusesATrellisOfFourDimensions) {
  TestTensors tensors = Llama();
  tensors["model.layers.0.mlp.up_proj.trellis"].shape = {1, 16, 32, 64};
  ExpectRefused(tensors, "\"model.layers.0.mlp.up_proj.trellis\"",
                "is I16 [1, 16, 32, 64], must be I16 [in/16, out/16, 16 K]");
}

TEST(DenseLayersTest, Row23RefusesChannelsThatFillNoBlock) {
  TestTensors tensors = Llama();
  // As many bytes: 256 input channels become 64.
  tensors["model.layers.0.self_attn.k_proj.trellis"].shape = {4, 32, 64};
  ExpectRefused(tensors, "\"model.layers.0.self_attn.k_proj.trellis\"",
                "4 tiles of 16 input channels, must be 8 or a multiple");
}

TEST(DenseLayersTest, Row23RefusesScalesOfAnotherLength) {
  TestTensors tensors = Llama();
  tensors["model.layers.0.mlp.down_proj.suh"] =
      tensors["model.layers.0.mlp.down_proj.svh"];
  ExpectRefused(tensors, "\"model.layers.0.mlp.down_proj.suh\"",
                "is F16 [256], must be F16 [512]");
}

TEST(DenseLayersTest, Row23RefusesAnotherShapeThanTheConfigurations) {
  TestTensors tensors = Llama();
  AddExl3("model.layers.1.self_attn.o_proj", 256, 256, 4, "mcg", 7, &tensors);
  ExpectRefused(tensors, "\"model.layers.1.self_attn.o_proj.trellis\"",
                "is a matrix [256, 256], must be [384, 256] by config.json");
}

TEST(DenseLayersTest, RefusesAHeadOfAnotherShape) {
  TestTensors tensors = Llama();
  tensors.erase("lm_head.weight");
  AddExl3("lm_head", 256, 1152, 6, "mcg", 9, &tensors);
  ExpectRefused(tensors, "\"lm_head.trellis\"",
                "is a matrix [256, 1152], must be [256, 1024]");
}

TEST(DenseLayersTest, RefusesAHeadInBothForms) {
  TestTensors tensors = Llama();
  AddExl3("lm_head", 256, 1024, 6, "mcg", 9, &tensors);
  ExpectRefused(tensors, "\"lm_head.trellis\"",
                "stands beside \"lm_head.weight\", only one may exist");
}

TEST(DenseLayersTest, RefusesABiasOfAnotherLength) {
  TestTensors tensors = Llama();
  AddBias("model.layers.0.self_attn.q_proj", 256, 1, &tensors);
  ExpectRefused(tensors, "\"model.layers.0.self_attn.q_proj.bias\"",
                "is F16 [256], must be F16 or F32 [384]");
}

TEST(DenseLayersTest, RefusesALayerBeyondTheConfiguration) {
  TestTensors tensors = Llama();
  AddDenseLayer({}, 2, &tensors);
  ExpectRefused(tensors, "\"model.layers.2.mlp.down_proj.mcg\"",
                "belongs to layer 2, config.json says 2 layers");
}

TEST(DenseLayersTest, RefusesALayerUnderTwoPrefixes) {
  TestTensors tensors = Llama();
  AddDenseLayer({.prefix = "language_model."}, 0, &tensors);
  ExpectRefused(tensors, "model.layers.0.mlp.down_proj.mcg\"",
                "which is meant is unclear");
}

TEST(DenseLayersTest, RefusesPlainWeightsOfAProjection) {
  TestTensors tensors = Llama();
  tensors["model.layers.1.mlp.up_proj.weight"] = {"F16", {1}, "ab"};
  ExpectRefused(tensors, "\"model.layers.1.mlp.up_proj.weight\"",
                "only trellis weights are served",
                StatusCode::kFailedPrecondition);
}

TEST(DenseLayersTest, RefusesATrellisOfNoKnownProjection) {
  for (const char* key :
       {"model.layers.0.self_attn.qkv_proj", "visual.blocks.0.attn.qkv"}) {
    TestTensors tensors = Llama();
    AddExl3(key, 128, 128, 4, "mcg", 1, &tensors);
    ExpectRefused(tensors, absl::StrCat("\"", key, ".trellis\""),
                  "is a trellis of no known projection; known: "
                  "self_attn.q_proj, self_attn.k_proj",
                  StatusCode::kFailedPrecondition);
  }
}

TEST(DenseLayersTest, Row22RefusesMarkersThatContradictTheConfiguration) {
  EXPECT_THAT(
      Describe(Llama(), 1,
               ", \"quantization_config\": {\"quant_method\": \"exl3\", "
               "\"codebook\": \"3inst\"}"),
      StatusIs(StatusCode::kInvalidArgument,
               AllOf(HasSubstr("layers.0.self_attn.q_proj.trellis\" has by its "
                               "marker the codebook mcg"),
                     HasSubstr("says 3inst"))));
}

}  // namespace
}  // namespace kiln
