#include "templates/fused_moe/mx_reference.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/strings/numbers.h"
#include "compiler/base/check.h"
#include "device/activation.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "device/trellis.h"
#include "templates/formats/mxfp8.h"
#include "templates/formats/npk_law.h"
#include "templates/fused_moe/parallel_for.h"

namespace kiln {
namespace {

using Reals = std::vector<double>;

constexpr size_t kInner = 128;
constexpr size_t kOuter = 512;
constexpr size_t kAtom = 32;
constexpr size_t kScaleChannels = 32;

double Half(uint16_t bits) { return kd::f16_to_f32(bits); }

bool IsStaged(ReferenceMode mode) { return mode != ReferenceMode::kFloat64; }

bool IsSequential(ReferenceMode mode) {
  return mode == ReferenceMode::kSequential ||
         mode == ReferenceMode::kSequentialW4A8 ||
         mode == ReferenceMode::kSequentialW4A8Rp2;
}

bool HasRemainder(ReferenceMode mode) {
  return mode == ReferenceMode::kStagedW4A8Rp2 ||
         mode == ReferenceMode::kSequentialW4A8Rp2;
}

bool IsQuantised(ReferenceMode mode) {
  return mode == ReferenceMode::kStagedW4A8 ||
         mode == ReferenceMode::kSequentialW4A8 || HasRemainder(mode);
}

double Narrow(double value, ReferenceMode mode) {
  return IsStaged(mode) ? static_cast<float>(value) : value;
}

template <int K>
Reals Decode(const uint8_t* stream, size_t out, size_t in) {
  Reals values(out * in);
  constexpr size_t kTile = 256;
  for (size_t tile = 0; tile < out * in / kTile; ++tile) {
    uint32_t ring[8 * K];
    std::memcpy(ring, stream + tile * sizeof(ring), sizeof(ring));
    const size_t row = tile / (out / 16) * 16;
    const size_t column = tile % (out / 16) * 16;
    for (uint32_t lane = 0; lane < 32; ++lane) {
      uint32_t states[8];
      kd::NpkLaneStates<K, kd::kNpkWindow<K>>(ring, lane, states);
      for (uint32_t j = 0; j < 8; ++j) {
        const uint32_t p = 8 * lane + j;
        values[(column + kd::PositionColumn(p)) * in + row +
               kd::PositionRow(p)] = E4m3Value(kd::NpkByte(states[j]));
      }
    }
  }
  return values;
}

void Block128(ReferenceMode mode, double* at) {
  if (IsStaged(mode)) {
    float block[kInner];
    for (size_t i = 0; i < kInner; ++i) block[i] = static_cast<float>(at[i]);
    kd::Hadamard128(block);
    std::copy_n(block, kInner, at);
    return;
  }
  for (size_t step = 1; step < kInner; step *= 2) {
    for (size_t i = 0; i < kInner; ++i) {
      if ((i & step) != 0) continue;
      const double sum = at[i] + at[i + step];
      at[i + step] = at[i] - at[i + step];
      at[i] = sum;
    }
  }
  for (size_t i = 0; i < kInner; ++i) {
    at[i] /= std::sqrt(static_cast<double>(kInner));
  }
}

void Inner(ReferenceMode mode, std::span<double> values) {
  for (size_t i = 0; i < values.size(); i += kInner) {
    Block128(mode, values.data() + i);
  }
}

// H512 = H4 (x) H128: each quarter, then a butterfly over the four.
void Outer(ReferenceMode mode, std::span<double> values) {
  Inner(mode, values);
  for (size_t base = 0; base < values.size(); base += kOuter) {
    for (size_t i = base; i < base + kInner; ++i) {
      double* v = values.data() + i;
      const double s0 = Narrow(v[0] + v[kInner], mode);
      const double d0 = Narrow(v[0] - v[kInner], mode);
      const double s1 = Narrow(v[2 * kInner] + v[3 * kInner], mode);
      const double d1 = Narrow(v[2 * kInner] - v[3 * kInner], mode);
      v[0] = Narrow(s0 + s1, mode) / 2;
      v[kInner] = Narrow(d0 + d1, mode) / 2;
      v[2 * kInner] = Narrow(s0 - s1, mode) / 2;
      v[3 * kInner] = Narrow(d0 - d1, mode) / 2;
    }
  }
}

void Scale(ReferenceMode mode, const std::vector<uint16_t>& table, size_t first,
           Reals* values) {
  for (size_t i = 0; i < values->size(); ++i) {
    (*values)[i] = Narrow((*values)[i] * Half(table[first + i]), mode);
  }
}

// The values of MXFP8 next to these.
Reals RoundToMxfp8(const Reals& values) {
  Reals out(values.size());
  for (size_t at = 0; at < values.size(); at += kMxfp8Block) {
    std::array<float, kMxfp8Block> block;
    for (size_t i = 0; i < kMxfp8Block; ++i) {
      block[i] = static_cast<float>(values[at + i]);
    }
    uint8_t scale = 0;
    std::array<uint8_t, kMxfp8Block> payload;
    QuantizeMxfp8(block, &scale, payload);
    for (size_t i = 0; i < kMxfp8Block; ++i) {
      out[at + i] = Mxfp8Value(scale, payload[i]);
    }
  }
  return out;
}

// What a product reads: the sum of both terms; `low` is empty without a
// remainder.
struct Operand {
  Reals high;
  Reals low;
};

Operand RoundOperand(ReferenceMode mode, Reals values) {
  Operand out;
  if (!IsStaged(mode)) {
    out.high = std::move(values);
  } else if (!IsQuantised(mode)) {
    for (double& value : values) {
      value = kd::round_f16(static_cast<float>(value));
    }
    out.high = std::move(values);
  } else {
    out.high = RoundToMxfp8(values);
    if (HasRemainder(mode)) {
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = Narrow(values[i] - out.high[i], mode);
      }
      out.low = RoundToMxfp8(values);
    }
  }
  return out;
}

// Blocks of 32 input channels, each from zero, then added. Scales are powers of
// two, so it does not matter that they are in the factors already.
float SequentialSum(const double* w, const Reals& x) {
  float sum = 0;
  for (size_t at = 0; at < x.size(); at += kScaleChannels) {
    float fold = 0;
    for (size_t k = at; k < at + kScaleChannels; ++k) {
      fold = std::fma(static_cast<float>(w[k]), static_cast<float>(x[k]), fold);
    }
    sum += fold;
  }
  return sum;
}

double Sum(const double* w, const Reals& x) {
  double sum = 0;
  for (size_t k = 0; k < x.size(); ++k) sum += w[k] * x[k];
  return sum;
}

// w: [out][in].
Reals Product(ReferenceMode mode, const Reals& w, const Operand& x) {
  const size_t in = x.high.size();
  Reals y(w.size() / in);
  for (size_t n = 0; n < y.size(); ++n) {
    const double* row = w.data() + n * in;
    if (IsSequential(mode)) {
      float sum = SequentialSum(row, x.high);
      if (!x.low.empty()) sum += SequentialSum(row, x.low);
      y[n] = kd::round_f16(sum);
      continue;
    }
    const double sum = Sum(row, x.high) + Sum(row, x.low);
    y[n] = IsStaged(mode) ? kd::round_f16(static_cast<float>(sum)) : sum;
  }
  return y;
}

// The rows of FC1 interleave atoms of gate (slot 0) and up (slot 1).
size_t SlotOf(size_t r) { return r / kAtom % 2; }

size_t SlotRowOf(size_t r) { return r / (2 * kAtom) * kAtom + r % kAtom; }

// ---- prepared tensors ------------------------------------------------------

std::vector<uint16_t> Halves(const void* from, size_t count) {
  std::vector<uint16_t> out(count);
  std::memcpy(out.data(), from, 2 * count);
  return out;
}

// values[row][k] *= the scale in the words of one expert, whose rows begin at
// `first_row` of them.
void ApplyScales(const uint32_t* words, size_t first_row, size_t in,
                 Reals* values) {
  for (size_t at = 0; at < values->size(); ++at) {
    const size_t row = first_row + at / in;
    const size_t k = at % in;
    const uint32_t word =
        words[(row / 256 * (in / 128) + k / 128) * 256 + row % 256];
    const auto byte =
        static_cast<uint8_t>(word >> (8 * (k % 128 / kScaleChannels)));
    (*values)[at] *= Ue8m0Value(byte);
  }
}

class Layer {
 public:
  explicit Layer(const MxProblem& problem)
      : p_(problem),
        hidden_(static_cast<size_t>(problem.geometry.hidden)),
        inter_(static_cast<size_t>(problem.geometry.intermediate)),
        experts_(static_cast<size_t>(problem.geometry.experts)),
        top_k_(static_cast<size_t>(problem.geometry.top_k)) {}

