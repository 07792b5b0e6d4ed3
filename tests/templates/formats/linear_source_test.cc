// One matrix as native tensors, and layers of a dense model as prepare writes
// them.

#include "templates/formats/linear_source.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "templates/formats/prepare.h"
#include "templates/linear/reference.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/linear_product.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::AddBias;
using ::kiln::testing::AddDenseLayer;
using ::kiln::testing::AddExl3;
using ::kiln::testing::DenseConfigJson;
using ::kiln::testing::LinearProduct;
using ::kiln::testing::LinearWeights;
using ::kiln::testing::StatusIs;
using ::kiln::testing::Sums;
using ::kiln::testing::TestDense;
using ::kiln::testing::TestFolder;
using ::kiln::testing::TestTensors;
using ::kiln::testing::WriteCheckpoint;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kIn = 256;
constexpr uint64_t kOut = 384;
const char* const kKey = "k";

// A matrix [256, 384] of 3 bits with a bias.
TestTensors Tensors() {
  TestTensors tensors;
  AddExl3(kKey, kIn, kOut, 3, "mcg", 5, &tensors);
  AddBias(kKey, kOut, 6, &tensors);
  return tensors;
}

// A matrix on disk, opened.
struct OneMatrix {
  explicit OneMatrix(const TestTensors& tensors) {
    WriteCheckpoint(folder, tensors, 1);
    Open();
  }

  OneMatrix() = default;

  void Open() {
    absl::StatusOr<Checkpoint> opened = Checkpoint::Open(folder.path());
    ASSERT_OK(opened);
    checkpoint = *std::move(opened);
    Exl3Group group;
    for (const SafetensorsTensor& tensor :
         checkpoint.shards()[0].header().tensors()) {
      ASSERT_OK(AddToExl3Group(tensor.name.substr(2), tensor, &group));
    }
    const absl::StatusOr<Exl3Matrix> checked = CheckExl3Group(kKey, group);
    ASSERT_OK(checked);
    matrix = *checked;
  }

  absl::StatusOr<LinearSource> Source(const LinearExtent& extent) {
    return LinearSource::FromExl3(matrix, extent, &checkpoint);
  }

  absl::StatusOr<LinearSource> Source() {
    return Source({.in = {0, matrix.in}, .out = {0, matrix.out}});
  }

  TestFolder folder;
  Checkpoint checkpoint;
  Exl3Matrix matrix;
};

std::string Read(LinearSource* source, LinearSlot slot) {
  std::string bytes;
  EXPECT_OK(source->Stream(slot, [&](std::span<const uint8_t> piece) {
    bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    return absl::OkStatus();
  }));
  return bytes;
}

std::string Part(const std::string& name) { return absl::StrCat(kKey, name); }

TEST(LinearSourceTest, SizesAreKnownAndKept) {
  OneMatrix one(Tensors());

  const struct {
    LinearExtent extent;
    std::vector<std::string> tensors;
  } cases[] = {{{{0, 256}, {0, 384}},
                {"w I16 [16, 24, 48]", "suh F16 [256]", "svh F16 [384]",
                 "bias F16 [384]"}},
               {{{128, 256}, {128, 256}},
                {"w I16 [8, 8, 48]", "suh F16 [128]", "svh F16 [128]",
                 "bias F16 [128]"}}};

  for (const auto& c : cases) {
    ASSERT_OK_AND_ASSIGN(LinearSource source, one.Source(c.extent));
    std::vector<std::string> found;
    for (const LinearSlot slot : source.Slots()) {
      const SafetensorsTensor tensor = source.Tensor(slot);
      found.push_back(absl::StrCat(tensor.name, " ", tensor.TypeAndShape()));
      EXPECT_EQ(Read(&source, slot).size(), tensor.bytes());
    }
    EXPECT_EQ(found, c.tensors);
  }
}

TEST(LinearSourceTest, TheWholeMatrixIsCopiedAsItLies) {
  const TestTensors tensors = Tensors();
  OneMatrix one(tensors);
  ASSERT_OK_AND_ASSIGN(LinearSource source, one.Source());
  EXPECT_EQ(
      source.shape(),
      (LinearShape{
          .in_features = 256, .out_features = 384, .bits = 3, .bias = true}));
  EXPECT_EQ(source.codebook(), Codebook::kMcg);
  EXPECT_EQ(Read(&source, LinearSlot::kW), tensors.at("k.trellis").bytes);
  EXPECT_EQ(Read(&source, LinearSlot::kSuh), tensors.at("k.suh").bytes);
  EXPECT_EQ(Read(&source, LinearSlot::kSvh), tensors.at("k.svh").bytes);
  EXPECT_EQ(Read(&source, LinearSlot::kBias), tensors.at("k.bias").bytes);
}

