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

// One object of the manifest. Every key must be asked for: Finish refuses the
// others.
class ObjectReader {
 public:
  ObjectReader(absl::string_view file, absl::string_view name,
               const JsonNode& node)
      : file_(file), name_(name), node_(node) {}

  static absl::StatusOr<ObjectReader> Of(absl::string_view file,
                                         absl::string_view name,
                                         const JsonNode& node) {
    if (node.kind != JsonNode::Kind::kObject) {
      return JsonError(file, node,
                       absl::StrCat("\"", name, "\" must be an object, found ",
                                    JsonExcerpt(node)));
    }
    return ObjectReader(file, name, node);
  }

  // Null where the key is missing.
  const JsonNode* Optional(absl::string_view key) {
    known_.insert(std::string(key));
    return node_.Find(key);
  }

  absl::StatusOr<const JsonNode*> Required(absl::string_view key) {
    const JsonNode* value = Optional(key);
    if (value != nullptr) return value;
    return JsonError(
        file_, node_,
        absl::StrCat("\"", name_, "\" lacks the key \"", key, "\""));
  }

  absl::StatusOr<ObjectReader> Object(absl::string_view key) {
    ASSIGN_OR_RETURN(const JsonNode* value, Required(key));
    return Of(file_, key, *value);
  }

  absl::StatusOr<int64_t> Integer(absl::string_view key, int64_t low,
                                  int64_t high) {
    ASSIGN_OR_RETURN(const JsonNode* value, Required(key));
    if (value->kind != JsonNode::Kind::kInteger || value->integer < low ||
        value->integer > high) {
      return JsonError(
          file_, *value,
          absl::StrCat("\"", key, "\" is ", JsonExcerpt(*value),
                       ", must be an integer within ", low, "..", high));
    }
    return value->integer;
  }

  absl::StatusOr<bool> Bool(absl::string_view key) {
    ASSIGN_OR_RETURN(const JsonNode* value, Required(key));
    if (value->kind != JsonNode::Kind::kBool) {
      return Refuse(key, *value, "must be true or false");
    }
    return value->boolean;
  }

  // A string, one of `accepted` unless that is empty.
  absl::StatusOr<std::string> Text(
      absl::string_view key, const std::vector<absl::string_view>& accepted) {
    ASSIGN_OR_RETURN(const JsonNode* value, Required(key));
    if (value->kind == JsonNode::Kind::kString &&
        (accepted.empty() || std::find(accepted.begin(), accepted.end(),
                                       value->text) != accepted.end())) {
      return value->text;
    }
    return Refuse(
        key, *value,
        accepted.empty()
            ? std::string("must be a string")
            : absl::StrCat(
                  "must be ",
                  absl::StrJoin(accepted, " or ",
                                [](std::string* out, absl::string_view w) {
                                  absl::StrAppend(out, "\"", w, "\"");
                                })));
  }

  // An array of distinct integers within low..high.
  absl::StatusOr<std::vector<int64_t>> Integers(absl::string_view key,
                                                const JsonNode& value,
                                                int64_t low, int64_t high) {
    if (value.kind != JsonNode::Kind::kArray) {
      return Refuse(key, value, "must be an array");
    }
    std::vector<int64_t> integers;
    std::set<int64_t> seen;
    for (const JsonNode& item : value.items) {
      if (item.kind != JsonNode::Kind::kInteger || item.integer < low ||
          item.integer > high) {
        return JsonError(
            file_, item,
            absl::StrCat("\"", key, "\" has ", JsonExcerpt(item),
                         ", must have integers within ", low, "..", high));
      }
      if (!seen.insert(item.integer).second) {
        return JsonError(file_, item,
                         absl::StrCat("\"", key, "\" has ", item.integer,
                                      " twice, must have distinct entries"));
      }
      integers.push_back(item.integer);
    }
    return integers;
  }

  absl::Status Refuse(absl::string_view key, const JsonNode& value,
                      absl::string_view rule) const {
    return JsonError(
        file_, value,
        absl::StrCat("\"", key, "\" is ", JsonExcerpt(value), ", ", rule));
  }

  // Refuses a key that may not stand here.
  absl::Status Absent(absl::string_view key, absl::string_view why) {
    const JsonNode* value = Optional(key);
    if (value == nullptr) return absl::OkStatus();
    return Refuse(key, *value, absl::StrCat("must be absent: ", why));
  }

  absl::Status Finish() const {
    for (const JsonNode::Member& member : node_.members) {
      if (known_.count(member.key) != 0) continue;
      return JsonError(file_, member.line, member.column,
                       absl::StrCat("\"", name_, "\" has the unknown key ",
                                    JsonQuote(member.key),
                                    "; known: ", absl::StrJoin(known_, ", ")));
    }
    return absl::OkStatus();
  }

  const JsonNode& node() const { return node_; }

  absl::string_view file() const { return file_; }

 private:
  absl::string_view file_;
  absl::string_view name_;
  const JsonNode& node_;
  std::set<std::string> known_;
};

