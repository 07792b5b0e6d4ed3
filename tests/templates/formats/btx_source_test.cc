// Native tensors of BTX layers: every tile and scale in its place, and results
// that agree with other containers of the same weights.

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "device/half.h"
#include "templates/formats/btx_layer.h"
#include "templates/formats/coupled_signs.h"
#include "templates/formats/pair_layer.h"
#include "templates/fused_moe/reference.h"
#include "tests/support/btx_writer.h"
#include "tests/support/native_layer.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::kiln::testing::BtxFiles;
using ::kiln::testing::BtxOptions;
using ::kiln::testing::BtxRates;
using ::kiln::testing::NativeLayer;
using ::kiln::testing::RandomLayer;
using ::kiln::testing::TestFolder;

// A checkpoint on disk and one extent of its layer.
struct OpenedBtx {
  OpenedBtx(const BtxOptions& options, const TrellisExtent& extent) {
    Open(options, extent);
  }

  void Open(const BtxOptions& options, const TrellisExtent& extent) {
    const BtxFiles files = testing::MakeBtxFiles(options);
    testing::WriteBtx(folder, options, files);
    ASSERT_OK_AND_ASSIGN(
        const BtxManifest manifest,
        ParseBtxManifest(testing::MakeBtxManifest(options, files.LayerBytes()),
                         "m.json"));
    absl::StatusOr<BtxLayer> opened =
        BtxLayer::Open(folder.path(), manifest, options.layer);
    ASSERT_OK(opened);
    layer = std::make_unique<BtxLayer>(*std::move(opened));
    absl::StatusOr<std::unique_ptr<TrellisSource>> from =
        TrellisFromBtx(extent, layer.get());
    ASSERT_OK(from);
    source = *std::move(from);
  }

  std::string Read(FusedMoeParam slot) const {
    return testing::ReadSlot(source.get(), slot);
  }

  TestFolder folder;
  std::unique_ptr<BtxLayer> layer;
  std::unique_ptr<TrellisSource> source;
};

std::string SharedTable(const BtxOptions& options, int table) {
  const RandomLayer random(options.seed);
  std::string bytes;
  for (int64_t e = 0; e < (options.per_expert_rotations ? options.experts : 1);
       ++e) {
    bytes += random.Scales(e, table, 0, options.hidden);
  }
  return bytes;
}

TEST(BtxSourceTest, UniformTensorsHoldEveryTileInItsPlace) {
  for (const bool per_expert : {false, true}) {
    BtxOptions options;
    options.per_expert_rotations = per_expert;
    const RandomLayer random(options.seed);
    for (const TrellisExtent& extent :
         {TrellisExtent{0, 512}, TrellisExtent{128, 384}}) {
      const OpenedBtx btx(options, extent);
      std::string gate, up, down, rotations;
      for (int64_t e = 0; e < options.experts; ++e) {
        for (int64_t h = 0; h < options.hidden / 16; ++h) {
          for (int64_t c = extent.begin / 16; c < extent.end / 16; ++c) {
            gate += random.Tile(e, 0, c, h, options.bits);
            up += random.Tile(e, 1, c, h, options.bits);
          }
        }
        for (int64_t c = extent.begin / 16; c < extent.end / 16; ++c) {
          for (int64_t h = 0; h < options.hidden / 16; ++h) {
            down += random.Tile(e, 2, c, h, options.bits);
          }
        }
        for (int section = 0; section < 3; ++section) {
          rotations += random.Scales(e, testing::kRotationTable + section,
                                     extent.begin, extent.end);
        }
      }
      EXPECT_TRUE(btx.Read(FusedMoeParam::kWGate) == gate);
      EXPECT_TRUE(btx.Read(FusedMoeParam::kWUp) == up);
      EXPECT_TRUE(btx.Read(FusedMoeParam::kWDown) == down);
      EXPECT_TRUE(btx.Read(FusedMoeParam::kRotations) == rotations);
      EXPECT_TRUE(btx.Read(FusedMoeParam::kGateSuh) ==
                  SharedTable(options, testing::kGateSuhTable));
      EXPECT_TRUE(btx.Read(FusedMoeParam::kUpSuh) ==
                  SharedTable(options, testing::kUpSuhTable));
      EXPECT_TRUE(btx.Read(FusedMoeParam::kDownSvh) ==
                  SharedTable(options, testing::kDownSvhTable));
      EXPECT_EQ(btx.source->layout().shared_scales, !per_expert);
    }
  }
}

