#include "templates/formats/npk_prepare.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "compiler/base/as_text.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "templates/formats/npk_header.h"
#include "templates/formats/npk_import.h"

namespace kiln {
namespace {

constexpr char kPrefix[] = "npk1-layer-";
constexpr char kSuffix[] = ".safetensors";
constexpr uint64_t kPanelRows = 256;
constexpr uint64_t kWordChannels = 128;
constexpr uint64_t kGroup = 32;
constexpr uint8_t kPadding = 127;

bool IsSidecarName(const std::string& name) {
  return absl::StartsWith(name, kPrefix) && absl::EndsWith(name, kSuffix);
}

SafetensorsTensor Tensor(absl::string_view name, StoredType type,
                         std::initializer_list<uint64_t> shape) {
  SafetensorsTensor tensor;
  tensor.name = name;
  tensor.type = type;
  tensor.rank = shape.size();
  std::copy(shape.begin(), shape.end(), tensor.dims.begin());
  tensor.end = StoredTypeBits(type) / 8;
  for (const uint64_t dim : shape) tensor.end *= dim;
  return tensor;
}

absl::Status AppendScales(std::span<const uint8_t> scales, uint64_t experts,
                          uint64_t rows, uint64_t columns, PendingFile* file) {
  const uint64_t each = rows * (columns / kGroup);
  KILN_CHECK(scales.size() == experts * each);
  for (uint64_t e = 0; e < experts; ++e) {
    RETURN_IF_ERROR(file->Append(
        AsText(NpkScaleWords(scales.subspan(e * each, each), rows, columns))));
  }
  return absl::OkStatus();
}

absl::Status AppendRotations(const NpkSidecar& sidecar, PendingFile* file) {
  const NpkMetadata& m = sidecar.metadata();
  const std::span<const uint8_t> scales =
      sidecar.tensor(NpkTensor::kInnerScales);
  const std::span<const uint8_t> draws = sidecar.tensor(NpkTensor::kSignDraw);
  const auto each = static_cast<size_t>(2 * 3 * m.intermediate);
  std::map<uint8_t, std::vector<uint16_t>> signs;
  for (size_t e = 0; e < draws.size(); ++e) {
    std::vector<uint16_t>& drawn = signs[draws[e]];
    if (drawn.empty()) drawn = NpkSigns(m, draws[e]);
    RETURN_IF_ERROR(file->Append(AsText(scales.subspan(e * each, each))));
    RETURN_IF_ERROR(file->Append(AsText(drawn)));
  }
  return absl::OkStatus();
}

}  // namespace

bool HoldsNpkSidecars(const std::string& folder) {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (IsSidecarName(entry.path().filename().string())) return true;
  }
  return false;
}

std::vector<NpkPlace> NpkPlacesIn(const std::string& folder, bool p8) {
  std::vector<NpkPlace> places;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    // Whether the numbers are written as they must be is seen below.
    std::vector<int64_t> numbers;
    for (const absl::string_view word :
         absl::StrSplit(name.substr(0, name.find('.')), '-')) {
      int64_t number = 0;
      if (absl::SimpleAtoi(word, &number)) numbers.push_back(number);
    }
    numbers.resize(3);
    const NpkPlace place = {.layer = numbers[0],
                            .rank = numbers[1],
                            .ranks = p8 ? kP8Ranks : numbers[2]};
    const std::string named =
        p8 ? P8FileName(place.layer, place.rank)
           : NpkFileName(place.layer, place.rank, place.ranks);
    if (name == named) places.push_back(place);
  }
  std::sort(places.begin(), places.end());
  return places;
}