  MxExpert ExpertAt(size_t e, ReferenceMode mode) const {
    const int bits = p_.geometry.weights.bits.gate;
    const size_t stream = hidden_ * inter_ / 8 * static_cast<size_t>(bits);
    const size_t scales = hidden_ * inter_ / 128;  // words of one matrix
    const auto* w13 = static_cast<const uint8_t*>(p_.slot(MxParam::kW13));
    const auto* w2 = static_cast<const uint8_t*>(p_.slot(MxParam::kW2));
    const auto* s13 = static_cast<const uint32_t*>(p_.slot(MxParam::kW13Scale));
    const auto* s2 = static_cast<const uint32_t*>(p_.slot(MxParam::kW2Scale));
    MxExpert::Weights w;
    w.gate = DecodeNpkStream(w13 + e * stream, bits, inter_, hidden_);
    w.up =
        DecodeNpkStream(w13 + (experts_ + e) * stream, bits, inter_, hidden_);
    w.down = DecodeNpkStream(w2 + e * stream, bits, hidden_, inter_);
    ApplyScales(s13 + e * 2 * scales, 0, hidden_, &w.gate);
    ApplyScales(s13 + e * 2 * scales, inter_, hidden_, &w.up);
    // Panels of 256 rows.
    const size_t scales2 = (hidden_ + 255) / 256 * 256 * inter_ / 128;
    ApplyScales(s2 + e * scales2, 0, inter_, &w.down);
    if (coupled()) {
      w.suh = Halves(p_.slot(MxParam::kGateUpSuh), hidden_);
      const auto* rotations =
          static_cast<const uint16_t*>(p_.slot(MxParam::kRotations)) +
          e * 6 * inter_;
      w.inner = Halves(rotations, 3 * inter_);
      w.signs = Halves(rotations + 3 * inter_, 3 * inter_);
      w.svh = Halves(p_.slot(MxParam::kDownSvh), hidden_);
    }
    double limit = std::numeric_limits<double>::infinity();
    if (p_.geometry.mx.limit != "inf") {
      KILN_CHECK(absl::SimpleAtod(p_.geometry.mx.limit, &limit));
    }
    return MxExpert(std::move(w), limit, mode);
  }

