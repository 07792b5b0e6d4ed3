// The matrices of a dense model, by layer: which tensors belong to them, and
// what their headers say about rates and codebooks.

#ifndef KILN_TEMPLATES_FORMATS_DENSE_LAYERS_H_
#define KILN_TEMPLATES_FORMATS_DENSE_LAYERS_H_

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/spec/request.h"
#include "templates/formats/checkpoint.h"
#include "templates/formats/exl3.h"
#include "templates/formats/layer_name.h"
#include "templates/formats/model_config.h"

namespace kiln {

// How tensor-parallel ranks share a matrix: each has some of the output
// channels, or some of the input channels, and then the outputs of all ranks
// add up; or each has all of it.
enum class RankSplit { kOutput, kInput, kNone };

struct DenseProjection {
  absl::string_view name;  // behind "layers.<n>."; of the head, the whole name
  RankSplit split;

  // What stands behind the last point: "q_proj".
  absl::string_view short_name() const;
};

inline constexpr std::array<DenseProjection, 8> kDenseProjections = {{
    {"self_attn.q_proj", RankSplit::kOutput},
    {"self_attn.k_proj", RankSplit::kOutput},
    {"self_attn.v_proj", RankSplit::kOutput},
    {"self_attn.o_proj", RankSplit::kInput},
    {"mlp.gate_proj", RankSplit::kOutput},
    {"mlp.up_proj", RankSplit::kOutput},
    {"mlp.down_proj", RankSplit::kInput},
    {"lm_head", RankSplit::kNone},
}};
// The last is not of a layer.
inline constexpr size_t kHeadProjection = kDenseProjections.size() - 1;

// Where a tensor of a projection belongs, by its name. Not the head's.
struct DenseTensorName {
  LayerName place;
  size_t projection = 0;
  absl::string_view suffix;  // "weight", "bias", or a part of an EXL3 group
};

// Nothing for any other tensor.
//   Errors: InvalidArgument for a layer beyond the configuration's.
absl::StatusOr<std::optional<DenseTensorName>> ParseDenseTensorName(
    absl::string_view name, const DenseConfig& config);

// [in, out] of a projection by config.json. Of the head, whose vocabulary
// encoders pad, the output is rounded up to a multiple of 128.
std::pair<int64_t, int64_t> DenseShape(const DenseConfig& config,
                                       size_t projection);

struct DenseMatrix {
  size_t projection = 0;  // into kDenseProjections
  Exl3Matrix matrix;

  // The geometry of a request for it, or for the part of it that a rank of
  // `ranks` holds; what a checkpoint does not know is left at its default.
  //   Errors: those of ChannelsPerRank, with the tensor.
  absl::StatusOr<RequestGeometry> Geometry(int64_t ranks) const;
};

// Borrows the checkpoint.
class DenseLayers {
 public:
  // Collects the tensors of all projections.
  //   Errors: InvalidArgument for a layer beyond the configuration's, or one
  //   under two prefixes; FailedPrecondition for a projection with plain
  //   weights, and for a trellis that belongs to no known projection. A head
  //   with plain weights is passed over.
  static absl::StatusOr<DenseLayers> Find(const Checkpoint& checkpoint,
                                          const DenseConfig& config);

  // The numbers that Layer takes: every layer, and behind the last one the
  // head, where it is a trellis.
  std::vector<int64_t> Numbers() const;

  // The matrices of a layer in the order of kDenseProjections, or the head
  // alone, checked: complete, of the configured geometry and codebook. Reads no
  // tensor.
  //   Errors: InvalidArgument, naming the first tensor that is wrong.
  absl::StatusOr<std::vector<DenseMatrix>> Layer(int64_t number) const;

 private:
  absl::Status Add(const SafetensorsTensor& tensor);
  absl::StatusOr<DenseMatrix> Matrix(int64_t number, size_t projection) const;

  DenseConfig config_;
  // Layer to what stands before "layers." in its names.
  std::map<int64_t, absl::string_view> prefixes_;
  // By layer and projection; the head has the number of the layers.
  std::map<std::pair<int64_t, size_t>, Exl3Group> groups_;
  const SafetensorsTensor* plain_head_ = nullptr;
};

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_DENSE_LAYERS_H_
