#include "compiler/spec/dtype.h"

#include <gtest/gtest.h>

namespace kiln {
namespace {

TEST(DTypeTest, NamesAndSizes) {
  const struct {
    DType type;
    const char* name;
    uint32_t bytes;
  } cases[] = {
      {DType::kF32, "f32", 4},   {DType::kF16, "f16", 2},
      {DType::kBf16, "bf16", 2}, {DType::kI16, "i16", 2},
      {DType::kI32, "i32", 4},   {DType::kI64, "i64", 8},
  };

  for (const auto& c : cases) {
    EXPECT_EQ(DTypeName(c.type), c.name);
    EXPECT_EQ(ParseDType(c.name), c.type);
    EXPECT_EQ(DTypeBytes(c.type), c.bytes);
  }
}

TEST(DTypeTest, OtherSpellingsAreNoType) {
  for (const char* name : {"", "F32", "f32 ", "float", "f8"}) {
    EXPECT_EQ(ParseDType(name), std::nullopt) << name;
  }
}

}  // namespace
}  // namespace kiln
