// The CPU template over QSRT weights: its plans, run on specialisations of its
// source, against the reference, the vector files and a part of a container.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "compiler/spec/kernel_template.h"
#include "device/half.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "templates/formats/btx_layer.h"
#include "templates/formats/btx_manifest.h"
#include "templates/formats/pair_layer.h"
#include "templates/formats/qsrt_extent.h"
#include "templates/fused_moe/op_qsrt.h"
#include "templates/fused_moe/qsrt_workload.h"
#include "templates/fused_moe/sqg_vector.h"
#include "templates/fused_moe/template_qsrt_cpu.h"
#include "templates/fused_moe/trellis_codebook.h"
#include "tests/support/btx_writer.h"
#include "tests/support/native_layer.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/cpu_plan.h"
#include "tests/templates/qsrt_call.h"
#include "tests/templates/qsrt_cpu_variant.h"
#include "tests/templates/qsrt_vector_atoms.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using nlohmann::json;
using testing::QsrtCall;
using testing::QsrtCpuVariant;
using testing::QsrtCpuVariants;
using testing::QsrtGeometryOf;
using testing::VectorsFolder;
using testing::WorstError;

// Launches the template's plan for `capacity` tokens on the variant, with an
// arena of `poison`. Returns [m][H].
std::vector<float> RunPlan(const QsrtCpuVariant& v, const QsrtCall& call,
                           uint32_t capacity, uint8_t poison) {
  Problem problem;
  problem.geometry = call.geometry;
  problem.interval = {1, capacity};
  problem.device = AssumedProfile({.backend = Backend::kCpu, .level = 3});
  const Assignment assignment = {
      {"activation_bits", v.activation_bits},
      {"tokens_tile", v.tokens_tile},
      {"channels_tile", v.channels_tile},
      {"k_tile", v.k_tile},
      {"codewords", v.codewords},
      {"row_group", v.row_group},
      {"threads", std::max(1, problem.device.multiprocessors)}};
  const absl::StatusOr<PlanBody> body =
      FusedMoeQsrtCpuTemplate()->MakeBody(problem, assignment);
  if (!body.ok()) {
    ADD_FAILURE() << body.status();
    return {};
  }
  return testing::RunCpuPlan(*body, v.steps, call.Slots(),
                             static_cast<size_t>(QsrtParam::kOut), call.tokens,
                             v.hidden, poison);
}

// NaN equals NaN, whatever its bits.
bool SameBits(const std::vector<float>& got, const std::vector<double>& want) {
  if (got.size() != want.size()) return false;
  for (size_t i = 0; i < got.size(); ++i) {
    const auto narrow = static_cast<float>(want[i]);
    if (std::isnan(got[i]) && std::isnan(narrow)) continue;
    if (kd::FloatBits(got[i]) != kd::FloatBits(narrow)) return false;
  }
  return true;
}

class QsrtCpuKernelTest : public ::testing::TestWithParam<QsrtCpuVariant> {
 protected:
  QsrtCpuKernelTest() : workload_(QsrtGeometryOf(GetParam()), 11) {}

  bool quantised() const { return GetParam().activation_bits == 8; }

  ReferenceMode sequential() const {
    return quantised() ? ReferenceMode::kSequentialW4A8
                       : ReferenceMode::kSequential;
  }

  QsrtWorkload workload_;
};

INSTANTIATE_TEST_SUITE_P(Variants, QsrtCpuKernelTest,
                         ::testing::ValuesIn(QsrtCpuVariants()),
                         [](const auto& v) { return v.param.name; });

TEST_P(QsrtCpuKernelTest, EqualsTheSequentialReferenceBitForBit) {
  for (const DrawKind kind :
       {DrawKind::kUniform, DrawKind::kRagged, DrawKind::kHot,
        DrawKind::kExtreme, DrawKind::kOneTerm}) {
    for (const uint32_t tokens : {1u, 19u}) {
      SCOPED_TRACE(std::string(DrawKindName(kind)) +
                   " m=" + std::to_string(tokens));
      const QsrtCall call(workload_, kind, 0, tokens);
      const std::vector<float> out = RunPlan(GetParam(), call, 24, 0xFF);
      EXPECT_TRUE(SameBits(out, call.Expected(sequential())));
      if (kind != DrawKind::kUniform) continue;
      EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](float value) {
        return std::fabs(value) > 0.1f;
      }));
    }
  }
}

