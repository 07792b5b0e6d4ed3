// A file of the public schema, made here from its description, and what each
// change to it is refused with.

#include "templates/formats/npk_import.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/support/checkpoint_writer.h"
#include "tests/support/npk_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using ::absl::StatusCode;
using ::kiln::testing::StatusIs;
using ::kiln::testing::TestFolder;
using ::kiln::testing::TestTensor;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kExperts = 2;
constexpr uint64_t kHidden = 512;
constexpr uint64_t kLocal = 128;

// What the imported sidecar says.
NpkMetadata Expected() {
  NpkMetadata m;
  m.bits = 4;
  m.layer = 20;
  m.rank = 2;
  m.world_size = 4;
  m.experts = kExperts;
  m.hidden = kHidden;
  m.intermediate = kLocal;
  m.intermediate_global = 4 * kLocal;
  m.limit = "10";
  m.model_id = "glm";
  m.encoder = P8TransformDigest();
  m.design.bytes.fill(0x33);
  return m;
}

struct P8File {
  std::map<std::string, std::string> metadata;
  std::map<std::string, TestTensor> tensors;

  // Sets the stated digests to those of the tensors.
  void Seal() {
    for (const auto& [name, tensor] : tensors) {
      metadata["sha256_" + name] = Sha256(tensor.bytes).ToHex();
    }
  }

  std::string Bytes() const {
    std::vector<std::string> members;
    std::vector<std::string> pairs;
    for (const auto& [key, value] : metadata) {
      pairs.push_back(absl::StrCat("\"", key, "\":\"", value, "\""));
    }
    members.push_back(
        absl::StrCat("\"__metadata__\":{", absl::StrJoin(pairs, ","), "}"));
    std::string data;
    for (const auto& [name, tensor] : tensors) {
      members.push_back(absl::StrCat(
          "\"", name, "\":{\"dtype\":\"", tensor.type, "\",\"shape\":[",
          absl::StrJoin(tensor.shape, ","), "],\"data_offsets\":[", data.size(),
          ",", data.size() + tensor.bytes.size(), "]}"));
      data += tensor.bytes;
    }
    return testing::SafetensorsBytes(
        absl::StrCat("{", absl::StrJoin(members, ","), "}"), data);
  }
};

// Gate rows and up rows of every expert exchanged.
std::string Swapped(const std::string& scales) {
  const size_t half = scales.size() / (2 * kExperts);
  std::string out;
  for (size_t at = 0; at < scales.size(); at += 2 * half) {
    out += scales.substr(at + half, half) + scales.substr(at, half);
  }
  return out;
}

P8File MakeP8(std::map<NpkTensor, std::string>* native) {
  *native = testing::RandomNpkTensors(Expected(), 9);
  native->at(NpkTensor::kSignDraw) = std::string(kExperts, '\0');
  P8File file;
  file.tensors["w13_trellis"] = {
      "I16", {2, kExperts, 32, 8, 64}, native->at(NpkTensor::kW13Stream)};
  file.tensors["w2_trellis"] = {
      "I16", {kExperts, 8, 32, 64}, native->at(NpkTensor::kW2Stream)};
  file.tensors["w13_scale_ue8m0"] = {"U8",
                                     {kExperts, 2 * kLocal, 16},
                                     Swapped(native->at(NpkTensor::kW13Scale))};
  file.tensors["w2_scale_ue8m0"] = {
      "U8", {kExperts, kHidden, 4}, native->at(NpkTensor::kW2Scale)};
  file.tensors["gate_up_suh_fp16"] = {
      "F16", {kHidden}, native->at(NpkTensor::kGateUpSuh)};
  file.tensors["intermediate_scales_fp16"] = {
      "F16", {kExperts, 3 * kLocal}, native->at(NpkTensor::kInnerScales)};
  file.tensors["down_svh_fp16"] = {
      "F16", {kHidden}, native->at(NpkTensor::kDownSvh)};
  file.tensors["coupled_sign_draw_u8"] = {
      "U8", {kExperts}, native->at(NpkTensor::kSignDraw)};
  const uint8_t zero = 0;
  file.metadata = {
      {"schema", "glm53-p8-coupled-h512-h128-tp4-rank.v1"},
      {"layer", "20"},
      {"rank", "2"},
      {"world_size", "4"},
      {"bits", "4"},
      {"alphabet", "e4m3"},
      {"scale", "ue8m0-k32"},
      {"law", "procedural-mcg-alpha2"},
      {"boundary", "coupled-h512-h128-suh-svh-v1"},
      {"component", "p8-coupled-h512-h128-sign-v1"},
      {"full_coupled", "true"},
      {"activation", "silu-cap10"},
      {"cast_order", "luke-qsrt-coupled-reference-v1"},
      {"h512", "normalized-sylvester-512-v1"},
      {"h128", "normalized-sylvester-128-v1"},
      {"transform_id", "normalized-h512-outer-h128-inner-sign-draw0-v1"},
      {"fc1_interleave", "slot0-atom32-slot1-atom32-v1"},
      {"sign_generator", "qsrt-coupled-signs-v1"},
      {"sign_draw", "0"},
      {"sign_pre_axis", "1"},
      {"sign_post_axis", "2"},
      {"tp_slice", "contiguous-atom32-v1"},
      {"global_intermediate", "512"},
      {"local_atom_begin", "8"},
      {"gate_up_suh_shared", "true"},
      {"down_svh_shared", "true"},
      {"coupled_signs_shared", "true"},
      {"signed_scales", "true"},
      {"ldlq", "false"},
      {"fc1_trellis_slot_order", "gate-up"},
      {"fc1_scale_plane_order", "up-gate"},
      {"coupled_scale_order", "gate_svh-up_svh-down_suh"},
      {"weight_payload_bpw", "4.25"},
      {"encoder_transform_sha256", P8TransformDigest().ToHex()},
      {"source_design_sha256", Expected().design.ToHex()},
      {"sha256_coupled_signs_fp16",
       NpkSignsDigest(Expected(), {&zero, 1}).ToHex()}};
  file.Seal();
  return file;
}

