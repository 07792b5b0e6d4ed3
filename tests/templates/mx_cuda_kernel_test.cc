// The CUDA template over TrellisMX weights: its plans, run on the host with
// specialisations of its source, against the references of both arms.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "compiler/spec/kernel_template.h"
#include "device/fragment.h"
#include "fused_moe/mx_fragment.h"
#include "gtest/gtest.h"
#include "templates/formats/mxfp8.h"
#include "templates/fused_moe/mx_reference.h"
#include "templates/fused_moe/op_mx.h"
#include "templates/fused_moe/template_mx_cuda.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/gpu_emulator.h"
#include "tests/templates/gpu_plan.h"
#include "tests/templates/mx_call.h"
#include "tests/templates/mx_cuda_variant.h"
#include "tests/templates/mx_plan_checks.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using testing::GeometryOf;
using testing::MxCall;
using testing::MxCudaVariant;
using testing::MxCudaVariants;
using testing::MxSlices;
using testing::RowError;
using testing::SplitMix64;
using testing::StagedOf;
using testing::WithRemainder;
using testing::WorstRow;
using testing::gpu::Order;

// ---- weights ---------------------------------------------------------------

double HalfValue(uint32_t word, uint32_t index) {
  return kd::f16_to_f32(static_cast<uint16_t>(word >> (16 * index)));
}

TEST(MxFragmentTest, EveryStateIsHalfOfTheLawsNumber) {
  for (uint32_t state = 0; state < 65536; state += 2) {
    uint32_t pair = 0;
    for (uint32_t i = 0; i < 2; ++i) {
      const uint16_t mcg = kd::DecodeState<kd::kCodebookMcg>(state + i);
      pair |= uint32_t{mcg} << (16 * i);
    }
    const uint32_t rounded = kd::RoundPairToHalfE4m3(pair);
    for (uint32_t i = 0; i < 2; ++i) {
      ASSERT_EQ(2 * HalfValue(rounded, i), E4m3Value(kd::NpkByte(state + i)))
          << state + i;
    }
  }
}

template <int K>
void ExpectFragmentsOfRandomTiles() {
  SplitMix64 random(K);
  constexpr uint32_t kSide = 16;
  for (int t = 0; t < 20; ++t) {
    const std::vector<uint16_t> halves = random.Words(16 * K);
    uint32_t words[8 * K];
    std::memcpy(words, halves.data(), sizeof words);
    // [out][in] by the law alone.
    const std::vector<double> weights = DecodeNpkStream(
        reinterpret_cast<const uint8_t*>(words), K, kSide, kSide);
    for (uint32_t lane = 0; lane < 32; ++lane) {
      uint32_t a[4];
      kd::DecodeHalfNpkFragment<K>(
          kd::LoadSpan(words, kd::FindLaneSpan<K>(lane)), a);
      for (uint32_t i = 0; i < 8; ++i) {
        // PTX: registers 1 and 3 are row + 8, 2 and 3 are k + 8.
        const uint32_t row = lane / 4 + i / 2 % 2 * 8;
        const uint32_t k = lane % 4 * 2 + i % 2 + i / 4 * 8;
        ASSERT_EQ(2 * HalfValue(a[i / 2], i % 2), weights[row * kSide + k])
            << "K " << K << " lane " << lane << " element " << i;
      }
    }
  }
}

TEST(MxFragmentTest, ALaneHoldsTheWeightsOfItsFragment) {
  ExpectFragmentsOfRandomTiles<2>();
  ExpectFragmentsOfRandomTiles<3>();
  ExpectFragmentsOfRandomTiles<4>();
  ExpectFragmentsOfRandomTiles<5>();
}

// ---- running a plan --------------------------------------------------------

// Launches the template's plan for m_min to `capacity` tokens on the variant,
// with an arena of `poison`. Returns [m][H].
std::vector<float> RunPlan(const MxCudaVariant& v, const MxCall& call,
                           uint32_t capacity, uint8_t poison,
                           MxSlices slices = {}, Order order = Order::kForward,
                           uint32_t m_min = 1) {
  Problem problem;
  problem.geometry = call.problem.geometry;
  problem.interval = {m_min, capacity};
  problem.device = AssumedProfile(
      {.backend = Backend::kCuda, .level = 90, .arch_specific = true});
  // Blocks that rotate go on with further tokens.
  problem.device.multiprocessors = 1;
  Assignment assignment = {{"activation_bits", v.activation_bits},
                           {"tokens_tile", v.tokens_tile},
                           {"channels_tile", v.channels_tile},
                           {"k_tile", v.k_tile},
                           {"warps", v.warps},
                           {"stages", v.stages},
                           {"split_fc1", slices.fc1},
                           {"split_fc2", slices.fc2}};
  if (v.activation_terms != 1) {
    assignment["activation_terms"] = v.activation_terms;
  }
  const absl::StatusOr<PlanBody> body =
      FusedMoeMxCudaTemplate()->MakeBody(problem, assignment);
  if (!body.ok()) {
    ADD_FAILURE() << body.status();
    return {};
  }
  return testing::gpu::RunPlan(
      *body, v.entries, static_cast<uint32_t>(call.problem.tokens),
      call.problem.slots, call.out_slot(), v.hidden, poison, order);
}

