#include "tests/support/npk_writer.h"

#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

namespace kiln::testing {
namespace {

uint64_t HeaderLength(const std::string& file) {
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof(length));
  return length;
}

}  // namespace

NpkMetadata SmallNpk() {
  NpkMetadata metadata;
  metadata.bits = 3;
  metadata.layer = 7;
  metadata.rank = 1;
  metadata.world_size = 2;
  metadata.experts = 3;
  metadata.hidden = 512;
  metadata.intermediate = 128;
  metadata.intermediate_global = 256;
  metadata.limit = "10";
  metadata.model_id = "test/small";
  metadata.encoder.bytes.fill(0x11);
  metadata.design.bytes.fill(0x22);
  return metadata;
}

std::map<NpkTensor, std::string> RandomNpkTensors(const NpkMetadata& metadata,
                                                  uint64_t seed) {
  std::mt19937_64 random(seed);
  std::map<NpkTensor, std::string> tensors;
  const std::vector<SafetensorsTensor> wanted = NpkTensorsOf(metadata);
  for (size_t i = 0; i < wanted.size(); ++i) {
    const auto which = static_cast<NpkTensor>(i);
    std::string& bytes = tensors[which];
    for (uint64_t b = 0; b < wanted[i].bytes(); ++b) {
      char byte = static_cast<char>(random());
      switch (which) {
        case NpkTensor::kW13Scale:
        case NpkTensor::kW2Scale:
          byte = static_cast<char>(120 + (byte & 7));
          break;
        case NpkTensor::kGateUpSuh:
        case NpkTensor::kInnerScales:
        case NpkTensor::kDownSvh:
          // Binary16 of either sign within [0.5, 2).
          if (b % 2 == 1) byte = static_cast<char>((byte & 0x87) | 0x38);
          break;
        case NpkTensor::kSignDraw:
          byte = static_cast<char>(b % 8);
          break;
        default:
          break;
      }
      bytes.push_back(byte);
    }
  }
  return tensors;
}

std::string NpkBytes(const NpkMetadata& metadata,
                     const std::map<NpkTensor, std::string>& tensors) {
  std::vector<Digest> digests;
  std::string data;
  for (const auto& [which, bytes] : tensors) {
    digests.push_back(Sha256(bytes));
    data += bytes;
  }
  Digest signs;
  if (const auto draws = tensors.find(NpkTensor::kSignDraw);
      draws != tensors.end()) {
    signs = NpkSignsDigest(
        metadata, {reinterpret_cast<const uint8_t*>(draws->second.data()),
                   draws->second.size()});
  }
  return MakeNpkHead(metadata, digests, signs) + data;
}

std::string WithHeaderText(const std::string& file, const std::string& from,
                           const std::string& to) {
  const uint64_t length = HeaderLength(file);
  std::string json = file.substr(8, length);
  json.resize(json.find_last_not_of(' ') + 1);
  const size_t at = json.find(from);
  if (at == std::string::npos) throw std::runtime_error(from + " is not there");
  json.replace(at, from.size(), to);
  while ((8 + json.size()) % 64 != 0) json += ' ';
  uint64_t padded = json.size();
  std::string head(8, '\0');
  std::memcpy(head.data(), &padded, sizeof(padded));
  return head + json + file.substr(8 + length);
}

size_t NpkTensorOffset(const std::string& file, const NpkMetadata& metadata,
                       NpkTensor which) {
  return 8 + HeaderLength(file) +
         NpkTensorsOf(metadata)[static_cast<size_t>(which)].begin;
}

}  // namespace kiln::testing
