// NPK-1 sidecar: the routed experts of one layer and one tensor-parallel rank
// as procedural trellis streams (TrellisMX). A file is accepted whole, by
// fifteen rules, or refused with the rule, the tensor and the value; nothing is
// allocated in proportion to a number that was not checked.
//
// Layout: 8-byte header length, JSON header padded with spaces to a multiple of
// 64, then the tensors in the order of NpkTensor. Every tensor but the last has
// a multiple of 64 bytes, so each begins at one.
//
// Source: prepared-weights specification, sections A.5, A.6 and A.9.

#ifndef KILN_TEMPLATES_FORMATS_NPK_H_
#define KILN_TEMPLATES_FORMATS_NPK_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/base/digest.h"
#include "compiler/spec/request.h"
#include "templates/formats/safetensors.h"

namespace kiln {

inline constexpr char kNpkSchema[] = "npk1-sidecar.v1";
inline constexpr uint64_t kNpkHeaderBytesMax = 1u << 20;
inline constexpr int64_t kNpkExpertsMax = 4096;
inline constexpr int64_t kNpkAtom = 32;  // channels that a slice keeps together

using NpkBoundary = MxBoundary;

// In the order of their bytes. E experts, H hidden, I local intermediate, K
// bits. The last four are there when the boundary is coupled.
enum class NpkTensor : size_t {
  kW13Stream,    // I16 [2, E, H/16, I/16, 16 K]: gate, up
  kW2Stream,     // I16 [E, I/16, H/16, 16 K]
  kW13Scale,     // U8 [E, 2 I, H/32] UE8M0: gate rows, then up rows
  kW2Scale,      // U8 [E, H, I/32]
  kGateUpSuh,    // F16 [H], of all experts
  kInnerScales,  // F16 [E, 3, I]: gate_svh, up_svh, down_suh
  kDownSvh,      // F16 [H], of all experts
  kSignDraw,     // U8 [E], 0..7
};
inline constexpr size_t kNpkTensors = 8;

struct NpkMetadata {
  int bits = 0;  // K, 2..5
  NpkBoundary boundary = NpkBoundary::kCoupled;
  int64_t layer = 0;
  int64_t rank = 0;
  int64_t world_size = 1;
  int64_t experts = 0;              // E
  int64_t hidden = 0;               // H
  int64_t intermediate = 0;         // I, of this rank
  int64_t intermediate_global = 0;  // of all ranks
  std::string limit = "inf";        // clamp of gate and up, decimal or "inf"
  std::string model_id;
  Digest encoder;  // of what made the file
  Digest design;   // of the decisions it was made by

  int64_t first_atom() const { return rank * intermediate / kNpkAtom; }

  // The limit as a number; infinity for "inf".
  double LimitValue() const;

  bool operator==(const NpkMetadata&) const = default;
};

// Name, type, shape and place of each tensor that a file of this geometry has.
// The geometry obeys rules V5 to V7.
std::vector<SafetensorsTensor> NpkTensorsOf(const NpkMetadata& metadata);

// What the caller demands of a file; what is absent is not checked.
struct NpkPins {
  std::optional<int64_t> layer;
  std::optional<int64_t> rank;
  std::optional<int> bits;
  std::optional<Digest> design;
  std::optional<Digest> encoder;
  std::optional<Digest> file;  // SHA-256 of the whole file
};

struct NpkOpenOptions {
  NpkPins pins;
  // False leaves out what reads every byte: V8 to V11, for a first look.
  bool values = true;
};

// A checked file. Movable.
class NpkSidecar {
 public:
  // Maps `path`.
  //   Errors: InvalidArgument "path: rule Vn: ..."; those of opening a file.
  static absl::StatusOr<NpkSidecar> Open(const std::string& path,
                                         const NpkOpenOptions& options = {});

  // The same over bytes that outlive this object.
  static absl::StatusOr<NpkSidecar> Parse(std::span<const uint8_t> file,
                                          const NpkOpenOptions& options = {});

  const NpkMetadata& metadata() const { return metadata_; }

  // Empty where the boundary has no such tensor.
  std::span<const uint8_t> tensor(NpkTensor which) const {
    return tensors_[static_cast<size_t>(which)];
  }

 private:
  absl::Status CheckHeader(std::span<const uint8_t> file);
  absl::Status CheckPins(const NpkPins& pins) const;
  absl::Status CheckValues(std::span<const uint8_t> file,
                           const std::optional<Digest>& pin) const;

  std::shared_ptr<const void> mapping_;  // null when the bytes are borrowed
  NpkMetadata metadata_;
  std::array<std::span<const uint8_t>, kNpkTensors> tensors_;
  std::array<Digest, kNpkTensors> digests_;  // as stated
  Digest signs_;
};

// Rule V14: all ranks of one layer, in any order, agree.
absl::Status CheckNpkRanks(std::span<const NpkSidecar* const> ranks);

// Rules V8 and V9 and the range of V10, over the tensors of NpkTensorsOf.
absl::Status CheckNpkValues(
    const NpkMetadata& metadata,
    std::span<const std::span<const uint8_t>, kNpkTensors> tensors);

// ---- signs -----------------------------------------------------------------

// Signs of the coupled boundary as binary16 +1 and -1: 2 I before the
// activation, then I behind it; the rank's slice of sequences of global length.
//   draw: 0..7; 0 is all +1.
std::vector<uint16_t> NpkSigns(const NpkMetadata& metadata, int draw);

// "sha256.signs": over the signs of each draw that occurs, ascending.
Digest NpkSignsDigest(const NpkMetadata& metadata,
                      std::span<const uint8_t> draws);

// ---- writing ---------------------------------------------------------------

// Calls the sink with consecutive pieces of a tensor. Asked twice for each.
using NpkPieces = std::function<absl::Status(
    NpkTensor, const std::function<absl::Status(std::span<const uint8_t>)>&)>;

// "npk1-layer-00003-rank-0-of-4.safetensors".
std::string NpkFileName(int64_t layer, int64_t rank, int64_t world_size);

// The bytes in front of the tensors.
//   digests: of the tensors of NpkTensorsOf, in order.
//   signs: ignored for the identity boundary.
std::string MakeNpkHead(const NpkMetadata& metadata,
                        std::span<const Digest> digests, const Digest& signs);

// Writes a file; readers see none or the whole one.
//   Errors: those of `pieces` and of writing; InvalidArgument where the pieces
//   of a tensor do not add up to its size.
absl::Status WriteNpkSidecar(const std::string& path,
                             const NpkMetadata& metadata,
                             const NpkPieces& pieces);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_NPK_H_
