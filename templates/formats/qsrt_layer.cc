#include "templates/formats/qsrt_layer.h"

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "compiler/base/as_text.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"
#include "compiler/spec/manifest.h"
#include "templates/formats/layer_values.h"
#include "templates/formats/pair_layer.h"

namespace kiln {
namespace {

constexpr absl::string_view kKimiSchema = "kquant_kimi_k3_qsrt_atoms_v1";
constexpr absl::string_view kFruitSchema = "kquant_fruit_qsrt_atoms_v1";
constexpr absl::string_view kFormatsName = "_qsrt_format_section";
constexpr absl::string_view kScalesName = "_qsrt_shared_scale_section";
constexpr absl::string_view kAtomsName = "qsrt_atoms";
constexpr absl::string_view kFilePrefix = "qsrt-layer-";
constexpr absl::string_view kFileSuffix = ".safetensors";
constexpr absl::string_view kDigestsName = "MANIFEST.sha256";
constexpr uint64_t kDigestsBytesMax = 16u << 20;
// Of the Kimi-K3 schema.
constexpr int64_t kKimiMultiplier = 5;
constexpr int64_t kKimiAlignment = 4096;
constexpr size_t kKimiHeaderBytes = 4088;
constexpr int64_t kAlignmentMax = int64_t{1} << 30;

uint64_t Size(int64_t value) { return static_cast<uint64_t>(value); }

int64_t Align(int64_t value, int64_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

class Metadata {
 public:
  explicit Metadata(const std::map<std::string, std::string>& values)
      : values_(values) {}

  absl::Status Equals(const std::string& key, const std::string& wanted) {
    known_.push_back(key);
    const auto found = values_.find(key);
    if (found != values_.end() && found->second == wanted) {
      return absl::OkStatus();
    }
    return Refuse(key, absl::StrCat("\"", wanted, "\""));
  }

  absl::StatusOr<int64_t> Integer(const std::string& key, int64_t low,
                                  int64_t high) {
    known_.push_back(key);
    const auto found = values_.find(key);
    int64_t value = 0;
    // Only the usual spelling: no sign, no leading zero.
    if (found == values_.end() || !absl::SimpleAtoi(found->second, &value) ||
        absl::StrCat(value) != found->second || value < low || value > high) {
      return Refuse(key, absl::StrCat("an integer within ", low, "..", high));
    }
    return value;
  }

  absl::Status Hash(const std::string& key) {
    known_.push_back(key);
    const auto found = values_.find(key);
    if (found != values_.end() && Digest::FromHex(found->second).ok()) {
      return absl::OkStatus();
    }
    return Refuse(key, "64 hexadecimal digits");
  }

  absl::Status Finish() const {
    for (const auto& [key, value] : values_) {
      if (std::find(known_.begin(), known_.end(), key) != known_.end()) {
        continue;
      }
      return absl::InvalidArgumentError(
          absl::StrCat("\"__metadata__\" has the unknown key ", JsonQuote(key),
                       "; known: ", absl::StrJoin(known_, ", ")));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Refuse(const std::string& key, absl::string_view rule) const {
    const auto found = values_.find(key);
    return absl::InvalidArgumentError(absl::StrCat(
        "\"__metadata__\": \"", key, "\" is ",
        found == values_.end() ? "missing" : JsonQuote(found->second),
        ", must be ", rule));
  }

  const std::map<std::string, std::string>& values_;
  std::vector<std::string> known_;
};

// The digest of `name` in the folder's list of digests; none without a list.
absl::StatusOr<std::optional<Digest>> FindDigest(const std::string& folder,
                                                 const std::string& name) {
  const std::string path = absl::StrCat(folder, "/", kDigestsName);
  const absl::StatusOr<std::string> text = ReadFile(path, kDigestsBytesMax);
  if (absl::IsNotFound(text.status())) return std::optional<Digest>();
  RETURN_IF_ERROR(text.status());
  std::optional<Digest> digest;
  size_t number = 0;
  for (const absl::string_view line : absl::StrSplit(*text, '\n')) {
    ++number;
    if (line.empty()) continue;
    const size_t space = line.find("  ");
    const absl::StatusOr<Digest> parsed =
        Digest::FromHex(line.substr(0, std::min(space, line.size())));
    if (!parsed.ok() || space == absl::string_view::npos) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, ":", number, ": is ", JsonQuote(line.substr(0, 100)),
          ", must be 64 hexadecimal digits, two spaces and a file name"));
    }
    if (line.substr(space + 2) != name) continue;
    if (digest.has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ":", number, ": names ", name, " twice"));
    }
    digest = *parsed;
  }
  if (!digest.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": does not name ", name));
  }
  return digest;
}

}  // namespace

