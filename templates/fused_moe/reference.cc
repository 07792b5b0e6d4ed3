#include "templates/fused_moe/reference.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <vector>

#include "compiler/base/check.h"
#include "device/activation.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "templates/formats/mxfp8.h"
#include "templates/fused_moe/parallel_for.h"
#include "templates/fused_moe/situ.h"

namespace kiln {
namespace {

constexpr int64_t kBlock = kd::kHadamardSize;
constexpr int64_t kCoupledBlock = 4 * kBlock;  // of the hidden axis

// ---- arithmetic ------------------------------------------------------------

double ToF16(double v) { return kd::round_f16(static_cast<float>(v)); }

void HadamardBlock(double* v, ReferenceMode mode) {
  if (mode != ReferenceMode::kFloat64) {
    float block[kBlock];
    for (int64_t i = 0; i < kBlock; ++i) block[i] = static_cast<float>(v[i]);
    kd::Hadamard128(block);
    for (int64_t i = 0; i < kBlock; ++i) v[i] = block[i];
    return;
  }
  for (int64_t stride = 1; stride < kBlock; stride *= 2) {
    for (int64_t base = 0; base < kBlock; base += 2 * stride) {
      for (int64_t i = base; i < base + stride; ++i) {
        const double a = v[i];
        const double b = v[i + stride];
        v[i] = a + b;
        v[i + stride] = a - b;
      }
    }
  }
  const double scale = 1.0 / std::sqrt(static_cast<double>(kBlock));
  for (int64_t i = 0; i < kBlock; ++i) v[i] *= scale;
}

// Mixes four neighbouring blocks: with their own transforms this is the
// 512-point transform. In place over v[0..511].
void HadamardAcross(double* v, ReferenceMode mode) {
  for (int64_t i = 0; i < kBlock; ++i) {
    double* four[4] = {v + i, v + i + kBlock, v + i + 2 * kBlock,
                       v + i + 3 * kBlock};
    if (mode != ReferenceMode::kFloat64) {
      float block[4];
      for (int j = 0; j < 4; ++j) block[j] = static_cast<float>(*four[j]);
      kd::Hadamard4(block);
      for (int j = 0; j < 4; ++j) *four[j] = 0.5f * block[j];
    } else {
      const double s0 = *four[0] + *four[1];
      const double d0 = *four[0] - *four[1];
      const double s1 = *four[2] + *four[3];
      const double d1 = *four[2] - *four[3];
      *four[0] = 0.5 * (s0 + s1);
      *four[1] = 0.5 * (d0 + d1);
      *four[2] = 0.5 * (s0 - s1);
      *four[3] = 0.5 * (d0 - d1);
    }
  }
}

// ---- the op ----------------------------------------------------------------

void CheckProblem(const FusedMoeProblem& p) {
  KILN_CHECK(p.tokens >= 0);
  KILN_CHECK(p.hidden > 0 && p.hidden % kBlock == 0);
  KILN_CHECK(p.intermediate > 0 && p.intermediate % kBlock == 0);
  KILN_CHECK(p.experts > 0 && p.top_k > 0);
  KILN_CHECK(p.x_dtype == DType::kBf16 || p.x_dtype == DType::kF16);
  KILN_CHECK(p.id_dtype == DType::kI32 || p.id_dtype == DType::kI64);
  KILN_CHECK(p.expert_map == nullptr || p.expert_map_size >= 0);
  KILN_CHECK((p.rates_fc1 == nullptr) == (p.rates_fc2 == nullptr));
  KILN_CHECK(p.rates_fc1 == nullptr || p.intermediate == kPairChannels);
  KILN_CHECK(!p.coupled || p.hidden % kCoupledBlock == 0);
}

// The expert of route (token, j), or -1 when the route is inactive.
int64_t ExpertOf(const FusedMoeProblem& p, int64_t token, int64_t j) {
  const int64_t route = token * p.top_k + j;
  int64_t id = p.id_dtype == DType::kI64
                   ? static_cast<const int64_t*>(p.topk_ids)[route]
                   : static_cast<const int32_t*>(p.topk_ids)[route];
  if (p.expert_map != nullptr) {
    if (id < 0 || id >= p.expert_map_size) return -1;
    id = p.expert_map[id];
  }
  return id >= 0 && id < p.experts ? id : -1;
}

double XOf(const FusedMoeProblem& p, int64_t token, int64_t channel,
           ReferenceMode mode) {
  const uint16_t bits =
      static_cast<const uint16_t*>(p.x)[token * p.hidden + channel];
  if (p.x_dtype == DType::kF16) return kd::f16_to_f32(bits);
  const float exact = kd::bf16_to_f32(bits);
  return mode != ReferenceMode::kFloat64 ? kd::round_f16(exact) : exact;
}

double F16(const uint16_t* table, int64_t index) {
  return kd::f16_to_f32(table[index]);
}

// The active routes of one expert among the listed rows.
struct Group {
  int64_t expert = 0;
  int64_t first = 0;  // index of its first route in `Plan::routes`
  int64_t count = 0;
};

struct Plan {
  // Per listed (row, j): position in the expert-grouped order, or -1.
  std::vector<int64_t> position;
  // Grouped order: token of each active route.
  std::vector<int64_t> token;
  std::vector<Group> groups;
};

Plan GroupRoutes(const FusedMoeProblem& p, std::span<const int64_t> rows) {
  const int64_t listed = static_cast<int64_t>(rows.size()) * p.top_k;
  std::vector<int64_t> expert(static_cast<size_t>(listed));
  std::vector<int64_t> order;
  for (int64_t i = 0; i < listed; ++i) {
    const size_t at = static_cast<size_t>(i);
    expert[at] =
        ExpertOf(p, rows[static_cast<size_t>(i / p.top_k)], i % p.top_k);
    if (expert[at] >= 0) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return expert[static_cast<size_t>(a)] < expert[static_cast<size_t>(b)];
  });
  Plan plan;
  plan.position.assign(static_cast<size_t>(listed), -1);
  for (const int64_t i : order) {
    const int64_t at = static_cast<int64_t>(plan.token.size());
    const int64_t e = expert[static_cast<size_t>(i)];
    if (plan.groups.empty() || plan.groups.back().expert != e) {
      plan.groups.push_back({.expert = e, .first = at, .count = 0});
    }
    ++plan.groups.back().count;
    plan.position[static_cast<size_t>(i)] = at;
    plan.token.push_back(rows[static_cast<size_t>(i / p.top_k)]);
  }
  return plan;
}

double Activation(MoeActivation activation, double gate, double up) {
  const double sigmoid = 1.0 / (1.0 + std::exp(-gate));
  if (activation == MoeActivation::kSilu) return gate * sigmoid * up;
  constexpr double kGateLimit = 4;
  constexpr double kUpLimit = 25;
  return kGateLimit * std::tanh(gate / kGateLimit) * sigmoid * kUpLimit *
         std::tanh(up / kUpLimit);
}

// The matrices of one projection.
class Projection {
 public:
  // fc1: gate or up, [H][I]; otherwise down, [I][H].
  Projection(const FusedMoeProblem& p, const uint16_t* words, int bits,
             bool fc1) {
    TrellisMatrix shape = {.k = fc1 ? p.hidden : p.intermediate,
                           .n = fc1 ? p.intermediate : p.hidden,
                           .codebook = p.codebook,
                           .bits = bits};
    const uint8_t* rates = fc1 ? p.rates_fc1 : p.rates_fc2;
    if (rates != nullptr) {
      shape.records = fc1 ? TrellisMatrix::Records::kColumns
                          : TrellisMatrix::Records::kRows;
    }
    for (int64_t e = 0; e < p.experts; ++e) {
      TrellisMatrix matrix = shape;
      if (rates != nullptr) matrix.pair = PairRate::FromByte(rates[e]);
      matrix.words = words;
      words += matrix.word_count();
      experts_.push_back(matrix);
    }
  }

