#include "templates/formats/npk_reference.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "compiler/base/check.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "templates/formats/mxfp8.h"
#include "templates/formats/npk_decode.h"

namespace kiln {
namespace {

using Reals = std::vector<double>;

constexpr size_t kInner = 128;
constexpr size_t kOuter = 512;

double Half(uint16_t bits) { return kd::f16_to_f32(bits); }

// Everything between two roundings of one expert.
class Expert {
 public:
  Expert(const NpkSidecar& sidecar, int64_t expert, ReferenceMode mode)
      : m_(sidecar.metadata()),
        staged_(mode == ReferenceMode::kStaged),
        coupled_(m_.boundary == NpkBoundary::kCoupled),
        gate_(DecodeNpkMatrix(sidecar, NpkMatrix::kGate, expert)),
        up_(DecodeNpkMatrix(sidecar, NpkMatrix::kUp, expert)),
        down_(DecodeNpkMatrix(sidecar, NpkMatrix::kDown, expert)) {
    if (!coupled_) return;
    const auto inter = static_cast<size_t>(m_.intermediate);
    suh_ = NpkHalves(sidecar.tensor(NpkTensor::kGateUpSuh));
    svh_ = NpkHalves(sidecar.tensor(NpkTensor::kDownSvh));
    inner_ = NpkHalves(
        sidecar.tensor(NpkTensor::kInnerScales)
            .subspan(6 * static_cast<size_t>(expert) * inter, 6 * inter));
    signs_ = NpkSigns(
        m_, sidecar.tensor(NpkTensor::kSignDraw)[static_cast<size_t>(expert)]);
  }

  // From a token's row to the expert's, in front of H512.
  Reals Run(Reals a) const {
    const auto inter = static_cast<size_t>(m_.intermediate);
    if (coupled_) {
      Outer(&a);
      Scale(suh_, 0, &a);
      Inner(&a);
    }
    Quantise(&a);
    const Reals gate = Product(gate_, a);
    const Reals up = Product(up_, a);
    Reals middle(inter);
    if (coupled_) {
      Reals r(2 * inter);
      for (size_t i = 0; i < r.size(); ++i) {
        r[i] = (NpkSlotOf(i) == 0 ? gate : up)[NpkSlotRowOf(i)];
      }
      Inner(&r);
      for (size_t i = 0; i < r.size(); ++i) {
        const size_t slot = NpkSlotOf(i);
        r[i] = Narrow(r[i] * Half(inner_[slot * inter + NpkSlotRowOf(i)]));
      }
      Inner(&r);
      Scale(signs_, 0, &r);
      for (size_t i = 0; i < inter; ++i) {
        middle[i] = Activate(r[2 * i], r[2 * i + 1]);
      }
      Scale(signs_, 2 * inter, &middle);
      Inner(&middle);
      Scale(inner_, 2 * inter, &middle);
      Inner(&middle);
    } else {
      for (size_t i = 0; i < inter; ++i) middle[i] = Activate(gate[i], up[i]);
    }
    Quantise(&middle);
    Reals d = Product(down_, middle);
    if (coupled_) {
      Inner(&d);
      Scale(svh_, 0, &d);
    }
    return d;
  }

  // A sum's H512 behind the routes; nothing for the identity boundary.
  void Finish(Reals* row) const {
    if (coupled_) Outer(row);
  }

  double Narrow(double value) const {
    return staged_ ? static_cast<float>(value) : value;
  }

 private:
  void Scale(const std::vector<uint16_t>& table, size_t first,
             Reals* values) const {
    for (size_t i = 0; i < values->size(); ++i) {
      (*values)[i] = Narrow((*values)[i] * Half(table[first + i]));
    }
  }