TEST(LinearSourceTest, APartHasItsTilesScalesAndBias) {
  const TestTensors tensors = Tensors();
  OneMatrix one(tensors);
  ASSERT_OK_AND_ASSIGN(LinearSource source,
                       one.Source({.in = {0, 128}, .out = {256, 384}}));
  const std::string whole = tensors.at("k.trellis").bytes;
  std::string expected;
  for (size_t a = 0; a < 8; ++a) {
    expected += whole.substr((a * 24 + 16) * 96, 8 * 96);
  }
  EXPECT_EQ(Read(&source, LinearSlot::kW), expected);
  EXPECT_EQ(Read(&source, LinearSlot::kSuh),
            tensors.at("k.suh").bytes.substr(0, 256));
  EXPECT_EQ(Read(&source, LinearSlot::kSvh),
            tensors.at("k.svh").bytes.substr(512));
  EXPECT_EQ(Read(&source, LinearSlot::kBias),
            tensors.at("k.bias").bytes.substr(512));
}

// The outputs of all ranks add up: one of them brings the bias.
TEST(LinearSourceTest, APartOfLaterInputsHasABiasOfZeros) {
  OneMatrix one(Tensors());
  ASSERT_OK_AND_ASSIGN(LinearSource source,
                       one.Source({.in = {128, 256}, .out = {0, 384}}));
  EXPECT_TRUE(source.shape().bias);
  EXPECT_EQ(Read(&source, LinearSlot::kBias), std::string(768, '\0'));
}

TEST(LinearSourceTest, WithoutABiasThereIsNoSlot) {
  TestTensors tensors = Tensors();
  tensors.erase("k.bias");
  OneMatrix one(tensors);
  ASSERT_OK_AND_ASSIGN(const LinearSource source, one.Source());
  EXPECT_FALSE(source.shape().bias);
  EXPECT_THAT(source.Slots(),
              ElementsAre(LinearSlot::kW, LinearSlot::kSuh, LinearSlot::kSvh));
}

// Bytes of binary32 numbers: `first`, then zeros.
std::string Singles(float first) {
  std::string bytes(4 * kOut, '\0');
  std::memcpy(bytes.data(), &first, sizeof(first));
  return bytes;
}

TEST(LinearSourceTest, ABiasOfBinary32IsNarrowed) {
  TestTensors tensors = Tensors();
  // Between 1 and the next binary16, 1 + 2^-10; nearer to the latter.
  tensors["k.bias"] = {"F32", {kOut}, Singles(1 + 0.75f / 1024)};
  OneMatrix one(tensors);
  ASSERT_OK_AND_ASSIGN(LinearSource source, one.Source());
  const std::string bias = Read(&source, LinearSlot::kBias);
  EXPECT_EQ(bias.substr(0, 2), "\x01\x3C");
  EXPECT_EQ(bias.substr(2), std::string(766, '\0'));
}

TEST(LinearSourceTest, RefusesABiasThatIsNotFinite) {
  TestTensors tensors = Tensors();
  tensors["k.bias"].bytes.replace(4, 2, std::string("\x00\x7C", 2));
  OneMatrix infinite(tensors);
  EXPECT_THAT(infinite.Source(),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("tensor \"k.bias\" has at channel 2 a value "
                                 "that is not finite as binary16")));
  // Finite, and beyond the largest binary16.
  tensors["k.bias"] = {"F32", {kOut}, Singles(65520)};
  OneMatrix large(tensors);
  EXPECT_THAT(large.Source(), StatusIs(StatusCode::kInvalidArgument,
                                       HasSubstr("channel 0 a value")));
}

