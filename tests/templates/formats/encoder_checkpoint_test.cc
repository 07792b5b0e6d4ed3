// Real-valued weights through the encoder, the EXL3 reader and the prepared
// layer, and what an expert layer then computes with them.

#include "templates/formats/encoder_checkpoint.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "device/half.h"
#include "nlohmann/json.hpp"
#include "templates/formats/checkpoint.h"
#include "templates/formats/dense_layers.h"
#include "templates/formats/describe.h"
#include "templates/formats/prepare.h"
#include "templates/fused_moe/reference.h"
#include "templates/linear/reference.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::ReadAll;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestFolder;
using ::kiln::testing::TestTensors;
using ::kiln::testing::WriteCheckpoint;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kHidden = 256;
constexpr int64_t kIntermediate = 128;
constexpr int64_t kExperts = 2;
constexpr char kConfig[] = R"({"model_type": "qwen3_moe", "hidden_act": "silu",
  "hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 2,
  "num_experts_per_tok": 2, "num_hidden_layers": 2, "mlp_only_layers": [0],
  "torch_dtype": "bfloat16"
})";
const char* const kNames[] = {"gate_proj", "up_proj", "down_proj"};

uint64_t RowsOf(size_t projection) {
  return static_cast<uint64_t>(projection == 2 ? kHidden : kIntermediate);
}

uint64_t ColumnsOf(size_t projection) {
  return static_cast<uint64_t>(projection == 2 ? kIntermediate : kHidden);
}

// A matrix [out][in] in the file's type, and the numbers that it holds.
struct Stored {
  testing::TestTensor tensor;
  std::vector<float> values;
};

Stored Gaussian(const std::string& type, uint64_t rows, uint64_t columns,
                uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, 0.05);
  Stored stored;
  stored.tensor = {type, {rows, columns}, ""};
  for (uint64_t i = 0; i < rows * columns; ++i) {
    auto value = static_cast<float>(normal(random));
    char bytes[4];
    size_t size = 2;
    if (type == "F32") {
      size = 4;
      std::memcpy(bytes, &value, size);
    } else if (type == "F16") {
      const uint16_t bits = kd::f32_to_f16(value);
      std::memcpy(bytes, &bits, size);
      value = kd::f16_to_f32(bits);
    } else {
      const auto bits =
          static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
      std::memcpy(bytes, &bits, size);
      value = kd::bf16_to_f32(bits);
    }
    stored.tensor.bytes.append(bytes, size);
    stored.values.push_back(value);
  }
  return stored;
}

class Model {
 public:
  explicit Model(size_t shards = 1) : shards_(shards) {
    const char* const types[] = {"F32", "F16", "BF16"};
    for (int64_t e = 0; e < kExperts; ++e) {
      for (size_t i = 0; i < 3; ++i) {
        const Stored stored = Gaussian(types[i], RowsOf(i), ColumnsOf(i),
                                       static_cast<uint64_t>(10 * e) + i);
        const std::string key = Key(e, i);
        values_[key] = stored.values;
        tensors[key + ".weight"] = stored.tensor;
      }
    }
    tensors["model.embed_tokens.weight"] = {"BF16", {2, 2}, "abcdefgh"};
  }

  static std::string Key(int64_t expert, size_t projection) {
    return testing::ExpertKey({}, 1, static_cast<uint64_t>(expert),
                              kNames[projection]);
  }

  const std::vector<float>& values(int64_t expert, size_t projection) const {
    return values_.at(Key(expert, projection));
  }

  absl::StatusOr<EncodedCheckpoint> Encode(const EncodeOptions& options,
                                           const std::string& to = "out") {
    folder.Write("config.json", config);
    WriteCheckpoint(folder, tensors, shards_);
    return EncodeCheckpoint(folder.path(), folder.At(to), options);
  }

  TestFolder folder;
  TestTensors tensors;
  std::string config = kConfig;