TEST(BtxSourceTest, SizesAreDeclaredExactly) {
  for (const BtxOptions& options :
       {BtxOptions{},
        BtxOptions{.codebook = "sqg_e4m3", .pair_kinds = {"P33", "P24"}},
        BtxOptions{.codebook = "sqg_e4m3", .pair_kinds = {"P43", "P33"}},
        BtxOptions{.codebook = "sqg_e4m3",
        .hidden = 512,
        .bits = 2,
        .coupled = true}}) {
    const OpenedBtx btx(options, {256, 512});
    for (const FusedMoeParam slot : kTrellisSlots) {
      const SafetensorsTensor tensor = btx.source->Tensor(slot);
      EXPECT_EQ(tensor.bytes(), btx.Read(slot).size()) << tensor.name;
    }
  }
}

TEST(BtxSourceTest, PairTensorsHoldTheRecordsInTheirOrder) {
  for (const std::vector<std::string>& kinds :
       {std::vector<std::string>{"P33", "P24"}, {"P43", "P33"}}) {
    const BtxOptions options = {.codebook = "sqg_e4m3", .pair_kinds = kinds};
    const RandomLayer random(options.seed);
    for (const int64_t pair : {0, 1}) {
      const OpenedBtx btx(options, {256 * pair, 256 * (pair + 1)});
      std::string gate, down, rotations, fc1, fc2;
      for (int64_t e = 0; e < options.experts; ++e) {
        const BtxRates one = testing::BtxRatesOf(options, pair, e, false);
        const BtxRates two = testing::BtxRatesOf(options, pair, e, true);
        fc1 += static_cast<char>(one.low << 4 | one.high);
        fc2 += static_cast<char>(two.low << 4 | two.high);
        for (int64_t h = 0; h < options.hidden / 16; ++h) {
          for (int64_t t = 0; t < 16; ++t) {
            gate +=
                random.Tile(e, 0, 16 * pair + t, h, t < 8 ? one.low : one.high);
          }
        }
        for (int64_t t = 0; t < 16; ++t) {
          for (int64_t h = 0; h < options.hidden / 16; ++h) {
            down +=
                random.Tile(e, 2, 16 * pair + t, h, t < 8 ? two.low : two.high);
          }
        }
        for (int section = 0; section < 3; ++section) {
          rotations += random.Scales(e, testing::kRotationTable + section,
                                     256 * pair, 256 * (pair + 1));
        }
      }
      EXPECT_TRUE(btx.Read(FusedMoeParam::kWGate) == gate);
      EXPECT_TRUE(btx.Read(FusedMoeParam::kWDown) == down);
      EXPECT_TRUE(btx.Read(FusedMoeParam::kRotations) == rotations);
      const TrellisLayout& layout = btx.source->layout();
      EXPECT_EQ(std::string(layout.rates_fc1.begin(), layout.rates_fc1.end()),
                fc1);
      EXPECT_EQ(std::string(layout.rates_fc2.begin(), layout.rates_fc2.end()),
                fc2);
    }
  }
}