  // The expert of a route, or -1.
  int64_t RouteExpert(size_t route) const {
    const void* ids = p_.slot(MxParam::kTopkIds);
    const int64_t id = p_.geometry.id_dtype == DType::kI64
                           ? static_cast<const int64_t*>(ids)[route]
                           : static_cast<const int32_t*>(ids)[route];
    return id >= 0 && id < p_.geometry.experts ? id : -1;
  }

  Reals Row(size_t token, ReferenceMode mode) const {
    const auto* x = static_cast<const uint16_t*>(p_.slot(MxParam::kX));
    Reals a(hidden_);
    for (size_t c = 0; c < hidden_; ++c) {
      const uint16_t bits = x[token * hidden_ + c];
      a[c] =
          MxInput(p_.geometry.io_dtype == DType::kBf16 ? kd::bf16_to_f32(bits)
                                                       : kd::f16_to_f32(bits),
                  mode);
    }
    return a;
  }

  double RouteWeight(size_t route) const {
    return static_cast<const float*>(p_.slot(MxParam::kTopkWeights))[route];
  }

  size_t hidden() const { return hidden_; }

  size_t experts() const { return experts_; }

  size_t top_k() const { return top_k_; }

  bool coupled() const {
    return p_.geometry.mx.boundary == MxBoundary::kCoupled;
  }

 private:
  const MxProblem& p_;
  size_t hidden_, inter_, experts_, top_k_;
};

}  // namespace

std::vector<double> DecodeNpkStream(const uint8_t* stream, int bits, size_t out,
                                    size_t in) {
  switch (bits) {
    case 2:
      return Decode<2>(stream, out, in);
    case 3:
      return Decode<3>(stream, out, in);
    case 4:
      return Decode<4>(stream, out, in);
    case 5:
      return Decode<5>(stream, out, in);
    default:
      KILN_UNREACHABLE();
  }
}

MxExpert::MxExpert(Weights weights, double limit, ReferenceMode mode)
    : w_(std::move(weights)), limit_(limit), mode_(mode) {
  KILN_CHECK(mode == ReferenceMode::kFloat64 ||
             mode == ReferenceMode::kStaged || IsSequential(mode) ||
             IsQuantised(mode));
}

