// The CPU template against a scalar model (bit for bit) and against the host
// reference (within the spread that summation order allows).

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "compiler/spec/request.h"
#include "device/activation.h"
#include "device/cpu_vector.h"
#include "device/hadamard.h"
#include "device/half.h"
#include "device/trellis.h"
#include "gtest/gtest.h"
#include "templates/fused_moe/reference.h"
#include "tests/templates/cpu_plan.h"
#include "tests/templates/cpu_variant.h"
#include "tests/templates/test_data.h"

namespace kiln {
namespace {

using testing::CpuEntry;
using testing::CpuStep;
using testing::CpuVariant;
using testing::CpuVariants;
using testing::SplitMix64;

// ---- one random problem ----------------------------------------------------

// Routes that must stay inactive, per id type.
constexpr int64_t kInactive32[] = {-1, INT32_MIN, INT32_MAX};
constexpr int64_t kInactive64[] = {-1, INT64_MIN, int64_t{1} << 32,
                                   (int64_t{1} << 32) + 1, INT64_MAX};

struct Problem {
  Problem(const CpuVariant& v, uint32_t tokens, uint64_t seed) : random(seed) {
    const size_t h = v.hidden;
    const size_t i = v.inter;
    const size_t e = v.experts;
    const size_t scale_rows = v.shared_scales ? 1 : e;
    x.resize(tokens * h);
    for (uint16_t& value : x) {
      const float f = static_cast<float>(random.Symmetric());
      // A few bfloat16 values that binary16 cannot hold exactly: tiny ones.
      const float scaled = random.Next() % 16 == 0 ? f * 1e-6f : f;
      value = v.x_bf16 ? static_cast<uint16_t>(kd::FloatBits(scaled) >> 16)
                       : kd::f32_to_f16(scaled);
    }
    w_gate = random.Words(e * h * i / 16 * static_cast<size_t>(v.bits_gate));
    w_up = random.Words(e * h * i / 16 * static_cast<size_t>(v.bits_up));
    w_down = random.Words(e * h * i / 16 * static_cast<size_t>(v.bits_down));
    gate_suh = Scales(scale_rows * h, 0.05f);
    up_suh = Scales(scale_rows * h, 0.05f);
    rotations = Scales(e * 3 * i, 0.7f);
    down_svh = Scales(scale_rows * h, 0.7f);
    for (uint32_t r = 0; r < tokens * v.top_k; ++r) {
      const uint32_t token = r / v.top_k;
      int64_t id = static_cast<int64_t>(random.Next() % v.experts);
      // The last expert is rare, so that it is sometimes absent.
      if (id == v.experts - 1 && random.Next() % 4 != 0) id = 0;
      const uint64_t dice = random.Next() % 8;
      if (dice == 0 || token % 7 == 3) {  // some tokens have no route at all
        id = v.id_i64 ? kInactive64[random.Next() % std::size(kInactive64)]
                      : kInactive32[random.Next() % std::size(kInactive32)];
        if (random.Next() % 3 == 0) id = v.experts;
      } else if (dice == 1 && r % v.top_k != 0) {
        id = ids64.back();  // a duplicate inside the token
      }
      ids64.push_back(id);
      ids32.push_back(static_cast<int32_t>(id));
      weights.push_back(static_cast<float>(random.Symmetric()));
    }
    p.tokens = tokens;
    p.hidden = v.hidden;
    p.intermediate = v.inter;
    p.experts = v.experts;
    p.top_k = v.top_k;
    p.codebook = static_cast<Codebook>(v.codebook);
    p.bits = {.gate = v.bits_gate, .up = v.bits_up, .down = v.bits_down};
    p.shared_scales = v.shared_scales;
    p.x_dtype = v.x_bf16 ? DType::kBf16 : DType::kF16;
    p.id_dtype = v.id_i64 ? DType::kI64 : DType::kI32;
    p.x = x.data();
    p.topk_ids = v.id_i64 ? static_cast<const void*>(ids64.data())
                          : static_cast<const void*>(ids32.data());
    p.topk_weights = weights.data();
    p.w_gate = w_gate.data();
    p.w_up = w_up.data();
    p.w_down = w_down.data();
    p.gate_suh = gate_suh.data();
    p.up_suh = up_suh.data();
    p.rotations = rotations.data();
    p.down_svh = down_svh.data();
  }

  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  std::vector<uint16_t> Scales(size_t count, float magnitude) {
    std::vector<uint16_t> scales(count);
    for (uint16_t& value : scales) {
      const double f = random.Symmetric();
      value = kd::f32_to_f16(magnitude *
                             static_cast<float>(f + (f < 0 ? -0.5 : 0.5)));
    }
    scales[count / 2] = 0;  // legal, and kills a channel
    return scales;
  }

