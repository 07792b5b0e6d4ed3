// Real-valued experts through the encoder into sidecars, and back by the
// reader; then the tensors that kernels read.

#include "templates/formats/npk_encode.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "templates/formats/npk_import.h"
#include "templates/formats/npk_prepare.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/npk_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::ReadAll;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

NpkMetadata Layer(NpkBoundary boundary, int bits) {
  NpkMetadata metadata;
  metadata.bits = bits;
  metadata.boundary = boundary;
  metadata.layer = 3;
  metadata.world_size = 2;
  metadata.experts = 2;
  metadata.hidden = 512;
  metadata.intermediate_global = 256;
  metadata.limit = "10";
  metadata.model_id = "test";
  return metadata;
}

// Channels of different magnitude.
std::vector<float> Uneven(size_t rows, size_t columns, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> scale(rows + columns);
  for (double& s : scale) s = std::exp(0.5 * normal(random));
  std::vector<float> weights(rows * columns);
  for (size_t i = 0; i < weights.size(); ++i) {
    weights[i] = static_cast<float>(0.02 * normal(random) * scale[i / columns] *
                                    scale[rows + i % columns]);
  }
  return weights;
}

RealExpert Expert(int64_t e) {
  const auto seed = static_cast<uint64_t>(10 * e);
  return {.gate = Uneven(256, 512, seed),
          .up = Uneven(256, 512, seed + 1),
          .down = Uneven(512, 256, seed + 2)};
}

absl::StatusOr<NpkEncoding> Encode(const NpkMetadata& metadata,
                                   const TestFolder& folder, int threads = 2) {
  return EncodeNpkLayer(
      metadata, [](int64_t e) { return Expert(e); }, 5, threads, {},
      folder.path());
}

double SquaredDistance(const std::vector<float>& a,
                       const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::pow(a[i] - b[i], 2);
  return sum;
}

class NpkEncodeTest : public ::testing::TestWithParam<NpkBoundary> {};

TEST_P(NpkEncodeTest, TheFilesStandForTheWeightsWithTheStatedError) {
  // A power of two cannot bring every block to the best ratio: identity is
  // worse than section A.10, coupled is not.
  const NpkMetadata metadata = Layer(GetParam(), 3);
  const TestFolder folder;
  ASSERT_OK_AND_ASSIGN(const NpkEncoding encoding, Encode(metadata, folder));
  ASSERT_EQ(encoding.paths.size(), 2u);
  std::vector<NpkSidecar> sidecars;
  std::vector<const NpkSidecar*> ranks;
  uint64_t bytes = 0;
  for (const std::string& path : encoding.paths) {
    ASSERT_OK_AND_ASSIGN(NpkSidecar sidecar, NpkSidecar::Open(path));
    sidecars.push_back(std::move(sidecar));
    bytes += std::filesystem::file_size(path);
  }
  for (const NpkSidecar& sidecar : sidecars) ranks.push_back(&sidecar);
  EXPECT_EQ(bytes, encoding.bytes);
  EXPECT_OK(CheckNpkRanks(ranks));
  double error = 0;
  for (int64_t e = 0; e < 2; ++e) {
    const RealExpert real = Expert(e);
    const RealExpert found = DecodeNpkExpert(ranks, e);
    error += SquaredDistance(real.gate, found.gate) +
             SquaredDistance(real.up, found.up) +
             SquaredDistance(real.down, found.down);
  }
  EXPECT_NEAR(error, encoding.squared_error, 1e-5 * error);
  const double relative = error / encoding.energy;
  if (GetParam() == NpkBoundary::kCoupled) {
    EXPECT_NEAR(relative, 0.01745, 0.0015);
  } else {
    EXPECT_LT(relative, 0.03);
    EXPECT_GT(relative, 0.017);
  }
}

INSTANTIATE_TEST_SUITE_P(Boundaries, NpkEncodeTest,
                         ::testing::Values(NpkBoundary::kCoupled,
                                           NpkBoundary::kIdentity),
                         [](const auto& which) {
                           return which.param == NpkBoundary::kCoupled
                                      ? "Coupled"
                                      : "Identity";
                         });

