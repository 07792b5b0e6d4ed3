// The vector files of QSRT atoms: rotation and sizes, and one whole extent
// whose decoded matrices are listed.

#include <gtest/gtest.h>

#include "templates/formats/qsrt_extent.h"
#include "templates/fused_moe/trellis_matrix.h"
#include "tests/support/native_layer.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/qsrt_vector_atoms.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using nlohmann::json;
using testing::FilesNamed;
using testing::ReadJson;
using testing::VectorsFolder;

TEST(QsrtVectorsTest, GeometryMatches) {
  const auto files = FilesNamed(VectorsFolder(), "qsrt_geometry", ".json");
  ASSERT_FALSE(files.empty());
  for (const auto& path : files) {
    const json file = ReadJson(path);
    ASSERT_FALSE(file.at("rotation").empty());
    for (const json& item : file.at("rotation")) {
      const int64_t pairs = item.at("pairs");
      const int64_t rotation = QsrtRotation(
          pairs, item.at("multiplier"), item.at("layer"), item.at("expert"));
      EXPECT_EQ(rotation, item.at("rho").get<int64_t>()) << item;
      EXPECT_EQ(8 * rotation, item.at("slot_of_logical_atom_0").get<int64_t>())
          << item;
    }
    for (const json& item : file.at("bundle")) {
      EXPECT_EQ(QsrtBundleBytes(item.at("H")),
                item.at("atom_bundle_bytes").get<uint64_t>())
          << item;
    }
  }
}

TEST(QsrtVectorsTest, RotationDoesNotOverflow) {
  const int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(QsrtRotation(12, most, most, most), (7 * 7 + 7) % 12);
}

// One matrix of an expert in the native tensors.
TrellisMatrix MatrixOf(const TrellisLayout& layout, const std::string& words,
                       size_t expert, bool down) {
  const std::vector<uint8_t>& rates =
      down ? layout.rates_fc2 : layout.rates_fc1;
  TrellisMatrix matrix;
  matrix.k = down ? 256 : layout.hidden;
  matrix.n = down ? layout.hidden : 256;
  matrix.codebook = layout.codebook;
  matrix.records =
      down ? TrellisMatrix::Records::kRows : TrellisMatrix::Records::kColumns;
  matrix.words = reinterpret_cast<const uint16_t*>(words.data());
  for (size_t e = 0; e <= expert; ++e) {
    if (e > 0) matrix.words += matrix.word_count();
    matrix.pair = PairRate::FromByte(rates[e]);
  }
  return matrix;
}

TEST(QsrtVectorsTest, EveryMatrixOfTheExtentDecodesAsListed) {
  const auto files = FilesNamed(VectorsFolder(), "qsrt_atoms_v1", ".json");
  ASSERT_FALSE(files.empty());
  for (const auto& path : files) {
    SCOPED_TRACE(path.string());
    const json file = ReadJson(path);
    const json& e = file.at("extent");
    const testing::QsrtVectorAtoms atoms(e);
    ASSERT_TRUE(atoms.decoded());
    const QsrtExtent& extent = atoms.extent();
    const std::vector<int64_t>& ids = atoms.ids();
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TrellisSource> source,
                         TrellisFromQsrt(extent));
    const std::string words[] = {
        testing::ReadSlot(source.get(), FusedMoeParam::kWGate),
        testing::ReadSlot(source.get(), FusedMoeParam::kWUp),
        testing::ReadSlot(source.get(), FusedMoeParam::kWDown)};
    const std::string rotations =
        testing::ReadSlot(source.get(), FusedMoeParam::kRotations);
    const TrellisLayout& layout = source->layout();
    for (size_t i = 0; i < ids.size(); ++i) {
      const json& expert = e.at("experts").at(i);
      EXPECT_EQ(QsrtRotation(extent.atom_slots / 8, extent.rotation_multiplier,
                             extent.layer, ids[i]),
                expert.at("pair_rotation").get<int64_t>());
      EXPECT_EQ(layout.rates_fc1[i] == 0x24, expert.at("fc1_mode_P24") == 1);
      EXPECT_EQ(layout.rates_fc2[i] == 0x24, expert.at("fc2_mode_P24") == 1);
      ASSERT_EQ(expert.at("matrices").size(), 3u);
      for (size_t section = 0; section < 3; ++section) {
        const json& listed = expert.at("matrices").at(section);
        SCOPED_TRACE(listed.at("matrix").get<std::string>());
        const TrellisMatrix matrix =
            MatrixOf(layout, words[section], i, section == 2);
        EXPECT_EQ(matrix.pair.low, listed.at("low_bits").get<int>());
        EXPECT_EQ(matrix.pair.high, listed.at("high_bits").get<int>());
        std::vector<uint16_t> decoded(static_cast<size_t>(matrix.k * matrix.n));
        DecodeTrellisMatrix(matrix, decoded.data());
        EXPECT_EQ(testing::Sha256Hex(decoded),
                  listed.at("fp16_sha256_rowmajor"));
        const auto first =
            listed.at("first_row_first16").get<std::vector<uint16_t>>();
        EXPECT_TRUE(std::equal(first.begin(), first.end(), decoded.begin()));
        const auto scales = listed.at("local_scale_record_order_bits")
                                .get<std::vector<uint16_t>>();
        std::vector<uint16_t> found(256);
        std::memcpy(found.data(), &rotations[(3 * i + section) * 512], 512);
        EXPECT_EQ(found, scales);
      }
    }
  }
}

}  // namespace
}  // namespace kiln
