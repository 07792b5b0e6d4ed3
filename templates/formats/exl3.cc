#include "templates/formats/exl3.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <initializer_list>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "compiler/base/check.h"
#include "compiler/base/status_macros.h"
#include "device/half.h"

namespace kiln {
namespace {

// Payloads are little-endian and are used as they lie.
static_assert(std::endian::native == std::endian::little);

constexpr uint64_t kTileEdge = 16;
constexpr uint64_t kBitsMax = 8;
constexpr uint16_t kPlusOne = 0x3C00;   // binary16
constexpr uint16_t kMinusOne = 0xBC00;  // binary16
constexpr uint16_t kExponent = 0x7C00;  // all ones: infinity or NaN

struct Suffix {
  absl::string_view name;
  const SafetensorsTensor* Exl3Group::*field;
};

constexpr Suffix kSuffixes[] = {
    {"trellis", &Exl3Group::trellis}, {"suh", &Exl3Group::suh},
    {"svh", &Exl3Group::svh},         {"su", &Exl3Group::su},
    {"sv", &Exl3Group::sv},           {"mcg", &Exl3Group::mcg},
    {"mul1", &Exl3Group::mul1},       {"bias", &Exl3Group::bias},
};

absl::Status Refuse(const SafetensorsTensor& tensor, absl::string_view rule) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor ", QuoteTensorName(tensor.name), " ", rule));
}

absl::Status CheckTypeAndShape(const SafetensorsTensor& tensor,
                               std::initializer_list<StoredType> types,
                               std::initializer_list<uint64_t> shape) {
  const bool type_fits =
      std::find(types.begin(), types.end(), tensor.type) != types.end();
  const bool shape_fits = std::equal(
      shape.begin(), shape.end(), tensor.shape().begin(), tensor.shape().end());
  if (type_fits && shape_fits) return absl::OkStatus();
  return Refuse(tensor,
                absl::StrCat("is ", tensor.TypeAndShape(), ", must be ",
                             absl::StrJoin(types, " or ",
                                           [](std::string* out, StoredType t) {
                                             absl::StrAppend(out,
                                                             StoredTypeName(t));
                                           }),
                             " [", absl::StrJoin(shape, ", "), "]"));
}

absl::Status CheckChannels(const SafetensorsTensor& trellis,
                           absl::string_view side, uint64_t tiles) {
  if (tiles > 0 && tiles <= kChannelsMax / kTileEdge &&
      tiles * kTileEdge % kHadamardBlock == 0) {
    return absl::OkStatus();
  }
  return Refuse(
      trellis,
      absl::StrCat("is ", trellis.TypeAndShape(), ": ", tiles, " tiles of 16 ",
                   side, " channels, must be 8 or a multiple of it (the ",
                   "Hadamard block of 128 channels), at most ",
                   kChannelsMax / kTileEdge));
}

// One of the two forms of a scale vector: binary16 values or sign bits.
absl::Status CheckScaleForms(absl::string_view key, const char* values_name,
                             const char* signs_name,
                             const SafetensorsTensor* values,
                             const SafetensorsTensor* signs,
                             uint64_t channels) {
  if (values != nullptr && signs != nullptr) {
    return Refuse(*values, absl::StrCat("stands beside its legacy form .",
                                        signs_name, ", only one may exist"));
  }
  if (values != nullptr) {
    return CheckTypeAndShape(*values, {StoredType::kF16}, {channels});
  }
  if (signs != nullptr) {
    return CheckTypeAndShape(*signs, {StoredType::kI16},
                             {channels / kTileEdge});
  }
  return absl::InvalidArgumentError(
      absl::StrCat("EXL3 group ", QuoteTensorName(key), " lacks .", values_name,
                   " (or its ", "legacy form .", signs_name, ")"));
}

}  // namespace

const SafetensorsTensor* Exl3Group::Any() const {
  for (const Suffix& suffix : kSuffixes) {
    if (this->*suffix.field != nullptr) return this->*suffix.field;
  }
  return nullptr;
}

absl::Status AddToExl3Group(absl::string_view suffix,
                            const SafetensorsTensor& tensor, Exl3Group* group) {
  for (const Suffix& known : kSuffixes) {
    if (suffix != known.name) continue;
    group->*known.field = &tensor;
    return absl::OkStatus();
  }
  if (suffix == "scale") {
    return Refuse(tensor, "is of an obsolete form of EXL3 that is not read");
  }
  if (suffix == "weight") {
    return absl::FailedPreconditionError(absl::StrCat(
        "tensor ", QuoteTensorName(tensor.name), " is ", tensor.TypeAndShape(),
        ", not an EXL3 group: only trellis weights are served"));
  }
  return Refuse(
      tensor,
      absl::StrCat("is not a part of an EXL3 group; parts: ",
                   absl::StrJoin(kSuffixes, ", ",
                                 [](std::string* out, const Suffix& known) {
                                   absl::StrAppend(out, ".", known.name);
                                 })));
}

