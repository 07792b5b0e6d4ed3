// The manifest rules of the format specification: rows 1 to 10 of its
// fail-closed table, one test each, and the vector files. Every test changes
// one thing of a valid manifest.

#include "templates/formats/btx_manifest.h"

#include <gtest/gtest.h>

#include <limits>
#include <utility>

#include "tests/support/btx_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::BtxOptions;
using ::kiln::testing::StatusIs;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

json Valid(const BtxOptions& options = {}) {
  return json::parse(testing::MakeBtxManifest(options, "layer"));
}

json ValidPairs() { return Valid({.bits = 0, .pair_kinds = {"P33", "P43"}}); }

json ValidCoupled() {
  return Valid({.codebook = "sqg_e4m3",
                .hidden = 512,
                .intermediate = 512,
                .bits = 2,
                .coupled = true});
}

absl::StatusOr<BtxManifest> Parse(const json& manifest) {
  return ParseBtxManifest(manifest.dump(), "m.json");
}

// What the parser says to `manifest` with `value` at `pointer`.
absl::Status With(json manifest, const char* pointer, const json& value) {
  manifest[json::json_pointer(pointer)] = value;
  return Parse(manifest).status();
}

absl::Status Without(json manifest, const std::string& parent,
                     const std::string& key) {
  json& object = manifest[json::json_pointer(parent)];
  EXPECT_EQ(object.erase(key), 1u) << key;
  return Parse(manifest).status();
}

auto Refused(const std::string& text) {
  return StatusIs(StatusCode::kInvalidArgument,
                  AllOf(HasSubstr("m.json:1:"), HasSubstr(text)));
}

TEST(BtxManifestTest, ReadsEveryField) {
  BtxOptions options;
  options.barriers = {8};
  ASSERT_OK_AND_ASSIGN(const BtxManifest manifest, Parse(Valid(options)));
  EXPECT_EQ(manifest.codebook, TrellisCodebook::kMcg);
  EXPECT_EQ(manifest.experts, 3);
  EXPECT_EQ(manifest.hidden, 256);
  EXPECT_EQ(manifest.intermediate, 512);
  EXPECT_EQ(manifest.slots(), 16);
  EXPECT_EQ(manifest.bits, 3);
  EXPECT_FALSE(manifest.pairs());
  EXPECT_FALSE(manifest.coupled);
  EXPECT_FALSE(manifest.per_expert_rotations);
  EXPECT_EQ(manifest.row_alignment, 64);
  EXPECT_EQ(manifest.extent_alignment, 4);
  EXPECT_EQ(manifest.barriers, std::vector<int64_t>{8});
  ASSERT_EQ(manifest.layers.size(), 1u);
  EXPECT_EQ(manifest.layers.at(1).file, "btx-layer-00001.safetensors");
  EXPECT_EQ(manifest.layers.at(1).sha256, Sha256("layer"));
  ASSERT_OK_AND_ASSIGN(const BtxManifest pairs, Parse(ValidPairs()));
  EXPECT_EQ(pairs.pair_kinds, (std::vector<uint8_t>{0x33, 0x43}));
  EXPECT_EQ(pairs.bits, 0);
  ASSERT_OK_AND_ASSIGN(const BtxManifest coupled, Parse(ValidCoupled()));
  EXPECT_TRUE(coupled.coupled);
  EXPECT_EQ(coupled.pre_block, 512);
  EXPECT_EQ(coupled.post_block, 128);
}

// Applies the operations of one vector case.
json Applied(json manifest, const json& operations) {
  for (const json& operation : operations) {
    json* at = &manifest;
    const json& path = operation.at(1);
    for (size_t i = 0; i + 1 < path.size(); ++i) {
      at = &(*at)[path[i].get<std::string>()];
    }
    const std::string last = path.back();
    if (operation.at(0) == "set") {
      (*at)[last] = operation.at(2);
    } else {
      at->erase(last);
    }
  }
  return manifest;
}