std::vector<double> MxExpert::Run(std::vector<double> a) const {
  const bool coupled = !w_.suh.empty();
  if (coupled) {
    Outer(mode_, a);
    Scale(mode_, w_.suh, 0, &a);
    Inner(mode_, a);
  }
  const Operand x = RoundOperand(mode_, std::move(a));
  const Operand middle = RoundOperand(
      mode_, Boundary(Product(mode_, w_.gate, x), Product(mode_, w_.up, x)));
  Reals d = Product(mode_, w_.down, middle);
  if (coupled) {
    Inner(mode_, d);
    Scale(mode_, w_.svh, 0, &d);
  }
  return d;
}

std::vector<double> MxExpert::Boundary(const Reals& gate,
                                       const Reals& up) const {
  const size_t inter = gate.size();
  const auto activate = [this](double g, double u) {
    g = std::min(g, limit_);
    u = std::clamp(u, -limit_, limit_);
    if (IsSequential(mode_)) {
      return double{kd::Silu(static_cast<float>(g)) * static_cast<float>(u)};
    }
    return Narrow(Narrow(g / (1 + std::exp(-g)), mode_) * u, mode_);
  };
  Reals middle(inter);
  if (w_.suh.empty()) {
    for (size_t i = 0; i < inter; ++i) middle[i] = activate(gate[i], up[i]);
    return middle;
  }
  Reals r(2 * inter);
  for (size_t i = 0; i < r.size(); ++i) {
    r[i] = (SlotOf(i) == 0 ? gate : up)[SlotRowOf(i)];
  }
  Inner(mode_, r);
  for (size_t i = 0; i < r.size(); ++i) {
    const size_t at = SlotOf(i) * inter + SlotRowOf(i);
    r[i] = Narrow(r[i] * Half(w_.inner[at]), mode_);
  }
  Inner(mode_, r);
  Scale(mode_, w_.signs, 0, &r);
  for (size_t i = 0; i < inter; ++i) {
    middle[i] = activate(r[2 * i], r[2 * i + 1]);
  }
  Scale(mode_, w_.signs, 2 * inter, &middle);
  Inner(mode_, middle);
  Scale(mode_, w_.inner, 2 * inter, &middle);
  Inner(mode_, middle);
  return middle;
}

double MxInput(double x, ReferenceMode mode) {
  return IsStaged(mode) ? kd::round_f16(static_cast<float>(x)) : x;
}

void MxAddRoute(double weight, std::span<const double> route,
                ReferenceMode mode, std::span<double> sum) {
  for (size_t c = 0; c < sum.size(); ++c) {
    if (IsSequential(mode)) {
      sum[c] = std::fma(static_cast<float>(route[c]),
                        static_cast<float>(weight), static_cast<float>(sum[c]));
      continue;
    }
    sum[c] = Narrow(sum[c] + weight * route[c], mode);
  }
}

void MxFinish(ReferenceMode mode, std::span<double> sum) { Outer(mode, sum); }

void MxReferenceRows(const MxProblem& problem, std::span<const int64_t> rows,
                     ReferenceMode mode, double* out, int threads) {
  const Layer layer(problem);
  for (const int64_t row : rows) {
    KILN_CHECK(row >= 0 && row < problem.tokens);
  }
  // Each expert is decoded once, its routes are kept until they are summed in
  // the router's order.
  const size_t top_k = layer.top_k();
  std::vector<Reals> routes(rows.size() * top_k);
  std::vector<std::vector<size_t>> of_expert(layer.experts());
  const auto route_of = [&](size_t i) {
    return static_cast<size_t>(rows[i / top_k]) * top_k + i % top_k;
  };
  for (size_t i = 0; i < routes.size(); ++i) {
    const int64_t e = layer.RouteExpert(route_of(i));
    if (e >= 0) of_expert[static_cast<size_t>(e)].push_back(i);
  }
  ParallelFor(static_cast<int64_t>(of_expert.size()), threads, [&](int64_t e) {
    const auto index = static_cast<size_t>(e);
    if (of_expert[index].empty()) return;
    const MxExpert expert = layer.ExpertAt(index, mode);
    for (const size_t i : of_expert[index]) {
      routes[i] =
          expert.Run(layer.Row(static_cast<size_t>(rows[i / top_k]), mode));
    }
  });
  for (size_t r = 0; r < rows.size(); ++r) {
    const std::span<double> sum(out + r * layer.hidden(), layer.hidden());
    std::fill(sum.begin(), sum.end(), 0.0);
    for (size_t j = 0; j < top_k; ++j) {
      const Reals& route = routes[r * top_k + j];
      if (route.empty()) continue;
      MxAddRoute(layer.RouteWeight(route_of(r * top_k + j)), route, mode, sum);
    }
    if (layer.coupled()) MxFinish(mode, sum);
  }
}

}  // namespace kiln
