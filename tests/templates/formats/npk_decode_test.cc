#include "templates/formats/npk_decode.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "tests/support/npk_writer.h"
#include "tests/support/status_matchers.h"

namespace kiln {
namespace {

using Tensors = std::map<NpkTensor, std::string>;

std::vector<double> Decoded(const NpkMetadata& metadata, const Tensors& tensors,
                            NpkMatrix matrix, int64_t expert) {
  const std::string file = testing::NpkBytes(metadata, tensors);
  const absl::StatusOr<NpkSidecar> sidecar = NpkSidecar::Parse(
      {reinterpret_cast<const uint8_t*>(file.data()), file.size()});
  EXPECT_OK(sidecar);
  return DecodeNpkMatrix(*sidecar, matrix, expert);
}

// The group of 32 columns at `group` of a row, and nothing else, is doubled by
// one more in the byte at its place of the file's layout.
TEST(NpkDecodeTest, AScaleIsThatOf32WeightsOfItsRow) {
  const NpkMetadata metadata = testing::SmallNpk();  // H 512, I 128, 3 experts
  const Tensors tensors = testing::RandomNpkTensors(metadata, 1);

  const struct {
    NpkMatrix matrix;
    NpkTensor scales;
    size_t byte;  // of expert 1
    size_t columns, row, group;
  } cases[] = {
      {NpkMatrix::kGate, NpkTensor::kW13Scale, (256 + 5) * 16 + 9, 512, 5, 9},
      {NpkMatrix::kUp, NpkTensor::kW13Scale, (256 + 128 + 127) * 16, 512, 127,
       0},
      {NpkMatrix::kDown, NpkTensor::kW2Scale, (512 + 300) * 4 + 3, 128, 300, 3},
  };

  for (const auto& c : cases) {
    Tensors changed = tensors;
    ++changed[c.scales][c.byte];
    for (const int64_t expert : {0, 1, 2}) {
      const std::vector<double> before =
          Decoded(metadata, tensors, c.matrix, expert);
      const std::vector<double> after =
          Decoded(metadata, changed, c.matrix, expert);
      ASSERT_EQ(before.size(), 512u * 128);
      size_t moved = 0;
      for (size_t i = 0; i < before.size(); ++i) {
        const bool scaled = expert == 1 && i / c.columns == c.row &&
                            i % c.columns / 32 == c.group;
        EXPECT_EQ(after[i], scaled ? 2 * before[i] : before[i]) << i;
        moved += after[i] != before[i] ? 1 : 0;
      }
      // A weight may be zero, but few are.
      if (expert == 1) {
        EXPECT_GE(moved, 28u);
      }
    }
  }
}

}  // namespace
}  // namespace kiln
