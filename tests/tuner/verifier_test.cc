#include "tuner/verifier.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/status_matchers.h"
#include "tests/tuner/cpu_programs.h"
#include "tuner/device.h"

namespace kiln {
namespace {

using testing::CompileUnits;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Lt;
using testing::SmallAssignment;
using testing::SmallBody;
using testing::SmallGeometry;
using testing::SmallUnit;
using testing::WhyNoCcCpu;

constexpr uint32_t kCapacity = 8;
// Its ragged draws hold all that the mutants below get wrong; checked there.
constexpr uint64_t kSeed = 3;

// ---- pure parts ------------------------------------------------------------

TEST(SampleRowsTest, AreAllRowsWhileTheyAreFew) {
  EXPECT_THAT(SampleRows(1, 8), ElementsAre(0));
  EXPECT_THAT(SampleRows(3, 8), ElementsAre(0, 1, 2));
  EXPECT_THAT(SampleRows(8, 8), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
}

TEST(SampleRowsTest, AreDistinctAscendingAndHoldTheEdges) {
  for (const uint32_t m : {9u, 16u, 17u, 33u, 100u, 4096u, 65536u}) {
    for (const uint32_t count : {2u, 8u, 64u}) {
      const std::vector<uint32_t> rows = SampleRows(m, count);
      EXPECT_EQ(rows.size(), std::min(m, count)) << m << " " << count;
      EXPECT_TRUE(std::is_sorted(rows.begin(), rows.end()));
      EXPECT_EQ(std::set<uint32_t>(rows.begin(), rows.end()).size(),
                rows.size());
      EXPECT_THAT(rows, Each(Lt(m)));
      EXPECT_EQ(rows.front(), 0u);
      EXPECT_EQ(rows.back(), m - 1);
    }
  }
}

TEST(VerifyCasesTest, CoverTheEdgesAndBothRoutingsOfEveryInterval) {
  for (const Interval interval :
       {Interval{1, 1}, Interval{2, 2}, Interval{1, 2}, Interval{3, 4},
        Interval{1, 8}, Interval{9, 16}, Interval{2049, 4096}}) {
    const std::vector<VerifyCase> cases = VerifyCases(interval);
    std::set<uint32_t> sizes;
    std::set<Routing> at_capacity;
    std::set<Routing> repeated;
    std::set<uint32_t> draws;
    for (const VerifyCase& test : cases) {
      sizes.insert(test.m);
      draws.insert(test.draw);
      EXPECT_GE(test.m, interval.m_min);
      EXPECT_LE(test.m, interval.m_max);
      EXPECT_FALSE(test.rows.empty());
      EXPECT_THAT(test.rows, Each(Lt(test.m)));
      if (test.m == interval.m_max) at_capacity.insert(test.routing);
      if (test.repeat) repeated.insert(test.routing);
    }
    EXPECT_TRUE(sizes.contains(interval.m_min));
    EXPECT_TRUE(sizes.contains(interval.m_max));
    EXPECT_GE(sizes.size(), std::min(interval.m_max - interval.m_min, 2u) + 1);
    EXPECT_EQ(at_capacity.size(), 2u) << interval.m_max;
    EXPECT_EQ(repeated.size(), 2u) << interval.m_max;
    EXPECT_EQ(draws.size(), cases.size()) << "cases share inputs";
  }
}

TEST(VerifyCasesTest, AreTheSameEveryTime) {
  const auto text = [](const Interval& interval) {
    std::string all;
    for (const VerifyCase& test : VerifyCases(interval)) {
      absl::StrAppend(&all, test.ToString(), test.repeat, "\n");
    }
    return all;
  };
  EXPECT_EQ(text({5, 64}), text({5, 64}));
  EXPECT_THAT(text({17, 17}), HasSubstr("m=17 ragged routes"));
}

// ---- CheckOutput on outputs made by hand -----------------------------------

class CheckOutputTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kTokens = 20;
  static constexpr uint32_t kRoom = 32;

  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(const Target target, HostCpuTarget());
    ASSERT_OK_AND_ASSIGN(device_, OpenCpuDevice(target));
    ASSERT_OK_AND_ASSIGN(
        bench_, OpBench::Create(device_.get(), SmallGeometry(), kSeed));
    ASSERT_OK(bench_->Reserve(kRoom, 1024));
    ASSERT_OK(bench_->output().Poison());
    ASSERT_OK(bench_->arena().Poison());
    test_.m = kTokens;
    test_.routing = Routing::kRagged;
    test_.draw = 1;
    test_.rows = {0, 5, 19};  // row 5 has no active route
    std::vector<uint32_t> all(kTokens);
    for (uint32_t i = 0; i < kTokens; ++i) all[i] = i;
    const std::vector<double> expected =
        bench_->workload().Expected(test_.routing, test_.draw, all, 1);
    for (size_t i = 0; i < expected.size(); ++i) {
      Out()[i] = static_cast<float>(expected[i]);
    }
  }