absl::StatusOr<Exl3Matrix> CheckExl3Group(absl::string_view key,
                                          const Exl3Group& group) {
  if (group.trellis == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("EXL3 group ", QuoteTensorName(key), " lacks .trellis"));
  }
  const SafetensorsTensor& trellis = *group.trellis;
  if (trellis.type != StoredType::kI16 || trellis.rank != 3) {
    return Refuse(trellis, absl::StrCat("is ", trellis.TypeAndShape(),
                                        ", must be I16 [in/16, out/16, 16 K]"));
  }
  const uint64_t words = trellis.dims[2];
  if (words == 0 || words % kTileEdge != 0 || words > kTileEdge * kBitsMax) {
    return Refuse(trellis, absl::StrCat("has the last dimension ", words,
                                        ", must be 16 K with K within 1..8"));
  }
  RETURN_IF_ERROR(CheckChannels(trellis, "input", trellis.dims[0]));
  RETURN_IF_ERROR(CheckChannels(trellis, "output", trellis.dims[1]));
  const uint64_t in = trellis.dims[0] * kTileEdge;
  const uint64_t out = trellis.dims[1] * kTileEdge;
  RETURN_IF_ERROR(CheckScaleForms(key, "suh", "su", group.suh, group.su, in));
  RETURN_IF_ERROR(CheckScaleForms(key, "svh", "sv", group.svh, group.sv, out));
  if (group.mcg != nullptr && group.mul1 != nullptr) {
    return Refuse(*group.mcg,
                  "stands beside .mul1: both codebook markers, at most one may "
                  "exist");
  }
  for (const SafetensorsTensor* marker : {group.mcg, group.mul1}) {
    if (marker == nullptr) continue;
    RETURN_IF_ERROR(
        CheckTypeAndShape(*marker, {StoredType::kI32, StoredType::kU32}, {}));
  }
  if (group.bias != nullptr) {
    RETURN_IF_ERROR(CheckTypeAndShape(
        *group.bias, {StoredType::kF16, StoredType::kF32}, {out}));
  }
  return Exl3Matrix{.in = static_cast<int64_t>(in),
                    .out = static_cast<int64_t>(out),
                    .bits = static_cast<int>(words / kTileEdge),
                    .codebook = group.mcg != nullptr    ? Codebook::kMcg
                                : group.mul1 != nullptr ? Codebook::kMul1
                                                        : Codebook::k3Inst,
                    .tensors = group};
}

absl::Status CheckExl3Codebook(const Exl3Matrix& matrix, Codebook configured) {
  if (matrix.codebook == configured) return absl::OkStatus();
  const Exl3Group& group = matrix.tensors;
  const bool marked = group.mcg != nullptr || group.mul1 != nullptr;
  return Refuse(
      *group.trellis,
      absl::StrCat(marked ? "has by its marker the codebook "
                          : "has no marker beside it, which means codebook ",
                   CodebookName(matrix.codebook),
                   ", but \"quantization_config\" says ",
                   CodebookName(configured)));
}

