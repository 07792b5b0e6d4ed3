// FusedMoeWorkload: seeded inputs of one fused_moe request and the float64
// answers to them. The racer, `kiln run --check` and the tests all use it.
//
// A token's content depends on (seed, draw, token index) alone, not on how many
// tokens a call has. So the expected row of a token is computed once and serves
// every m, every interval and every candidate.

#ifndef KILN_TEMPLATES_FUSED_MOE_WORKLOAD_H_
#define KILN_TEMPLATES_FUSED_MOE_WORKLOAD_H_

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "compiler/spec/request.h"
#include "templates/fused_moe/op.h"
#include "templates/fused_moe/reference.h"

namespace kiln {

// How routes are drawn. Draws of one kind with other numbers are other inputs.
enum class Routing {
  kUniform,  // top_k distinct experts, uniformly
  // As kUniform, but some routes are inactive (negative or at least E), some
  // experts repeat within a token, and some tokens have no active route.
  kRagged,
};

// Not thread-safe.
class FusedMoeWorkload {
 public:
  // Fills the weights and scales: uniformly random trellis words (every payload
  // is valid) and scales that keep activations of order one.
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

  // Expected output rows [rows.size()][H] in float64. Rows already computed are
  // not computed again.
  //   threads: at least 1.
  std::vector<double> Expected(Routing routing, uint32_t draw,
                               std::span<const uint32_t> rows, int threads);

 private:
  // Ids of one token; inactive ones as they are stored.
  std::vector<int64_t> RoutesOf(Routing routing, uint32_t draw,
                                uint32_t token) const;

  RequestGeometry geometry_;
  uint64_t seed_;
  std::vector<std::string> constants_;  // by slot; empty where per-token
  std::map<std::pair<std::pair<Routing, uint32_t>, uint32_t>,
           std::vector<double>>
      expected_;
};

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_WORKLOAD_H_
