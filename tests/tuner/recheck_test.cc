// A stored winner that is slower than the default must be found out, and one
// that is not must pass.

#include "tuner/recheck.h"

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "templates/registry.h"
#include "tests/support/golden.h"
#include "tests/support/status_matchers.h"
#include "tests/tuner/cpu_programs.h"
#include "tuner/conclusion.h"

namespace kiln {
namespace {

using testing::CcCpuPath;
using testing::CompileUnits;
using testing::ScratchFolder;
using testing::WhyNoCcCpu;

constexpr char kManifest[] = R"({
 "schema": "kiln.model/1", "name": "Small",
 "requests": [
  {"name": "moe", "op": "fused_moe", "layers": 2,
   "hidden": 256, "intermediate": 128, "experts": 4, "top_k": 2,
   "activation": "silu", "io_dtype": "bf16", "id_dtype": "i64",
   "weights": {"format": "exl3", "codebook": "mcg", "bits": 4},
   "recipe": "w4a16", "capacities": [1]}]})";

class Silence : public ProgressSink {
 public:
  void Update(Stage, size_t, size_t, const std::string&) override {}

  void Note(const std::string&) override {}
};

class RecheckTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNoCcCpu(); !why.empty()) GTEST_SKIP() << why;
    ASSERT_OK_AND_ASSIGN(manifest_, ParseManifest(kManifest, "small.json"));
    ASSERT_OK_AND_ASSIGN(const Target target, HostCpuTarget());
    options_.targets = {target};
    options_.candidates_max = 1;
    options_.toolchain = [](Backend, ProbeMemo* memo) {
      return ProbeCcCpu(CcCpuPath(), memo);
    };
    ASSERT_OK_AND_ASSIGN(
        PlanCache cache,
        PlanCache::Open(scratch_.path(), CacheMode::kReadWrite));
    cache_ = std::make_unique<PlanCache>(std::move(cache));
    ASSERT_OK_AND_ASSIGN(resolved_,
                         ResolveManifest(manifest_, options_, cache_.get()));
    ASSERT_EQ(resolved_.intervals.size(), 1u);
    const ResolvedInterval& interval = resolved_.intervals[0];
    ASSERT_OK_AND_ASSIGN(planned_, interval.planner->Plan(interval.interval));
    Store(planned_.candidates[0].body, &default_programs_);
  }

  // Compiles the program of a body and puts it into the cache.
  void Store(const PlanBody& body, std::vector<Digest>* programs) {
    const KernelTemplate* from = FindTemplate(body.template_name);
    ASSERT_NE(from, nullptr);
    const auto compiled = CompileUnits(from->MakeUnits(
        resolved_.intervals[0].geometry, options_.targets[0], body.assignment));
    for (const auto& program : compiled) {
      ASSERT_OK(program);
      ASSERT_OK(cache_->PutPrograms({**program}));
      programs->push_back((*program)->key.digest);
    }
  }

  // Stores `body` as the winner over the default.
  void Crown(const PlanBody& body, const std::vector<Digest>& programs) {
    Plan plan;
    plan.geometry = resolved_.intervals[0].geometry;
    plan.target = options_.targets[0];
    plan.interval = resolved_.intervals[0].interval;
    plan.body = body;
    plan.programs = programs;
    plan.evidence.state = PlanState::kMeasured;
    plan.evidence.median_ns = 1000;
    plan.evidence.default_median_ns = 2000;
    std::vector<Measurement> evidence(2);
    evidence[0].label = planned_.candidates[0].body.Label();
    evidence[0].candidate = planned_.candidates[0].digest;
    evidence[0].verdict = Verdict::kLost;
    evidence[0].samples = {{0, 2000}};
    evidence[1].label = body.Label();
    evidence[1].candidate = CandidateDigest(body, programs);
    evidence[1].verdict = Verdict::kWon;
    evidence[1].samples = {{0, 1000}};
    ASSERT_OK(cache_->PutPlan(resolved_.intervals[0].key, plan, evidence));
  }

  ScratchFolder scratch_;
  Manifest manifest_;
  PrewarmOptions options_;
  std::unique_ptr<PlanCache> cache_;
  ResolvedManifest resolved_;
  IntervalPlan planned_;
  std::vector<Digest> default_programs_;
  Silence silence_;
};

// Sixteen rows per tile for one token: fifteen are multiplied in vain.
TEST_F(RecheckTest, AWinnerThatIsSlowerIsFoundOut) {
  const Problem problem = {resolved_.intervals[0].geometry,
                           resolved_.intervals[0].interval,
                           resolved_.contexts[0].profile};
  Assignment slow = planned_.candidates[0].body.assignment;
  ASSERT_NE(slow["tokens_tile"], 16);
  slow["tokens_tile"] = 16;
  ASSERT_OK_AND_ASSIGN(
      const PlanBody body,
      planned_.candidates[0].kernel_template->MakeBody(problem, slow));
  std::vector<Digest> programs;
  Store(body, &programs);
  Crown(body, programs);
  ASSERT_OK_AND_ASSIGN(const RecheckReport report,
                       Recheck(manifest_, options_, cache_.get(), &silence_));
  ASSERT_EQ(report.intervals.size(), 1u);
  EXPECT_EQ(report.slower, 1u);
  EXPECT_TRUE(report.intervals[0].slower);
  EXPECT_GT(report.intervals[0].ratio, 1.1);
  EXPECT_EQ(report.intervals[0].winner, body.Label());
}

TEST_F(RecheckTest, TheDefaultNeedsNoSecondMeasurement) {
  Crown(planned_.candidates[0].body, default_programs_);
  ASSERT_OK_AND_ASSIGN(const RecheckReport report,
                       Recheck(manifest_, options_, cache_.get(), &silence_));
  EXPECT_EQ(report.same, 1u);
  EXPECT_TRUE(report.intervals.empty());
}

TEST_F(RecheckTest, WhatWasNeverRacedIsSkipped) {
  ASSERT_OK_AND_ASSIGN(const RecheckReport report,
                       Recheck(manifest_, options_, cache_.get(), &silence_));
  EXPECT_EQ(report.skipped, 1u);
  EXPECT_EQ(report.slower, 0u);
}

}  // namespace
}  // namespace kiln
