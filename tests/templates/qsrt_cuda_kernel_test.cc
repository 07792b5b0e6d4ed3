// The CUDA template over QSRT weights: its plans, run on the host with
// specialisations of its source, against the reference and the vector files.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "compiler/spec/kernel_template.h"
#include "device/fragment.h"
#include "device/half.h"
#include "fused_moe/code_row.h"
#include "fused_moe/sqg_fragment.h"
#include "gtest/gtest.h"
#include "templates/formats/mxfp8.h"
#include "templates/fused_moe/op_qsrt.h"
#include "templates/fused_moe/qsrt_workload.h"
#include "templates/fused_moe/template_qsrt_cuda.h"
#include "templates/fused_moe/trellis_codebook.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/gpu_emulator.h"
#include "tests/templates/gpu_plan.h"
#include "tests/templates/qsrt_call.h"
#include "tests/templates/qsrt_cuda_variant.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using testing::QsrtCall;
using testing::QsrtCudaVariant;
using testing::QsrtCudaVariants;
using testing::QsrtGeometryOf;
using testing::SplitMix64;
using testing::WorstError;
using testing::gpu::Order;

// ---- weights ---------------------------------------------------------------

// As a kernel of the arm of 16 or 8 bits reads it.
const kd::SqgTable<uint16_t> kHalves =
    kd::MakeSqgTable<uint16_t>(kd::SqgNumber<10>());
const kd::SqgTable<uint16_t> kBfloats =
    kd::MakeSqgTable<uint16_t>(kd::SqgNumber<7>());
const kd::SqgTable<uint16_t> kCodes = kd::MakeSqgTable<uint16_t>(kd::SqgCode());

// Every state at each of a lane's positions, between bits that are none of its.
template <int K>
void ExpectTheCodebook() {
  const TrellisTable& table = TrellisTableOf(TrellisCodebook::kSqgE4m3, K);
  SplitMix64 random(K);
  for (uint32_t state = 0; state < 65536; ++state) {
    for (uint32_t index = 0; index < 8; ++index) {
      const uint32_t from = (7 - index) * K;
      const uint64_t span = (random.Next() & ~(uint64_t{0xFFFF} << from)) |
                            uint64_t{state} << from;
      const kd::SpanBits bits = {.low = static_cast<uint32_t>(span),
                                 .middle = static_cast<uint32_t>(span >> 32),
                                 .high = 0};
      uint32_t offset[8];
      kd::SqgOffsets<K>(bits, kd::ReverseBits(bits.low), offset);
      ASSERT_LT(offset[index], kd::kSqgTableBytes);
      ASSERT_EQ(offset[index] % 2, 0u);
      const float want = table.value[state];
      const size_t at = offset[index] / 2;
      ASSERT_EQ(kd::FloatBits(kd::f16_to_f32(kHalves.value[at])),
                kd::FloatBits(want))
          << "K=" << K << " state " << state << " position " << index;
      ASSERT_EQ(kd::FloatBits(kd::bf16_to_f32(kBfloats.value[at])),
                kd::FloatBits(want))
          << "K=" << K << " state " << state << " position " << index;
      ASSERT_EQ(
          static_cast<float>(E4m3Value(static_cast<uint8_t>(kCodes.value[at]))),
          want)
          << "K=" << K << " state " << state << " position " << index;
    }
  }
}

TEST(SqgFragmentTest, EveryStateHasTheValueOfTheCodebook) {
  ExpectTheCodebook<2>();
  ExpectTheCodebook<3>();
  ExpectTheCodebook<4>();
}