  const TrellisMatrix& operator[](int64_t expert) const {
    return experts_[static_cast<size_t>(expert)];
  }

 private:
  std::vector<TrellisMatrix> experts_;
};

// Everything a call works on; buffers are in grouped route order.
class Evaluation {
 public:
  Evaluation(const FusedMoeProblem& problem, std::span<const int64_t> rows,
             ReferenceMode mode)
      : p_(problem),
        staged_(mode != ReferenceMode::kFloat64),
        mode_(mode),
        rows_(rows),
        plan_(GroupRoutes(problem, rows)),
        fc1_{{problem, problem.w_gate, problem.bits.gate, true},
             {problem, problem.w_up, problem.bits.up, true}},
        fc2_(problem, problem.w_down, problem.bits.down, false) {
    const size_t routes = plan_.token.size();
    const size_t h = static_cast<size_t>(p_.hidden);
    const size_t i = static_cast<size_t>(p_.intermediate);
    for (auto& operand : operand_) operand.resize(routes * h);
    for (auto& product : product_) product.resize(routes * i);
    route_out_.resize(routes * h);
  }

  void Run(int threads, double* out) {
    const int64_t groups = static_cast<int64_t>(plan_.groups.size());
    const int64_t h_blocks = p_.hidden / kBlock;
    const int64_t i_blocks = p_.intermediate / kBlock;
    // Both projections of a coupled layer read the same operand.
    ParallelFor(groups, threads, [&](int64_t g) {
      for (int side = 0; side < (p_.coupled ? 1 : 2); ++side) {
        RotateInput(g, side);
      }
    });
    ParallelFor(groups * 2 * i_blocks, threads, [&](int64_t item) {
      Fc1(item / (2 * i_blocks), static_cast<int>(item / i_blocks % 2),
          item % i_blocks);
    });
    ParallelFor(groups, threads, [&](int64_t g) {
      p_.coupled ? ActivateCoupled(g) : ActivatePlain(g);
    });
    ParallelFor(groups * h_blocks, threads,
                [&](int64_t item) { Fc2(item / h_blocks, item % h_blocks); });
    ParallelFor(static_cast<int64_t>(rows_.size()), threads,
                [&](int64_t row) { Combine(row, out + row * p_.hidden); });
  }

