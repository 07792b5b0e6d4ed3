// Two bytes of data size, then any bytes as a safetensors header and as an
// index: refused with a short message, or exactly what a JSON parser sees.

#include <cstdint>
#include <string>

#include "compiler/base/check.h"
#include "compiler/spec/json_reader.h"
#include "templates/formats/checkpoint.h"
#include "templates/formats/safetensors.h"

namespace {

void CheckRefused(const absl::Status& status) {
  KILN_CHECK(absl::IsInvalidArgument(status));
  KILN_CHECK(!status.message().empty() && status.message().size() < 1000);
}

void CheckHeader(const std::string& json, uint64_t data_bytes) {
  const absl::StatusOr<kiln::SafetensorsHeader> header =
      kiln::SafetensorsHeader::Parse(json, data_bytes);
  if (!header.ok()) return CheckRefused(header.status());
  const absl::StatusOr<kiln::JsonNode> node = kiln::ParseJson(json, "f");
  KILN_CHECK(node.ok());
  const size_t metadata = node->Find("__metadata__") != nullptr ? 1 : 0;
  KILN_CHECK(node->members.size() == header->tensors().size() + metadata);
  uint64_t at = 0;
  for (const kiln::SafetensorsTensor& tensor : header->tensors()) {
    const kiln::JsonNode* entry = node->Find(tensor.name);
    KILN_CHECK(entry != nullptr);
    KILN_CHECK(entry->Find("dtype")->text == kiln::StoredTypeName(tensor.type));
    KILN_CHECK(entry->Find("shape")->items.size() == tensor.rank);
    KILN_CHECK(tensor.begin == at && tensor.end >= at);
    at = tensor.end;
  }
  KILN_CHECK(at == data_bytes);
}

void CheckIndex(const std::string& json) {
  const absl::StatusOr<kiln::ShardIndex> index = kiln::ShardIndex::Parse(json);
  if (!index.ok()) return CheckRefused(index.status());
  const absl::StatusOr<kiln::JsonNode> node = kiln::ParseJson(json, "f");
  KILN_CHECK(node.ok());
  const kiln::JsonNode* map = node->Find("weight_map");
  KILN_CHECK(map->members.size() == index->tensors().size());
  for (const kiln::JsonNode::Member& member : map->members) {
    const std::string& shard = index->shards()[index->tensors().at(member.key)];
    KILN_CHECK(shard == member.value.text);
    KILN_CHECK(shard.find('/') == std::string::npos);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const uint64_t data_bytes = static_cast<uint64_t>(data[0]) << 8 | data[1];
  const std::string json(reinterpret_cast<const char*>(data) + 2, size - 2);
  CheckHeader(json, data_bytes);
  CheckIndex(json);
  return 0;
}
