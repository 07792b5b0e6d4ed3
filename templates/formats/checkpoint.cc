#include "templates/formats/checkpoint.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "compiler/base/check.h"
#include "compiler/base/file_util.h"
#include "compiler/base/status_macros.h"
#include "compiler/spec/json_reader.h"
#include "templates/formats/json_scanner.h"

namespace kiln {
namespace {

constexpr absl::string_view kIndexName = "model.safetensors.index.json";
constexpr absl::string_view kSingleName = "model.safetensors";
// A table of this many takes a quarter of a gigabyte. Layers of 1024 experts
// with four tensors for each matrix, a hundred of them, have 1.2 million.
constexpr size_t kTensorsMax = size_t{1} << 21;

absl::Status CheckShardName(absl::string_view tensor, absl::string_view shard) {
  const bool plain = !shard.empty() && shard[0] != '.' && shard.size() <= 255 &&
                     shard.find('/') == absl::string_view::npos &&
                     shard.find('\0') == absl::string_view::npos;
  if (plain) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "tensor ", QuoteTensorName(tensor), " lies in shard ", JsonQuote(shard),
      ", must be the name of a file in the same folder"));
}

}  // namespace

absl::StatusOr<ShardIndex> ShardIndex::Parse(std::string json) {
  ShardIndex index;
  index.text_ = std::make_unique<const std::string>(std::move(json));
  index.decoded_ = std::make_unique<std::deque<std::string>>();
  RETURN_IF_ERROR(index.Scan());
  return index;
}

absl::Status ShardIndex::Scan() {
  JsonScanner scanner(*text_);
  RETURN_IF_ERROR(scanner.Expect('{'));
  bool has_map = false;
  bool has_metadata = false;
  if (!scanner.Take('}')) {
    do {
      ASSIGN_OR_RETURN(const absl::string_view key,
                       scanner.String(decoded_.get()));
      bool* seen = key == "weight_map" ? &has_map
                   : key == "metadata" ? &has_metadata
                                       : nullptr;
      if (seen == nullptr) {
        return scanner.Error(absl::StrCat("unknown key ", JsonQuote(key),
                                          "; known: metadata, weight_map"));
      }
      if (*seen) {
        return scanner.Error(absl::StrCat("duplicate key ", JsonQuote(key)));
      }
      *seen = true;
      RETURN_IF_ERROR(scanner.Expect(':'));
      if (seen == &has_metadata) {
        // Sizes and notes of the writer; nothing here depends on them.
        ASSIGN_OR_RETURN(const absl::string_view ignored, scanner.Value());
        static_cast<void>(ignored);
      } else {
        RETURN_IF_ERROR(ScanWeightMap(&scanner));
      }
    } while (scanner.Take(','));
    RETURN_IF_ERROR(scanner.Expect('}'));
  }
  if (!scanner.AtEnd()) return scanner.Error("text after the index's object");
  if (!has_map) {
    return absl::InvalidArgumentError("lacks the key \"weight_map\"");
  }
  return absl::OkStatus();
}

