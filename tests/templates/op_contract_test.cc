// What the tuner reads of an op, against numbers by hand and against the
// buffers themselves; the seeded inputs of linear.

#include "templates/op_contract.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/bundle_format.h"
#include "templates/device/hadamard.h"
#include "templates/device/half.h"
#include "templates/fused_moe/mx_reference.h"
#include "templates/linear/op.h"
#include "templates/linear/workload.h"
#include "tests/support/linear_product.h"

namespace kiln {
namespace {

using ::testing::ElementsAre;
using testing::LinearProduct;
using testing::LinearWeights;
using testing::Sums;

RequestGeometry Linear(bool bias = true, DType io = DType::kBf16) {
  RequestGeometry geometry;
  geometry.op = Op::kLinear;
  geometry.linear = {
      .in_features = 256, .out_features = 384, .bits = 3, .bias = bias};
  geometry.io_dtype = io;
  geometry.weights.codebook = Codebook::kMul1;
  return geometry;
}

RequestGeometry FusedMoe() {
  RequestGeometry geometry;
  geometry.hidden = 256;
  geometry.intermediate = 128;
  geometry.experts = 8;
  geometry.top_k = 3;
  geometry.weights.bits = {.gate = 2, .up = 3, .down = 5};
  return geometry;
}

RequestGeometry Qsrt() {
  RequestGeometry geometry;
  geometry.hidden = 256;
  geometry.intermediate = 256;
  geometry.experts = 8;
  geometry.top_k = 3;
  geometry.activation = Activation::kPerExpert;
  geometry.weights.format = WeightFormat::kQsrt;
  return geometry;
}

constexpr DrawKind kAll[] = {DrawKind::kUniform, DrawKind::kRagged,
                             DrawKind::kZipf,    DrawKind::kHot,
                             DrawKind::kExtreme, DrawKind::kOneTerm};

RequestGeometry Mx(MxBoundary boundary) {
  RequestGeometry geometry = FusedMoe();
  geometry.hidden = boundary == MxBoundary::kCoupled ? 512 : 640;
  geometry.weights.format = WeightFormat::kTrellisMx;
  geometry.weights.bits = {.gate = 3, .up = 3, .down = 3};
  geometry.recipe = Recipe::kW4A8;
  geometry.mx = {.limit = "10", .boundary = boundary};
  return geometry;
}

std::vector<RequestGeometry> Geometries() {
  return {FusedMoe(),
          Linear(),
          Linear(false, DType::kF16),
          Qsrt(),
          Mx(MxBoundary::kCoupled),
          Mx(MxBoundary::kIdentity)};
}

TEST(OpContractTest, BuffersAgreeWithParametersAndWithTheWorkload) {
  for (const RequestGeometry& geometry : Geometries()) {
    SCOPED_TRACE(geometry.ToString());
    const OpContract& contract = ContractOf(geometry);
    const std::vector<ParamDecl> params = contract.Params(geometry);
    const std::vector<BufferFill> fills = contract.Buffers(geometry);
    ASSERT_EQ(fills.size(), params.size());
    const auto workload = contract.MakeWorkload(geometry, 1);
    const std::vector<std::string> tokens =
        workload->TokenInputs(DrawKind::kUniform, 0, 5);
    ASSERT_EQ(tokens.size(), params.size());
    int outputs = 0;
    for (size_t slot = 0; slot < params.size(); ++slot) {
      SCOPED_TRACE(params[slot].name);
      EXPECT_EQ(params[slot].output,
                fills[slot].kind == BufferFill::Kind::kNone);
      const uint64_t bytes =
          fills[slot].bytes + 5 * fills[slot].bytes_per_token;
      if (params[slot].output) {
        ++outputs;
        EXPECT_EQ(bytes, 5 * workload->row_width() * sizeof(float));
        EXPECT_TRUE(workload->Constant(slot).empty());
        EXPECT_TRUE(tokens[slot].empty());
      } else {
        EXPECT_EQ(workload->Constant(slot).size() + tokens[slot].size(), bytes);
        EXPECT_NE(workload->Constant(slot).empty(), tokens[slot].empty());
      }
    }
    EXPECT_EQ(outputs, 1);
  }
}

TEST(OpContractTest, MatricesAreTheTrellisTensorsOfAllExperts) {
  for (const RequestGeometry& geometry : Geometries()) {
    SCOPED_TRACE(geometry.ToString());
    const OpContract& contract = ContractOf(geometry);
    const std::vector<ParamDecl> params = contract.Params(geometry);
    const std::vector<BufferFill> fills = contract.Buffers(geometry);
    std::set<uint64_t> slots;
    for (const OpMatrix& matrix : contract.Work(geometry).matrices) {
      const auto experts =
          static_cast<double>(std::max<int64_t>(1, geometry.experts));
      ASSERT_LT(matrix.slot, params.size());
      EXPECT_EQ(experts * matrix.weights * matrix.bits / 8,
                static_cast<double>(fills[matrix.slot].bytes));
      slots.insert(matrix.slot);
    }
    for (size_t slot = 0; slot < params.size(); ++slot) {
      EXPECT_EQ(slots.contains(slot), params[slot].dtype == "i16");
    }
  }
}

TEST(OpContractTest, CountsTheWorkOfLinear) {
  const OpWork work = ContractOf(Linear()).Work(Linear());
  ASSERT_EQ(work.matrices.size(), 1u);
  EXPECT_EQ(work.matrices[0].weights, 256 * 384);
  EXPECT_EQ(work.matrices[0].bits, 3);
  EXPECT_EQ(work.scale_bytes, 2 * (256 + 384 + 384));
  EXPECT_EQ(work.token_bytes, 2 * 256 + 4 * 384);
  EXPECT_EQ(work.routes, 1);
  EXPECT_TRUE(work.reads_all_weights);
  EXPECT_EQ(ContractOf(Linear()).Work(Linear(false)).scale_bytes,
            2 * (256 + 384));
  EXPECT_EQ(ContractOf(Linear()).TilesMax(Linear(), 8, 17), 3u);
  EXPECT_EQ(ContractOf(Linear()).TilesExpected(Linear(), 8, 16), 2);
  EXPECT_FALSE(ContractOf(FusedMoe()).Work(FusedMoe()).reads_all_weights);
}

TEST(LinearOpTest, TheBiasHasASlotInFrontOfTheOutputWhereThereIsOne) {
  const auto names = [](const RequestGeometry& geometry) {
    std::vector<std::string> out;
    for (const ParamDecl& param : LinearParams(geometry)) {
      out.push_back(param.name + " " + param.dtype + " " + param.shape);
    }
    return out;
  };
  EXPECT_THAT(
      names(Linear()),
      ElementsAre("x bf16 [m, in_features]",
                  "w i16 [in_features/16, out_features/16, 48]",
                  "suh f16 [in_features]", "svh f16 [out_features]",
                  "bias f16 [out_features]", "out f32 [m, out_features]"));
  EXPECT_THAT(names(Linear(false, DType::kF16)),
              ElementsAre("x f16 [m, in_features]",
                          "w i16 [in_features/16, out_features/16, 48]",
                          "suh f16 [in_features]", "svh f16 [out_features]",
                          "out f32 [m, out_features]"));
  EXPECT_EQ(LinearSlotOf(Linear(), LinearParam::kOut), 5u);
  EXPECT_EQ(LinearSlotOf(Linear(false), LinearParam::kOut), 4u);
  EXPECT_THAT(
      LinearBytes(Linear(), 7),
      ElementsAre(7 * 256 * 2, 256 * 384 * 3 / 8, 512, 768, 768, 7 * 384 * 4));
}

// ---- seeded inputs of linear -----------------------------------------------

std::vector<uint16_t> Halves(absl::string_view bytes) {
  std::vector<uint16_t> words(bytes.size() / 2);
  std::memcpy(words.data(), bytes.data(), bytes.size());
  return words;
}

LinearWeights WeightsOf(const LinearWorkload& workload) {
  const RequestGeometry& geometry = workload.geometry();
  const auto slot = [&](LinearParam param) {
    return Halves(workload.Constant(LinearSlotOf(geometry, param)));
  };
  LinearWeights weights = {.in = geometry.linear.in_features,
                           .out = geometry.linear.out_features,
                           .bits = geometry.linear.bits,
                           .codebook = geometry.weights.codebook,
                           .w = slot(LinearParam::kW),
                           .suh = slot(LinearParam::kSuh),
                           .svh = slot(LinearParam::kSvh),
                           .bias = {}};
  if (geometry.linear.bias) weights.bias = slot(LinearParam::kBias);
  return weights;
}

std::vector<float> RowOf(const LinearWorkload& workload, DrawKind kind,
                         uint32_t draw, uint32_t token) {
  const RequestGeometry& geometry = workload.geometry();
  const std::vector<uint16_t> x =
      Halves(workload.TokenInputs(kind, draw, token + 1)[0]);
  const auto in = static_cast<size_t>(geometry.linear.in_features);
  std::vector<float> row;
  for (size_t c = token * in; c < (token + 1) * in; ++c) {
    row.push_back(geometry.io_dtype == DType::kF16 ? kd::f16_to_f32(x[c])
                                                   : kd::bf16_to_f32(x[c]));
  }
  return row;
}

double Variance(const std::vector<double>& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return sum / static_cast<double>(values.size());
}

TEST(LinearWorkloadTest, ExpectedRowsAreThoseOfTheDefinition) {
  for (const bool bias : {false, true}) {
    LinearWorkload workload(Linear(bias, bias ? DType::kBf16 : DType::kF16), 3);
    const LinearWeights weights = WeightsOf(workload);
    for (const DrawKind kind : {DrawKind::kUniform, DrawKind::kHot}) {
      const std::vector<uint32_t> rows = {4, 0, 4};
      const std::vector<double> exact = workload.Expected(kind, 2, rows, 1);
      const std::vector<double> sequential =
          workload.Expected(kind, 2, rows, 2, ReferenceMode::kSequential);
      for (size_t i = 0; i < rows.size(); ++i) {
        const std::vector<float> x = RowOf(workload, kind, 2, rows[i]);
        const std::vector<double> wide =
            LinearProduct(weights, x, Sums::kExact);
        const std::vector<double> narrow =
            LinearProduct(weights, x, Sums::kSequential);
        for (size_t c = 0; c < wide.size(); ++c) {
          ASSERT_NEAR(exact[i * 384 + c], wide[c], 1e-9);
          ASSERT_EQ(sequential[i * 384 + c], narrow[c]);
        }
        EXPECT_GT(Variance(wide), 0.3);
        EXPECT_LT(Variance(wide), 3);
      }
    }
  }
}

TEST(LinearWorkloadTest, ATokenDoesNotDependOnHowManyThereAre) {
  const LinearWorkload workload(Linear(), 3);
  for (const DrawKind kind : kAll) {
    const std::string all = workload.TokenInputs(kind, 4, 33)[0];
    EXPECT_EQ(all.size(), 33u * 256 * 2);
    for (const uint32_t m : {1u, 12u, 32u}) {
      EXPECT_EQ(workload.TokenInputs(kind, 4, m)[0],
                all.substr(0, m * 256 * 2));
    }
    const bool alike = all.substr(0, 512) == all.substr(13 * 512, 512);
    EXPECT_EQ(alike, FirstAlike(kind, 13) == 0) << DrawKindName(kind);
  }
}

TEST(LinearWorkloadTest, SeedsDrawsAndKindsAreOtherInputs) {
  const LinearWorkload a(Linear(), 1);
  const LinearWorkload b(Linear(), 2);
  std::set<std::string> inputs;
  for (const DrawKind kind : {DrawKind::kUniform, DrawKind::kRagged,
                              DrawKind::kZipf, DrawKind::kHot}) {
    for (const uint32_t draw : {0u, 1u}) {
      inputs.insert(a.TokenInputs(kind, draw, 1)[0]);
      inputs.insert(b.TokenInputs(kind, draw, 1)[0]);
    }
  }
  EXPECT_EQ(inputs.size(), 16u);
  for (size_t slot = 1; slot <= 4; ++slot) {
    EXPECT_NE(a.Constant(slot), b.Constant(slot)) << slot;
    EXPECT_EQ(a.Constant(slot), LinearWorkload(Linear(), 1).Constant(slot));
  }
}

TEST(LinearWorkloadTest, ExtremeRowsHaveNoNumberWhereTheirTokenHasNone) {
  for (const DType io : {DType::kBf16, DType::kF16}) {
    LinearWorkload workload(Linear(true, io), 3);
    std::vector<uint32_t> rows;
    for (uint32_t row = 0; row < kDistinctTokens; ++row) rows.push_back(row);
    const std::vector<double> expected = workload.Expected(
        DrawKind::kExtreme, 0, rows, 1, ReferenceMode::kSequential);
    const std::set<uint32_t> poisoned = {3, 5, 7, 9, 10};
    for (const uint32_t row : rows) {
      for (size_t c = 0; c < 384; ++c) {
        ASSERT_EQ(std::isfinite(expected[row * 384 + c]),
                  !poisoned.contains(row))
            << row << " " << c;
      }
    }
    // A token of zeros has the bias for its row.
    const std::vector<uint16_t> bias = WeightsOf(workload).bias;
    for (size_t c = 0; c < 384; ++c) {
      ASSERT_EQ(expected[6 * 384 + c], kd::f16_to_f32(bias[c]));
    }
  }
}

TEST(LinearWorkloadTest, AOneTermTokenIsRotatedIntoOneChannel) {
  const LinearWorkload workload(Linear(), 3);
  const std::vector<uint16_t> suh = WeightsOf(workload).suh;
  std::set<size_t> channels;
  for (uint32_t token = 0; token < kDistinctTokens; ++token) {
    std::vector<float> x = RowOf(workload, DrawKind::kOneTerm, 1, token);
    for (size_t c = 0; c < x.size(); ++c) x[c] *= kd::f16_to_f32(suh[c]);
    for (size_t at = 0; at < x.size(); at += 128) kd::Hadamard128(&x[at]);
    size_t terms = 0;
    for (size_t c = 0; c < x.size(); ++c) {
      if (std::abs(x[c]) < 1e-4f) continue;
      ++terms;
      channels.insert(c);
    }
    EXPECT_EQ(terms, 1u) << token;
  }
  EXPECT_EQ(channels.size(), kDistinctTokens);
}

// What golden replay would compute: finite and of order one, so that no wrong
// instruction hides in an infinity or below the smallest number.
TEST(LinearBuffersTest, GoldenInputsGiveOutputsOfOrderOne) {
  for (const DType io : {DType::kBf16, DType::kF16}) {
    const RequestGeometry geometry = Linear(true, io);
    const std::vector<BufferFill> fills = LinearBuffers(geometry);
    std::vector<std::vector<uint16_t>> words;
    uint64_t state = 1;
    for (const BufferFill& fill : fills) {
      std::vector<uint16_t> buffer;
      if (fill.kind == BufferFill::Kind::kWords) {
        ASSERT_EQ(fill.element_bytes, 2u);
        buffer.resize((fill.bytes + fill.bytes_per_token) / 2);
        for (uint16_t& word : buffer) {
          state = state * 6364136223846793005u + 1442695040888963407u;
          word = static_cast<uint16_t>(((state >> 40) & fill.a) | fill.b);
        }
      }
      words.push_back(std::move(buffer));
    }
    const LinearWeights weights = {.in = 256,
                                   .out = 384,
                                   .bits = 3,
                                   .codebook = Codebook::kMul1,
                                   .w = words[1],
                                   .suh = words[2],
                                   .svh = words[3],
                                   .bias = words[4]};
    std::vector<float> x;
    for (const uint16_t bits : words[0]) {
      x.push_back(io == DType::kF16 ? kd::f16_to_f32(bits)
                                    : kd::bf16_to_f32(bits));
    }
    const double variance =
        Variance(LinearProduct(weights, x, Sums::kSequential));
    EXPECT_GT(variance, 0.1);
    EXPECT_LT(variance, 10);
  }
}

// What golden replay would compute over TrellisMX weights, likewise.
TEST(MxBuffersTest, GoldenInputsGiveOutputsOfOrderOne) {
  for (const MxBoundary boundary :
       {MxBoundary::kCoupled, MxBoundary::kIdentity}) {
    const RequestGeometry geometry = Mx(boundary);
    constexpr uint32_t kTokens = 4;
    const std::vector<BufferFill> fills =
        ContractOf(geometry).Buffers(geometry);
    std::vector<std::string> buffers(fills.size());
    MxProblem problem;
    problem.geometry = geometry;
    problem.tokens = kTokens;
    for (uint32_t s = 0; s < fills.size(); ++s) {
      const BufferFill& fill = fills[s];
      const uint64_t bytes = fill.bytes + kTokens * fill.bytes_per_token;
      for (uint64_t j = 0; j < bytes / fill.element_bytes; ++j) {
        const uint64_t random = kiln_golden_random(s, j);
        const uint64_t value = fill.kind == BufferFill::Kind::kIndices
                                   ? random % fill.a
                                   : (random & fill.a) | fill.b;
        buffers[s].append(reinterpret_cast<const char*>(&value),
                          fill.element_bytes);
      }
      problem.slots[s] = buffers[s].data();
    }
    std::vector<double> out(kTokens * static_cast<size_t>(geometry.hidden));
    const std::vector<int64_t> rows = {0, 1, 2, 3};
    MxReferenceRows(problem, rows, ReferenceMode::kFloat64, out.data(), 1);
    double squares = 0;
    for (const double value : out) squares += value * value;
    const double rms = std::sqrt(squares / static_cast<double>(out.size()));
    EXPECT_GT(rms, 1e-3) << geometry.ToString();
    EXPECT_LT(rms, 1e3) << geometry.ToString();
  }
}

}  // namespace
}  // namespace kiln