 private:
  size_t shards_;
  std::map<std::string, std::vector<float>> values_;
};

// A prepared layer with its bytes in memory, as the op's reference takes them.
class Prepared {
 public:
  explicit Prepared(const std::string& folder) : output_(folder + "/native") {
    const absl::StatusOr<PreparedLayer> layer =
        PrepareLayer(folder, output_, {.layer = 1});
    EXPECT_OK(layer);
    absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(layer->path);
    EXPECT_OK(file);
    for (const SafetensorsTensor& tensor : file->header().tensors()) {
      const absl::StatusOr<std::span<const uint8_t>> bytes =
          file->Bytes(tensor);
      EXPECT_OK(bytes);
      std::vector<uint16_t>& words = tensors_[std::string(tensor.name)];
      words.resize(bytes->size() / 2);
      std::memcpy(words.data(), bytes->data(), bytes->size());
    }
  }

  const uint16_t* at(const std::string& name) const {
    return tensors_.at(name).data();
  }

 private:
  std::string output_;
  std::map<std::string, std::vector<uint16_t>> tensors_;
};

// silu(gate x) (up x) through down, for weights [out][in].
std::vector<double> Expert(const Model& model, int64_t expert,
                           const std::vector<double>& x) {
  const auto times = [&](size_t projection, const std::vector<double>& v) {
    const std::vector<float>& w = model.values(expert, projection);
    std::vector<double> y(RowsOf(projection), 0.0);
    for (size_t r = 0; r < y.size(); ++r) {
      for (size_t c = 0; c < v.size(); ++c) y[r] += w[r * v.size() + c] * v[c];
    }
    return y;
  };
  std::vector<double> gate = times(0, x);
  const std::vector<double> up = times(1, x);
  for (size_t i = 0; i < gate.size(); ++i) {
    gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
  }
  return times(2, gate);
}

TEST(EncodeCheckpointTest, AnEncodedLayerComputesWhatTheRealOneDoes) {
  Model model(2);
  ASSERT_OK_AND_ASSIGN(
      const EncodedCheckpoint encoded,
      model.Encode(
          {.codebook = Codebook::kMul1, .bits = {5, 4, 6}, .threads = 2}));
  EXPECT_EQ(encoded.matrices, 6u);
  EXPECT_EQ(encoded.weights, 6u * kHidden * kIntermediate);
  // K = 4 is the worst of the three, 0.0046 of a Gaussian's energy.
  EXPECT_THAT(encoded.worst, HasSubstr("up_proj"));
  EXPECT_NEAR(encoded.worst_error, 0.0046, 0.0006);

  const std::string out = model.folder.At("out");
  ASSERT_OK_AND_ASSIGN(const Manifest manifest, DescribeCheckpoint(out, {}));
  ASSERT_EQ(manifest.requests.size(), 1u);
  EXPECT_EQ(manifest.requests[0].geometry.ToString(),
            "fused_moe H256 I128 E2 k2 exl3-mul1 K5/4/6 silu w4a16 bf16 i32");
  const Prepared prepared(out);

  // One token for each expert, and one for both.
  constexpr int64_t kTokens = 3;
  std::mt19937_64 random(5);
  std::normal_distribution<double> normal;
  std::vector<uint16_t> x(kTokens * kHidden);
  std::vector<std::vector<double>> rows(kTokens);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = kd::f32_to_f16(static_cast<float>(normal(random)));
    rows[i / kHidden].push_back(kd::f16_to_f32(x[i]));
  }
  const std::vector<int32_t> ids = {0, -1, 1, -1, 0, 1};
  const std::vector<float> weights = {1, 1, 1, 1, 0.75f, 0.25f};
  FusedMoeProblem problem;
  problem.tokens = kTokens;
  problem.hidden = kHidden;
  problem.intermediate = kIntermediate;
  problem.experts = kExperts;
  problem.top_k = 2;
  problem.codebook = Codebook::kMul1;
  problem.bits = {5, 4, 6};
  problem.x_dtype = DType::kF16;
  problem.x = x.data();
  problem.topk_ids = ids.data();
  problem.topk_weights = weights.data();
  problem.w_gate = prepared.at("w_gate");
  problem.w_up = prepared.at("w_up");
  problem.w_down = prepared.at("w_down");
  problem.gate_suh = prepared.at("gate_suh");
  problem.up_suh = prepared.at("up_suh");
  problem.rotations = prepared.at("rotations");
  problem.down_svh = prepared.at("down_svh");
  const std::vector<int64_t> all = {0, 1, 2};
  std::vector<double> found(kTokens * kHidden);
  FusedMoeReferenceRows(problem, all, ReferenceMode::kFloat64, found.data(), 1);

  double error = 0;
  double norm = 0;
  for (size_t t = 0; t < kTokens; ++t) {
    std::vector<double> expected(kHidden, 0.0);
    for (size_t j = 0; j < 2; ++j) {
      const int32_t expert = ids[2 * t + j];
      if (expert < 0) continue;
      const std::vector<double> y = Expert(model, expert, rows[t]);
      for (size_t c = 0; c < y.size(); ++c) {
        expected[c] += static_cast<double>(weights[2 * t + j]) * y[c];
      }
    }
    for (size_t c = 0; c < expected.size(); ++c) {
      const double difference = found[t * kHidden + c] - expected[c];
      error += difference * difference;
      norm += expected[c] * expected[c];
    }
  }
  // Errors of three independent matrices add up: 0.0013 + 0.0046 + 0.0004, each
  // weighted by how the function passes it on, which is about once.
  EXPECT_LT(error / norm, 2 * (0.0013 + 0.0046 + 0.0004));
  EXPECT_GT(error / norm, 0.5 * (0.0013 + 0.0046 + 0.0004));
}

