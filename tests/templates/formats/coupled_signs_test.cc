#include "templates/formats/coupled_signs.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/templates/test_data.h"

namespace kiln {
namespace {

TEST(CoupledSignsTest, EveryDrawOfTheVectorFilesMatches) {
  const auto files =
      testing::FilesNamed(testing::VectorsFolder(), "coupled_signs", ".json");
  ASSERT_FALSE(files.empty());
  for (const auto& path : files) {
    const nlohmann::json file = testing::ReadJson(path);
    int compared = 0;
    for (const auto& [name, draw] : file.at("draws").items()) {
      SCOPED_TRACE(name);
      ASSERT_EQ(name.size(), std::string("draw1_axis1").size());
      const auto number = static_cast<uint8_t>(name[4] - '0');
      const auto axis = static_cast<SignAxis>(name.back() - '0');
      const std::vector<int8_t> signs =
          CoupledSigns(number, axis, draw.at("length").get<size_t>());
      std::string first;
      std::vector<uint8_t> bits(signs.size() / 8);
      for (size_t i = 0; i < signs.size(); ++i) {
        if (i < 64) first += signs[i] > 0 ? '+' : '-';
        if (signs[i] > 0) bits[i / 8] |= static_cast<uint8_t>(0x80 >> i % 8);
      }
      EXPECT_EQ(first, draw.at("first64"));
      EXPECT_EQ(testing::Sha256Hex(bits), draw.at("bits_sha256"));
      ++compared;
    }
    EXPECT_EQ(compared, 14);
  }
}

TEST(CoupledSignsTest, DrawZeroChangesNothing) {
  for (const SignAxis axis : {SignAxis::kPre, SignAxis::kPost}) {
    const std::vector<int8_t> signs = CoupledSigns(0, axis, 100);
    EXPECT_EQ(std::count(signs.begin(), signs.end(), 1), 100);
  }
}

TEST(CoupledSignsTest, AShorterAxisIsThePrefixOfALongerOne) {
  const std::vector<int8_t> longer = CoupledSigns(3, SignAxis::kPre, 640);
  const std::vector<int8_t> shorter = CoupledSigns(3, SignAxis::kPre, 64);
  EXPECT_TRUE(std::equal(shorter.begin(), shorter.end(), longer.begin()));
}

}  // namespace
}  // namespace kiln
