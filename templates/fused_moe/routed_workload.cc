#include "templates/fused_moe/routed_workload.h"

#include <utility>

#include "templates/fused_moe/op.h"

namespace kiln {

RoutedTokens::Tokens RoutedWorkload::MakeTokens(DrawKind kind, uint32_t draw,
                                                uint32_t tokens) const {
  return tokens_.Make(
      kind, draw, tokens,
      [this](const std::vector<int64_t>& ids, uint32_t token, int64_t channel) {
        return OneTerm(ids, token, channel);
      });
}

std::vector<std::string> RoutedWorkload::TokenInputs(DrawKind kind,
                                                     uint32_t draw,
                                                     uint32_t tokens) const {
  RoutedTokens::Tokens made = MakeTokens(kind, draw, tokens);
  std::vector<std::string> slots(constants_.size());
  slots[0] = std::move(made.x);
  slots[1] = std::move(made.topk_ids);
  slots[2] = std::move(made.topk_weights);
  return slots;
}

std::vector<const void*> RoutedWorkload::Slots(
    const std::vector<std::string>& inputs) const {
  std::vector<const void*> slots;
  for (size_t i = 0; i < inputs.size(); ++i) {
    slots.push_back(inputs[i].empty() ? constants_[i].data()
                                      : inputs[i].data());
  }
  return slots;
}

OpWork RoutedContract::Work(const RequestGeometry& geometry) const {
  OpWork work = functions_.work(geometry);
  // x in 16 bits, the result in 32.
  work.token_bytes = static_cast<double>(geometry.hidden) * (2 + 4);
  work.routes = static_cast<double>(geometry.top_k);
  return work;
}

double RoutedContract::TilesExpected(const RequestGeometry& geometry,
                                     uint32_t tile, uint32_t m) const {
  return FusedMoeTilesExpected(geometry, tile, m);
}

uint64_t RoutedContract::TilesMax(const RequestGeometry& geometry,
                                  uint32_t tile, uint32_t m) const {
  return FusedMoeTilesMax(geometry, tile, m);
}

}  // namespace kiln
