// OpWorkload: seeded inputs of one request and the answers to them, for those
// who check or time an op without knowing it. The racer, the verifier, `kiln
// run --check` and the tests all use it.
//
// A token's content depends on (seed, kind, draw, token index) alone, not on
// how many tokens a call has. So the expected row of a token is computed once
// and serves every m, every interval and every candidate.

#ifndef KILN_TEMPLATES_OP_WORKLOAD_H_
#define KILN_TEMPLATES_OP_WORKLOAD_H_

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "compiler/spec/request.h"
#include "templates/fused_moe/reference.h"

namespace kiln {

// How the tokens of a draw are made: which experts they choose, and of what
// numbers they consist. Draws of one kind with other numbers are other inputs.
// An op without experts has no routes: its uniform and zipf draws are alike but
// for their numbers, and so are its ragged and hot ones.
enum class DrawKind {
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
absl::string_view DrawKindName(DrawKind kind);

// Ragged, hot, extreme and one-term draws consist of this many distinct tokens,
// over and over: token t has the content of token t mod kDistinctTokens, so a
// few expected rows answer for all rows of any m. The number is coprime to
// every tile size, so equal tokens lie at different places of their tiles.
inline constexpr uint32_t kDistinctTokens = 13;

// The first token of the draw with the content of `token`.
constexpr uint32_t FirstAlike(DrawKind kind, uint32_t token) {
  return kind == DrawKind::kUniform || kind == DrawKind::kZipf
             ? token
             : token % kDistinctTokens;
}

// The slots are those of the request's OpContract. Not thread-safe.
class OpWorkload {
 public:
  virtual ~OpWorkload() = default;
  OpWorkload(const OpWorkload&) = delete;
  OpWorkload& operator=(const OpWorkload&) = delete;

  const RequestGeometry& geometry() const { return geometry_; }

  // f32 numbers of an output row.
  size_t row_width() const { return row_width_; }

  // Host bytes of an input slot that does not depend on the tokens; empty for
  // the others. Owned by this object.
  virtual absl::string_view Constant(size_t slot) const = 0;

  // Host bytes by slot for tokens 0 .. tokens-1; empty where Constant is not,
  // and for the output.
  virtual std::vector<std::string> TokenInputs(DrawKind kind, uint32_t draw,
                                               uint32_t tokens) const = 0;

  // Distinct active experts among tokens 0 .. tokens-1; 1 for an op without
  // experts.
  virtual int64_t ActiveExperts(DrawKind kind, uint32_t draw,
                                uint32_t tokens) const = 0;

  // Expected output rows [rows.size()][row_width]. Rows already computed, and
  // rows alike, are not computed again.
  //   threads: at least 1.
  std::vector<double> Expected(DrawKind kind, uint32_t draw,
                               std::span<const uint32_t> rows, int threads,
                               ReferenceMode mode = ReferenceMode::kFloat64);

 protected:
  OpWorkload(const RequestGeometry& geometry, int64_t row_width)
      : geometry_(geometry), row_width_(static_cast<size_t>(row_width)) {}

  // The reference's rows [rows.size()][row_width] of a draw.
  virtual std::vector<double> Evaluate(DrawKind kind, uint32_t draw,
                                       const std::vector<int64_t>& rows,
                                       int threads,
                                       ReferenceMode mode) const = 0;

 private:
  struct RowKey {
    DrawKind kind = DrawKind::kUniform;
    uint32_t draw = 0;
    ReferenceMode mode = ReferenceMode::kFloat64;
    uint32_t row = 0;
    auto operator<=>(const RowKey&) const = default;
  };

  RequestGeometry geometry_;
  size_t row_width_;
  std::map<RowKey, std::vector<double>> expected_;
};

}  // namespace kiln

#endif  // KILN_TEMPLATES_OP_WORKLOAD_H_
