// Random calls of fused_moe over TrellisMX weights, and how far a result is
// from what was expected.

#ifndef KILN_TESTS_TEMPLATES_MX_CALL_H_
#define KILN_TESTS_TEMPLATES_MX_CALL_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "compiler/spec/request.h"
#include "device/half.h"
#include "templates/formats/coupled_signs.h"
#include "templates/fused_moe/mx_reference.h"
#include "templates/fused_moe/op_mx.h"
#include "tests/templates/test_data.h"

namespace kiln::testing {

// The request that a variant of a kernel is compiled for.
template <typename Variant>
RequestGeometry GeometryOf(const Variant& v) {
  RequestGeometry g;
  g.hidden = v.hidden;
  g.intermediate = v.inter;
  g.experts = v.experts;
  g.top_k = v.top_k;
  g.io_dtype = v.x_bf16 ? DType::kBf16 : DType::kF16;
  g.id_dtype = v.id_i64 ? DType::kI64 : DType::kI32;
  g.weights.format = WeightFormat::kTrellisMx;
  g.weights.bits = {.gate = v.bits, .up = v.bits, .down = v.bits};
  g.recipe = Recipe::kW4A8;
  const auto limit = std::bit_cast<float>(v.limit_bits);
  g.mx.limit =
      std::isinf(limit) ? "inf" : std::to_string(static_cast<int>(limit));
  g.mx.boundary = v.coupled ? MxBoundary::kCoupled : MxBoundary::kIdentity;
  g.mx.smallm_max_tokens = v.activation_bits == 16 ? 64 : 0;
  if (v.activation_terms == 2) {
    g.mx.direct_max_tokens = 64;
    g.mx.remainder = Remainder::kRp2;
  }
  return g;
}

// The references of a variant's arm.
template <typename Variant>
ReferenceMode StagedOf(const Variant& v) {
  if (v.activation_terms == 2) return ReferenceMode::kStagedW4A8Rp2;
  return v.activation_bits == 8 ? ReferenceMode::kStagedW4A8
                                : ReferenceMode::kStaged;
}

template <typename Variant>
ReferenceMode SequentialOf(const Variant& v) {
  if (v.activation_terms == 2) return ReferenceMode::kSequentialW4A8Rp2;
  return v.activation_bits == 8 ? ReferenceMode::kSequentialW4A8
                                : ReferenceMode::kSequential;
}

// A request whose few tokens have a remainder and whose many tokens, more than
// `limit`, are those of `g`.
inline RequestGeometry WithRemainder(RequestGeometry g, uint32_t limit) {
  g.mx.smallm_max_tokens = 0;
  g.mx.direct_max_tokens = limit;
  g.mx.remainder = Remainder::kRp2;
  return g;
}

// One call with its tensors; some routes are inactive, and some tokens have no
// other.
struct MxCall {
  MxCall(const RequestGeometry& g, uint32_t tokens, uint64_t seed)
      : random(seed) {
    problem.geometry = g;
    problem.tokens = tokens;
    for (const uint64_t bytes : MxBytes(g, tokens)) {
      buffers.emplace_back(bytes, '\0');
    }
    const auto h = static_cast<size_t>(g.hidden);
    const auto i = static_cast<size_t>(g.intermediate);
    for (const MxParam stream : {MxParam::kW13, MxParam::kW2}) {
      const size_t count = at(stream).size() / 2;
      const std::vector<uint16_t> words = random.Words(count);
      std::memcpy(at(stream).data(), words.data(), 2 * count);
    }
    const bool coupled = g.mx.boundary == MxBoundary::kCoupled;
    const double fc1 = 0.4 / std::sqrt(static_cast<double>(h));
    const double fc2 = 0.4 / std::sqrt(static_cast<double>(i));
    for (const MxParam scales : {MxParam::kW13Scale, MxParam::kW2Scale}) {
      // What is no table's to shrink, they do.
      const double size = scales == MxParam::kW13Scale ? fc1 : fc2;
      const long shift = coupled ? 0 : std::lround(std::log2(size));
      for (char& byte : at(scales)) {
        byte = static_cast<char>(124 + shift +
                                 static_cast<long>(random.Next() % 5));
      }
    }
    if (coupled) FillVectors(g, fc1, fc2);
    const auto k = static_cast<size_t>(g.top_k);
    for (size_t c = 0; c < tokens * h; ++c) {
      const auto value = static_cast<float>(2 * random.Symmetric());
      const uint16_t half =
          g.io_dtype == DType::kBf16
              ? static_cast<uint16_t>(kd::FloatBits(value) >> 16)
              : kd::f32_to_f16(value);
      std::memcpy(at(MxParam::kX).data() + 2 * c, &half, 2);
    }
    for (size_t r = 0; r < tokens * k; ++r) {
      int64_t id = static_cast<int64_t>(random.Next() %
                                        static_cast<uint64_t>(g.experts));
      const uint64_t dice = random.Next() % 8;
      // Some routes are inactive, and some tokens have no route at all.
      if (dice == 0 || r / k % 7 == 3) id = dice % 2 == 0 ? -1 : g.experts;
      SetId(g, r, id);
      const auto weight = static_cast<float>(random.Symmetric());
      std::memcpy(at(MxParam::kTopkWeights).data() + 4 * r, &weight, 4);
    }
    for (size_t s = 0; s < buffers.size(); ++s) {
      problem.slots[s] = buffers[s].data();
    }
  }