// The same weights as EXL3 groups.
TEST(BtxSourceTest, EqualsAnExl3CheckpointOfTheSameWeightsByteForByte) {
  BtxOptions options;
  options.per_expert_rotations = true;
  const RandomLayer random(options.seed);
  testing::TestTensors tensors;
  const char* names[] = {"gate_proj", "up_proj", "down_proj"};
  for (int64_t e = 0; e < options.experts; ++e) {
    for (int section = 0; section < 3; ++section) {
      const bool down = section == 2;
      const std::string key =
          testing::ExpertKey({}, 1, static_cast<uint64_t>(e), names[section]);
      const int64_t h_tiles = options.hidden / 16;
      const int64_t i_tiles = options.intermediate / 16;
      std::string trellis;
      for (int64_t a = 0; a < (down ? i_tiles : h_tiles); ++a) {
        for (int64_t b = 0; b < (down ? h_tiles : i_tiles); ++b) {
          trellis +=
              random.Tile(e, section, down ? a : b, down ? b : a, options.bits);
        }
      }
      const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
      tensors[key + ".trellis"] = {
          "I16",
          {size(down ? i_tiles : h_tiles), size(down ? h_tiles : i_tiles),
           size(16 * options.bits)},
          trellis};
      const std::string inner = random.Scales(
          e, testing::kRotationTable + section, 0, options.intermediate);
      const std::string outer = random.Scales(e, section, 0, options.hidden);
      tensors[key + (down ? ".svh" : ".suh")] = {
          "F16", {size(options.hidden)}, outer};
      tensors[key + (down ? ".suh" : ".svh")] = {
          "F16", {size(options.intermediate)}, inner};
      tensors[key + ".mcg"] = {"I32", {}, "\xED\x1F\xAC\xCB"};
    }
  }
  const TestFolder folder;
  testing::WriteCheckpoint(folder, tensors, 1);
  ASSERT_OK_AND_ASSIGN(Checkpoint checkpoint, Checkpoint::Open(folder.path()));
  ModelConfig config;
  config.naming = {"mlp.experts", {"gate_proj", "up_proj", "down_proj"}};
  config.hidden = options.hidden;
  config.intermediate = options.intermediate;
  config.experts = options.experts;
  config.top_k = 1;
  config.moe_layers = {1};
  ASSERT_OK_AND_ASSIGN(const RoutedExperts experts,
                       RoutedExperts::Find(checkpoint, config));
  ASSERT_OK_AND_ASSIGN(const RoutedLayer layer, experts.Layer(1));
  for (const TrellisExtent& extent :
       {TrellisExtent{0, 512}, TrellisExtent{256, 384}}) {
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TrellisSource> exl3,
                         TrellisFromExl3(layer, extent, &checkpoint));
    const OpenedBtx btx(options, extent);
    for (const FusedMoeParam slot : kTrellisSlots) {
      EXPECT_EQ(btx.source->Tensor(slot).TypeAndShape(),
                exl3->Tensor(slot).TypeAndShape());
      EXPECT_TRUE(btx.Read(slot) == testing::ReadSlot(exl3.get(), slot));
    }
  }
}

// ---- results ---------------------------------------------------------------

