#include "templates/fused_moe/reference.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "compiler/base/check.h"
#include "device/activation.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "device/trellis.h"

namespace kiln {
namespace {

constexpr int64_t kBlock = kd::kHadamardSize;
constexpr int64_t kTile = 16;
constexpr int64_t kTilesPerBlock = kBlock / kTile;

// ---- decoding --------------------------------------------------------------

struct DecodeTable {
  std::vector<uint16_t> bits = std::vector<uint16_t>(65536);
  std::vector<float> value = std::vector<float>(65536);
};

template <int CB>
const DecodeTable& TableOf() {
  static const DecodeTable table = [] {
    DecodeTable t;
    for (uint32_t s = 0; s < 65536; ++s) {
      t.bits[s] = kd::DecodeState<CB>(s);
      t.value[s] = kd::f16_to_f32(t.bits[s]);
    }
    return t;
  }();
  return table;
}

const DecodeTable& TableOf(Codebook codebook) {
  switch (codebook) {
    case Codebook::k3Inst:
      return TableOf<kd::kCodebook3Inst>();
    case Codebook::kMcg:
      return TableOf<kd::kCodebookMcg>();
    case Codebook::kMul1:
      return TableOf<kd::kCodebookMul1>();
  }
  KILN_UNREACHABLE();
}

// Row-major element index of each stream position.
const std::array<uint8_t, 256>& ElementOfPosition() {
  static const std::array<uint8_t, 256> map = [] {
    std::array<uint8_t, 256> m{};
    for (uint32_t p = 0; p < 256; ++p) {
      m[p] =
          static_cast<uint8_t>(kd::PositionRow(p) * 16 + kd::PositionColumn(p));
    }
    return m;
  }();
  return map;
}

// The states of one tile, in stream order. Payloads are only 2-byte aligned as
// far as this function is concerned.
template <int K>
void TileStates(const uint16_t* payload, uint16_t states[256]) {
  uint32_t words[kd::kTileWords<K>];
  std::memcpy(words, payload, sizeof words);
  for (uint32_t lane = 0; lane < 32; ++lane) {
    uint32_t lane_states[8];
    kd::LaneStates<K>(words, lane, lane_states);
    for (uint32_t j = 0; j < 8; ++j) {
      states[8 * lane + j] = static_cast<uint16_t>(lane_states[j]);
    }
  }
}

using TileStatesFn = void (*)(const uint16_t*, uint16_t*);

TileStatesFn TileStatesOf(int bits) {
  static constexpr TileStatesFn kTable[8] = {
      TileStates<1>, TileStates<2>, TileStates<3>, TileStates<4>,
      TileStates<5>, TileStates<6>, TileStates<7>, TileStates<8>};
  KILN_CHECK(bits >= 1 && bits <= 8);
  return kTable[bits - 1];
}

// ---- arithmetic ------------------------------------------------------------

double ToF16(double v) { return kd::round_f16(static_cast<float>(v)); }

void HadamardBlock(double* v, ReferenceMode mode) {
  if (mode == ReferenceMode::kStaged) {
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

using Double4 = double __attribute__((vector_size(32)));

// acc[0..127] += sum over 16 rows of x[k] * w[k][0..127].
inline __attribute__((always_inline)) void AccumulateBody(
    const double x[16], const double w[16][kBlock], double* acc) {
  constexpr int64_t kGroup = 16;
  for (int64_t n = 0; n < kBlock; n += kGroup) {
    Double4 a[kGroup / 4];
    std::memcpy(a, acc + n, sizeof a);
    for (int64_t k = 0; k < kTile; ++k) {
      Double4 row[kGroup / 4];
      std::memcpy(row, &w[k][n], sizeof row);
      for (int64_t i = 0; i < kGroup / 4; ++i) a[i] += row[i] * x[k];
    }
    std::memcpy(acc + n, a, sizeof a);
  }
}

void AccumulatePortable(const double x[16], const double w[16][kBlock],
                        double* acc) {
  AccumulateBody(x, w, acc);
}

using AccumulateFn = void (*)(const double*, const double (*)[kBlock], double*);

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void AccumulateAvx2(
    const double x[16], const double w[16][kBlock], double* acc) {
  AccumulateBody(x, w, acc);
}
#endif

AccumulateFn ChooseAccumulate() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return AccumulateAvx2;
  }
#endif
  return AccumulatePortable;
}

// ---- work distribution -----------------------------------------------------

// Calls work(i) once for each i in [0, count), from up to `threads` threads.
void ParallelFor(int64_t count, int threads,
                 const std::function<void(int64_t)>& work) {
  std::atomic<int64_t> next{0};
  const auto run = [&] {
    for (int64_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::thread> workers;
  for (int64_t i = 1; i < std::min<int64_t>(threads, count); ++i) {
    workers.emplace_back(run);
  }
  run();
  for (std::thread& worker : workers) worker.join();
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
  return mode == ReferenceMode::kStaged ? kd::round_f16(exact) : exact;
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

// One trellis matrix applied to the rows of one group, one block of 128 output
// columns at a time.
struct Matrix {
  const uint16_t* trellis;  // [k/16][n/16][16 * bits]
  int64_t k;
  int64_t n;
  int bits;
};

void MultiplyBlock(const Matrix& w, int64_t block, Codebook codebook,
                   const double* x, int64_t count, double* y) {
  static const AccumulateFn accumulate = ChooseAccumulate();
  const TileStatesFn tile_states = TileStatesOf(w.bits);
  const std::vector<float>& value = TableOf(codebook).value;
  const std::array<uint8_t, 256>& element = ElementOfPosition();
  std::vector<double> acc(static_cast<size_t>(count * kBlock), 0.0);
  alignas(64) double rows[kTile][kBlock];
  for (int64_t a = 0; a < w.k / kTile; ++a) {
    for (int64_t b = 0; b < kTilesPerBlock; ++b) {
      const int64_t tile = a * (w.n / kTile) + block * kTilesPerBlock + b;
      uint16_t states[256];
      tile_states(w.trellis + tile * 16 * w.bits, states);
      for (size_t p = 0; p < 256; ++p) {
        rows[element[p] / 16][b * kTile + element[p] % 16] = value[states[p]];
      }
    }
    for (int64_t r = 0; r < count; ++r) {
      accumulate(x + r * w.k + a * kTile, rows,
                 acc.data() + static_cast<size_t>(r * kBlock));
    }
  }
  for (int64_t r = 0; r < count; ++r) {
    std::copy_n(acc.data() + r * kBlock, kBlock, y + r * w.n + block * kBlock);
  }
}

double Silu(double gate, double up) {
  return gate / (1.0 + std::exp(-gate)) * up;
}

// Everything a call works on; buffers are in grouped route order.
class Evaluation {
 public:
  Evaluation(const FusedMoeProblem& problem, std::span<const int64_t> rows,
             ReferenceMode mode)
      : p_(problem),
        staged_(mode == ReferenceMode::kStaged),
        mode_(mode),
        rows_(rows),
        plan_(GroupRoutes(problem, rows)) {
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
    ParallelFor(groups, threads, [&](int64_t g) {
      for (int side = 0; side < 2; ++side) RotateInput(g, side);
    });
    ParallelFor(groups * 2 * i_blocks, threads, [&](int64_t item) {
      Fc1(item / (2 * i_blocks), static_cast<int>(item / i_blocks % 2),
          item % i_blocks);
    });
    ParallelFor(groups, threads, [&](int64_t g) { Activate(g); });
    ParallelFor(groups * h_blocks, threads,
                [&](int64_t item) { Fc2(item / h_blocks, item % h_blocks); });
    ParallelFor(static_cast<int64_t>(rows_.size()), threads,
                [&](int64_t row) { Combine(row, out + row * p_.hidden); });
  }

 private:
  const Group& group(int64_t g) const {
    return plan_.groups[static_cast<size_t>(g)];
  }

  int64_t ScaleRow(const Group& g) const {
    return p_.shared_scales ? 0 : g.expert;
  }

  // Rounds to binary16 in staged mode only.
  double Round16(double v) const { return staged_ ? ToF16(v) : v; }

  // Rounds to binary32 in staged mode only.
  double Round32(double v) const {
    return staged_ ? static_cast<double>(static_cast<float>(v)) : v;
  }

  // Steps 1 to 3: side 0 is gate, 1 is up.
  void RotateInput(int64_t group_index, int side) {
    const Group& g = group(group_index);
    const uint16_t* suh = side == 0 ? p_.gate_suh : p_.up_suh;
    for (int64_t r = g.first; r < g.first + g.count; ++r) {
      const int64_t token = plan_.token[static_cast<size_t>(r)];
      double* row = operand_[side].data() + r * p_.hidden;
      for (int64_t c = 0; c < p_.hidden; ++c) {
        row[c] = Round16(XOf(p_, token, c, mode_) *
                         F16(suh, ScaleRow(g) * p_.hidden + c));
      }
      for (int64_t c = 0; c < p_.hidden; c += kBlock) {
        HadamardBlock(row + c, mode_);
      }
      for (int64_t c = 0; c < p_.hidden; ++c) row[c] = Round16(row[c]);
    }
  }

  // Step 4.
  void Fc1(int64_t group_index, int side, int64_t block) {
    const Group& g = group(group_index);
    const int bits = side == 0 ? p_.bits.gate : p_.bits.up;
    const uint16_t* base = side == 0 ? p_.w_gate : p_.w_up;
    const Matrix w = {
        .trellis = base + g.expert * (p_.hidden * p_.intermediate / 16) * bits,
        .k = p_.hidden,
        .n = p_.intermediate,
        .bits = bits};
    MultiplyBlock(w, block, p_.codebook,
                  operand_[side].data() + g.first * p_.hidden, g.count,
                  product_[side].data() + g.first * p_.intermediate);
  }

  // Rounding of step 4, then steps 5 to 7; the result replaces the gate
  // product.
  void Activate(int64_t group_index) {
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
      for (int64_t c = 0; c < i; c += kBlock) {
        HadamardBlock(gate + c, mode_);
        HadamardBlock(up + c, mode_);
      }
      for (int64_t c = 0; c < i; ++c) {
        const double a = Round32(Silu(Round32(gate[c] * F16(gate_svh, c)),
                                      Round32(up[c] * F16(up_svh, c))));
        gate[c] = Round32(a * F16(down_suh, c));
      }
      for (int64_t c = 0; c < i; c += kBlock) HadamardBlock(gate + c, mode_);
      for (int64_t c = 0; c < i; ++c) gate[c] = Round16(gate[c]);
    }
  }

  // Steps 8 and 9.
  void Fc2(int64_t group_index, int64_t block) {
    const Group& g = group(group_index);
    const int64_t h = p_.hidden;
    const Matrix w = {
        .trellis =
            p_.w_down + g.expert * (h * p_.intermediate / 16) * p_.bits.down,
        .k = p_.intermediate,
        .n = h,
        .bits = p_.bits.down};
    double* y = route_out_.data() + g.first * h;
    MultiplyBlock(w, block, p_.codebook,
                  product_[0].data() + g.first * p_.intermediate, g.count, y);
    for (int64_t r = 0; r < g.count; ++r) {
      double* v = y + r * h + block * kBlock;
      for (int64_t c = 0; c < kBlock; ++c) v[c] = Round16(v[c]);
      HadamardBlock(v, mode_);
      for (int64_t c = 0; c < kBlock; ++c) {
        v[c] = Round32(v[c] *
                       F16(p_.down_svh, ScaleRow(g) * h + block * kBlock + c));
      }
    }
  }

  // Step 10.
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
  }

  const FusedMoeProblem& p_;
  const bool staged_;
  const ReferenceMode mode_;
  const std::span<const int64_t> rows_;
  const Plan plan_;
  std::vector<double> operand_[2];  // [routes][H], gate and up
  std::vector<double> product_[2];  // [routes][I], gate and up
  std::vector<double> route_out_;   // [routes][H]
};

}  // namespace

void FusedMoeReferenceRows(const FusedMoeProblem& problem,
                           std::span<const int64_t> rows, ReferenceMode mode,
                           double* out, int threads) {
  CheckProblem(problem);
  KILN_CHECK(threads >= 1);
  for (const int64_t row : rows) KILN_CHECK(row >= 0 && row < problem.tokens);
  Evaluation(problem, rows, mode).Run(threads, out);
}

void DecodeTrellisMatrix(const uint16_t* trellis, int64_t k, int64_t n,
                         int bits, Codebook codebook, uint16_t* out) {
  KILN_CHECK(k % kTile == 0 && n % kTile == 0);
  const TileStatesFn tile_states = TileStatesOf(bits);
  const std::vector<uint16_t>& table = TableOf(codebook).bits;
  const std::array<uint8_t, 256>& element = ElementOfPosition();
  for (int64_t a = 0; a < k / kTile; ++a) {
    for (int64_t b = 0; b < n / kTile; ++b) {
      uint16_t states[256];
      tile_states(trellis + (a * (n / kTile) + b) * 16 * bits, states);
      for (size_t p = 0; p < 256; ++p) {
        out[(a * kTile + element[p] / 16) * n + b * kTile + element[p] % 16] =
            table[states[p]];
      }
    }
  }
}

}  // namespace kiln
