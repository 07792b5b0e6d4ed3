#include "templates/formats/model_config.h"

#include <gtest/gtest.h>

#include <variant>

#include "compiler/base/status_macros.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kQwen[] = R"({
 "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1,
 "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144,
 "mlp_only_layers": [], "model_type": "qwen3_moe",
 "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
 "num_hidden_layers": 4, "torch_dtype": "bfloat16",
 "quantization_config": {"quant_method": "exl3", "bits": 4.0,
                         "codebook": "mcg"}
})";

std::string Replaced(std::string text, const std::string& from,
                     const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

absl::StatusOr<ModelConfig> Changed(const std::string& from,
                                    const std::string& to) {
  return ParseModelConfig(Replaced(kQwen, from, to), "c.json");
}

TEST(ModelConfigTest, ReadsQwen3Moe) {
  ASSERT_OK_AND_ASSIGN(const ModelConfig config,
                       ParseModelConfig(kQwen, "c.json"));
  EXPECT_EQ(config.hidden, 2048);
  EXPECT_EQ(config.intermediate, 768);
  EXPECT_EQ(config.experts, 128);
  EXPECT_EQ(config.top_k, 8);
  EXPECT_EQ(config.io_dtype, DType::kBf16);
  EXPECT_EQ(config.codebook, Codebook::kMcg);
  EXPECT_EQ(config.naming.block, "mlp.experts");
  EXPECT_THAT(config.moe_layers, ElementsAre(0, 1, 2, 3));
  EXPECT_TRUE(config.extra_layers.empty());
}

TEST(ModelConfigTest, QwenCountsItsSparseStepFromOne) {
  ASSERT_OK_AND_ASSIGN(
      const ModelConfig config,
      Changed("\"decoder_sparse_step\": 1", "\"decoder_sparse_step\": 2"));
  EXPECT_THAT(config.moe_layers, ElementsAre(1, 3));
}

TEST(ModelConfigTest, QwenMayNameDenseLayers) {
  ASSERT_OK_AND_ASSIGN(
      const ModelConfig config,
      Changed("\"mlp_only_layers\": []", "\"mlp_only_layers\": [2, 0]"));
  EXPECT_THAT(config.moe_layers, ElementsAre(1, 3));
}

TEST(ModelConfigTest, ReadsMixtral) {
  ASSERT_OK_AND_ASSIGN(
      const ModelConfig config,
      ParseModelConfig(R"({"model_type": "mixtral", "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336,
        "num_local_experts": 8, "num_experts_per_tok": 2,
        "num_hidden_layers": 2, "torch_dtype": "float16"})",
                       "c.json"));
  EXPECT_EQ(config.intermediate, 14336);
  EXPECT_EQ(config.io_dtype, DType::kF16);
  EXPECT_EQ(config.naming.block, "block_sparse_moe.experts");
  EXPECT_THAT(config.naming.projections, ElementsAre("w1", "w3", "w2"));
  EXPECT_EQ(config.codebook, std::nullopt);
}

TEST(ModelConfigTest, ReadsDeepseekWithDenseAndExtraLayers) {
  for (const char* type :
       {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe"}) {
    ASSERT_OK_AND_ASSIGN(
        const ModelConfig config,
        ParseModelConfig(
            Replaced(R"({"model_type": "TYPE", "hidden_act": "silu",
        "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "moe_layer_freq": 1,
        "num_nextn_predict_layers": 1, "num_hidden_layers": 6})",
                     "TYPE", type),
            "c.json"));
    EXPECT_EQ(config.intermediate, 2048);
    EXPECT_THAT(config.moe_layers, ElementsAre(3, 4, 5));
    EXPECT_THAT(config.extra_layers, ElementsAre(6));
    EXPECT_EQ(config.io_dtype, DType::kBf16);
  }
}

TEST(ModelConfigTest, ReadsOlmoe) {
  ASSERT_OK_AND_ASSIGN(
      const ModelConfig config,
      ParseModelConfig(R"({"model_type": "olmoe", "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 1})",
                       "c.json"));
  EXPECT_EQ(config.intermediate, 1024);
  EXPECT_EQ(config.experts, 64);
}

TEST(ModelConfigTest, ReadsTheTextPartOfAVisionModel) {
  ASSERT_OK_AND_ASSIGN(
      const ModelConfig config,
      ParseModelConfig(R"({"model_type": "qwen3_vl_moe", "text_config": )" +
                           Replaced(kQwen, "qwen3_moe", "qwen3_vl_moe_text") +
                           "}",
                       "c.json"));
  EXPECT_EQ(config.model_type, "qwen3_vl_moe_text");
}

