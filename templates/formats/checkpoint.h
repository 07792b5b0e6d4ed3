// Checkpoint: the tensors of a model folder, from one safetensors file or from
// the shards that its index names. Only headers are read until bytes are asked
// for.

#ifndef KILN_TEMPLATES_FORMATS_CHECKPOINT_H_
#define KILN_TEMPLATES_FORMATS_CHECKPOINT_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "templates/formats/safetensors.h"

namespace kiln {

inline constexpr uint64_t kIndexBytesMax = 256u << 20;
inline constexpr size_t kShardsMax = 4096;

// A parsed model.safetensors.index.json. Movable; names stay valid while it
// lives.
class ShardIndex {
 public:
  //   Errors: InvalidArgument with the rule: not one object with one
  //   "weight_map" of strings, a tensor named twice, a shard that is not a
  //   plain file name, more than kShardsMax shards.
  static absl::StatusOr<ShardIndex> Parse(std::string json);

  // Shard names in the order of their first use.
  const std::vector<std::string>& shards() const { return shards_; }

  // Tensor name to position in shards().
  const absl::flat_hash_map<absl::string_view, size_t>& tensors() const {
    return tensors_;
  }

 private:
  absl::Status Scan();
  absl::Status ScanWeightMap(class JsonScanner* scanner);

  std::unique_ptr<const std::string> text_;
  std::unique_ptr<std::deque<std::string>> decoded_;
  std::vector<std::string> shards_;
  absl::flat_hash_map<absl::string_view, size_t> tensors_;
};

// Movable. Bytes is not thread-safe.
class Checkpoint {
 public:
  // Opens `folder`: model.safetensors.index.json and every shard that it names,
  // or else model.safetensors alone.
  //   Errors: those of the files; InvalidArgument when index and shards
  //   disagree about a tensor; NotFound when there is neither.
  static absl::StatusOr<Checkpoint> Open(const std::string& folder);

  // Of every shard: its tensors in the order of their bytes.
  const std::deque<SafetensorsFile>& shards() const { return shards_; }

  // The tensor, or null. Valid while this object lives.
  const SafetensorsTensor* Find(absl::string_view name) const;

  // Bytes of a tensor of this checkpoint; see SafetensorsFile::Bytes.
  absl::StatusOr<std::span<const uint8_t>> Bytes(
      const SafetensorsTensor& tensor);

  // Path of the file that holds the tensor, for messages.
  const std::string& PathOf(const SafetensorsTensor& tensor) const;

 private:
  struct Place {
    size_t shard = 0;
    size_t tensor = 0;
  };

  std::deque<SafetensorsFile> shards_;
  absl::flat_hash_map<absl::string_view, Place> places_;
};

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_CHECKPOINT_H_