TEST(BtxManifestTest, EveryVectorCaseIsAcceptedOrRefusedAsRecommended) {
  const auto files =
      testing::FilesNamed(testing::VectorsFolder(), "btx_manifest", ".json");
  ASSERT_FALSE(files.empty());
  for (const auto& path : files) {
    const json file = testing::ReadJson(path);
    for (const json& item : file.at("cases")) {
      SCOPED_TRACE(item.at("name").get<std::string>());
      const absl::StatusOr<BtxManifest> parsed =
          Parse(Applied(file.at("base"), item.at("ops")));
      EXPECT_EQ(parsed.ok(), item.at("recommended_accept").get<bool>())
          << parsed.status();
    }
    ASSERT_OK_AND_ASSIGN(const BtxManifest base, Parse(file.at("base")));
    for (const json& extent : file.at("extents_on_base")) {
      EXPECT_EQ(
          CheckBtxExtent(base, extent.at("first_slot"), extent.at("slot_count"))
              .ok(),
          extent.at("accept").get<bool>())
          << extent;
    }
  }
}

TEST(BtxManifestTest, Row01RefusesOtherThanObjectsAndUnknownOrMissingKeys) {
  EXPECT_THAT(ParseBtxManifest("[]", "m.json"),
              Refused("manifest must be an object, found an array"));
  for (const char* key :
       {"geometry", "rates", "hadamard", "layout", "layers"}) {
    const std::string pointer = std::string("/") + key;
    EXPECT_THAT(With(Valid(), pointer.c_str(), 3),
                Refused("must be an object, found 3"));
    EXPECT_THAT(With(Valid(), (pointer + "/extra").c_str(), 3),
                Refused("\"extra\""));
    EXPECT_THAT(Without(Valid(), "", key), Refused("lacks the key"));
  }
  EXPECT_THAT(With(Valid(), "/extra", 3),
              Refused("unknown key \"extra\" in manifest; known: "));
  const json geometry = Valid().at("geometry");
  for (const auto& [key, value] : geometry.items()) {
    EXPECT_THAT(Without(Valid(), "/geometry", key), Refused(key));
  }
  for (const char* key : {"atom_row_alignment", "extent_alignment_slots"}) {
    EXPECT_THAT(Without(Valid(), "/layout", key), Refused(key));
  }
  for (const char* key : {"file", "sha256"}) {
    EXPECT_THAT(Without(Valid(), "/layers/1", key), Refused(key));
  }
  EXPECT_THAT(ParseBtxManifest("{\"kind\": 1, \"kind\": 2}", "m.json"),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("duplicate")));
}

TEST(BtxManifestTest, Row02RefusesOtherKindsSchemasAndCodebooks) {
  EXPECT_THAT(With(Valid(), "/kind", "btx"),
              Refused("\"kind\" is \"btx\", must be one of \"btx-manifest\""));
  EXPECT_THAT(With(Valid(), "/schema", "btx-atoms-v2"),
              Refused("must be one of \"btx-atoms-v1\""));
  EXPECT_THAT(With(Valid(), "/codebook", "3inst"),
              Refused("must be one of \"mcg\", \"sqg_e4m3\", \"sqg_fp16\""));
}

TEST(BtxManifestTest, Row03TheSeedBelongsToMcgAlone) {
  EXPECT_THAT(Without(Valid(), "", "codebook_seed"),
              Refused("lacks the key \"codebook_seed\""));
  EXPECT_THAT(With(Valid(), "/codebook_seed", 3417055212),
              Refused("is 3417055212, must be within 3417055213..3417055213"));
  EXPECT_THAT(With(Valid(), "/codebook_seed", 3417055213.0),
              Refused("\"codebook_seed\" must be an integer, found 3.4"));
  EXPECT_THAT(
      With(Valid({.codebook = "sqg_e4m3"}), "/codebook_seed", 3417055213),
      Refused("only the codebook mcg has a seed"));
  EXPECT_OK(With(Valid({.codebook = "sqg_e4m3"}), "/codebook_seed", nullptr));
}

