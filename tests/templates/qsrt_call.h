// Calls of fused_moe over QSRT weights, and how far a result is from what was
// expected.

#ifndef KILN_TESTS_TEMPLATES_QSRT_CALL_H_
#define KILN_TESTS_TEMPLATES_QSRT_CALL_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "compiler/spec/request.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "templates/fused_moe/op_qsrt.h"
#include "templates/fused_moe/qsrt_workload.h"
#include "tests/templates/test_data.h"

namespace kiln::testing {

// The request that a variant of a kernel is compiled for.
template <typename Variant>
RequestGeometry QsrtGeometryOf(const Variant& v) {
  constexpr uint32_t kTokensMax = 64;  // of the 8-bit arm
  RequestGeometry g;
  g.hidden = v.hidden;
  g.intermediate = 256;
  g.experts = v.experts;
  g.top_k = v.top_k;
  g.activation = v.activation == 0   ? Activation::kSilu
                 : v.activation == 1 ? Activation::kSitu
                                     : Activation::kPerExpert;
  g.io_dtype = v.x_bf16 ? DType::kBf16 : DType::kF16;
  g.id_dtype = v.id_i64 ? DType::kI64 : DType::kI32;
  g.weights.format = WeightFormat::kQsrt;
  g.weights.shared_scales = v.shared_suh;
  g.recipe = v.activation_bits == 8 ? Recipe::kW4A8 : Recipe::kW4A16;
  g.qsrt.pairs = v.other_low == 2 ? PairKinds::kP24P33 : PairKinds::kP33P43;
  g.qsrt.decode_max_tokens = v.activation_bits == 8 ? kTokensMax : 0;
  return g;
}

// The buffers of a parameter block.
struct QsrtCall {
  // Those of a draw of the workload.
  QsrtCall(const QsrtWorkload& workload, DrawKind kind, uint32_t draw,
           uint32_t m)
      : geometry(workload.geometry()),
        tokens(m),
        buffers(workload.TokenInputs(kind, draw, m)) {
    for (size_t i = 0; i < buffers.size(); ++i) {
      if (buffers[i].empty()) buffers[i] = std::string(workload.Constant(i));
    }
  }

  std::string& at(QsrtParam param) {
    return buffers[static_cast<size_t>(param)];
  }

  // One number for each expert.
  void Set(QsrtParam param, const std::vector<int32_t>& numbers) {
    std::memcpy(at(param).data(), numbers.data(), 4 * numbers.size());
  }

  std::vector<const void*> Slots() const {
    std::vector<const void*> slots;
    for (const std::string& buffer : buffers) slots.push_back(buffer.data());
    return slots;
  }

  std::vector<double> Expected(ReferenceMode mode) const {
    const std::vector<const void*> slots = Slots();
    const QsrtProblem problem(geometry, tokens, slots);
    std::vector<int64_t> rows(tokens);
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<double> out(rows.size() * static_cast<size_t>(geometry.hidden));
    FusedMoeReferenceRows(problem.problem(), rows, mode, out.data(), 2);
    return out;
  }

