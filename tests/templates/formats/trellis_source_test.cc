#include "templates/formats/trellis_source.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "templates/fused_moe/reference.h"
#include "templates/fused_moe/workload.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::AddExperts;
using ::kiln::testing::ExpertKey;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestFolder;
using ::kiln::testing::TestTensors;
using ::kiln::testing::WriteCheckpoint;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kHidden = 256;
constexpr uint64_t kIntermediate = 384;
constexpr uint64_t kExperts = 3;

ModelConfig Config(uint64_t hidden, uint64_t intermediate, uint64_t experts) {
  ModelConfig config;
  config.naming = {"mlp.experts", {"gate_proj", "up_proj", "down_proj"}};
  config.hidden = static_cast<int64_t>(hidden);
  config.intermediate = static_cast<int64_t>(intermediate);
  config.experts = static_cast<int64_t>(experts);
  config.top_k = 2;
  config.moe_layers = {0};
  return config;
}

// A checkpoint of one layer on disk, opened.
struct OneLayer {
  OneLayer() = default;

  OneLayer(const TestTensors& tensors, const ModelConfig& config) {
    WriteCheckpoint(folder, tensors, 2);
    Open(config);
  }

  explicit OneLayer(const TestTensors& tensors)
      : OneLayer(tensors, Config(kHidden, kIntermediate, kExperts)) {}

  void Open(const ModelConfig& config) {
    absl::StatusOr<Checkpoint> opened = Checkpoint::Open(folder.path());
    ASSERT_OK(opened);
    checkpoint = *std::move(opened);
    const absl::StatusOr<RoutedExperts> experts =
        RoutedExperts::Find(checkpoint, config);
    ASSERT_OK(experts);
    absl::StatusOr<RoutedLayer> routed = experts->Layer(0);
    ASSERT_OK(routed);
    layer = *std::move(routed);
  }

  absl::StatusOr<std::unique_ptr<TrellisSource>> Source(int64_t begin,
                                                        int64_t end) {
    return TrellisFromExl3(layer, {.begin = begin, .end = end}, &checkpoint);
  }

  TestFolder folder;
  Checkpoint checkpoint;
  RoutedLayer layer;
};

TestTensors Tensors(const std::string& codebook = "mcg") {
  TestTensors tensors;
  AddExperts({}, 0, kHidden, kIntermediate, kExperts, {3, 4, 5, codebook},
             &tensors);
  return tensors;
}

std::string Read(TrellisSource* source, FusedMoeParam slot) {
  std::string bytes;
  EXPECT_OK(source->Stream(slot, [&](std::span<const uint8_t> piece) {
    bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    return absl::OkStatus();
  }));
  return bytes;
}

std::string BytesOf(const TestTensors& tensors, uint64_t expert,
                    const std::string& part) {
  return tensors.at(ExpertKey({}, 0, expert, part)).bytes;
}

TEST(TrellisSourceTest, SizesAndNamesAreThoseOfTheOp) {
  OneLayer layer(Tensors());
  for (const TrellisExtent extent :
       {TrellisExtent{0, 384}, TrellisExtent{128, 256}}) {
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TrellisSource> source,
                         layer.Source(extent.begin, extent.end));
    ASSERT_OK_AND_ASSIGN(const RequestGeometry geometry,
                         ServedGeometry(source->layout()));
    const std::vector<uint64_t> bytes = FusedMoeBytes(geometry, 1);
    const std::vector<ParamDecl> params = FusedMoeParams(geometry);
    for (const FusedMoeParam slot : kTrellisSlots) {
      const auto index = static_cast<size_t>(slot);
      EXPECT_EQ(source->Tensor(slot).bytes(), bytes[index]);
      EXPECT_EQ(source->Tensor(slot).name, params[index].name);
      EXPECT_EQ(Read(source.get(), slot).size(), bytes[index]);
    }
  }
}