TEST_P(QsrtCpuKernelTest, KeepsTheToleranceOfItsArm) {
  const QsrtCpuVariant& v = GetParam();
  const QsrtCall call(workload_, DrawKind::kUniform, 1, 10);
  const std::vector<float> out = RunPlan(v, call, 10, 0x7B);
  EXPECT_LE(WorstError(out,
                       call.Expected(quantised() ? ReferenceMode::kStagedW4A8
                                                 : ReferenceMode::kStaged),
                       v.hidden),
            quantised() ? QsrtTolerance(QsrtArm::kW4A8) : 1e-3);
  EXPECT_LE(WorstError(out, call.Expected(ReferenceMode::kFloat64), v.hidden),
            quantised() ? 8e-2 : QsrtTolerance(QsrtArm::kW4A16));
}

TEST_P(QsrtCpuKernelTest, ReadsNothingThatTheLaunchDidNotWrite) {
  const QsrtCall call(workload_, DrawKind::kRagged, 2, 9);
  const std::vector<float> first = RunPlan(GetParam(), call, 20, 0xFF);
  for (const uint8_t poison : {uint8_t{0x00}, uint8_t{0x7B}}) {
    const std::vector<float> again = RunPlan(GetParam(), call, 20, poison);
    EXPECT_EQ(
        std::memcmp(first.data(), again.data(), first.size() * sizeof(float)),
        0);
  }
}

// Every pair of modes that the two products of an expert can have, each alone.
TEST_P(QsrtCpuKernelTest, ServesEveryPairOfModes) {
  const QsrtCpuVariant& v = GetParam();
  std::set<std::vector<float>> results;
  for (int modes = 0; modes < 4; ++modes) {
    SCOPED_TRACE(modes);
    QsrtCall call(workload_, DrawKind::kUniform, 3, 5);
    call.Set(QsrtParam::kModesFc1, std::vector<int32_t>(v.experts, modes & 1));
    call.Set(QsrtParam::kModesFc2, std::vector<int32_t>(v.experts, modes >> 1));
    const std::vector<float> out = RunPlan(v, call, 5, 0xFF);
    EXPECT_TRUE(SameBits(out, call.Expected(sequential())));
    results.insert(out);
  }
  EXPECT_EQ(results.size(), 4u);
}

TEST_P(QsrtCpuKernelTest, NanInATokenStaysInItsRow) {
  const QsrtCpuVariant& v = GetParam();
  QsrtCall call(workload_, DrawKind::kUniform, 4, 8);
  const std::vector<float> before = RunPlan(v, call, 8, 0xFF);
  const uint16_t nan = v.x_bf16 ? 0x7FC0 : 0x7E00;
  std::memcpy(call.at(QsrtParam::kX).data() + 2 * (2 * v.hidden + 100), &nan,
              2);
  const std::vector<float> after = RunPlan(v, call, 8, 0xFF);
  testing::ExpectNanInItsRowAlone(before, after, v.hidden, 2);
}

