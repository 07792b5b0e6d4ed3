// The layer rules of the format specification: rows 11 to 15 of its fail-closed
// table. Every test changes one thing of a valid checkpoint; the digest in the
// manifest is that of the changed file, unless the digest is what is tested.

#include "templates/formats/btx_layer.h"

#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "templates/formats/pair_layer.h"
#include "tests/support/btx_writer.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::BtxFiles;
using ::kiln::testing::BtxOptions;
using ::kiln::testing::MakeBtxFiles;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

const BtxOptions kUniform;
const BtxOptions kPairs = {
    .codebook = "sqg_e4m3", .hidden = 128, .pair_kinds = {"P33", "P24"}};
const BtxOptions kCoupled = {.codebook = "sqg_e4m3",
                             .hidden = 512,
                             .intermediate = 256,
                             .bits = 2,
                             .coupled = true};

absl::StatusOr<BtxManifest> ReadManifest(const std::string& text) {
  return ParseBtxManifest(text, "m.json");
}

// Opens and validates the layer of these files.
absl::Status Check(const BtxOptions& options, const BtxFiles& files) {
  const TestFolder folder;
  testing::WriteBtx(folder, options, files);
  absl::StatusOr<BtxManifest> manifest =
      ReadManifest(testing::MakeBtxManifest(options, files.LayerBytes()));
  if (!manifest.ok()) return manifest.status();
  absl::StatusOr<BtxLayer> layer =
      BtxLayer::Open(folder.path(), *manifest, options.layer);
  if (!layer.ok()) return layer.status();
  return layer->Validate();
}

auto Refused(const std::string& text) {
  return StatusIs(
      StatusCode::kInvalidArgument,
      AllOf(HasSubstr("btx-layer-00001.safetensors: "), HasSubstr(text)));
}

// As `options`, with one change to the files.
template <typename Change>
absl::Status Changed(const BtxOptions& options, const Change& change) {
  BtxFiles files = MakeBtxFiles(options);
  change(&files);
  return Check(options, files);
}

void SetHalf(std::string* bytes, size_t element, uint16_t value) {
  (*bytes)[2 * element] = static_cast<char>(value);
  (*bytes)[2 * element + 1] = static_cast<char>(value >> 8);
}

TEST(BtxLayerTest, AcceptsWhatTheWriterWrites) {
  for (const BtxOptions& options : {kUniform, kPairs, kCoupled}) {
    EXPECT_OK(Check(options, MakeBtxFiles(options)));
    BtxOptions per_expert = options;
    per_expert.per_expert_rotations = true;
    EXPECT_OK(Check(per_expert, MakeBtxFiles(per_expert)));
  }
}

TEST(BtxLayerTest, Row11RefusesALayerThatTheManifestLacks) {
  const TestFolder folder;
  const BtxFiles files = MakeBtxFiles(kUniform);
  testing::WriteBtx(folder, kUniform, files);
  ASSERT_OK_AND_ASSIGN(
      const BtxManifest manifest,
      ReadManifest(testing::MakeBtxManifest(kUniform, files.LayerBytes())));
  EXPECT_THAT(BtxLayer::Open(folder.path(), manifest, 2).status(),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("layer 2 is not in the manifest; it has 1")));
}

TEST(BtxLayerTest, Row11RefusesAFileThatIsMissing) {
  const TestFolder folder;
  ASSERT_OK_AND_ASSIGN(const BtxManifest manifest,
                       ReadManifest(testing::MakeBtxManifest(kUniform, "")));
  EXPECT_THAT(BtxLayer::Open(folder.path(), manifest, 1).status(),
              StatusIs(StatusCode::kNotFound,
                       HasSubstr("btx-layer-00001.safetensors")));
}