  MxCall(const MxCall&) = delete;
  MxCall& operator=(const MxCall&) = delete;

  std::string& at(MxParam param) {
    return buffers[MxSlot(problem.geometry, param)];
  }

  // Of the output.
  size_t out_slot() const { return MxSlot(problem.geometry, MxParam::kOut); }

  void SetId(const RequestGeometry& g, size_t route, int64_t id) {
    std::string& ids = at(MxParam::kTopkIds);
    if (g.id_dtype == DType::kI64) {
      std::memcpy(ids.data() + 8 * route, &id, 8);
    } else {
      const auto narrow = static_cast<int32_t>(id);
      std::memcpy(ids.data() + 4 * route, &narrow, 4);
    }
  }

  //   fc1, fc2: size of the scales behind each product
  void FillVectors(const RequestGeometry& g, double fc1, double fc2) {
    const auto h = static_cast<size_t>(g.hidden);
    const auto i = static_cast<size_t>(g.intermediate);
    FillScales(&at(MxParam::kGateUpSuh), 0, h, 1);
    FillScales(&at(MxParam::kDownSvh), 0, h, fc2);
    for (size_t e = 0; e < static_cast<size_t>(g.experts); ++e) {
      std::string& table = at(MxParam::kRotations);
      FillScales(&table, 6 * e * i, 2 * i, fc1);
      FillScales(&table, (6 * e + 2) * i, i, 1);
      const auto draw = static_cast<uint8_t>((e + 1) % 8);
      FillSigns(&table, (6 * e + 3) * i,
                CoupledSigns(draw, SignAxis::kPre, 2 * i));
      FillSigns(&table, (6 * e + 5) * i,
                CoupledSigns(draw, SignAxis::kPost, i));
    }
  }

  void FillScales(std::string* to, size_t first, size_t count,
                  double magnitude) {
    for (size_t c = 0; c < count; ++c) {
      const double f = random.Symmetric();
      const uint16_t half = kd::f32_to_f16(
          static_cast<float>(magnitude * (f + (f < 0 ? -0.5 : 0.5))));
      std::memcpy(to->data() + 2 * (first + c), &half, 2);
    }
  }

  static void FillSigns(std::string* to, size_t first,
                        const std::vector<int8_t>& signs) {
    for (size_t c = 0; c < signs.size(); ++c) {
      const uint16_t half = signs[c] > 0 ? 0x3C00 : 0xBC00;
      std::memcpy(to->data() + 2 * (first + c), &half, 2);
    }
  }

  std::vector<double> Expected(ReferenceMode mode) const {
    std::vector<int64_t> rows(static_cast<size_t>(problem.tokens));
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<double> out(rows.size() *
                            static_cast<size_t>(problem.geometry.hidden));
    MxReferenceRows(problem, rows, mode, out.data(), 2);
    return out;
  }

  SplitMix64 random;
  std::vector<std::string> buffers;
  MxProblem problem;
};

// Of one row; zero rows must be exactly zero.
struct RowError {
  double relative = 0;
  double cosine = 1;
};

inline RowError ErrorOf(const float* got, const double* want, size_t width) {
  double difference = 0;
  double dot = 0;
  double norm_got = 0;
  double norm_want = 0;
  for (size_t c = 0; c < width; ++c) {
    difference += (got[c] - want[c]) * (got[c] - want[c]);
    dot += got[c] * want[c];
    norm_got += double{got[c]} * got[c];
    norm_want += want[c] * want[c];
  }
  if (norm_want == 0) return {.relative = difference == 0 ? 0 : INFINITY};
  return {.relative = std::sqrt(difference / norm_want),
          .cosine = dot / std::sqrt(norm_got * norm_want)};
}

// The worst of all rows of `got`.
inline RowError WorstRow(const std::vector<float>& got,
                         const std::vector<double>& want, size_t width) {
  RowError worst;
  for (size_t at = 0; at < got.size(); at += width) {
    const RowError error = ErrorOf(got.data() + at, want.data() + at, width);
    worst.relative = std::max(worst.relative, error.relative);
    worst.cosine = std::min(worst.cosine, error.cosine);
  }
  return worst;
}

}  // namespace kiln::testing

#endif  // KILN_TESTS_TEMPLATES_MX_CALL_H_
