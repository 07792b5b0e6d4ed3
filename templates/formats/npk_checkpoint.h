// From a checkpoint of real numbers to NPK-1 sidecars of all its layers.

#ifndef KILN_TEMPLATES_FORMATS_NPK_CHECKPOINT_H_
#define KILN_TEMPLATES_FORMATS_NPK_CHECKPOINT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "templates/formats/encoder_checkpoint.h"
#include "templates/formats/npk.h"

namespace kiln {

struct NpkCheckpointOptions {
  int bits = 4;
  NpkBoundary boundary = NpkBoundary::kCoupled;
  int64_t ranks = 1;
  std::string limit = "inf";
  uint64_t seed = 0;
  int threads = 1;
  EncodeProgress progress = nullptr;  // in tiles; may be empty
};

// Writes `output`, a new or empty folder: one sidecar for each layer with
// routed experts and each rank. Errors and determinism as EncodeCheckpoint.
//   In the result, `worst` is the layer with the largest error.
absl::StatusOr<EncodedCheckpoint> EncodeNpkCheckpoint(
    const std::string& folder, const std::string& output,
    const NpkCheckpointOptions& options);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_NPK_CHECKPOINT_H_
