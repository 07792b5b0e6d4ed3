#include "templates/formats/model_config.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"
#include "compiler/spec/manifest.h"
#include "compiler/spec/object_reader.h"

namespace kiln {
namespace {

constexpr ExpertNaming kMlpExperts = {"mlp.experts",
                                      {"gate_proj", "up_proj", "down_proj"}};
constexpr ExpertNaming kMixtralExperts = {"block_sparse_moe.experts",
                                          {"w1", "w3", "w2"}};

// How the configuration says which layers have experts.
enum class LayerRule { kAll, kSparseStep, kFirstDense };

struct Family {
  absl::string_view model_type;
  const ExpertNaming* naming;
  absl::string_view intermediate_key;
  absl::string_view experts_key;
  LayerRule rule;
};

constexpr Family kFamilies[] = {
    {"deepseek_v2", &kMlpExperts, "moe_intermediate_size", "n_routed_experts",
     LayerRule::kFirstDense},
    {"deepseek_v3", &kMlpExperts, "moe_intermediate_size", "n_routed_experts",
     LayerRule::kFirstDense},
    {"glm4_moe", &kMlpExperts, "moe_intermediate_size", "n_routed_experts",
     LayerRule::kFirstDense},
    {"glm4v_moe_text", &kMlpExperts, "moe_intermediate_size",
     "n_routed_experts", LayerRule::kFirstDense},
    {"kimi_k2", &kMlpExperts, "moe_intermediate_size", "n_routed_experts",
     LayerRule::kFirstDense},
    {"mixtral", &kMixtralExperts, "intermediate_size", "num_local_experts",
     LayerRule::kAll},
    {"olmoe", &kMlpExperts, "intermediate_size", "num_experts",
     LayerRule::kAll},
    {"qwen2_moe", &kMlpExperts, "moe_intermediate_size", "num_experts",
     LayerRule::kSparseStep},
    {"qwen3_moe", &kMlpExperts, "moe_intermediate_size", "num_experts",
     LayerRule::kSparseStep},
    {"qwen3_vl_moe_text", &kMlpExperts, "moe_intermediate_size", "num_experts",
     LayerRule::kSparseStep},
};

// Those whose layers are made like Llama's.
constexpr absl::string_view kDenseFamilies[] = {
    "llama", "mistral", "qwen2", "qwen2_5_vl_text", "qwen3", "qwen3_vl_text"};

bool IsDense(absl::string_view model_type) {
  return std::find(std::begin(kDenseFamilies), std::end(kDenseFamilies),
                   model_type) != std::end(kDenseFamilies);
}

constexpr absl::string_view kExpertCountKeys[] = {
    "num_experts", "num_local_experts", "n_routed_experts"};

// As ObjectReader::Integer, `absent` where the key is missing or null.
absl::StatusOr<int64_t> IntegerOr(const ObjectReader& reader,
                                  absl::string_view key, int64_t absent,
                                  int64_t low, int64_t high) {
  const JsonNode* value = reader.Optional(key);
  if (value == nullptr || value->kind == JsonNode::Kind::kNull) return absent;
  return reader.Integer(key, low, high);
}

absl::Status NotServed(absl::string_view file, absl::string_view reason) {
  return absl::FailedPreconditionError(absl::StrCat(file, ": ", reason));
}

absl::StatusOr<const Family*> FindFamily(absl::string_view file,
                                         const JsonNode& node,
                                         absl::string_view model_type) {
  for (const Family& family : kFamilies) {
    if (family.model_type == model_type) return &family;
  }
  const std::string named = absl::StrCat("model_type ", JsonQuote(model_type));
  if (model_type == "gpt_oss") {
    // "hidden_act" says silu there; its experts compute something else.
    const JsonNode* limit = node.Find("swiglu_limit");
    return NotServed(
        file,
        absl::StrCat(
            named, " has experts that compute (up + 1) gate / (1 + exp(-1.702 ",
            "gate)) with gate and up clamped at ",
            limit == nullptr ? "7" : JsonExcerpt(*limit),
            ", and that add biases; templates of this build compute silu, ",
            "without a limit and without biases"));
  }
  const bool has_experts = std::any_of(
      std::begin(kExpertCountKeys), std::end(kExpertCountKeys),
      [&](absl::string_view key) {
        const JsonNode* value = node.Find(key);
        return value != nullptr && value->kind != JsonNode::Kind::kNull;
      });
  if (IsDense(model_type)) {
    return NotServed(file,
                     absl::StrCat(named,
                                  " has no routed experts, only matrices of "
                                  "the op linear"));
  }
  if (!has_experts) {
    return NotServed(
        file,
        absl::StrCat(named, " has no routed experts and is no known dense ",
                     "model; known: ", absl::StrJoin(kDenseFamilies, ", ")));
  }
  return NotServed(
      file,
      absl::StrCat(named, " is not known; known: ",
                   absl::StrJoin(kFamilies, ", ",
                                 [](std::string* out, const Family& family) {
                                   absl::StrAppend(out, family.model_type);
                                 })));
}

// The layers with experts among `count`.
absl::StatusOr<std::vector<int64_t>> MoeLayers(const ObjectReader& reader,
                                               const JsonNode& node,
                                               LayerRule rule, int64_t count) {
  int64_t first = 0;
  int64_t step = 1;
  std::vector<int64_t> dense;
  if (rule == LayerRule::kFirstDense) {
    ASSIGN_OR_RETURN(first,
                     IntegerOr(reader, "first_k_dense_replace", 0, 0, count));
    ASSIGN_OR_RETURN(step,
                     IntegerOr(reader, "moe_layer_freq", 1, 1, kLayersMax));
  } else if (rule == LayerRule::kSparseStep) {
    ASSIGN_OR_RETURN(
        step, IntegerOr(reader, "decoder_sparse_step", 1, 1, kLayersMax));
    const JsonNode* list = node.Find("mlp_only_layers");
    if (list != nullptr && list->kind != JsonNode::Kind::kNull) {
      if (list->kind != JsonNode::Kind::kArray) {
        return reader.Error(
            *list, absl::StrCat("\"mlp_only_layers\" must be an array, found ",
                                JsonExcerpt(*list)));
      }
      for (const JsonNode& item : list->items) {
        if (item.kind != JsonNode::Kind::kInteger) {
          return reader.Error(
              item, absl::StrCat("\"mlp_only_layers\" has ", JsonExcerpt(item),
                                 ", must have integers"));
        }
        dense.push_back(item.integer);
      }
    }
  }
  std::sort(dense.begin(), dense.end());
  // Qwen counts the step from 1, DeepSeek from 0.
  const int64_t shift = rule == LayerRule::kSparseStep ? 1 : 0;
  std::vector<int64_t> layers;
  for (int64_t layer = first; layer < count; ++layer) {
    if ((layer + shift) % step != 0) continue;
    if (std::binary_search(dense.begin(), dense.end(), layer)) continue;
    layers.push_back(layer);
  }
  if (layers.empty()) {
    return reader.Error(node, "leaves no layer with routed experts");
  }
  return layers;
}

absl::StatusOr<DType> IoDType(absl::string_view file, const JsonNode& node) {
  for (const absl::string_view key : {"torch_dtype", "dtype"}) {
    const JsonNode* value = node.Find(key);
    if (value == nullptr || value->kind == JsonNode::Kind::kNull) continue;
    if (value->kind == JsonNode::Kind::kString) {
      if (value->text == "bfloat16") return DType::kBf16;
      if (value->text == "float16") return DType::kF16;
    }
    return JsonError(
        file, *value,
        absl::StrCat("\"", key, "\" is ", JsonExcerpt(*value),
                     ", must be \"bfloat16\" or \"float16\": activations of ",
                     "other types are not served"));
  }
  return DType::kBf16;
}

// The codebook that "quantization_config" names, where it names one.
absl::StatusOr<std::optional<Codebook>> ReadQuantization(absl::string_view file,
                                                         const JsonNode& root) {
  const JsonNode* node = root.Find("quantization_config");
  if (node == nullptr || node->kind == JsonNode::Kind::kNull) {
    return std::nullopt;
  }
  const ObjectReader reader(file, *node, "\"quantization_config\"");
  if (node->kind != JsonNode::Kind::kObject) {
    return reader.Refuse("quantization_config", *node, "must be an object");
  }
  ASSIGN_OR_RETURN(const JsonNode* method,
                   reader.Required("quant_method", JsonNode::Kind::kString));
  if (method->text != "exl3") {
    return NotServed(file,
                     absl::StrCat("\"quant_method\" is ", JsonExcerpt(*method),
                                  ", only \"exl3\" is served"));
  }
  if (reader.Optional("codebook") == nullptr) return std::nullopt;
  ASSIGN_OR_RETURN(
      const Codebook codebook,
      reader.Word<Codebook>("codebook", {{"3inst", Codebook::k3Inst},
                                         {"mcg", Codebook::kMcg},
                                         {"mul1", Codebook::kMul1}}));
  return codebook;
}

absl::StatusOr<JsonNode> ParseRoot(absl::string_view text,
                                   absl::string_view file) {
  ASSIGN_OR_RETURN(JsonNode root, ParseJson(text, file));
  if (root.kind == JsonNode::Kind::kObject) return root;
  return JsonError(
      file, root, absl::StrCat("must be an object, found ", JsonExcerpt(root)));
}

// The part about the language model.
const JsonNode& TextPart(const JsonNode& root) {
  const JsonNode* nested = root.Find("text_config");
  const bool has = nested != nullptr && nested->kind == JsonNode::Kind::kObject;
  return has ? *nested : root;
}

absl::StatusOr<std::string> ModelType(const ObjectReader& reader) {
  ASSIGN_OR_RETURN(const JsonNode* type,
                   reader.Required("model_type", JsonNode::Kind::kString));
  return type->text;
}

// False where the key is missing or null.
absl::StatusOr<bool> BoolOf(absl::string_view file, const ObjectReader& reader,
                            absl::string_view key) {
  const JsonNode* value = reader.Optional(key);
  if (value == nullptr || value->kind == JsonNode::Kind::kNull) return false;
  if (value->kind == JsonNode::Kind::kBool) return value->boolean;
  return JsonError(file, *value,
                   absl::StrCat("\"", key, "\" is ", JsonExcerpt(*value),
                                ", must be true or false"));
}

absl::StatusOr<DenseConfig> ReadDense(absl::string_view file,
                                      const JsonNode& root) {
  const JsonNode& node = TextPart(root);
  const ObjectReader reader(file, node, "configuration");
  DenseConfig config;
  ASSIGN_OR_RETURN(config.model_type, ModelType(reader));
  ASSIGN_OR_RETURN(config.codebook, ReadQuantization(file, root));
  ASSIGN_OR_RETURN(config.hidden, reader.Integer("hidden_size", 1, kHiddenMax));
  ASSIGN_OR_RETURN(config.intermediate,
                   reader.Integer("intermediate_size", 1, kIntermediateMax));
  ASSIGN_OR_RETURN(const int64_t heads,
                   reader.Integer("num_attention_heads", 1, config.hidden));
  ASSIGN_OR_RETURN(const int64_t key_value_heads,
                   IntegerOr(reader, "num_key_value_heads", heads, 1, heads));
  ASSIGN_OR_RETURN(const int64_t channels,
                   IntegerOr(reader, "head_dim", config.hidden / heads, 1,
                             kFeaturesMax / heads));
  config.query = heads * channels;
  config.key_value = key_value_heads * channels;
  ASSIGN_OR_RETURN(config.attention_bias,
                   BoolOf(file, reader, "attention_bias"));
  ASSIGN_OR_RETURN(config.mlp_bias, BoolOf(file, reader, "mlp_bias"));
  ASSIGN_OR_RETURN(config.vocabulary,
                   reader.Integer("vocab_size", 1, kFeaturesMax));
  ASSIGN_OR_RETURN(config.io_dtype, IoDType(file, node));
  // One layer more, the head, is to have a number in a manifest.
  ASSIGN_OR_RETURN(config.layers,
                   reader.Integer("num_hidden_layers", 1, kLayersMax - 1));
  return config;
}

absl::StatusOr<ModelConfig> ReadExperts(absl::string_view file,
                                        const JsonNode& root,
                                        Quantization quantization) {
  const JsonNode& node = TextPart(root);
  const ObjectReader reader(file, node, "configuration");
  ModelConfig config;
  ASSIGN_OR_RETURN(config.model_type, ModelType(reader));
  ASSIGN_OR_RETURN(const Family* family,
                   FindFamily(file, node, config.model_type));
  config.naming = *family->naming;
  if (quantization == Quantization::kExl3) {
    ASSIGN_OR_RETURN(config.codebook, ReadQuantization(file, root));
  }
  ASSIGN_OR_RETURN(config.hidden, reader.Integer("hidden_size", 1, kHiddenMax));
  ASSIGN_OR_RETURN(config.intermediate, reader.Integer(family->intermediate_key,
                                                       1, kIntermediateMax));
  ASSIGN_OR_RETURN(config.experts,
                   reader.Integer(family->experts_key, 1, kExpertsMax));
  ASSIGN_OR_RETURN(config.top_k,
                   reader.Integer("num_experts_per_tok", 1,
                                  std::min(kTopKMax, config.experts)));
  ASSIGN_OR_RETURN(const JsonNode* activation,
                   reader.Required("hidden_act", JsonNode::Kind::kString));
  if (activation->text != "silu") {
    return NotServed(
        file, absl::StrCat("\"hidden_act\" is ", JsonExcerpt(*activation),
                           ", only \"silu\" is served"));
  }
  const JsonNode* limit = node.Find("swiglu_limit");
  if (limit != nullptr && limit->kind != JsonNode::Kind::kNull) {
    return NotServed(
        file, absl::StrCat("\"swiglu_limit\" is ", JsonExcerpt(*limit),
                           ", only activations without a limit are served"));
  }
  ASSIGN_OR_RETURN(config.io_dtype, IoDType(file, node));
  ASSIGN_OR_RETURN(const int64_t count,
                   reader.Integer("num_hidden_layers", 1, kLayersMax));
  ASSIGN_OR_RETURN(config.moe_layers,
                   MoeLayers(reader, node, family->rule, count));
  ASSIGN_OR_RETURN(
      const int64_t extra,
      IntegerOr(reader, "num_nextn_predict_layers", 0, 0, kLayersMax - count));
  for (int64_t i = 0; i < extra; ++i) config.extra_layers.push_back(count + i);
  return config;
}

}  // namespace

absl::StatusOr<AnyModelConfig> ParseAnyModelConfig(absl::string_view text,
                                                   absl::string_view file) {
  ASSIGN_OR_RETURN(const JsonNode root, ParseRoot(text, file));
  ASSIGN_OR_RETURN(
      const std::string type,
      ModelType(ObjectReader(file, TextPart(root), "configuration")));
  if (IsDense(type)) return ReadDense(file, root);
  return ReadExperts(file, root, Quantization::kExl3);
}

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view text,
                                             absl::string_view file,
                                             Quantization quantization) {
  ASSIGN_OR_RETURN(const JsonNode root, ParseRoot(text, file));
  return ReadExperts(file, root, quantization);
}

}  // namespace kiln
