#include "templates/formats/btx_manifest.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"
#include "compiler/spec/manifest.h"
#include "compiler/spec/object_reader.h"
#include "templates/formats/exl3.h"
#include "templates/formats/trellis_layout.h"

namespace kiln {
namespace {

constexpr int kBitsMin = 2;
constexpr int kBitsMax = 6;
// Its readers accept K2 with this codebook, but nothing is known to write it.
constexpr int kMcgBitsMin = 3;
constexpr int64_t kAlignmentMax = int64_t{1} << 30;
constexpr std::array<uint8_t, 5> kPairKinds = {0x22, 0x33, 0x24, 0x43, 0x44};
constexpr std::array<TrellisCodebook, 3> kBtxCodebooks = {
    TrellisCodebook::kMcg, TrellisCodebook::kSqgE4m3,
    TrellisCodebook::kSqgFp16};

absl::StatusOr<ObjectReader> Part(absl::string_view file,
                                  const ObjectReader& root,
                                  absl::string_view key) {
  ASSIGN_OR_RETURN(const JsonNode* value,
                   root.Required(key, JsonNode::Kind::kObject));
  return ObjectReader(file, *value, absl::StrCat("\"", key, "\""));
}

// Refuses a key that may not stand here.
absl::Status Absent(const ObjectReader& reader, absl::string_view key,
                    absl::string_view why) {
  const JsonNode* value = reader.Optional(key);
  if (value == nullptr) return absl::OkStatus();
  return reader.Refuse(key, *value, absl::StrCat("must be absent: ", why));
}

// An array of distinct integers within low..high.
absl::StatusOr<std::vector<int64_t>> Integers(const ObjectReader& reader,
                                              absl::string_view key,
                                              int64_t low, int64_t high) {
  ASSIGN_OR_RETURN(const JsonNode* list,
                   reader.Required(key, JsonNode::Kind::kArray));
  std::vector<int64_t> integers;
  std::set<int64_t> seen;
  for (const JsonNode& item : list->items) {
    ASSIGN_OR_RETURN(const int64_t value,
                     reader.IntegerOf(item, key, low, high));
    if (!seen.insert(value).second) {
      return reader.Error(item,
                          absl::StrCat("\"", key, "\" has ", value,
                                       " twice, must have distinct entries"));
    }
    integers.push_back(value);
  }
  return integers;
}

int BitsMinOf(TrellisCodebook codebook) {
  if (codebook == TrellisCodebook::kMcg) return kMcgBitsMin;
  return std::max(kBitsMin, codebook.bits_min());
}

int BitsMaxOf(TrellisCodebook codebook) {
  return std::min(kBitsMax, codebook.bits_max());
}

absl::Status ReadCodebook(const ObjectReader& root, BtxManifest* manifest) {
  std::vector<std::pair<absl::string_view, TrellisCodebook>> names;
  for (const TrellisCodebook known : kBtxCodebooks) {
    names.emplace_back(known.name(), known);
  }
  ASSIGN_OR_RETURN(manifest->codebook,
                   root.Word<TrellisCodebook>("codebook", names));
  if (manifest->codebook == TrellisCodebook::kMcg) {
    return root.Integer("codebook_seed", kMcgMarker, kMcgMarker).status();
  }
  const JsonNode* seed = root.Optional("codebook_seed");
  if (seed == nullptr || seed->kind == JsonNode::Kind::kNull) {
    return absl::OkStatus();
  }
  return Absent(root, "codebook_seed", "only the codebook mcg has a seed");
}

absl::Status ReadGeometry(const ObjectReader& geometry, BtxManifest* manifest,
                          std::vector<int64_t>* layers) {
  RETURN_IF_ERROR(
      geometry.CheckKeys({"num_experts", "hidden_size", "intermediate_size",
                          "atom_channels", "atom_slots", "moe_layer_indices"}));
  ASSIGN_OR_RETURN(manifest->experts,
                   geometry.Integer("num_experts", 1, kExpertsMax));
  ASSIGN_OR_RETURN(manifest->hidden,
                   geometry.Integer("hidden_size", 1, kHiddenMax));
  ASSIGN_OR_RETURN(manifest->intermediate,
                   geometry.Integer("intermediate_size", 1, kIntermediateMax));
  if (manifest->hidden % 16 != 0) {
    return geometry.Refuse("hidden_size", *geometry.Optional("hidden_size"),
                           "must be a multiple of 16");
  }
  if (manifest->intermediate % kSlotChannels != 0) {
    return geometry.Refuse("intermediate_size",
                           *geometry.Optional("intermediate_size"),
                           "must be a multiple of 32");
  }
  RETURN_IF_ERROR(
      geometry.Integer("atom_channels", kSlotChannels, kSlotChannels).status());
  RETURN_IF_ERROR(
      geometry.Integer("atom_slots", manifest->slots(), manifest->slots())
          .status());
  ASSIGN_OR_RETURN(*layers,
                   Integers(geometry, "moe_layer_indices", 0, kLayersMax - 1));
  if (!layers->empty()) return absl::OkStatus();
  return geometry.Refuse("moe_layer_indices",
                         *geometry.Optional("moe_layer_indices"),
                         "must have at least one layer");
}

absl::Status ReadPairKinds(const ObjectReader& rates, BtxManifest* manifest) {
  ASSIGN_OR_RETURN(const JsonNode* list,
                   rates.Required("pair_kinds", JsonNode::Kind::kArray));
  if (list->items.empty()) {
    return rates.Refuse("pair_kinds", *list, "must not be empty");
  }
  std::vector<std::string> names;
  for (const uint8_t kind : kPairKinds) names.push_back(PairKindName(kind));
  for (const JsonNode& item : list->items) {
    const auto known = item.kind == JsonNode::Kind::kString
                           ? std::find(names.begin(), names.end(), item.text)
                           : names.end();
    if (known == names.end()) {
      return rates.Error(
          item,
          absl::StrCat("\"pair_kinds\" has ", JsonExcerpt(item),
                       ", must have kinds of ", absl::StrJoin(names, ", ")));
    }
    const uint8_t kind = kPairKinds[static_cast<size_t>(known - names.begin())];
    const int low = std::min(kind >> 4, kind & 0xF);
    const int high = std::max(kind >> 4, kind & 0xF);
    if (low < BitsMinOf(manifest->codebook) ||
        high > BitsMaxOf(manifest->codebook)) {
      return rates.Error(
          item, absl::StrCat("\"pair_kinds\" has ", *known,
                             ", but the codebook ", manifest->codebook.name(),
                             " has the rates ", BitsMinOf(manifest->codebook),
                             "..", BitsMaxOf(manifest->codebook)));
    }
    if (std::find(manifest->pair_kinds.begin(), manifest->pair_kinds.end(),
                  kind) != manifest->pair_kinds.end()) {
      return rates.Error(item,
                         absl::StrCat("\"pair_kinds\" has ", *known,
                                      " twice, must have distinct kinds"));
    }
    manifest->pair_kinds.push_back(kind);
  }
  if (manifest->slots() % kPairSlots != 0) {
    return rates.Refuse(
        "pair_kinds", *list,
        absl::StrCat("needs a multiple of 8 slots (pairs of 256 channels), ",
                     "\"atom_slots\" is ", manifest->slots()));
  }
  return absl::OkStatus();
}

absl::Status ReadRates(const ObjectReader& rates, BtxManifest* manifest) {
  RETURN_IF_ERROR(rates.CheckKeys({"structure", "bits", "pair_kinds"}));
  ASSIGN_OR_RETURN(const bool uniform,
                   rates.Word<bool>("structure", {{"uniform", true},
                                                  {"per_expert_pair", false}}));
  if (!uniform) {
    RETURN_IF_ERROR(ReadPairKinds(rates, manifest));
    return Absent(rates, "bits", "each expert has its own rates");
  }
  ASSIGN_OR_RETURN(const int64_t bits,
                   rates.Integer("bits", BitsMinOf(manifest->codebook),
                                 BitsMaxOf(manifest->codebook)));
  manifest->bits = static_cast<int>(bits);
  return Absent(rates, "pair_kinds", "the rates are uniform");
}

absl::Status ReadBlock(const ObjectReader& hadamard, absl::string_view key,
                       absl::string_view axis, int64_t channels,
                       int64_t* block) {
  ASSIGN_OR_RETURN(*block, hadamard.Integer(key, 1, channels));
  if (*block % 32 == 0 && channels % *block == 0) return absl::OkStatus();
  return hadamard.Refuse(
      key, *hadamard.Optional(key),
      absl::StrCat("must be a multiple of 32 that divides \"", axis, "\", ",
                   channels));
}

absl::Status ReadHadamard(const ObjectReader& hadamard, BtxManifest* manifest) {
  RETURN_IF_ERROR(hadamard.CheckKeys(
      {"coupled", "per_expert_input_rotations", "pre_block", "post_block"}));
  ASSIGN_OR_RETURN(manifest->coupled, hadamard.Bool("coupled"));
  ASSIGN_OR_RETURN(manifest->per_expert_rotations,
                   hadamard.Bool("per_expert_input_rotations"));
  if (!manifest->coupled) {
    for (const absl::string_view key : {"pre_block", "post_block"}) {
      RETURN_IF_ERROR(Absent(hadamard, key, "\"coupled\" is false"));
    }
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(ReadBlock(hadamard, "pre_block", "hidden_size",
                            manifest->hidden, &manifest->pre_block));
  return ReadBlock(hadamard, "post_block", "intermediate_size",
                   manifest->intermediate, &manifest->post_block);
}

absl::Status ReadLayout(const ObjectReader& layout, BtxManifest* manifest) {
  RETURN_IF_ERROR(layout.CheckKeys(
      {"atom_row_alignment", "extent_alignment_slots", "extent_barriers"}));
  ASSIGN_OR_RETURN(manifest->row_alignment,
                   layout.Integer("atom_row_alignment", 1, kAlignmentMax));
  ASSIGN_OR_RETURN(
      manifest->extent_alignment,
      layout.Integer("extent_alignment_slots", 1, manifest->slots()));
  if (manifest->slots() % manifest->extent_alignment != 0) {
    return layout.Refuse(
        "extent_alignment_slots", *layout.Optional("extent_alignment_slots"),
        absl::StrCat("must divide \"atom_slots\", ", manifest->slots()));
  }
  if (layout.Optional("extent_barriers") == nullptr) return absl::OkStatus();
  ASSIGN_OR_RETURN(manifest->barriers, Integers(layout, "extent_barriers", 1,
                                                manifest->slots() - 1));
  return absl::OkStatus();
}

bool IsPlainFileName(absl::string_view name) {
  return !name.empty() && name.size() <= 255 && name != "." && name != ".." &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return c >= 0x20 && c < 0x7F && c != '/' && c != '\\';
         });
}

absl::Status ReadLayers(absl::string_view file, const ObjectReader& layers,
                        const std::vector<int64_t>& wanted,
                        BtxManifest* manifest) {
  for (const JsonNode::Member& member : layers.node().members) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(member.key, &number) ||
        absl::StrCat(number) != member.key ||
        std::find(wanted.begin(), wanted.end(), number) == wanted.end()) {
      return JsonError(
          file, member.line, member.column,
          absl::StrCat("\"layers\" has the key ", JsonQuote(member.key),
                       ", must have the decimal numbers of "
                       "\"moe_layer_indices\": ",
                       absl::StrJoin(wanted, ", ")));
    }
    const ObjectReader entry(file, member.value,
                             absl::StrCat("layer ", number));
    RETURN_IF_ERROR(entry.CheckKeys({"file", "sha256"}));
    BtxManifest::Layer layer;
    ASSIGN_OR_RETURN(layer.file, entry.Text("file"));
    if (!IsPlainFileName(layer.file)) {
      return entry.Refuse("file", *entry.Optional("file"),
                          "must be the name of a file beside the manifest");
    }
    ASSIGN_OR_RETURN(const std::string sha256, entry.Text("sha256"));
    const absl::StatusOr<Digest> digest = Digest::FromHex(sha256);
    if (!digest.ok()) {
      return entry.Refuse("sha256", *entry.Optional("sha256"),
                          "must be 64 hexadecimal digits");
    }
    layer.sha256 = *digest;
    manifest->layers[number] = std::move(layer);
  }
  for (const int64_t number : wanted) {
    if (manifest->layers.count(number) != 0) continue;
    return layers.Error(layers.node(),
                        absl::StrCat("\"layers\" lacks layer ", number,
                                     " of \"moe_layer_indices\""));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BtxManifest> ParseBtxManifest(absl::string_view text,
                                             absl::string_view file) {
  ASSIGN_OR_RETURN(const JsonNode node, ParseJson(text, file));
  const ObjectReader root(file, node, "manifest");
  RETURN_IF_ERROR(
      root.CheckKeys({"kind", "schema", "codebook", "codebook_seed", "geometry",
                      "rates", "hadamard", "layout", "layers"}));
  BtxManifest manifest;
  RETURN_IF_ERROR(root.Word<bool>("kind", {{"btx-manifest", true}}).status());
  RETURN_IF_ERROR(root.Word<bool>("schema", {{"btx-atoms-v1", true}}).status());
  RETURN_IF_ERROR(ReadCodebook(root, &manifest));
  std::vector<int64_t> layers;
  ASSIGN_OR_RETURN(const ObjectReader geometry, Part(file, root, "geometry"));
  RETURN_IF_ERROR(ReadGeometry(geometry, &manifest, &layers));
  ASSIGN_OR_RETURN(const ObjectReader rates, Part(file, root, "rates"));
  RETURN_IF_ERROR(ReadRates(rates, &manifest));
  ASSIGN_OR_RETURN(const ObjectReader hadamard, Part(file, root, "hadamard"));
  RETURN_IF_ERROR(ReadHadamard(hadamard, &manifest));
  ASSIGN_OR_RETURN(const ObjectReader layout, Part(file, root, "layout"));
  RETURN_IF_ERROR(ReadLayout(layout, &manifest));
  ASSIGN_OR_RETURN(const ObjectReader entries, Part(file, root, "layers"));
  RETURN_IF_ERROR(ReadLayers(file, entries, layers, &manifest));
  return manifest;
}

bool IsBtxFolder(const std::string& folder) {
  std::error_code error;
  return std::filesystem::exists(absl::StrCat(folder, "/", kBtxManifestName),
                                 error);
}

absl::StatusOr<BtxManifest> ReadBtxManifest(const std::string& folder) {
  const std::string path = absl::StrCat(folder, "/", kBtxManifestName);
  ASSIGN_OR_RETURN(const std::string text,
                   ReadFile(path, kBtxManifestBytesMax));
  return ParseBtxManifest(text, path);
}

absl::Status CheckBtxExtent(const BtxManifest& manifest, int64_t first,
                            int64_t count) {
  const int64_t slots = manifest.slots();
  const auto refuse = [&](absl::string_view rule) {
    return absl::InvalidArgumentError(absl::StrCat(
        "extent of ", count, " slots from slot ", first, " ", rule));
  };
  if (first < 0 || count <= 0 || count > slots || first > slots - count) {
    return refuse(absl::StrCat("must be a non-empty range within 0..", slots));
  }
  if (first % manifest.extent_alignment != 0 ||
      count % manifest.extent_alignment != 0) {
    return refuse(absl::StrCat("must begin and end at multiples of ",
                               manifest.extent_alignment,
                               " (\"extent_alignment_slots\")"));
  }
  for (const int64_t barrier : manifest.barriers) {
    if (first < barrier && barrier < first + count) {
      return refuse(absl::StrCat("crosses the barrier at slot ", barrier));
    }
  }
  return absl::OkStatus();
}

}  // namespace kiln