absl::Status CheckExl3Values(const Exl3Matrix& matrix, Checkpoint* checkpoint) {
  const Exl3Group& group = matrix.tensors;
  const SafetensorsTensor* marker =
      group.mcg != nullptr ? group.mcg : group.mul1;
  if (marker != nullptr) {
    ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes,
                     checkpoint->Bytes(*marker));
    uint32_t value = 0;
    KILN_CHECK(bytes.size() == sizeof(value));
    std::memcpy(&value, bytes.data(), sizeof(value));
    const uint32_t wanted = marker == group.mcg ? kMcgMarker : kMul1Marker;
    if (value != wanted) {
      return Refuse(*marker, absl::StrCat("holds 0x", absl::Hex(value),
                                          ", must hold 0x", absl::Hex(wanted),
                                          ", its codebook's multiplier"));
    }
  }
  for (const SafetensorsTensor* scales : {group.suh, group.svh}) {
    if (scales == nullptr) continue;
    ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes,
                     checkpoint->Bytes(*scales));
    for (size_t i = 0; i < bytes.size(); i += 2) {
      uint16_t value = 0;
      std::memcpy(&value, &bytes[i], sizeof(value));
      if ((value & kExponent) != kExponent) continue;
      return Refuse(*scales,
                    absl::StrCat("has the binary16 bits 0x", absl::Hex(value),
                                 " at channel ", i / 2, ", must be finite"));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadExl3Scales(const Exl3Matrix& matrix, bool input_side,
                            uint64_t begin, Checkpoint* checkpoint,
                            std::span<uint16_t> out) {
  const Exl3Group& group = matrix.tensors;
  const auto channels =
      static_cast<uint64_t>(input_side ? matrix.in : matrix.out);
  KILN_CHECK(begin <= channels && out.size() <= channels - begin);
  const SafetensorsTensor* values = input_side ? group.suh : group.svh;
  if (values != nullptr) {
    ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes,
                     checkpoint->Bytes(*values));
    std::memcpy(out.data(), bytes.data() + 2 * begin, out.size_bytes());
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes,
                   checkpoint->Bytes(input_side ? *group.su : *group.sv));
  for (size_t i = 0; i < out.size(); ++i) {
    const uint64_t channel = begin + i;
    // Bit j of the 16-bit word w is channel 16 w + j.
    const bool minus = (bytes[channel / 8] >> (channel % 8) & 1) != 0;
    out[i] = minus ? kMinusOne : kPlusOne;
  }
  return absl::OkStatus();
}

absl::Status ReadExl3Tiles(const Exl3Matrix& matrix, uint64_t row,
                           uint64_t column, Checkpoint* checkpoint,
                           std::span<uint8_t> out) {
  const SafetensorsTensor& trellis = *matrix.tensors.trellis;
  ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes,
                   checkpoint->Bytes(trellis));
  const uint64_t tile_bytes = trellis.dims[2] * sizeof(uint16_t);
  const uint64_t at = (row * trellis.dims[1] + column) * tile_bytes;
  KILN_CHECK(at <= bytes.size() && out.size() <= bytes.size() - at);
  std::memcpy(out.data(), bytes.data() + at, out.size());
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint16_t>> ReadExl3Bias(const Exl3Matrix& matrix,
                                                   Checkpoint* checkpoint) {
  const SafetensorsTensor& bias = *matrix.tensors.bias;
  ASSIGN_OR_RETURN(const std::span<const uint8_t> bytes,
                   checkpoint->Bytes(bias));
  std::vector<uint16_t> values(static_cast<size_t>(matrix.out));
  const bool wide = bias.type == StoredType::kF32;
  KILN_CHECK(bytes.size() == values.size() * (wide ? 4 : 2));
  for (size_t i = 0; i < values.size(); ++i) {
    if (wide) {
      float value = 0;
      std::memcpy(&value, &bytes[4 * i], sizeof(value));
      values[i] = kd::f32_to_f16(value);
    } else {
      std::memcpy(&values[i], &bytes[2 * i], sizeof(values[i]));
    }
    if ((values[i] & kExponent) == kExponent) {
      return Refuse(bias, absl::StrCat("has at channel ", i,
                                       " a value that is not finite as "
                                       "binary16"));
    }
  }
  return values;
}

std::string RankCountsText(const std::vector<int64_t>& counts) {
  return counts.empty() ? "no --tp is possible"
                        : absl::StrCat("possible with --tp: ",
                                       absl::StrJoin(counts, ", "));
}

std::string PossibleRanks(int64_t channels, int64_t block) {
  std::vector<int64_t> possible;
  for (int64_t count = 1; count <= channels / block; ++count) {
    if (channels % (count * block) == 0) possible.push_back(count);
  }
  return RankCountsText(possible);
}

absl::StatusOr<int64_t> ChannelsPerRank(absl::string_view what,
                                        int64_t channels, int64_t ranks) {
  constexpr auto kBlock = static_cast<int64_t>(kHadamardBlock);
  if (channels % kBlock != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        what, " ", channels, " is not a multiple of 128 (the Hadamard block)"));
  }
  const int64_t blocks = channels / kBlock;
  if (ranks >= 1 && blocks % ranks == 0) return channels / ranks;
  return absl::InvalidArgumentError(absl::StrCat(
      what, " ", channels, " cannot be split over ", ranks,
      " ranks: each needs the same multiple of 128 channels (the Hadamard "
      "block); ",
      PossibleRanks(channels, kBlock)));
}

}  // namespace kiln
