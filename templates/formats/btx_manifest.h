// The manifest of a BTX checkpoint: a folder with btx-manifest.json and one
// safetensors file for each layer with experts. Everything about the layers'
// bytes follows from what the manifest declares.
//
// Source: trellis format specification, sections 2.3 and 6.

#ifndef KILN_TEMPLATES_FORMATS_BTX_MANIFEST_H_
#define KILN_TEMPLATES_FORMATS_BTX_MANIFEST_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/base/digest.h"
#include "templates/formats/slot_source.h"
#include "templates/fused_moe/trellis_codebook.h"

namespace kiln {

inline constexpr absl::string_view kBtxManifestName = "btx-manifest.json";
inline constexpr uint64_t kBtxManifestBytesMax = 4u << 20;

struct BtxManifest {
  struct Layer {
    std::string file;  // a plain file name
    Digest sha256;
  };

  TrellisCodebook codebook = TrellisCodebook::kMcg;
  int64_t experts = 0;
  int64_t hidden = 0;        // multiple of 16
  int64_t intermediate = 0;  // of the whole model, multiple of 32
  int bits = 0;              // uniform rate; 0 with pair rates
  // Rate bytes that layers with pair rates may use, in the order of the file.
  std::vector<uint8_t> pair_kinds;
  bool coupled = false;
  bool per_expert_rotations = false;  // tables of the hidden side are [E][H]
  int64_t pre_block = 0;              // of a coupled transform
  int64_t post_block = 0;
  int64_t row_alignment = 1;
  int64_t extent_alignment = 1;   // slots
  std::vector<int64_t> barriers;  // slots that no extent crosses
  std::map<int64_t, Layer> layers;

  int64_t slots() const { return intermediate / kSlotChannels; }

  bool pairs() const { return !pair_kinds.empty(); }
};

// Errors: InvalidArgument "file:line:column: ..." with the rule, the value
// found and the values accepted.
absl::StatusOr<BtxManifest> ParseBtxManifest(absl::string_view text,
                                             absl::string_view file);

// True where `folder` has a manifest, readable or not.
bool IsBtxFolder(const std::string& folder);

// Parses `folder`/btx-manifest.json.
absl::StatusOr<BtxManifest> ReadBtxManifest(const std::string& folder);

// Slots [first, first + count) as the part of one tensor-parallel rank.
//   Errors: InvalidArgument unless they are a non-empty, aligned range within
//   the manifest's slots that crosses no barrier.
absl::Status CheckBtxExtent(const BtxManifest& manifest, int64_t first,
                            int64_t count);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_BTX_MANIFEST_H_