TEST(NpkEncodeFilesTest, DoNotDependOnThreads) {
  NpkMetadata metadata = Layer(NpkBoundary::kCoupled, 2);
  metadata.experts = 1;
  const TestFolder one;
  const TestFolder three;
  ASSERT_OK(Encode(metadata, one, 1));
  ASSERT_OK(Encode(metadata, three, 3));
  const std::string name = NpkFileName(3, 1, 2);
  EXPECT_EQ(ReadAll(one.At(name)), ReadAll(three.At(name)));
}

TEST(NpkEncodeFilesTest, RefusesWhatRulesForbid) {
  const TestFolder folder;
  NpkMetadata metadata = Layer(NpkBoundary::kCoupled, 6);
  EXPECT_THAT(
      Encode(metadata, folder),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("rule V5: bits is 6")));
  metadata.bits = 3;
  metadata.hidden = 384;
  EXPECT_THAT(Encode(metadata, folder),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("rule V6: hidden is 384"),
                             HasSubstr("512 unless the boundary is identity"),
                             Not(HasSubstr("V7")))));
  // All at once: who changes one number should not be told of another then.
  metadata.world_size = 3;
  EXPECT_THAT(
      Encode(metadata, folder),
      StatusIs(StatusCode::kInvalidArgument,
               AllOf(HasSubstr("rule V6: hidden is 384"),
                     HasSubstr("rule V7: intermediate_global is 256"),
                     HasSubstr("each of 3 ranks; possible with --tp: 1, 2"))));
  metadata.hidden = 512;
  metadata.world_size = 4;
  EXPECT_THAT(Encode(metadata, folder),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("rule V7: intermediate_global is 256")));
  metadata.world_size = 2;
  metadata.limit = "1e3";
  EXPECT_THAT(Encode(metadata, folder),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("rule V15: \"limit\" is \"1e3\"")));
  metadata.limit = "10";
  const absl::Status status = EncodeNpkLayer(
                                  metadata,
                                  [](int64_t e) {
                                    RealExpert expert = Expert(e);
                                    if (e == 1) expert.down[77] = INFINITY;
                                    return expert;
                                  },
                                  5, 1, {}, folder.path())
                                  .status();
  EXPECT_THAT(status, StatusIs(StatusCode::kInvalidArgument,
                               HasSubstr("layer 3 expert 1 down: weight 77 is "
                                         "inf, must be finite")));
}

// ---- prepared tensors ------------------------------------------------------

// A folder with both ranks of the small sidecar.
void WriteBothRanks(const TestFolder& folder) {
  for (int rank = 0; rank < 2; ++rank) {
    NpkMetadata metadata = testing::SmallNpk();
    metadata.rank = rank;
    folder.Write(
        NpkFileName(7, rank, 2),
        testing::NpkBytes(metadata, testing::RandomNpkTensors(metadata, 1)));
  }
}