template <int K>
void ExpectFragmentsOfRandomTiles() {
  const TrellisTable& table = TrellisTableOf(TrellisCodebook::kSqgE4m3, K);
  SplitMix64 random(K);
  for (int t = 0; t < 20; ++t) {
    const std::vector<uint16_t> halves = random.Words(16 * K);
    uint32_t words[8 * K];
    std::memcpy(words, halves.data(), sizeof words);
    for (uint32_t lane = 0; lane < 32; ++lane) {
      uint32_t a[4];
      kd::DecodeSqgFragment<K>(
          kd::LoadSpan(words, kd::FindLaneSpan<K>(lane)),
          [](uint32_t offset) { return uint32_t{kHalves.value[offset / 2]}; },
          a);
      for (uint32_t i = 0; i < 8; ++i) {
        // PTX: registers 1 and 3 are row + 8, 2 and 3 are k + 8.
        const uint32_t row = lane / 4 + i / 2 % 2 * 8;
        const uint32_t k = lane % 4 * 2 + i % 2 + i / 4 * 8;
        const uint32_t state =
            kd::Window<K>(words, kd::ElementPosition(k, row));
        const auto half = static_cast<uint16_t>(a[i / 2] >> (16 * (i % 2)));
        ASSERT_EQ(kd::f16_to_f32(half), table.value[state])
            << "K " << K << " lane " << lane << " element " << i;
      }
      uint32_t codes[2];
      kd::DecodeSqgCodes<K>(
          kd::LoadSpan(words, kd::FindLaneSpan<K>(lane)),
          [](uint32_t offset) { return uint32_t{kCodes.value[offset / 2]}; },
          codes);
      for (uint32_t i = 0; i < 8; ++i) {
        const uint32_t row = lane / 4 + i / 4 * 8;
        // Byte i of a register is k at place 4 (lane % 4) + i of a row of
        // codes.
        uint32_t k = 0;
        while (kd::CodePlace(k) != lane % 4 * 4 + i % 4) ++k;
        const uint32_t state =
            kd::Window<K>(words, kd::ElementPosition(k, row));
        const auto code = static_cast<uint8_t>(codes[i / 4] >> (8 * (i % 4)));
        ASSERT_EQ(static_cast<float>(E4m3Value(code)), table.value[state])
            << "K " << K << " lane " << lane << " element " << i;
      }
    }
  }
}

// The table of all states as the kernel makes it, and how it is read.
template <int K>
void ExpectTheCodebookOfStates() {
  const TrellisTable& table = TrellisTableOf(TrellisCodebook::kSqgE4m3, K);
  const kd::SqgTable<uint16_t> bytes =
      kd::MakeSqgTable<uint16_t>(kd::SqgNumber<3>());
  for (uint32_t state = 0; state < 65536; ++state) {
    const uint32_t byte = bytes.value[kd::SqgGroupOf<K>(state)];
    ASSERT_LE(byte, 0xFFu);
    const uint32_t pair = kd::HalvesOfSqgBytes(byte, byte ^ 0x80u);
    const uint32_t wide = kd::BfloatsOfSqgBytes(byte, byte ^ 0x80u);
    for (uint32_t i = 0; i < 2; ++i) {
      const auto half = static_cast<uint16_t>(pair >> (16 * i));
      const float value = kd::f16_to_f32(half) * kd::kSqgByteTimes;
      const float want = i == 0 ? table.value[state] : -table.value[state];
      ASSERT_EQ(kd::FloatBits(value), kd::FloatBits(want))
          << "K=" << K << " state " << state;
      const auto bfloat = static_cast<uint16_t>(wide >> (16 * i));
      ASSERT_EQ(uint32_t{bfloat} << 16, kd::FloatBits(want))
          << "K=" << K << " state " << state;
      // The exponents of all weights are as far apart as those of the other
      // table: no number becomes a subnormal one.
      ASSERT_TRUE(want == 0 || (half & 0x7C00) != 0) << state;
    }
  }
}

TEST(SqgFragmentTest, TheTableOfAllStatesIsTheCompactDecoder) {
  ExpectTheCodebookOfStates<2>();
  ExpectTheCodebookOfStates<3>();
  ExpectTheCodebookOfStates<4>();
}

TEST(SqgFragmentTest, ALaneHoldsTheWeightsOfItsFragment) {
  ExpectFragmentsOfRandomTiles<2>();
  ExpectFragmentsOfRandomTiles<3>();
  ExpectFragmentsOfRandomTiles<4>();
}

// ---- running a plan --------------------------------------------------------

// Of a row against the rounding boundaries: sums of another order now and then
// round a number to its other neighbour.
constexpr double kErrorMax = 1e-3;

struct Slices {
  int64_t fc1 = 1;
  int64_t fc2 = 1;
};