constexpr char kLlama[] = R"({
 "model_type": "llama", "hidden_act": "silu", "hidden_size": 4096,
 "intermediate_size": 14336, "num_attention_heads": 32,
 "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
 "torch_dtype": "float16",
 "quantization_config": {"quant_method": "exl3", "codebook": "mul1"}
})";

absl::StatusOr<DenseConfig> DenseOf(const std::string& text) {
  ASSIGN_OR_RETURN(const AnyModelConfig config,
                   ParseAnyModelConfig(text, "c.json"));
  EXPECT_TRUE(std::holds_alternative<DenseConfig>(config));
  return std::get<DenseConfig>(config);
}

TEST(DenseConfigTest, ReadsLlama) {
  ASSERT_OK_AND_ASSIGN(const DenseConfig config, DenseOf(kLlama));
  EXPECT_EQ(config.model_type, "llama");
  EXPECT_EQ(config.layers, 32);
  EXPECT_EQ(config.hidden, 4096);
  EXPECT_EQ(config.intermediate, 14336);
  EXPECT_EQ(config.query, 4096);
  EXPECT_EQ(config.key_value, 1024);
  EXPECT_EQ(config.vocabulary, 128256);
  EXPECT_EQ(config.io_dtype, DType::kF16);
  EXPECT_EQ(config.codebook, Codebook::kMul1);
}

TEST(DenseConfigTest, HeadsMayHaveASizeOfTheirOwn) {
  ASSERT_OK_AND_ASSIGN(const DenseConfig config,
                       DenseOf(Replaced(kLlama, "\"hidden_act\"",
                                        "\"head_dim\": 256, \"hidden_act\"")));
  EXPECT_EQ(config.query, 8192);
  EXPECT_EQ(config.key_value, 2048);
}

TEST(DenseConfigTest, WithoutANumberOfItsOwnEveryHeadHasKeysAndValues) {
  ASSERT_OK_AND_ASSIGN(
      const DenseConfig config,
      DenseOf(Replaced(kLlama, "\"num_key_value_heads\": 8,", "")));
  EXPECT_EQ(config.key_value, 4096);
}

TEST(DenseConfigTest, ReadsTheTextPartOfAVisionModel) {
  ASSERT_OK_AND_ASSIGN(
      const DenseConfig config,
      DenseOf(R"({"model_type": "qwen3_vl", "text_config": )" +
              Replaced(kLlama, "llama", "qwen3_vl_text") + "}"));
  EXPECT_EQ(config.model_type, "qwen3_vl_text");
}

TEST(DenseConfigTest, RefusesImpossibleNumbersAndMissingKeys) {
  const struct {
    const char* from;
    const char* to;
    const char* message;
  } cases[] = {
      {"\"num_attention_heads\": 32", "\"num_attention_heads\": 0",
       "0, must be within 1..4096"},
      {"\"num_key_value_heads\": 8", "\"num_key_value_heads\": 33",
       "33, must be within 1..32"},
      {"\"hidden_act\"", "\"head_dim\": 32769, \"hidden_act\"",
       "32769, must be within 1..32768"},
      {"\"num_hidden_layers\": 32", "\"num_hidden_layers\": 1024",
       "1024, must be within 1..1023"},
      {"\"vocab_size\": 128256", "\"vocab_size\": 1048577",
       "1048577, must be within 1..1048576"},
      {"\"intermediate_size\"", "\"ffn\"",
       "lacks the key \"intermediate_size\""},
  };

  for (const auto& c : cases) {
    EXPECT_THAT(ParseAnyModelConfig(Replaced(kLlama, c.from, c.to), "c.json"),
                StatusIs(StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("c.json:"), HasSubstr(c.message))));
  }
}

TEST(DenseConfigTest, Row35RefusesActivationsOfAnotherType) {
  EXPECT_THAT(
      ParseAnyModelConfig(Replaced(kLlama, "float16", "float32"), "c.json"),
      StatusIs(StatusCode::kInvalidArgument,
               HasSubstr("\"torch_dtype\" is \"float32\"")));
}

TEST(DenseConfigTest, RefusesAnotherQuantisation) {
  EXPECT_THAT(ParseAnyModelConfig(Replaced(kLlama, "exl3", "fp8"), "c.json"),
              StatusIs(StatusCode::kFailedPrecondition,
                       HasSubstr("\"quant_method\" is \"fp8\", only")));
}