TEST(BtxLayerTest, Row11RefusesAnotherDigest) {
  const TestFolder folder;
  const BtxFiles files = MakeBtxFiles(kUniform);
  testing::WriteBtx(folder, kUniform, files);
  std::string bytes = files.LayerBytes();
  ASSERT_OK_AND_ASSIGN(const BtxManifest manifest,
                       ReadManifest(testing::MakeBtxManifest(kUniform, bytes)));
  bytes[bytes.size() / 2] ^= 1;  // a trellis payload: no other rule sees it
  folder.Write("btx-layer-00001.safetensors", bytes);
  ASSERT_OK_AND_ASSIGN(BtxLayer layer,
                       BtxLayer::Open(folder.path(), manifest, 1));
  EXPECT_THAT(layer.Validate(),
              Refused(absl::StrCat("has the SHA-256 ", Sha256(bytes).ToHex(),
                                   ", the manifest says ",
                                   Sha256(files.LayerBytes()).ToHex())));
}

TEST(BtxLayerTest, Row11RefusesOtherMetadata) {
  for (const auto& [key, value] : MakeBtxFiles(kUniform).metadata) {
    EXPECT_THAT(Changed(kUniform,
                        [&key = key](BtxFiles* files) {
                          files->metadata[key] = "other";
                        }),
                Refused(absl::StrCat("\"", key, "\" is \"other\", must be \"",
                                     value, "\"")));
    EXPECT_THAT(
        Changed(kUniform,
                [&key = key](BtxFiles* files) { files->metadata.erase(key); }),
        Refused(absl::StrCat("\"", key, "\" is missing")));
  }
}

TEST(BtxLayerTest, Row11RefusesAnotherSetOfTensors) {
  for (const BtxOptions& options : {kUniform, kPairs, kCoupled}) {
    for (const auto& [name, tensor] : MakeBtxFiles(options).tensors) {
      EXPECT_THAT(Changed(options,
                          [&name = name](BtxFiles* files) {
                            files->tensors.erase(name);
                          }),
                  Refused(absl::StrCat("tensor \"", name, "\" is missing")));
    }
  }
  EXPECT_THAT(Changed(kUniform,
                      [](BtxFiles* files) {
                        files->tensors["rates_fc1"] = {"U8", {2, 3}, "333333"};
                      }),
              Refused("tensor \"rates_fc1\" is not declared by the manifest"));
}

TEST(BtxLayerTest, Row11RefusesSeparateRatesForGateAndUp) {
  EXPECT_THAT(
      Changed(kPairs,
              [](BtxFiles* files) {
                files->tensors["rates_gate"] = files->tensors["rates_fc1"];
                files->tensors["rates_up"] = files->tensors["rates_fc1"];
                files->tensors.erase("rates_fc1");
              }),
      Refused("tensor \"rates_gate\" is not declared"));
}

TEST(BtxLayerTest, Row12RefusesAtomsOfAnotherShape) {
  const auto with_shape = [](const std::string& type,
                             std::vector<uint64_t> shape) {
    return Changed(kUniform, [&](BtxFiles* files) {
      testing::TestTensor& atoms = files->tensors["atoms"];
      ASSERT_EQ(atoms.shape[0] * atoms.shape[1] % 32, 0u);
      atoms.type = type;
      if (!shape.empty()) atoms.shape = shape;
    });
  };
  const uint64_t stride = MakeBtxFiles(kUniform).tensors["atoms"].shape[1];
  EXPECT_THAT(with_shape("I8", {}), Refused("must be U8 [16, "));
  EXPECT_THAT(with_shape("U8", {16 * stride}), Refused("must be U8 [16, "));
  EXPECT_THAT(with_shape("U8", {8, 2 * stride}), Refused("must be U8 [16, "));
  EXPECT_THAT(with_shape("U8", {16, stride, 1}), Refused("must be U8 [16, "));
  EXPECT_THAT(Changed(kUniform,
                      [&](BtxFiles* files) {
                        testing::TestTensor& atoms = files->tensors["atoms"];
                        atoms.shape[1] += 32;
                        atoms.bytes.resize(16 * atoms.shape[1]);
                      }),
              Refused("a positive multiple of 64]"));
  EXPECT_THAT(Changed(kUniform,
                      [](BtxFiles* files) {
                        files->tensors["atoms"] = {"U8", {16, 0}, ""};
                      }),
              Refused("must be U8 [16, a positive multiple of 64]"));
}