TEST(TrellisSourceTest, TheWholeExtentStacksTheExperts) {
  const TestTensors tensors = Tensors();
  OneLayer layer(tensors);
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TrellisSource> source,
                       layer.Source(0, 384));
  const auto stacked = [&](std::initializer_list<const char*> parts) {
    std::string bytes;
    for (uint64_t e = 0; e < kExperts; ++e) {
      for (const char* part : parts) bytes += BytesOf(tensors, e, part);
    }
    return bytes;
  };
  const auto read = [&](FusedMoeParam slot) {
    return Read(source.get(), slot);
  };
  EXPECT_EQ(read(FusedMoeParam::kWGate), stacked({"gate_proj.trellis"}));
  EXPECT_EQ(read(FusedMoeParam::kWUp), stacked({"up_proj.trellis"}));
  EXPECT_EQ(read(FusedMoeParam::kWDown), stacked({"down_proj.trellis"}));
  EXPECT_EQ(read(FusedMoeParam::kGateSuh), stacked({"gate_proj.suh"}));
  EXPECT_EQ(read(FusedMoeParam::kUpSuh), stacked({"up_proj.suh"}));
  EXPECT_EQ(read(FusedMoeParam::kDownSvh), stacked({"down_proj.svh"}));
  EXPECT_EQ(read(FusedMoeParam::kRotations),
            stacked({"gate_proj.svh", "up_proj.svh", "down_proj.suh"}));
}

TEST(TrellisSourceTest, ARankHoldsItsColumnsOfFc1AndItsRowsOfFc2) {
  const TestTensors tensors = Tensors();
  OneLayer layer(tensors);
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TrellisSource> source,
                       layer.Source(128, 256));
  const std::string gate = Read(source.get(), FusedMoeParam::kWGate);
  const std::string down = Read(source.get(), FusedMoeParam::kWDown);
  const std::string rotations = Read(source.get(), FusedMoeParam::kRotations);
  for (uint64_t e = 0; e < kExperts; ++e) {
    const std::string whole_gate = BytesOf(tensors, e, "gate_proj.trellis");
    for (uint64_t a = 0; a < kHidden / 16; ++a) {
      for (uint64_t b = 0; b < 8; ++b) {
        EXPECT_EQ(gate.substr(((e * 16 + a) * 8 + b) * 96, 96),
                  whole_gate.substr((a * 24 + 8 + b) * 96, 96));
      }
    }
    const std::string whole_down = BytesOf(tensors, e, "down_proj.trellis");
    for (uint64_t a = 0; a < 8; ++a) {
      for (uint64_t b = 0; b < kHidden / 16; ++b) {
        EXPECT_EQ(down.substr(((e * 8 + a) * 16 + b) * 160, 160),
                  whole_down.substr(((8 + a) * 16 + b) * 160, 160));
      }
    }
    EXPECT_EQ(rotations.substr(e * 768, 768),
              BytesOf(tensors, e, "gate_proj.svh").substr(256, 256) +
                  BytesOf(tensors, e, "up_proj.svh").substr(256, 256) +
                  BytesOf(tensors, e, "down_proj.suh").substr(256, 256));
  }
}

// The float64 result of the native tensors of one extent on seeded inputs.
std::vector<double> Result(TrellisSource* source) {
  const absl::StatusOr<RequestGeometry> served =
      ServedGeometry(source->layout());
  EXPECT_OK(served.status());
  RequestGeometry geometry = served.value();
  geometry.top_k = 2;
  const FusedMoeWorkload workload(geometry, 5);
  const auto tokens = workload.MakeTokens(DrawKind::kUniform, 0, 2);
  std::vector<std::string> slots;
  for (const FusedMoeParam slot : kTrellisSlots) {
    slots.push_back(Read(source, slot));
  }
  const auto words = [&](size_t i) {
    return reinterpret_cast<const uint16_t*>(slots[i].data());
  };
  const FusedMoeProblem problem{.tokens = 2,
                                .hidden = geometry.hidden,
                                .intermediate = geometry.intermediate,
                                .experts = geometry.experts,
                                .top_k = 2,
                                .codebook = geometry.weights.codebook,
                                .bits = geometry.weights.bits,
                                .x = tokens.x.data(),
                                .topk_ids = tokens.topk_ids.data(),
                                .topk_weights = reinterpret_cast<const float*>(
                                    tokens.topk_weights.data()),
                                .w_gate = words(0),
                                .w_up = words(1),
                                .w_down = words(2),
                                .gate_suh = words(3),
                                .up_suh = words(4),
                                .rotations = words(5),
                                .down_svh = words(6)};
  std::vector<double> out(2 * kHidden);
  const std::vector<int64_t> rows = {0, 1};
  FusedMoeReferenceRows(problem, rows, ReferenceMode::kFloat64, out.data(), 1);
  return out;
}

