// EXL3: one quantised matrix is a group of tensors `<key>.trellis`, `.suh`,
// `.svh` and so on. CheckExl3Group looks at types and shapes alone;
// CheckExl3Values reads the few values that have rules of their own.
//
// Source: trellis format specification, sections 1.1, 1.5, 1.7 and 1.8.

#ifndef KILN_TEMPLATES_FORMATS_EXL3_H_
#define KILN_TEMPLATES_FORMATS_EXL3_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "compiler/spec/request.h"
#include "templates/formats/checkpoint.h"

namespace kiln {

// The value of a marker tensor is its codebook's multiplier.
inline constexpr uint32_t kMcgMarker = 0xCBAC1FED;
inline constexpr uint32_t kMul1Marker = 0x83DCD12D;

inline constexpr uint64_t kHadamardBlock = 128;
// More channels than any model has; keeps products far from overflow.
inline constexpr uint64_t kChannelsMax = uint64_t{1} << 24;

// The tensors that were found under one key; null where there is none.
struct Exl3Group {
  const SafetensorsTensor* trellis = nullptr;
  const SafetensorsTensor* suh = nullptr;
  const SafetensorsTensor* svh = nullptr;
  const SafetensorsTensor* su = nullptr;  // signs alone, the legacy form of suh
  const SafetensorsTensor* sv = nullptr;  // the same of svh
  const SafetensorsTensor* mcg = nullptr;
  const SafetensorsTensor* mul1 = nullptr;
  const SafetensorsTensor* bias = nullptr;

  // Any of them, for messages; null in an empty group.
  const SafetensorsTensor* Any() const;
};

// A group whose types and shapes are right: W is [in][out], y = x W.
struct Exl3Matrix {
  int64_t in = 0;   // multiple of 128
  int64_t out = 0;  // multiple of 128
  int bits = 0;     // K, 1..8
  Codebook codebook = Codebook::k3Inst;
  Exl3Group tensors;
};

// Puts the tensor `<key>.<suffix>` into its group.
//   Errors: InvalidArgument for a suffix that EXL3 does not have;
//   FailedPrecondition for a plain ".weight".
absl::Status AddToExl3Group(absl::string_view suffix,
                            const SafetensorsTensor& tensor, Exl3Group* group);

// Types, shapes and completeness. Reads no tensor.
//   Errors: InvalidArgument with the tensor, the value and the rule.
absl::StatusOr<Exl3Matrix> CheckExl3Group(absl::string_view key,
                                          const Exl3Group& group);

// That the codebook is the one that "quantization_config" names.
//   Errors: InvalidArgument with the tensor and both names.
absl::Status CheckExl3Codebook(const Exl3Matrix& matrix, Codebook configured);

// The marker's value, and that no scale is infinite or NaN.
absl::Status CheckExl3Values(const Exl3Matrix& matrix, Checkpoint* checkpoint);

// Binary16 scales [begin, begin + out.size()) of the input side (suh) or of the
// output side (svh); legacy signs become +1 and -1.
absl::Status ReadExl3Scales(const Exl3Matrix& matrix, bool input_side,
                            uint64_t begin, Checkpoint* checkpoint,
                            std::span<uint16_t> out);

// Tiles from (row, column) on, in tiles, as many as `out` holds.
absl::Status ReadExl3Tiles(const Exl3Matrix& matrix, uint64_t row,
                           uint64_t column, Checkpoint* checkpoint,
                           std::span<uint8_t> out);

// Binary16 values of the whole bias; binary32 is narrowed.
//   Errors: InvalidArgument for a value that is not finite as binary16.
absl::StatusOr<std::vector<uint16_t>> ReadExl3Bias(const Exl3Matrix& matrix,
                                                   Checkpoint* checkpoint);

// Numbers of ranks in words: "possible with --tp: 1, 2".
std::string RankCountsText(const std::vector<int64_t>& counts);

// Those that get the same multiple of `block` of the channels each, in words.
std::string PossibleRanks(int64_t channels, int64_t block);

// Channels of `channels` that each of `ranks` ranks holds.
//   what: stands for them in messages, for example "intermediate size".
//   Errors: InvalidArgument, with the counts that are possible, unless each
//   gets the same multiple of 128.
absl::StatusOr<int64_t> ChannelsPerRank(absl::string_view what,
                                        int64_t channels, int64_t ranks);

}  // namespace kiln

#endif  // KILN_TEMPLATES_FORMATS_EXL3_H_