int BitsMinOf(TrellisCodebook codebook) {
  if (codebook == TrellisCodebook::kMcg) return kMcgBitsMin;
  return std::max(kBitsMin, codebook.bits_min());
}

int BitsMaxOf(TrellisCodebook codebook) {
  return std::min(kBitsMax, codebook.bits_max());
}

absl::Status ReadCodebook(ObjectReader* root, BtxManifest* manifest) {
  std::vector<absl::string_view> names;
  for (const TrellisCodebook known : kBtxCodebooks) {
    names.push_back(known.name());
  }
  ASSIGN_OR_RETURN(const std::string name, root->Text("codebook", names));
  for (const TrellisCodebook known : kBtxCodebooks) {
    if (known.name() == name) manifest->codebook = known;
  }
  if (manifest->codebook == TrellisCodebook::kMcg) {
    return root->Integer("codebook_seed", kMcgMarker, kMcgMarker).status();
  }
  const JsonNode* seed = root->Optional("codebook_seed");
  if (seed == nullptr || seed->kind == JsonNode::Kind::kNull) {
    return absl::OkStatus();
  }
  return root->Refuse("codebook_seed", *seed,
                      "must be absent: only the codebook mcg has a seed");
}

absl::Status ReadGeometry(ObjectReader geometry, BtxManifest* manifest,
                          std::vector<int64_t>* layers) {
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
  ASSIGN_OR_RETURN(const JsonNode* list,
                   geometry.Required("moe_layer_indices"));
  ASSIGN_OR_RETURN(*layers, geometry.Integers("moe_layer_indices", *list, 0,
                                              kLayersMax - 1));
  if (layers->empty()) {
    return geometry.Refuse("moe_layer_indices", *list,
                           "must have at least one layer");
  }
  return geometry.Finish();
}

absl::Status ReadPairKinds(ObjectReader* rates, BtxManifest* manifest) {
  ASSIGN_OR_RETURN(const JsonNode* list, rates->Required("pair_kinds"));
  if (list->kind != JsonNode::Kind::kArray || list->items.empty()) {
    return rates->Refuse("pair_kinds", *list, "must be a non-empty array");
  }
  std::vector<std::string> names;
  for (const uint8_t kind : kPairKinds) names.push_back(PairKindName(kind));
  for (const JsonNode& item : list->items) {
    const auto known = item.kind == JsonNode::Kind::kString
                           ? std::find(names.begin(), names.end(), item.text)
                           : names.end();
    if (known == names.end()) {
      return JsonError(
          rates->file(), item,
          absl::StrCat("\"pair_kinds\" has ", JsonExcerpt(item),
                       ", must have kinds of ", absl::StrJoin(names, ", ")));
    }
    const uint8_t kind = kPairKinds[static_cast<size_t>(known - names.begin())];
    const int low = std::min(kind >> 4, kind & 0xF);
    const int high = std::max(kind >> 4, kind & 0xF);
    if (low < BitsMinOf(manifest->codebook) ||
        high > BitsMaxOf(manifest->codebook)) {
      return JsonError(
          rates->file(), item,
          absl::StrCat("\"pair_kinds\" has ", *known, ", but the codebook ",
                       manifest->codebook.name(), " has the rates ",
                       BitsMinOf(manifest->codebook), "..",
                       BitsMaxOf(manifest->codebook)));
    }
    if (std::find(manifest->pair_kinds.begin(), manifest->pair_kinds.end(),
                  kind) != manifest->pair_kinds.end()) {
      return JsonError(rates->file(), item,
                       absl::StrCat("\"pair_kinds\" has ", *known,
                                    " twice, must have distinct kinds"));
    }
    manifest->pair_kinds.push_back(kind);
  }
  if (manifest->slots() % kPairSlots != 0) {
    return rates->Refuse(
        "pair_kinds", *list,
        absl::StrCat("needs a multiple of 8 slots (pairs of 256 channels), ",
                     "\"atom_slots\" is ", manifest->slots()));
  }
  return absl::OkStatus();
}

absl::Status ReadRates(ObjectReader rates, BtxManifest* manifest) {
  ASSIGN_OR_RETURN(const std::string structure,
                   rates.Text("structure", {"uniform", "per_expert_pair"}));
  if (structure == "uniform") {
    ASSIGN_OR_RETURN(const int64_t bits,
                     rates.Integer("bits", BitsMinOf(manifest->codebook),
                                   BitsMaxOf(manifest->codebook)));
    manifest->bits = static_cast<int>(bits);
    RETURN_IF_ERROR(rates.Absent("pair_kinds", "the rates are uniform"));
  } else {
    RETURN_IF_ERROR(ReadPairKinds(&rates, manifest));
    RETURN_IF_ERROR(rates.Absent("bits", "each expert has its own rates"));
  }
  return rates.Finish();
}

absl::Status ReadBlock(ObjectReader* hadamard, absl::string_view key,
                       absl::string_view axis, int64_t channels,
                       int64_t* block) {
  ASSIGN_OR_RETURN(*block, hadamard->Integer(key, 1, channels));
  if (*block % 32 == 0 && channels % *block == 0) return absl::OkStatus();
  return hadamard->Refuse(
      key, *hadamard->Optional(key),
      absl::StrCat("must be a multiple of 32 that divides \"", axis, "\", ",
                   channels));
}

