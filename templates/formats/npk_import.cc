#include "templates/formats/npk_import.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "compiler/base/annotate_once.h"
#include "compiler/base/as_text.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"
#include "templates/formats/npk_header.h"
#include "templates/formats/safetensors.h"

namespace kiln {
namespace {

// Names of the eight tensors, in the order of NpkTensor.
constexpr const char* kNames[kNpkTensors] = {
    "w13_trellis",    "w2_trellis",          "w13_scale_ue8m0",
    "w2_scale_ue8m0", "gate_up_suh_fp16",    "intermediate_scales_fp16",
    "down_svh_fp16",  "coupled_sign_draw_u8"};

struct Word {
  const char* key;
  const char* value;
};

// What the contract fixes, in the sorted order of its canonical JSON; numbers
// stand there without quotes.
constexpr Word kTransform[] = {
    {"activation", "silu-cap10"},
    {"boundary", "coupled-h512-h128-suh-svh-v1"},
    {"cast_order", "luke-qsrt-coupled-reference-v1"},
    {"fc1_interleave", "slot0-atom32-slot1-atom32-v1"},
    {"h128", "normalized-sylvester-128-v1"},
    {"h512", "normalized-sylvester-512-v1"},
    {"quantized_down_order",
     "silu-cap10-fp32-sign-h128-fp32-down-suh-fp32-h128-fp32-e4m3-ue8m0-k32"},
    {"quantized_input_order",
     "bf16-cvt-rn-fp16-h512-fp32-suh-fp32-h128-fp32-e4m3-ue8m0-k32"},
    {"sign_draw", "0"},
    {"sign_generator", "qsrt-coupled-signs-v1"},
    {"sign_post_axis", "2"},
    {"sign_pre_axis", "1"},
    {"tp_slice", "contiguous-atom32-v1"},
    {"transform_id", "normalized-h512-outer-h128-inner-sign-draw0-v1"},
};

// Further words that a rank's file must have.
constexpr Word kWords[] = {
    {"schema", kP8Schema},
    {"alphabet", "e4m3"},
    {"scale", "ue8m0-k32"},
    {"law", "procedural-mcg-alpha2"},
    {"component", "p8-coupled-h512-h128-sign-v1"},
    {"full_coupled", "true"},
    {"gate_up_suh_shared", "true"},
    {"down_svh_shared", "true"},
    {"coupled_signs_shared", "true"},
    {"signed_scales", "true"},
    {"ldlq", "false"},
    {"fc1_trellis_slot_order", "gate-up"},
    {"fc1_scale_plane_order", "up-gate"},
    {"coupled_scale_order", "gate_svh-up_svh-down_suh"},
    {"world_size", "4"},
};

using Metadata = std::map<std::string, std::string>;

absl::Status Expect(const Metadata& metadata, const std::string& key,
                    const std::string& wanted) {
  const auto found = metadata.find(key);
  if (found == metadata.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the metadata lack \"", key, "\", must be ", wanted));
  }
  if (found->second == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("\"", key, "\" is ", JsonQuote(found->second), ", must be ",
                   JsonQuote(wanted)));
}

absl::StatusOr<std::string> Take(const Metadata& metadata,
                                 const std::string& key) {
  const auto found = metadata.find(key);
  if (found != metadata.end()) return found->second;
  return absl::InvalidArgumentError(
      absl::StrCat("the metadata lack \"", key, "\""));
}

absl::StatusOr<int64_t> TakeNumber(const Metadata& metadata,
                                   const std::string& key, int64_t max) {
  ASSIGN_OR_RETURN(const std::string text, Take(metadata, key));
  int64_t value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < 0 || value > max ||
      absl::StrCat(value) != text) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", key, "\" is ", JsonQuote(text),
                     ", must be a number within 0..", max));
  }
  return value;
}

absl::StatusOr<Digest> TakeDigest(const Metadata& metadata,
                                  const std::string& key) {
  ASSIGN_OR_RETURN(const std::string text, Take(metadata, key));
  absl::StatusOr<Digest> digest = Digest::FromHex(text);
  if (digest.ok()) return digest;
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", key, "\" is ", JsonQuote(text), ", must be 64 hexadecimal digits"));
}

