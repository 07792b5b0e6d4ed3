// RoutedWorkload and RoutedContract: what the requests of fused_moe share
// whatever the format of their weights is.

#ifndef KILN_TEMPLATES_FUSED_MOE_ROUTED_WORKLOAD_H_
#define KILN_TEMPLATES_FUSED_MOE_ROUTED_WORKLOAD_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "compiler/spec/buffer_fill.h"
#include "compiler/spec/request.h"
#include "templates/fused_moe/routed_tokens.h"
#include "templates/op_contract.h"
#include "templates/op_workload.h"

namespace kiln {

// Slots 0, 1 and 2 are x, topk_ids and topk_weights. Not thread-safe.
class RoutedWorkload : public OpWorkload {
 public:
  absl::string_view Constant(size_t slot) const override {
    return constants_[slot];
  }

  std::vector<std::string> TokenInputs(DrawKind kind, uint32_t draw,
                                       uint32_t tokens) const override;

  int64_t ActiveExperts(DrawKind kind, uint32_t draw,
                        uint32_t tokens) const override {
    return tokens_.ActiveExperts(kind, draw, tokens);
  }

 protected:
  // slots: of the parameter block.
  RoutedWorkload(const RequestGeometry& geometry, uint64_t seed, size_t slots)
      : OpWorkload(geometry, geometry.hidden),
        constants_(slots),
        tokens_(geometry, seed) {}

  // See RoutedTokens::OneTermValue.
  virtual double OneTerm(const std::vector<int64_t>& ids, uint32_t token,
                         int64_t channel) const = 0;

  // TokenInputs by name.
  RoutedTokens::Tokens MakeTokens(DrawKind kind, uint32_t draw,
                                  uint32_t tokens) const;

  // All input slots of tokens 0 .. tokens-1, the constant ones too.
  //   inputs: TokenInputs of them; borrowed.
  std::vector<const void*> Slots(const std::vector<std::string>& inputs) const;

  // By slot; empty where per-token, and for the output. The constructor of a
  // format fills them.
  std::vector<std::string> constants_;

 private:
  RoutedTokens tokens_;
};

// Of one format. Tiles are those of fused_moe's routes.
class RoutedContract : public OpContract {
 public:
  struct Functions {
    std::vector<ParamDecl> (*params)(const RequestGeometry& geometry);
    std::vector<BufferFill> (*buffers)(const RequestGeometry& geometry);
    // Matrices and scale_bytes alone; the rest is the same for all formats.
    OpWork (*work)(const RequestGeometry& geometry);
    std::unique_ptr<OpWorkload> (*workload)(const RequestGeometry& geometry,
                                            uint64_t seed);
  };

  explicit RoutedContract(const Functions& functions) : functions_(functions) {}

  std::vector<ParamDecl> Params(
      const RequestGeometry& geometry) const override {
    return functions_.params(geometry);
  }

  std::vector<BufferFill> Buffers(
      const RequestGeometry& geometry) const override {
    return functions_.buffers(geometry);
  }

  OpWork Work(const RequestGeometry& geometry) const override;
  double TilesExpected(const RequestGeometry& geometry, uint32_t tile,
                       uint32_t m) const override;
  uint64_t TilesMax(const RequestGeometry& geometry, uint32_t tile,
                    uint32_t m) const override;

  std::unique_ptr<OpWorkload> MakeWorkload(const RequestGeometry& geometry,
                                           uint64_t seed) const override {
    return functions_.workload(geometry, seed);
  }

 private:
  const Functions functions_;
};

// Functions::workload of a class.
template <typename Workload>
std::unique_ptr<OpWorkload> MakeWorkloadOf(const RequestGeometry& geometry,
                                           uint64_t seed) {
  return std::make_unique<Workload>(geometry, seed);
}

}  // namespace kiln

#endif  // KILN_TEMPLATES_FUSED_MOE_ROUTED_WORKLOAD_H_
