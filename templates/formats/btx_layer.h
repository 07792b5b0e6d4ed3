// BtxLayer: one layer file of a BTX checkpoint, first its header and then every
// byte of it checked against the manifest.
//
// Source: trellis format specification, sections 2.3, 5 and 6.

#ifndef KILN_TEMPLATES_FORMATS_BTX_LAYER_H_
#define KILN_TEMPLATES_FORMATS_BTX_LAYER_H_

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "templates/formats/btx_manifest.h"
#include "templates/formats/safetensors.h"
#include "templates/formats/slot_source.h"
#include "templates/formats/trellis_layout.h"
#include "templates/formats/trellis_source.h"
#include "templates/fused_moe/trellis_matrix.h"

namespace kiln {

// Movable. Not thread-safe.
class BtxLayer {
 public:
  // Opens `folder`'s file of layer `layer` and checks its header: the set of
  // tensors, their types and shapes, and the metadata. Reads no tensor.
  //   manifest: copied.
  //   Errors: InvalidArgument with the rule, the tensor and the value;
  //   InvalidArgument for a layer that the manifest does not have; those of
  //   opening a file. All but the second begin with the file's path.
  static absl::StatusOr<BtxLayer> Open(const std::string& folder,
                                       const BtxManifest& manifest,
                                       int64_t layer);

  // Reads the whole file: its digest, rate bytes, sign draws, finite scales,
  // rows that hold their bundles, and zero padding. Must succeed before the
  // accessors below are used.
  absl::Status Validate();

  const BtxManifest& manifest() const { return manifest_; }

  const std::string& path() const { return file_->path(); }

  // Rate bytes of expert e in pair p: p * experts + e. Empty with uniform
  // rates.
  std::span<const uint8_t> rates_fc1() const { return rates_fc1_; }

  std::span<const uint8_t> rates_fc2() const { return rates_fc2_; }

  // One for each expert; empty unless the layer is coupled.
  std::span<const uint8_t> draws() const { return draws_; }

  // The low or high plane of a section: tiles of the expert's 16 channels in
  // `slot`, one for each 16 hidden channels.
  //   section: 0 gate, 1 up, 2 down. high: 0 or 1.
  std::span<const uint8_t> Plane(int64_t slot, int64_t expert, int section,
                                 int high) const;

  // The 32 binary16 values of a slot: gate_svh, up_svh or down_suh.
  std::span<const uint8_t> Rotations(int64_t slot, int64_t expert,
                                     int section) const;

  // Binary16 values of the hidden side, [H] or [experts][H].
  std::span<const uint8_t> gate_suh() const { return gate_suh_; }

  std::span<const uint8_t> up_suh() const { return up_suh_; }

  std::span<const uint8_t> down_svh() const { return down_svh_; }

 private:
  explicit BtxLayer(BtxManifest manifest) : manifest_(std::move(manifest)) {}

  absl::Status CheckHeader(int64_t layer);
  absl::Status CheckRates();
  absl::Status CheckDraws();
  absl::Status CheckRows();
  absl::StatusOr<std::span<const uint8_t>> BytesOf(absl::string_view name);
  PairRate RateOf(int64_t slot, int64_t expert, bool fc2) const;
  uint64_t SectionBytes(PairRate rate) const;

  BtxManifest manifest_;
  Digest sha256_;
  std::unique_ptr<SafetensorsFile> file_;
  uint64_t row_stride_ = 0;
  std::span<const uint8_t> atoms_, rotations_, gate_suh_, up_suh_, down_svh_;
  std::span<const uint8_t> rates_fc1_, rates_fc2_, draws_;
  // Where the bundle of expert e begins in the rows of pair p:
  // p * (experts + 1) + e; the last entry is the rows' length. With uniform
  // rates there is one p for all rows.
  std::vector<uint64_t> bundles_;
};

// The native tensors of one extent of a layer. Validates the layer.
//   extent: intermediate channels; with pair rates exactly 256, a pair.
//   layer: borrowed.
//   Errors: those of Validate and CheckBtxExtent; InvalidArgument for an extent
//   that cuts a Hadamard block, a pair, or the halves of a coupled layer;
//   FailedPrecondition for what no known arithmetic can run: other blocks than
//   512 and 128, coupled pairs, kinds of pairs without an arm.
absl::StatusOr<std::unique_ptr<TrellisSource>> TrellisFromBtx(
    const TrellisExtent& extent, BtxLayer* layer);

// The layout that TrellisFromBtx gives to a layer of uniform rates, or the same
// without rates for one of pair rates; reads no file. Errors as there.
absl::StatusOr<TrellisLayout> BtxLayoutOf(const BtxManifest& manifest,
                                          const TrellisExtent& extent);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_BTX_LAYER_H_
