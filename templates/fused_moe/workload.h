// FusedMoeWorkload: seeded inputs of one fused_moe request and the answers to
// them. The racer, the verifier, `kiln run --check` and the tests all use it.
//
// A token's content depends on (seed, routing, draw, token index) alone, not on
// how many tokens a call has. So the expected row of a token is computed once
// and serves every m, every interval and every candidate.

#ifndef KILN_TEMPLATES_FUSED_MOE_WORKLOAD_H_
#define KILN_TEMPLATES_FUSED_MOE_WORKLOAD_H_

#include <compare>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "compiler/spec/buffer_fill.h"
#include "compiler/spec/request.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/reference.h"

namespace kiln {

// The slots' buffers with what golden replay puts into them: any trellis words,
// numbers of the size that keeps activations of order one, ids of all experts.
std::vector<BufferFill> FusedMoeBuffers(const RequestGeometry& geometry);

// How the tokens of a draw are made: which experts they choose, and of what
// numbers they consist. Draws of one kind with other numbers are other inputs.
enum class Routing {
  kUniform,  // top_k distinct experts, uniformly
  // As kUniform, but some routes are inactive (negative or at least E), some
  // experts repeat within a token, and some tokens have no active route.
  kRagged,
  // top_k distinct experts; the r-th most popular one has weight 1 / (r + 1).
  kZipf,
  kHot,  // every token chooses the same top_k experts, in its own order
  // As kHot, with the numbers and routes that trouble kernels: large and small
  // magnitudes, zeros, negative and huge router weights, inactive routes with
  // NaN weights, NaN in a token without a route, and tokens with NaN or
  // infinity whose row must be NaN, and theirs alone.
  kExtreme,
  // One active route per token, whose operands have one channel that is not
  // zero: every sum of the first products has one term, so its rounding, and
  // nearly all that follows, does not depend on an order of summation.
  kOneTerm,
};

// "uniform", "ragged", "zipf", "hot", "extreme", "one-term".
absl::string_view RoutingName(Routing routing);

// Ragged, hot, extreme and one-term draws consist of this many distinct tokens,
// over and over: token t has the content of token t mod kDistinctTokens, so a
// few expected rows answer for all rows of any m. The number is coprime to
// every tile size, so equal tokens lie at different places of their tiles.
inline constexpr uint32_t kDistinctTokens = 13;

// The first token of the draw with the content of `token`.
constexpr uint32_t FirstAlike(Routing routing, uint32_t token) {
  return routing == Routing::kUniform || routing == Routing::kZipf
             ? token
             : token % kDistinctTokens;
}

// Not thread-safe.
class FusedMoeWorkload {
 public:
  // Fills the weights and scales: uniformly random trellis words (every payload
  // is valid) and scales that keep activations of order one. The first 128
  // input scales of gate and up are equal, 1 or -1, for one-term draws.
  FusedMoeWorkload(const RequestGeometry& geometry, uint64_t seed);

  const RequestGeometry& geometry() const { return geometry_; }

  // Host bytes of an input slot that does not depend on the tokens
  // (kWGate .. kDownSvh); empty for the others. Owned by this object.
  absl::string_view Constant(FusedMoeParam param) const;

  // Inputs of tokens 0 .. tokens-1, replacing the contents of the vectors.
  struct Tokens {
    std::string x;
    std::string topk_ids;
    std::string topk_weights;
  };

  Tokens MakeTokens(Routing routing, uint32_t draw, uint32_t tokens) const;

  // Distinct active experts among tokens 0 .. tokens-1.
  int64_t ActiveExperts(Routing routing, uint32_t draw, uint32_t tokens) const;

  // Expected output rows [rows.size()][H]. Rows already computed, and rows
  // alike, are not computed again.
  //   threads: at least 1.
  std::vector<double> Expected(Routing routing, uint32_t draw,
                               std::span<const uint32_t> rows, int threads,
                               ReferenceMode mode = ReferenceMode::kFloat64);

 private:
  struct RowKey {
    Routing routing = Routing::kUniform;
    uint32_t draw = 0;
    ReferenceMode mode = ReferenceMode::kFloat64;
    uint32_t row = 0;
    auto operator<=>(const RowKey&) const = default;
  };

  // Ids of one token; inactive ones as they are stored.
  std::vector<int64_t> RoutesOf(Routing routing, uint32_t draw,
                                uint32_t token) const;
  // Channel of x in a one-term draw; `ids` has one that is active.
  double OneTermValue(const std::vector<int64_t>& ids, uint32_t token,
                      int64_t channel) const;
  void AppendToken(Routing routing, uint32_t draw, uint32_t token,
                   Tokens* out) const;
  // The reference on tokens 0 .. max(rows) of a draw.
  std::vector<double> Evaluate(Routing routing, uint32_t draw,
                               const std::vector<int64_t>& rows, int threads,
                               ReferenceMode mode) const;

  RequestGeometry geometry_;
  uint64_t seed_;
  std::vector<std::string> constants_;  // by slot; empty where per-token
  std::map<RowKey, std::vector<double>> expected_;
};

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_WORKLOAD_H_
