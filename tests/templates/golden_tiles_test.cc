// Golden files made by exllamav3 on a GPU: every matching file below the
// golden folder is read, and there must be at least one of each kind.

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "compiler/spec/request.h"
#include "device/half.h"
#include "device/trellis.h"
#include "gtest/gtest.h"
#include "templates/fused_moe/reference.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using testing::ByteReader;

Codebook CodebookOf(int32_t number) {
  switch (number) {
    case 0:
      return Codebook::k3Inst;
    case 1:
      return Codebook::kMcg;
    case 2:
      return Codebook::kMul1;
    default:
      throw std::runtime_error("unknown codebook " + std::to_string(number));
  }
}

struct Header {
  int32_t bits, codebook, rows, columns;
};

Header ReadHeader(ByteReader* in) {
  const std::vector<int32_t> h = in->Read<int32_t>(4);
  const Header header = {h[0], h[1], h[2], h[3]};
  if (header.bits < 1 || header.bits > 8 || header.rows < 16 ||
      header.columns < 16 || header.rows > 1 << 14 ||
      header.columns > 1 << 14 || header.rows % 16 != 0 ||
      header.columns % 16 != 0) {
    throw std::runtime_error("golden record header out of range");
  }
  return header;
}

std::vector<uint16_t> Decode(const Header& h,
                             const std::vector<uint16_t>& packed) {
  std::vector<uint16_t> out(static_cast<size_t>(h.rows * h.columns));
  DecodeTrellisMatrix(packed.data(), h.rows, h.columns, h.bits,
                      CodebookOf(h.codebook), out.data());
  return out;
}

TEST(GoldenTilesTest, EveryTileFileDecodesBitForBit) {
  const auto files =
      testing::FilesNamed(testing::GoldenFolder(), "tile_", ".bin");
  ASSERT_FALSE(files.empty())
      << "no tile_*.bin below " << testing::GoldenFolder();
  for (const std::filesystem::path& path : files) {
    SCOPED_TRACE(path.string());
    const std::string bytes = testing::ReadAll(path);
    ByteReader in(bytes);
    int records = 0;
    while (!in.done()) {
      const Header h = ReadHeader(&in);
      const size_t weights = static_cast<size_t>(h.rows * h.columns);
      const auto packed =
          in.Read<uint16_t>(weights / 16 * static_cast<size_t>(h.bits));
      const auto expected = in.Read<uint16_t>(weights);
      ASSERT_EQ(Decode(h, packed), expected)
          << "K=" << h.bits << " codebook " << h.codebook;
      ++records;
    }
    EXPECT_GT(records, 0);
  }
}

// v <- H v / sqrt(128) on 128 values that are `step` apart, in binary64.
void Hadamard(double* v, size_t step) {
  for (size_t stride = 1; stride < 128; stride *= 2) {
    for (size_t i = 0; i < 128; ++i) {
      if ((i & stride) != 0) continue;
      const double a = v[i * step];
      const double b = v[(i + stride) * step];
      v[i * step] = a + b;
      v[(i + stride) * step] = a - b;
    }
  }
  for (size_t i = 0; i < 128; ++i) v[i * step] /= std::sqrt(128.0);
}

TEST(GoldenTilesTest, EveryRotatedMatrixAgreesWithinBinary16Rounding) {
  const auto files =
      testing::FilesNamed(testing::GoldenFolder(), "had_", ".bin");
  ASSERT_FALSE(files.empty())
      << "no had_*.bin below " << testing::GoldenFolder();
  for (const std::filesystem::path& path : files) {
    SCOPED_TRACE(path.string());
    const std::string bytes = testing::ReadAll(path);
    ByteReader in(bytes);
    int records = 0;
    while (!in.done()) {
      const Header h = ReadHeader(&in);
      const size_t rows = static_cast<size_t>(h.rows);
      const size_t columns = static_cast<size_t>(h.columns);
      ASSERT_EQ(rows % 128, 0u);
      ASSERT_EQ(columns % 128, 0u);
      const auto packed =
          in.Read<uint16_t>(rows * columns / 16 * static_cast<size_t>(h.bits));
      const auto suh = in.Read<uint16_t>(rows);
      const auto svh = in.Read<uint16_t>(columns);
      const auto expected = in.Read<uint16_t>(rows * columns);
      const auto decoded = Decode(h, packed);
      std::vector<double> w(decoded.size());
      for (size_t i = 0; i < w.size(); ++i) w[i] = kd::f16_to_f32(decoded[i]);
      for (size_t n = 0; n < columns; ++n) {
        for (size_t k = 0; k < rows; k += 128) {
          Hadamard(&w[k * columns + n], columns);
        }
      }
      for (size_t k = 0; k < rows; ++k) {
        for (size_t n = 0; n < columns; n += 128) {
          Hadamard(&w[k * columns + n], 1);
        }
      }
      double error = 0;
      double norm = 0;
      for (size_t k = 0; k < rows; ++k) {
        for (size_t n = 0; n < columns; ++n) {
          const double value = w[k * columns + n] * kd::f16_to_f32(suh[k]) *
                               kd::f16_to_f32(svh[n]);
          const double golden = kd::f16_to_f32(expected[k * columns + n]);
          error += (value - golden) * (value - golden);
          norm += value * value;
        }
      }
      EXPECT_LE(std::sqrt(error / norm), 2e-3)
          << "K=" << h.bits << " codebook " << h.codebook;
      ++records;
    }
    EXPECT_GT(records, 0);
  }
}

}  // namespace
}  // namespace kiln