  float* Out() { return static_cast<float*>(bench_->output().data()); }

  size_t Width() { return static_cast<size_t>(SmallGeometry().hidden); }

  VerifyResult Check(double tolerance = 1e-6) {
    VerifyResult result;
    const absl::StatusOr<std::vector<float>> rows =
        CheckOutput(bench_.get(), test_, tolerance, 1, &result);
    EXPECT_OK(rows);
    EXPECT_EQ(rows.ok() ? rows->size() : 0, kTokens * Width());
    return result;
  }

  void ExpectRejected(const std::string& reason, double tolerance = 1e-6) {
    const VerifyResult result = Check(tolerance);
    EXPECT_FALSE(result.passed);
    EXPECT_THAT(result.reason, HasSubstr(reason));
    EXPECT_THAT(result.reason, HasSubstr("m=20 ragged routes, draw 1: "));
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<OpBench> bench_;
  VerifyCase test_;
};

TEST_F(CheckOutputTest, AcceptsTheOraclesOwnRows) {
  const VerifyResult result = Check();
  EXPECT_TRUE(result.passed) << result.reason;
  EXPECT_LT(result.worst_error, 1e-6);
}

TEST_F(CheckOutputTest, RejectsARowBeyondTheTolerance) {
  for (size_t i = 0; i < Width(); ++i) Out()[19 * Width() + i] *= 1.003f;
  ExpectRejected("row 19 has relative error 0.003", 2e-3);
  EXPECT_TRUE(Check(4e-3).passed);
}

TEST_F(CheckOutputTest, RejectsOneWrongElementOfARow) {
  Out()[0] = -Out()[0];
  ExpectRejected("row 0 has relative error", 2e-3);
}

TEST_F(CheckOutputTest, RejectsATinyNumberWhereTheAnswerIsZero) {
  Out()[5 * Width() + 3] = 1e-30f;
  ExpectRejected("row 5 has relative error inf", 2e-3);
}

TEST_F(CheckOutputTest, RejectsAnElementThatWasNotWritten) {
  std::memset(&Out()[7 * Width() + 9], 0xFF, sizeof(float));  // not sampled
  ExpectRejected("row 7, column 9 was not written");
}

TEST_F(CheckOutputTest, RejectsNonNumbersInRowsThatAreNotSampled) {
  Out()[7 * Width() + 9] = std::numeric_limits<float>::quiet_NaN();
  ExpectRejected("row 7, column 9 is not finite");
  Out()[7 * Width() + 9] = -std::numeric_limits<float>::infinity();
  ExpectRejected("row 7, column 9 is not finite");
}

TEST_F(CheckOutputTest, RejectsAWriteToTheFirstRowBehind) {
  Out()[20 * Width()] = 0;
  ExpectRejected("row 20, column 0 was written, but lies behind");
}

TEST_F(CheckOutputTest, RejectsAWriteToTheLastRowOfTheBuffer) {
  Out()[kRoom * Width() - 1] = 0;
  ExpectRejected("row 31, column 255 was written, but lies behind");
}

TEST_F(CheckOutputTest, RejectsWritesAroundTheBuffers) {
  Out()[-1] = 0;
  ExpectRejected("output: wrote 4 bytes before the buffer's start");
  ASSERT_OK(bench_->output().Poison());
  Out()[kRoom * Width()] = 0;
  ExpectRejected("output: wrote up to 4 bytes behind the buffer's end");
  ASSERT_OK(bench_->output().Poison());
  auto* arena = static_cast<char*>(bench_->arena().data());
  arena[1024] = 1;
  ExpectRejected("arena: wrote up to 1 bytes behind the buffer's end");
  ASSERT_OK(bench_->arena().Poison());
  arena[-256] = 1;
  ExpectRejected("arena: wrote 256 bytes before the buffer's start");
}

TEST_F(CheckOutputTest, ReportsTheFirstFinding) {
  VerifyResult result;
  Out()[7 * Width()] = NAN;
  ASSERT_OK(CheckOutput(bench_.get(), test_, 1e-6, 1, &result));
  const std::string first = result.reason;
  Out()[-1] = 0;
  ASSERT_OK(CheckOutput(bench_.get(), test_, 1e-6, 1, &result));
  EXPECT_EQ(result.reason, first);
}

TEST_F(CheckOutputTest, RestoresInputsThatWereWritten) {
  ASSERT_OK_AND_ASSIGN(const size_t set,
                       bench_->AddInputs(Routing::kUniform, 0, 3));
  const std::vector<uint64_t> params = bench_->Params(set);
  const auto slot = [&params](FusedMoeParam param) {
    return reinterpret_cast<char*>(params[static_cast<size_t>(param)]);
  };
  EXPECT_THAT(bench_->RestoreTokens(), testing::IsOkAndHolds(""));
  EXPECT_THAT(bench_->RestoreConstants(), testing::IsOkAndHolds(""));
  EXPECT_OK(bench_->CheckInputs());

  slot(FusedMoeParam::kTopkWeights)[5] ^= 1;
  slot(FusedMoeParam::kDownSvh)[7] ^= 1;
  EXPECT_THAT(
      bench_->CheckInputs(),
      testing::StatusIs(absl::StatusCode::kInternal, HasSubstr("down_svh")));
  EXPECT_THAT(bench_->RestoreTokens(),
              testing::IsOkAndHolds(HasSubstr("topk_weights was written")));
  EXPECT_THAT(bench_->RestoreConstants(),
              testing::IsOkAndHolds(HasSubstr("down_svh was written")));
  EXPECT_OK(bench_->CheckInputs());
}

// ---- real candidates, and what is wrong with some --------------------------

// One textual change to fused_moe/cpu.cc that makes it wrong. "@CAPACITY_ROWS@"
// is replaced by kCapacity, "@DOWN_OUT_END@" by the elements of the arena's
// last slice.
struct Mutant {
  const char* name;
  const char* find;
  const char* replace;
};

constexpr Mutant kMutants[] = {
    {"gate and up change places", "gate[c] = kd::Silu(gate[c]) * up[c];",
     "gate[c] = kd::Silu(up[c]) * gate[c];"},
    {"the activation is missing", "gate[c] = kd::Silu(gate[c]) * up[c];",
     "gate[c] = gate[c] * up[c];"},
    {"the last route of a token is dropped",
     "for (u32 j = 0; j < kTopK; ++j) {",
     "for (u32 j = 0; j + 1 < kTopK; ++j) {"},
    {"router weights are ignored",
     "kd::Splat<kLanes>(args.topk_weights[route])",
     "kd::Splat<kLanes>(1.0f / kTopK)"},
    {"ids outside are folded into range",
     "id >= 0 && id < static_cast<i64>(kExperts) ? static_cast<i32>(id)",
     "true ? static_cast<i32>(static_cast<u64>(id) % kExperts)"},
    {"64-bit ids are cut to 32 bits",
     "const i64 id = static_cast<const i64*>(ids)[route];",
     "const i64 id = static_cast<i32>(static_cast<const i64*>(ids)[route]);"},
    {"duplicate experts of a token count once",
     "const i64 id = static_cast<const i64*>(ids)[route];",
     "const i64 id = static_cast<const i64*>(ids)[route];\n"
     "  if (route % kTopK != 0 &&\n"
     "      static_cast<const i64*>(ids)[route - 1] == id) return -1;"},
    {"the ragged tile of an expert is forgotten",
     "for (u32 row = 0; row < count; row += kRows) {",
     "for (u32 row = 0; row + kRows <= count; row += kRows) {"},
    {"inactive routes rely on what the arena held", "args.route_slot[r] = -1;",
     ";"},
    {"the last k step is skipped", "for (u32 k = 0; k < k_size; k += kDepth) {",
     "for (u32 k = 0; k + kDepth < k_size; k += kDepth) {"},
    {"rows of packed weights are too close",
     "static_cast<u64>(n_size / 16) * kd::kTileWords<K>;\n    const u32* words",
     "static_cast<u64>(n_size / 16 - 1) * kd::kTileWords<K>;\n"
     "    const u32* words"},
    {"weights of another expert", "static_cast<u64>(expert) * expert_words",
     "static_cast<u64>(expert ^ 1) * expert_words"},
    {"all experts share the first one's scales",
     "return static_cast<u64>(expert) * kHidden;",
     "return static_cast<u64>(expert) * 0;"},
    {"operands lose four bits of mantissa",
     "kd::Store(out + c, kd::ToHalves<kLanes>(kd::Load<F>(v + c)));",
     "kd::Store(out + c, kd::ToHalves<kLanes>(kd::Load<F>(v + c)) &\n"
     "                       static_cast<u16>(0xFFF0));"},
    {"the output is added to", "F sum[kBlock / kLanes] = {};",
     "F sum[kBlock / kLanes];\n"
     "    for (u32 i = 0; i < kBlock / kLanes; ++i) {\n"
     "      sum[i] = kd::Load<F>(args.out + static_cast<u64>(token) * kHidden "
     "+\n"
     "                           base + i * kLanes);\n"
     "    }"},
    {"tokens without a route are not written",
     "float* out = args.out + static_cast<u64>(token) * kHidden + base;",
     "bool any = false;\n"
     "    for (u32 j = 0; j < kTopK; ++j) {\n"
     "      any |= args.route_slot[static_cast<u64>(token) * kTopK + j] >= 0;\n"
     "    }\n"
     "    if (!any) return;\n"
     "    float* out = args.out + static_cast<u64>(token) * kHidden + base;"},
    {"the row behind the last is written",
     "kd::Store(out + i * kLanes, sum[i]);",
     "kd::Store(out + i * kLanes, sum[i]);\n"
     "      if (token == 3) kd::Store(out + kHidden + i * kLanes, sum[i]);"},
    {"a row far behind the last is written",
     "kd::Store(out + i * kLanes, sum[i]);",
     "kd::Store(out + i * kLanes, sum[i]);\n"
     "      if (token == 0) args.out[@CAPACITY_ROWS@ * kHidden - 1] = 0;"},
    {"the output buffer is overrun", "kd::Store(out + i * kLanes, sum[i]);",
     "kd::Store(out + i * kLanes, sum[i]);\n"
     "      if (token == 0) args.out[@CAPACITY_ROWS@ * kHidden + 3] = 0;"},
    {"the arena is overrun", "  MultiplyStrip<KILN_BITS_DOWN>(",
     "  args.down_out[@DOWN_OUT_END@] = 1;\n  MultiplyStrip<KILN_BITS_DOWN>("},
    {"the arena is underrun", "u32 tiles = 0;\n",
     "u32 tiles = 0;\n  args.tile_expert[-1] = 7;\n"},
    {"results depend on what the arena held",
     "kd::Splat<kLanes>(args.topk_weights[route])",
     "kd::Splat<kLanes>(args.topk_weights[route] *\n"
     "          (args.down_out[@DOWN_OUT_END@ - 1] == 0xFFFF ? 1.0001f : "
     "1.0f))"},
    {"router weights are written",
     "const F weight = kd::Splat<kLanes>(args.topk_weights[route]);",
     "const F weight = kd::Splat<kLanes>(args.topk_weights[route]);\n"
     "      if (base + kBlock == kHidden) {\n"
     "        const_cast<float*>(args.topk_weights)[route] = 0.5f;\n"
     "      }"},
    {"scales lose their last bit",
     "float* out = args.out + static_cast<u64>(token) * kHidden + base;",
     "for (u32 i = 0; i < 16; ++i) {\n"
     "      const_cast<u16*>(args.down_svh)[i] &= 0xFFFE;\n"
     "    }\n"
     "    float* out = args.out + static_cast<u64>(token) * kHidden + base;"},
};

class VerifierTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNoCcCpu(); !why.empty()) GTEST_SKIP() << why;
    ASSERT_OK_AND_ASSIGN(const Target target, HostCpuTarget());
    ASSERT_OK_AND_ASSIGN(device_, OpenCpuDevice(target));
    ASSERT_OK_AND_ASSIGN(
        bench_, OpBench::Create(device_.get(), SmallGeometry(), kSeed));
    ASSERT_OK_AND_ASSIGN(
        body_, SmallBody(SmallGeometry(), kCapacity, SmallAssignment()));
    ASSERT_OK(bench_->Reserve(kCapacity, body_.arena.bytes));
  }

  // The verdict on the program, by Verify.
  absl::StatusOr<VerifyResult> VerdictOn(
      const std::shared_ptr<const Program>& program) {
    absl::StatusOr<LoadedPlan> plan = LoadedPlan::Load(
        device_.get(), SmallGeometry(), kCapacity, body_, {program});
    if (!plan.ok()) return plan.status();
    return Verify(bench_.get(), *plan, body_, VerifyCases({1, kCapacity}), 2);
  }

  std::string Concrete(const char* text) {
    return absl::StrReplaceAll(
        text, {{"@CAPACITY_ROWS@", absl::StrCat(kCapacity)},
               {"@DOWN_OUT_END@",
                absl::StrCat(body_.arena.slices.back().bytes / 2)}});
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<OpBench> bench_;
  PlanBody body_;
};