TEST(EncodeCheckpointTest, TheStatedErrorIsThatOfThePreparedWeights) {
  Model model;
  ASSERT_OK_AND_ASSIGN(const EncodedCheckpoint encoded,
                       model.Encode({.bits = {3, 3, 3}, .threads = 2}));
  const Prepared prepared(model.folder.At("out"));
  const auto sign = [](size_t i, size_t j) {
    return __builtin_popcountll(i & j & 127) % 2 == 0 ? 1.0 : -1.0;
  };
  double error = 0;
  double energy = 0;
  for (int64_t e = 0; e < kExperts; ++e) {
    for (size_t p = 0; p < 3; ++p) {
      const size_t in = ColumnsOf(p);
      const size_t out = RowsOf(p);
      const char* const slots[] = {"w_gate", "w_up", "w_down"};
      std::vector<uint16_t> decoded(in * out);
      DecodeTrellisMatrix(
          prepared.at(slots[p]) + static_cast<size_t>(e) * in * out / 16 * 3,
          static_cast<int64_t>(in), static_cast<int64_t>(out), 3,
          Codebook::kMcg, decoded.data());
      const uint16_t* rotations =
          prepared.at("rotations") + e * 3 * kIntermediate;
      const uint16_t* suh = p == 0   ? prepared.at("gate_suh") + e * kHidden
                            : p == 1 ? prepared.at("up_suh") + e * kHidden
                                     : rotations + 2 * kIntermediate;
      const uint16_t* svh =
          p == 2 ? prepared.at("down_svh") + e * kHidden
                 : rotations + static_cast<int64_t>(p) * kIntermediate;
      std::vector<double> half(in * out, 0.0);
      for (size_t i = 0; i < in; ++i) {
        for (size_t k = i / 128 * 128; k < i / 128 * 128 + 128; ++k) {
          for (size_t n = 0; n < out; ++n) {
            half[i * out + n] +=
                sign(i, k) * kd::f16_to_f32(decoded[k * out + n]);
          }
        }
      }
      const std::vector<float>& exact = model.values(e, p);
      for (size_t i = 0; i < in; ++i) {
        for (size_t j = 0; j < out; ++j) {
          double sum = 0;
          for (size_t n = j / 128 * 128; n < j / 128 * 128 + 128; ++n) {
            sum += sign(j, n) * half[i * out + n];
          }
          const double weight =
              sum / 128 * kd::f16_to_f32(suh[i]) * kd::f16_to_f32(svh[j]);
          error += std::pow(exact[j * in + i] - weight, 2);
          energy += std::pow(static_cast<double>(exact[j * in + i]), 2);
        }
      }
    }
  }
  EXPECT_NEAR(error / energy, encoded.relative_error,
              1e-6 * encoded.relative_error);
  EXPECT_NEAR(encoded.relative_error, 0.0176, 0.001);
}