 private:
  const Group& group(int64_t g) const {
    return plan_.groups[static_cast<size_t>(g)];
  }

  bool IsSequential() const {
    return mode_ == ReferenceMode::kSequential ||
           mode_ == ReferenceMode::kSequentialW4A8;
  }

  bool IsW4A8() const {
    return mode_ == ReferenceMode::kStagedW4A8 ||
           mode_ == ReferenceMode::kSequentialW4A8;
  }

  int64_t ScaleRow(const Group& g) const {
    return p_.shared_scales ? 0 : g.expert;
  }

  // Rounds to binary16 in the modes with rounding boundaries.
  double Round16(double v) const { return staged_ ? ToF16(v) : v; }

  // An operand of a matrix product, as the recipe stores it.
  void RoundOperand(double* v, int64_t count) const {
    for (int64_t c = 0; c < count; ++c) v[c] = Round16(v[c]);
    if (!IsW4A8()) return;
    constexpr auto kSize = static_cast<int64_t>(kMxfp8Block);
    for (int64_t c = 0; c < count; c += kSize) {
      std::array<float, kMxfp8Block> block;
      std::array<uint8_t, kMxfp8Block> payload;
      uint8_t scale = 0;
      std::copy_n(v + c, kMxfp8Block, block.begin());
      QuantizeMxfp8(block, &scale, payload);
      for (size_t i = 0; i < kMxfp8Block; ++i) {
        v[c + static_cast<int64_t>(i)] = Mxfp8Value(scale, payload[i]);
      }
    }
  }

  // Rounds to binary32 in the same modes.
  double Round32(double v) const {
    return staged_ ? static_cast<double>(static_cast<float>(v)) : v;
  }

  MoeActivation ActivationOf(const Group& g) const {
    return p_.expert_activation != nullptr ? p_.expert_activation[g.expert]
                                           : p_.activation;
  }

  void HadamardBlocks(double* v, int64_t count) const {
    for (int64_t c = 0; c < count; c += kBlock) HadamardBlock(v + c, mode_);
  }

  // The 512-point transforms of a coupled layer's hidden side.
  void MixHidden(double* v) const {
    for (int64_t c = 0; c < p_.hidden; c += kCoupledBlock) {
      ReferenceHadamard({v + c, static_cast<size_t>(kCoupledBlock)}, mode_);
    }
  }

  void Multiply(const TrellisMatrix& w, int64_t block, const double* x,
                int64_t count, double* y) const {
    if (IsSequential()) {
      MultiplyTrellisBlock<float>(w, block, x, count, y);
    } else {
      MultiplyTrellisBlock<double>(w, block, x, count, y);
    }
  }

  double Activated(const Group& group, double gate, double up) const {
    const MoeActivation activation = ActivationOf(group);
    if (IsSequential()) {
      const auto g = static_cast<float>(gate);
      const auto u = static_cast<float>(up);
      return activation == MoeActivation::kSilu ? kd::Silu(g) * u
                                                : kd::Situ(g, u);
    }
    return Round32(Activation(activation, gate, up));
  }

  // Steps 1 to 3: side 0 is gate, 1 is up.
  void RotateInput(int64_t group_index, int side) {
    const Group& g = group(group_index);
    const uint16_t* suh = side == 0 ? p_.gate_suh : p_.up_suh;
    for (int64_t r = g.first; r < g.first + g.count; ++r) {
      const int64_t token = plan_.token[static_cast<size_t>(r)];
      double* row = operand_[side].data() + r * p_.hidden;
      for (int64_t c = 0; c < p_.hidden; ++c) row[c] = XOf(p_, token, c, mode_);
      if (p_.coupled) MixHidden(row);
      // A coupled layer of recipe w4a8 keeps binary32 here.
      const bool wide = p_.coupled && IsW4A8();
      for (int64_t c = 0; c < p_.hidden; ++c) {
        const double v = row[c] * F16(suh, ScaleRow(g) * p_.hidden + c);
        row[c] = wide ? Round32(v) : Round16(v);
      }
      HadamardBlocks(row, p_.hidden);
      RoundOperand(row, p_.hidden);
    }
  }

