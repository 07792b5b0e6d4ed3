// fused_moe/mx_warp.h, run on the host.

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "fused_moe/mx_boundary.h"
#include "gtest/gtest.h"
#include "tests/templates/gpu_intrinsics.h"
#include "tests/templates/test_data.h"
// After what replaces the instructions.
#include "fused_moe/mx_warp.h"

namespace kiln {
namespace {

// Fractions about those at which a scale changes, and any.
TEST(MxWarpTest, ScalesNeedNoDivision) {
  testing::SplitMix64 random(11);
  std::vector<uint32_t> fractions = {0,        1,        0x5FFFFF, 0x600000,
                                     0x600001, 0x600002, 0x7FFFFE, 0x7FFFFF};
  for (int i = 0; i < 500; ++i) {
    fractions.push_back(static_cast<uint32_t>(random.Next()) & 0x7FFFFF);
  }
  for (uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (const uint32_t fraction : fractions) {
      const uint32_t bits = exponent << 23 | fraction;
      ASSERT_EQ(kd::ScaleByteOf(bits),
                kd::Mxfp8ScaleByte(std::bit_cast<float>(bits)))
          << exponent << ", " << fraction;
    }
  }
}

TEST(MxWarpTest, NumbersAreRoundedAsTheirCodesSay) {
  const auto expect_equal = [](uint32_t bits) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const auto x = std::bit_cast<float>(bits | sign);
      ASSERT_EQ(std::bit_cast<uint32_t>(kd::RoundToE4m3(x)),
                std::bit_cast<uint32_t>(kd::E4m3ToFloat(kd::FloatToE4m3(x))))
          << x;
    }
  };
  // Every number of E4M3, what lies halfway to the next, and their neighbours.
  for (uint32_t code = 0; code < 0x7E; ++code) {
    const auto value = [](uint32_t c) {
      return kd::E4m3ToFloat(static_cast<uint8_t>(c));
    };
    const auto low = std::bit_cast<uint32_t>(value(code));
    const auto middle =
        std::bit_cast<uint32_t>((value(code) + value(code + 1)) / 2);
    for (const uint32_t at : {low, middle}) {
      expect_equal(at);
      expect_equal(at + 1);
      if (at != 0) expect_equal(at - 1);
    }
  }
  // The largest, and the one number above it that a scale may leave.
  expect_equal(std::bit_cast<uint32_t>(448.0f));
  expect_equal(std::bit_cast<uint32_t>(448.0f) + 1);
  testing::SplitMix64 random(12);
  for (int i = 0; i < 200000; ++i) {
    expect_equal(static_cast<uint32_t>(random.Next()) %
                 std::bit_cast<uint32_t>(448.0f));
  }
  EXPECT_NE(kd::RoundToE4m3(std::bit_cast<float>(0x7FC00000u)),
            kd::RoundToE4m3(std::bit_cast<float>(0x7FC00000u)));
}

// Calls transform(v, lane) in a warp whose lane l holds numbers 16l .. 16l + 15
// of `numbers`, which it replaces.
template <class Transform>
void InAWarp(std::vector<float>* numbers, Transform transform) {
  testing::gpu::Run({.grid = {1}, .threads = 32}, [&] {
    const uint32_t lane = threadIdx.x;
    float v[16];
    std::copy_n(numbers->begin() + lane * 16, 16, v);
    transform(v, lane);
    std::copy_n(v, 16, numbers->begin() + lane * 16);
  });
}

TEST(MxWarpTest, TransformsHaveTheBitsOfTheScalarOnes) {
  testing::SplitMix64 random(13);
  std::vector<float> numbers(512);
  for (float& v : numbers) {
    v = static_cast<float>(random.Next() % 20001) / 5000.0f - 2.0f;
  }
  std::vector<float> expected = numbers, got = numbers;
  kd::Hadamard512(expected.data());
  InAWarp(&got,
          [](float(&v)[16], uint32_t lane) { kd::WarpHadamard512(v, lane); });
  EXPECT_EQ(got, expected);

  expected = got = numbers;
  for (size_t q = 0; q < 512; q += 128) kd::Hadamard128(expected.data() + q);
  InAWarp(&got, [](float(&v)[16], uint32_t lane) {
    kd::WarpHadamard128Of512(v, lane, kd::HadamardScale());
  });
  EXPECT_EQ(got, expected);
}

// A block is in two lanes of 16 numbers, or in eight of four.
TEST(MxWarpTest, BlocksHaveOneScaleWhateverALaneHolds) {
  testing::SplitMix64 random(14);
  std::vector<float> numbers(512);
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto size = static_cast<float>(1u << (i / 32));
    numbers[i] = (static_cast<float>(random.Next() % 2001) - 1000.0f) * size;
  }
  std::vector<float> expected = numbers, wide = numbers, narrow = numbers;
  std::vector<float> scales(16);
  for (size_t block = 0; block < 16; ++block) {
    uint8_t codes[32];
    scales[block] = kd::Ue8m0ToFloat(
        kd::QuantizeMxBlock(numbers.data() + block * 32, codes));
    for (size_t i = 0; i < 32; ++i) {
      expected[block * 32 + i] = kd::E4m3ToFloat(codes[i]);
    }
  }
  InAWarp(&wide, [&](float(&v)[16], uint32_t lane) {
    EXPECT_EQ(kd::RoundToMxfp8(v), scales[lane / 2]);
  });
  EXPECT_EQ(wide, expected);
  testing::gpu::Run({.grid = {4}, .threads = 32}, [&] {
    float* const own = narrow.data() + blockIdx.x * 128 + threadIdx.x * 4;
    float v[4];
    std::copy_n(own, 4, v);
    EXPECT_EQ(kd::RoundToMxfp8(v), scales[blockIdx.x * 4 + threadIdx.x / 8]);
    std::copy_n(v, 4, own);
  });
  EXPECT_EQ(narrow, expected);
}

}  // namespace
}  // namespace kiln