TEST(EncodeCheckpointTest, CopiesTheRestAndNamesTheFormat) {
  Model model(3);
  std::vector<uint64_t> done;
  ASSERT_OK_AND_ASSIGN(
      const EncodedCheckpoint encoded,
      model.Encode(
          {.codebook = Codebook::k3Inst,
           .bits = {2, 2, 3},
           .threads = 2,
           .progress = [&](uint64_t at, uint64_t total, const std::string&) {
             EXPECT_LE(at, total);
             done.push_back(at);
           }}));
  // Every tile is counted once.
  EXPECT_EQ(done.size(), encoded.weights / 256);
  EXPECT_TRUE(std::is_sorted(done.begin(), done.end()));
  EXPECT_EQ(done.back(), encoded.weights / 256);
  const std::string out = model.folder.At("out");
  ASSERT_OK_AND_ASSIGN(Checkpoint checkpoint, Checkpoint::Open(out));
  EXPECT_EQ(checkpoint.shards().size(), 3u);
  const SafetensorsTensor* copied =
      checkpoint.Find("model.embed_tokens.weight");
  ASSERT_NE(copied, nullptr);
  ASSERT_OK_AND_ASSIGN(const std::span<const uint8_t> bytes,
                       checkpoint.Bytes(*copied));
  EXPECT_EQ(std::string(bytes.begin(), bytes.end()), "abcdefgh");
  uint64_t size = 0;
  for (const SafetensorsFile& shard : checkpoint.shards()) {
    size += std::filesystem::file_size(shard.path());
  }
  EXPECT_EQ(size, encoded.bytes);
  const auto config = nlohmann::json::parse(ReadAll(out + "/config.json"));
  EXPECT_EQ(config.at("quantization_config").at("quant_method"), "exl3");
  EXPECT_EQ(config.at("quantization_config").at("codebook"), "3inst");
  EXPECT_NEAR(config.at("quantization_config").at("bits").get<double>(),
              7 / 3.0, 1e-4);
  EXPECT_EQ(config.at("torch_dtype"), "bfloat16");
  EXPECT_OK(DescribeCheckpoint(out, {}));
}

TEST(EncodeCheckpointTest, FilesAreTheSameForAnyNumberOfThreads) {
  Model model;
  ASSERT_OK(model.Encode({.bits = {2, 2, 2}, .threads = 1}, "one"));
  ASSERT_OK(model.Encode({.bits = {2, 2, 2}, .threads = 3}, "three"));
  EXPECT_EQ(ReadAll(model.folder.At("one/model.safetensors")),
            ReadAll(model.folder.At("three/model.safetensors")));
}

absl::Status EncodeStatus(Model* model) {
  return model->Encode({.bits = {2, 2, 2}, .threads = 1}).status();
}