// RunPlan of a variant, for mx_plan_checks.h.
testing::MxRunner Runner(const MxCudaVariant& v) {
  return [&v](const MxCall& call, const testing::MxRun& run) {
    return RunPlan(v, call, run.capacity, run.poison, run.slices, run.order);
  };
}

class MxCudaKernelTest : public ::testing::TestWithParam<MxCudaVariant> {};

INSTANTIATE_TEST_SUITE_P(Variants, MxCudaKernelTest,
                         ::testing::ValuesIn(MxCudaVariants()),
                         [](const auto& v) { return v.param.name; });

TEST_P(MxCudaKernelTest, KeepsTheRoundingBoundariesOfItsArm) {
  const MxCudaVariant& v = GetParam();
  testing::ExpectRoundingBoundaries(v, StagedOf(v), Runner(v));
}

TEST_P(MxCudaKernelTest, SlicesOfTheProductsAreAdded) {
  const MxCudaVariant& v = GetParam();
  testing::ExpectSlicesAreAdded(v, StagedOf(v), Runner(v));
}

// What the remainder is for: with one term the same rows are 2e-2 to 8e-2 off.
TEST(MxCudaKernelTest, ARemainderBringsTheResultNearTheUnquantisedOne) {
  std::map<int64_t, size_t> ran;
  for (const MxCudaVariant& v : MxCudaVariants()) {
    if (v.activation_bits != 8) continue;
    ++ran[v.activation_terms];
    const MxCall call(GeometryOf(v), 5, 31);
    const std::vector<float> out = RunPlan(v, call, 5, 0xFF);
    const RowError error =
        WorstRow(out, call.Expected(ReferenceMode::kFloat64), v.hidden);
    if (v.activation_terms == 2) {
      EXPECT_LE(error.relative, 4e-3) << v.name;
    } else {
      EXPECT_GE(error.relative, 2e-2) << v.name;
    }
  }
  EXPECT_GE(ran[1], 4u);
  EXPECT_GE(ran[2], 4u);
}

// A remainder that a request has for few tokens does not show beyond them.
TEST(MxCudaKernelTest, BeyondTheLimitARemainderChangesNoBit) {
  size_t ran = 0;
  for (const MxCudaVariant& v : MxCudaVariants()) {
    if (v.activation_bits != 8 || v.activation_terms != 1) continue;
    ++ran;
    const RequestGeometry g = GeometryOf(v);
    const MxCall without(g, 9, 21);
    const MxCall with(WithRemainder(g, 8), 9, 21);
    const std::vector<float> expected = RunPlan(v, without, 12, 0xFF);
    const std::vector<float> out =
        RunPlan(v, with, 12, 0xFF, {}, Order::kForward, 9);
    EXPECT_EQ(
        std::memcmp(expected.data(), out.data(), out.size() * sizeof(float)), 0)
        << v.name;
  }
  EXPECT_GE(ran, 4u);
}

TEST_P(MxCudaKernelTest, ReadsNothingThatTheLaunchDidNotWrite) {
  const MxCudaVariant& v = GetParam();
  testing::ExpectNothingUnwrittenIsRead(v, Runner(v));
}

TEST_P(MxCudaKernelTest, TheOrderOfThreadsDoesNotShow) {
  const MxCudaVariant& v = GetParam();
  testing::ExpectTheOrderOfThreadsDoesNotShow(v, Runner(v));
}

TEST_P(MxCudaKernelTest, NanStaysInTheRowsThatUseIt) {
  const MxCudaVariant& v = GetParam();
  testing::ExpectNanStaysInTheRowsThatUseIt(v, Runner(v));
}

// 2^32 + e is not expert e.
TEST(MxCudaKernelTest, IdsAreTestedInTheirOwnWidth) {
  size_t ran = 0;
  for (const MxCudaVariant& v : MxCudaVariants()) {
    if (!v.id_i64) continue;
    ++ran;
    MxCall call(GeometryOf(v), 1, 13);
    for (uint32_t j = 0; j < v.top_k; ++j) {
      call.SetId(call.problem.geometry, j, (int64_t{1} << 32) + j);
    }
    for (const float value : RunPlan(v, call, 1, 0x7B)) {
      ASSERT_EQ(value, 0) << v.name;
    }
  }
  EXPECT_GE(ran, 2u);
}

// Variants that differ in axes alone are candidates of one request.
TEST(MxCudaKernelTest, AllCandidatesWithTheSameSlicesGiveEqualBits) {
  std::map<std::tuple<uint32_t, int, bool, int64_t, int64_t>,
           std::vector<float>>
      first;
  size_t compared = 0;
  for (const MxCudaVariant& v : MxCudaVariants()) {
    const MxCall call(GeometryOf(v), 9, 8);
    const std::vector<float> out = RunPlan(v, call, 9, 0xFF);
    const auto [it, inserted] = first.try_emplace(
        {v.hidden, v.bits, v.coupled, v.activation_bits, v.activation_terms},
        out);
    if (inserted) continue;
    ++compared;
    EXPECT_EQ(
        std::memcmp(it->second.data(), out.data(), out.size() * sizeof(float)),
        0)
        << v.name;
  }
  EXPECT_GE(compared, 5u);
}

}  // namespace
}  // namespace kiln