  // Step 4.
  void Fc1(int64_t group_index, int side, int64_t block) {
    const Group& g = group(group_index);
    const std::vector<double>& operand = operand_[p_.coupled ? 0 : side];
    Multiply(fc1_[side][g.expert], block, operand.data() + g.first * p_.hidden,
             g.count, product_[side].data() + g.first * p_.intermediate);
  }

  // Rounding of step 4, then steps 5 to 7; the result replaces the gate
  // product.
  void ActivatePlain(int64_t group_index) {
    const Group& g = group(group_index);
    const int64_t i = p_.intermediate;
    const uint16_t* gate_svh = p_.rotations + g.expert * 3 * i;
    const uint16_t* up_svh = gate_svh + i;
    const uint16_t* down_suh = up_svh + i;
    for (int64_t r = g.first; r < g.first + g.count; ++r) {
      double* gate = product_[0].data() + r * i;
      double* up = product_[1].data() + r * i;
      for (int64_t c = 0; c < i; ++c) {
        gate[c] = Round16(gate[c]);
        up[c] = Round16(up[c]);
      }
      HadamardBlocks(gate, i);
      HadamardBlocks(up, i);
      for (int64_t c = 0; c < i; ++c) {
        const double a = Activated(g, Round32(gate[c] * F16(gate_svh, c)),
                                   Round32(up[c] * F16(up_svh, c)));
        gate[c] = Round32(a * F16(down_suh, c));
      }
      HadamardBlocks(gate, i);
      RoundOperand(gate, i);
    }
  }

  // The same of a coupled layer (specification 4.8, steps 3 to 6): the
  // transforms before the activation run over both projections' channels of 64
  // neurons at once, 32 of one, 32 of the other, and so on.
  void ActivateCoupled(int64_t group_index) {
    const Group& g = group(group_index);
    constexpr int64_t kRun = 32;
    constexpr int64_t kNeurons = kBlock / 2;
    const int64_t i = p_.intermediate;
    const uint16_t* svh[2] = {p_.rotations + g.expert * 6 * i, nullptr};
    svh[1] = svh[0] + i;
    const uint16_t* down_suh = svh[1] + i;
    const uint16_t* pre_signs = down_suh + i;
    const uint16_t* post_signs = pre_signs + 2 * i;
    for (int64_t r = g.first; r < g.first + g.count; ++r) {
      double* slots[2] = {product_[0].data() + r * i,
                          product_[1].data() + r * i};
      for (int64_t b = 0; b < i; b += kNeurons) {
        double v[kBlock];
        double scale[kBlock];
        for (int64_t c = 0; c < kBlock; ++c) {
          const int64_t slot = c / kRun % 2;
          const int64_t channel = b + c / (2 * kRun) * kRun + c % kRun;
          v[c] = Round16(slots[slot][channel]);
          scale[c] = F16(svh[slot], channel);
        }
        HadamardBlock(v, mode_);
        for (int64_t c = 0; c < kBlock; ++c) v[c] = Round32(v[c] * scale[c]);
        HadamardBlock(v, mode_);
        for (int64_t c = 0; c < kBlock; ++c) v[c] *= F16(pre_signs, 2 * b + c);
        for (int64_t n = 0; n < kNeurons; ++n) {
          slots[0][b + n] = Activated(g, v[2 * n], v[2 * n + 1]);
        }
      }
      double* a = slots[0];
      for (int64_t c = 0; c < i; ++c) a[c] *= F16(post_signs, c);
      HadamardBlocks(a, i);
      for (int64_t c = 0; c < i; ++c) a[c] = Round32(a[c] * F16(down_suh, c));
      HadamardBlocks(a, i);
      RoundOperand(a, i);
    }
  }

  // Steps 8 and 9. Scales that all experts of a coupled layer share are applied
  // once, to the sum.
  void Fc2(int64_t group_index, int64_t block) {
    const Group& g = group(group_index);
    const int64_t h = p_.hidden;
    double* y = route_out_.data() + g.first * h;
    Multiply(fc2_[g.expert], block,
             product_[0].data() + g.first * p_.intermediate, g.count, y);
    for (int64_t r = 0; r < g.count; ++r) {
      double* v = y + r * h + block * kBlock;
      for (int64_t c = 0; c < kBlock; ++c) v[c] = Round16(v[c]);
      if (p_.coupled && p_.shared_scales) continue;
      ScaleOutput(v, ScaleRow(g) * h + block * kBlock, kBlock);
    }
  }