// Status of importing the valid file after a change.
absl::Status ImportChanged(const std::function<void(P8File*)>& change) {
  const TestFolder folder;
  std::map<NpkTensor, std::string> native;
  P8File file = MakeP8(&native);
  change(&file);
  const absl::Status status =
      ImportP8Sidecar(folder.Write("p8", file.Bytes()), "glm", folder.At("out"))
          .status();
  const bool written = std::filesystem::exists(
      folder.At("out/npk1-layer-00020-rank-2-of-4.safetensors"));
  EXPECT_EQ(written, status.ok());
  return status;
}

void ExpectRefused(const std::function<void(P8File*)>& change,
                   const std::string& first, const std::string& second = "") {
  EXPECT_THAT(
      ImportChanged(change),
      StatusIs(StatusCode::kInvalidArgument,
               AllOf(HasSubstr("/p8"), HasSubstr(first), HasSubstr(second))));
}

// Stated by the author's own runtime.
TEST(NpkImportTest, TheTransformHasThePublishedDigest) {
  EXPECT_EQ(P8TransformDigest().ToHex(),
            "093d219b18ba32471adcee746442b1481c7ba5659bbea62b94f1a665d4343a12");
}

TEST(NpkImportTest, TheSidecarHoldsTheSameTensorsWithGateScalesFirst) {
  const TestFolder folder;
  std::map<NpkTensor, std::string> native;
  const P8File file = MakeP8(&native);
  ASSERT_OK_AND_ASSIGN(const NpkImport import,
                       ImportP8Sidecar(folder.Write("p8", file.Bytes()), "glm",
                                       folder.At("out")));
  EXPECT_EQ(import.path,
            folder.At("out/npk1-layer-00020-rank-2-of-4.safetensors"));
  EXPECT_EQ(import.metadata, Expected());
  ASSERT_OK_AND_ASSIGN(const NpkSidecar sidecar, NpkSidecar::Open(import.path));
  EXPECT_EQ(sidecar.metadata(), Expected());
  for (const auto& [which, bytes] : native) {
    const std::span<const uint8_t> found = sidecar.tensor(which);
    EXPECT_EQ(std::string(found.begin(), found.end()), bytes)
        << static_cast<size_t>(which);
  }
}

