// QsrtWorkload: seeded inputs of one fused_moe request over QSRT weights and
// the answers to them. QsrtContract: what others need to know of the op.

#ifndef KILN_TEMPLATES_FUSED_MOE_QSRT_WORKLOAD_H_
#define KILN_TEMPLATES_FUSED_MOE_QSRT_WORKLOAD_H_

#include <cstdint>
#include <span>
#include <vector>

#include "compiler/spec/request.h"
#include "templates/fused_moe/op_qsrt.h"
#include "templates/fused_moe/reference.h"
#include "templates/fused_moe/routed_workload.h"
#include "templates/op_contract.h"

namespace kiln {

// Of every geometry of fused_moe over weights of qsrt.
const OpContract& QsrtContract();

// A call of the reference with the buffers of a parameter block. Borrows the
// buffers, which the slots point at as the geometry says; must not be moved.
class QsrtProblem {
 public:
  // slots: by QsrtParam; that of the output is not read.
  QsrtProblem(const RequestGeometry& geometry, uint32_t tokens,
              std::span<const void* const> slots);
  QsrtProblem(const QsrtProblem&) = delete;
  QsrtProblem& operator=(const QsrtProblem&) = delete;

  const FusedMoeProblem& problem() const { return problem_; }

 private:
  FusedMoeProblem problem_;
  std::vector<uint8_t> rates_fc1_;
  std::vector<uint8_t> rates_fc2_;
  std::vector<MoeActivation> activations_;
};

// Not thread-safe.
class QsrtWorkload : public RoutedWorkload {
 public:
  // Fills the weights: random words, modes and activations, scales that keep
  // activations of order one. All four pairs of modes of the two products occur
  // among the first four experts. The first 128 input scales of gate and up are
  // equal, 1 or -1, for one-term draws.
  QsrtWorkload(const RequestGeometry& geometry, uint64_t seed);

 private:
  double OneTerm(const std::vector<int64_t>& ids, uint32_t token,
                 int64_t channel) const override;
  std::vector<double> Evaluate(DrawKind kind, uint32_t draw,
                               const std::vector<int64_t>& rows, int threads,
                               ReferenceMode mode) const override;
};

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_QSRT_WORKLOAD_H_
