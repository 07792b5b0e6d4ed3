// LinearWorkload: seeded inputs of one linear request and the answers to them.
// LinearContract: what others need to know of the op.

#ifndef KILN_TEMPLATES_LINEAR_WORKLOAD_H_
#define KILN_TEMPLATES_LINEAR_WORKLOAD_H_

#include <cstdint>
#include <string>
#include <vector>

#include "compiler/spec/buffer_fill.h"
#include "compiler/spec/request.h"
#include "templates/linear/op.h"
#include "templates/op_contract.h"
#include "templates/op_workload.h"

namespace kiln {

// The slots' buffers with what golden replay puts into them: any trellis words,
// numbers of the size that keeps results of order one.
std::vector<BufferFill> LinearBuffers(const RequestGeometry& geometry);

// Of every geometry of the op.
const OpContract& LinearContract();

// Not thread-safe.
class LinearWorkload : public OpWorkload {
 public:
  // Fills the weights, scales and bias: uniformly random trellis words (every
  // payload is valid), numbers that keep results of order one. The first 128
  // input scales are 1 or -1, for one-term draws.
  LinearWorkload(const RequestGeometry& geometry, uint64_t seed);

  absl::string_view Constant(size_t slot) const override;
  // The one slot is that of x.
  std::vector<std::string> TokenInputs(DrawKind kind, uint32_t draw,
                                       uint32_t tokens) const override;

  int64_t ActiveExperts(DrawKind, uint32_t, uint32_t) const override {
    return 1;
  }

 private:
  absl::string_view ConstantOf(LinearParam param) const {
    return Constant(LinearSlotOf(geometry(), param));
  }

  // Channel of x in a one-term draw.
  double OneTermValue(uint32_t token, int64_t channel) const;
  void AppendToken(DrawKind kind, uint32_t draw, uint32_t token,
                   std::string* x) const;
  std::vector<double> Evaluate(DrawKind kind, uint32_t draw,
                               const std::vector<int64_t>& rows, int threads,
                               ReferenceMode mode) const override;

  uint64_t seed_;
  std::vector<std::string> constants_;  // by slot; empty where per-token
};

}  // namespace kiln

#endif  // KILN_TEMPLATES_LINEAR_WORKLOAD_H_
