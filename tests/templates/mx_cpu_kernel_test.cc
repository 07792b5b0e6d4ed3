// The CPU template over TrellisMX weights: its plans, run on specialisations of
// its source, against the references of both arms.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "compiler/base/file_util.h"
#include "compiler/spec/kernel_template.h"
#include "device/half.h"
#include "gtest/gtest.h"
#include "templates/formats/coupled_signs.h"
#include "templates/formats/npk_prepare.h"
#include "templates/formats/npk_reference.h"
#include "templates/fused_moe/mx_reference.h"
#include "templates/fused_moe/op_mx.h"
#include "templates/fused_moe/template_mx_cpu.h"
#include "tests/support/golden.h"
#include "tests/support/npk_writer.h"
#include "tests/support/status_matchers.h"
#include "tests/templates/cpu_plan.h"
#include "tests/templates/mx_call.h"
#include "tests/templates/mx_cpu_variant.h"

namespace kiln {
namespace {

using testing::GeometryOf;
using testing::MxCall;
using testing::MxCpuVariant;
using testing::MxCpuVariants;
using testing::RowError;
using testing::SequentialOf;
using testing::StagedOf;
using testing::WithRemainder;
using testing::WorstRow;

// ---- running a plan --------------------------------------------------------

// Launches the template's plan for m_min to `capacity` tokens on the variant,
// with an arena of `poison`. Returns [m][H].
std::vector<float> RunPlan(const MxCpuVariant& v, const MxCall& call,
                           uint32_t capacity, uint8_t poison,
                           uint32_t m_min = 1) {
  Problem problem;
  problem.geometry = call.problem.geometry;
  problem.interval = {m_min, capacity};
  problem.device = AssumedProfile({.backend = Backend::kCpu, .level = 3});
  Assignment assignment = {
      {"activation_bits", v.activation_bits},
      {"tokens_tile", v.tokens_tile},
      {"channels_tile", v.channels_tile},
      {"row_group", v.row_group},
      {"threads", std::max(1, problem.device.multiprocessors)}};
  if (v.activation_terms != 1) {
    assignment["activation_terms"] = v.activation_terms;
  }
  const absl::StatusOr<PlanBody> body =
      FusedMoeMxCpuTemplate()->MakeBody(problem, assignment);
  if (!body.ok()) {
    ADD_FAILURE() << body.status();
    return {};
  }
  return testing::RunCpuPlan(
      *body, v.steps, call.problem.slots, call.out_slot(),
      static_cast<uint32_t>(call.problem.tokens), v.hidden, poison);
}

class MxCpuKernelTest : public ::testing::TestWithParam<MxCpuVariant> {};

INSTANTIATE_TEST_SUITE_P(Variants, MxCpuKernelTest,
                         ::testing::ValuesIn(MxCpuVariants()),
                         [](const auto& v) { return v.param.name; });

TEST_P(MxCpuKernelTest, EqualsTheSequentialReferenceBitForBit) {
  const MxCpuVariant& v = GetParam();
  for (const uint32_t tokens : {1u, 19u}) {
    SCOPED_TRACE("m=" + std::to_string(tokens));
    const MxCall call(GeometryOf(v), tokens, 77 + tokens);
    const std::vector<float> out = RunPlan(v, call, 24, 0xFF);
    const std::vector<double> expected = call.Expected(SequentialOf(v));
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(kd::FloatBits(out[i]),
                kd::FloatBits(static_cast<float>(expected[i])))
          << "row " << i / v.hidden << ", column " << i % v.hidden;
    }
    EXPECT_TRUE(std::any_of(out.begin(), out.end(), [](float value) {
      return std::fabs(value) > 0.1f;
    }));
  }
}

// The protocol's bounds: small-M against the reference without quantised
// activations, grouped against the one with them. With a remainder they come
// near the former too.
TEST_P(MxCpuKernelTest, KeepsTheCosineOfItsArm) {
  const MxCpuVariant& v = GetParam();
  const MxCall call(GeometryOf(v), 10, 5);
  const std::vector<float> out = RunPlan(v, call, 10, 0x7B);
  const bool quantised = v.activation_bits == 8;
  const bool has_remainder = v.activation_terms == 2;
  const RowError own = WorstRow(out, call.Expected(StagedOf(v)), v.hidden);
  EXPECT_LE(own.relative, 1e-3);
  EXPECT_GE(own.cosine, quantised ? 0.9999998 : 0.99995);
  const RowError exact =
      WorstRow(out, call.Expected(ReferenceMode::kFloat64), v.hidden);
  EXPECT_LE(exact.relative, has_remainder ? 4e-3 : quantised ? 8e-2 : 2e-3);
  if (!quantised || has_remainder) {
    EXPECT_GE(exact.cosine, 0.99995);
  }
}

TEST_P(MxCpuKernelTest, ReadsNothingThatTheLaunchDidNotWrite) {
  const MxCpuVariant& v = GetParam();
  const MxCall call(GeometryOf(v), 9, 6);
  const std::vector<float> first = RunPlan(v, call, 20, 0xFF);
  for (const uint8_t poison : {uint8_t{0x00}, uint8_t{0x7B}}) {
    const std::vector<float> again = RunPlan(v, call, 20, poison);
    EXPECT_EQ(
        std::memcmp(first.data(), again.data(), first.size() * sizeof(float)),
        0);
  }
}

// A remainder that a request has for few tokens does not show beyond them.
TEST(MxCpuKernelTest, BeyondTheLimitARemainderChangesNoBit) {
  size_t ran = 0;
  for (const MxCpuVariant& v : MxCpuVariants()) {
    if (v.activation_bits != 8 || v.activation_terms != 1) continue;
    ++ran;
    const RequestGeometry g = GeometryOf(v);
    const MxCall without(g, 19, 21);
    const MxCall with(WithRemainder(g, 8), 19, 21);
    const std::vector<float> expected = RunPlan(v, without, 24, 0xFF);
    const std::vector<float> out = RunPlan(v, with, 24, 0xFF, 9);
    EXPECT_EQ(
        std::memcmp(expected.data(), out.data(), out.size() * sizeof(float)), 0)
        << v.name;
  }
  EXPECT_GE(ran, 4u);
}

TEST_P(MxCpuKernelTest, NanInATokenStaysInItsRow) {
  const MxCpuVariant& v = GetParam();
  MxCall call(GeometryOf(v), 8, 7);
  for (uint32_t j = 0; j < v.top_k; ++j) {
    call.SetId(call.problem.geometry, 2 * v.top_k + j, j % v.experts);
  }
  const std::vector<float> before = RunPlan(v, call, 8, 0xFF);
  const uint16_t nan = v.x_bf16 ? 0x7FC0 : 0x7E00;
  std::memcpy(call.at(MxParam::kX).data() + 2 * (2 * v.hidden + 100), &nan, 2);
  const std::vector<float> after = RunPlan(v, call, 8, 0xFF);
  testing::ExpectNanInItsRowAlone(before, after, v.hidden, 2);
}

// Variants that differ in axes and lanes alone are candidates of one request.
TEST(MxCpuKernelTest, AllCandidatesOfAnArmGiveEqualBits) {
  std::map<std::tuple<uint32_t, int, bool, int64_t, int64_t>,
           std::vector<float>>
      first;
  size_t compared = 0;
  for (const MxCpuVariant& v : MxCpuVariants()) {
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
  EXPECT_GE(compared, 6u);
}

// What `kiln prepare` writes is what the op reads: the kernel over a prepared
// layer against the reference over the sidecar it came from.
//   uses: variants that there must be
void ExpectRunsOnAPreparedLayer(NpkBoundary boundary, size_t uses) {
  NpkMetadata metadata = testing::SmallNpk();
  metadata.boundary = boundary;
  const testing::ScratchFolder scratch;
  const std::string folder = scratch.path();
  const std::string name =
      NpkFileName(metadata.layer, metadata.rank, metadata.world_size);
  const std::string file =
      testing::NpkBytes(metadata, testing::RandomNpkTensors(metadata, 3));
  ASSERT_OK(WriteFileAtomically(folder + "/" + name, file));
  PrepareOptions options;
  options.layer = metadata.layer;
  options.rank = metadata.rank;
  options.ranks = metadata.world_size;
  ASSERT_OK_AND_ASSIGN(const PreparedNpkLayer prepared,
                       PrepareNpkLayer(folder, folder, options));
  ASSERT_OK_AND_ASSIGN(SafetensorsFile layer,
                       SafetensorsFile::Open(prepared.path));
  std::map<std::string, const SafetensorsTensor*> tensors;
  for (const SafetensorsTensor& tensor : layer.header().tensors()) {
    tensors[std::string(tensor.name)] = &tensor;
  }
  ASSERT_OK_AND_ASSIGN(const NpkSidecar sidecar,
                       NpkSidecar::Open(folder + "/" + name));
  size_t used = 0;
  for (const MxCpuVariant& v : MxCpuVariants()) {
    if (v.hidden != metadata.hidden || v.inter != metadata.intermediate ||
        v.experts != metadata.experts || v.bits != metadata.bits || !v.x_bf16 ||
        v.id_i64 || v.coupled != (boundary == NpkBoundary::kCoupled)) {
      continue;
    }
    ++used;
    MxCall call(GeometryOf(v), 6, 9);
    call.problem.geometry.mx.limit = metadata.limit;
    const std::vector<ParamDecl> params = MxParams(call.problem.geometry);
    // No tensor is left over, and none is missing.
    ASSERT_EQ(tensors.size(),
              call.out_slot() - static_cast<size_t>(MxParam::kW13));
    for (size_t s = static_cast<size_t>(MxParam::kW13); s < call.out_slot();
         ++s) {
      ASSERT_TRUE(tensors.count(params[s].name)) << params[s].name;
      ASSERT_OK_AND_ASSIGN(const auto bytes,
                           layer.Bytes(*tensors[params[s].name]));
      ASSERT_EQ(bytes.size(), call.buffers[s].size()) << params[s].name;
      std::memcpy(call.buffers[s].data(), bytes.data(), bytes.size());
    }
    const std::vector<float> out = RunPlan(v, call, 6, 0xFF);
    NpkProblem problem;
    problem.weights = &sidecar;
    problem.tokens = 6;
    problem.top_k = v.top_k;
    problem.x = reinterpret_cast<const uint16_t*>(call.at(MxParam::kX).data());
    problem.topk_ids =
        reinterpret_cast<const int32_t*>(call.at(MxParam::kTopkIds).data());
    problem.topk_weights =
        reinterpret_cast<const float*>(call.at(MxParam::kTopkWeights).data());
    const std::vector<int64_t> rows = {0, 1, 2, 3, 4, 5};
    std::vector<double> expected(out.size());
    NpkReferenceRows(problem, rows, SequentialOf(v), expected.data());
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(kd::FloatBits(out[i]),
                kd::FloatBits(static_cast<float>(expected[i])))
          << v.name << " row " << i / v.hidden << ", column " << i % v.hidden;
    }
  }
  EXPECT_EQ(used, uses);
}

TEST(MxCpuKernelTest, RunsOnAPreparedLayer) {
  ExpectRunsOnAPreparedLayer(NpkBoundary::kCoupled, 2);
  ExpectRunsOnAPreparedLayer(NpkBoundary::kIdentity, 1);
}

}  // namespace
}  // namespace kiln