  int64_t Expert(int64_t route) const {
    const int64_t id = ids64[static_cast<size_t>(route)];
    return id >= 0 && id < p.experts ? id : -1;
  }

  SplitMix64 random;
  FusedMoeProblem p;
  std::vector<uint16_t> x, w_gate, w_up, w_down, gate_suh, up_suh, rotations,
      down_svh;
  std::vector<int64_t> ids64;
  std::vector<int32_t> ids32;
  std::vector<float> weights;
};

// ---- running a plan --------------------------------------------------------

struct Grid {
  uint64_t x, y, z;
};

// Runs all blocks of a step on two threads.
void RunStep(const CpuStep& step, const void* args, size_t args_bytes,
             Grid grid) {
  ASSERT_EQ(step.args_bytes, args_bytes);
  testing::RunBlocks(
      grid.x, grid.y, grid.z,
      [&](uint32_t x, uint32_t y, uint32_t z) { step.run(args, x, y, z); });
}

uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// The arena of one capacity: 256-byte aligned slices with guard bytes between
// them, everything poisoned.
class Arena {
 public:
  static constexpr size_t kGuard = 256;

  explicit Arena(uint8_t poison) : poison_(poison) {}

  // Returns the slice's index.
  size_t Add(uint64_t bytes) {
    offsets_.push_back(size_ + kGuard);
    bytes_.push_back(bytes);
    size_ += kGuard + CeilDiv(bytes, 256) * 256;
    return offsets_.size() - 1;
  }

  void Allocate() {
    storage_.assign(size_ + kGuard + 256, poison_);
    const uintptr_t raw = reinterpret_cast<uintptr_t>(storage_.data());
    base_ = storage_.data() + (256 - raw % 256) % 256;
  }

  void* Slice(size_t index) { return base_ + offsets_[index]; }

  // True if no byte outside the slices changed.
  bool GuardsIntact() const {
    std::vector<bool> inside(size_ + kGuard, false);
    for (size_t i = 0; i < offsets_.size(); ++i) {
      for (size_t b = 0; b < bytes_[i]; ++b) inside[offsets_[i] + b] = true;
    }
    for (size_t b = 0; b < inside.size(); ++b) {
      if (!inside[b] && base_[b] != poison_) return false;
    }
    return true;
  }

