// Folders of NPK-1 sidecars: what they hold, and one rank's layer as the
// tensors that kernels read.

#ifndef KILN_TEMPLATES_FORMATS_NPK_PREPARE_H_
#define KILN_TEMPLATES_FORMATS_NPK_PREPARE_H_

#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "templates/formats/npk.h"
#include "templates/formats/prepare.h"

namespace kiln {

// True when the folder has a file that is named as NpkFileName names them.
bool HoldsNpkSidecars(const std::string& folder);

// The layer and the rank in the name of a sidecar.
struct NpkPlace {
  int64_t layer = 0;
  int64_t rank = 0;
  int64_t ranks = 1;
  auto operator<=>(const NpkPlace&) const = default;
};

// Those of the files of a folder that are named as NpkFileName, or with `p8` as
// P8FileName names them; ascending.
std::vector<NpkPlace> NpkPlacesIn(const std::string& folder, bool p8);

// InvalidArgument, with the layers or ranks that a folder has, unless `places`
// has the one that the options want.
absl::Status CheckNpkPlace(const std::string& folder,
                           const std::vector<NpkPlace>& places,
                           const PrepareOptions& options);

// One layer of a folder.
struct NpkLayerSummary {
  NpkMetadata metadata;  // of rank 0
  uint64_t bytes = 0;    // of the tensors of all ranks
};

// All layers, ascending, each with all its ranks (rule V14). Reads headers and
// replicated vectors alone: digests are checked when a layer is prepared.
absl::StatusOr<std::vector<NpkLayerSummary>> DescribeNpkFolder(
    const std::string& folder);

// Names, types, shapes and sizes of a layer's prepared tensors:
//   w13        I16 [2, E, H/16, I/16, 16 K]   as it lies
//   w2         I16 [E, I/16, H/16, 16 K]      as it lies
//   w13_scale  U32 [E, ceil(2 I / 256), H/128, 256]
//   w2_scale   U32 [E, ceil(H / 256), I/128, 256]
//   gate_up_suh F16 [H], rotations F16 [E, 6 I], down_svh F16 [H]   if coupled
// A word of scales is one row n and 128 input channels; byte b of it is the
// UE8M0 scale of channels 32 b... Rows that pad a panel of 256 have 127.
// `rotations` of an expert: gate_svh, up_svh, down_suh, the 2 I signs before
// the activation and the I behind it.
//   Errors: InvalidArgument unless H and I are multiples of 128.
absl::StatusOr<std::vector<SafetensorsTensor>> NpkPreparedTensors(
    const NpkMetadata& metadata);

// The words of one expert's scales.
//   scales: [rows][columns / 32].
std::vector<uint32_t> NpkScaleWords(std::span<const uint8_t> scales,
                                    uint64_t rows, uint64_t columns);

struct PreparedNpkLayer {
  std::string path;
  uint64_t bytes = 0;
  NpkMetadata metadata;
};

// Checks the rank's sidecar by all rules and writes `output`/layer-00003-rank-
// 0-of-4.safetensors. The whole size is known before the file is made.
absl::StatusOr<PreparedNpkLayer> PrepareNpkLayer(const std::string& folder,
                                                 const std::string& output,
                                                 const PrepareOptions& options);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_NPK_PREPARE_H_
