// Request: one op of one model with its geometry, formats and capacities, after
// the manifest was read. Interval: the token counts that one plan answers.

#ifndef KILN_COMPILER_SPEC_REQUEST_H_
#define KILN_COMPILER_SPEC_REQUEST_H_

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "compiler/base/digest.h"
#include "compiler/spec/dtype.h"

namespace kiln {

enum class Op { kFusedMoe, kLinear };
enum class Activation { kSilu, kSitu, kPerExpert };
enum class WeightFormat { kExl3, kTrellisMx, kQsrt };
enum class Codebook { k3Inst, kMcg, kMul1 };
enum class Recipe { kW4A16, kW4A8 };
// Which two kinds of pairs the experts of a qsrt layer have. PAB: the low 128
// channels have A bits per weight, the high 128 B.
enum class PairKinds { kP24P33, kP33P43 };
// What surrounds the products of TrellisMX weights.
enum class MxBoundary {
  kCoupled,   // Hadamard transforms of 512 and 128, with scales and signs
  kIdentity,  // nothing
};
// What an 8-bit activation has beside its E4M3 number.
enum class Remainder {
  kNone,
  kRp2,  // a second one for what the first left of it, with scales of its own
};

// The spellings of the manifest: "fused_moe", "linear", "silu", "situ",
// "per_expert", "exl3", "trellis_mx", "qsrt", "3inst", "mcg", "mul1", "w4a16",
// "w4a8", "p24_p33", "p33_p43", "coupled", "identity", "none", "rp2".
absl::string_view OpName(Op op);
absl::string_view ActivationName(Activation activation);
absl::string_view WeightFormatName(WeightFormat format);
absl::string_view CodebookName(Codebook codebook);
absl::string_view RecipeName(Recipe recipe);
absl::string_view PairKindsName(PairKinds pairs);
absl::string_view MxBoundaryName(MxBoundary boundary);
absl::string_view RemainderName(Remainder remainder);

// Bits per weight of the three projections, each 1..8.
struct Bits {
  int gate = 0;
  int up = 0;
  int down = 0;
  auto operator<=>(const Bits&) const = default;
};

struct Weights {
  WeightFormat format = WeightFormat::kExl3;
  Codebook codebook = Codebook::kMcg;  // of exl3
  Bits bits;  // of trellis_mx: equal, each 2..5; of qsrt: 0
  // Of exl3 and qsrt: true when gate_suh, up_suh and down_svh are one [1][H]
  // row for all experts; false when each expert has its own ([E][H]).
  bool shared_scales = false;
  auto operator<=>(const Weights&) const = default;
};

// The matrix of a request for linear: y = x W + bias, W [in][out].
struct LinearShape {
  int64_t in_features = 0;   // multiple of 128
  int64_t out_features = 0;  // multiple of 128
  int bits = 0;              // per weight, 1..8
  bool bias = false;         // whether there is one
  auto operator<=>(const LinearShape&) const = default;
};

// What a request for fused_moe over TrellisMX weights (NPK-1 streams) has
// beside the rest.
struct TrellisMx {
  // Gate is at most this, up within plus and minus it: a decimal or "inf", as
  // in a sidecar.
  std::string limit;
  // Up to this many tokens activations are binary16, above it MXFP8. 0: always
  // MXFP8. No interval has tokens on both sides.
  uint32_t smallm_max_tokens = 0;
  // Up to this many tokens, at most 16, the direct arm: MXFP8 activations with
  // `remainder`, above it without. 0: no such arm, and no remainder. Beside it
  // smallm_max_tokens is 0. No interval has tokens on both sides.
  uint32_t direct_max_tokens = 0;
  Remainder remainder = Remainder::kNone;
  // With kIdentity the op has no vectors, and hidden is a multiple of 128.
  MxBoundary boundary = MxBoundary::kCoupled;
  auto operator<=>(const TrellisMx&) const = default;
};

// The same over QSRT weights: experts of the codebook sqg_e4m3, each one pair
// of records of 128 intermediate channels, whose rates each expert has of its
// own.
struct Qsrt {
  PairKinds pairs = PairKinds::kP24P33;
  // Of w4a8: up to this many tokens activations are MXFP8, above it binary16.
  // No interval has tokens on both sides. 0 for w4a16.
  uint32_t decode_max_tokens = 0;
  auto operator<=>(const Qsrt&) const = default;
};

// True for a limit of TrellisMx: "inf", or a decimal of at least 0.015625
// without exponent or needless zeros.
bool IsClampLimit(absl::string_view text);

// Token counts (previous capacity, capacity], both ends inclusive here.
struct Interval {
  uint32_t m_min = 1;
  uint32_t m_max = 1;  // the capacity
  auto operator<=>(const Interval&) const = default;
};

// What identifies a request: everything but its name, its layers and its
// capacities. Two requests with equal geometry share plans. What belongs to
// another op has no meaning: sizes of it are 0, so that code that knows one op
// only finds nothing to misread.
struct RequestGeometry {
  Op op = Op::kFusedMoe;
  // Of fused_moe.
  int64_t hidden = 0;        // H, multiple of 128; of 512 for coupled ones
  int64_t intermediate = 0;  // I, multiple of 128; 256 for qsrt
  int64_t experts = 0;       // E
  int64_t top_k = 0;
  Activation activation = Activation::kSilu;
  // Of every op, but for id_dtype; of the weights, linear has format and
  // codebook alone.
  DType io_dtype = DType::kBf16;  // of x; the output is f32
  DType id_dtype = DType::kI32;   // of topk_ids
  Weights weights;
  Recipe recipe = Recipe::kW4A16;
  // Only candidates with bit-identical repeats are legal. False also admits
  // sums whose order differs between repeats.
  bool deterministic = true;
  LinearShape linear;  // of linear
  TrellisMx mx;        // of fused_moe over weights of trellis_mx
  Qsrt qsrt;           // of fused_moe over weights of qsrt

  auto operator<=>(const RequestGeometry&) const = default;

  // Adds every field of the op to a key. Shared by all digests that contain a
  // request.
  void Encode(CanonicalEncoder* encoder) const;
  // One line for people, for example
  // "fused_moe H2048 I768 E128 k8 exl3-mcg K4 silu w4a16 bf16 i32",
  // "fused_moe H4096 I512 E288 k8 trellis_mx K4 silu limit 10 w4a8 small-m 16
  // bf16 i32" or, with the direct arm, "direct 16 rp2" for "small-m 16", and
  // with the identity boundary "K4 identity" for "K4",
  // "fused_moe H3584 I256 E896 k16 qsrt p24_p33 situ w4a8 decode 8 bf16 i32
  // shared scales" or "linear [4096, 1024] exl3-mcg K4 w4a16 bf16 bias".
  std::string ToString() const;
};

struct Request {
  std::string name;
  RequestGeometry geometry;
  // Ids of the layers it serves, ascending; from a count n: 0..n-1.
  std::vector<int64_t> layers;
  // Ascending, distinct, each at least 1.
  std::vector<uint32_t> capacities;

  // One per capacity, gap-free from 1.
  std::vector<Interval> Intervals() const;
};

}  // namespace kiln

#endif  // KILN_COMPILER_SPEC_REQUEST_H_