TEST(DenseConfigTest, RefusesAModelOfAnotherFormWithTheKnownOnes) {
  EXPECT_THAT(
      ParseAnyModelConfig(R"({"model_type": "phi3"})", "c.json"),
      StatusIs(StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("\"phi3\" has no routed experts and is no known "
                               "dense model"),
                     HasSubstr("llama, mistral"))));
}

TEST(ModelConfigTest, RefusesADenseModelWhereExpertsAreMeant) {
  EXPECT_THAT(ParseModelConfig(kLlama, "c.json"),
              StatusIs(StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("\"llama\" has no routed experts"),
                             HasSubstr("linear"))));
}

TEST(ModelConfigTest, AnyModelMayHaveExperts) {
  ASSERT_OK_AND_ASSIGN(const AnyModelConfig config,
                       ParseAnyModelConfig(kQwen, "c.json"));
  ASSERT_TRUE(std::holds_alternative<ModelConfig>(config));
  EXPECT_EQ(std::get<ModelConfig>(config).experts, 128);
}

TEST(ModelConfigTest, RefusesGptOssWithTheReason) {
  EXPECT_THAT(
      Changed("qwen3_moe", "gpt_oss"),
      StatusIs(StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("clamped at 7"), HasSubstr("add biases"))));
}

TEST(ModelConfigTest, RefusesAnUnknownModelType) {
  EXPECT_THAT(Changed("qwen3_moe", "new_moe"),
              StatusIs(StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("\"new_moe\" is not known"),
                             HasSubstr("deepseek_v2, deepseek_v3"))));
}

TEST(ModelConfigTest, Row33RefusesALimitedActivation) {
  const std::string silu = "\"hidden_act\": \"silu\"";
  EXPECT_OK(Changed(silu, silu + ", \"swiglu_limit\": null"));
  EXPECT_THAT(Changed(silu, silu + ", \"swiglu_limit\": 7.0"),
              StatusIs(StatusCode::kFailedPrecondition,
                       HasSubstr("\"swiglu_limit\" is 7")));
}

TEST(ModelConfigTest, Row33RefusesAnotherActivation) {
  EXPECT_THAT(Changed("\"silu\"", "\"gelu\""),
              StatusIs(StatusCode::kFailedPrecondition,
                       HasSubstr("\"hidden_act\" is \"gelu\"")));
}

TEST(ModelConfigTest, RefusesAnotherQuantisation) {
  EXPECT_THAT(Changed("\"exl3\"", "\"fp8\""),
              StatusIs(StatusCode::kFailedPrecondition,
                       HasSubstr("\"quant_method\" is \"fp8\", only")));
}

TEST(ModelConfigTest, Row22RefusesAnUnknownCodebook) {
  EXPECT_THAT(Changed("\"mcg\"", "\"mcg2\""),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("\"mcg2\", must be one of \"3inst\", \"mcg\", "
                                 "\"mul1\"")));
}

TEST(ModelConfigTest, RefusesAMissingKeyWithItsPlace) {
  EXPECT_THAT(Changed("\"hidden_size\"", "\"hidden\""),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("c.json:1:1: "),
                             HasSubstr("lacks the key \"hidden_size\""))));
}

TEST(ModelConfigTest, RefusesImpossibleNumbers) {
  EXPECT_THAT(Changed("\"num_experts\": 128", "\"num_experts\": 1025"),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("1025, must be within 1..1024")));
  EXPECT_THAT(
      Changed("\"num_experts_per_tok\": 8", "\"num_experts_per_tok\": 33"),
      StatusIs(StatusCode::kInvalidArgument,
               HasSubstr("33, must be within 1..32")));
  EXPECT_THAT(Changed("\"num_hidden_layers\": 4", "\"num_hidden_layers\": 0"),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("0, must be within 1..1024")));
  EXPECT_THAT(
      Changed("\"hidden_size\": 2048", "\"hidden_size\": \"2048\""),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("must be an integer")));
}

TEST(ModelConfigTest, RefusesAModelWhoseLayersAreAllDense) {
  EXPECT_THAT(
      Changed("\"mlp_only_layers\": []", "\"mlp_only_layers\": [0, 1, 2, 3]"),
      StatusIs(StatusCode::kInvalidArgument,
               HasSubstr("no layer with routed experts")));
}

TEST(ModelConfigTest, Row35RefusesActivationsOfAnotherType) {
  EXPECT_THAT(Changed("\"bfloat16\"", "\"float32\""),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("\"torch_dtype\" is \"float32\"")));
}

}  // namespace
}  // namespace kiln