std::string QsrtLayerFileName(int64_t layer) {
  return absl::StrFormat("%s%03d%s", kFilePrefix, layer, kFileSuffix);
}

std::vector<int64_t> QsrtLayersIn(const std::string& folder) {
  std::vector<int64_t> layers;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end;
       !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    absl::string_view number = name;
    int64_t layer = 0;
    if (absl::ConsumePrefix(&number, kFilePrefix) &&
        absl::ConsumeSuffix(&number, kFileSuffix) &&
        absl::SimpleAtoi(number, &layer) && layer >= 0 &&
        QsrtLayerFileName(layer) == name) {
      layers.push_back(layer);
    }
  }
  std::sort(layers.begin(), layers.end());
  return layers;
}

absl::StatusOr<QsrtLayer> QsrtLayer::Open(const std::string& folder,
                                          int64_t layer) {
  const std::string name = QsrtLayerFileName(layer);
  ASSIGN_OR_RETURN(SafetensorsFile file,
                   SafetensorsFile::Open(absl::StrCat(folder, "/", name)));
  QsrtLayer opened;
  opened.file_ = std::make_unique<SafetensorsFile>(std::move(file));
  ASSIGN_OR_RETURN(opened.sha256_, FindDigest(folder, name));
  RETURN_IF_ERROR(Annotate(opened.CheckHeader(layer), opened.path()));
  return opened;
}

absl::Status QsrtLayer::CheckHeader(int64_t layer) {
  RETURN_IF_ERROR(CheckMetadata(layer));
  RETURN_IF_ERROR(CheckTensors());
  return schema_ == Schema::kKimi ? CheckCanonicalText() : absl::OkStatus();
}

// Every product below is bounded: by the limits of the geometry and of the
// alignment.
absl::Status QsrtLayer::CheckMetadata(int64_t layer) {
  const std::map<std::string, std::string>& values = file_->header().metadata();
  const auto schema = values.find("schema");
  if (schema != values.end() && schema->second == kFruitSchema) {
    schema_ = Schema::kFruit;
  } else if (schema == values.end() || schema->second != kKimiSchema) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"__metadata__\": \"schema\" is ",
        schema == values.end() ? "missing" : JsonQuote(schema->second),
        ", must be \"", kKimiSchema, "\" or \"", kFruitSchema, "\""));
  }
  const bool kimi = schema_ == Schema::kKimi;
  layer_ = layer;
  Metadata metadata(values);
  RETURN_IF_ERROR(metadata.Equals("schema", schema->second));
  RETURN_IF_ERROR(metadata.Equals("format", "pt"));
  RETURN_IF_ERROR(metadata.Equals("version", "1"));
  RETURN_IF_ERROR(metadata.Equals("encoding", "qsrt_sqg_e4m3"));
  RETURN_IF_ERROR(metadata.Equals("layer", absl::StrCat(layer)));
  ASSIGN_OR_RETURN(experts_, metadata.Integer("experts", 1, kExpertsMax));
  ASSIGN_OR_RETURN(hidden_, metadata.Integer("latent_channels", 1, kHiddenMax));
  if (hidden_ % kRecordChannels != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"__metadata__\": \"latent_channels\" is ", hidden_,
                     ", must be a multiple of 128"));
  }
  ASSIGN_OR_RETURN(
      const int64_t intermediate,
      metadata.Integer("intermediate_channels", 1, kIntermediateMax));
  if (intermediate % kPairChannels != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"__metadata__\": \"intermediate_channels\" is ", intermediate,
        ", must be a multiple of 256: 8 atoms of 32 channels"));
  }
  slots_ = intermediate / kSlotChannels;
  RETURN_IF_ERROR(
      metadata.Equals("atom_channels", absl::StrCat(kSlotChannels)));
  RETURN_IF_ERROR(metadata.Equals("atom_slots", absl::StrCat(slots_)));
  const auto bundle = static_cast<int64_t>(QsrtBundleBytes(hidden_));
  RETURN_IF_ERROR(metadata.Equals("atom_bundle_bytes", absl::StrCat(bundle)));
  ASSIGN_OR_RETURN(
      alignment_,
      kimi ? metadata.Integer("alignment_bytes", kKimiAlignment, kKimiAlignment)
           : metadata.Integer("alignment_bytes", 1, kAlignmentMax));
  if ((alignment_ & (alignment_ - 1)) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"__metadata__\": \"alignment_bytes\" is ", alignment_,
                     ", must be a power of two"));
  }
  ASSIGN_OR_RETURN(x4t_experts_, metadata.Integer("x4t_experts", 0, experts_));
  const int64_t compressed = experts_ - x4t_experts_;
  RETURN_IF_ERROR(
      metadata.Equals("compressed_experts", absl::StrCat(compressed)));
  RETURN_IF_ERROR(metadata.Equals("atom_slot_payload_bytes",
                                  absl::StrCat(compressed * bundle)));
  const int64_t least = Align(compressed * bundle, alignment_);
  ASSIGN_OR_RETURN(stride_,
                   metadata.Integer("atom_slot_stride_bytes", least,
                                    kimi ? least : least + (int64_t{1} << 40)));
  if (stride_ % alignment_ != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"__metadata__\": \"atom_slot_stride_bytes\" is ", stride_,
        ", must be a multiple of \"alignment_bytes\", ", alignment_));
  }
  RETURN_IF_ERROR(metadata.Equals("profile_id", "1"));
  multiplier_ = kKimiMultiplier;
  if (!kimi) {
    RETURN_IF_ERROR(
        metadata.Equals("pair_count", absl::StrCat(slots_ / kPairSlots)));
    ASSIGN_OR_RETURN(multiplier_,
                     metadata.Integer("rotation_multiplier", 0, kLayersMax));
    RETURN_IF_ERROR(metadata.Equals("codebook", "sqg_xor_cheb_t12"));
    RETURN_IF_ERROR(metadata.Hash("source_sha256"));
    RETURN_IF_ERROR(metadata.Hash("encoder_fingerprint"));
    RETURN_IF_ERROR(metadata.Equals(
        "shared_scale_section_bytes",
        absl::StrCat(Align(3 * experts_ * hidden_ * 2, alignment_))));
  }
  return metadata.Finish();
}