// The shape of the file's own intermediate scales, [E, 3 I], is flat.
bool SameShape(const SafetensorsTensor& found, const SafetensorsTensor& wanted,
               size_t index) {
  if (index == static_cast<size_t>(NpkTensor::kInnerScales)) {
    return found.rank == 2 && found.dims[0] == wanted.dims[0] &&
           found.dims[1] == 3 * wanted.dims[2];
  }
  return std::equal(found.shape().begin(), found.shape().end(),
                    wanted.shape().begin(), wanted.shape().end());
}

absl::StatusOr<NpkMetadata> Geometry(const Metadata& metadata,
                                     const SafetensorsTensor& w13,
                                     const std::string& model_id) {
  NpkMetadata m;
  ASSIGN_OR_RETURN(const int64_t bits, TakeNumber(metadata, "bits", 5));
  if (bits < 3) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"bits\" is ", bits, ", must be within 3..5"));
  }
  m.bits = static_cast<int>(bits);
  m.boundary = NpkBoundary::kCoupled;
  ASSIGN_OR_RETURN(m.layer, TakeNumber(metadata, "layer", 99'999));
  ASSIGN_OR_RETURN(m.rank, TakeNumber(metadata, "rank", kP8Ranks - 1));
  m.world_size = kP8Ranks;
  constexpr uint64_t kTilesMax = 1u << 20;
  if (w13.rank != 5 || w13.dims[1] == 0 ||
      w13.dims[1] > static_cast<uint64_t>(kNpkExpertsMax) || w13.dims[2] == 0 ||
      w13.dims[2] > kTilesMax || w13.dims[2] % 32 != 0 || w13.dims[3] == 0 ||
      w13.dims[3] > kTilesMax / kP8Ranks || w13.dims[3] % 8 != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor \"w13_trellis\" is ", w13.TypeAndShape(),
        ", must be I16 [2, E, H/16, I/16, 16 K] with H a multiple of 512 and I "
        "of 128"));
  }
  m.experts = static_cast<int64_t>(w13.dims[1]);
  m.hidden = static_cast<int64_t>(16 * w13.dims[2]);
  m.intermediate = static_cast<int64_t>(16 * w13.dims[3]);
  m.intermediate_global = kP8Ranks * m.intermediate;
  RETURN_IF_ERROR(Expect(metadata, "global_intermediate",
                         absl::StrCat(m.intermediate_global)));
  RETURN_IF_ERROR(
      Expect(metadata, "local_atom_begin", absl::StrCat(m.first_atom())));
  m.limit = "10";  // of silu-cap10
  m.model_id = model_id;
  RETURN_IF_ERROR(Expect(metadata, "encoder_transform_sha256",
                         P8TransformDigest().ToHex()));
  m.encoder = P8TransformDigest();
  ASSIGN_OR_RETURN(m.design, TakeDigest(metadata, "source_design_sha256"));
  return m;
}