// Launches the template's plan for `capacity` tokens on the variant, with an
// arena of `poison`. Returns [m][H].
std::vector<float> RunPlan(const QsrtCudaVariant& v, const QsrtCall& call,
                           uint32_t capacity, uint8_t poison,
                           Slices slices = {}, Order order = Order::kForward) {
  Problem problem;
  problem.geometry = call.geometry;
  problem.interval = {1, capacity};
  Target target = {
      .backend = Backend::kCuda, .level = 90, .arch_specific = true};
  if (v.operand_codes == 1) {
    target.level = v.block_scaled ? 120 : 89;
    target.arch_specific = v.block_scaled;
  }
  problem.device = AssumedProfile(target);
  // Blocks that rotate go on with further tokens.
  problem.device.multiprocessors = 1;
  const Assignment assignment = {{"activation_bits", v.activation_bits},
                                 {"operand_codes", v.operand_codes},
                                 {"tokens_tile", v.tokens_tile},
                                 {"channels_tile", v.channels_tile},
                                 {"k_tile", v.k_tile},
                                 {"warps", v.warps},
                                 {"stages", v.stages},
                                 {"codewords", v.codewords},
                                 {"split_fc1", slices.fc1},
                                 {"split_fc2", slices.fc2}};
  const absl::StatusOr<PlanBody> body =
      FusedMoeQsrtCudaTemplate()->MakeBody(problem, assignment);
  if (!body.ok()) {
    ADD_FAILURE() << body.status();
    return {};
  }
  return testing::gpu::RunPlan(*body, v.entries, call.tokens, call.Slots(),
                               static_cast<uint64_t>(QsrtParam::kOut), v.hidden,
                               poison, order);
}

// Numbers that are not finite must be those that are expected; the largest
// error of a row's others.
double WorstFiniteError(std::vector<float> got, std::vector<double> want,
                        size_t width) {
  for (size_t i = 0; i < got.size(); ++i) {
    // A binary32 cannot be more.
    const auto narrow = static_cast<float>(want[i]);
    if (std::isfinite(narrow)) continue;
    if (std::isnan(narrow) ? !std::isnan(got[i]) : got[i] != narrow) {
      return INFINITY;
    }
    got[i] = 0;
    want[i] = 0;
  }
  return WorstError(got, want, width);
}

class QsrtCudaKernelTest : public ::testing::TestWithParam<QsrtCudaVariant> {
 protected:
  QsrtCudaKernelTest() : workload_(QsrtGeometryOf(GetParam()), 11) {}

  bool quantised() const { return GetParam().activation_bits == 8; }

  ReferenceMode staged() const {
    return quantised() ? ReferenceMode::kStagedW4A8 : ReferenceMode::kStaged;
  }

  QsrtWorkload workload_;
};

INSTANTIATE_TEST_SUITE_P(Variants, QsrtCudaKernelTest,
                         ::testing::ValuesIn(QsrtCudaVariants()),
                         [](const auto& v) { return v.param.name; });

TEST_P(QsrtCudaKernelTest, KeepsTheRoundingBoundariesOfItsArm) {
  const QsrtCudaVariant& v = GetParam();
  for (const auto& [kind, tokens] :
       {std::pair{DrawKind::kUniform, 1u}, std::pair{DrawKind::kUniform, 19u},
        std::pair{DrawKind::kRagged, 12u}, std::pair{DrawKind::kHot, 13u},
        std::pair{DrawKind::kOneTerm, 5u},
        std::pair{DrawKind::kExtreme, 12u}}) {
    SCOPED_TRACE(std::string(DrawKindName(kind)) +
                 " m=" + std::to_string(tokens));
    const QsrtCall call(workload_, kind, 0, tokens);
    const std::vector<float> out = RunPlan(v, call, 24, 0xFF);
    EXPECT_LE(WorstFiniteError(out, call.Expected(staged()), v.hidden),
              kErrorMax);
    if (kind != DrawKind::kUniform) continue;
    EXPECT_LE(WorstError(out, call.Expected(ReferenceMode::kFloat64), v.hidden),
              quantised() ? 8e-2 : QsrtTolerance(QsrtArm::kW4A16));
    EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](float value) {
      return std::fabs(value) > 0.1f;
    }));
  }
}

TEST_P(QsrtCudaKernelTest, SlicesOfTheProductsAreAdded) {
  const QsrtCudaVariant& v = GetParam();
  const QsrtCall call(workload_, DrawKind::kUniform, 1, 5);
  const Slices slices = {.fc1 = v.hidden >= 512   ? 4
                                : v.hidden >= 256 ? 2
                                                  : 1,
                         .fc2 = 2};
  const std::vector<float> out = RunPlan(v, call, 5, 0x7B, slices);
  EXPECT_LE(WorstError(out, call.Expected(staged()), v.hidden), kErrorMax);
}