  void Block128(double* at) const {
    if (staged_) {
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

  void Inner(Reals* values) const {
    for (size_t i = 0; i < values->size(); i += kInner) {
      Block128(values->data() + i);
    }
  }

  // H512 = H4 (x) H128: each quarter, then a butterfly over the four.
  void Outer(Reals* values) const {
    Inner(values);
    for (size_t base = 0; base < values->size(); base += kOuter) {
      for (size_t i = base; i < base + kInner; ++i) {
        double* v = values->data() + i;
        const double s0 = Narrow(v[0] + v[kInner]);
        const double d0 = Narrow(v[0] - v[kInner]);
        const double s1 = Narrow(v[2 * kInner] + v[3 * kInner]);
        const double d1 = Narrow(v[2 * kInner] - v[3 * kInner]);
        v[0] = Narrow(s0 + s1) / 2;
        v[kInner] = Narrow(d0 + d1) / 2;
        v[2 * kInner] = Narrow(s0 - s1) / 2;
        v[3 * kInner] = Narrow(d0 - d1) / 2;
      }
    }
  }

  void Quantise(Reals* values) const {
    if (!staged_) return;
    for (size_t at = 0; at < values->size(); at += kMxfp8Block) {
      std::array<float, kMxfp8Block> block;
      for (size_t i = 0; i < kMxfp8Block; ++i) {
        block[i] = static_cast<float>((*values)[at + i]);
      }
      uint8_t scale = 0;
      std::array<uint8_t, kMxfp8Block> payload;
      QuantizeMxfp8(block, &scale, payload);
      for (size_t i = 0; i < kMxfp8Block; ++i) {
        (*values)[at + i] = Mxfp8Value(scale, payload[i]);
      }
    }
  }

  // w: [out][in]. The order of the sum is open: binary64, rounded at its end.
  Reals Product(const Reals& w, const Reals& x) const {
    Reals y(w.size() / x.size());
    for (size_t n = 0; n < y.size(); ++n) {
      double sum = 0;
      for (size_t k = 0; k < x.size(); ++k) sum += w[n * x.size() + k] * x[k];
      y[n] = staged_ ? kd::round_f16(static_cast<float>(sum)) : sum;
    }
    return y;
  }

  double Activate(double gate, double up) const {
    const double limit = m_.LimitValue();
    const double g = std::min(gate, limit);
    const double u = std::clamp(up, -limit, limit);
    return Narrow(Narrow(g / (1 + std::exp(-g))) * u);
  }

  const NpkMetadata& m_;
  bool staged_;
  bool coupled_;
  Reals gate_;
  Reals up_;
  Reals down_;
  std::vector<uint16_t> suh_;
  std::vector<uint16_t> svh_;
  std::vector<uint16_t> inner_;
  std::vector<uint16_t> signs_;
};

int64_t ExpertOf(const NpkProblem& p, int64_t route) {
  int64_t id = p.topk_ids[route];
  if (p.expert_map != nullptr) {
    if (id < 0 || id >= p.expert_map_size) return -1;
    id = p.expert_map[id];
  }
  return id >= 0 && id < p.weights->metadata().experts ? id : -1;
}

}  // namespace

void NpkReferenceRows(const NpkProblem& problem, std::span<const int64_t> rows,
                      ReferenceMode mode, double* out) {
  const NpkMetadata& m = problem.weights->metadata();
  const auto hidden = static_cast<size_t>(m.hidden);
  const auto top_k = static_cast<size_t>(problem.top_k);
  for (const int64_t row : rows) {
    KILN_CHECK(row >= 0 && row < problem.tokens);
  }
  // Each expert is decoded once, its routes are kept until they are summed in
  // the router's order.
  std::vector<Reals> routes(rows.size() * top_k);
  for (int64_t e = 0; e < m.experts; ++e) {
    std::vector<size_t> own;
    for (size_t i = 0; i < routes.size(); ++i) {
      const int64_t route =
          rows[i / top_k] * problem.top_k + static_cast<int64_t>(i % top_k);
      if (ExpertOf(problem, route) == e) own.push_back(i);
    }
    if (own.empty()) continue;
    const Expert expert(*problem.weights, e, mode);
    for (const size_t i : own) {
      const uint16_t* x =
          problem.x + static_cast<size_t>(rows[i / top_k]) * hidden;
      Reals a(hidden);
      for (size_t c = 0; c < hidden; ++c) {
        const float exact = kd::bf16_to_f32(x[c]);
        a[c] = mode == ReferenceMode::kStaged ? kd::round_f16(exact) : exact;
      }
      routes[i] = expert.Run(std::move(a));
    }
  }
  const Expert any(*problem.weights, 0, mode);
  for (size_t r = 0; r < rows.size(); ++r) {
    Reals sum(hidden, 0.0);
    for (size_t j = 0; j < top_k; ++j) {
      const Reals& d = routes[r * top_k + j];
      if (d.empty()) continue;
      const double weight =
          problem.topk_weights[static_cast<size_t>(rows[r]) * top_k + j];
      for (size_t c = 0; c < hidden; ++c) {
        sum[c] = any.Narrow(sum[c] + weight * d[c]);
      }
    }
    any.Finish(&sum);
    std::copy(sum.begin(), sum.end(), out + r * hidden);
  }
}

}  // namespace kiln