absl::StatusOr<NpkImport> Import(const std::string& path,
                                 const std::string& model_id,
                                 const std::string& output) {
  ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(path));
  const Metadata& metadata = file.header().metadata();
  for (const Word& word : kWords) {
    RETURN_IF_ERROR(Expect(metadata, word.key, word.value));
  }
  for (const Word& word : kTransform) {
    // The two orders stand in the transform's digest; files need not repeat
    // them.
    if (std::strncmp(word.key, "quantized_", 10) == 0 &&
        !metadata.contains(word.key)) {
      continue;
    }
    RETURN_IF_ERROR(Expect(metadata, word.key, word.value));
  }

  std::array<const SafetensorsTensor*, kNpkTensors> tensors{};
  for (const SafetensorsTensor& tensor : file.header().tensors()) {
    const auto name =
        std::find(std::begin(kNames), std::end(kNames), tensor.name);
    if (name == std::end(kNames)) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", QuoteTensorName(tensor.name),
                       " is none of the schema's eight"));
    }
    tensors[static_cast<size_t>(name - std::begin(kNames))] = &tensor;
  }
  for (size_t i = 0; i < kNpkTensors; ++i) {
    if (tensors[i] != nullptr) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("tensor \"", kNames[i], "\" is missing"));
  }
  NpkImport import;
  ASSIGN_OR_RETURN(import.metadata, Geometry(metadata, *tensors[0], model_id));
  const NpkMetadata& m = import.metadata;

  const std::vector<SafetensorsTensor> wanted = NpkTensorsOf(m);
  std::array<std::span<const uint8_t>, kNpkTensors> bytes;
  for (size_t i = 0; i < kNpkTensors; ++i) {
    if (tensors[i]->type != wanted[i].type ||
        !SameShape(*tensors[i], wanted[i], i)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor \"", kNames[i], "\" is ", tensors[i]->TypeAndShape(),
          ", must hold ", wanted[i].TypeAndShape()));
    }
    ASSIGN_OR_RETURN(bytes[i], file.Bytes(*tensors[i]));
    const std::string key = absl::StrCat("sha256_", kNames[i]);
    ASSIGN_OR_RETURN(const Digest stated, TakeDigest(metadata, key));
    const Digest found = Sha256(AsText(bytes[i]));
    if (found == stated) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("tensor \"", kNames[i], "\" has the SHA-256 ",
                     found.ToHex(), ", the metadata say ", stated.ToHex()));
  }
  for (const int draw : bytes[static_cast<size_t>(NpkTensor::kSignDraw)]) {
    if (draw == 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("tensor \"coupled_sign_draw_u8\" has the draw ", draw,
                     ", the schema knows 0 alone"));
  }
  ASSIGN_OR_RETURN(const Digest signs,
                   TakeDigest(metadata, "sha256_coupled_signs_fp16"));
  const uint8_t zero = 0;
  if (const Digest found = NpkSignsDigest(m, {&zero, 1}); found != signs) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"sha256_coupled_signs_fp16\" is ", signs.ToHex(),
                     ", the regenerated signs have ", found.ToHex()));
  }

  RETURN_IF_ERROR(CheckNpkTexts(m));
  RETURN_IF_ERROR(CheckNpkValues(m, bytes));

  RETURN_IF_ERROR(MakeDirectories(output));
  import.path =
      absl::StrCat(output, "/", NpkFileName(m.layer, m.rank, m.world_size));
  const auto pieces =
      [&](NpkTensor which,
          const std::function<absl::Status(std::span<const uint8_t>)>& sink)
      -> absl::Status {
    const std::span<const uint8_t> all = bytes[static_cast<size_t>(which)];
    if (which != NpkTensor::kW13Scale) return sink(all);
    // Of each expert, the second half of the rows is gate's.
    const size_t half = all.size() / static_cast<size_t>(2 * m.experts);
    for (size_t at = 0; at < all.size(); at += 2 * half) {
      RETURN_IF_ERROR(sink(all.subspan(at + half, half)));
      RETURN_IF_ERROR(sink(all.subspan(at, half)));
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(WriteNpkSidecar(import.path, m, pieces));
  return import;
}

}  // namespace

std::string P8FileName(int64_t layer, int64_t rank) {
  return absl::StrFormat("p8-layer-%03d-tp4-rank-%d.safetensors", layer, rank);
}

Digest P8TransformDigest() {
  std::string json;
  for (const Word& word : kTransform) {
    const bool number = word.value[0] >= '0' && word.value[0] <= '9';
    const char* quote = number ? "" : "\"";
    absl::StrAppend(&json, json.empty() ? "{" : ",", "\"", word.key,
                    "\":", quote, word.value, quote);
  }
  return Sha256(json + "}\n");
}

absl::StatusOr<NpkImport> ImportP8Sidecar(const std::string& path,
                                          const std::string& model_id,
                                          const std::string& output) {
  absl::StatusOr<NpkImport> import = Import(path, model_id, output);
  if (!import.ok()) return AnnotateOnce(import.status(), path);
  return import;
}

}  // namespace kiln