TEST_P(QsrtCudaKernelTest, ReadsNothingThatTheLaunchDidNotWrite) {
  const QsrtCudaVariant& v = GetParam();
  const QsrtCall call(workload_, DrawKind::kRagged, 2, 5);
  const std::vector<float> first = RunPlan(v, call, 12, 0xFF);
  for (const uint8_t poison : {uint8_t{0x00}, uint8_t{0x7B}}) {
    const std::vector<float> again = RunPlan(v, call, 12, poison);
    EXPECT_EQ(
        std::memcmp(first.data(), again.data(), first.size() * sizeof(float)),
        0);
  }
}

TEST_P(QsrtCudaKernelTest, TheOrderOfThreadsDoesNotShow) {
  const QsrtCudaVariant& v = GetParam();
  const QsrtCall call(workload_, DrawKind::kUniform, 3, 7);
  const std::vector<float> forward = RunPlan(v, call, 7, 0xFF);
  const std::vector<float> backward =
      RunPlan(v, call, 7, 0xFF, {}, Order::kBackward);
  EXPECT_EQ(std::memcmp(forward.data(), backward.data(),
                        forward.size() * sizeof(float)),
            0);
}

// Every pair of modes that the two products of an expert can have, each alone.
TEST_P(QsrtCudaKernelTest, ServesEveryPairOfModes) {
  const QsrtCudaVariant& v = GetParam();
  std::set<std::vector<float>> results;
  for (int modes = 0; modes < 4; ++modes) {
    SCOPED_TRACE(modes);
    QsrtCall call(workload_, DrawKind::kUniform, 4, 3);
    call.Set(QsrtParam::kModesFc1, std::vector<int32_t>(v.experts, modes & 1));
    call.Set(QsrtParam::kModesFc2, std::vector<int32_t>(v.experts, modes >> 1));
    const std::vector<float> out = RunPlan(v, call, 3, 0xFF);
    EXPECT_LE(WorstError(out, call.Expected(staged()), v.hidden), kErrorMax);
    results.insert(out);
  }
  EXPECT_EQ(results.size(), 4u);
}

// Buffers as long as the experts' modes make the words of both products, and
// not a word longer: the last expert's lie at the end.
TEST_P(QsrtCudaKernelTest, ReadsNoWordBehindTheLastExpert) {
  const QsrtCudaVariant& v = GetParam();
  QsrtCall call(workload_, DrawKind::kHot, 5, 9);
  const std::vector<float> want = RunPlan(v, call, 9, 0xFF);
  const auto words = [&](QsrtParam modes, std::initializer_list<QsrtParam> w) {
    size_t bytes = 0;
    for (uint32_t e = 0; e < v.experts; ++e) {
      int32_t mode = 0;
      std::memcpy(&mode, call.at(modes).data() + 4 * e, 4);
      const PairRate rate = QsrtRate(call.geometry.qsrt.pairs, mode);
      bytes += size_t{16} * v.hidden *
               (static_cast<size_t>(rate.low) + static_cast<size_t>(rate.high));
    }
    for (const QsrtParam param : w) {
      std::string& buffer = call.at(param);
      ASSERT_LE(bytes, buffer.size());
      // The rest must not show.
      std::fill(buffer.begin() + static_cast<ptrdiff_t>(bytes), buffer.end(),
                '\x5A');
    }
  };
  words(QsrtParam::kModesFc1, {QsrtParam::kWGate, QsrtParam::kWUp});
  words(QsrtParam::kModesFc2, {QsrtParam::kWDown});
  EXPECT_EQ(RunPlan(v, call, 9, 0xFF), want);
}

TEST_P(QsrtCudaKernelTest, AnExpertsActivationIsItsOwn) {
  const QsrtCudaVariant& v = GetParam();
  if (v.activation != 2) GTEST_SKIP() << "one activation for all experts";
  QsrtCall call(workload_, DrawKind::kUniform, 5, 6);
  const auto run = [&](const std::vector<int32_t>& numbers) {
    call.Set(QsrtParam::kActivations, numbers);
    const std::vector<float> out = RunPlan(v, call, 6, 0xFF);
    EXPECT_LE(WorstError(out, call.Expected(staged()), v.hidden), kErrorMax);
    return out;
  };
  const std::vector<float> silu = run(std::vector<int32_t>(v.experts, 0));
  const std::vector<float> situ = run(std::vector<int32_t>(v.experts, 1));
  std::vector<int32_t> mixed(v.experts, 0);
  mixed[0] = 1;
  const std::vector<float> both = run(mixed);
  EXPECT_NE(silu, situ);
  EXPECT_NE(both, situ);
}

