#include "templates/linear/reference.h"

#include <cstddef>
#include <vector>

#include "compiler/base/check.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "templates/fused_moe/parallel_for.h"
#include "templates/fused_moe/trellis_matrix.h"

namespace kiln {
namespace {

constexpr int64_t kBlock = kd::kHadamardSize;

void CheckProblem(const LinearProblem& p) {
  KILN_CHECK(p.tokens >= 0);
  KILN_CHECK(p.in_features > 0 && p.in_features % kBlock == 0);
  KILN_CHECK(p.out_features > 0 && p.out_features % kBlock == 0);
  KILN_CHECK(p.x_dtype == DType::kBf16 || p.x_dtype == DType::kF16);
}

class Evaluation {
 public:
  Evaluation(const LinearProblem& problem, std::span<const int64_t> rows,
             ReferenceMode mode)
      : p_(problem),
        rows_(rows),
        mode_(mode),
        staged_(mode != ReferenceMode::kFloat64),
        operand_(rows.size() * static_cast<size_t>(problem.in_features)) {}

  void Run(int threads, double* out) {
    ParallelFor(static_cast<int64_t>(rows_.size()), threads,
                [&](int64_t row) { RotateInput(row); });
    ParallelFor(p_.out_features / kBlock, threads,
                [&](int64_t block) { Multiply(block, out); });
  }

 private:
  double Round16(double v) const {
    return staged_ ? kd::round_f16(static_cast<float>(v)) : v;
  }

  double Round32(double v) const {
    return staged_ ? static_cast<double>(static_cast<float>(v)) : v;
  }

  double X(int64_t token, int64_t channel) const {
    const uint16_t bits =
        static_cast<const uint16_t*>(p_.x)[token * p_.in_features + channel];
    if (p_.x_dtype == DType::kF16) return kd::f16_to_f32(bits);
    return Round16(kd::bf16_to_f32(bits));
  }

  void Transform(double* block) const {
    ReferenceHadamard({block, static_cast<size_t>(kBlock)}, mode_);
  }

  void RotateInput(int64_t row) {
    const int64_t token = rows_[static_cast<size_t>(row)];
    double* v = operand_.data() + row * p_.in_features;
    for (int64_t c = 0; c < p_.in_features; ++c) {
      v[c] = Round16(X(token, c) * kd::f16_to_f32(p_.suh[c]));
    }
    for (int64_t c = 0; c < p_.in_features; c += kBlock) Transform(v + c);
    for (int64_t c = 0; c < p_.in_features; ++c) v[c] = Round16(v[c]);
  }

  // Output channels [128 block, 128 block + 128) of all rows.
  void Multiply(int64_t block, double* out) const {
    const TrellisMatrix w = {.words = p_.w,
                             .k = p_.in_features,
                             .n = p_.out_features,
                             .codebook = p_.codebook,
                             .bits = p_.bits};
    const auto count = static_cast<int64_t>(rows_.size());
    if (mode_ == ReferenceMode::kSequential) {
      MultiplyTrellisBlock<float>(w, block, operand_.data(), count, out);
    } else {
      MultiplyTrellisBlock<double>(w, block, operand_.data(), count, out);
    }
    const int64_t first = block * kBlock;
    for (int64_t row = 0; row < count; ++row) {
      double* y = out + row * p_.out_features + first;
      for (int64_t c = 0; c < kBlock; ++c) y[c] = Round32(y[c]);
      Transform(y);
      for (int64_t c = 0; c < kBlock; ++c) {
        y[c] = Round32(y[c] * kd::f16_to_f32(p_.svh[first + c]));
        if (p_.bias == nullptr) continue;
        y[c] = Round32(y[c] + kd::f16_to_f32(p_.bias[first + c]));
      }
    }
  }

  const LinearProblem& p_;
  const std::span<const int64_t> rows_;
  const ReferenceMode mode_;
  const bool staged_;
  std::vector<double> operand_;  // [rows][in]
};

}  // namespace

void LinearReferenceRows(const LinearProblem& problem,
                         std::span<const int64_t> rows, ReferenceMode mode,
                         double* out, int threads) {
  CheckProblem(problem);
  KILN_CHECK(mode == ReferenceMode::kFloat64 ||
             mode == ReferenceMode::kStaged ||
             mode == ReferenceMode::kSequential);
  KILN_CHECK(threads >= 1);
  for (const int64_t row : rows) KILN_CHECK(row >= 0 && row < problem.tokens);
  Evaluation(problem, rows, mode).Run(threads, out);
}

}  // namespace kiln