TEST(LinearSourceTest, LegacySignsFillTheTables) {
  TestTensors tensors = Tensors();
  tensors.erase("k.svh");
  std::string signs(kOut / 8, '\0');
  signs[17] = 0x02;  // channel 137, the tenth of the second block
  tensors["k.sv"] = {"I16", {kOut / 16}, signs};
  OneMatrix one(tensors);
  ASSERT_OK_AND_ASSIGN(LinearSource source,
                       one.Source({.in = {0, 256}, .out = {128, 256}}));
  const std::string svh = Read(&source, LinearSlot::kSvh);
  for (size_t i = 0; i < 128; ++i) {
    EXPECT_EQ(svh.substr(2 * i, 2),
              std::string(i == 9 ? "\x00\xBC" : "\x00\x3C", 2))
        << i;
  }
}

TEST(LinearSourceTest, Row22RefusesAMarkerOfAnotherValue) {
  TestTensors tensors = Tensors();
  tensors["k.mcg"].bytes = std::string(4, '\0');
  OneMatrix one(tensors);
  EXPECT_THAT(one.Source(), StatusIs(StatusCode::kInvalidArgument,
                                     HasSubstr("must hold 0xcbac1fed")));
}

TEST(LinearSourceTest, Row23RefusesAScaleThatIsNotFinite) {
  for (const char* name : {".suh", ".svh"}) {
    TestTensors tensors = Tensors();
    tensors[Part(name)].bytes.replace(2, 2, std::string("\x01\x7C", 2));
    OneMatrix one(tensors);
    EXPECT_THAT(one.Source(),
                StatusIs(StatusCode::kInvalidArgument,
                         AllOf(HasSubstr(Part(name)), HasSubstr("0x7c01"),
                               HasSubstr("channel 1, must be finite"))));
  }
}

TEST(LinearSourceTest, Row23RefusesExtentsThatCutABlockOrLeaveTheMatrix) {
  OneMatrix one(Tensors());
  for (const TrellisExtent bad :
       {TrellisExtent{64, 192}, TrellisExtent{0, 64}, TrellisExtent{128, 128},
        TrellisExtent{-128, 128}, TrellisExtent{0, 512}}) {
    const auto refused = StatusIs(
        StatusCode::kInvalidArgument,
        AllOf(HasSubstr(absl::StrCat("[", bad.begin, ", ", bad.end, ")")),
              HasSubstr("multiples of 128")));
    EXPECT_THAT(one.Source({.in = bad, .out = {0, 384}}), refused);
    EXPECT_THAT(one.Source({.in = {0, 256}, .out = bad}), refused);
  }
}

TEST(LinearSourceTest, RefusesMoreChannelsThanAManifestHolds) {
  OneMatrix one(Tensors());
  one.matrix.out = 1048704;
  EXPECT_THAT(one.Source(),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("tensor \"k.trellis\" has 1048704 channels, "
                                 "must have at most 1048576")));
}

// 96 MiB; its file is sparse.
TEST(LinearSourceTest, PiecesHoldAtMostSixtyFourMebibytes) {
  const std::string json =
      R"({"k.trellis":{"dtype":"I16","shape":[1024,512,96],)"
      R"("data_offsets":[0,100663296]},)"
      R"("k.suh":{"dtype":"F16","shape":[16384],)"
      R"("data_offsets":[100663296,100696064]},)"
      R"("k.svh":{"dtype":"F16","shape":[8192],)"
      R"("data_offsets":[100696064,100712448]}})";
  OneMatrix one;
  const std::string head = testing::SafetensorsBytes(json, "");
  const std::string path = one.folder.Write("model.safetensors", head);
  ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(head.size()) + 100712448),
            0);
  one.Open();
  ASSERT_OK_AND_ASSIGN(LinearSource source, one.Source());
  std::vector<uint64_t> pieces;
  ASSERT_OK(source.Stream(LinearSlot::kW, [&](std::span<const uint8_t> piece) {
    pieces.push_back(piece.size());
    return absl::OkStatus();
  }));
  // Of whole rows, 98,304 bytes each.
  EXPECT_THAT(pieces, ElementsAre(682u * 98304, 342u * 98304));
}

TEST(LinearSourceTest, AnErrorOfTheSinkStopsTheStream) {
  OneMatrix one(Tensors());
  ASSERT_OK_AND_ASSIGN(LinearSource source, one.Source());
  EXPECT_THAT(source.Stream(LinearSlot::kW,
                            [](std::span<const uint8_t>) {
                              return absl::ResourceExhaustedError("full");
                            }),
              StatusIs(StatusCode::kResourceExhausted, "full"));
}