absl::Status CheckNpkPlace(const std::string& folder,
                           const std::vector<NpkPlace>& places,
                           const PrepareOptions& options) {
  std::set<int64_t> layers;
  std::vector<std::string> ranks;
  for (const NpkPlace& place : places) {
    if (place == NpkPlace{options.layer, options.rank, options.ranks}) {
      return absl::OkStatus();
    }
    layers.insert(place.layer);
    if (place.layer != options.layer) continue;
    ranks.push_back(absl::StrCat(place.rank, "/", place.ranks));
  }
  if (ranks.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(folder, ": has no sidecar of layer ", options.layer,
                     "; layers that it has: ",
                     layers.empty() ? "none" : absl::StrJoin(layers, ", ")));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      folder, ": has no sidecar of rank ", options.rank, "/", options.ranks,
      " of layer ", options.layer,
      "; of this layer --tp may be: ", absl::StrJoin(ranks, ", ")));
}

absl::StatusOr<std::vector<NpkLayerSummary>> DescribeNpkFolder(
    const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (IsSidecarName(entry.path().filename().string())) {
      paths.push_back(entry.path().string());
    }
  }
  if (error) return ErrnoStatus(error.value(), "cannot list", folder);
  std::sort(paths.begin(), paths.end());
  std::map<int64_t, std::vector<NpkSidecar>> layers;
  for (const std::string& path : paths) {
    ASSIGN_OR_RETURN(NpkSidecar sidecar,
                     NpkSidecar::Open(path, {.pins = {}, .values = false}));
    const NpkMetadata& m = sidecar.metadata();
    const std::string name = NpkFileName(m.layer, m.rank, m.world_size);
    if (!absl::EndsWith(path, absl::StrCat("/", name))) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": holds what would be named ", name));
    }
    layers[m.layer].push_back(std::move(sidecar));
  }
  std::vector<NpkLayerSummary> summaries;
  for (const auto& [layer, ranks] : layers) {
    std::vector<const NpkSidecar*> all;
    NpkLayerSummary& summary = summaries.emplace_back();
    for (const NpkSidecar& sidecar : ranks) {
      all.push_back(&sidecar);
      summary.bytes += NpkTensorsOf(sidecar.metadata()).back().end;
      if (sidecar.metadata().rank == 0) summary.metadata = sidecar.metadata();
    }
    if (absl::Status status = CheckNpkRanks(all); !status.ok()) {
      return Annotate(status, absl::StrCat(folder, ": layer ", layer));
    }
  }
  if (summaries.empty()) {
    return absl::NotFoundError(
        absl::StrCat(folder, ": holds no ", kPrefix, "*", kSuffix));
  }
  return summaries;
}

absl::StatusOr<std::vector<SafetensorsTensor>> NpkPreparedTensors(
    const NpkMetadata& metadata) {
  if (metadata.intermediate % static_cast<int64_t>(kWordChannels) != 0 ||
      metadata.hidden % static_cast<int64_t>(kWordChannels) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "hidden ", metadata.hidden, " and intermediate_local ",
        metadata.intermediate,
        " must be multiples of 128: a word of prepared scales covers 128 "
        "input channels"));
  }
  const auto e = static_cast<uint64_t>(metadata.experts);
  const auto h = static_cast<uint64_t>(metadata.hidden);
  const auto i = static_cast<uint64_t>(metadata.intermediate);
  const auto words = static_cast<uint64_t>(16 * metadata.bits);
  const auto panels = [](uint64_t rows) {
    return (rows + kPanelRows - 1) / kPanelRows;
  };
  std::vector<SafetensorsTensor> tensors = {
      Tensor("w13", StoredType::kI16, {2, e, h / 16, i / 16, words}),
      Tensor("w2", StoredType::kI16, {e, i / 16, h / 16, words}),
      Tensor("w13_scale", StoredType::kU32,
             {e, panels(2 * i), h / kWordChannels, kPanelRows}),
      Tensor("w2_scale", StoredType::kU32,
             {e, panels(h), i / kWordChannels, kPanelRows})};
  if (metadata.boundary == NpkBoundary::kCoupled) {
    tensors.push_back(Tensor("gate_up_suh", StoredType::kF16, {h}));
    tensors.push_back(Tensor("rotations", StoredType::kF16, {e, 6 * i}));
    tensors.push_back(Tensor("down_svh", StoredType::kF16, {h}));
  }
  return tensors;
}