// What the mutants need in order to show themselves.
TEST_F(VerifierTest, TheInputsContainWhatTheMutantsGetWrong) {
  ASSERT_EQ(body_.arena.slices.back().name, "down_out");
  ASSERT_EQ(body_.arena.slices.back().offset + body_.arena.slices.back().bytes,
            body_.arena.bytes)
      << "the arena ends in padding: an overrun would go unseen";
  bool outside32 = false;
  bool duplicate = false;
  for (const VerifyCase& test : VerifyCases({1, kCapacity})) {
    const FusedMoeWorkload::Tokens tokens =
        bench_->workload().MakeTokens(test.routing, test.draw, test.m);
    std::vector<int64_t> ids(tokens.topk_ids.size() / 8);
    std::memcpy(ids.data(), tokens.topk_ids.data(), tokens.topk_ids.size());
    for (size_t r = 0; r < ids.size(); r += 2) {
      for (const int64_t id : {ids[r], ids[r + 1]}) {
        const auto cut = static_cast<int32_t>(id);
        outside32 =
            outside32 || (id >= int64_t{1} << 32 && cut >= 0 && cut < 4);
      }
      duplicate = duplicate || (ids[r] == ids[r + 1] && ids[r] >= 0 &&
                                ids[r] < SmallGeometry().experts);
    }
  }
  EXPECT_TRUE(outside32) << "choose another kSeed";
  EXPECT_TRUE(duplicate) << "choose another kSeed";
}