// ---- prepare ---------------------------------------------------------------

const TestDense kDense = {.query = 512, .key_value = 256};

// Two layers with biases of the queries and of the last product, and a head.
TestTensors Model() {
  TestTensors tensors;
  for (const int64_t layer : {0, 1}) {
    AddDenseLayer(kDense, layer, &tensors);
    AddBias(DenseKey(kDense, layer, "self_attn.q_proj"), 512, 3, &tensors);
    AddBias(DenseKey(kDense, layer, "mlp.down_proj"), 256, 4, &tensors);
  }
  AddExl3("lm_head", 256, 1024, 6, "mul1", 9, &tensors);
  return tensors;
}

void WriteModel(const TestFolder& folder, const TestTensors& tensors) {
  folder.Write("config.json", DenseConfigJson("qwen2", kDense, 2));
  WriteCheckpoint(folder, tensors, 3);
}

std::vector<uint16_t> Words(absl::string_view bytes) {
  std::vector<uint16_t> words(bytes.size() / 2);
  std::memcpy(words.data(), bytes.data(), bytes.size());
  return words;
}

// A matrix as the checkpoint has it.
LinearWeights Weights(const TestTensors& tensors, const std::string& key,
                      TrellisCodebook codebook) {
  const testing::TestTensor& trellis = tensors.at(key + ".trellis");
  LinearWeights weights = {.in = static_cast<int64_t>(16 * trellis.shape[0]),
                           .out = static_cast<int64_t>(16 * trellis.shape[1]),
                           .bits = static_cast<int>(trellis.shape[2] / 16),
                           .codebook = codebook,
                           .w = Words(trellis.bytes),
                           .suh = Words(tensors.at(key + ".suh").bytes),
                           .svh = Words(tensors.at(key + ".svh").bytes),
                           .bias = {}};
  const auto bias = tensors.find(key + ".bias");
  if (bias != tensors.end()) weights.bias = Words(bias->second.bytes);
  return weights;
}

// The tensors of a prepared file, by name.
class PreparedFile {
 public:
  explicit PreparedFile(const std::string& path) {
    absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(path);
    EXPECT_OK(file);
    metadata = file->header().metadata();
    for (const SafetensorsTensor& tensor : file->header().tensors()) {
      const absl::StatusOr<std::span<const uint8_t>> bytes =
          file->Bytes(tensor);
      EXPECT_OK(bytes);
      names.emplace_back(tensor.name);
      tensors[names.back()] = {
          .type = std::string(StoredTypeName(tensor.type)),
          .shape = {tensor.shape().begin(), tensor.shape().end()},
          .bytes = {bytes->begin(), bytes->end()}};
    }
  }

  // The float64 result of a projection's native tensors.
  std::vector<double> Product(const std::string& projection,
                              TrellisCodebook codebook,
                              const std::vector<uint16_t>& x) const {
    const auto words = [&](const char* slot) {
      return Words(tensors.at(projection + slot).bytes);
    };
    const std::vector<uint64_t>& shape = tensors.at(projection + ".w").shape;
    const std::vector<uint16_t> w = words(".w");
    const std::vector<uint16_t> suh = words(".suh");
    const std::vector<uint16_t> svh = words(".svh");
    std::vector<uint16_t> bias;
    if (tensors.count(projection + ".bias") != 0) bias = words(".bias");
    const LinearProblem problem = {
        .tokens = 1,
        .in_features = static_cast<int64_t>(16 * shape[0]),
        .out_features = static_cast<int64_t>(16 * shape[1]),
        .codebook = codebook,
        .bits = static_cast<int>(shape[2] / 16),
        .x_dtype = DType::kF16,
        .x = x.data(),
        .w = w.data(),
        .suh = suh.data(),
        .svh = svh.data(),
        .bias = bias.empty() ? nullptr : bias.data()};
    EXPECT_EQ(static_cast<int64_t>(x.size()), problem.in_features);
    std::vector<double> out(static_cast<size_t>(problem.out_features));
    const std::vector<int64_t> rows = {0};
    LinearReferenceRows(problem, rows, ReferenceMode::kFloat64, out.data(), 1);
    return out;
  }

  std::map<std::string, std::string> metadata;
  std::vector<std::string> names;
  TestTensors tensors;
};