TEST(EncodeCheckpointTest, RefusesAMatrixThatIsNotFinite) {
  Model model;
  std::string& bytes = model.tensors.at(Model::Key(1, 2) + ".weight").bytes;
  bytes[2 * 130 + 1] = 0x7F;  // row 1, column 2 of [256][128]
  bytes[2 * 130] = static_cast<char>(0x80);
  EXPECT_THAT(EncodeStatus(&model),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(Model::Key(1, 2) + ".weight"),
                             HasSubstr("input 2 and output 1 is inf, must be "
                                       "finite"))));
  EXPECT_FALSE(std::filesystem::exists(model.folder.At("out/config.json")));
  EXPECT_FALSE(
      std::filesystem::exists(model.folder.At("out/model.safetensors")));
}

TEST(EncodeCheckpointTest, RefusesAnotherShape) {
  Model model;
  model.tensors.at(Model::Key(0, 0) + ".weight").shape = {256, 128};
  EXPECT_THAT(EncodeStatus(&model),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(Model::Key(0, 0)),
                             HasSubstr("F32 [256, 128], must be [128, 256]"))));
}

TEST(EncodeCheckpointTest, RefusesAnotherType) {
  Model model;
  testing::TestTensor& tensor = model.tensors.at(Model::Key(0, 1) + ".weight");
  tensor.type = "I16";
  EXPECT_THAT(
      EncodeStatus(&model),
      StatusIs(StatusCode::kInvalidArgument,
               AllOf(HasSubstr(Model::Key(0, 1)), HasSubstr("I16 [128, 256]"),
                     HasSubstr("must be F32, F16 or BF16"))));
}

TEST(EncodeCheckpointTest, RefusesWhatIsNoPlainMatrix) {
  Model model;
  model.tensors[Model::Key(0, 1) + ".bias"] = {"F16", {1}, "ab"};
  EXPECT_THAT(EncodeStatus(&model),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(Model::Key(0, 1) + ".bias"),
                             HasSubstr("only plain matrices"))));
}

TEST(EncodeCheckpointTest, RefusesAnEncodedCheckpoint) {
  Model model;
  model.config.pop_back();
  model.config += ", \"quantization_config\": {\"quant_method\": \"exl3\"}}";
  EXPECT_THAT(EncodeStatus(&model),
              StatusIs(StatusCode::kFailedPrecondition,
                       HasSubstr("only checkpoints of real numbers")));
}

TEST(EncodeCheckpointTest, RefusesAModelWithoutExperts) {
  Model model;
  model.tensors = {{"a", {"U8", {1}, "a"}}};
  EXPECT_THAT(EncodeStatus(&model),
              StatusIs(StatusCode::kFailedPrecondition,
                       HasSubstr("has no tensor of a routed expert")));
}

TEST(EncodeCheckpointTest, RefusesAFolderWithFilesInIt) {
  Model model;
  EXPECT_THAT(model.Encode({}, "."),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("must be an empty folder")));
}

TEST(EncodeCheckpointTest, RefusesANameThatAHeaderCannotHold) {
  Model model;
  model.tensors["model.caf\xC3\xA9"] = {"U8", {1}, "a"};
  EXPECT_THAT(EncodeStatus(&model), StatusIs(StatusCode::kInvalidArgument,
                                             HasSubstr("printable ASCII")));
}

// ---- a dense model ---------------------------------------------------------

const testing::TestDense kDense = {
    .hidden = 128, .query = 128, .key_value = 128, .intermediate = 256};

// One layer of real numbers, with a bias of the keys.
class DenseModel {
 public:
  DenseModel() {
    const char* const types[] = {"F32", "F16", "BF16"};
    for (size_t i = 0; i < kHeadProjection; ++i) {
      const std::string name(kDenseProjections[i].name);
      const bool down = name == "mlp.down_proj";
      const uint64_t in = down ? kDense.intermediate : kDense.hidden;
      const uint64_t out = !down && name.substr(0, 4) == "mlp."
                               ? kDense.intermediate
                               : kDense.hidden;
      const Stored stored = Gaussian(types[i % 3], out, in, 20 + i);
      values[name] = stored.values;
      tensors[Key(name) + ".weight"] = stored.tensor;
    }
    Stored bias = Gaussian("BF16", 1, kDense.key_value, 40);
    bias.tensor.shape = {kDense.key_value};
    values["bias"] = bias.values;
    tensors[Key("self_attn.k_proj") + ".bias"] = bias.tensor;
    tensors["lm_head.weight"] = {"BF16", {2, 2}, "abcdefgh"};
  }

