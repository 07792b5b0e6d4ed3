#include "templates/formats/npk_law.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "device/half.h"
#include "device/trellis.h"
#include "templates/formats/mxfp8.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using testing::Sha256Hex;
using testing::SplitMix64;

TEST(NpkLawTest, AllStatesHaveTheDigestsOfTheDefinition) {
  std::vector<uint8_t> bytes(65536);
  for (uint32_t s = 0; s < 65536; ++s) bytes[s] = kd::NpkByte(s);
  EXPECT_EQ(Sha256Hex(bytes),
            "f81eb38a599601d856c28a8c6c6e334d57f547827124c452655c0e0ada6fe1ec");
  // The form of a device that keeps the sign of zero: 15 bytes differ.
  int zeros = 0;
  for (uint32_t s = 0; s < 65536; ++s) {
    const uint32_t w = (s * kd::kNpkMultiplier & kd::kNpkMask) ^ kd::kNpkFlip;
    const uint16_t sum =
        kd::hadd(static_cast<uint16_t>(w), static_cast<uint16_t>(w >> 16));
    const uint8_t byte = E4m3Of(kd::f16_to_f32(kd::hadd(sum, sum)));
    zeros += byte == 0x80 ? 1 : 0;
    EXPECT_EQ(byte == 0x80 ? 0 : byte, bytes[s]) << s;
    bytes[s] = byte;
  }
  EXPECT_EQ(zeros, 15);
  EXPECT_EQ(Sha256Hex(bytes),
            "3a3231fe28889169c94820440869435b4c2b7ccb21ffd70a07ba8e3461b84618");
  bytes.resize(32);
  EXPECT_EQ(ToHex({reinterpret_cast<const char*>(bytes.data()), 32}),
            "4729bc3d3bb7c5c12837c6baac3f2abab8be403d2bc8c227a6b02339472ebcba");
}

TEST(NpkLawTest, TheLawIsAConstantExpression) {
  static_assert(kd::NpkByte(0) == 0x47);
  static_assert(kd::NpkByte(1) == 0x29);
}

template <int K, kd::NpkWindow kLaw>
int WrongLanes(uint64_t seed) {
  SplitMix64 random(seed);
  uint32_t wrong = 0;
  for (int tile = 0; tile < 50; ++tile) {
    const std::vector<uint16_t> halves = random.Words(16 * K);
    std::vector<uint32_t> ring(8 * K);
    std::memcpy(ring.data(), halves.data(), 32 * K);
    for (uint32_t lane = 0; lane < 32; ++lane) {
      uint32_t states[8];
      kd::NpkLaneStates<K, kLaw>(ring.data(), lane, states);
      for (uint32_t j = 0; j < 8; ++j) {
        if (states[j] != kd::Window<K>(ring.data(), 8 * lane + j)) {
          wrong |= 1u << lane;
        }
      }
    }
  }
  return __builtin_popcount(wrong);
}

TEST(NpkLawTest, BothWindowLawsGiveTheCyclicStates) {
  EXPECT_EQ((WrongLanes<2, kd::NpkWindow::kTwoWords>(1)), 0);
  EXPECT_EQ((WrongLanes<3, kd::NpkWindow::kTwoWords>(2)), 0);
  EXPECT_EQ((WrongLanes<4, kd::NpkWindow::kTwoWords>(3)), 0);
  EXPECT_EQ((WrongLanes<5, kd::NpkWindow::kThreeWords>(4)), 0);
  // The three-word law holds for the lower rates too.
  EXPECT_EQ((WrongLanes<2, kd::NpkWindow::kThreeWords>(5)), 0);
  EXPECT_EQ((WrongLanes<3, kd::NpkWindow::kThreeWords>(6)), 0);
  EXPECT_EQ((WrongLanes<4, kd::NpkWindow::kThreeWords>(7)), 0);
}

template <int K>
void ExpectSpans(int zero, int one, int two, uint32_t shift_max) {
  int spans[3] = {};
  uint32_t shift = 0;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const kd::NpkPlace<K> place = kd::NpkPlaceOf<K>(lane);
    ASSERT_LE(place.span, 2u);
    ++spans[place.span];
    shift = std::max(shift, place.shift);
  }
  EXPECT_EQ(spans[0], zero) << K;
  EXPECT_EQ(spans[1], one) << K;
  EXPECT_EQ(spans[2], two) << K;
  EXPECT_EQ(shift, shift_max) << K;
}

TEST(NpkLawTest, LanesSpanTheWordsOfTheSpecification) {
  ExpectSpans<2>(16, 16, 0, 16);
  ExpectSpans<3>(0, 32, 0, 24);
  ExpectSpans<4>(0, 32, 0, 0);
  ExpectSpans<5>(0, 16, 16, 24);
}

// A former defect: two words at K = 5 lose states on the lanes that reach a
// third. The template refuses to compile it, so the words are put together
// here.
TEST(NpkLawTest, TwoWordsAtFiveBitsAreWrongOnSixteenLanes) {
  SplitMix64 random(8);
  uint32_t wrong = 0;
  for (int tile = 0; tile < 50; ++tile) {
    const std::vector<uint16_t> halves = random.Words(80);
    std::vector<uint32_t> ring(40);
    std::memcpy(ring.data(), halves.data(), 160);
    for (uint32_t lane = 0; lane < 32; ++lane) {
      const kd::NpkPlace<5> place = kd::NpkPlaceOf<5>(lane);
      const uint64_t both =
          static_cast<uint64_t>(ring[place.first]) << 32 | ring[place.last];
      for (uint32_t i = 0; i < 8; ++i) {
        const uint32_t state =
            static_cast<uint32_t>(both >> (place.shift + 5 * i)) & 0xFFFF;
        if (state != kd::Window<5>(ring.data(), 8 * lane + 7 - i)) {
          wrong |= 1u << lane;
        }
      }
    }
  }
  EXPECT_EQ(__builtin_popcount(wrong), 16);
}

}  // namespace
}  // namespace kiln