  // Transforms `count` values and multiplies them by down_svh from `scale` on.
  void ScaleOutput(double* v, int64_t scale, int64_t count) const {
    HadamardBlocks(v, count);
    for (int64_t c = 0; c < count; ++c) {
      v[c] = Round32(v[c] * F16(p_.down_svh, scale + c));
    }
  }

  // Step 10, and the last transforms of a coupled layer.
  void Combine(int64_t row, double* out) const {
    std::fill_n(out, p_.hidden, 0.0);
    const int64_t token = rows_[static_cast<size_t>(row)];
    for (int64_t j = 0; j < p_.top_k; ++j) {
      const int64_t at =
          plan_.position[static_cast<size_t>(row * p_.top_k + j)];
      if (at < 0) continue;
      const float weight = p_.topk_weights[token * p_.top_k + j];
      const double* v = route_out_.data() + at * p_.hidden;
      for (int64_t c = 0; c < p_.hidden; ++c) {
        out[c] = staged_ ? std::fma(weight, static_cast<float>(v[c]),
                                    static_cast<float>(out[c]))
                         : out[c] + static_cast<double>(weight) * v[c];
      }
    }
    if (!p_.coupled) return;
    if (p_.shared_scales) ScaleOutput(out, 0, p_.hidden);
    MixHidden(out);
  }

  const FusedMoeProblem& p_;
  const bool staged_;
  const ReferenceMode mode_;
  const std::span<const int64_t> rows_;
  const Plan plan_;
  const Projection fc1_[2];  // gate and up
  const Projection fc2_;
  std::vector<double> operand_[2];  // [routes][H], gate and up
  std::vector<double> product_[2];  // [routes][I], gate and up
  std::vector<double> route_out_;   // [routes][H]
};

}  // namespace

void ReferenceHadamard(std::span<double> v, ReferenceMode mode) {
  const auto size = static_cast<int64_t>(v.size());
  KILN_CHECK(size == kBlock || size == kCoupledBlock);
  for (int64_t i = 0; i < size; i += kBlock) HadamardBlock(v.data() + i, mode);
  if (size == kCoupledBlock) HadamardAcross(v.data(), mode);
}

void FusedMoeReferenceRows(const FusedMoeProblem& problem,
                           std::span<const int64_t> rows, ReferenceMode mode,
                           double* out, int threads) {
  CheckProblem(problem);
  const bool is_w4a8 = mode == ReferenceMode::kStagedW4A8 ||
                       mode == ReferenceMode::kSequentialW4A8;
  KILN_CHECK(!is_w4a8 || problem.codebook == TrellisCodebook::kSqgE4m3);
  KILN_CHECK(mode != ReferenceMode::kStagedW4A8Rp2 &&
             mode != ReferenceMode::kSequentialW4A8Rp2);
  KILN_CHECK(threads >= 1);
  for (const int64_t row : rows) KILN_CHECK(row >= 0 && row < problem.tokens);
  Evaluation(problem, rows, mode).Run(threads, out);
}

void FusedMoeReferenceParts(std::span<const FusedMoeProblem> parts,
                            std::span<const int64_t> rows, ReferenceMode mode,
                            double* out, int threads) {
  KILN_CHECK(!parts.empty());
  const FusedMoeProblem& first = parts.front();
  const size_t count = rows.size() * static_cast<size_t>(first.hidden);
  FusedMoeReferenceRows(first, rows, mode, out, threads);
  std::vector<double> more(count);
  for (const FusedMoeProblem& part : parts.subspan(1)) {
    KILN_CHECK(part.hidden == first.hidden && part.experts == first.experts);
    KILN_CHECK(part.intermediate == first.intermediate);
    KILN_CHECK(part.coupled == first.coupled);
    KILN_CHECK(part.shared_scales == first.shared_scales);
    KILN_CHECK(part.gate_suh == first.gate_suh && part.up_suh == first.up_suh);
    KILN_CHECK(part.down_svh == first.down_svh && part.x == first.x);
    FusedMoeReferenceRows(part, rows, mode, more.data(), threads);
    for (size_t i = 0; i < count; ++i) {
      out[i] = mode != ReferenceMode::kFloat64
                   ? static_cast<float>(out[i]) + static_cast<float>(more[i])
                   : out[i] + more[i];
    }
  }
}

}  // namespace kiln
