// The template of TrellisMX weights on E4M3 tensor cores: its plans, run on the
// host with specialisations of its source, against the reference of the grouped
// arm, in both forms.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "compiler/spec/kernel_template.h"
#include "device/fragment.h"
#include "fused_moe/code_row.h"
#include "fused_moe/mx_fragment.h"
#include "gtest/gtest.h"
#include "templates/formats/mxfp8.h"
#include "templates/fused_moe/mx_reference.h"
#include "templates/fused_moe/op_mx.h"
#include "templates/fused_moe/template_mx_qmma.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/gpu_emulator.h"
#include "tests/templates/gpu_intrinsics.h"
#include "tests/templates/gpu_plan.h"
#include "tests/templates/mx_call.h"
#include "tests/templates/mx_plan_checks.h"
#include "tests/templates/mx_qmma_variant.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using testing::GeometryOf;
using testing::MxCall;
using testing::MxQmmaVariant;
using testing::MxQmmaVariants;
using testing::MxSlices;
using testing::RowError;
using testing::SplitMix64;
using testing::WorstRow;
using testing::gpu::Order;

// ---- weights ---------------------------------------------------------------

uint8_t ByteOf(uint32_t word, uint32_t index) {
  return static_cast<uint8_t>(word >> (8 * index));
}

TEST(MxCodesTest, EveryStateIsTheLawsByte) {
  for (uint32_t state = 0; state < 65536; state += 4) {
    uint32_t halves[2] = {};
    for (uint32_t i = 0; i < 4; ++i) {
      const uint16_t mcg = kd::DecodeState<kd::kCodebookMcg>(state + i);
      halves[i / 2] |= uint32_t{mcg} << (16 * (i % 2));
    }
    const uint32_t codes = kd::RoundDoublesToE4m3(halves[0], halves[1]);
    for (uint32_t i = 0; i < 4; ++i) {
      const uint8_t code = ByteOf(codes, i);
      // A zero may have a sign, which is nothing to a product.
      ASSERT_EQ(code == 0x80 ? 0 : code, kd::NpkByte(state + i)) << state + i;
    }
  }
}

TEST(MxCodesTest, AnOperandHasItsChannelsInTheOrderOfTheSpecification) {
  // A.9.3: what lies at each place of 16.
  constexpr std::array<uint32_t, 16> kChannels = {0, 1, 8,  9,  2, 3, 10, 11,
                                                  4, 5, 12, 13, 6, 7, 14, 15};
  for (uint32_t place = 0; place < 16; ++place) {
    EXPECT_EQ(kd::CodePlace(32 + kChannels[place]), 32 + place);
    EXPECT_EQ(kd::CodePlace(kChannels[place]), place);
  }
}

// Registers of mma.m16n8k32 with 8-bit operands, as the PTX manual has them.
// What a lane of the warp holds: A [row][k] and B [k][column].
struct Place {
  uint32_t lane, word, byte;
};

Place PlaceOfA(uint32_t row, uint32_t k) {
  return {row % 8 * 4 + k % 16 / 4, row / 8 + k / 16 * 2, k % 4};
}

Place PlaceOfB(uint32_t k, uint32_t column) {
  return {column * 4 + k % 16 / 4, k / 16, k % 4};
}