absl::Status ReadHadamard(ObjectReader hadamard, BtxManifest* manifest) {
  ASSIGN_OR_RETURN(manifest->coupled, hadamard.Bool("coupled"));
  ASSIGN_OR_RETURN(manifest->per_expert_rotations,
                   hadamard.Bool("per_expert_input_rotations"));
  if (manifest->coupled) {
    RETURN_IF_ERROR(ReadBlock(&hadamard, "pre_block", "hidden_size",
                              manifest->hidden, &manifest->pre_block));
    RETURN_IF_ERROR(ReadBlock(&hadamard, "post_block", "intermediate_size",
                              manifest->intermediate, &manifest->post_block));
  } else {
    for (const absl::string_view key : {"pre_block", "post_block"}) {
      RETURN_IF_ERROR(hadamard.Absent(key, "\"coupled\" is false"));
    }
  }
  return hadamard.Finish();
}

absl::Status ReadLayout(ObjectReader layout, BtxManifest* manifest) {
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
  const JsonNode* barriers = layout.Optional("extent_barriers");
  if (barriers != nullptr) {
    ASSIGN_OR_RETURN(manifest->barriers,
                     layout.Integers("extent_barriers", *barriers, 1,
                                     manifest->slots() - 1));
  }
  return layout.Finish();
}

bool IsPlainFileName(absl::string_view name) {
  return !name.empty() && name.size() <= 255 && name != "." && name != ".." &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return c >= 0x20 && c < 0x7F && c != '/' && c != '\\';
         });
}

absl::Status ReadLayers(ObjectReader layers, const std::vector<int64_t>& wanted,
                        BtxManifest* manifest) {
  for (const JsonNode::Member& member : layers.node().members) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(member.key, &number) ||
        absl::StrCat(number) != member.key ||
        std::find(wanted.begin(), wanted.end(), number) == wanted.end()) {
      return JsonError(
          layers.file(), member.line, member.column,
          absl::StrCat("\"layers\" has the key ", JsonQuote(member.key),
                       ", must have the decimal numbers of "
                       "\"moe_layer_indices\": ",
                       absl::StrJoin(wanted, ", ")));
    }
    ASSIGN_OR_RETURN(ObjectReader entry,
                     ObjectReader::Of(layers.file(), member.key, member.value));
    BtxManifest::Layer layer;
    ASSIGN_OR_RETURN(layer.file, entry.Text("file", {}));
    if (!IsPlainFileName(layer.file)) {
      return entry.Refuse("file", *entry.Optional("file"),
                          "must be the name of a file beside the manifest");
    }
    ASSIGN_OR_RETURN(const std::string sha256, entry.Text("sha256", {}));
    const absl::StatusOr<Digest> digest = Digest::FromHex(sha256);
    if (!digest.ok()) {
      return entry.Refuse("sha256", *entry.Optional("sha256"),
                          "must be 64 hexadecimal digits");
    }
    layer.sha256 = *digest;
    RETURN_IF_ERROR(entry.Finish());
    manifest->layers[number] = std::move(layer);
  }
  for (const int64_t number : wanted) {
    if (manifest->layers.count(number) != 0) continue;
    return JsonError(layers.file(), layers.node(),
                     absl::StrCat("\"layers\" lacks layer ", number,
                                  " of \"moe_layer_indices\""));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BtxManifest> ParseBtxManifest(absl::string_view text,
                                             absl::string_view file) {
  ASSIGN_OR_RETURN(const JsonNode node, ParseJson(text, file));
  ASSIGN_OR_RETURN(ObjectReader root, ObjectReader::Of(file, "manifest", node));
  BtxManifest manifest;
  RETURN_IF_ERROR(root.Text("kind", {"btx-manifest"}).status());
  RETURN_IF_ERROR(root.Text("schema", {"btx-atoms-v1"}).status());
  RETURN_IF_ERROR(ReadCodebook(&root, &manifest));
  std::vector<int64_t> layers;
  ASSIGN_OR_RETURN(ObjectReader part, root.Object("geometry"));
  RETURN_IF_ERROR(ReadGeometry(part, &manifest, &layers));
  ASSIGN_OR_RETURN(ObjectReader rates, root.Object("rates"));
  RETURN_IF_ERROR(ReadRates(rates, &manifest));
  ASSIGN_OR_RETURN(ObjectReader hadamard, root.Object("hadamard"));
  RETURN_IF_ERROR(ReadHadamard(hadamard, &manifest));
  ASSIGN_OR_RETURN(ObjectReader layout, root.Object("layout"));
  RETURN_IF_ERROR(ReadLayout(layout, &manifest));
  ASSIGN_OR_RETURN(ObjectReader entries, root.Object("layers"));
  RETURN_IF_ERROR(ReadLayers(entries, layers, &manifest));
  RETURN_IF_ERROR(root.Finish());
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