TEST(BtxLayerTest, Row12RefusesRotationsAndScalesOfAnotherShapeOrType) {
  BtxOptions per_expert = kUniform;
  per_expert.per_expert_rotations = true;
  for (const BtxOptions& options : {kUniform, per_expert}) {
    for (const char* name : {"rotations", "gate_suh", "up_suh", "down_svh"}) {
      EXPECT_THAT(
          Changed(options,
                  [&](BtxFiles* files) { files->tensors[name].type = "BF16"; }),
          Refused(absl::StrCat("tensor \"", name, "\" is BF16 [")));
      EXPECT_THAT(Changed(options,
                          [&](BtxFiles* files) {
                            files->tensors[name].shape.push_back(1);
                          }),
                  Refused("must be F16 ["));
    }
  }
  // Scales of one kind where the manifest declares the other.
  BtxFiles files = MakeBtxFiles(kUniform);
  files.tensors["up_suh"] = MakeBtxFiles(per_expert).tensors["up_suh"];
  EXPECT_THAT(Check(kUniform, files),
              Refused("is F16 [3, 256], must be F16 [256]"));
}

TEST(BtxLayerTest, Row13RefusesRateTablesThatTheManifestDoesNotDeclare) {
  for (const char* name : {"rates_fc1", "rates_fc2"}) {
    EXPECT_THAT(Changed(kPairs,
                        [&](BtxFiles* files) {
                          files->tensors[name].shape = {3, 2};
                        }),
                Refused("must be U8 [2, 3]"));
    EXPECT_THAT(
        Changed(kPairs,
                [&](BtxFiles* files) { files->tensors[name].type = "I8"; }),
        Refused("must be U8 [2, 3]"));
    for (const char byte : {'\x35', '\x00', '\x42', '\x43', '\x22'}) {
      EXPECT_THAT(Changed(kPairs,
                          [&](BtxFiles* files) {
                            files->tensors[name].bytes[4] = byte;
                          }),
                  Refused("for pair 1, expert 1, must be of a kind that the "
                          "manifest declares: P33 0x33, P24 0x24"));
    }
  }
}

TEST(BtxLayerTest, Row13RefusesImpossibleDraws) {
  EXPECT_THAT(Changed(kCoupled,
                      [](BtxFiles* files) {
                        files->tensors["rotation_draws"].bytes[2] = 8;
                      }),
              Refused("tensor \"rotation_draws\" has 8 for expert 2, must be "
                      "within 0..7"));
  EXPECT_THAT(Changed(kCoupled,
                      [](BtxFiles* files) {
                        files->tensors["rotation_draws"].type = "I8";
                      }),
              Refused("must be U8 [3]"));
  EXPECT_THAT(Changed(kCoupled,
                      [](BtxFiles* files) {
                        files->tensors["rotation_draws"].shape = {3, 1};
                      }),
              Refused("must be U8 [3]"));
}

TEST(BtxLayerTest, Row14RefusesRowsThatAreTooShort) {
  for (const BtxOptions& options : {kUniform, kPairs}) {
    EXPECT_THAT(Changed(options,
                        [](BtxFiles* files) {
                          testing::TestTensor& atoms = files->tensors["atoms"];
                          atoms.shape[1] -= 64;
                          atoms.bytes.resize(16 * atoms.shape[1]);
                        }),
                Refused("for its experts"));
  }
}