// A of decoded tiles times B of an operand in the order of codes is the dense
// product: no lane gives a weight to another.
template <int K>
void ExpectDenseProducts() {
  SplitMix64 random(K);
  constexpr uint32_t kSide = 16;
  constexpr uint32_t kColumns = 8;
  for (int t = 0; t < 20; ++t) {
    // Two tiles, input channels 0 .. 15 and 16 .. 31 of 16 output channels.
    const std::vector<uint16_t> halves = random.Words(2 * 16 * K);
    uint32_t words[2][8 * K];
    std::memcpy(words, halves.data(), sizeof words);
    uint32_t a[32][4];
    for (uint32_t lane = 0; lane < 32; ++lane) {
      for (uint32_t tile = 0; tile < 2; ++tile) {
        kd::DecodeNpkCodes<K>(
            kd::LoadSpan(words[tile], kd::FindLaneSpan<K>(lane)),
            a[lane] + 2 * tile);
      }
    }
    uint8_t operand[kColumns][32];  // in the order of channels
    uint8_t stored[kColumns][32];   // in that of codes
    for (uint32_t column = 0; column < kColumns; ++column) {
      for (uint32_t k = 0; k < 32; ++k) {
        const auto code = static_cast<uint8_t>(random.Next() % 0x7F);
        operand[column][k] = code;
        stored[column][kd::CodePlace(k)] = code;
      }
    }
    // By the law alone.
    std::vector<double> weights[2];
    for (uint32_t tile = 0; tile < 2; ++tile) {
      weights[tile] = DecodeNpkStream(
          reinterpret_cast<const uint8_t*>(words[tile]), K, kSide, kSide);
    }
    for (uint32_t row = 0; row < kSide; ++row) {
      for (uint32_t column = 0; column < kColumns; ++column) {
        double got = 0;
        double want = 0;
        for (uint32_t k = 0; k < 32; ++k) {
          const Place of_a = PlaceOfA(row, k);
          const Place of_b = PlaceOfB(k, column);
          // ldmatrix: a register of B is four neighbours of a stored row.
          const uint32_t lane = of_b.lane;
          const uint8_t b =
              stored[lane / 4][16 * of_b.word + lane % 4 * 4 + of_b.byte];
          got += E4m3Value(ByteOf(a[of_a.lane][of_a.word], of_a.byte)) *
                 E4m3Value(b);
          want += weights[k / 16][row * kSide + k % 16] *
                  E4m3Value(operand[column][k]);
        }
        ASSERT_EQ(got, want)
            << "K " << K << " row " << row << " column " << column;
      }
    }
  }
}

TEST(MxCodesTest, TwoTilesAndAPermutedOperandGiveTheDenseProduct) {
  ExpectDenseProducts<2>();
  ExpectDenseProducts<3>();
  ExpectDenseProducts<4>();
  ExpectDenseProducts<5>();
}

// ---- running a plan --------------------------------------------------------

// Launches the template's plan for `capacity` tokens on the variant, with an
// arena of `poison`. Returns [m][H].
std::vector<float> RunPlan(const MxQmmaVariant& v, const MxCall& call,
                           uint32_t capacity, uint8_t poison,
                           MxSlices slices = {},
                           Order order = Order::kForward) {
  Problem problem;
  problem.geometry = call.problem.geometry;
  problem.interval = {1, capacity};
  problem.device = AssumedProfile({.backend = Backend::kCuda,
                                   .level = v.block_scaled ? 120 : 89,
                                   .arch_specific = v.block_scaled});
  // Blocks that rotate go on with further tokens.
  problem.device.multiprocessors = 1;
  const Assignment assignment = {{"tokens_tile", v.tokens_tile},
                                 {"channels_tile", v.channels_tile},
                                 {"k_tile", 128},
                                 {"warps", v.warps},
                                 {"stages", v.stages},
                                 {"split_fc1", slices.fc1},
                                 {"split_fc2", slices.fc2}};
  const absl::StatusOr<PlanBody> body =
      FusedMoeMxQmmaTemplate()->MakeBody(problem, assignment);
  if (!body.ok()) {
    ADD_FAILURE() << body.status();
    return {};
  }
  return testing::gpu::RunPlan(
      *body, v.entries, static_cast<uint32_t>(call.problem.tokens),
      call.problem.slots, call.out_slot(), v.hidden, poison, order);
}

// RunPlan of a variant, for mx_plan_checks.h.
testing::MxRunner Runner(const MxQmmaVariant& v) {
  return [&v](const MxCall& call, const testing::MxRun& run) {
    return RunPlan(v, call, run.capacity, run.poison, run.slices, run.order);
  };
}

class MxQmmaKernelTest : public ::testing::TestWithParam<MxQmmaVariant> {};

INSTANTIATE_TEST_SUITE_P(Variants, MxQmmaKernelTest,
                         ::testing::ValuesIn(MxQmmaVariants()),
                         [](const auto& v) { return v.param.name; });

