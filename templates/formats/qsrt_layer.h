// QsrtLayer: one layer file of a QSRT atoms checkpoint,
// qsrt-layer-003.safetensors in its folder: header, format codes, shared scales
// and the slab of atoms.
//
// Two schemas are read. That of Kimi-K3 has a header of fixed text and scales
// that all experts of a layer share; that of the "Fruit" models names its
// geometry, and each expert has scales of its own.
//
// Source: trellis format specification, section 3.4; for the second schema the
// loader that vLLM publishes (quantization/kquant_qsrt_atoms.py).

#ifndef KILN_TEMPLATES_FORMATS_QSRT_LAYER_H_
#define KILN_TEMPLATES_FORMATS_QSRT_LAYER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compiler/base/digest.h"
#include "templates/formats/qsrt_extent.h"
#include "templates/formats/safetensors.h"
#include "templates/formats/slot_source.h"

namespace kiln {

// "qsrt-layer-003.safetensors".
std::string QsrtLayerFileName(int64_t layer);

// The layer numbers of such files in a folder, ascending. Empty where there is
// none, or no folder.
std::vector<int64_t> QsrtLayersIn(const std::string& folder);

// Movable. Not thread-safe.
class QsrtLayer {
 public:
  // Opens `folder`'s file of layer `layer` and checks its header and metadata.
  // Where the folder has a MANIFEST.sha256, it must name the file. Reads no
  // tensor.
  //   Errors: InvalidArgument with the rule, the tensor and the value,
  //   beginning with the file's path; those of opening a file.
  static absl::StatusOr<QsrtLayer> Open(const std::string& folder,
                                        int64_t layer);

  // Reads the whole file: its digest where one is known, format codes, zero
  // padding, finite shared scales. Must succeed before Extent.
  absl::Status Validate();

  const std::string& path() const { return file_->path(); }

  int64_t hidden() const { return hidden_; }

  int64_t intermediate() const { return slots_ * kSlotChannels; }

  // One pair of the layer; borrows this object.
  //   first_slot: multiple of 8 below the number of slots.
  //   Errors: FailedPrecondition for a layer with experts in the X4T tier.
  absl::StatusOr<QsrtExtent> Extent(int64_t first_slot) const;

 private:
  enum class Schema { kKimi, kFruit };

  QsrtLayer() = default;

  absl::Status CheckHeader(int64_t layer);
  absl::Status CheckMetadata(int64_t layer);
  absl::Status CheckTensors();
  absl::Status CheckCanonicalText();
  absl::Status CheckCodes(std::span<const uint8_t> section);
  absl::Status CheckSlab();

  std::unique_ptr<SafetensorsFile> file_;
  std::optional<Digest> sha256_;
  Schema schema_ = Schema::kKimi;
  int64_t layer_ = 0;
  int64_t experts_ = 0;
  int64_t x4t_experts_ = 0;
  int64_t hidden_ = 0;
  int64_t slots_ = 0;
  int64_t multiplier_ = 0;
  int64_t alignment_ = 0;
  int64_t stride_ = 0;
  const SafetensorsTensor* formats_ = nullptr;
  const SafetensorsTensor* scales_ = nullptr;
  const SafetensorsTensor* atoms_ = nullptr;
  std::span<const uint8_t> slab_, shared_;
  std::vector<int64_t> expert_ids_, format_codes_;  // of trellis experts
};

// The native tensors of the layer's channels `extent`, which are one pair.
// Validates the layer, which is borrowed.
absl::StatusOr<std::unique_ptr<TrellisSource>> TrellisFromQsrtLayer(
    const TrellisExtent& extent, QsrtLayer* layer);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_QSRT_LAYER_H_