TEST(BtxManifestTest, Row04RefusesImpossibleGeometry) {
  for (const char* key : {"num_experts", "hidden_size", "intermediate_size",
                          "atom_channels", "atom_slots"}) {
    const std::string pointer = std::string("/geometry/") + key;
    for (const json& value : {json(0), json(-32), json(true), json(32.0),
                              json("32"), json(int64_t{1} << 40)}) {
      EXPECT_THAT(With(Valid(), pointer.c_str(), value), Refused(key)) << value;
    }
  }
  EXPECT_THAT(With(Valid(), "/geometry/hidden_size", 250),
              Refused("\"hidden_size\" is 250, must be a multiple of 16"));
  EXPECT_THAT(With(Valid(), "/geometry/intermediate_size", 500),
              Refused("must be a multiple of 32"));
  EXPECT_THAT(With(Valid(), "/geometry/atom_channels", 16),
              Refused("is 16, must be within 32..32"));
  EXPECT_THAT(With(Valid(), "/geometry/atom_slots", 15),
              Refused("is 15, must be within 16..16"));
  const char* layers = "/geometry/moe_layer_indices";
  EXPECT_THAT(With(Valid(), layers, json::array()), Refused("at least one"));
  EXPECT_THAT(With(Valid(), layers, {1, 1}), Refused("has 1 twice"));
  EXPECT_THAT(With(Valid(), layers, {1, -1}),
              Refused("is -1, must be within 0.."));
  EXPECT_THAT(With(Valid(), layers, {1, true}),
              Refused("must be an integer, found true"));
  EXPECT_THAT(With(Valid(), layers, "1"), Refused("must be an array"));
}

TEST(BtxManifestTest, Row05RefusesRatesThatTheCodebookLacks) {
  EXPECT_THAT(Without(Valid(), "/rates", "bits"),
              Refused("lacks the key \"bits\""));
  EXPECT_THAT(With(Valid(), "/rates/pair_kinds", json::array({"P33"})),
              Refused("must be absent: the rates are uniform"));
  EXPECT_THAT(With(Valid(), "/rates/bits", 7), Refused("within 3..6"));
  EXPECT_THAT(With(Valid(), "/rates/bits", 2), Refused("within 3..6"));
  EXPECT_THAT(With(Valid(), "/rates/bits", true),
              Refused("\"bits\" must be an integer, found true"));
  EXPECT_THAT(With(Valid({.codebook = "sqg_e4m3"}), "/rates/bits", 5),
              Refused("within 2..4"));
  EXPECT_THAT(
      With(Valid({.codebook = "sqg_fp16", .bits = 5}), "/rates/bits", 4),
      Refused("within 5..6"));
}

TEST(BtxManifestTest, Row06RefusesImpossiblePairKinds) {
  const char* kinds = "/rates/pair_kinds";
  EXPECT_OK(Parse(ValidPairs()));
  EXPECT_THAT(With(ValidPairs(), "/rates/bits", 3),
              Refused("must be absent: each expert has its own rates"));
  EXPECT_THAT(With(ValidPairs(), kinds, json::array()),
              Refused("must not be empty"));
  EXPECT_THAT(With(ValidPairs(), kinds, "P33"), Refused("must be an array"));
  EXPECT_THAT(With(ValidPairs(), kinds, {"P33", "P33"}),
              Refused("has P33 twice"));
  for (const json& unknown : {json("P35"), json("p33"), json(33)}) {
    EXPECT_THAT(With(ValidPairs(), kinds, json::array({unknown})),
                Refused("must have kinds of P22, P33, P24, P43, P44"));
  }
  // Two bits with mcg, as in a uniform layer; high rates with sqg_fp16.
  EXPECT_THAT(With(ValidPairs(), kinds, json::array({"P24"})),
              Refused("the codebook mcg has the rates 3..6"));
  EXPECT_THAT(Parse(Valid({.codebook = "sqg_fp16", .pair_kinds = {"P33"}})),
              Refused("the codebook sqg_fp16 has the rates 5..6"));
  EXPECT_THAT(With(ValidPairs(), "/rates/structure", "profile"),
              Refused("must be one of \"uniform\", \"per_expert_pair\""));
  EXPECT_THAT(Parse(Valid({.intermediate = 384, .pair_kinds = {"P33"}})),
              Refused("needs a multiple of 8 slots"));
}

TEST(BtxManifestTest, Row07RefusesInconsistentHadamardBlocks) {
  for (const char* key : {"coupled", "per_expert_input_rotations"}) {
    EXPECT_THAT(With(Valid(), (std::string("/hadamard/") + key).c_str(), 1),
                Refused("must be a boolean, found 1"));
    EXPECT_THAT(Without(Valid(), "/hadamard", key), Refused(key));
  }
  for (const char* key : {"pre_block", "post_block"}) {
    const std::string pointer = std::string("/hadamard/") + key;
    EXPECT_THAT(With(Valid(), pointer.c_str(), 128),
                Refused("must be absent: \"coupled\" is false"));
    EXPECT_THAT(Without(ValidCoupled(), "/hadamard", key), Refused(key));
    for (const json& value :
         {json(0), json(-32), json(48), json(1024), json(96), json(128.0)}) {
      EXPECT_THAT(With(ValidCoupled(), pointer.c_str(), value), Refused(key))
          << value;
    }
  }
}