  static std::string Key(const std::string& projection) {
    return testing::DenseKey(kDense, 0, projection);
  }

  absl::StatusOr<EncodedCheckpoint> Encode(const EncodeOptions& options) {
    folder.Write("config.json", testing::DenseConfigJson("llama", kDense, 1));
    WriteCheckpoint(folder, tensors, 1);
    return EncodeCheckpoint(folder.path(), folder.At("out"), options);
  }

  TestFolder folder;
  TestTensors tensors;
  std::map<std::string, std::vector<float>> values;  // [out][in]
};

// x W + bias of a prepared matrix, against the real numbers: 4 bits leave
// 0.0046 of the weights' energy, and so of the result's.
TEST(EncodeDenseTest, EveryMatrixOfALayerComputesWhatItsRealNumbersDo) {
  DenseModel model;
  ASSERT_OK_AND_ASSIGN(const EncodedCheckpoint encoded, model.Encode({}));
  EXPECT_EQ(encoded.matrices, 7u);
  EXPECT_NEAR(encoded.relative_error, 0.0046, 0.0004);
  EXPECT_EQ(encoded.bytes, std::filesystem::file_size(model.folder.At("out") +
                                                      "/model.safetensors"));
  ASSERT_OK_AND_ASSIGN(const Manifest manifest,
                       DescribeCheckpoint(model.folder.At("out"), {}));
  ASSERT_EQ(manifest.requests.size(), 7u);
  EXPECT_EQ(manifest.requests[1].geometry.ToString(),
            "linear [128, 128] exl3-mcg K4 w4a16 bf16 bias");
  ASSERT_OK_AND_ASSIGN(
      const PreparedLayer prepared,
      PrepareLayer(model.folder.At("out"), model.folder.At("native"), {}));
  ASSERT_OK_AND_ASSIGN(SafetensorsFile file,
                       SafetensorsFile::Open(prepared.path));
  std::map<std::string, std::vector<uint16_t>> words;
  for (const SafetensorsTensor& tensor : file.header().tensors()) {
    ASSERT_OK_AND_ASSIGN(const std::span<const uint8_t> bytes,
                         file.Bytes(tensor));
    std::vector<uint16_t>& slot = words[std::string(tensor.name)];
    slot.resize(bytes.size() / 2);
    std::memcpy(slot.data(), bytes.data(), bytes.size());
  }
  for (size_t i = 0; i < kHeadProjection; ++i) {
    const std::string name(kDenseProjections[i].name);
    const LinearShape& shape = manifest.requests[i].geometry.linear;
    const auto in = static_cast<size_t>(shape.in_features);
    const auto out = static_cast<size_t>(shape.out_features);
    const Stored x = Gaussian("F16", 1, in, 50);
    const LinearProblem problem = {
        .tokens = 1,
        .in_features = shape.in_features,
        .out_features = shape.out_features,
        .codebook = TrellisCodebook::kMcg,
        .bits = 4,
        .x_dtype = DType::kF16,
        .x = x.tensor.bytes.data(),
        .w = words.at(name + ".w").data(),
        .suh = words.at(name + ".suh").data(),
        .svh = words.at(name + ".svh").data(),
        .bias = shape.bias ? words.at(name + ".bias").data() : nullptr};
    std::vector<double> found(out);
    const std::vector<int64_t> rows = {0};
    LinearReferenceRows(problem, rows, ReferenceMode::kStaged, found.data(), 1);
    double error = 0;
    double energy = 0;
    for (size_t j = 0; j < out; ++j) {
      double product = 0;
      for (size_t k = 0; k < in; ++k) {
        product += x.values[k] * model.values.at(name)[j * in + k];
      }
      const double bias = shape.bias ? model.values.at("bias")[j] : 0;
      error += std::pow(found[j] - bias - product, 2);
      energy += product * product;
    }
    EXPECT_LT(error / energy, 0.008) << name;
    EXPECT_GT(error / energy, 0.002) << name;
  }
}