std::string Prepare(const TestFolder& folder, const PrepareOptions& options) {
  const absl::StatusOr<PreparedLayer> prepared =
      PrepareLayer(folder.path(), folder.At("out"), options);
  EXPECT_OK(prepared);
  EXPECT_EQ(prepared->bytes, std::filesystem::file_size(prepared->path));
  EXPECT_FALSE(prepared->layout.has_value());
  return prepared->path;
}

// Binary16 numbers within [-2, 2), and the same as floats.
std::vector<uint16_t> Input(int64_t in) {
  TestTensors tensors;
  AddBias("x", static_cast<uint64_t>(in), 8, &tensors);
  return Words(tensors.at("x.bias").bytes);
}

std::vector<float> Floats(const std::vector<uint16_t>& bits) {
  std::vector<float> values;
  for (const uint16_t b : bits) values.push_back(kd::f16_to_f32(b));
  return values;
}

void ExpectNear(const std::vector<double>& found,
                const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  double largest = 0;
  for (const double v : expected) largest = std::max(largest, std::abs(v));
  ASSERT_GT(largest, 1);
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_NEAR(found[i], expected[i], 1e-12 * largest) << i;
  }
}

TEST(PrepareDenseTest, NamesSayTheProjection) {
  const TestFolder folder;
  WriteModel(folder, Model());
  const std::string path = Prepare(folder, {.layer = 1});
  EXPECT_EQ(path, folder.At("out/layer-00001.safetensors"));
  const PreparedFile file(path);
  EXPECT_THAT(
      file.names,
      ElementsAre(
          "self_attn.q_proj.w", "self_attn.q_proj.suh", "self_attn.q_proj.svh",
          "self_attn.q_proj.bias", "self_attn.k_proj.w", "self_attn.k_proj.suh",
          "self_attn.k_proj.svh", "self_attn.v_proj.w", "self_attn.v_proj.suh",
          "self_attn.v_proj.svh", "self_attn.o_proj.w", "self_attn.o_proj.suh",
          "self_attn.o_proj.svh", "mlp.gate_proj.w", "mlp.gate_proj.suh",
          "mlp.gate_proj.svh", "mlp.up_proj.w", "mlp.up_proj.suh",
          "mlp.up_proj.svh", "mlp.down_proj.w", "mlp.down_proj.suh",
          "mlp.down_proj.svh", "mlp.down_proj.bias"));
  EXPECT_EQ(file.metadata.at("op"), "linear");
  EXPECT_EQ(file.metadata.at("layer"), "1");
  EXPECT_EQ(file.metadata.at("self_attn.k_proj.codebook"), "mcg");
}

// As the definition has it, from the checkpoint's own decoded weights.
TEST(PrepareDenseTest, EveryMatrixComputesWhatTheCheckpointSays) {
  const TestTensors tensors = Model();
  const TestFolder folder;
  WriteModel(folder, tensors);
  const PreparedFile file(Prepare(folder, {.layer = 1}));
  for (const DenseProjection& projection : kDenseProjections) {
    if (projection.split == RankSplit::kNone) continue;  // the head
    const std::string name(projection.name);
    const LinearWeights weights =
        Weights(tensors, DenseKey(kDense, 1, name), TrellisCodebook::kMcg);
    const std::vector<uint16_t> x = Input(weights.in);
    ExpectNear(file.Product(name, TrellisCodebook::kMcg, x),
               LinearProduct(weights, Floats(x), Sums::kExact));
  }
}

