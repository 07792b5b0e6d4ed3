#include "templates/fused_moe/workload.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "runtime/bundle_format.h"

namespace kiln {
namespace {

RequestGeometry Geometry(DType io = DType::kBf16, DType id = DType::kI64) {
  RequestGeometry geometry;
  geometry.hidden = 256;
  geometry.intermediate = 128;
  geometry.experts = 8;
  geometry.top_k = 3;
  geometry.io_dtype = io;
  geometry.id_dtype = id;
  geometry.weights.bits = {.gate = 2, .up = 3, .down = 5};
  return geometry;
}

std::vector<int64_t> IdsOf(const FusedMoeWorkload& workload, DrawKind kind,
                           uint32_t draw, uint32_t tokens) {
  const std::string bytes = workload.MakeTokens(kind, draw, tokens).topk_ids;
  std::vector<int64_t> ids;
  if (bytes.empty()) return ids;
  if (workload.geometry().id_dtype == DType::kI64) {
    ids.resize(bytes.size() / 8);
    std::memcpy(ids.data(), bytes.data(), bytes.size());
  } else {
    std::vector<int32_t> narrow(bytes.size() / 4);
    std::memcpy(narrow.data(), bytes.data(), bytes.size());
    ids.assign(narrow.begin(), narrow.end());
  }
  return ids;
}

bool IsActive(int64_t id) { return id >= 0 && id < 8; }

constexpr DrawKind kAll[] = {DrawKind::kUniform, DrawKind::kRagged,
                             DrawKind::kZipf,    DrawKind::kHot,
                             DrawKind::kExtreme, DrawKind::kOneTerm};

// What golden replay would compute: finite and of order one, so that no wrong
// instruction hides in an infinity or below the smallest number.
TEST(FusedMoeBuffersTest, GoldenInputsGiveOutputsOfOrderOne) {
  for (const DType io : {DType::kBf16, DType::kF16}) {
    const RequestGeometry geometry = Geometry(io, DType::kI32);
    const std::vector<BufferFill> fills = FusedMoeBuffers(geometry);
    ASSERT_EQ(fills.size(), kFusedMoeParamCount);
    constexpr uint32_t kTokens = 6;
    const std::vector<uint64_t> bytes = FusedMoeBytes(geometry, kTokens);
    std::vector<std::string> buffers(fills.size());
    for (size_t s = 0; s < fills.size(); ++s) {
      const BufferFill& fill = fills[s];
      EXPECT_EQ(fill.bytes + fill.bytes_per_token * kTokens, bytes[s]) << s;
      const bool output = s + 1 == fills.size();
      EXPECT_EQ(fill.kind == BufferFill::Kind::kNone, output) << s;
      for (uint64_t j = 0; j < bytes[s] / fill.element_bytes; ++j) {
        const uint64_t random = kiln_golden_random(static_cast<uint32_t>(s), j);
        const uint64_t value = fill.kind == BufferFill::Kind::kIndices
                                   ? random % fill.a
                                   : (random & fill.a) | fill.b;
        buffers[s].append(reinterpret_cast<const char*>(&value),
                          fill.element_bytes);
      }
    }
    const auto half = [&](FusedMoeParam param) {
      return reinterpret_cast<const uint16_t*>(
          buffers[static_cast<size_t>(param)].data());
    };
    FusedMoeProblem problem;
    problem.tokens = kTokens;
    problem.hidden = geometry.hidden;
    problem.intermediate = geometry.intermediate;
    problem.experts = geometry.experts;
    problem.top_k = geometry.top_k;
    problem.codebook = geometry.weights.codebook;
    problem.bits = geometry.weights.bits;
    problem.shared_scales = geometry.weights.shared_scales;
    problem.x_dtype = geometry.io_dtype;
    problem.id_dtype = geometry.id_dtype;
    problem.x = half(FusedMoeParam::kX);
    problem.topk_ids = half(FusedMoeParam::kTopkIds);
    problem.topk_weights =
        reinterpret_cast<const float*>(half(FusedMoeParam::kTopkWeights));
    problem.w_gate = half(FusedMoeParam::kWGate);
    problem.w_up = half(FusedMoeParam::kWUp);
    problem.w_down = half(FusedMoeParam::kWDown);
    problem.gate_suh = half(FusedMoeParam::kGateSuh);
    problem.up_suh = half(FusedMoeParam::kUpSuh);
    problem.rotations = half(FusedMoeParam::kRotations);
    problem.down_svh = half(FusedMoeParam::kDownSvh);
    std::vector<int64_t> rows(kTokens);
    for (uint32_t t = 0; t < kTokens; ++t) rows[t] = t;
    std::vector<double> out(kTokens * 256);
    FusedMoeReferenceRows(problem, rows, ReferenceMode::kFloat64, out.data(),
                          1);
    double squares = 0;
    for (const double value : out) {
      ASSERT_TRUE(std::isfinite(value));
      squares += value * value;
    }
    const double rms = std::sqrt(squares / static_cast<double>(out.size()));
    EXPECT_GT(rms, 1e-3);
    EXPECT_LT(rms, 1e3);
  }
}

TEST(FusedMoeWorkloadTest, BuffersHaveTheSizesOfTheParameterBlock) {
  for (const DType id : {DType::kI32, DType::kI64}) {
    const FusedMoeWorkload workload(Geometry(DType::kF16, id), 1);
    const std::vector<uint64_t> bytes = FusedMoeBytes(workload.geometry(), 5);
    const FusedMoeWorkload::Tokens tokens =
        workload.MakeTokens(DrawKind::kUniform, 0, 5);
    EXPECT_EQ(tokens.x.size(), bytes[0]);
    EXPECT_EQ(tokens.topk_ids.size(), bytes[1]);
    EXPECT_EQ(tokens.topk_weights.size(), bytes[2]);
    for (uint32_t slot = 0; slot < kFusedMoeParamCount; ++slot) {
      const bool constant = slot >= 3 && slot <= 9;
      EXPECT_EQ(workload.Constant(static_cast<FusedMoeParam>(slot)).size(),
                constant ? bytes[slot] : 0)
          << slot;
    }
  }
}

TEST(FusedMoeWorkloadTest, FewerTokensAreAPrefixOfMore) {
  for (const DrawKind kind : kAll) {
    for (const DType io : {DType::kBf16, DType::kF16}) {
      const FusedMoeWorkload workload(Geometry(io), 9);
      const FusedMoeWorkload::Tokens all = workload.MakeTokens(kind, 4, 33);
      for (const uint32_t m : {1u, 2u, 8u, 32u, 33u}) {
        const FusedMoeWorkload::Tokens some = workload.MakeTokens(kind, 4, m);
        EXPECT_EQ(some.x, all.x.substr(0, some.x.size()));
        EXPECT_EQ(some.topk_ids, all.topk_ids.substr(0, some.topk_ids.size()));
        EXPECT_EQ(some.topk_weights,
                  all.topk_weights.substr(0, some.topk_weights.size()));
      }
    }
  }
}

TEST(FusedMoeWorkloadTest, EqualSeedsGiveEqualInputsAndOthersDiffer) {
  const FusedMoeWorkload a(Geometry(), 1);
  const FusedMoeWorkload b(Geometry(), 1);
  const FusedMoeWorkload c(Geometry(), 2);
  for (uint32_t slot = 3; slot <= 9; ++slot) {
    const auto param = static_cast<FusedMoeParam>(slot);
    EXPECT_EQ(a.Constant(param), b.Constant(param)) << slot;
    EXPECT_NE(a.Constant(param), c.Constant(param)) << slot;
  }
  const auto x = [](const FusedMoeWorkload& workload, uint32_t draw) {
    return workload.MakeTokens(DrawKind::kUniform, draw, 4).x;
  };
  EXPECT_EQ(x(a, 7), x(b, 7));
  EXPECT_NE(x(a, 7), x(a, 8));
  EXPECT_NE(x(a, 7), x(c, 7));
  EXPECT_NE(IdsOf(a, DrawKind::kUniform, 0, 8),
            IdsOf(a, DrawKind::kUniform, 1, 8));
  EXPECT_NE(IdsOf(a, DrawKind::kUniform, 0, 8),
            IdsOf(c, DrawKind::kUniform, 0, 8));
  // Tokens of one call differ too.
  const std::string two = x(a, 0);
  EXPECT_NE(two.substr(0, 512), two.substr(512, 512));
}

TEST(FusedMoeWorkloadTest, InputsAreNumbersOfOrderOne) {
  for (const DType io : {DType::kBf16, DType::kF16}) {
    const FusedMoeWorkload workload(Geometry(io), 3);
    const FusedMoeWorkload::Tokens tokens =
        workload.MakeTokens(DrawKind::kUniform, 0, 50);
    std::vector<float> weights(tokens.topk_weights.size() / 4);
    std::memcpy(weights.data(), tokens.topk_weights.data(),
                tokens.topk_weights.size());
    for (size_t t = 0; t < 50; ++t) {
      float sum = 0;
      for (size_t j = 0; j < 3; ++j) {
        EXPECT_GT(weights[t * 3 + j], 0);
        sum += weights[t * 3 + j];
      }
      EXPECT_NEAR(sum, 1, 1e-5);
    }
    if (io == DType::kF16) continue;
    std::vector<uint16_t> x(tokens.x.size() / 2);
    std::memcpy(x.data(), tokens.x.data(), tokens.x.size());
    double squares = 0;
    for (const uint16_t bits : x) {
      const uint32_t word = static_cast<uint32_t>(bits) << 16;
      float value = 0;
      std::memcpy(&value, &word, 4);
      ASSERT_LE(std::abs(value), 3);
      squares += static_cast<double>(value) * value;
    }
    EXPECT_NEAR(squares / static_cast<double>(x.size()), 1, 0.05);
  }
}

TEST(FusedMoeWorkloadTest, UniformRoutesAreDistinctActiveExperts) {
  const FusedMoeWorkload workload(Geometry(), 5);
  std::set<int64_t> seen;
  const std::vector<int64_t> ids = IdsOf(workload, DrawKind::kUniform, 2, 200);
  for (size_t t = 0; t < 200; ++t) {
    const std::set<int64_t> token(
        ids.begin() + static_cast<int64_t>(t) * 3,
        ids.begin() + static_cast<int64_t>(t) * 3 + 3);
    EXPECT_EQ(token.size(), 3u) << "a token chose an expert twice";
    for (const int64_t id : token) EXPECT_TRUE(IsActive(id)) << id;
    seen.insert(token.begin(), token.end());
  }
  EXPECT_EQ(seen.size(), 8u) << "some expert is never chosen";
}

TEST(FusedMoeWorkloadTest, RaggedRoutesHaveEveryTrouble) {
  for (const DType id_dtype : {DType::kI32, DType::kI64}) {
    const FusedMoeWorkload workload(Geometry(DType::kBf16, id_dtype), 5);
    bool negative = false;
    bool just_outside = false;
    bool far_outside = false;
    int duplicates = 0;
    int dead = 0;
    int active = 0;
    constexpr uint32_t kDraws = 20;
    for (uint32_t draw = 0; draw < kDraws; ++draw) {
      const std::vector<int64_t> ids =
          IdsOf(workload, DrawKind::kRagged, draw, kDistinctTokens);
      bool looks_active_in_32_bits = false;
      for (size_t t = 0; t < kDistinctTokens; ++t) {
        const int64_t* token = ids.data() + t * 3;
        bool any = false;
        for (size_t j = 0; j < 3; ++j) {
          const int64_t id = token[j];
          any = any || IsActive(id);
          active += IsActive(id) ? 1 : 0;
          negative = negative || id < 0;
          just_outside = just_outside || id == 8;
          far_outside = far_outside || id >= INT32_MAX;
          looks_active_in_32_bits =
              looks_active_in_32_bits ||
              (!IsActive(id) && IsActive(static_cast<int32_t>(id)));
          for (size_t other = 0; other < j; ++other) {
            duplicates += IsActive(id) && id == token[other] ? 1 : 0;
          }
        }
        dead += any ? 0 : 1;
        if (t == 5) {
          EXPECT_FALSE(any) << t;
        }
      }
      EXPECT_EQ(looks_active_in_32_bits, id_dtype == DType::kI64) << draw;
    }
    EXPECT_TRUE(negative);
    EXPECT_TRUE(just_outside);
    EXPECT_TRUE(far_outside);
    EXPECT_GE(duplicates, 10);
    EXPECT_LE(dead, 2 * static_cast<int>(kDraws)) << "too little work is left";
    EXPECT_GE(active, static_cast<int>(kDraws * kDistinctTokens * 3 / 2));
  }
}

TEST(FusedMoeWorkloadTest, DrawsForTheVerifierRepeatTheirTokens) {
  const FusedMoeWorkload workload(Geometry(DType::kF16, DType::kI32), 4);
  constexpr size_t kX = 256 * 2;
  for (const DrawKind kind : kAll) {
    const FusedMoeWorkload::Tokens tokens =
        workload.MakeTokens(kind, 1, 3 * kDistinctTokens);
    for (uint32_t t = 0; t < 3 * kDistinctTokens; ++t) {
      const uint32_t first = FirstAlike(kind, t);
      EXPECT_LE(first, t);
      EXPECT_EQ(tokens.x.substr(t * kX, kX), tokens.x.substr(first * kX, kX));
      EXPECT_EQ(tokens.topk_ids.substr(t * 12, 12),
                tokens.topk_ids.substr(first * 12, 12));
      EXPECT_EQ(tokens.topk_weights.substr(t * 12, 12),
                tokens.topk_weights.substr(first * 12, 12));
    }
    const bool repeats = kind != DrawKind::kUniform && kind != DrawKind::kZipf;
    EXPECT_EQ(FirstAlike(kind, kDistinctTokens) == 0, repeats)
        << DrawKindName(kind);
    EXPECT_EQ(
        tokens.x.substr(0, kX) == tokens.x.substr(kDistinctTokens * kX, kX),
        repeats);
  }
}

TEST(FusedMoeWorkloadTest, ZipfRoutesAreDistinctAndPreferTheSameExperts) {
  const FusedMoeWorkload workload(Geometry(), 5);
  std::vector<int> uses(8, 0);
  std::vector<int> other_uses(8, 0);
  for (const uint32_t draw : {0u, 1u}) {
    const std::vector<int64_t> ids =
        IdsOf(workload, DrawKind::kZipf, draw, 400);
    for (size_t t = 0; t < 400; ++t) {
      std::set<int64_t> token;
      for (size_t j = 0; j < 3; ++j) {
        const int64_t id = ids[t * 3 + j];
        ASSERT_TRUE(IsActive(id)) << id;
        token.insert(id);
        ++(draw == 0 ? uses : other_uses)[static_cast<size_t>(id)];
      }
      EXPECT_EQ(token.size(), 3u) << "a token chose an expert twice";
    }
  }
  EXPECT_NE(std::max_element(uses.begin(), uses.end()) - uses.begin(),
            std::max_element(other_uses.begin(), other_uses.end()) -
                other_uses.begin())
      << "two draws have the same popular expert: choose another seed";
  std::sort(uses.begin(), uses.end());
  // The first choice is the most popular one with probability 1 / H(8) = 0.37;
  // of three choices it is among them with about 0.74.
  EXPECT_NEAR(uses[7] / 400.0, 0.74, 0.08);
  EXPECT_LT(uses[0], uses[7] / 2);
  EXPECT_GT(uses[0], 0);
}

TEST(FusedMoeWorkloadTest, HotRoutesAreTheSameFewExpertsInManyOrders) {
  const FusedMoeWorkload workload(Geometry(), 5);
  const std::vector<int64_t> ids =
      IdsOf(workload, DrawKind::kHot, 0, kDistinctTokens);
  const std::set<int64_t> all(ids.begin(), ids.end());
  EXPECT_EQ(all.size(), 3u);
  EXPECT_EQ(workload.ActiveExperts(DrawKind::kHot, 0, 100), 3);
  std::set<std::vector<int64_t>> orders;
  for (size_t t = 0; t < kDistinctTokens; ++t) {
    const std::vector<int64_t> token(
        ids.begin() + static_cast<int64_t>(t) * 3,
        ids.begin() + static_cast<int64_t>(t) * 3 + 3);
    EXPECT_EQ(std::set<int64_t>(token.begin(), token.end()), all);
    orders.insert(token);
  }
  EXPECT_GE(orders.size(), 4u);
}

// Whatever the order of sums is, these rows are the same.
TEST(FusedMoeWorkloadTest, OneTermRowsDoNotDependOnTheOrderOfSums) {
  for (const bool shared : {false, true}) {
    RequestGeometry geometry = Geometry(shared ? DType::kF16 : DType::kBf16);
    geometry.hidden = 1024;
    geometry.weights.shared_scales = shared;
    FusedMoeWorkload workload(geometry, 8);
    std::vector<uint32_t> rows(kDistinctTokens);
    for (uint32_t i = 0; i < kDistinctTokens; ++i) rows[i] = i;
    const auto expected = [&](ReferenceMode mode) {
      return workload.Expected(DrawKind::kOneTerm, 0, rows, 1, mode);
    };
    const std::vector<double> exact = expected(ReferenceMode::kFloat64);
    const std::vector<double> staged = expected(ReferenceMode::kStaged);
    const std::vector<double> sequential = expected(ReferenceMode::kSequential);
    for (const uint32_t row : rows) {
      double norm = 0;
      double from_exact = 0;
      double from_staged = 0;
      for (size_t i = row * 1024; i < (row + 1) * 1024; ++i) {
        norm += exact[i] * exact[i];
        from_exact += std::pow(sequential[i] - exact[i], 2);
        from_staged += std::pow(sequential[i] - staged[i], 2);
      }
      EXPECT_GT(norm, 1024 * 1e-3) << row;
      EXPECT_GT(std::sqrt(from_exact / norm), 2e-4) << row;
      EXPECT_LT(std::sqrt(from_staged / norm), 1e-4) << row;
    }
  }
}

TEST(FusedMoeWorkloadTest, ExtremeRowsAreNanWhereTheirTokenIsAndNowhereElse) {
  for (const DType io : {DType::kBf16, DType::kF16}) {
    FusedMoeWorkload workload(Geometry(io), 8);
    std::vector<uint32_t> rows(kDistinctTokens);
    for (uint32_t i = 0; i < kDistinctTokens; ++i) rows[i] = i;
    const std::vector<double> out =
        workload.Expected(DrawKind::kExtreme, 0, rows, 1);
    const std::set<uint32_t> nan = {3, 7};
    const std::set<uint32_t> zero = {5, 6, 10};
    for (const uint32_t row : rows) {
      for (size_t c = 0; c < 256; ++c) {
        const double value = out[row * 256 + c];
        EXPECT_EQ(std::isnan(value), nan.contains(row)) << row << " " << c;
        EXPECT_EQ(value == 0, zero.contains(row)) << row << " " << c;
      }
    }
    // The staged form neither overflows nor vanishes.
    const std::vector<double> staged = workload.Expected(
        DrawKind::kExtreme, 0, rows, 1, ReferenceMode::kStaged);
    for (const uint32_t row : rows) {
      if (row == 9) continue;  // huge: some results are infinite
      double difference = 0;
      double norm = 0;
      for (size_t c = 0; c < 256; ++c) {
        const double want = out[row * 256 + c];
        const double got = staged[row * 256 + c];
        ASSERT_EQ(std::isnan(got), std::isnan(want)) << row << " " << c;
        if (std::isnan(want)) continue;
        difference += (got - want) * (got - want);
        norm += want * want;
      }
      EXPECT_LE(difference, norm * 1e-4) << row;
    }
  }
}

TEST(FusedMoeWorkloadTest, CountsDistinctActiveExperts) {
  const FusedMoeWorkload workload(Geometry(), 6);
  for (const DrawKind kind : kAll) {
    for (const uint32_t tokens : {0u, 1u, 2u, 6u, 100u}) {
      std::set<int64_t> active;
      for (const int64_t id : IdsOf(workload, kind, 3, tokens)) {
        if (IsActive(id)) active.insert(id);
      }
      EXPECT_EQ(workload.ActiveExperts(kind, 3, tokens),
                static_cast<int64_t>(active.size()));
    }
  }
}

// The oracle called by hand on the same buffers.
std::vector<double> Direct(const FusedMoeWorkload& workload, DrawKind kind,
                           uint32_t draw, uint32_t tokens,
                           const std::vector<int64_t>& rows,
                           ReferenceMode mode = ReferenceMode::kFloat64) {
  const RequestGeometry& geometry = workload.geometry();
  const FusedMoeWorkload::Tokens inputs =
      workload.MakeTokens(kind, draw, tokens);
  const auto words = [&workload](FusedMoeParam param) {
    return reinterpret_cast<const uint16_t*>(workload.Constant(param).data());
  };
  FusedMoeProblem problem;
  problem.tokens = tokens;
  problem.hidden = geometry.hidden;
  problem.intermediate = geometry.intermediate;
  problem.experts = geometry.experts;
  problem.top_k = geometry.top_k;
  problem.codebook = geometry.weights.codebook;
  problem.bits = geometry.weights.bits;
  problem.shared_scales = geometry.weights.shared_scales;
  problem.x_dtype = geometry.io_dtype;
  problem.id_dtype = geometry.id_dtype;
  problem.x = inputs.x.data();
  problem.topk_ids = inputs.topk_ids.data();
  problem.topk_weights =
      reinterpret_cast<const float*>(inputs.topk_weights.data());
  problem.w_gate = words(FusedMoeParam::kWGate);
  problem.w_up = words(FusedMoeParam::kWUp);
  problem.w_down = words(FusedMoeParam::kWDown);
  problem.gate_suh = words(FusedMoeParam::kGateSuh);
  problem.up_suh = words(FusedMoeParam::kUpSuh);
  problem.rotations = words(FusedMoeParam::kRotations);
  problem.down_svh = words(FusedMoeParam::kDownSvh);
  std::vector<double> out(rows.size() * static_cast<size_t>(geometry.hidden));
  FusedMoeReferenceRows(problem, rows, mode, out.data(), 1);
  return out;
}

TEST(FusedMoeWorkloadTest, ExpectedRowsAreTheOraclesWhateverWasAskedBefore) {
  for (const bool shared : {false, true}) {
    RequestGeometry geometry = Geometry(shared ? DType::kF16 : DType::kBf16);
    geometry.weights.shared_scales = shared;
    FusedMoeWorkload workload(geometry, 8);
    for (const DrawKind kind : {DrawKind::kUniform, DrawKind::kRagged}) {
      const std::vector<double> direct =
          Direct(workload, kind, 2, 16, {5, 0, 15, 5});
      // First some of them, so that the rest meets a filled memory.
      const std::vector<uint32_t> one = {15};
      workload.Expected(kind, 2, one, 1);
      const std::vector<uint32_t> rows = {5, 0, 15, 5};
      EXPECT_EQ(workload.Expected(kind, 2, rows, 2), direct);
      EXPECT_EQ(workload.Expected(kind, 2, rows, 1), direct);
      const ReferenceMode staged = ReferenceMode::kStaged;
      EXPECT_EQ(workload.Expected(kind, 2, rows, 1, staged),
                Direct(workload, kind, 2, 16, {5, 0, 15, 5}, staged));
    }
  }
}

TEST(FusedMoeWorkloadTest, DrawsAndRoutingsDoNotShareExpectedRows) {
  FusedMoeWorkload workload(Geometry(), 8);
  const std::vector<uint32_t> rows = {0};
  const std::vector<double> a =
      workload.Expected(DrawKind::kUniform, 0, rows, 1);
  EXPECT_NE(a, workload.Expected(DrawKind::kUniform, 1, rows, 1));
  EXPECT_NE(a, workload.Expected(DrawKind::kRagged, 0, rows, 1));
  EXPECT_EQ(a, workload.Expected(DrawKind::kUniform, 0, rows, 1));
}

TEST(FusedMoeWorkloadTest, OutputsAreOfOrderOneAndDeadTokensAreZero) {
  FusedMoeWorkload workload(Geometry(), 8);
  const std::vector<uint32_t> rows = {0, 5};
  const std::vector<double> out =
      workload.Expected(DrawKind::kRagged, 0, rows, 1);
  double squares = 0;
  for (size_t i = 0; i < 256; ++i) {
    squares += out[i] * out[i];
    EXPECT_EQ(out[256 + i], 0) << "token 5 has no active route";
  }
  EXPECT_GT(squares / 256, 1e-3);
  EXPECT_LT(squares / 256, 100);
}

}  // namespace
}  // namespace kiln