TEST(NpkPrepareTest, WritesTheTensorsThatItDeclares) {
  const TestFolder folder;
  WriteBothRanks(folder);
  ASSERT_OK_AND_ASSIGN(const PreparedNpkLayer prepared,
                       PrepareNpkLayer(folder.path(), folder.At("out"),
                                       {.layer = 7, .rank = 1, .ranks = 2}));
  EXPECT_EQ(prepared.bytes, std::filesystem::file_size(prepared.path));
  ASSERT_OK_AND_ASSIGN(SafetensorsFile file,
                       SafetensorsFile::Open(prepared.path));
  ASSERT_OK_AND_ASSIGN(const std::vector<SafetensorsTensor> declared,
                       NpkPreparedTensors(prepared.metadata));
  ASSERT_EQ(file.header().tensors().size(), declared.size());
  std::map<std::string, std::string> tensors;
  for (size_t i = 0; i < declared.size(); ++i) {
    const SafetensorsTensor& tensor = file.header().tensors()[i];
    EXPECT_EQ(tensor.name, declared[i].name);
    EXPECT_EQ(tensor.TypeAndShape(), declared[i].TypeAndShape());
    EXPECT_EQ(tensor.bytes(), declared[i].bytes());
    ASSERT_OK_AND_ASSIGN(const std::span<const uint8_t> bytes,
                         file.Bytes(tensor));
    tensors[std::string(tensor.name)].assign(bytes.begin(), bytes.end());
  }
  const auto source = testing::RandomNpkTensors(prepared.metadata, 1);
  EXPECT_EQ(tensors.at("w13"), source.at(NpkTensor::kW13Stream));
  EXPECT_EQ(tensors.at("w2"), source.at(NpkTensor::kW2Stream));
  EXPECT_EQ(tensors.at("gate_up_suh"), source.at(NpkTensor::kGateUpSuh));
  EXPECT_EQ(tensors.at("down_svh"), source.at(NpkTensor::kDownSvh));

  // Every scale at the place that the formula of A.9.4 gives; the rest is 127.
  const auto check = [&](const std::string& name, NpkTensor from, size_t rows,
                         size_t columns) {
    const size_t panels = (rows + 255) / 256;
    std::string expected(3 * panels * (columns / 128) * 256 * 4, 127);
    for (size_t e = 0; e < 3; ++e) {
      for (size_t n = 0; n < rows; ++n) {
        for (size_t k = 0; k < columns; k += 32) {
          const size_t word =
              ((e * panels + n / 256) * (columns / 128) + k / 128) * 256 +
              n % 256;
          expected[4 * word + k % 128 / 32] =
              source.at(from)[(e * rows + n) * (columns / 32) + k / 32];
        }
      }
    }
    EXPECT_EQ(tensors.at(name), expected) << name;
  };
  check("w13_scale", NpkTensor::kW13Scale, 256, 512);
  check("w2_scale", NpkTensor::kW2Scale, 512, 128);

  std::string rotations;
  for (size_t e = 0; e < 3; ++e) {
    rotations += source.at(NpkTensor::kInnerScales).substr(e * 768, 768);
    const std::vector<uint16_t> signs =
        NpkSigns(prepared.metadata, static_cast<int>(e));
    rotations.append(reinterpret_cast<const char*>(signs.data()), 768);
  }
  EXPECT_EQ(tensors.at("rotations"), rotations);
}

TEST(NpkPrepareTest, PadsThePanelsOfRows) {
  // 384 rows: one panel and a half.
  const std::vector<uint8_t> scales(384 * 4, 120);
  const std::vector<uint32_t> words = NpkScaleWords(scales, 384, 128);
  ASSERT_EQ(words.size(), 512u);
  for (size_t n = 0; n < 512; ++n) {
    EXPECT_EQ(words[n], n < 384 ? 0x78787878u : 0x7F7F7F7Fu) << n;
  }
}

TEST(NpkPrepareTest, RefusesADamagedSidecarAndWritesNothing) {
  const TestFolder folder;
  WriteBothRanks(folder);
  const std::string name = NpkFileName(7, 1, 2);
  std::string file = ReadAll(folder.At(name));
  file.back() ^= 1;
  folder.Write(name, file);
  EXPECT_THAT(PrepareNpkLayer(folder.path(), folder.At("out"),
                              {.layer = 7, .rank = 1, .ranks = 2}),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr(name), HasSubstr("rule V1"))));
  EXPECT_FALSE(std::filesystem::exists(folder.At("out")));
}

TEST(NpkPrepareTest, RefusesSlicesThatAWordOfScalesCannotCover) {
  NpkMetadata metadata = testing::SmallNpk();
  metadata.boundary = NpkBoundary::kIdentity;
  metadata.intermediate = 32;
  EXPECT_THAT(NpkPreparedTensors(metadata),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("must be multiples of 128")));
}