TEST(TrellisSourceTest, TheRanksOutputsAddUpToTheWhole) {
  for (const char* codebook : {"3inst", "mcg", "mul1"}) {
    OneLayer layer(Tensors(codebook));
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TrellisSource> whole,
                         layer.Source(0, 384));
    const std::vector<double> expected = Result(whole.get());
    std::vector<double> sum(expected.size(), 0);
    for (int64_t rank = 0; rank < 3; ++rank) {
      ASSERT_OK_AND_ASSIGN(const TrellisExtent extent,
                           ExtentOfRank(kIntermediate, rank, 3));
      ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TrellisSource> part,
                           layer.Source(extent.begin, extent.end));
      const std::vector<double> result = Result(part.get());
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += result[i];
    }
    double largest = 0;
    for (const double value : expected) {
      largest = std::max(largest, std::abs(value));
    }
    ASSERT_GT(largest, 0);
    for (size_t i = 0; i < sum.size(); ++i) {
      EXPECT_NEAR(sum[i], expected[i], 1e-9 * largest) << codebook << " " << i;
    }
  }
}

TEST(TrellisSourceTest, LegacySignsFillTheTables) {
  TestTensors tensors = Tensors();
  const std::string key = ExpertKey({}, 0, 1, "down_proj");
  tensors.erase(key + ".suh");
  std::string signs(kIntermediate / 8, '\0');
  signs[17] = 0x02;  // channel 137, the tenth of the second block
  tensors[key + ".su"] = {"I16", {kIntermediate / 16}, signs};
  OneLayer layer(tensors);
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TrellisSource> source,
                       layer.Source(128, 256));
  const std::string rotations = Read(source.get(), FusedMoeParam::kRotations);
  const std::string down_suh = rotations.substr(768 + 512, 256);
  for (size_t i = 0; i < 128; ++i) {
    EXPECT_EQ(down_suh.substr(2 * i, 2),
              std::string(i == 9 ? "\x00\xBC" : "\x00\x3C", 2))
        << i;
  }
}

TEST(TrellisSourceTest, PiecesHoldAtMostSixtyFourExperts) {
  TestTensors tensors;
  AddExperts({}, 0, 128, 128, 130, {1, 1, 1, "mcg"}, &tensors);
  OneLayer layer(tensors, Config(128, 128, 130));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TrellisSource> source,
                       layer.Source(0, 128));
  for (const FusedMoeParam slot : kTrellisSlots) {
    const uint64_t expert_bytes = source->Tensor(slot).bytes() / 130;
    std::vector<uint64_t> pieces;
    ASSERT_OK(source->Stream(slot, [&](std::span<const uint8_t> piece) {
      pieces.push_back(piece.size() / expert_bytes);
      return absl::OkStatus();
    }));
    EXPECT_THAT(pieces, ::testing::ElementsAre(64, 64, 2));
  }
}