TEST_P(MxQmmaKernelTest, KeepsTheRoundingBoundariesOfItsArm) {
  const MxQmmaVariant& v = GetParam();
  testing::ExpectRoundingBoundaries(v, ReferenceMode::kStagedW4A8, Runner(v));
}

TEST_P(MxQmmaKernelTest, SlicesOfTheProductsAreAdded) {
  const MxQmmaVariant& v = GetParam();
  testing::ExpectSlicesAreAdded(v, ReferenceMode::kStagedW4A8, Runner(v));
}

TEST_P(MxQmmaKernelTest, ReadsNothingThatTheLaunchDidNotWrite) {
  const MxQmmaVariant& v = GetParam();
  testing::ExpectNothingUnwrittenIsRead(v, Runner(v));
}

TEST_P(MxQmmaKernelTest, TheOrderOfThreadsDoesNotShow) {
  const MxQmmaVariant& v = GetParam();
  testing::ExpectTheOrderOfThreadsDoesNotShow(v, Runner(v));
}

TEST_P(MxQmmaKernelTest, NanStaysInTheRowsThatUseIt) {
  const MxQmmaVariant& v = GetParam();
  testing::ExpectNanStaysInTheRowsThatUseIt(v, Runner(v));
}

// Scales of neighbouring blocks that differ by up to 2^20, in another order for
// each channel.
TEST_P(MxQmmaKernelTest, EveryScaleCountsForItsOwnBlock) {
  const MxQmmaVariant& v = GetParam();
  MxCall call(GeometryOf(v), 3, 9);
  std::string& scales = call.at(MxParam::kW13Scale);
  for (size_t i = 0; i < scales.size(); ++i) {
    // Byte i % 4 of a word is a block of 32 channels.
    constexpr int kBytes[4] = {127, 127 - 20, 127 - 3, 127 - 9};
    scales[i] = static_cast<char>(kBytes[(i + i / 4) % 4]);
  }
  const std::vector<float> out = RunPlan(v, call, 3, 0xFF);
  const RowError error =
      WorstRow(out, call.Expected(ReferenceMode::kStagedW4A8), v.hidden);
  EXPECT_LE(error.relative, 1e-3);
}

// How many bits a tensor core keeps of its own sums of E4M3 is nowhere stated.
// If they are 14, results still have the cosine that is asked of the arm,
// because those sums are of few products.
TEST_P(MxQmmaKernelTest, ShortSumsOfTheTensorCoreKeepTheCosine) {
  const MxQmmaVariant& v = GetParam();
  const MxCall call(GeometryOf(v), 19, 78);
  const std::vector<double> expected =
      call.Expected(ReferenceMode::kStagedW4A8);
  const std::vector<float> exact = RunPlan(v, call, 19, 0xFF);
  kd::e4m3_sum_bits = 14;
  const std::vector<float> cut = RunPlan(v, call, 19, 0xFF);
  kd::e4m3_sum_bits = 24;
  EXPECT_NE(std::memcmp(exact.data(), cut.data(), exact.size() * sizeof(float)),
            0);
  EXPECT_GE(WorstRow(cut, expected, v.hidden).cosine, 0.9998);
}

// Variants that differ in axes alone are candidates of one request.
TEST(MxQmmaKernelsTest, AllCandidatesWithTheSameSlicesGiveEqualBits) {
  std::map<std::tuple<uint32_t, int, bool>, std::vector<float>> first;
  size_t compared = 0;
  for (const MxQmmaVariant& v : MxQmmaVariants()) {
    const MxCall call(GeometryOf(v), 9, 8);
    const std::vector<float> out = RunPlan(v, call, 9, 0xFF);
    const auto [it, inserted] =
        first.try_emplace({v.hidden, v.bits, v.block_scaled}, out);
    if (inserted) continue;
    ++compared;
    EXPECT_EQ(
        std::memcmp(it->second.data(), out.data(), out.size() * sizeof(float)),
        0)
        << v.name;
  }
  EXPECT_GE(compared, 2u);
}

}  // namespace
}  // namespace kiln
