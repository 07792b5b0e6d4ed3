#include "templates/formats/btx_layer.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/as_text.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"
#include "templates/formats/coupled_signs.h"
#include "templates/formats/layer_values.h"

namespace kiln {
namespace {

constexpr uint64_t kRotationBytes = kSlotChannels * sizeof(uint16_t);

uint64_t Size(int64_t value) { return static_cast<uint64_t>(value); }

// The layer's tensors without their shapes.
std::vector<absl::string_view> TensorNames(const BtxManifest& manifest) {
  std::vector<absl::string_view> names = {"atoms", "rotations", "gate_suh",
                                          "up_suh", "down_svh"};
  if (manifest.pairs()) {
    names.push_back("rates_fc1");
    names.push_back("rates_fc2");
  }
  if (manifest.coupled) names.push_back("rotation_draws");
  return names;
}

absl::Status CheckMetadata(const SafetensorsHeader& header,
                           const BtxManifest& manifest, int64_t layer) {
  const std::map<std::string, std::string> wanted = {
      {"schema", "btx-atoms-v1"},
      {"codebook", std::string(manifest.codebook.name())},
      {"layer", absl::StrCat(layer)},
      {"num_experts", absl::StrCat(manifest.experts)},
      {"hidden_size", absl::StrCat(manifest.hidden)},
      {"intermediate_size", absl::StrCat(manifest.intermediate)},
      {"atom_channels", absl::StrCat(kSlotChannels)},
  };
  for (const auto& [key, value] : wanted) {
    const auto found = header.metadata().find(key);
    if (found != header.metadata().end() && found->second == value) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "\"__metadata__\": \"", key, "\" is ",
        found == header.metadata().end() ? "missing" : JsonQuote(found->second),
        ", must be \"", value, "\", as the manifest says"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<BtxLayer> BtxLayer::Open(const std::string& folder,
                                        const BtxManifest& manifest,
                                        int64_t layer) {
  const auto entry = manifest.layers.find(layer);
  if (entry == manifest.layers.end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        folder, ": layer ", layer, " is not in the manifest; it has ",
        absl::StrJoin(manifest.layers, ", ",
                      [](std::string* out, const auto& item) {
                        absl::StrAppend(out, item.first);
                      })));
  }
  ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(absl::StrCat(
                                             folder, "/", entry->second.file)));
  BtxLayer opened(manifest);
  opened.sha256_ = entry->second.sha256;
  opened.file_ = std::make_unique<SafetensorsFile>(std::move(file));
  RETURN_IF_ERROR(Annotate(opened.CheckHeader(layer), opened.path()));
  return opened;
}

absl::Status BtxLayer::CheckHeader(int64_t layer) {
  const SafetensorsHeader& header = file_->header();
  RETURN_IF_ERROR(CheckMetadata(header, manifest_, layer));
  const std::vector<absl::string_view> names = TensorNames(manifest_);
  std::map<absl::string_view, const SafetensorsTensor*> found;
  for (const SafetensorsTensor& tensor : header.tensors()) {
    if (std::find(names.begin(), names.end(), tensor.name) == names.end()) {
      return RefuseTensor(tensor.name,
                          absl::StrCat("is not declared by the manifest; "
                                       "tensors of this layer: ",
                                       absl::StrJoin(names, ", ")));
    }
    found[tensor.name] = &tensor;
  }
  for (const absl::string_view name : names) {
    if (found.count(name) == 0) return RefuseTensor(name, "is missing");
  }
  const uint64_t slots = Size(manifest_.slots());
  const uint64_t experts = Size(manifest_.experts);
  const uint64_t hidden = Size(manifest_.hidden);
  const SafetensorsTensor& atoms = *found["atoms"];
  if (atoms.type != StoredType::kU8 || atoms.rank != 2 ||
      atoms.dims[0] != slots || atoms.dims[1] == 0 ||
      atoms.dims[1] % Size(manifest_.row_alignment) != 0) {
    return RefuseTensor(
        atoms.name, absl::StrCat("is ", atoms.TypeAndShape(), ", must be U8 [",
                                 slots, ", a positive multiple of ",
                                 manifest_.row_alignment, "]"));
  }
  row_stride_ = atoms.dims[1];
  RETURN_IF_ERROR(
      CheckTensorIs(*found["rotations"], StoredType::kF16,
                    {slots, experts, kSlotSections, Size(kSlotChannels)}));
  for (const absl::string_view name : {"gate_suh", "up_suh", "down_svh"}) {
    RETURN_IF_ERROR(
        manifest_.per_expert_rotations
            ? CheckTensorIs(*found[name], StoredType::kF16, {experts, hidden})
            : CheckTensorIs(*found[name], StoredType::kF16, {hidden}));
  }
  if (manifest_.pairs()) {
    for (const absl::string_view name : {"rates_fc1", "rates_fc2"}) {
      RETURN_IF_ERROR(CheckTensorIs(*found[name], StoredType::kU8,
                                    {slots / Size(kPairSlots), experts}));
    }
  }
  if (manifest_.coupled) {
    RETURN_IF_ERROR(
        CheckTensorIs(*found["rotation_draws"], StoredType::kU8, {experts}));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::span<const uint8_t>> BtxLayer::BytesOf(
    absl::string_view name) {
  for (const SafetensorsTensor& tensor : file_->header().tensors()) {
    if (tensor.name == name) return file_->Bytes(tensor);
  }
  return std::span<const uint8_t>();
}

absl::Status BtxLayer::Validate() {
  ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes, file_->FileBytes());
  ASSIGN_OR_RETURN(atoms_, BytesOf("atoms"));
  ASSIGN_OR_RETURN(rotations_, BytesOf("rotations"));
  ASSIGN_OR_RETURN(gate_suh_, BytesOf("gate_suh"));
  ASSIGN_OR_RETURN(up_suh_, BytesOf("up_suh"));
  ASSIGN_OR_RETURN(down_svh_, BytesOf("down_svh"));
  ASSIGN_OR_RETURN(rates_fc1_, BytesOf("rates_fc1"));
  ASSIGN_OR_RETURN(rates_fc2_, BytesOf("rates_fc2"));
  ASSIGN_OR_RETURN(draws_, BytesOf("rotation_draws"));
  const auto check = [&]() -> absl::Status {
    const Digest digest = Sha256(AsText(bytes));
    if (digest != sha256_) {
      return absl::InvalidArgumentError(
          absl::StrCat("has the SHA-256 ", digest.ToHex(),
                       ", the manifest says ", sha256_.ToHex(),
                       "; the file is damaged or belongs to another manifest"));
    }
    RETURN_IF_ERROR(CheckRates());
    RETURN_IF_ERROR(CheckDraws());
    RETURN_IF_ERROR(CheckFinite("rotations", rotations_));
    RETURN_IF_ERROR(CheckFinite("gate_suh", gate_suh_));
    RETURN_IF_ERROR(CheckFinite("up_suh", up_suh_));
    RETURN_IF_ERROR(CheckFinite("down_svh", down_svh_));
    return CheckRows();
  };
  return Annotate(check(), path());
}

absl::Status BtxLayer::CheckRates() {
  const auto check = [&](absl::string_view name,
                         std::span<const uint8_t> rates) -> absl::Status {
    const std::vector<uint8_t>& kinds = manifest_.pair_kinds;
    for (size_t i = 0; i < rates.size(); ++i) {
      if (std::find(kinds.begin(), kinds.end(), rates[i]) != kinds.end()) {
        continue;
      }
      const uint64_t experts = Size(manifest_.experts);
      return RefuseTensor(
          name,
          absl::StrCat(
              "has the rate byte 0x", absl::Hex(rates[i], absl::kZeroPad2),
              " for pair ", i / experts, ", expert ", i % experts,
              ", must be of a kind that the manifest declares: ",
              absl::StrJoin(kinds, ", ", [](std::string* out, uint8_t kind) {
                absl::StrAppend(out, PairKindName(kind), " 0x",
                                absl::Hex(kind));
              })));
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(check("rates_fc1", rates_fc1_));
  return check("rates_fc2", rates_fc2_);
}

absl::Status BtxLayer::CheckDraws() {
  for (size_t e = 0; e < draws_.size(); ++e) {
    if (draws_[e] <= kSignDrawMax) continue;
    return RefuseTensor("rotation_draws",
                        absl::StrCat("has ", draws_[e], " for expert ", e,
                                     ", must be within 0..", kSignDrawMax));
  }
  return absl::OkStatus();
}

// Geometry is bounded by the manifest's limits: no product here overflows.
absl::Status BtxLayer::CheckRows() {
  const int64_t groups = manifest_.pairs() ? manifest_.slots() / kPairSlots : 1;
  const int64_t group_slots = manifest_.slots() / groups;
  bundles_.clear();
  bundles_.reserve(Size(groups * (manifest_.experts + 1)));
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t slot = group * group_slots;
    uint64_t at = 0;
    for (int64_t e = 0; e < manifest_.experts; ++e) {
      bundles_.push_back(at);
      at += 2 * SectionBytes(RateOf(slot, e, false)) +
            SectionBytes(RateOf(slot, e, true));
    }
    bundles_.push_back(at);
    if (at > row_stride_) {
      return RefuseTensor(
          "atoms", absl::StrCat("has rows of ", row_stride_, " bytes, row ",
                                slot, " needs ", at, " for its experts"));
    }
    for (int64_t row = slot; row < slot + group_slots; ++row) {
      const uint64_t begin = Size(row) * row_stride_ + at;
      RETURN_IF_ERROR(CheckZeroPadding(
          "atoms", begin, atoms_.subspan(begin, row_stride_ - at)));
    }
  }
  return absl::OkStatus();
}

PairRate BtxLayer::RateOf(int64_t slot, int64_t expert, bool fc2) const {
  if (!manifest_.pairs()) {
    return {.low = manifest_.bits, .high = manifest_.bits};
  }
  const int64_t at = slot / kPairSlots * manifest_.experts + expert;
  return PairRate::FromByte((fc2 ? rates_fc2_ : rates_fc1_)[Size(at)]);
}

uint64_t BtxLayer::SectionBytes(PairRate rate) const {
  constexpr int64_t kTileBytesPerBit = kTileEdge * sizeof(uint16_t);
  return Size(manifest_.hidden / kTileEdge * kTileBytesPerBit *
              (rate.low + rate.high));
}

std::span<const uint8_t> BtxLayer::Plane(int64_t slot, int64_t expert,
                                         int section, int high) const {
  const int64_t group = manifest_.pairs() ? slot / kPairSlots : 0;
  const PairRate fc1 = RateOf(slot, expert, false);
  const PairRate rate = section == 2 ? RateOf(slot, expert, true) : fc1;
  const uint64_t low_bytes = SectionBytes({.low = rate.low, .high = 0});
  const uint64_t high_bytes = SectionBytes({.low = 0, .high = rate.high});
  const uint64_t begin =
      Size(slot) * row_stride_ +
      bundles_[Size(group * (manifest_.experts + 1) + expert)] +
      Size(section) * SectionBytes(fc1);
  return high == 0 ? atoms_.subspan(begin, low_bytes)
                   : atoms_.subspan(begin + low_bytes, high_bytes);
}

std::span<const uint8_t> BtxLayer::Rotations(int64_t slot, int64_t expert,
                                             int section) const {
  const uint64_t row =
      (Size(slot * manifest_.experts + expert)) * kSlotSections + Size(section);
  return rotations_.subspan(row * kRotationBytes, kRotationBytes);
}

}  // namespace kiln