TEST(EncodeDenseTest, TheHeadIsCopied) {
  DenseModel model;
  ASSERT_OK(model.Encode({.bits = {8, 8, 8}}));
  ASSERT_OK_AND_ASSIGN(Checkpoint checkpoint,
                       Checkpoint::Open(model.folder.At("out")));
  const SafetensorsTensor* head = checkpoint.Find("lm_head.weight");
  ASSERT_NE(head, nullptr);
  ASSERT_OK_AND_ASSIGN(const std::span<const uint8_t> bytes,
                       checkpoint.Bytes(*head));
  EXPECT_EQ(std::string(bytes.begin(), bytes.end()), "abcdefgh");
}

TEST(EncodeDenseTest, RefusesBadInputAndLeavesNothing) {
  const std::string up = DenseModel::Key("mlp.up_proj");
  const std::string bias = DenseModel::Key("self_attn.k_proj") + ".bias";

  const struct {
    const char* message;
    StatusCode code;
    std::function<void(DenseModel*, EncodeOptions*)> apply;
  } cases[] = {
      {"a dense model, whose matrices get one rate; the bits are 2, 3 and 2",
       StatusCode::kInvalidArgument,
       [](DenseModel*, EncodeOptions* o) {
         o->bits = {2, 3, 2};
       }},
      {"mlp.up_proj.weight\" is F32 [128, 128], must be [256, 128] by "
       "config.json",
       StatusCode::kInvalidArgument,
       [&](DenseModel* m, EncodeOptions*) {
         m->tensors[up + ".weight"] = Gaussian("F32", 128, 128, 1).tensor;
       }},
      {"mlp.up_proj.trellis\" is no \".weight\": only plain matrices",
       StatusCode::kInvalidArgument,
       [&](DenseModel* m, EncodeOptions*) {
         testing::AddExl3(up, 128, 256, 4, "mcg", 1, &m->tensors);
         m->tensors.erase(up + ".mcg");
         m->tensors.erase(up + ".suh");
         m->tensors.erase(up + ".svh");
       }},
      {"k_proj.bias\" is BF16 [2], must be [128] by config.json",
       StatusCode::kInvalidArgument,
       [&](DenseModel* m, EncodeOptions*) {
         m->tensors[bias] = {"BF16", {2}, "abcd"};
       }},
      {"k_proj.bias\" has at channel 1 a value that is not finite as binary16",
       StatusCode::kInvalidArgument,
       [&](DenseModel* m, EncodeOptions*) {
         // 65536.
         m->tensors[bias].bytes.replace(2, 2, std::string("\x80\x47", 2));
       }},
      {"has no matrix of a layer, such as "
       "\"model.layers.0.self_attn.q_proj.weight\"",
       StatusCode::kFailedPrecondition,
       [](DenseModel* m, EncodeOptions*) {
         m->tensors = {{"lm_head.weight", {"BF16", {2, 2}, "abcdefgh"}}};
       }},
  };

  for (const auto& c : cases) {
    DenseModel model;
    EncodeOptions options = {.bits = {8, 8, 8}};
    c.apply(&model, &options);
    EXPECT_THAT(model.Encode(options), StatusIs(c.code, HasSubstr(c.message)));
    EXPECT_FALSE(std::filesystem::exists(model.folder.At("out")));
  }
}

}  // namespace
}  // namespace kiln