std::vector<uint32_t> NpkScaleWords(std::span<const uint8_t> scales,
                                    uint64_t rows, uint64_t columns) {
  const uint64_t groups = columns / kGroup;
  const uint64_t across = columns / kWordChannels;
  KILN_CHECK(columns % kWordChannels == 0 && scales.size() == rows * groups);
  const uint64_t panels = (rows + kPanelRows - 1) / kPanelRows;
  std::vector<uint32_t> words(panels * across * kPanelRows,
                              kPadding * 0x01010101u);
  for (uint64_t n = 0; n < rows; ++n) {
    for (uint64_t k = 0; k < across; ++k) {
      uint32_t word = 0;
      std::memcpy(&word, &scales[n * groups + 4 * k], sizeof(word));
      words[(n / kPanelRows * across + k) * kPanelRows + n % kPanelRows] = word;
    }
  }
  return words;
}

absl::StatusOr<PreparedNpkLayer> PrepareNpkLayer(
    const std::string& folder, const std::string& output,
    const PrepareOptions& options) {
  RETURN_IF_ERROR(CheckNpkPlace(folder, NpkPlacesIn(folder, false), options));
  const std::string path = absl::StrCat(
      folder, "/", NpkFileName(options.layer, options.rank, options.ranks));
  NpkOpenOptions open;
  open.pins.layer = options.layer;
  open.pins.rank = options.rank;
  ASSIGN_OR_RETURN(const NpkSidecar sidecar, NpkSidecar::Open(path, open));
  PreparedNpkLayer prepared;
  prepared.metadata = sidecar.metadata();
  const NpkMetadata& m = prepared.metadata;
  absl::StatusOr<std::vector<SafetensorsTensor>> tensors =
      NpkPreparedTensors(m);
  if (!tensors.ok()) return Annotate(tensors.status(), path);
  const std::string head = MakeSafetensorsHead(
      *tensors, {{"format", "kiln.npk1/1"},
                 {"boundary", std::string(MxBoundaryName(m.boundary))},
                 {"bits", absl::StrCat(m.bits)},
                 {"limit", m.limit},
                 {"layer", absl::StrCat(m.layer)},
                 {"rank", absl::StrCat(m.rank)},
                 {"ranks", absl::StrCat(m.world_size)}});
  prepared.bytes = head.size();
  for (const SafetensorsTensor& tensor : *tensors) {
    prepared.bytes += tensor.bytes();
  }
  prepared.path = absl::StrCat(output, "/", PreparedFileName(options));

  RETURN_IF_ERROR(MakeDirectories(output));
  PendingFile file(prepared.path);
  const auto e = static_cast<uint64_t>(m.experts);
  const auto h = static_cast<uint64_t>(m.hidden);
  const auto i = static_cast<uint64_t>(m.intermediate);
  const auto append = [&](NpkTensor which) {
    return file.Append(AsText(sidecar.tensor(which)));
  };
  RETURN_IF_ERROR(file.Append(head));
  RETURN_IF_ERROR(append(NpkTensor::kW13Stream));
  RETURN_IF_ERROR(append(NpkTensor::kW2Stream));
  RETURN_IF_ERROR(
      AppendScales(sidecar.tensor(NpkTensor::kW13Scale), e, 2 * i, h, &file));
  RETURN_IF_ERROR(
      AppendScales(sidecar.tensor(NpkTensor::kW2Scale), e, h, i, &file));
  if (m.boundary == NpkBoundary::kCoupled) {
    RETURN_IF_ERROR(append(NpkTensor::kGateUpSuh));
    RETURN_IF_ERROR(AppendRotations(sidecar, &file));
    RETURN_IF_ERROR(append(NpkTensor::kDownSvh));
  }
  RETURN_IF_ERROR(file.Commit());
  return prepared;
}

}  // namespace kiln