TEST(PrepareDenseTest, RanksTogetherComputeTheWhole) {
  const TestTensors tensors = Model();
  const TestFolder folder;
  WriteModel(folder, tensors);
  const PreparedFile whole(Prepare(folder, {.layer = 0}));
  const PreparedFile ranks[] = {
      PreparedFile(Prepare(folder, {.layer = 0, .rank = 0, .ranks = 2})),
      PreparedFile(Prepare(folder, {.layer = 0, .rank = 1, .ranks = 2}))};
  EXPECT_TRUE(std::filesystem::exists(
      folder.At("out/layer-00000-rank-1-of-2.safetensors")));
  for (const DenseProjection& projection : kDenseProjections) {
    if (projection.split == RankSplit::kNone) continue;
    const std::string name(projection.name);
    const uint64_t in = 16 * whole.tensors.at(name + ".w").shape[0];
    const std::vector<uint16_t> x = Input(static_cast<int64_t>(in));
    const auto half = x.begin() + static_cast<int64_t>(in / 2);
    const bool adds = projection.split == RankSplit::kInput;
    EXPECT_EQ(adds, name == "self_attn.o_proj" || name == "mlp.down_proj");
    const std::vector<uint16_t> inputs[] = {
        adds ? std::vector<uint16_t>(x.begin(), half) : x,
        adds ? std::vector<uint16_t>(half, x.end()) : x};
    std::vector<double> found;
    for (size_t r = 0; r < 2; ++r) {
      const std::vector<double> part =
          ranks[r].Product(name, TrellisCodebook::kMcg, inputs[r]);
      if (adds && r > 0) {
        for (size_t i = 0; i < found.size(); ++i) found[i] += part[i];
      } else {
        found.insert(found.end(), part.begin(), part.end());
      }
    }
    ExpectNear(found, whole.Product(name, TrellisCodebook::kMcg, x));
  }
}

// Not divided: its channels seldom are a multiple of 128 for every rank.
TEST(PrepareDenseTest, TheHeadIsTheLayerBehindTheLastAndWholeOnEveryRank) {
  const TestTensors tensors = Model();
  const TestFolder folder;
  WriteModel(folder, tensors);
  const PreparedFile file(Prepare(folder, {.layer = 2, .rank = 1, .ranks = 2}));
  EXPECT_THAT(file.names,
              ElementsAre("lm_head.w", "lm_head.suh", "lm_head.svh"));
  EXPECT_EQ(file.metadata.at("lm_head.codebook"), "mul1");
  EXPECT_EQ(file.tensors.at("lm_head.w").bytes,
            tensors.at("lm_head.trellis").bytes);
  const LinearWeights weights =
      Weights(tensors, "lm_head", TrellisCodebook::kMul1);
  const std::vector<uint16_t> x = Input(weights.in);
  ExpectNear(file.Product("lm_head", TrellisCodebook::kMul1, x),
             LinearProduct(weights, Floats(x), Sums::kExact));
}

TEST(PrepareDenseTest, RefusesALayerThatTheModelLacks) {
  const TestFolder folder;
  WriteModel(folder, Model());
  for (const int64_t layer : {-1, 3}) {
    EXPECT_THAT(
        PrepareLayer(folder.path(), folder.At("out"), {.layer = layer}),
        StatusIs(StatusCode::kInvalidArgument,
                 AllOf(HasSubstr(folder.path()),
                       HasSubstr(absl::StrCat("has no layer ", layer)),
                       HasSubstr("0..2, of which the last is the head"))));
  }
}

TEST(PrepareDenseTest, RefusesRanksThatDoNotExistOrCutABlock) {
  const TestFolder folder;
  WriteModel(folder, Model());
  const auto prepare = [&](int64_t layer, int64_t rank, int64_t ranks) {
    return PrepareLayer(folder.path(), folder.At("out"),
                        {.layer = layer, .rank = rank, .ranks = ranks});
  };
  EXPECT_THAT(prepare(0, 2, 2), StatusIs(StatusCode::kInvalidArgument,
                                         HasSubstr("must be within 0..1")));
  EXPECT_THAT(prepare(2, 2, 2), StatusIs(StatusCode::kInvalidArgument,
                                         HasSubstr("must be within 0..1")));
  EXPECT_THAT(prepare(0, 0, 4),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("k_proj.trellis\": output size 256 cannot be "
                                 "split over 4 ranks")));
  EXPECT_FALSE(std::filesystem::exists(folder.At("out")));
}

TEST(PrepareDenseTest, LeavesNothingBehindWhenItRefuses) {
  const TestFolder folder;
  TestTensors tensors = Model();
  tensors["model.layers.0.mlp.up_proj.mcg"].bytes = "abcd";
  WriteModel(folder, tensors);
  EXPECT_THAT(PrepareLayer(folder.path(), folder.At("out"), {.layer = 0}),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("must hold 0xcbac1fed")));
  EXPECT_FALSE(std::filesystem::exists(folder.At("out")));
  EXPECT_OK(PrepareLayer(folder.path(), folder.At("out"), {.layer = 1}));
}

}  // namespace
}  // namespace kiln
