// The routed experts of a checkpoint, by layer: which tensors belong to them,
// and what their headers say about rates and codebooks.

#ifndef KILN_TEMPLATES_FORMATS_ROUTED_EXPERTS_H_
#define KILN_TEMPLATES_FORMATS_ROUTED_EXPERTS_H_

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/spec/request.h"
#include "templates/formats/checkpoint.h"
#include "templates/formats/exl3.h"
#include "templates/formats/model_config.h"

namespace kiln {

// Where a tensor of a routed expert belongs, by its name.
struct ExpertTensorName {
  absl::string_view prefix;  // before "layers."
  int64_t layer = 0;
  int64_t expert = 0;
  size_t projection = 0;
  absl::string_view suffix;  // "weight", or a part of an EXL3 group
};

// Reads a tensor's name; nothing when it is not a routed expert's.
//   Errors: InvalidArgument for a name that says it is one and fits no rule;
//   FailedPrecondition for stacked experts.
absl::StatusOr<std::optional<ExpertTensorName>> ParseExpertTensorName(
    absl::string_view name, const ModelConfig& config);

// Gate, up and down of one expert.
using ExpertMatrices = std::array<Exl3Matrix, kProjections>;

// One layer whose experts agree with the configuration and with each other.
struct RoutedLayer {
  int64_t layer = 0;
  Codebook codebook = Codebook::kMcg;
  Bits bits;
  std::vector<ExpertMatrices> experts;  // by expert
};

// Borrows the checkpoint.
class RoutedExperts {
 public:
  // Collects every tensor whose name says that it is part of a routed expert.
  //   Errors: InvalidArgument for a name that says so and fits no rule: an
  //   unknown prefix, layer, expert, projection or part of a group;
  //   FailedPrecondition for stacked or plain weights.
  static absl::StatusOr<RoutedExperts> Find(const Checkpoint& checkpoint,
                                            const ModelConfig& config);

  // Layers with at least one such tensor, ascending.
  std::vector<int64_t> Layers() const;

  // Checks all groups of one layer: complete, of the configured geometry, one
  // codebook for the layer, one rate for each projection. Reads no tensor.
  //   Errors: InvalidArgument, naming the first tensor that is wrong;
  //   FailedPrecondition, naming the first that no template serves: experts of
  //   mixed rates or codebooks, a bias.
  absl::StatusOr<RoutedLayer> Layer(int64_t layer) const;

 private:
  std::string KeyOf(int64_t layer, int64_t expert, size_t projection) const;

  ModelConfig config_;
  // Layer to what stands before "layers." in its names.
  std::map<int64_t, absl::string_view> prefixes_;
  // By (layer * kExpertsMax + expert) * kProjections + projection.
  absl::flat_hash_map<uint64_t, Exl3Group> groups_;
};

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_ROUTED_EXPERTS_H_