absl::Status QsrtLayer::CheckTensors() {
  const std::pair<absl::string_view, const SafetensorsTensor**> wanted[] = {
      {kFormatsName, &formats_},
      {kScalesName, &scales_},
      {kAtomsName, &atoms_}};
  for (const SafetensorsTensor& tensor : file_->header().tensors()) {
    const auto found = std::find_if(
        std::begin(wanted), std::end(wanted),
        [&](const auto& item) { return item.first == tensor.name; });
    if (found == std::end(wanted)) {
      return RefuseTensor(tensor.name,
                          "is not a part of a QSRT layer, which has "
                          "_qsrt_format_section, _qsrt_shared_scale_section "
                          "and qsrt_atoms");
    }
    *found->second = &tensor;
  }
  for (const auto& [name, tensor] : wanted) {
    if (*tensor == nullptr) return RefuseTensor(name, "is missing");
  }
  const int64_t rows = schema_ == Schema::kKimi ? 1 : experts_;
  RETURN_IF_ERROR(CheckTensorIs(*formats_, StoredType::kU8,
                                {Size(Align(experts_, alignment_))}));
  RETURN_IF_ERROR(
      CheckTensorIs(*scales_, StoredType::kU8,
                    {Size(Align(3 * rows * hidden_ * 2, alignment_))}));
  return CheckTensorIs(*atoms_, StoredType::kU8, {Size(slots_), Size(stride_)});
}

// The header of the Kimi-K3 schema is one text: sorted, without spaces but
// those that fill it up.
absl::Status QsrtLayer::CheckCanonicalText() {
  std::vector<std::string> members;
  for (const auto& [key, value] : file_->header().metadata()) {
    members.push_back(absl::StrCat("\"", key, "\":\"", value, "\""));
  }
  std::string text =
      absl::StrCat("{\"__metadata__\":{", absl::StrJoin(members, ","), "}");
  uint64_t at = 0;
  for (const SafetensorsTensor* tensor : {formats_, scales_, atoms_}) {
    absl::StrAppend(&text, ",\"", tensor->name, "\":{\"data_offsets\":[", at,
                    ",", at + tensor->bytes(), "],\"dtype\":\"U8\",\"shape\":[",
                    absl::StrJoin(tensor->shape(), ","), "]}");
    at += tensor->bytes();
  }
  text += "}";
  const absl::string_view found = file_->header().text();
  if (found.size() != kKimiHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the header's length is ", found.size(),
                     " bytes, must be ", kKimiHeaderBytes));
  }
  if (text.size() <= kKimiHeaderBytes) text.resize(kKimiHeaderBytes, ' ');
  if (text == found) return absl::OkStatus();
  const size_t same = static_cast<size_t>(
      std::mismatch(text.begin(), text.end(), found.begin(), found.end())
          .first -
      text.begin());
  return absl::InvalidArgumentError(absl::StrCat(
      "the header is not in its canonical form: byte ", same,
      " differs; it must be sorted and compact JSON, padded with spaces"));
}