TEST_F(VerifierTest, AcceptsTheTemplateAndRejectsEveryMutant) {
  const SourceUnit whole = SmallUnit(SmallGeometry(), SmallAssignment());
  std::vector<SourceUnit> units = {whole};
  for (const Mutant& mutant : kMutants) {
    SourceUnit unit = whole;
    const size_t at = unit.text.find(mutant.find);
    ASSERT_NE(at, std::string::npos)
        << mutant.name << ": the text to replace is gone";
    ASSERT_EQ(unit.text.find(mutant.find, at + 1), std::string::npos)
        << mutant.name << ": the text to replace occurs twice";
    unit.text.replace(at, std::strlen(mutant.find), Concrete(mutant.replace));
    units.push_back(unit);
  }
  const auto programs = CompileUnits(units);
  ASSERT_OK(programs[0]);
  ASSERT_OK_AND_ASSIGN(const VerifyResult verdict, VerdictOn(*programs[0]));
  ASSERT_TRUE(verdict.passed) << verdict.reason;
  EXPECT_GT(verdict.worst_error, 0);
  EXPECT_LT(verdict.worst_error, kFusedMoeTolerance);
  EXPECT_EQ(verdict.launches, 6u) << "four cases, two of them repeated";

  for (size_t i = 0; i < std::size(kMutants); ++i) {
    SCOPED_TRACE(kMutants[i].name);
    ASSERT_OK(programs[i + 1]) << "a mutant must compile";
    ASSERT_OK_AND_ASSIGN(const VerifyResult found, VerdictOn(*programs[i + 1]));
    EXPECT_FALSE(found.passed) << "the verifier let it through";
    EXPECT_NE(found.reason, "");
    std::printf("  %-45s %s\n", kMutants[i].name, found.reason.c_str());
    // Whatever a mutant did to the inputs is undone for the next candidate.
    ASSERT_OK(bench_->CheckInputs());
  }
  // The bench still accepts the right program after all of them.
  ASSERT_OK_AND_ASSIGN(const VerifyResult again, VerdictOn(*programs[0]));
  EXPECT_TRUE(again.passed) << again.reason;
}

TEST_F(VerifierTest, AToleranceThatRoundingExceedsRejects) {
  const auto programs =
      CompileUnits({SmallUnit(SmallGeometry(), SmallAssignment())});
  ASSERT_OK(programs[0]);
  body_.tolerance = 1e-6;
  ASSERT_OK_AND_ASSIGN(const VerifyResult verdict, VerdictOn(*programs[0]));
  EXPECT_FALSE(verdict.passed);
  EXPECT_THAT(verdict.reason, HasSubstr("at most 1e-06 is allowed"));
}

}  // namespace
}  // namespace kiln