TEST(BtxManifestTest, Row08RefusesImpossibleAlignmentsAndBarriers) {
  EXPECT_THAT(With(Valid(), "/layout/atom_row_alignment", 0),
              Refused("\"atom_row_alignment\" is 0"));
  EXPECT_THAT(With(Valid(), "/layout/atom_row_alignment", -64),
              Refused("is -64, must be within 1.."));
  for (const json& value : {json(0), json(-1), json(17)}) {
    EXPECT_THAT(With(Valid(), "/layout/extent_alignment_slots", value),
                Refused("must be within 1..16"));
  }
  EXPECT_THAT(With(Valid(), "/layout/extent_alignment_slots", true),
              Refused("must be an integer, found true"));
  EXPECT_THAT(With(Valid(), "/layout/extent_alignment_slots", 5),
              Refused("must divide \"atom_slots\", 16"));
  const char* barriers = "/layout/extent_barriers";
  for (const json& value : {json(0), json(16), json(-1)}) {
    EXPECT_THAT(With(Valid(), barriers, json::array({value})),
                Refused("within 1..15"));
  }
  EXPECT_THAT(With(Valid(), barriers, json::array({true})),
              Refused("must be an integer, found true"));
  EXPECT_THAT(With(Valid(), barriers, {8, 8}), Refused("has 8 twice"));
  EXPECT_THAT(With(Valid(), barriers, 8), Refused("must be an array"));
}

TEST(BtxManifestTest, Row09RefusesInconsistentLayerEntries) {
  EXPECT_THAT(With(Valid(), "/layers", json::object()),
              Refused("lacks layer 1"));
  const json entry = Valid().at("layers").at("1");
  for (const char* key : {"2", "x", "01", "+1", "1 ", "-1"}) {
    EXPECT_THAT(With(Valid(), (std::string("/layers/") + key).c_str(), entry),
                Refused("decimal numbers of \"moe_layer_indices\": 1"));
  }
  EXPECT_THAT(With(Valid(), "/layers/1", 3), Refused("must be an object"));
  EXPECT_THAT(With(Valid(), "/layers/1/size", 3), Refused("unknown key"));
  EXPECT_THAT(With(Valid(), "/layers/1/file", 3), Refused("must be a string"));
  for (const char* file :
       {"", ".", "..", "../x", "/etc/x", "a/b", "a\\b", "a\nb"}) {
    EXPECT_THAT(With(Valid(), "/layers/1/file", file),
                Refused("must be the name of a file beside the manifest"));
  }
  for (const std::string& sha :
       {std::string("ff"), std::string(64, 'z'), std::string(65, '0')}) {
    EXPECT_THAT(With(Valid(), "/layers/1/sha256", sha),
                Refused("must be 64 hexadecimal digits"));
  }
}

TEST(BtxManifestTest, Row10RefusesImpossibleExtents) {
  BtxOptions options;
  options.barriers = {8};
  ASSERT_OK_AND_ASSIGN(const BtxManifest manifest, Parse(Valid(options)));
  EXPECT_OK(CheckBtxExtent(manifest, 0, 8));
  EXPECT_OK(CheckBtxExtent(manifest, 8, 4));
  const int64_t most = std::numeric_limits<int64_t>::max();
  for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 0},
                                     {-4, 4},
                                     {0, -4},
                                     {16, 4},
                                     {12, 8},
                                     {4, most},
                                     {most, 4}}) {
    EXPECT_THAT(CheckBtxExtent(manifest, first, count),
                StatusIs(StatusCode::kInvalidArgument,
                         HasSubstr("must be a non-empty range within 0..16")))
        << first << " " << count;
  }
  EXPECT_THAT(
      CheckBtxExtent(manifest, 2, 4),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("multiples of 4")));
  EXPECT_THAT(
      CheckBtxExtent(manifest, 4, 2),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("multiples of 4")));
  EXPECT_THAT(CheckBtxExtent(manifest, 4, 8),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("crosses the barrier at slot 8")));
}

}  // namespace
}  // namespace kiln
