// RoutedTokens: seeded tokens of ops that route them to experts, whatever their
// weights are.

#ifndef KILN_TEMPLATES_FUSED_MOE_ROUTED_TOKENS_H_
#define KILN_TEMPLATES_FUSED_MOE_ROUTED_TOKENS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "compiler/spec/request.h"
#include "templates/op_workload.h"

namespace kiln {

// Thread-safe.
class RoutedTokens {
 public:
  RoutedTokens(const RequestGeometry& geometry, uint64_t seed)
      : geometry_(geometry), seed_(seed) {}

  // Bytes of the slots of those names, as fused_moe has them.
  struct Tokens {
    std::string x;
    std::string topk_ids;
    std::string topk_weights;
  };

  // A channel of x in a one-term draw; of the token's ids one is active.
  using OneTermValue = std::function<double(const std::vector<int64_t>& ids,
                                            uint32_t token, int64_t channel)>;

  // Tokens 0 .. tokens-1.
  Tokens Make(DrawKind kind, uint32_t draw, uint32_t tokens,
              const OneTermValue& one_term) const;

  // Distinct active experts among tokens 0 .. tokens-1.
  int64_t ActiveExperts(DrawKind kind, uint32_t draw, uint32_t tokens) const;

 private:
  // Ids of one token; inactive ones as they are stored.
  std::vector<int64_t> RoutesOf(DrawKind kind, uint32_t draw,
                                uint32_t token) const;
  void AppendToken(DrawKind kind, uint32_t draw, uint32_t token,
                   const OneTermValue& one_term, Tokens* out) const;

  RequestGeometry geometry_;
  uint64_t seed_;
};

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_ROUTED_TOKENS_H_
