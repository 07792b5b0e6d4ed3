#include "tuner/verifier.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/fused_moe/op.h"
#include "templates/registry.h"
#include "tests/support/status_matchers.h"
#include "tests/tuner/cpu_programs.h"
#include "tuner/device.h"

namespace kiln {
namespace {

using testing::CompileUnits;
using ::testing::ContainsRegex;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Lt;
using testing::SmallAssignment;
using testing::SmallBody;
using testing::SmallGeometry;
using testing::SmallUnit;
using ::testing::UnorderedElementsAre;
using testing::WhyNoCcCpu;

constexpr uint32_t kCapacity = 8;
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

TEST(OracleRowsTest, AreAllDistinctTokensOrASample) {
  EXPECT_THAT(OracleRows(DrawKind::kHot, 4, 8), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(OracleRows(DrawKind::kUniform, 4, 8), ElementsAre(0, 1, 2, 3));
  for (const DrawKind kind : {DrawKind::kRagged, DrawKind::kHot,
                              DrawKind::kExtreme, DrawKind::kOneTerm}) {
    const std::vector<uint32_t> rows = OracleRows(kind, 4096, 8);
    EXPECT_EQ(rows.size(), kDistinctTokens);
    EXPECT_EQ(rows.back(), kDistinctTokens - 1);
  }
  EXPECT_EQ(OracleRows(DrawKind::kZipf, 4096, 8), SampleRows(4096, 8));
}

TEST(VerifyCasesTest, CoverTheEdgesAndAllRoutingsOfEveryInterval) {
  for (const Interval interval :
       {Interval{1, 1}, Interval{2, 2}, Interval{1, 2}, Interval{3, 4},
        Interval{1, 8}, Interval{9, 16}, Interval{2049, 4096}}) {
    const std::vector<VerifyCase> cases = VerifyCases(interval);
    std::set<uint32_t> sizes;
    std::set<DrawKind> at_capacity;
    std::set<DrawKind> repeated;
    std::set<DrawKind> all;
    std::set<std::pair<DrawKind, uint32_t>> inputs;
    for (const VerifyCase& test : cases) {
      sizes.insert(test.m);
      all.insert(test.kind);
      inputs.insert({test.kind, test.m});
      EXPECT_GE(test.m, interval.m_min);
      EXPECT_LE(test.m, interval.m_max);
      EXPECT_FALSE(test.rows.empty());
      EXPECT_THAT(test.rows, Each(Lt(test.m)));
      if (test.m == interval.m_max) at_capacity.insert(test.kind);
      if (test.repeat) repeated.insert(test.kind);
    }
    EXPECT_TRUE(sizes.contains(interval.m_min));
    EXPECT_TRUE(sizes.contains(interval.m_max));
    EXPECT_GE(sizes.size(), std::min(interval.m_max - interval.m_min, 2u) + 1);
    EXPECT_THAT(at_capacity,
                UnorderedElementsAre(DrawKind::kUniform, DrawKind::kRagged,
                                     DrawKind::kExtreme, DrawKind::kOneTerm))
        << interval.m_max;
    EXPECT_THAT(repeated,
                UnorderedElementsAre(DrawKind::kRagged, DrawKind::kExtreme));
    const bool has_interior = interval.m_max - interval.m_min >= 3;
    EXPECT_GE(all.size(), has_interior ? 6u : 4u);
    EXPECT_EQ(inputs.size(), cases.size()) << "cases share inputs";
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
  EXPECT_THAT(text({17, 17}), HasSubstr("m=17 ragged draw 0"));
}

TEST(PromiseTest, IsWhatTheNumericsClassSays) {
  const Promise cpu = PromiseOf("w4a16.f16.sequential", 2e-3, true);
  EXPECT_EQ(cpu.mode, ReferenceMode::kSequential);
  EXPECT_EQ(cpu.row_error_max, 0);
  EXPECT_EQ(cpu.tolerance, 2e-3);
  const Promise cuda = PromiseOf("w4a16.f16.fc1x4.fc2x1", 2e-3, true);
  EXPECT_EQ(cuda.mode, ReferenceMode::kStaged);
  EXPECT_GT(cuda.row_error_max, 0);
  EXPECT_LT(cuda.row_error_max, 2e-3);
  EXPECT_LT(cuda.case_error_max, cuda.row_error_max);
  for (const char* name : {"mx.w4a16.fold32", "qsrt.w4a16.sequential"}) {
    const Promise half = PromiseOf(name, 2e-3, true);
    EXPECT_EQ(half.oracle, ReferenceMode::kFloat64) << name;
    EXPECT_EQ(half.mode, ReferenceMode::kSequential) << name;
    EXPECT_EQ(half.row_error_max, 0) << name;
  }
  for (const char* name : {"mx.w4a8.fold32", "qsrt.w4a8.sequential"}) {
    const Promise quantised = PromiseOf(name, 4e-3, true);
    EXPECT_EQ(quantised.oracle, ReferenceMode::kStagedW4A8) << name;
    EXPECT_EQ(quantised.mode, ReferenceMode::kSequentialW4A8) << name;
    EXPECT_EQ(quantised.row_error_max, 0) << name;
  }
  const Promise direct = PromiseOf("mx.w4a8rp2.fold32", 4e-3, true);
  EXPECT_EQ(direct.oracle, ReferenceMode::kFloat64);
  EXPECT_EQ(direct.mode, ReferenceMode::kSequentialW4A8Rp2);
  EXPECT_EQ(direct.row_error_max, 0);
  // The order of sums of a tensor core is its own: bounds, not bits.
  const Promise smallm_mma =
      PromiseOf("mx.w4a16.fold32.mma.fc1x4.fc2x1", 2e-3, true);
  EXPECT_EQ(smallm_mma.oracle, ReferenceMode::kFloat64);
  EXPECT_EQ(smallm_mma.mode, ReferenceMode::kStaged);
  EXPECT_EQ(smallm_mma.row_error_max, 2e-3);
  const Promise grouped_mma =
      PromiseOf("mx.w4a8.fold32.mma.fc1x1.fc2x1", 1e-2, true);
  EXPECT_EQ(grouped_mma.oracle, ReferenceMode::kStagedW4A8);
  EXPECT_EQ(grouped_mma.mode, ReferenceMode::kStagedW4A8);
  EXPECT_EQ(grouped_mma.row_error_max, 1e-2);
  const Promise direct_mma =
      PromiseOf("mx.w4a8rp2.fold32.mma.fc1x2.fc2x1", 4e-3, true);
  EXPECT_EQ(direct_mma.oracle, ReferenceMode::kFloat64);
  EXPECT_EQ(direct_mma.mode, ReferenceMode::kStagedW4A8Rp2);
  EXPECT_EQ(direct_mma.row_error_max, 4e-3);
  const Promise w4a16 = PromiseOf("qsrt.w4a16.mma.fc1x2.fc2x1", 2e-3, true);
  EXPECT_EQ(w4a16.oracle, ReferenceMode::kFloat64);
  EXPECT_EQ(w4a16.mode, ReferenceMode::kStaged);
  EXPECT_EQ(w4a16.row_error_max, 2e-3);
  for (const char* name :
       {"qsrt.w4a8.mma.fc1x1.fc2x2", "qsrt.w4a8.qmma.fold32.fc1x1.fc2x2",
        "mx.w4a8.qmma.fold32.fc1x1.fc2x2",
        "mx.w4a8.qmma.scaled64.fc1x1.fc2x2"}) {
    const Promise w4a8 = PromiseOf(name, 2e-2, true);
    EXPECT_EQ(w4a8.oracle, ReferenceMode::kStagedW4A8) << name;
    EXPECT_EQ(w4a8.mode, ReferenceMode::kStagedW4A8) << name;
    EXPECT_EQ(w4a8.row_error_max, 2e-2) << name;
  }
  const Promise unknown = PromiseOf("w8a8.f8", 1e-2, true);
  EXPECT_EQ(unknown.mode, ReferenceMode::kStaged);
  EXPECT_EQ(unknown.row_error_max, 1e-2);
  EXPECT_EQ(unknown.case_error_max, 1e-2);
}

// Every template's candidates of arms that quantise activations to one term,
// on every kind of target.
TEST(PromiseTest, CandidatesOfW4A8AreHeldToQuantisedActivations) {
  RequestGeometry mx;
  mx.hidden = 512;
  mx.intermediate = 256;
  mx.experts = 8;
  mx.top_k = 2;
  mx.recipe = Recipe::kW4A8;
  mx.weights.format = WeightFormat::kTrellisMx;
  mx.weights.bits = {.gate = 3, .up = 3, .down = 3};
  mx.mx = {.limit = "10"};
  RequestGeometry qsrt = mx;
  qsrt.weights = {};
  qsrt.weights.format = WeightFormat::kQsrt;
  qsrt.mx = {};
  qsrt.qsrt.decode_max_tokens = 16;
  std::set<std::string> names;
  for (const RequestGeometry& geometry : {mx, qsrt}) {
    for (const KernelTemplate* from : AllTemplates()) {
      if (from->op() != Op::kFusedMoe ||
          from->format() != geometry.weights.format) {
        continue;
      }
      for (const Target& target :
           {Target{Backend::kCpu, 3, false}, Target{Backend::kCuda, 89, false},
            Target{Backend::kCuda, 90, true},
            Target{Backend::kCuda, 120, true}}) {
        if (target.backend != from->backend() ||
            !from->Supports(geometry, target).ok()) {
          continue;
        }
        Problem problem;
        problem.geometry = geometry;
        problem.interval = {9, 16};
        problem.device = AssumedProfile(target);
        for (const Assignment& point : from->Enumerate(problem, 8).points) {
          ASSERT_OK_AND_ASSIGN(const PlanBody body,
                               from->MakeBody(problem, point));
          EXPECT_EQ(
              PromiseOf(body.numerics_class, body.tolerance, body.deterministic)
                  .oracle,
              ReferenceMode::kStagedW4A8)
              << body.numerics_class;
          names.insert(body.template_name);
        }
      }
    }
  }
  EXPECT_THAT(names,
              UnorderedElementsAre("fused_moe.mx_cpu", "fused_moe.mx_cuda",
                                   "fused_moe.mx_qmma", "fused_moe.qsrt_cpu",
                                   "fused_moe.qsrt_cuda"));
}

TEST(ArenaZonesTest, LieBehindEverySliceAndChangeNothingElse) {
  PlanBody body;
  body.arena.Add("a", 100);
  body.arena.Add("b", 256);
  body.arena.Add("c", 1);
  const PlanBody zoned = WithArenaZones(body);
  ASSERT_EQ(zoned.arena.slices.size(), 3u);
  uint64_t end = 0;
  for (size_t i = 0; i < 3; ++i) {
    const ArenaSlice& slice = zoned.arena.slices[i];
    EXPECT_EQ(slice.name, body.arena.slices[i].name);
    EXPECT_EQ(slice.bytes, body.arena.slices[i].bytes);
    EXPECT_EQ(slice.offset % kArenaAlignment, 0u);
    if (i > 0) {
      EXPECT_GE(slice.offset, end + 4096);
    }
    end = slice.offset + slice.bytes;
  }
  EXPECT_GE(zoned.arena.bytes, end + 4096);
  PlanBody rest = zoned;
  rest.arena = body.arena;
  EXPECT_EQ(rest, body);
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
    test_.draw = 1;
    test_.rows = {0, 5, 19};
    Answer(ReferenceMode::kFloat64);
  }

  // The right output of `test_`.
  void Answer(ReferenceMode mode) {
    std::vector<uint32_t> all(kTokens);
    for (uint32_t i = 0; i < kTokens; ++i) all[i] = i;
    const std::vector<double> expected =
        bench_->workload().Expected(test_.kind, test_.draw, all, 1, mode);
    for (size_t i = 0; i < expected.size(); ++i) {
      Out()[i] = static_cast<float>(expected[i]);
    }
  }

  void Choose(DrawKind kind, ReferenceMode mode) {
    test_.kind = kind;
    test_.rows = OracleRows(kind, kTokens, 3);
    Answer(mode);
  }

  float* Out() { return static_cast<float*>(bench_->output().data()); }

  size_t Width() { return static_cast<size_t>(SmallGeometry().hidden); }

  VerifyResult Check(double tolerance = 1e-6,
                     const std::string& numerics_class = "unknown",
                     bool deterministic = true) {
    VerifyResult result;
    const absl::StatusOr<std::vector<float>> rows = CheckOutput(
        bench_.get(), test_,
        PromiseOf(numerics_class, tolerance, deterministic), 1, &result);
    EXPECT_OK(rows);
    EXPECT_EQ(rows.ok() ? rows->size() : 0, kTokens * Width());
    return result;
  }

  void ExpectRejected(const std::string& reason, double tolerance = 1e-6,
                      const std::string& numerics_class = "unknown") {
    const VerifyResult result = Check(tolerance, numerics_class);
    EXPECT_FALSE(result.passed);
    EXPECT_THAT(result.reason, HasSubstr(reason));
    EXPECT_THAT(result.reason,
                HasSubstr(absl::StrCat("m=20 ", DrawKindName(test_.kind),
                                       " draw 1: ")));
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<OpBench> bench_;
  VerifyCase test_;
};

TEST_F(CheckOutputTest, AcceptsTheOraclesOwnRows) {
  const VerifyResult result = Check();
  EXPECT_TRUE(result.passed) << result.reason;
  EXPECT_LT(result.worst_error, 1e-6);
  EXPECT_NEAR(result.worst_cosine, 1, 1e-12);
}

// A cosine does not see a factor, and an error does; a turned row both see.
TEST_F(CheckOutputTest, MeasuresTheCosineOfTheWorstRow) {
  for (size_t i = 0; i < Width(); ++i) Out()[i] *= 1.003f;
  VerifyResult result = Check(4e-3);
  EXPECT_TRUE(result.passed) << result.reason;
  EXPECT_NEAR(result.worst_error, 3e-3, 1e-6);
  EXPECT_NEAR(result.worst_cosine, 1, 1e-12);

  // Row 5 and an orthogonal hundredth of its length.
  float* row = Out() + 5 * Width();
  for (size_t i = 0; i < Width(); i += 2) {
    const float first = row[i];
    row[i] += 0.01f * row[i + 1];
    row[i + 1] -= 0.01f * first;
  }
  result = Check(2e-2);
  EXPECT_TRUE(result.passed) << result.reason;
  EXPECT_NEAR(result.worst_error, 1e-2, 1e-6);
  EXPECT_NEAR(result.worst_cosine, 1 / std::sqrt(1.0001), 1e-9);
}

TEST_F(CheckOutputTest, RejectsARowBeyondTheTolerance) {
  for (size_t i = 0; i < Width(); ++i) Out()[19 * Width() + i] *= 1.003f;
  ExpectRejected("row 19 has relative error 0.003", 2e-3);
  // What is told of a run that failed is what was measured.
  EXPECT_NEAR(Check(2e-3).worst_error, 3e-3, 1e-6);
  EXPECT_TRUE(Check(4e-3).passed);
  for (size_t i = 0; i < Width(); ++i) Out()[19 * Width() + i] = 0;
  const VerifyResult zeros = Check(2e-3);
  EXPECT_NEAR(zeros.worst_error, 1, 1e-6);
  EXPECT_LT(zeros.worst_cosine, 0.5);
}

TEST_F(CheckOutputTest, RejectsOneWrongElementOfARow) {
  Out()[0] = -Out()[0];
  ExpectRejected("row 0 has relative error", 2e-3);
}

TEST_F(CheckOutputTest, RejectsATinyNumberWhereTheAnswerIsZero) {
  Choose(DrawKind::kRagged, ReferenceMode::kStaged);
  EXPECT_TRUE(Check(1e-3).passed);
  Out()[5 * Width() + 3] = 1e-30f;  // token 5 has no active route
  Out()[18 * Width() + 3] = 1e-30f;
  ExpectRejected("row 5 has relative error inf", 2e-3);
}

TEST_F(CheckOutputTest, RejectsEqualTokensWithOtherRows) {
  Choose(DrawKind::kHot, ReferenceMode::kStaged);
  EXPECT_TRUE(Check(1e-3).passed);
  // Row 19 repeats row 6; both are within the tolerance.
  Out()[19 * Width() + 7] *= 1 + 2e-7f;
  ExpectRejected("row 19, column 7 is ", 1e-3);
}

// Sums without an order leave equal tokens a few last bits apart, and no more.
TEST_F(CheckOutputTest, EqualTokensMayDifferByTheOrderOfSumsWhereItIsOpen) {
  Choose(DrawKind::kHot, ReferenceMode::kStaged);
  float* const row = Out() + 19 * Width();
  for (size_t i = 0; i < Width(); ++i) row[i] *= i % 2 == 0 ? 1.000002f : 1;
  EXPECT_FALSE(Check(1e-3).passed);
  const VerifyResult near = Check(1e-3, "unknown", false);
  EXPECT_TRUE(near.passed) << near.reason;
  for (size_t i = 0; i < Width(); ++i) row[i] *= i % 2 == 0 ? 1.0001f : 1;
  const VerifyResult far = Check(1e-3, "unknown", false);
  EXPECT_FALSE(far.passed);
  EXPECT_THAT(far.reason, HasSubstr("but the equal token 6 has"));
  row[7] = std::nanf("");
  EXPECT_FALSE(Check(1e-3, "unknown", false).passed);
}

TEST_F(CheckOutputTest, AClassThatPromisesBitsIsHeldToThem) {
  const char* const kBits = "w4a16.f16.sequential";
  for (const DrawKind kind : {DrawKind::kRagged, DrawKind::kZipf,
                              DrawKind::kHot, DrawKind::kExtreme}) {
    Choose(kind, ReferenceMode::kSequential);
    const VerifyResult right = Check(2e-3, kBits);
    EXPECT_TRUE(right.passed) << right.reason;
    const uint32_t first = test_.rows[1];
    const float other = std::nextafter(Out()[first * Width() + 7], 100.0f);
    for (uint32_t row = first; row < kTokens; ++row) {
      if (FirstAlike(kind, row) == first) Out()[row * Width() + 7] = other;
    }
    ExpectRejected(absl::StrCat("row ", test_.rows[1], ", column 7 is "), 2e-3,
                   kBits);
  }
}

// What one skipped rounding costs is far below the tolerance.
TEST_F(CheckOutputTest, AClassThatPromisesRoundingBoundariesIsHeldToThem) {
  const char* const kBoundaries = "w4a16.f16.fc1x2.fc2x1";
  for (const DrawKind kind : {DrawKind::kRagged, DrawKind::kHot}) {
    Choose(kind, ReferenceMode::kSequential);  // another order of sums
    const VerifyResult right = Check(2e-3, kBoundaries);
    EXPECT_TRUE(right.passed) << right.reason;
    EXPECT_GT(right.worst_case_error, 0);
    Choose(kind, ReferenceMode::kFloat64);  // no rounding at all
    EXPECT_TRUE(Check(2e-3, "unknown").passed);
    ExpectRejected("rounding boundaries", 2e-3, kBoundaries);
  }
  // Where the order of sums hardly matters, much less is allowed.
  Choose(DrawKind::kOneTerm, ReferenceMode::kSequential);
  EXPECT_LT(Check(2e-3, kBoundaries).worst_one_term_error, 1e-4);
  EXPECT_GT(Check(2e-3, kBoundaries).worst_one_term_error, 0);
}

TEST_F(CheckOutputTest, NotANumberBelongsWhereTheAnswerIsNone) {
  Choose(DrawKind::kExtreme, ReferenceMode::kStaged);
  EXPECT_TRUE(Check(1e-3).passed);
  float* const nan = &Out()[3 * Width() + 9];
  ASSERT_TRUE(std::isnan(*nan));
  Out()[16 * Width() + 9] = 0.5f;
  *nan = 0.5f;
  ExpectRejected("row 3, column 9 is 0.5 instead of nan", 1e-3);
  Choose(DrawKind::kExtreme, ReferenceMode::kStaged);
  Out()[12 * Width() + 9] = std::numeric_limits<float>::quiet_NaN();
  ExpectRejected("row 12 has relative error nan", 1e-3);
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
  ASSERT_OK(
      CheckOutput(bench_.get(), test_, PromiseOf("", 1e-6, true), 1, &result));
  const std::string first = result.reason;
  Out()[-1] = 0;
  ASSERT_OK(
      CheckOutput(bench_.get(), test_, PromiseOf("", 1e-6, true), 1, &result));
  EXPECT_EQ(result.reason, first);
}

TEST_F(CheckOutputTest, RestoresInputsThatWereWritten) {
  ASSERT_OK_AND_ASSIGN(const size_t set,
                       bench_->AddInputs(DrawKind::kUniform, 0, 3));
  const std::vector<uint64_t> params = bench_->Params(set);
  const auto slot = [&params](FusedMoeParam param) {
    return reinterpret_cast<char*>(params[static_cast<size_t>(param)]);
  };
  EXPECT_THAT(bench_->RestoreTokens(set), testing::IsOkAndHolds(""));
  EXPECT_THAT(bench_->RestoreInputs(), testing::IsOkAndHolds(""));
  EXPECT_OK(bench_->CheckInputs());

  slot(FusedMoeParam::kTopkWeights)[5] ^= 1;
  slot(FusedMoeParam::kDownSvh)[7] ^= 1;
  EXPECT_THAT(
      bench_->CheckInputs(),
      testing::StatusIs(absl::StatusCode::kInternal, HasSubstr("down_svh")));
  EXPECT_THAT(bench_->RestoreTokens(set),
              testing::IsOkAndHolds(HasSubstr("topk_weights was written")));
  EXPECT_THAT(bench_->RestoreInputs(),
              testing::IsOkAndHolds(HasSubstr("down_svh was written")));
  EXPECT_OK(bench_->CheckInputs());
  // A write before an input; behind it nothing can be written.
  slot(FusedMoeParam::kX)[-1] = 0;
  EXPECT_THAT(bench_->RestoreTokens(set),
              testing::IsOkAndHolds(HasSubstr(
                  "input x: wrote 1 bytes before the buffer's start")));
  EXPECT_OK(bench_->CheckInputs());
}

using CheckOutputDeathTest = CheckOutputTest;

TEST_F(CheckOutputDeathTest, AnInputEndsWhereTheProcessMayNotRead) {
  ASSERT_OK_AND_ASSIGN(const size_t set,
                       bench_->AddInputs(DrawKind::kUniform, 0, 3));
  const std::vector<uint64_t> params = bench_->Params(set);
  const std::vector<uint64_t> bytes = FusedMoeBytes(SmallGeometry(), 3);
  for (uint32_t slot = 0; slot + 1 < kFusedMoeParamCount; ++slot) {
    const auto* const begin = reinterpret_cast<const char*>(params[slot]);
    const volatile char* const end = begin + bytes[slot];
    const volatile char* const far_before = begin - (32 << 20);
    EXPECT_EQ(end[-1], begin[bytes[slot] - 1]);
    EXPECT_DEATH(static_cast<void>(*end), "") << slot;
    // A neighbouring expert's weights are not there either.
    EXPECT_DEATH(static_cast<void>(*far_before), "") << slot;
  }
}

// ---- real candidates; wrong ones are in mutants/ ---------------------------

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
    body_ = WithArenaZones(body_);
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

  std::unique_ptr<Device> device_;
  std::unique_ptr<OpBench> bench_;
  PlanBody body_;
};

TEST_F(VerifierTest, AcceptsTheTemplateAndStillDoesAfterAWrongCandidate) {
  const SourceUnit right = SmallUnit(SmallGeometry(), SmallAssignment());
  SourceUnit wrong = right;
  const std::string find = "args.topk_weights[route]);";
  const size_t at = wrong.text.find(find);
  ASSERT_NE(at, std::string::npos);
  wrong.text.insert(
      at + find.size(),
      "\n      const_cast<u16*>(args.down_svh)[j] = 0;"
      "\n      const_cast<float*>(args.topk_weights)[route] = 1;");
  const auto programs = CompileUnits({right, wrong});
  ASSERT_OK(programs[0]);
  ASSERT_OK(programs[1]);
  for (int round = 0; round < 2; ++round) {
    ASSERT_OK_AND_ASSIGN(const VerifyResult verdict, VerdictOn(*programs[0]));
    EXPECT_TRUE(verdict.passed) << verdict.reason;
    EXPECT_GT(verdict.worst_error, 0);
    EXPECT_LT(verdict.worst_error, kFusedMoeTolerance);
    EXPECT_EQ(verdict.worst_staged_error, 0) << "bit for bit";
    EXPECT_EQ(verdict.launches, 9u) << "seven cases, two of them repeated";
    ASSERT_OK_AND_ASSIGN(const VerifyResult found, VerdictOn(*programs[1]));
    EXPECT_FALSE(found.passed) << "the verifier let it through";
    // Whatever it did to the inputs is undone for the next candidate.
    ASSERT_OK(bench_->CheckInputs());
  }
}

TEST_F(VerifierTest, AToleranceThatRoundingExceedsRejects) {
  const auto programs =
      CompileUnits({SmallUnit(SmallGeometry(), SmallAssignment())});
  ASSERT_OK(programs[0]);
  body_.tolerance = 1e-6;
  ASSERT_OK_AND_ASSIGN(const VerifyResult verdict, VerdictOn(*programs[0]));
  EXPECT_FALSE(verdict.passed);
  EXPECT_THAT(
      verdict.reason,
      ContainsRegex("row [0-9]+ has relative error [0-9.e-]+ against the "
                    "float64 oracle, at most 1e-06 is allowed"));
  // There is no luck: five runs are five times the same finding.
  for (int run = 2; run <= 5; ++run) {
    ASSERT_OK_AND_ASSIGN(const VerifyResult again, VerdictOn(*programs[0]));
    EXPECT_EQ(again.reason, verdict.reason) << run;
  }
}

// A class that leaves the order of sums open accepts the CPU's order, and none
// of the sums in another precision.
TEST_F(VerifierTest, AnotherClassAcceptsTheSameBits) {
  const auto programs =
      CompileUnits({SmallUnit(SmallGeometry(), SmallAssignment())});
  ASSERT_OK(programs[0]);
  body_.numerics_class = "w4a16.f16.fc1x1.fc2x1";
  ASSERT_OK_AND_ASSIGN(const VerifyResult verdict, VerdictOn(*programs[0]));
  EXPECT_TRUE(verdict.passed) << verdict.reason;
  EXPECT_GT(verdict.worst_case_error, 0);
}

}  // namespace
}  // namespace kiln