TEST(BtxLayerTest, Row14RefusesPaddingThatIsNotZero) {
  for (BtxOptions options : {kUniform, kPairs}) {
    options.row_alignment = 4096;  // no bundle of these ends there
    options.experts = 5;
    for (const uint64_t row : {0, 7, 15}) {
      uint64_t at = 0;
      const absl::Status status = Changed(options, [&](BtxFiles* files) {
        testing::TestTensor& atoms = files->tensors["atoms"];
        at = (row + 1) * atoms.shape[1] - 1;
        ASSERT_EQ(atoms.bytes[at], 0);
        atoms.bytes[at] = 1;
      });
      EXPECT_THAT(status,
                  Refused(absl::StrCat("tensor \"atoms\" has 0x1 at byte ", at,
                                       ", which is padding and must be 0")));
    }
  }
}

TEST(BtxLayerTest, Row20RefusesScalesThatAreNotFinite) {
  for (const BtxOptions& options : {kUniform, kPairs, kCoupled}) {
    for (const char* name : {"rotations", "gate_suh", "up_suh", "down_svh"}) {
      for (const uint16_t value :
           std::vector<uint16_t>{0x7C00, 0xFC00, 0x7C01, 0xFFFF}) {
        EXPECT_THAT(Changed(options,
                            [&](BtxFiles* files) {
                              SetHalf(&files->tensors[name].bytes, 77, value);
                            }),
                    Refused(absl::StrCat("tensor \"", name,
                                         "\" has the binary16 bits 0x",
                                         absl::Hex(value), " at element 77")));
      }
    }
  }
}

// ---- extents of a layer ----------------------------------------------------

absl::Status Prepare(const BtxOptions& options, const TrellisExtent& extent) {
  const TestFolder folder;
  const BtxFiles files = MakeBtxFiles(options);
  testing::WriteBtx(folder, options, files);
  absl::StatusOr<BtxManifest> manifest =
      ReadManifest(testing::MakeBtxManifest(options, files.LayerBytes()));
  if (!manifest.ok()) return manifest.status();
  absl::StatusOr<BtxLayer> layer = BtxLayer::Open(folder.path(), *manifest, 1);
  if (!layer.ok()) return layer.status();
  return TrellisFromBtx(extent, &*layer).status();
}

TEST(BtxLayerTest, Row10RefusesExtentsThatCutABlock) {
  BtxOptions options = kUniform;
  options.extent_alignment = 1;
  EXPECT_OK(Prepare(options, {0, 512}));
  EXPECT_OK(Prepare(options, {128, 256}));
  for (const TrellisExtent& extent :
       {TrellisExtent{0, 96}, {32, 256}, {64, 192}}) {
    EXPECT_THAT(Prepare(options, extent), Refused("multiples of 128"));
  }
  for (const TrellisExtent& extent :
       {TrellisExtent{0, 0}, {-128, 128}, {0, 640}, {256, 128}}) {
    EXPECT_THAT(Prepare(options, extent), Refused("non-empty range"));
  }
  options.barriers = {8};
  EXPECT_THAT(Prepare(options, {0, 512}), Refused("crosses the barrier"));
}

TEST(BtxLayerTest, Row15APairPartHoldsExactlyOnePair) {
  BtxOptions options = kPairs;
  options.extent_alignment = 1;
  EXPECT_OK(Prepare(options, {0, 256}));
  EXPECT_OK(Prepare(options, {256, 512}));
  for (const TrellisExtent& extent :
       {TrellisExtent{0, 512}, {128, 384}, {0, 128}}) {
    EXPECT_THAT(Prepare(options, extent),
                Refused("must be one pair of 256 channels; 512 channels are 2 "
                        "parts"));
  }
}

auto NotRun(const std::string& text) {
  return StatusIs(StatusCode::kFailedPrecondition, HasSubstr(text));
}