 private:
  uint8_t poison_;
  size_t size_ = 0;
  std::vector<size_t> offsets_, bytes_;
  std::vector<uint8_t> storage_;
  uint8_t* base_ = nullptr;
};

// Launches every step as the head of cpu.cc says, with an arena for
// `capacity`. Returns [m][H].
std::vector<float> RunPlan(const CpuVariant& v, const Problem& problem,
                           uint32_t capacity, uint8_t poison) {
  const FusedMoeProblem& p = problem.p;
  const uint64_t t = v.tokens_tile;
  const auto tiles_of = [&](uint64_t m) {
    const uint64_t routes = m * v.top_k;
    return std::min(routes, CeilDiv(routes + (v.experts - 1) * (t - 1), t));
  };
  const uint64_t n = tiles_of(capacity);
  Arena arena(poison);
  const size_t tile_expert = arena.Add(4 * n);
  const size_t tile_routes = arena.Add(4 * n * t);
  const size_t route_slot = arena.Add(4 * capacity * v.top_k);
  const size_t gate_in = arena.Add(2 * n * t * v.hidden);
  const size_t up_in = arena.Add(2 * n * t * v.hidden);
  const size_t gate_out = arena.Add(2 * n * t * v.inter);
  const size_t up_out = arena.Add(2 * n * t * v.inter);
  const size_t down_in = arena.Add(2 * n * t * v.inter);
  const size_t down_out = gate_in;
  arena.Allocate();
  const auto a = [&](size_t slice) -> const void* {
    return arena.Slice(slice);
  };

  testing::GuardedRows out(static_cast<size_t>(p.tokens), v.hidden);

  struct {
    uint32_t tokens;
    const void* pointers[4];
  } route = {static_cast<uint32_t>(p.tokens),
             {p.topk_ids, a(tile_expert), a(tile_routes), a(route_slot)}};

  const void* rotate[] = {a(tile_expert), a(tile_routes), p.x,     p.gate_suh,
                          p.up_suh,       a(gate_in),     a(up_in)};
  const void* fc1[] = {a(tile_expert), p.w_gate,    p.w_up,   a(gate_in),
                       a(up_in),       a(gate_out), a(up_out)};
  const void* activate[] = {a(tile_expert), a(tile_routes), p.rotations,
                            a(gate_out),    a(up_out),      a(down_in)};
  const void* fc2[] = {a(tile_expert), p.w_down, a(down_in), a(down_out)};
  const void* combine[] = {a(tile_expert), a(route_slot), p.topk_weights,
                           p.down_svh,     a(down_out),   out.data()};

  const uint64_t m = static_cast<uint64_t>(p.tokens);
  const uint64_t tiles = tiles_of(m);
  const uint64_t c = v.channels_tile;
  RunStep(v.route, &route, sizeof route, {1, 1, 1});
  RunStep(v.rotate, rotate, sizeof rotate, {tiles, CeilDiv(v.hidden, 512), 1});
  RunStep(v.fc1, fc1, sizeof fc1, {tiles, CeilDiv(v.inter, c), 2});
  RunStep(v.activate, activate, sizeof activate,
          {tiles, CeilDiv(v.inter, 512), 1});
  RunStep(v.fc2, fc2, sizeof fc2, {tiles, CeilDiv(v.hidden, c), 1});
  RunStep(v.combine, combine, sizeof combine, {m, CeilDiv(v.hidden, 512), 1});

  EXPECT_TRUE(arena.GuardsIntact());
  return out.Take();
}

// ---- the scalar model ------------------------------------------------------

// y[n] = sum over k ascending of fma(x[k], w[k][n]), rounded to binary16.
std::vector<float> Multiply(const std::vector<float>& x,
                            const std::vector<uint16_t>& w, size_t n) {
  std::vector<float> y(n, 0.0f);
  for (size_t k = 0; k < x.size(); ++k) {
    for (size_t i = 0; i < n; ++i) {
      y[i] = std::fma(kd::f16_to_f32(w[k * n + i]), x[k], y[i]);
    }
  }
  for (float& value : y) value = kd::round_f16(value);
  return y;
}

void Transform(std::vector<float>* v) {
  for (size_t i = 0; i < v->size(); i += 128) kd::Hadamard128(v->data() + i);
}

// Specification 4.5 for one route, before step 10.
std::vector<float> ModelRoute(const Problem& problem, int64_t route) {
  const FusedMoeProblem& p = problem.p;
  const size_t h = static_cast<size_t>(p.hidden);
  const size_t i = static_cast<size_t>(p.intermediate);
  const size_t e = static_cast<size_t>(problem.Expert(route));
  const size_t scale_row = p.shared_scales ? 0 : e;
  const size_t token = static_cast<size_t>(route / p.top_k);
  const auto decode = [&](const std::vector<uint16_t>& w, int64_t k, int64_t n,
                          int bits) {
    std::vector<uint16_t> out(h * i);
    DecodeTrellisMatrix(w.data() + e * (h * i / 16) * static_cast<size_t>(bits),
                        k, n, bits, p.codebook, out.data());
    return out;
  };
  const auto side = [&](const std::vector<uint16_t>& suh,
                        const std::vector<uint16_t>& w, int bits,
                        const uint16_t* svh) {
    std::vector<float> operand(h);
    for (size_t c = 0; c < h; ++c) {
      uint16_t x = problem.x[token * h + c];
      if (p.x_dtype == DType::kBf16) x = kd::bf16_to_f16(x);
      operand[c] = kd::f16_to_f32(kd::hmul(x, suh[scale_row * h + c]));
    }
    Transform(&operand);
    for (float& value : operand) value = kd::round_f16(value);
    std::vector<float> y =
        Multiply(operand, decode(w, p.hidden, p.intermediate, bits), i);
    Transform(&y);
    for (size_t c = 0; c < i; ++c) y[c] *= kd::f16_to_f32(svh[c]);
    return y;
  };
  const uint16_t* rotations = problem.rotations.data() + e * 3 * i;
  std::vector<float> a =
      side(problem.gate_suh, problem.w_gate, p.bits.gate, rotations);
  const std::vector<float> up =
      side(problem.up_suh, problem.w_up, p.bits.up, rotations + i);
  for (size_t c = 0; c < i; ++c) {
    a[c] = kd::Silu(a[c]) * up[c];
    a[c] *= kd::f16_to_f32(rotations[2 * i + c]);
  }
  Transform(&a);
  for (float& value : a) value = kd::round_f16(value);
  std::vector<float> y = Multiply(
      a, decode(problem.w_down, p.intermediate, p.hidden, p.bits.down), h);
  Transform(&y);
  for (size_t c = 0; c < h; ++c) {
    y[c] *= kd::f16_to_f32(problem.down_svh[scale_row * h + c]);
  }
  return y;
}

std::vector<float> Model(const Problem& problem) {
  const FusedMoeProblem& p = problem.p;
  const size_t h = static_cast<size_t>(p.hidden);
  std::vector<float> out(static_cast<size_t>(p.tokens) * h, 0.0f);
  for (int64_t route = 0; route < p.tokens * p.top_k; ++route) {
    if (problem.Expert(route) < 0) continue;
    const std::vector<float> v = ModelRoute(problem, route);
    float* row = out.data() + static_cast<size_t>(route / p.top_k) * h;
    const float weight = problem.weights[static_cast<size_t>(route)];
    for (size_t c = 0; c < h; ++c) row[c] = std::fma(v[c], weight, row[c]);
  }
  return out;
}

// Index of the first differing bit pattern, or -1. Zeros of either sign and
// all NaNs count as equal to themselves only.
int64_t FirstDifference(const std::vector<float>& a,
                        const std::vector<float>& b) {
  if (a.size() != b.size()) return 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (kd::FloatBits(a[i]) != kd::FloatBits(b[i])) {
      return static_cast<int64_t>(i);
    }
  }
  return -1;
}

// ---- tests -----------------------------------------------------------------

class CpuKernelTest : public ::testing::TestWithParam<CpuVariant> {};

TEST_P(CpuKernelTest, EqualsTheScalarModelBitForBit) {
  const CpuVariant& v = GetParam();
  const Problem problem(v, 6, 1000 + v.hidden);
  const std::vector<float> out = RunPlan(v, problem, 6, 0xFF);
  const std::vector<float> model = Model(problem);
  EXPECT_EQ(FirstDifference(out, model), -1);
  // The comparison means something only if the rows are not all zero.
  EXPECT_TRUE(std::any_of(out.begin(), out.end(),
                          [](float value) { return std::fabs(value) > 0.1f; }));
}

TEST_P(CpuKernelTest, AgreesWithTheReferenceAtRaggedTokenCounts) {
  const CpuVariant& v = GetParam();
  for (const uint32_t tokens : {1u, 2u, 17u, 40u}) {
    SCOPED_TRACE("m=" + std::to_string(tokens));
    const Problem problem(v, tokens, 77 + tokens);
    const std::vector<float> out = RunPlan(v, problem, 40, 0xFF);
    std::vector<int64_t> rows(tokens);
    std::iota(rows.begin(), rows.end(), 0);
    std::vector<double> expected(out.size());
    // Against float64 the staging itself costs about 6e-4. Against the staged
    // reference only summation order differs, but a sum that moves by 1e-7 can
    // cross a binary16 midpoint, and the transforms spread that over 128
    // channels. The sequential reference is met bit for bit.
    const std::pair<ReferenceMode, double> modes[] = {
        {ReferenceMode::kFloat64, 2e-3},
        {ReferenceMode::kStaged, 1e-3},
        {ReferenceMode::kSequential, 0}};
    for (const auto& [mode, tolerance] : modes) {
      FusedMoeReferenceRows(problem.p, rows, mode, expected.data(), 2);
      for (uint32_t row = 0; row < tokens; ++row) {
        double error = 0;
        double norm = 0;
        bool active = false;
        for (uint32_t j = 0; j < v.top_k; ++j) {
          active |= problem.Expert(row * v.top_k + j) >= 0;
        }
        for (size_t c = 0; c < v.hidden; ++c) {
          const double y = expected[row * v.hidden + c];
          const double z = out[row * v.hidden + c];
          error += (y - z) * (y - z);
          norm += y * y;
          if (!active) {
            ASSERT_EQ(z, 0.0) << "row " << row;
          }
        }
        if (active) {
          EXPECT_LE(std::sqrt(error / norm), tolerance) << "row " << row;
        }
      }
    }
  }
}

TEST_P(CpuKernelTest, ResultDoesNotDependOnWhatTheArenaHeld) {
  const CpuVariant& v = GetParam();
  const Problem problem(v, 9, 5);
  EXPECT_EQ(FirstDifference(RunPlan(v, problem, 9, 0x00),
                            RunPlan(v, problem, 33, 0x7F)),
            -1);
}

TEST_P(CpuKernelTest, NoActiveRouteGivesZerosAndReadsNoWeight) {
  const CpuVariant& v = GetParam();
  Problem problem(v, 3, 6);
  std::fill(problem.ids64.begin(), problem.ids64.end(), -1);
  std::fill(problem.ids32.begin(), problem.ids32.end(), -1);
  problem.p.w_gate = problem.p.w_up = problem.p.w_down = nullptr;
  problem.p.gate_suh = problem.p.up_suh = problem.p.down_svh = nullptr;
  problem.p.rotations = nullptr;
  for (const float value : RunPlan(v, problem, 3, 0xFF)) {
    ASSERT_EQ(kd::FloatBits(value), 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Variants, CpuKernelTest, ::testing::ValuesIn(CpuVariants()),
    [](const ::testing::TestParamInfo<CpuVariant>& variant) {
      return variant.param.name;
    });

TEST(CpuVariantsTest, CoverEveryRateOfEveryCodebookAndAllInputForms) {
  std::map<int, std::array<bool, 9>> rates;
  bool forms[3][2] = {};
  for (const CpuVariant& v : CpuVariants()) {
    for (const int bits : {v.bits_gate, v.bits_up, v.bits_down}) {
      rates[v.codebook][static_cast<size_t>(bits)] = true;
    }
    forms[0][v.x_bf16] = forms[1][v.id_i64] = forms[2][v.shared_scales] = true;
  }
  for (int codebook = 0; codebook < 3; ++codebook) {
    for (size_t bits = 1; bits <= 8; ++bits) {
      EXPECT_TRUE(rates[codebook][bits]) << codebook << " K=" << bits;
    }
  }
  for (const auto& form : forms) EXPECT_TRUE(form[0] && form[1]);
}

// Tiles, unrolling and lane count only regroup work.
TEST(CpuVariantsTest, TilingNeverChangesABit) {
  using Key = std::tuple<uint32_t, uint32_t, uint32_t, uint32_t, int, int, int,
                         int, bool, bool, bool>;
  std::map<Key, std::vector<const CpuVariant*>> groups;
  for (const CpuVariant& v : CpuVariants()) {
    groups[{v.hidden, v.inter, v.experts, v.top_k, v.codebook, v.bits_gate,
            v.bits_up, v.bits_down, v.x_bf16, v.id_i64, v.shared_scales}]
        .push_back(&v);
  }
  int compared = 0;
  for (const auto& [key, variants] : groups) {
    if (variants.size() < 2) continue;
    const Problem problem(*variants[0], 23, 9);
    const std::vector<float> first = RunPlan(*variants[0], problem, 23, 0xFF);
    for (size_t i = 1; i < variants.size(); ++i) {
      EXPECT_EQ(
          FirstDifference(first, RunPlan(*variants[i], problem, 23, 0xFF)), -1)
          << variants[i]->name;
      ++compared;
    }
  }
  EXPECT_GE(compared, 3);
}

// ---- the vector forms of the device headers --------------------------------

template <int CB, int L>
void CheckDecodeLanes() {
  for (uint32_t s = 0; s < 65536; s += L) {
    kd::U32V<L> states;
    for (int i = 0; i < L; ++i) states[i] = s + static_cast<uint32_t>(i);
    const kd::F32V<L> values = kd::DecodeLanes<CB, L>(states);
    for (int i = 0; i < L; ++i) {
      ASSERT_EQ(kd::FloatBits(values[i]),
                kd::FloatBits(kd::f16_to_f32(kd::DecodeState<CB>(states[i]))))
          << "codebook " << CB << " state " << states[i];
    }
  }
}

TEST(CpuVectorTest, LanesDecodeEveryStateOfEveryCodebookExactly) {
  CheckDecodeLanes<kd::kCodebook3Inst, 8>();
  CheckDecodeLanes<kd::kCodebook3Inst, 16>();
  CheckDecodeLanes<kd::kCodebookMcg, 8>();
  CheckDecodeLanes<kd::kCodebookMcg, 16>();
  CheckDecodeLanes<kd::kCodebookMul1, 8>();
  CheckDecodeLanes<kd::kCodebookMul1, 16>();
}

TEST(CpuVectorTest, VectorHadamardHasTheBitsOfTheScalarForm) {
  SplitMix64 random(3);
  std::array<float, 128> scalar;
  for (float& value : scalar) value = static_cast<float>(random.Symmetric());
  std::array<float, 128> eight = scalar;
  std::array<float, 128> sixteen = scalar;
  kd::Hadamard128(scalar.data());
  kd::VectorHadamard128<8>(eight.data());
  kd::VectorHadamard128<16>(sixteen.data());
  EXPECT_EQ(eight, scalar);
  EXPECT_EQ(sixteen, scalar);
}

}  // namespace
}  // namespace kiln