  RequestGeometry geometry;
  uint32_t tokens;
  std::vector<std::string> buffers;
};

// Largest relative error of a row; a row of zeros must be met exactly.
inline double WorstError(const std::vector<float>& got,
                         const std::vector<double>& want, size_t width) {
  double worst = 0;
  for (size_t at = 0; at < got.size(); at += width) {
    double difference = 0;
    double norm = 0;
    for (size_t c = at; c < at + width; ++c) {
      difference += (got[c] - want[c]) * (got[c] - want[c]);
      norm += want[c] * want[c];
    }
    const double error = norm == 0 ? (difference == 0 ? 0 : INFINITY)
                                   : std::sqrt(difference / norm);
    worst = std::max(worst, error);
  }
  return worst;
}

// ---- vector files ----------------------------------------------------------

inline void CopyHalves(const nlohmann::json& from, std::string* to) {
  const auto halves = from.get<std::vector<uint16_t>>();
  ASSERT_EQ(2 * halves.size(), to->size());
  std::memcpy(to->data(), halves.data(), to->size());
}

// A vector file's matrices have one rate and 128 intermediate channels: they
// become the low records of experts whose high ones have scales of zero.
inline void CopyMatrix(const nlohmann::json& c, const std::string& name,
                       uint64_t stream, size_t experts, size_t columns,
                       size_t rows, size_t low, size_t high, std::string* to) {
  const size_t count = experts * rows * columns / 16 * low;
  SplitMix64 random(c.at("seed").get<uint64_t>() + stream);
  const std::vector<uint16_t> words = random.Words(count);
  ASSERT_EQ(Sha256Hex(words), c.at("payload_sha256").at(name)) << name;
  const bool fc1 = name != "down";
  // Of the low record and of both, between neighbouring hidden tiles of fc1,
  // or of a whole expert of fc2.
  const size_t pieces = fc1 ? experts * rows / 16 : experts;
  const size_t piece = count / pieces;
  const size_t both = piece / low * (low + high);
  for (size_t i = 0; i < pieces; ++i) {
    std::memcpy(to->data() + 2 * i * both, words.data() + i * piece, 2 * piece);
  }
}

// [gate_svh | up_svh | down_suh] of each expert.
inline void CopyRotations(const nlohmann::json& c, size_t experts,
                          std::string* to) {
  std::fill(to->begin(), to->end(), '\0');
  const char* const tables[] = {"gate_svh", "up_svh", "down_suh"};
  for (size_t t = 0; t < 3; ++t) {
    const auto halves = c.at(tables[t]).get<std::vector<uint16_t>>();
    ASSERT_EQ(halves.size(), 128 * experts);
    for (size_t e = 0; e < experts; ++e) {
      std::memcpy(to->data() + 2 * (3 * e + t) * 256, halves.data() + 128 * e,
                  256);
    }
  }
}

inline constexpr uint32_t kQsrtFileTokens = 3;

// Makes a call of kQsrtFileTokens tokens that of a vector file, and finds what
// it expects of the call's recipe.
//   mode: of both products of all experts; low, high: its rates
inline void FillFromQsrtFile(const std::string& name, int32_t mode, size_t low,
                             size_t high, QsrtCall* call,
                             std::vector<double>* expected) {
  const nlohmann::json file = ReadJson(VectorsFolder() / name);
  const nlohmann::json& c = file.at("case");
  ASSERT_EQ(c.at("K").get<size_t>(), low);
  const auto e = static_cast<size_t>(call->geometry.experts);
  const auto h = static_cast<size_t>(call->geometry.hidden);
  const auto k = static_cast<size_t>(call->geometry.top_k);
  CopyMatrix(c, "gate", 1, e, 128, h, low, high, &call->at(QsrtParam::kWGate));
  CopyMatrix(c, "up", 2, e, 128, h, low, high, &call->at(QsrtParam::kWUp));
  CopyMatrix(c, "down", 3, e, h, 128, low, high, &call->at(QsrtParam::kWDown));
  CopyHalves(c.at("gate_suh"), &call->at(QsrtParam::kGateSuh));
  CopyHalves(c.at("up_suh"), &call->at(QsrtParam::kUpSuh));
  CopyHalves(c.at("down_svh"), &call->at(QsrtParam::kDownSvh));
  CopyRotations(c, e, &call->at(QsrtParam::kRotations));
  CopyHalves(c.at("x_fp16"), &call->at(QsrtParam::kX));
  call->Set(QsrtParam::kModesFc1, std::vector<int32_t>(e, mode));
  call->Set(QsrtParam::kModesFc2, std::vector<int32_t>(e, mode));
  std::string* ids = &call->at(QsrtParam::kTopkIds);
  std::string* weights = &call->at(QsrtParam::kTopkWeights);
  ids->clear();
  weights->clear();
  for (size_t t = 0; t < kQsrtFileTokens; ++t) {
    for (size_t j = 0; j < k; ++j) {
      const int32_t id = c.at("topk_ids").at(t).at(j);
      const float weight = c.at("topk_weights_f32").at(t).at(j);
      ids->append(reinterpret_cast<const char*>(&id), 4);
      weights->append(reinterpret_cast<const char*>(&weight), 4);
    }
  }
  expected->clear();
  for (const nlohmann::json& row : c.at(call->geometry.recipe == Recipe::kW4A8
                                            ? "expected_staged_w4a8_f32"
                                            : "expected_staged_w4a16_f32")) {
    for (const nlohmann::json& value : row) expected->push_back(value);
  }
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_QSRT_CALL_H_