TEST(BtxLayerTest, Row14RefusesOtherCoupledBlocks) {
  const BtxFiles files = MakeBtxFiles(kCoupled);
  const TestFolder folder;
  testing::WriteBtx(folder, kCoupled, files);
  for (const auto& [from, to] :
       {std::pair<const char*, const char*>{"\"pre_block\": 512",
                                            "\"pre_block\": 256"},
        {"\"post_block\": 128", "\"post_block\": 64"}}) {
    std::string text = testing::MakeBtxManifest(kCoupled, files.LayerBytes());
    const size_t at = text.find(from);
    ASSERT_NE(at, std::string::npos);
    text.replace(at, std::string(from).size(), to);
    ASSERT_OK_AND_ASSIGN(const BtxManifest manifest, ReadManifest(text));
    ASSERT_OK_AND_ASSIGN(BtxLayer layer,
                         BtxLayer::Open(folder.path(), manifest, 1));
    EXPECT_THAT(TrellisFromBtx({0, 128}, &layer).status(),
                NotRun("only 512 and 128 have an arithmetic"));
  }
}

TEST(BtxLayerTest, Row15RefusesCoupledPairs) {
  BtxOptions options = kPairs;
  options.coupled = true;
  options.hidden = 512;
  EXPECT_THAT(Prepare(options, {0, 256}), NotRun("coupled and has pair rates"));
}

TEST(BtxLayerTest, Row15RefusesKindsWithoutAnArm) {
  for (const std::vector<std::string>& kinds : {std::vector<std::string>{"P22"},
                                                {"P44"},
                                                {"P24"},
                                                {"P43"},
                                                {"P33", "P22"},
                                                {"P33", "P24", "P43"}}) {
    BtxOptions options = kPairs;
    options.pair_kinds = kinds;
    EXPECT_THAT(Prepare(options, {0, 256}), NotRun("which no kernel runs"));
  }
  for (const std::vector<std::string>& kinds :
       {std::vector<std::string>{"P33"}, {"P33", "P24"}, {"P43", "P33"}}) {
    BtxOptions options = kPairs;
    options.pair_kinds = kinds;
    EXPECT_OK(Prepare(options, {0, 256}));
  }
}

TEST(BtxLayerTest, Row24RefusesPairsAcrossHiddenChannelsThatFillNoBlock) {
  BtxOptions options = kPairs;
  options.hidden = 144;
  EXPECT_THAT(Prepare(options, {0, 256}),
              NotRun("has the hidden size 144, must be a multiple of 128"));
}

// Experts of pair rates follow each other without gaps, so a rate byte of
// another kind moves all that stands behind it.
TEST(BtxLayerTest, Row30RefusesRatesThatDoNotPackTheRow) {
  BtxOptions options = kPairs;
  options.pair_kinds = {"P33", "P43"};
  options.row_alignment = 1;
  ASSERT_OK(Check(options, MakeBtxFiles(options)));
  // Of pair 1, whose rows are the longest. A P33 that says P43: the row ends
  // before its experts do.
  const auto with = [&](uint64_t at, char from, char to) {
    return Changed(options, [&](BtxFiles* files) {
      std::string& rates = files->tensors["rates_fc2"].bytes;
      ASSERT_EQ(rates[at], from);
      rates[at] = to;
    });
  };
  EXPECT_THAT(with(3, '\x33', '\x43'), Refused("for its experts"));
  // A P43 that says P33: what is left at the end is no padding.
  EXPECT_THAT(with(4, '\x43', '\x33'),
              Refused("which is padding and must be 0"));
}

TEST(BtxLayerTest, Row31RefusesACoupledExtentAcrossTheHalves) {
  EXPECT_OK(Prepare(kCoupled, {0, 128}));
  EXPECT_OK(Prepare(kCoupled, {128, 256}));
  EXPECT_THAT(Prepare(kCoupled, {0, 256}), Refused("crosses channel 128"));
}

TEST(BtxLayerTest, Row16RefusesAHiddenSizeThatCutsABlock) {
  BtxOptions options = kUniform;
  options.hidden = 144;
  EXPECT_THAT(Prepare(options, {0, 512}),
              NotRun("hidden size 144, must be a multiple of 128"));
}

}  // namespace
}  // namespace kiln