// One expert of 96 MiB per projection; its file is sparse.
TEST(TrellisSourceTest, PiecesHoldAtMostSixtyFourMebibytes) {
  const ModelConfig config = Config(16384, 8192, 1);
  std::string json = "{";
  uint64_t at = 0;
  const auto add = [&](const std::string& name, const std::string& type,
                       const std::string& shape, uint64_t bytes) {
    absl::StrAppend(&json, at > 0 ? "," : "", "\"", ExpertKey({}, 0, 0, name),
                    "\":{\"dtype\":\"", type, "\",\"shape\":[", shape,
                    "],\"data_offsets\":[", at, ",", at + bytes, "]}");
    at += bytes;
  };
  for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
    const bool down = projection[0] == 'd';
    const uint64_t in = down ? 8192 : 16384;
    const uint64_t out = down ? 16384 : 8192;
    add(absl::StrCat(projection, ".trellis"), "I16",
        absl::StrCat(in / 16, ",", out / 16, ",96"), in * out / 8 * 6);
    add(absl::StrCat(projection, ".suh"), "F16", absl::StrCat(in), 2 * in);
    add(absl::StrCat(projection, ".svh"), "F16", absl::StrCat(out), 2 * out);
  }
  OneLayer layer;
  const std::string head = testing::SafetensorsBytes(json + "}", "");
  const std::string path = layer.folder.Write("model.safetensors", head);
  ASSERT_EQ(truncate(path.c_str(), static_cast<off_t>(head.size() + at)), 0);
  layer.Open(config);
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TrellisSource> source,
                       layer.Source(0, 8192));
  for (const FusedMoeParam slot :
       {FusedMoeParam::kWGate, FusedMoeParam::kWDown}) {
    std::vector<uint64_t> pieces;
    ASSERT_OK(source->Stream(slot, [&](std::span<const uint8_t> piece) {
      pieces.push_back(piece.size());
      return absl::OkStatus();
    }));
    ASSERT_EQ(pieces.size(), 2u);
    EXPECT_EQ(pieces[0] + pieces[1], 96u << 20);
    // As many whole rows as fit.
    EXPECT_LE(pieces[0], kStagingBytesMax);
    EXPECT_GT(
        pieces[0] + source->Tensor(slot).bytes() / source->Tensor(slot).dims[1],
        kStagingBytesMax);
  }
}

TEST(TrellisSourceTest, AnErrorOfTheSinkStopsTheStream) {
  OneLayer layer(Tensors());
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TrellisSource> source,
                       layer.Source(0, 384));
  EXPECT_THAT(source->Stream(FusedMoeParam::kWUp,
                             [](std::span<const uint8_t>) {
                               return absl::ResourceExhaustedError("full");
                             }),
              StatusIs(StatusCode::kResourceExhausted, "full"));
}

TEST(TrellisSourceTest, RefusesExtentsThatCutABlockOrLeaveTheSource) {
  OneLayer layer(Tensors());
  for (const TrellisExtent extent :
       {TrellisExtent{64, 192}, TrellisExtent{0, 64}, TrellisExtent{128, 128},
        TrellisExtent{256, 128}, TrellisExtent{-128, 128},
        TrellisExtent{256, 512}}) {
    EXPECT_THAT(layer.Source(extent.begin, extent.end),
                StatusIs(StatusCode::kInvalidArgument,
                         AllOf(HasSubstr(absl::StrCat("[", extent.begin, ", ",
                                                      extent.end, ")")),
                               HasSubstr("multiples of 128"))));
  }
}

TEST(TrellisSourceTest, RefusesARankThatDoesNotExist) {
  EXPECT_THAT(ExtentOfRank(384, 3, 3),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("within 0..2")));
  EXPECT_THAT(ExtentOfRank(384, -1, 3),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("within 0..2")));
}

TEST(TrellisSourceTest, Row22RefusesAMarkerOfAnotherValueInAnyExpert) {
  TestTensors tensors = Tensors();
  const std::string name = ExpertKey({}, 0, 2, "down_proj.mcg");
  tensors[name].bytes = std::string(4, '\0');
  OneLayer layer(tensors);
  EXPECT_THAT(layer.Source(0, 384),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(name), HasSubstr("holds 0x0"),
                             HasSubstr("must hold 0xcbac1fed"))));
}

TEST(TrellisSourceTest, RefusesAScaleThatIsNotFiniteInAnyExpert) {
  TestTensors tensors = Tensors();
  const std::string name = ExpertKey({}, 0, 1, "up_proj.svh");
  tensors[name].bytes.replace(2, 2, std::string("\x00\x7C", 2));
  OneLayer layer(tensors);
  EXPECT_THAT(layer.Source(0, 384),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(name), HasSubstr("0x7c00"),
                             HasSubstr("channel 1, must be finite"))));
}

}  // namespace
}  // namespace kiln