TEST(NpkPrepareTest, DescribesAFolderOfSidecars) {
  const TestFolder folder;
  EXPECT_FALSE(HoldsNpkSidecars(folder.path()));
  EXPECT_THAT(DescribeNpkFolder(folder.path()),
              StatusIs(StatusCode::kNotFound, HasSubstr("npk1-layer-")));
  const NpkMetadata small = testing::SmallNpk();
  const auto tensors = testing::RandomNpkTensors(small, 1);
  for (int rank = 0; rank < 2; ++rank) {
    NpkMetadata metadata = small;
    metadata.rank = rank;
    folder.Write(NpkFileName(7, rank, 2), testing::NpkBytes(metadata, tensors));
  }
  EXPECT_TRUE(HoldsNpkSidecars(folder.path()));
  ASSERT_OK_AND_ASSIGN(const std::vector<NpkLayerSummary> layers,
                       DescribeNpkFolder(folder.path()));
  ASSERT_EQ(layers.size(), 1u);
  EXPECT_EQ(layers[0].metadata.rank, 0);
  EXPECT_EQ(layers[0].bytes, 2 * NpkTensorsOf(small).back().end);
  // A rank is gone.
  std::filesystem::remove(folder.At(NpkFileName(7, 0, 2)));
  EXPECT_THAT(DescribeNpkFolder(folder.path()),
              StatusIs(StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("layer 7"), HasSubstr("rule V14"))));
  // Or lies under another's name.
  std::filesystem::rename(folder.At(NpkFileName(7, 1, 2)),
                          folder.At(NpkFileName(6, 0, 1)));
  EXPECT_THAT(DescribeNpkFolder(folder.path()),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("holds what would be named npk1-layer-00007-"
                                 "rank-1-of-2.safetensors")));
}

TEST(NpkPlacesTest, WhatIsMissingIsRefusedWithWhatIsThere) {
  for (const bool p8 : {false, true}) {
    SCOPED_TRACE(p8);
    const TestFolder folder;
    const auto check = [&](int64_t layer, int64_t rank, int64_t ranks) {
      PrepareOptions options;
      options.layer = layer;
      options.rank = rank;
      options.ranks = ranks;
      return CheckNpkPlace(folder.path(), NpkPlacesIn(folder.path(), p8),
                           options);
    };
    const auto says = [&](const std::string& what) {
      return StatusIs(
          StatusCode::kInvalidArgument,
          absl::StrCat(folder.path(), ": has no sidecar of ", what));
    };
    EXPECT_THAT(check(3, 0, 4), says("layer 3; layers that it has: none"));
    for (const auto& [layer, rank] :
         {std::pair{3, 0}, {3, 1}, {12, 3}, {100, 2}}) {
      folder.Write(p8 ? P8FileName(layer, rank) : NpkFileName(layer, rank, 4),
                   "");
    }
    // No names of places, and one of the other kind.
    folder.Write("npk1-layer-3-rank-0-of-4.safetensors", "");
    folder.Write("p8-layer-5-tp4-rank-0.safetensors", "");
    folder.Write(p8 ? NpkFileName(9, 0, 4) : P8FileName(9, 0), "");
    EXPECT_OK(check(12, 3, 4));
    EXPECT_THAT(check(5, 0, 4),
                says("layer 5; layers that it has: 3, 12, 100"));
    EXPECT_THAT(
        check(3, 0, 1),
        says("rank 0/1 of layer 3; of this layer --tp may be: 0/4, 1/4"));
    EXPECT_THAT(check(3, 2, 4), says("rank 2/4 of layer 3; of this layer --tp "
                                     "may be: 0/4, 1/4"));
  }
}

TEST(NpkSidecarTest, AFileThatIsNotThereIsNamedOnce) {
  const TestFolder folder;
  EXPECT_THAT(NpkSidecar::Open(folder.At("none"), {}),
              StatusIs(StatusCode::kNotFound,
                       absl::StrCat("cannot open ", folder.At("none"),
                                    ": No such file or directory")));
  folder.Write("empty", "");
  EXPECT_THAT(NpkSidecar::Open(folder.At("empty"), {}),
              StatusIs(StatusCode::kInvalidArgument,
                       absl::StrCat(folder.At("empty"),
                                    ": rule V3: must be a regular file that is "
                                    "not empty")));
}

}  // namespace
}  // namespace kiln
