#include "tests/support/qsrt_writer.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace kiln::testing {
namespace {

constexpr char kX4t = '\xFF';

uint64_t Size(int64_t value) { return static_cast<uint64_t>(value); }

std::string Padded(std::string bytes, int64_t alignment) {
  const uint64_t a = Size(alignment);
  bytes.resize((bytes.size() + a - 1) / a * a);
  return bytes;
}

}  // namespace

int64_t QsrtPhysicalPair(const QsrtOptions& options, int64_t expert,
                         int64_t logical) {
  const int64_t pairs = options.intermediate / 256;
  return (logical + options.multiplier * expert + options.layer) % pairs;
}

int QsrtRecordBits(const QsrtOptions& options, int64_t expert, int64_t logical,
                   bool high, bool down) {
  const auto code = static_cast<uint8_t>(options.codes[Size(expert)]);
  const int64_t p24 = down ? code & 0xF : code >> 4;
  if (logical >= p24) return 3;
  return high ? 4 : 2;
}

QsrtFile MakeQsrtFile(const QsrtOptions& options) {
  const RandomLayer layer(options.seed);
  const auto experts = static_cast<int64_t>(options.codes.size());
  const int64_t slots = options.intermediate / 32;
  const int64_t bundle = 36 * options.hidden + 192;
  int64_t compressed = 0;
  for (const char code : options.codes) compressed += code != kX4t ? 1 : 0;

  std::string atoms;
  int64_t stride = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    std::string row;
    for (int64_t e = 0; e < experts; ++e) {
      if (options.codes[Size(e)] == kX4t) continue;
      int64_t logical = 0;
      while (QsrtPhysicalPair(options, e, logical) != slot / 8) ++logical;
      // Tiles of 16 channels of the low and the high record.
      const int64_t tiles[] = {16 * logical + slot % 8,
                               16 * logical + 8 + slot % 8};
      std::string scales;
      for (int section = 0; section < 3; ++section) {
        for (const bool high : {false, true}) {
          for (int64_t h = 0; h < options.hidden / 16; ++h) {
            row += layer.Tile(
                e, section, tiles[high], h,
                QsrtRecordBits(options, e, logical, high, section == 2));
          }
          scales += layer.Scales(e, kRotationTable + section, 16 * tiles[high],
                                 16 * tiles[high] + 16);
        }
      }
      row += scales;
    }
    row = Padded(row, options.alignment);
    stride = static_cast<int64_t>(row.size());
    atoms += row;
  }

  QsrtFile file;
  const std::string codes = Padded(options.codes, options.alignment);
  file.tensors["_qsrt_format_section"] = {"U8", {codes.size()}, codes};
  std::string scales;
  for (int table = 0; table < 3; ++table) {
    for (int64_t e = 0; e < (options.kimi ? 1 : experts); ++e) {
      scales += layer.Scales(e, table, 0, options.hidden);
    }
  }
  scales = Padded(scales, options.alignment);
  file.tensors["_qsrt_shared_scale_section"] = {"U8", {scales.size()}, scales};
  file.tensors["qsrt_atoms"] = {"U8", {Size(slots), Size(stride)}, atoms};
  file.metadata = {
      {"format", "pt"},
      {"schema", options.kimi ? "kquant_kimi_k3_qsrt_atoms_v1"
                              : "kquant_fruit_qsrt_atoms_v1"},
      {"version", "1"},
      {"encoding", "qsrt_sqg_e4m3"},
      {"layer", absl::StrCat(options.layer)},
      {"profile_id", "1"},
      {"experts", absl::StrCat(experts)},
      {"compressed_experts", absl::StrCat(compressed)},
      {"x4t_experts", absl::StrCat(experts - compressed)},
      {"intermediate_channels", absl::StrCat(options.intermediate)},
      {"latent_channels", absl::StrCat(options.hidden)},
      {"atom_channels", "32"},
      {"atom_slots", absl::StrCat(slots)},
      {"atom_bundle_bytes", absl::StrCat(bundle)},
      {"atom_slot_payload_bytes", absl::StrCat(compressed * bundle)},
      {"atom_slot_stride_bytes", absl::StrCat(stride)},
      {"alignment_bytes", absl::StrCat(options.alignment)}};
  if (!options.kimi) {
    file.metadata["pair_count"] = absl::StrCat(slots / 8);
    file.metadata["rotation_multiplier"] = absl::StrCat(options.multiplier);
    file.metadata["codebook"] = "sqg_xor_cheb_t12";
    file.metadata["source_sha256"] = std::string(64, 'a');
    file.metadata["encoder_fingerprint"] = std::string(64, 'b');
    file.metadata["shared_scale_section_bytes"] = absl::StrCat(scales.size());
  }
  return file;
}

std::string QsrtFileBytes(const QsrtOptions& options, const QsrtFile& file) {
  if (!options.kimi) return SafetensorsBytes(file.tensors, file.metadata);
  // Keys in their order: a map is sorted, and data_offsets < dtype < shape.
  std::string json = "{\"__metadata__\":{";
  for (const auto& [key, value] : file.metadata) {
    absl::StrAppend(&json, json.back() == '{' ? "" : ",", "\"", key, "\":\"",
                    value, "\"");
  }
  json += "}";
  std::string data;
  for (const auto& [name, tensor] : file.tensors) {
    absl::StrAppend(&json, ",\"", name, "\":{\"data_offsets\":[", data.size(),
                    ",", data.size() + tensor.bytes.size(), "],\"dtype\":\"",
                    tensor.type, "\",\"shape\":[",
                    absl::StrJoin(tensor.shape, ","), "]}");
    data += tensor.bytes;
  }
  json += "}";
  json.resize(4088, ' ');
  return SafetensorsBytes(json, data);
}

std::string QsrtName(int64_t layer) {
  return absl::StrFormat("qsrt-layer-%03d.safetensors", layer);
}

}  // namespace kiln::testing
