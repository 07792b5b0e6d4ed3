// Prepare: the native tensors of one layer as one safetensors file, ready to be
// mapped and copied to a device.

#ifndef KILN_TEMPLATES_FORMATS_PREPARE_H_
#define KILN_TEMPLATES_FORMATS_PREPARE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "templates/formats/trellis_layout.h"

namespace kiln {

struct PrepareOptions {
  int64_t layer = 0;
  // Tensor-parallel rank, counted from 0.
  int64_t rank = 0;
  int64_t ranks = 1;
};

// "layer-00003.safetensors", or with several ranks
// "layer-00003-rank-0-of-2.safetensors".
std::string PreparedFileName(const PrepareOptions& options);

struct PreparedLayer {
  std::string path;
  uint64_t bytes = 0;  // of the file
  // Of a layer of routed experts, with the rank's intermediate size.
  std::optional<TrellisLayout> layout;
  std::string description;  // one line for people
};

// Writes `output`/layer-00003.safetensors, or with several ranks
// layer-00003-rank-0-of-2.safetensors, and creates the folder. The tensors have
// the names and shapes of the op's weight slots; metadata says layer, rank,
// codebook and, where config.json gives it, top_k. A layer of pair rates also
// has its rate bytes, rates_fc1 and rates_fc2, and the modes of op_qsrt.h,
// modes_fc1 and modes_fc2; its ranks are its parts of 256 channels. Of a dense
// model, the file has the slots of each matrix (see linear_source.h) behind the
// name of its projection, "self_attn.q_proj.w", and metadata says the
// codebooks, "self_attn.q_proj.codebook"; the head is in the file of the layer
// behind the last. Readers see no file or the whole one.
//   folder: a BTX or QSRT checkpoint, or else an EXL3 one with a config.json.
//   Errors: those of reading the checkpoint, each with a path; InvalidArgument
//   for a layer without routed experts, or that a dense model does not have;
//   those of writing a file.
absl::StatusOr<PreparedLayer> PrepareLayer(const std::string& folder,
                                           const std::string& output,
                                           const PrepareOptions& options);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_PREPARE_H_