absl::Status ShardIndex::ScanWeightMap(JsonScanner* scanner) {
  absl::flat_hash_map<std::string, size_t> positions;
  RETURN_IF_ERROR(scanner->Expect('{'));
  if (scanner->Take('}')) return absl::OkStatus();
  do {
    ASSIGN_OR_RETURN(const absl::string_view tensor,
                     scanner->String(decoded_.get()));
    RETURN_IF_ERROR(scanner->Expect(':'));
    ASSIGN_OR_RETURN(const absl::string_view shard,
                     scanner->String(decoded_.get()));
    auto position = positions.find(shard);
    if (position == positions.end()) {
      RETURN_IF_ERROR(CheckShardName(tensor, shard));
      if (shards_.size() == kShardsMax) {
        return scanner->Error(
            absl::StrCat("more than ", kShardsMax, " shards"));
      }
      position = positions.emplace(shard, shards_.size()).first;
      shards_.emplace_back(shard);
    }
    if (tensors_.size() == kTensorsMax) {
      return scanner->Error(
          absl::StrCat("more than ", kTensorsMax, " tensors"));
    }
    if (!tensors_.emplace(tensor, position->second).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor ", QuoteTensorName(tensor), " is named twice"));
    }
  } while (scanner->Take(','));
  return scanner->Expect('}');
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& folder) {
  const std::string index_path = absl::StrCat(folder, "/", kIndexName);
  const std::string single_path = absl::StrCat(folder, "/", kSingleName);
  Checkpoint checkpoint;
  absl::StatusOr<std::string> json = ReadFile(index_path, kIndexBytesMax);
  if (absl::IsNotFound(json.status())) {
    absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(single_path);
    if (absl::IsNotFound(file.status())) {
      return absl::NotFoundError(absl::StrCat(
          folder, " holds neither ", kIndexName, " nor ", kSingleName));
    }
    RETURN_IF_ERROR(file.status());
    checkpoint.shards_.push_back(*std::move(file));
    const auto& tensors = checkpoint.shards_[0].header().tensors();
    checkpoint.places_.reserve(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      checkpoint.places_.emplace(tensors[i].name, Place{0, i});
    }
    return checkpoint;
  }
  RETURN_IF_ERROR(json.status());
  absl::StatusOr<ShardIndex> index = ShardIndex::Parse(*std::move(json));
  if (!index.ok()) return Annotate(index.status(), index_path);
  checkpoint.places_.reserve(index->tensors().size());
  for (size_t shard = 0; shard < index->shards().size(); ++shard) {
    const std::string& name = index->shards()[shard];
    ASSIGN_OR_RETURN(SafetensorsFile file,
                     SafetensorsFile::Open(absl::StrCat(folder, "/", name)));
    checkpoint.shards_.push_back(std::move(file));
    const auto& tensors = checkpoint.shards_.back().header().tensors();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto listed = index->tensors().find(tensors[i].name);
      if (listed == index->tensors().end()) {
        return absl::InvalidArgumentError(absl::StrCat(
            index_path, ": does not name tensor ",
            QuoteTensorName(tensors[i].name), ", which lies in ", name));
      }
      if (listed->second != shard) {
        return absl::InvalidArgumentError(absl::StrCat(
            index_path, ": says that tensor ", QuoteTensorName(tensors[i].name),
            " lies in ", index->shards()[listed->second], ", but ", name,
            " holds it"));
      }
      checkpoint.places_.emplace(tensors[i].name, Place{shard, i});
    }
  }
  if (checkpoint.places_.size() == index->tensors().size()) return checkpoint;
  // The smallest name, so that the message does not depend on hashing.
  absl::string_view missing;
  for (const auto& [name, shard] : index->tensors()) {
    if (checkpoint.places_.contains(name)) continue;
    if (missing.empty() || name < missing) missing = name;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(index_path, ": names tensor ", QuoteTensorName(missing),
                   " in ", index->shards()[index->tensors().at(missing)],
                   ", which does not hold it"));
}

const SafetensorsTensor* Checkpoint::Find(absl::string_view name) const {
  const auto place = places_.find(name);
  if (place == places_.end()) return nullptr;
  return &shards_[place->second.shard].header().tensors()[place->second.tensor];
}

absl::StatusOr<std::span<const uint8_t>> Checkpoint::Bytes(
    const SafetensorsTensor& tensor) {
  const auto place = places_.find(tensor.name);
  KILN_CHECK(place != places_.end());
  return shards_[place->second.shard].Bytes(tensor);
}

const std::string& Checkpoint::PathOf(const SafetensorsTensor& tensor) const {
  const auto place = places_.find(tensor.name);
  KILN_CHECK(place != places_.end());
  return shards_[place->second.shard].path();
}

}  // namespace kiln
