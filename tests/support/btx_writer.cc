#include "tests/support/btx_writer.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "compiler/base/digest.h"

namespace kiln::testing {
namespace {

constexpr int64_t kSlotChannels = 32;
constexpr int64_t kPairSlots = 8;
constexpr int64_t kRecordTiles = 8;

uint64_t Size(int64_t value) { return static_cast<uint64_t>(value); }

// Tile of the intermediate axis that a plane of a slot holds.
int64_t TileOf(const BtxOptions& options, int64_t slot, int high) {
  if (options.pair_kinds.empty()) return 2 * slot + high;
  return slot / kPairSlots * 2 * kRecordTiles + high * kRecordTiles +
         slot % kPairSlots;
}

std::string Table(const BtxOptions& options, const RandomLayer& layer,
                  int table) {
  std::string bytes;
  for (int64_t e = 0; e < (options.per_expert_rotations ? options.experts : 1);
       ++e) {
    bytes += layer.Scales(e, table, 0, options.hidden);
  }
  return bytes;
}

}  // namespace

BtxRates BtxRatesOf(const BtxOptions& options, int64_t pair, int64_t expert,
                    bool down) {
  if (options.pair_kinds.empty()) return {options.bits, options.bits};
  const std::string& kind =
      options.pair_kinds[Size(expert + pair + (down ? 1 : 0)) %
                         options.pair_kinds.size()];
  return {kind[1] - '0', kind[2] - '0'};
}

uint8_t BtxDrawOf(int64_t expert) {
  return static_cast<uint8_t>((3 * expert + 1) % 8);
}

BtxFiles MakeBtxFiles(const BtxOptions& options) {
  const RandomLayer layer(options.seed);
  const int64_t slots = options.intermediate / kSlotChannels;
  std::vector<std::string> rows(Size(slots));
  std::string rotations;
  size_t longest = 0;
  for (int64_t slot = 0; slot < slots; ++slot) {
    std::string& row = rows[Size(slot)];
    for (int64_t e = 0; e < options.experts; ++e) {
      for (int section = 0; section < 3; ++section) {
        const BtxRates rates =
            BtxRatesOf(options, slot / kPairSlots, e, section == 2);
        for (int high = 0; high < 2; ++high) {
          const int64_t tile = TileOf(options, slot, high);
          for (int64_t h = 0; h < options.hidden / 16; ++h) {
            row += layer.Tile(e, section, tile, h,
                              high == 0 ? rates.low : rates.high);
          }
          rotations += layer.Scales(e, kRotationTable + section, 16 * tile,
                                    16 * tile + 16);
        }
      }
    }
    longest = std::max(longest, row.size());
  }
  const size_t alignment = Size(options.row_alignment);
  const size_t stride = (longest + alignment - 1) / alignment * alignment;
  std::string atoms;
  for (std::string& row : rows) {
    row.resize(stride);
    atoms += row;
  }

  BtxFiles files;
  files.tensors["atoms"] = {"U8", {Size(slots), stride}, atoms};
  files.tensors["rotations"] = {
      "F16", {Size(slots), Size(options.experts), 3, 32}, rotations};
  std::vector<uint64_t> shape = {Size(options.hidden)};
  if (options.per_expert_rotations) {
    shape = {Size(options.experts), Size(options.hidden)};
  }
  files.tensors["gate_suh"] = {"F16", shape,
                               Table(options, layer, kGateSuhTable)};
  files.tensors["up_suh"] = {"F16", shape, Table(options, layer, kUpSuhTable)};
  files.tensors["down_svh"] = {"F16", shape,
                               Table(options, layer, kDownSvhTable)};
  if (!options.pair_kinds.empty()) {
    for (const bool down : {false, true}) {
      std::string bytes;
      for (int64_t pair = 0; pair < slots / kPairSlots; ++pair) {
        for (int64_t e = 0; e < options.experts; ++e) {
          const BtxRates rates = BtxRatesOf(options, pair, e, down);
          bytes.push_back(static_cast<char>(rates.low << 4 | rates.high));
        }
      }
      files.tensors[down ? "rates_fc2" : "rates_fc1"] = {
          "U8", {Size(slots / kPairSlots), Size(options.experts)}, bytes};
    }
  }
  if (options.coupled) {
    std::string draws;
    for (int64_t e = 0; e < options.experts; ++e) {
      draws.push_back(static_cast<char>(BtxDrawOf(e)));
    }
    files.tensors["rotation_draws"] = {"U8", {Size(options.experts)}, draws};
  }
  files.metadata = {{"schema", "btx-atoms-v1"},
                    {"codebook", options.codebook},
                    {"layer", absl::StrCat(options.layer)},
                    {"num_experts", absl::StrCat(options.experts)},
                    {"hidden_size", absl::StrCat(options.hidden)},
                    {"intermediate_size", absl::StrCat(options.intermediate)},
                    {"atom_channels", "32"}};
  return files;
}

std::string BtxLayerName(int64_t layer) {
  return absl::StrFormat("btx-layer-%05d.safetensors", layer);
}

std::string MakeBtxManifest(const BtxOptions& options,
                            const std::string& layer_bytes) {
  const auto flag = [](bool value) { return value ? "true" : "false"; };
  std::string rates = absl::StrCat(
      "{\"structure\": \"uniform\", \"bits\": ", options.bits, "}");
  if (!options.pair_kinds.empty()) {
    rates =
        absl::StrCat("{\"structure\": \"per_expert_pair\", \"pair_kinds\": [\"",
                     absl::StrJoin(options.pair_kinds, "\", \""), "\"]}");
  }
  return absl::StrCat(
      "{\"kind\": \"btx-manifest\", \"schema\": \"btx-atoms-v1\",\n",
      " \"codebook\": \"", options.codebook, "\",",
      options.codebook == "mcg" ? " \"codebook_seed\": 3417055213," : "",
      "\n \"geometry\": {\"num_experts\": ", options.experts,
      ", \"hidden_size\": ", options.hidden,
      ", \"intermediate_size\": ", options.intermediate,
      ",\n  \"atom_channels\": 32, \"atom_slots\": ",
      options.intermediate / kSlotChannels, ", \"moe_layer_indices\": [",
      options.layer, "]},\n \"rates\": ", rates,
      ",\n \"hadamard\": {\"coupled\": ", flag(options.coupled),
      ", \"per_expert_input_rotations\": ", flag(options.per_expert_rotations),
      options.coupled ? ", \"pre_block\": 512, \"post_block\": 128" : "",
      "},\n \"layout\": {\"atom_row_alignment\": ", options.row_alignment,
      ", \"extent_alignment_slots\": ", options.extent_alignment,
      ", \"extent_barriers\": [", absl::StrJoin(options.barriers, ", "),
      "]},\n \"layers\": {\"", options.layer, "\": {\"file\": \"",
      BtxLayerName(options.layer), "\", \"sha256\": \"",
      Sha256(layer_bytes).ToHex(), "\"}}}\n");
}

void WriteBtx(const TestFolder& folder, const BtxOptions& options,
              const BtxFiles& files) {
  const std::string layer = files.LayerBytes();
  folder.Write(BtxLayerName(options.layer), layer);
  folder.Write("btx-manifest.json", MakeBtxManifest(options, layer));
}

}  // namespace kiln::testing
