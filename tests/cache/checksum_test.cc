// Expected values are those of xxhsum -H2 (xxHash 0.8.1) over the same bytes.

#include "cache/checksum.h"

#include <gtest/gtest.h>

#include <string>

#include "compiler/base/digest.h"

namespace kiln {
namespace {

std::string Hex(std::initializer_list<absl::string_view> parts) {
  return ToHex(ChecksumOf(parts).AsBytes());
}

TEST(ChecksumTest, IsXxh3Of128Bits) {
  EXPECT_EQ(Hex({}), "99aa06d3014798d86001c324468d497f");
}

TEST(ChecksumTest, CoversThePartsAndTheirLengths) {
  EXPECT_EQ(Hex({""}), "2c0a8a99dc147d5445c3b49d035665b2");
  EXPECT_EQ(Hex({"ab", "c"}), "f2eda2708bcfd51cc05c0ee4c9f60440");
  EXPECT_EQ(Hex({"a", "bc"}), "f310f4d71be93bc46456c91685adede6");
  std::string bytes;
  for (int i = 0; i < 1000; ++i) bytes.push_back(static_cast<char>(i * 7));
  EXPECT_EQ(Hex({bytes, absl::string_view("\0\xff", 2)}),
            "69b69be08c0f143203e26920bda7eec3");
}

}  // namespace
}  // namespace kiln