absl::Status QsrtLayer::Validate() {
  ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes, file_->FileBytes());
  ASSIGN_OR_RETURN(const std::span<const uint8_t> codes,
                   file_->Bytes(*formats_));
  ASSIGN_OR_RETURN(shared_, file_->Bytes(*scales_));
  ASSIGN_OR_RETURN(slab_, file_->Bytes(*atoms_));
  // Those above name the file.
  const auto check = [&]() -> absl::Status {
    if (sha256_.has_value()) {
      const Digest digest = Sha256(AsText(bytes));
      if (digest != *sha256_) {
        return absl::InvalidArgumentError(
            absl::StrCat("has the SHA-256 ", digest.ToHex(), ", ", kDigestsName,
                         " says ", sha256_->ToHex()));
      }
    }
    RETURN_IF_ERROR(CheckCodes(codes));
    const uint64_t rows = schema_ == Schema::kKimi ? 1 : Size(experts_);
    const uint64_t used = 3 * rows * Size(hidden_) * sizeof(uint16_t);
    RETURN_IF_ERROR(CheckFinite(kScalesName, shared_.first(used)));
    RETURN_IF_ERROR(CheckZeroPadding(kScalesName, used, shared_.subspan(used)));
    shared_ = shared_.first(used);
    return CheckSlab();
  };
  return Annotate(check(), path());
}

absl::Status QsrtLayer::CheckCodes(std::span<const uint8_t> section) {
  expert_ids_.clear();
  format_codes_.clear();
  for (int64_t e = 0; e < experts_; ++e) {
    const uint8_t code = section[Size(e)];
    if (code == kQsrtX4t) continue;
    if (code >> 4 > 2 || (code & 0xF) > 2) {
      return RefuseTensor(
          kFormatsName,
          absl::StrCat("has 0x", absl::Hex(code, absl::kZeroPad2),
                       " for expert ", e,
                       ", must be two nibbles within 0..2, or 0xff"));
    }
    expert_ids_.push_back(e);
    format_codes_.push_back(code);
  }
  const auto x4t = experts_ - static_cast<int64_t>(expert_ids_.size());
  if (x4t != x4t_experts_) {
    return RefuseTensor(kFormatsName,
                        absl::StrCat("has ", x4t, " experts of the X4T tier, ",
                                     "\"x4t_experts\" says ", x4t_experts_));
  }
  return CheckZeroPadding(kFormatsName, Size(experts_),
                          section.subspan(Size(experts_)));
}

absl::Status QsrtLayer::CheckSlab() {
  const uint64_t row = expert_ids_.size() * QsrtBundleBytes(hidden_);
  for (int64_t slot = 0; slot < slots_; ++slot) {
    const uint64_t at = Size(slot * stride_) + row;
    RETURN_IF_ERROR(CheckZeroPadding(kAtomsName, at,
                                     slab_.subspan(at, Size(stride_) - row)));
  }
  return absl::OkStatus();
}

absl::StatusOr<QsrtExtent> QsrtLayer::Extent(int64_t first_slot) const {
  if (x4t_experts_ > 0) {
    int64_t first = 0;  // that is no trellis expert
    while (Size(first) < expert_ids_.size() &&
           expert_ids_[Size(first)] == first) {
      ++first;
    }
    return absl::FailedPreconditionError(
        absl::StrCat("tensor \"", kFormatsName, "\": expert ", first,
                     " is stored in the X4T tier, which is not read; so are ",
                     x4t_experts_, " of ", experts_, " experts"));
  }
  QsrtExtent extent;
  extent.hidden = hidden_;
  extent.atom_slots = slots_;
  extent.experts_per_layer = experts_;
  extent.rotation_multiplier = multiplier_;
  extent.layer = layer_;
  extent.first_slot = first_slot;
  extent.payload =
      slab_.subspan(Size(first_slot * stride_), Size(kPairSlots * stride_));
  extent.row_stride = Size(stride_);
  extent.expert_ids = expert_ids_;
  extent.format_codes = format_codes_;
  const size_t table = shared_.size() / 3;
  extent.gate_suh = shared_.first(table);
  extent.up_suh = shared_.subspan(table, table);
  extent.down_svh = shared_.subspan(2 * table);
  return extent;
}

absl::StatusOr<std::unique_ptr<TrellisSource>> TrellisFromQsrtLayer(
    const TrellisExtent& extent, QsrtLayer* layer) {
  RETURN_IF_ERROR(
      Annotate(CheckPairExtent(extent, layer->intermediate()), layer->path()));
  RETURN_IF_ERROR(layer->Validate());
  absl::StatusOr<QsrtExtent> pair = layer->Extent(extent.begin / kSlotChannels);
  if (!pair.ok()) return Annotate(pair.status(), layer->path());
  absl::StatusOr<std::unique_ptr<TrellisSource>> source =
      TrellisFromQsrt(*pair);
  if (!source.ok()) return Annotate(source.status(), layer->path());
  return source;
}

}  // namespace kiln
