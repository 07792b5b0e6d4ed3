// OpContract: one op as those see it who plan, check, time or freeze it without
// knowing it: its parameter block, its buffers, its work, its seeded inputs.
// A contract belongs to the whole geometry and not to the op alone: recipes and
// weight formats of one op may have parameter blocks of their own.

#ifndef KILN_TEMPLATES_OP_CONTRACT_H_
#define KILN_TEMPLATES_OP_CONTRACT_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "compiler/spec/buffer_fill.h"
#include "compiler/spec/plan.h"
#include "compiler/spec/request.h"
#include "templates/op_workload.h"

namespace kiln {

// A trellis matrix that every row of an expert is multiplied with.
struct OpMatrix {
  uint64_t slot = 0;   // of the parameter block
  double weights = 0;  // of one expert
  int bits = 0;        // per weight
};

// What a call does at least. An op without experts is one expert that every
// token uses.
struct OpWork {
  std::vector<OpMatrix> matrices;
  double scale_bytes = 0;  // of one expert: scale tables, bias
  double token_bytes = 0;  // of one token: x and the output row
  double routes = 1;       // experts per token
  // Every call reads all weights, whatever its tokens are: launches over other
  // tokens find them in the cache, launches over other weights do not.
  bool reads_all_weights = false;
};

// Stateless; all members are pure functions and may be called from any thread.
// They take geometries that ContractOf gives this contract for.
class OpContract {
 public:
  virtual ~OpContract() = default;

  // The slots of the caller's parameter block, in order. One is an output, f32
  // [m][row width], of which every element is written.
  virtual std::vector<ParamDecl> Params(
      const RequestGeometry& geometry) const = 0;

  // By slot: the bytes of its buffer, and what golden replay puts into it: any
  // trellis words, numbers of the size that keeps results of order one.
  virtual std::vector<BufferFill> Buffers(
      const RequestGeometry& geometry) const = 0;

  virtual OpWork Work(const RequestGeometry& geometry) const = 0;

  // Tiles of `tile` rows of one expert that m tokens make: the number that is
  // expected when they choose experts uniformly, and the largest.
  virtual double TilesExpected(const RequestGeometry& geometry, uint32_t tile,
                               uint32_t m) const = 0;
  virtual uint64_t TilesMax(const RequestGeometry& geometry, uint32_t tile,
                            uint32_t m) const = 0;

  // Makes the weights.
  virtual std::unique_ptr<OpWorkload> MakeWorkload(
      const RequestGeometry& geometry, uint64_t seed) const = 0;
};

// Lives for the whole process.
const OpContract& ContractOf(const RequestGeometry& geometry);

}  // namespace kiln

#endif  // KILN_TEMPLATES_OP_CONTRACT_H_
