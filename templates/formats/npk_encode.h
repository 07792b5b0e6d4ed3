// From real-valued experts to NPK-1 sidecars of one layer, one for each
// tensor-parallel rank.
//
// Source: prepared-weights specification, sections A.5, A.6 and A.10.

#ifndef KILN_TEMPLATES_FORMATS_NPK_ENCODE_H_
#define KILN_TEMPLATES_FORMATS_NPK_ENCODE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "templates/formats/encoder_checkpoint.h"
#include "templates/formats/npk.h"

namespace kiln {

// Matrices of one expert, row-major [out][in]: gate and up [I][H], down [H][I]
// with the intermediate size of all ranks together.
struct RealExpert {
  std::vector<float> gate;
  std::vector<float> up;
  std::vector<float> down;
};

// Gives an expert. Asked twice for each, in order.
using RealExperts = std::function<absl::StatusOr<RealExpert>(int64_t expert)>;

struct NpkEncoding {
  std::vector<std::string> paths;  // by rank
  uint64_t bytes = 0;              // of the files
  double energy = 0;               // sum of the squares of all weights
  double squared_error = 0;        // of the weights that the files stand for
};

// Encodes a layer and writes its files into `output`, which exists.
//   metadata: without rank, intermediate and encoder; intermediate_global and
//   world_size decide the slices.
//   seed: of the signs in the scales. Sign draws are expert mod 8.
//   done: called with tiles that were just done, from any thread.
//   Errors: those of `experts` and of writing; InvalidArgument for a geometry
//   that rules V5 to V7 refuse or a weight that is not finite.
absl::StatusOr<NpkEncoding> EncodeNpkLayer(
    const NpkMetadata& metadata, const RealExperts& experts, uint64_t seed,
    int threads, const std::function<void(size_t)>& done,
    const std::string& output);

// Numbers of one expert that the tensors of all ranks stand for, as
// EncodeNpkLayer measures its error with them.
//   ranks: of one layer, by rank.
RealExpert DecodeNpkExpert(std::span<const NpkSidecar* const> ranks,
                           int64_t expert);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_NPK_ENCODE_H_