TEST_P(QsrtCpuKernelTest, AnExpertsActivationIsItsOwn) {
  const QsrtCpuVariant& v = GetParam();
  if (v.activation != 2) GTEST_SKIP() << "one activation for all experts";
  QsrtCall call(workload_, DrawKind::kUniform, 5, 6);
  const auto run = [&](const std::vector<int32_t>& numbers) {
    call.Set(QsrtParam::kActivations, numbers);
    const std::vector<float> out = RunPlan(v, call, 6, 0xFF);
    EXPECT_TRUE(SameBits(out, call.Expected(sequential())));
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

// Variants that differ in axes and lanes alone are candidates of one request.
TEST(QsrtCpuKernelTest, AllCandidatesOfAnArmGiveEqualBits) {
  std::map<std::tuple<uint32_t, uint32_t, int, int, bool, bool, bool, int64_t>,
           std::vector<float>>
      first;
  size_t compared = 0;
  for (const QsrtCpuVariant& v : QsrtCpuVariants()) {
    const QsrtWorkload workload(QsrtGeometryOf(v), 11);
    const QsrtCall call(workload, DrawKind::kRagged, 8, 9);
    const std::vector<float> out = RunPlan(v, call, 9, 0xFF);
    const auto [it, inserted] =
        first.try_emplace({v.hidden, v.experts, v.other_low, v.activation,
                           v.shared_suh, v.x_bf16, v.id_i64, v.activation_bits},
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

// ---- the codebook ----------------------------------------------------------

template <int K, int L>
void ExpectTheCodebook() {
  const TrellisTable& table = TrellisTableOf(TrellisCodebook::kSqgE4m3, K);
  for (uint32_t s = 0; s < 65536; s += L) {
    uint32_t states[L];
    std::iota(states, states + L, s);
    float values[L];
    kd::Store(values, kd::DecodeSqgLanes<K, L>(kd::Load<kd::U32V<L>>(states)));
    for (uint32_t i = 0; i < L; ++i) {
      ASSERT_EQ(kd::FloatBits(values[i]), kd::FloatBits(table.value[s + i]))
          << "K=" << K << " state " << s + i;
    }
  }
}

TEST(SqgVectorTest, EveryStateHasTheValueOfTheCodebook) {
  ExpectTheCodebook<2, 8>();
  ExpectTheCodebook<3, 8>();
  ExpectTheCodebook<4, 8>();
  ExpectTheCodebook<2, 16>();
  ExpectTheCodebook<3, 16>();
  ExpectTheCodebook<4, 16>();
}

template <int K, int L>
void ExpectTheTable() {
  std::vector<uint16_t> table(65536, 0x7FC0);  // NaN
  for (uint32_t first = 0; first < 65536; first += 1024) {
    kd::FillSqgCodewords<K, L>(first, 1024, table.data());
  }
  for (uint32_t s = 0; s < 65536; s += L) {
    uint32_t states[L];
    std::iota(states, states + L, s);
    const auto lanes = kd::Load<kd::U32V<L>>(states);
    float looked_up[L];
    kd::Store(looked_up, kd::LookUpSqgLanes<L>(lanes, table.data()));
    float decoded[L];
    kd::Store(decoded, kd::DecodeSqgLanes<K, L>(lanes));
    ASSERT_EQ(std::memcmp(looked_up, decoded, sizeof decoded), 0)
        << "K=" << K << " states from " << s;
  }
}

TEST(SqgVectorTest, TheTableOfAllStatesIsTheCompactDecoder) {
  ExpectTheTable<2, 8>();
  ExpectTheTable<3, 8>();
  ExpectTheTable<4, 16>();
  ExpectTheTable<3, 16>();
}

// ---- vector files ----------------------------------------------------------

class QsrtVectorFileTest : public ::testing::TestWithParam<QsrtCpuVariant> {
 protected:
  // mode: of both products. low, high: its rates.
  void Expect(const std::string& name, int32_t mode, size_t low, size_t high) {
    const QsrtCpuVariant& v = GetParam();
    const QsrtWorkload workload(QsrtGeometryOf(v), 11);
    QsrtCall call(workload, DrawKind::kUniform, 0, testing::kQsrtFileTokens);
    std::vector<double> expected;
    testing::FillFromQsrtFile(name, mode, low, high, &call, &expected);
    ASSERT_FALSE(HasFatalFailure());
    const std::vector<float> out = RunPlan(v, call, 3, 0xFF);
    EXPECT_LE(WorstError(out, expected, v.hidden), 1e-3) << v.name;
  }
};

std::vector<QsrtCpuVariant> VariantsNamed(const std::string& prefix) {
  std::vector<QsrtCpuVariant> found;
  for (const QsrtCpuVariant& v : QsrtCpuVariants()) {
    if (v.name.rfind(prefix, 0) == 0) found.push_back(v);
  }
  return found;
}

class QsrtSituFileTest : public QsrtVectorFileTest {};

INSTANTIATE_TEST_SUITE_P(Variants, QsrtSituFileTest,
                         ::testing::ValuesIn(VariantsNamed("file_situ")),
                         [](const auto& v) { return v.param.name; });

TEST_P(QsrtSituFileTest, ThreeBitsAreTheLowRecordOfP33) {
  Expect("moe_sqg_k3_situ_shared.json", 0, 3, 3);
}

class QsrtSiluFileTest : public QsrtVectorFileTest {};

INSTANTIATE_TEST_SUITE_P(Variants, QsrtSiluFileTest,
                         ::testing::ValuesIn(VariantsNamed("file_silu")),
                         [](const auto& v) { return v.param.name; });

TEST_P(QsrtSiluFileTest, TwoBitsAreTheLowRecordOfP24) {
  Expect("moe_sqg_k2_inline_payload.json", 1, 2, 4);
}

// ---- containers ------------------------------------------------------------

// The native tensors and the modes of a part are what the op takes: the
// variants of these names, run on them, against the reference over the part.
void ExpectRunsOn(TrellisSource* source, const std::string& prefix,
                  size_t variants) {
  const TrellisLayout& layout = source->layout();
  const testing::NativeLayer native(source);
  const std::vector<int32_t> fc1 = PairModes(layout.rates_fc1);
  const std::vector<int32_t> fc2 = PairModes(layout.rates_fc2);
  // Both kinds, or the test would show nothing.
  ASSERT_EQ(std::set<int32_t>(fc1.begin(), fc1.end()).size(), 2u);
  const std::vector<QsrtCpuVariant> found = VariantsNamed(prefix);
  ASSERT_EQ(found.size(), variants);
  for (const QsrtCpuVariant& v : found) {
    SCOPED_TRACE(v.name);
    ASSERT_EQ(v.hidden, layout.hidden);
    ASSERT_EQ(v.experts, layout.experts);
    ASSERT_EQ(v.shared_suh, layout.shared_scales);
    const QsrtWorkload workload(QsrtGeometryOf(v), 11);
    QsrtCall call(workload, DrawKind::kUniform, 0, 6);
    const QsrtParam params[] = {QsrtParam::kWGate,  QsrtParam::kWUp,
                                QsrtParam::kWDown,  QsrtParam::kGateSuh,
                                QsrtParam::kUpSuh,  QsrtParam::kRotations,
                                QsrtParam::kDownSvh};
    for (size_t i = 0; i < kTrellisSlots.size(); ++i) {
      const std::string tensor = testing::ReadSlot(source, kTrellisSlots[i]);
      // The words of P33 and P43 are as many as the part's experts have.
      if (i < 3 && v.other_low == 4) {
        ASSERT_LT(tensor.size(), call.at(params[i]).size()) << i;
      } else {
        ASSERT_EQ(tensor.size(), call.at(params[i]).size()) << i;
      }
      call.at(params[i]) = tensor;
    }
    call.Set(QsrtParam::kModesFc1, fc1);
    call.Set(QsrtParam::kModesFc2, fc2);
    // Scales of the part do not take back the growth of products, which a
    // binary16 would not hold for x of order one: 2^-6 of it.
    ASSERT_TRUE(v.x_bf16);
    std::string& x = call.at(QsrtParam::kX);
    for (size_t at = 0; at < x.size(); at += 2) {
      uint16_t bits = 0;
      std::memcpy(&bits, x.data() + at, 2);
      if ((bits & 0x7F80) > 6 << 7) bits -= 6 << 7;
      std::memcpy(x.data() + at, &bits, 2);
    }
    FusedMoeProblem problem = native.Problem();
    problem.tokens = 6;
    problem.top_k = v.top_k;
    problem.x_dtype = v.x_bf16 ? DType::kBf16 : DType::kF16;
    problem.id_dtype = v.id_i64 ? DType::kI64 : DType::kI32;
    problem.x = call.at(QsrtParam::kX).data();
    problem.topk_ids = call.at(QsrtParam::kTopkIds).data();
    problem.topk_weights =
        reinterpret_cast<const float*>(call.at(QsrtParam::kTopkWeights).data());
    const std::vector<double> expected = testing::AllRows(
        problem, v.activation_bits == 8 ? ReferenceMode::kSequentialW4A8
                                        : ReferenceMode::kSequential);
    const std::vector<float> out = RunPlan(v, call, 6, 0xFF);
    EXPECT_TRUE(SameBits(out, expected));
    EXPECT_TRUE(std::all_of(out.begin(), out.end(),
                            [](float value) { return std::isfinite(value); }));
    EXPECT_TRUE(std::any_of(out.begin(), out.end(),
                            [](float value) { return value != 0; }));
  }
}

// The extent of the vector file, whose decoded matrices qsrt_vectors_test
// matches.
TEST(QsrtCpuKernelTest, RunsOnAnExtentOfAtoms) {
  const json file = testing::ReadJson(VectorsFolder() / "qsrt_atoms_v1.json");
  const json& e = file.at("extent");
  const testing::QsrtVectorAtoms atoms(e);
  ASSERT_TRUE(atoms.decoded());
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TrellisSource> source,
                       TrellisFromQsrt(atoms.extent()));
  ExpectRunsOn(source.get(), "atoms", 2);
}

// The second part of a BTX layer.
TEST(QsrtCpuKernelTest, RunsOnAPartOfABtxLayer) {
  const testing::TestFolder folder;
  testing::BtxOptions options;
  options.codebook = "sqg_e4m3";
  options.pair_kinds = {"P33", "P43"};
  options.per_expert_rotations = true;
  const testing::BtxFiles files = testing::MakeBtxFiles(options);
  testing::WriteBtx(folder, options, files);
  ASSERT_OK_AND_ASSIGN(const BtxManifest manifest,
                       ReadBtxManifest(folder.path()));
  ASSERT_OK_AND_ASSIGN(BtxLayer layer,
                       BtxLayer::Open(folder.path(), manifest, options.layer));
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<TrellisSource> source,
                       TrellisFromBtx({.begin = 256, .end = 512}, &layer));
  ExpectRunsOn(source.get(), "btx", 1);
}

}  // namespace
}  // namespace kiln