TEST(NpkImportTest, RefusesEveryOtherWord) {
  for (const char* key : {"schema",
                          "alphabet",
                          "scale",
                          "law",
                          "boundary",
                          "component",
                          "full_coupled",
                          "activation",
                          "cast_order",
                          "h512",
                          "h128",
                          "transform_id",
                          "fc1_interleave",
                          "sign_generator",
                          "sign_draw",
                          "sign_pre_axis",
                          "sign_post_axis",
                          "tp_slice",
                          "global_intermediate",
                          "local_atom_begin",
                          "gate_up_suh_shared",
                          "down_svh_shared",
                          "coupled_signs_shared",
                          "signed_scales",
                          "ldlq",
                          "world_size",
                          "fc1_trellis_slot_order",
                          "fc1_scale_plane_order",
                          "coupled_scale_order",
                          "encoder_transform_sha256",
                          "source_design_sha256",
                          "sha256_coupled_signs_fp16",
                          "layer",
                          "rank",
                          "bits"}) {
    SCOPED_TRACE(key);
    ExpectRefused([&](P8File* file) { file->metadata[key] = "other"; },
                  absl::StrCat("\"", key, "\" is \"other\""), "must be");
    ExpectRefused([&](P8File* file) { file->metadata.erase(key); },
                  absl::StrCat("lack \"", key, "\""));
  }
}

TEST(NpkImportTest, RefusesRanksAndRatesThatTheSchemaDoesNotHave) {
  ExpectRefused([](P8File* file) { file->metadata["rank"] = "4"; },
                "\"rank\" is \"4\"", "within 0..3");
  ExpectRefused([](P8File* file) { file->metadata["rank"] = "1"; },
                "\"local_atom_begin\" is \"8\"", "must be \"4\"");
  ExpectRefused([](P8File* file) { file->metadata["bits"] = "2"; },
                "\"bits\" is 2", "within 3..5");
  ExpectRefused([](P8File* file) { file->metadata["bits"] = "3"; },
                "\"w13_trellis\" is I16 [2, 2, 32, 8, 64]",
                "I16 [2, 2, 32, 8, 48]");
}

TEST(NpkImportTest, RefusesAnotherInventory) {
  ExpectRefused(
      [](P8File* file) {
        file->tensors["codebook"] = {"U8", {1}, "a"};
        file->Seal();
      },
      "\"codebook\" is none of the schema's eight");
  ExpectRefused([](P8File* file) { file->tensors.erase("w2_scale_ue8m0"); },
                "\"w2_scale_ue8m0\" is missing");
}

TEST(NpkImportTest, RefusesOtherTypesAndShapes) {
  ExpectRefused(
      [](P8File* file) { file->tensors["down_svh_fp16"].type = "BF16"; },
      "\"down_svh_fp16\" is BF16 [512]", "must hold F16 [512]");
  ExpectRefused(
      [](P8File* file) {
        file->tensors["w2_scale_ue8m0"].shape = {kExperts, 4, kHidden};
      },
      "\"w2_scale_ue8m0\" is U8 [2, 4, 512]");
  ExpectRefused(
      [](P8File* file) {
        file->tensors["w13_trellis"].shape = {2, kExperts, 8, 32, 64};
      },
      "\"w13_trellis\" is I16 [2, 2, 8, 32, 64]", "multiple of 512");
  ExpectRefused(
      [](P8File* file) {
        file->tensors["w13_trellis"].shape = {2, kExperts * 32, 8, 64};
      },
      "\"w13_trellis\"");
}

TEST(NpkImportTest, RefusesAChangedByteOfAnyTensor) {
  std::map<NpkTensor, std::string> native;
  for (const auto& named : MakeP8(&native).tensors) {
    const std::string& name = named.first;
    ExpectRefused([&](P8File* file) { file->tensors[name].bytes.back() ^= 1; },
                  absl::StrCat("\"", name, "\" has the SHA-256"));
  }
}

TEST(NpkImportTest, RefusesDrawsThatTheSchemaDoesNotKnow) {
  ExpectRefused(
      [](P8File* file) {
        file->tensors["coupled_sign_draw_u8"].bytes[1] = 1;
        file->Seal();
      },
      "\"coupled_sign_draw_u8\" has the draw 1");
}

// Right by its digests, and still not what a kernel may read.
TEST(NpkImportTest, RefusesValuesThatNoSidecarMayHave) {
  ExpectRefused(
      [](P8File* file) {
        file->tensors["w2_scale_ue8m0"].bytes[5] = '\xFF';
        file->Seal();
      },
      "\"w2_scale\"", "255");
  ExpectRefused(
      [](P8File* file) {
        file->tensors["down_svh_fp16"].bytes[1] = 0;
        file->tensors["down_svh_fp16"].bytes[0] = 0;
        file->Seal();
      },
      "\"down_svh\"", "not zero");
}

}  // namespace
}  // namespace kiln