// A NaN in x shows in its row, whatever its channel, and in no other.
TEST_P(QsrtCudaKernelTest, NanInATokenStaysInItsRow) {
  const QsrtCudaVariant& v = GetParam();
  QsrtCall call(workload_, DrawKind::kUniform, 6, 6);
  const std::vector<float> before = RunPlan(v, call, 6, 0xFF);
  const uint16_t nan = v.x_bf16 ? 0x7FC0 : 0x7E00;
  std::memcpy(call.at(QsrtParam::kX).data() + 2 * (2 * v.hidden + 100), &nan,
              2);
  const std::vector<float> after = RunPlan(v, call, 6, 0xFF);
  testing::ExpectNanInItsRowAlone(before, after, v.hidden, 2);
}

// 2^32 + e is not expert e, and a call without an active route gives zeros.
TEST(QsrtCudaKernelTest, IdsAreTestedInTheirOwnWidth) {
  size_t ran = 0;
  for (const QsrtCudaVariant& v : QsrtCudaVariants()) {
    if (!v.id_i64) continue;
    ++ran;
    const QsrtWorkload workload(QsrtGeometryOf(v), 11);
    QsrtCall call(workload, DrawKind::kUniform, 7, 1);
    for (uint32_t j = 0; j < v.top_k; ++j) {
      const int64_t id = (int64_t{1} << 32) + j;
      std::memcpy(call.at(QsrtParam::kTopkIds).data() + 8 * j, &id, 8);
    }
    for (const float value : RunPlan(v, call, 1, 0x7B)) {
      ASSERT_EQ(value, 0) << v.name;
    }
  }
  EXPECT_GE(ran, 2u);
}

// Variants that differ in axes alone are candidates of one request.
TEST(QsrtCudaKernelTest, AllCandidatesWithTheSameSlicesGiveEqualBits) {
  std::map<
      std::tuple<uint32_t, uint32_t, int, int, bool, int64_t, int64_t, bool>,
      std::vector<float>>
      first;
  size_t compared = 0;
  for (const QsrtCudaVariant& v : QsrtCudaVariants()) {
    const QsrtWorkload workload(QsrtGeometryOf(v), 11);
    const QsrtCall call(workload, DrawKind::kRagged, 8, 9);
    const std::vector<float> out = RunPlan(v, call, 9, 0xFF);
    const auto [it, inserted] = first.try_emplace(
        {v.hidden, v.experts, v.other_low, v.activation, v.shared_suh,
         v.activation_bits, v.operand_codes, v.block_scaled},
        out);
    if (inserted) continue;
    ++compared;
    EXPECT_EQ(
        std::memcmp(it->second.data(), out.data(), out.size() * sizeof(float)),
        0)
        << v.name;
  }
  EXPECT_GE(compared, 4u);
}

// ---- vector files ----------------------------------------------------------

// Variants whose names begin with `prefix` against a vector file, which is the
// low record of experts of `mode`.
void ExpectTheFile(const std::string& prefix, const std::string& name,
                   int32_t mode, size_t low, size_t high) {
  size_t ran = 0;
  for (const QsrtCudaVariant& v : QsrtCudaVariants()) {
    if (v.name.rfind(prefix, 0) != 0) continue;
    ++ran;
    SCOPED_TRACE(v.name);
    const QsrtWorkload workload(QsrtGeometryOf(v), 11);
    QsrtCall call(workload, DrawKind::kUniform, 0, testing::kQsrtFileTokens);
    std::vector<double> expected;
    testing::FillFromQsrtFile(name, mode, low, high, &call, &expected);
    ASSERT_FALSE(::testing::Test::HasFatalFailure());
    const std::vector<float> out = RunPlan(v, call, call.tokens, 0xFF);
    EXPECT_LE(WorstError(out, expected, v.hidden), 1e-3);
  }
  EXPECT_EQ(ran, 3u);
}

TEST(QsrtCudaFileTest, ThreeBitsAreTheLowRecordOfP33) {
  ExpectTheFile("file_situ", "moe_sqg_k3_situ_shared.json", 0, 3, 3);
}

TEST(QsrtCudaFileTest, TwoBitsAreTheLowRecordOfP24) {
  ExpectTheFile("file_silu", "moe_sqg_k2_inline_payload.json", 1, 2, 4);
}

}  // namespace
}  // namespace kiln