// The float64 result of one layer's extents, as parts.
std::vector<double> Result(const std::vector<const TrellisSource*>& sources,
                           MoeActivation activation) {
  std::vector<double> sum;
  for (const TrellisSource* source : sources) {
    const NativeLayer native(const_cast<TrellisSource*>(source));
    const testing::NativeCall call(source->layout(), 4, 2, 11);
    FusedMoeProblem p = native.Problem();
    call.Fill(&p);
    p.activation = activation;
    const std::vector<double> part =
        testing::AllRows(p, ReferenceMode::kFloat64);
    if (sum.empty()) sum.resize(part.size());
    for (size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
  }
  return sum;
}

double Distance(const std::vector<double>& a, const std::vector<double>& b) {
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(error / norm);
}

TEST(BtxSourceTest, UniformExtentsAddUpToTheLayer) {
  const BtxOptions options = {.codebook = "sqg_e4m3", .bits = 4};
  const OpenedBtx whole(options, {0, 512});
  const OpenedBtx left(options, {0, 128});
  const OpenedBtx right(options, {128, 512});
  EXPECT_LE(Distance(Result({left.source.get(), right.source.get()},
                            MoeActivation::kSitu),
                     Result({whole.source.get()}, MoeActivation::kSitu)),
            1e-12);
}

// A pair whose kinds are all P33 is a uniform layer in another order.
TEST(BtxSourceTest, PairsOfEqualRatesGiveTheUniformResult) {
  const BtxOptions pairs = {.codebook = "sqg_e4m3", .pair_kinds = {"P33"}};
  const BtxOptions uniform = {.codebook = "sqg_e4m3", .bits = 3};
  const OpenedBtx first(pairs, {0, 256});
  const OpenedBtx second(pairs, {256, 512});
  const OpenedBtx whole(uniform, {0, 512});
  EXPECT_LE(Distance(Result({first.source.get(), second.source.get()},
                            MoeActivation::kSilu),
                     Result({whole.source.get()}, MoeActivation::kSilu)),
            1e-12);
}

TEST(BtxSourceTest, ACoupledExtentCarriesItsSliceOfTheGlobalSigns) {
  const BtxOptions options = {.codebook = "sqg_e4m3",
                              .hidden = 512,
                              .intermediate = 512,
                              .bits = 2,
                              .coupled = true};
  for (const int64_t begin : {0, 128, 256, 384}) {
    const OpenedBtx btx(options, {begin, begin + 128});
    const std::string rotations = btx.Read(FusedMoeParam::kRotations);
    ASSERT_EQ(rotations.size(), 3u * 6 * 128 * 2);
    for (int64_t e = 0; e < 3; ++e) {
      const uint8_t draw = testing::BtxDrawOf(e);
      const auto pre = CoupledSigns(draw, SignAxis::kPre, 1024);
      const auto post = CoupledSigns(draw, SignAxis::kPost, 512);
      const auto sign = [&](int64_t i) {
        const auto at = static_cast<size_t>(2 * (e * 6 * 128 + 3 * 128 + i));
        EXPECT_EQ(rotations[at], 0);
        return static_cast<uint8_t>(rotations[at + 1]) == 0xBC ? -1 : 1;
      };
      for (int64_t i = 0; i < 256; ++i) {
        EXPECT_EQ(sign(i), pre[static_cast<size_t>(2 * begin + i)]);
      }
      for (int64_t i = 0; i < 128; ++i) {
        EXPECT_EQ(sign(256 + i), post[static_cast<size_t>(begin + i)]);
      }
    }
    // One operand for both projections, scaled by the half's table.
    const std::string scales = SharedTable(
        options, begin < 256 ? testing::kGateSuhTable : testing::kUpSuhTable);
    EXPECT_TRUE(btx.Read(FusedMoeParam::kGateSuh) == scales);
    EXPECT_TRUE(btx.Read(FusedMoeParam::kUpSuh) == scales);
  }
}

TEST(BtxSourceTest, ModesAndDescriptorsFollowTheRates) {
  const std::vector<uint8_t> dynamic = {0x33, 0x24, 0x33};
  EXPECT_EQ(PairModes(dynamic), (std::vector<int32_t>{0, 1, 0}));
  const std::vector<uint8_t> pools = {0x33, 0x43, 0x33, 0x43};
  EXPECT_EQ(PairModes(pools), (std::vector<int32_t>{0, 1, 0, 1}));
  // A record of one bit and H = 64 is 4 * 8 tiles of 8 words of 32 bits.
  const int64_t unit = 4 * 8 * 8;
  EXPECT_EQ(PairDescriptors(pools, 64),
            (std::vector<int64_t>{0, 6 * unit << 1 | 1, 13 * unit << 1,
                                  19 * unit << 1 | 1}));
}

}  // namespace
}  // namespace kiln
